"""A plan as most frameworks can say it: one set of degrees for every replica and every stage.

Frameworks lay ranks out with tp fastest, then cp, then dp, and pp slowest, and give every replica the same
samples. `uniform` finds the degrees of a plan that is so, in one group or in several equal ones, and names
all that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import fixed_overlaps, offers_of
from foreshard.interop.exporters.exported import ExportRequest, reject_if
from foreshard.spec.plan import WHOLE_MODEL, Group, Plan

Span = tuple[int, int]
NCCL_ALGORITHMS = {"ring": ("Ring",), "tree": ("Tree", "NVLS", "NVLSTree")}
"""NCCL's algorithms of all-reduces, as NCCL_ALGO takes them, for the `collectives` of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Degrees and options that hold for every replica."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    micro_batch: int  # per data-parallel rank and pass
    num_micro_batches: int
    spans: tuple[tuple[Span, ...], ...]  # layers [stage][virtual stage], half open, 0 the embedding
    zero: int  # 0 where a plan asks for sharding over one rank
    shard_size: int  # ranks of dp x cp that share one copy of what `zero` shards
    recompute: str
    offload: str
    schedule: str
    sp: bool
    ranks: tuple[int, ...]  # device of each rank, in the order of frameworks: pp slowest, then dp, cp, tp

    @property
    def num_blocks(self) -> int:
        """Transformer blocks: all layers less embedding and head."""
        return max(stop for stage in self.spans for _, stop in stage) - 2

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same weights if nothing is sharded: dp x cp."""
        return self.dp * self.cp

    def chunks(self) -> tuple[Span, ...]:
        """Return the layers of each virtual stage in the order in which a sample passes them."""
        return tuple(stage[chunk] for chunk in range(self.vpp) for stage in self.spans)

    def even_blocks(self) -> bool:
        """Return whether every virtual stage has the same number of blocks."""
        last = self.num_blocks + 1
        return len({min(stop, last) - max(start, 1) for start, stop in self.chunks()}) == 1


Gaps = Callable[[ExportRequest, Uniform], Iterable[str]]
"""Reasons why a target would not train as the plan says."""


def uniform(plan: Plan) -> tuple[Uniform | None, tuple[str, ...]]:
    """Return the plan's degrees, or None and the reasons why one set of degrees does not describe it."""
    reasons = tuple(dict.fromkeys((*_groups_alike(plan), *_stages_alike(plan), *_samples_divide(plan))))
    return (None, reasons) if reasons else (_degrees(plan), ())


def required_uniform(request: ExportRequest, *gaps: Gaps) -> Uniform:
    """Return the plan's degrees; raise SpecError where it has not one set of them, or for what gaps yield."""
    degrees, reasons = uniform(request.plan)
    reject_if(request.target, reasons)
    assert degrees is not None
    reject_if(request.target, (reason for gap in gaps for reason in gap(request, degrees)))
    return degrees


def _groups_alike(plan: Plan) -> list[str]:
    found = []
    first = plan.groups[0]
    shares = [group.share for group in plan.groups]
    if len(set(shares)) > 1:
        found.append(f"groups take {_some(shares)} samples of a step, every replica takes the same share")
    if len({_shape(group) for group in plan.groups}) > 1:
        found.append("groups differ in stages, layers or degrees, every replica is cut the same way")
    for name in ("micro_batch", "schedule", "sp"):
        values = [getattr(group, name) for group in plan.groups]
        if any(value != getattr(first, name) for value in values):
            found.append(f"groups differ in {name} ({_some(values)})")
    return found


def _shape(group: Group) -> tuple[object, ...]:
    options = attrgetter("layers", *_SAME)
    return tuple((len(stage.ranks), *options(stage)) for stage in group.stages)


_SAME = ("tp", "cp", "ep", "etp", "zero", "shard_size", "recompute", "offload")


def _stages_alike(plan: Plan) -> list[str]:
    found = []
    for group in plan.groups:
        for name in (*_SAME, "inner_dp"):
            values = [getattr(stage, name) for stage in group.stages]
            if len(set(values)) > 1:
                found.append(f"stages differ in {name} ({_some(values)})")
        for stage in group.stages:
            if stage.rank_shares is not None and len(set(stage.rank_shares)) > 1:
                found.append(f"ranks of a stage take {_some(stage.rank_shares)} samples of a micro-batch")
    return found


def _samples_divide(plan: Plan) -> list[str]:
    found = []
    for group in plan.groups:
        if group.share % group.micro_batch:
            found.append(f"the last micro-batch of a share of {group.share} is short of {group.micro_batch}")
        for stage in group.stages:
            if group.micro_batch % stage.inner_dp:
                found.append(
                    f"micro-batches of {group.micro_batch} do not divide over {stage.inner_dp} ranks"
                )
    return found


def _some(values: object) -> str:
    distinct = list(dict.fromkeys(map(str, values)))  # type: ignore[call-overload]
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")


def _degrees(plan: Plan) -> Uniform:
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    shard_size = stage.shard_size or stage.inner_dp * stage.cp
    return Uniform(
        dp=stage.inner_dp * len(plan.groups),
        tp=stage.tp,
        pp=len(group.stages),
        cp=stage.cp,
        ep=stage.ep,
        etp=stage.etp,
        vpp=group.num_chunks,
        micro_batch=group.micro_batch // stage.inner_dp,
        num_micro_batches=group.num_micro_batches,
        spans=tuple(stage.layers for stage in group.stages),
        zero=stage.zero if shard_size > 1 else 0,
        shard_size=shard_size,
        recompute=stage.recompute,
        offload=stage.offload,
        schedule=group.schedule,
        sp=group.sp,
        ranks=tuple(
            rank
            for s in range(len(group.stages))
            for replica in plan.groups
            for rank in replica.stages[s].ranks
        ),
    )


def placement_note(plan: Plan) -> tuple[str, ...]:
    """Return what to do where the plan's devices are not in the order in which launchers number ranks."""
    degrees, _ = uniform(plan)
    ranks = degrees.ranks if degrees else plan.ranks
    if ranks == tuple(range(len(ranks))):
        return ()
    if sorted(ranks) == list(range(len(ranks))):
        return (
            "The plan places ranks on devices in another order than launchers do: ranks 0, 1, 2, ... run on "
            f"devices {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}. Order the hosts "
            "accordingly, or the run trains the same at another speed.",
        )
    return (f"The plan uses {len(ranks)} devices and leaves others idle; launch on those it names only.",)


def option_gaps(plan: Plan, framework: str, *, writes: Iterable[str] = ()) -> Iterator[str]:
    """Yield a gap where a framework has no such scales of 8-bit operands, dispatcher or override.

    `writes` are the overrides that its files can set.
    """
    own = load_framework(framework)
    offers = offers_of(own)
    for name, value in plan.overrides.stated().items():
        if name not in writes and value != getattr(own, name):
            yield f"{name} {_said(value)} (it has {_said(getattr(own, name))})"
    if plan.fp8_recipe is not None and plan.fp8_recipe not in offers.fp8_recipes:
        yield f"{plan.fp8_recipe} scales (it has {', '.join(offers.fp8_recipes)})"
    if plan.dispatcher is not None and plan.dispatcher not in offers.dispatchers:
        yield f"dispatcher {plan.dispatcher} (it has {', '.join(offers.dispatchers)})"


def _said(value: object) -> str:
    """Return a setting in words: switches are on or off."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def overlap_gaps(plan: Plan, framework: str) -> Iterator[str]:
    """Yield a gap for each option of communication that a framework has no switch for."""
    for name in fixed_overlaps(plan, load_framework(framework)):
        yield f"{name} {'on' if plan.comm[name] else 'off'} (it has no switch for it)"


def wire_notes(plan: Plan, target: str) -> tuple[str, ...]:
    """Return how to set what of a plan no file of the target states: algorithm, bucket size and others."""
    notes = []
    if plan.attention is not None:
        notes.append(
            f"Attention is {plan.attention}: set --attention-backend of Megatron, attn_implementation of "
            "transformers, or the tool's own option."
        )
    stated = plan.overrides.stated()
    if stated and not target.startswith(("megatron", "torchtitan")):  # their files say so
        said = ", ".join(f"{name} {_said(value)}" for name, value in stated.items())
        notes.append(f"The plan sets {said}: yours to set.")
    if plan.compile is not None and not target.startswith("torchtitan"):
        notes.append(
            f"torch.compile is {'on' if plan.compile else 'off'}: set "
            "dynamo_config of accelerate, torch_compile of transformers, or call it in your own code."
        )
    if plan.collectives != "auto":
        value = ",".join(NCCL_ALGORITHMS[plan.collectives])
        notes.append(
            f"All-reduces run as a {plan.collectives}: set NCCL_ALGO=allreduce:{value} for every rank."
        )
    if plan.buckets is not None:
        elements = plan.buckets // load_framework(plan.framework).grad_bytes
        notes.append(
            f"Gradients leave in buckets of {plan.buckets:,} bytes, {elements:,} elements: set bucket_cap_mb "
            "of DistributedDataParallel, --ddp-bucket-size of Megatron or reduce_bucket_size of DeepSpeed."
        )
    if plan.prefetch not in (None, 1) and plan.wrap != WHOLE_MODEL:
        notes.append(_prefetch_note(plan.prefetch))
    if plan.wrap not in (None, 1):
        notes.append(_wrap_note(plan))
    return tuple(notes)


def _prefetch_note(depth: int) -> str:
    if depth == 0:
        return (
            "Weights are gathered in turn with computation: FSDP1's backward_prefetch=None does so in the "
            "backward; FSDP2 has no switch for it."
        )
    return (
        f"Weights are gathered {depth} units ahead: call set_modules_to_forward_prefetch and "
        f"set_modules_to_backward_prefetch of each unit of FSDP2 with the next {depth}."
    )


def _wrap_note(plan: Plan) -> str:
    if plan.wrap == WHOLE_MODEL:
        return "The whole model is one unit of FSDP: call fully_shard on it alone."
    return (
        f"A unit of FSDP has {plan.wrap} blocks: call fully_shard on lists of {plan.wrap}, in your own code."
    )


def other_framework_note(plan: Plan, names: tuple[str, ...], target: str) -> tuple[str, ...]:
    """Return a caution where the plan was predicted for a framework other than the target."""
    if load_framework(plan.framework).label.startswith(names):
        return ()
    return (f"The plan was made for {plan.framework}: under {target} its time and memory differ.",)
