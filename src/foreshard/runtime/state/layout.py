"""A plan from the point of view of a rank: its stage, layers and samples, and who shares its parameters.

Pure data from a Plan; nothing here communicates or imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foreshard.errors import SpecError
from foreshard.graph.pipeline_schedules import stage_order
from foreshard.spec.checks import check_structure
from foreshard.spec.plan import Group, Plan, Stage, acting

RUN_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
RUN_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank's place in a plan.

    `inner` is its data-parallel part of the stage, `tensor` its place among the ranks that compute the
    samples of that part together.
    """

    group: int
    stage: int
    inner: int
    tensor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A plan and the seat of every rank in it."""

    plan: Plan
    seats: Mapping[int, Seat]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.plan.groups[0].num_layers

    def group_of(self, rank: int) -> Group:
        """Return the pipeline a rank works in."""
        return self.plan.groups[self.seats[rank].group]

    def stage_of(self, rank: int) -> Stage:
        """Return the stage a rank works in."""
        seat = self.seats[rank]
        return self.plan.groups[seat.group].stages[seat.stage]

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """Return the layers a rank holds, in the order of its chunks; none if the plan leaves it idle."""
        if rank not in self.seats:
            return ()
        return tuple(layer for start, stop in self.stage_of(rank).layers for layer in range(start, stop))

    def cuts_sequence(self, rank: int) -> bool:
        """Return whether a rank holds a part of the sequence between the matrix products of its layers."""
        return rank in self.seats and self.group_of(rank).sp and self.stage_of(rank).tp > 1

    def first_position(self, group: int) -> int:
        """Return where in a step's samples a group's share begins."""
        return sum(g.share for g in self.plan.groups[:group])


def layout_of(plan: Plan) -> RankLayout:
    """Return the layout of a plan, if the runtime can run every feature of it."""
    _check_supported(plan)
    seats = {
        rank: Seat(group=g, stage=s, inner=i // stage.tp, tensor=i % stage.tp)
        for g, group in enumerate(plan.groups)
        for s, stage in enumerate(group.stages)
        for i, rank in enumerate(stage.ranks)
    }
    return RankLayout(plan=plan, seats=seats)


def check_runnable(plan: Plan, *, file: str | None = None) -> None:
    """Raise at the first rule that keeps the runtime from running a plan, whatever the model is."""
    try:
        layout_of(plan)
        check_structure(plan, file=file)
        for group in plan.groups:
            _order_of(group)
    except SpecError as error:
        error.file = error.file or file
        raise


def _order_of(group: Group) -> None:
    """Raise where the schedule has no order for so many stages, chunks and micro-batches."""
    stage_order(
        group.schedule,
        num_stages=len(group.stages),
        num_chunks=group.num_chunks,
        num_micro_batches=group.num_micro_batches,
    )


def intervals(total: int, weights: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut 0..total at the running sums of the weights, rounded down: a short batch keeps the proportions.

    Examples
    --------
    >>> intervals(8, [1, 1, 2])
    ((0, 2), (2, 4), (4, 8))
    >>> intervals(3, [1, 1, 2])
    ((0, 0), (0, 1), (1, 3))
    """
    whole, seen, bounds = sum(weights), 0, [0]
    for weight in weights:
        seen += weight
        bounds.append(total * seen // whole)
    return tuple(pairwise(bounds))


def samples_of(stage: Stage, count: int) -> tuple[tuple[int, int], ...]:
    """Return the part of a micro-batch of `count` samples that each data-parallel part of a stage takes."""
    return intervals(count, stage.rank_shares or (1,) * stage.inner_dp)


def micro_batches(group: Group) -> tuple[tuple[int, int], ...]:
    """Return each micro-batch of a step as positions within the group's share; the last may be short."""
    size = group.micro_batch
    return tuple((lo, min(lo + size, group.share)) for lo in range(0, group.share, size))


def ranks_of(ranks: Sequence[int], inner: int, degree: int) -> tuple[int, ...]:
    """Return the ranks of a stage that compute the same samples together."""
    return tuple(ranks[inner * degree : (inner + 1) * degree])


def sends_parts(group: Group, one: Stage, other: Stage) -> bool:
    """Return whether messages between two stages are parts of the sequence, one for each pair of ranks."""
    return group.sp and one.tp == other.tp > 1


def _check_supported(plan: Plan) -> None:
    """Raise for features that the runtime does not run: none is approximated in silence."""
    if plan.precision not in RUN_PRECISIONS:
        raise _unsupported("precision", plan.precision, f"the runtime trains in {', '.join(RUN_PRECISIONS)}")
    never = {
        "attention": (plan.attention, "the layers of the job call their own attention"),
        "fp8_recipe": (plan.fp8_recipe, "the runtime has no 8-bit products"),
        "dispatcher": (plan.dispatcher, "the runtime sends no tokens to experts"),
        "overrides": (plan.overrides.stated() or None, "the runtime keeps its own dtypes and launches"),
        "compile": (plan.compile or None, "the runtime compiles no layers of the job"),
    }
    for key, (value, reason) in never.items():
        if value is not None:
            raise _unsupported(key, value, reason)
    for key, size in (("prefetch", plan.prefetch), ("wrap", plan.wrap)):
        if size not in (None, 1):
            raise _unsupported(key, size, "the runtime gathers layer by layer, one ahead")
    _check_overlap(plan)
    for g, group in enumerate(plan.groups):
        where = f"groups[{g}]"
        if group.schedule not in RUN_SCHEDULES:
            reason = f"the runtime runs {', '.join(RUN_SCHEDULES)}"
            raise _unsupported(f"{where}.schedule", group.schedule, reason)
        if group.schedule == "interleaved" or group.num_chunks > 1:
            try:
                _order_of(group)
            except SpecError as error:
                error.key = f"{where}.{error.key}"
                raise
        for s, stage in enumerate(group.stages):
            _check_stage(stage, f"{where}.stages[{s}]")


def _check_overlap(plan: Plan) -> None:
    """Raise for a switch of overlap whose value the runtime does not do."""
    levels = {stage.zero for group in plan.groups for stage in group.stages if stage.inner_dp > 1}
    sharded, gathered_late = bool(levels & {2, 3}), bool(levels & {1, 2})
    done = {
        ("tp_overlap", True): "sums of tensor-parallel ranks end before the next product begins",
        ("p2p_overlap", False): "stages send beside computation",
        ("grad_overlap", True): sharded and "zero 2 and 3 reduce gradients between backward passes",
        ("param_gather_overlap", True): gathered_late
        and "zero 1 and 2 gather weights before the next forward",
        ("param_gather_overlap", False): 3 in levels and "zero 3 gathers a layer while one computes",
    }
    for name, value in acting(plan, plan.comm).items():
        if rule := done.get((name, value)):
            fix = f"State {str(not value).lower()}, or leave it out; flags of foreshard plan do too"
            what = f"{name} {str(value).lower()} is not run"
            raise SpecError(what, key=f"comm.{name}", value=value, rule=f"In the runtime {rule}", fix=fix)


def _check_stage(stage: Stage, where: str) -> None:
    for name in ("cp", "ep", "etp"):
        if getattr(stage, name) != 1:
            reason = "the runtime runs stages of data- and tensor-parallel ranks"
            raise _unsupported(f"{where}.{name}", getattr(stage, name), reason)
    if len(stage.ranks) % stage.tp:
        rule = "Every data-parallel part of a stage has tp ranks"
        fix = f"Give the stage a multiple of {stage.tp} ranks"
        what = f"tp {stage.tp} does not divide {len(stage.ranks)} ranks"
        raise SpecError(what, key=f"{where}.tp", value=stage.tp, rule=rule, fix=fix)
    if stage.offload != "none":
        raise _unsupported(f"{where}.offload", stage.offload, "the runtime keeps everything on the device")
    if stage.recompute.startswith("selective"):
        reason = "the runtime recomputes whole layers: none, full[:uniform:N|:block:N], every-N"
        raise _unsupported(f"{where}.recompute", stage.recompute, reason)
    if stage.shard_size not in (None, stage.inner_dp):
        reason = "the runtime shards over all data-parallel parts of a stage"
        raise _unsupported(f"{where}.shard_size", stage.shard_size, reason)


def _unsupported(key: str, value: object, reason: str) -> SpecError:
    fix = "Change the plan, or export it to a framework (foreshard export)"
    return SpecError(f"{value!r} is not supported", key=key, value=value, rule=reason, fix=fix)


def shares_updates(stage: Stage) -> bool:
    """Return whether each rank of a stage updates only some of its parameters."""
    return stage.zero >= 1 and stage.inner_dp > 1


def receiver_counts(plan: Plan) -> tuple[int, ...]:
    """Return how many ranks need the same tensor of a message between stages, in rising order.

    Examples
    --------
    >>> from foreshard.spec.plan_file import parse_plan
    >>> ends = [{"ranks": [0], "layers": [[0, 1]]}, {"ranks": [1, 2], "tp": 2, "layers": [[1, 2]]}]
    >>> groups = [{"share": 4, "stages": ends}]
    >>> receiver_counts(parse_plan({"global_batch": 4, "seq_len": 1, "groups": groups}))
    (1, 2)
    """
    found = set()
    for group in plan.groups:
        count = len(group.stages)
        for virtual in range(count * group.num_chunks - 1):
            ends = group.stages[virtual % count], group.stages[(virtual + 1) % count]
            found |= {1} if sends_parts(group, *ends) else {stage.tp for stage in ends}
    return tuple(sorted(found))
