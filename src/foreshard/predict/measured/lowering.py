"""Lowering of a step by measured costs to a program of tasks, as `predict.graph.lowering` does by formulas.

Pipelines run as scheduled, with messages beside the work. Gradients that the same ranks hold are summed in
one ring, or in buckets while the backward goes on; one ring after another on every rank. Gradients are
copied into buckets and out of them, and rings slow the work beside them. Then each rank runs its optimizer.
Under `foreshard run` a small sum over all ranks (they agree on how to go on) ends the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.graph.pipeline import add_pipeline, pipeline_durations, pipeline_shape
from foreshard.graph.program import Kind, Program, ProgramBuilder
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.memory import counts_of
from foreshard.predict.measured.passes import PassSeconds, layer_shares
from foreshard.predict.measured.sharding import add_sharded
from foreshard.predict.placement import nic_senders
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage


@dataclass(slots=True, kw_only=True)
class RankTasks:
    """What a rank does in a step, and which tasks of the program that is."""

    stage: Stage
    group: int  # where the stage is in the plan
    place: int
    part: int  # of the layers that `stage.tp` ranks share out
    work_s: dict[str, float]  # of its passes, as `PassSeconds.of_rank`
    gradients: dict[int, int]  # the task of its stage that completes the gradients of each layer
    reduced: int | None = None  # the last ring that the rank takes part in
    sharded: bool = False  # gradients are summed and split in the stage, layer by layer
    alone: bool = False  # a stage that waits for no other
    optimizer: int = -1

    def holds(self, layers: Sequence[int], part: int | None) -> bool:
        """Return whether the rank has any of the layers, or a part of them that `tp` ranks share out."""
        whole = part is None or self.stage.tp == 1 or self.part == part
        return whole and not self.gradients.keys().isdisjoint(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Tasks that are so many passes of a stage, and the ranks that run them."""

    tasks: tuple[int, ...]
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredStep:
    """The program of a step, the tasks of every rank in it, and which tasks are passes."""

    program: Program
    ranks: dict[int, RankTasks]
    passes: list[Passes]


def lower_measured(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> MeasuredStep:
    """Return the program of one step of a plan."""
    builder = ProgramBuilder()
    ranks: dict[int, RankTasks] = {}
    passes: list[Passes] = []
    senders = nic_senders(cluster, plan) if costs.by_formula else None
    for g, group in enumerate(plan.groups):
        ranks |= _add_group(builder, costs, cluster, g, group, passes, senders[g] if senders else None)
    rings = _add_rings(builder, costs, cluster, ranks)
    for rank, tasks in sorted(ranks.items()):
        stage, after = tasks.stage, set(tasks.gradients.values())
        seconds = costs.optimizer_s(cluster.device_of(rank).name, tasks.gradients, stage.tp)
        shards = stage.inner_dp if stage.zero >= 1 else 1
        if tasks.reduced is not None:
            after.add(tasks.reduced)
        where = {"group": tasks.group, "stage": tasks.place}
        tasks.optimizer = builder.add(
            f"rank{rank}", seconds / shards, sorted(after), kind=Kind.OPTIMIZER, **where
        )
    if not costs.by_formula:  # ranks of `foreshard run` agree on how to go on
        everyone = sorted(ranks)
        vote_s = float(costs.ring_s(cluster, everyone, 0.0))
        builder.add("vote", vote_s, [ranks[rank].optimizer for rank in everyone])
    program = builder.build()
    _lengthen(program, costs, cluster, ranks, rings)
    return MeasuredStep(program=program, ranks=ranks, passes=passes)


def _add_group(
    builder: ProgramBuilder,
    costs: MeasuredCosts,
    cluster: Cluster,
    g: int,
    group: Group,
    found: list[Passes],
    senders: list[int] | None,
) -> dict[int, RankTasks]:
    """Append the pipeline of a group and, to `found`, its passes; return its ranks.

    `senders` are by stage the ranks of a node that send over its NICs at once.
    """
    passes = PassSeconds(costs, cluster, group)
    if group.stages[0].zero >= 3 and group.stages[0].inner_dp > 1:
        made = add_sharded(builder, costs, cluster, g, group, passes)
        found += [Passes(tasks=(task,), count=1, ranks=group.stages[0].ranks) for task in made.passes]
        ranks = _ranks_of(g, group, passes, [made.gradients])
        for tasks in ranks.values():
            tasks.reduced, tasks.sharded, tasks.alone = made.reduced, True, True
        return ranks
    if passes.forward.shape[:2] == (1, 1):  # a stage alone waits for nothing: its passes are one task
        own_s, members = float(passes.forward.sum() + passes.backward.sum()), group.stages[0].ranks
        count = 2 * len(passes.sizes)
        if costs.bucket_bytes:
            last_s = float(passes.backward[0, 0, -1])
            start = builder.add(f"group{g}", own_s - last_s, kind=Kind.PASSES, group=g, stage=0)
            gradients = _last_backward(builder, costs, cluster, g, group, last_s, start)
            found.append(Passes(tasks=(start,), count=count - 1, ranks=members))
            last = tuple(task - 1 for task in gradients.values())
            found.append(Passes(tasks=last, count=1, ranks=members))
            ranks = _ranks_of(g, group, passes, [gradients])
            for tasks in ranks.values():
                tasks.alone = True
            return ranks
        chunks = [(builder.add(f"group{g}", own_s, kind=Kind.PASSES, group=g, stage=0),)]
        found.append(Passes(tasks=chunks[0], count=count, ranks=members))
    else:
        shape = pipeline_shape(
            group.schedule,
            num_stages=len(group.stages),
            num_chunks=group.num_chunks,
            num_micro_batches=len(passes.sizes),
            overlap_p2p=True,
            overlap_warm_up=True,
        )
        seconds = pipeline_durations(
            shape,
            forward_s=passes.forward,
            backward_s=passes.backward,
            backward_input_s=passes.backward_input,
            backward_weight_s=passes.backward - passes.backward_input,
            send_forward_s=_sends(costs, cluster, group, passes.sizes[0], senders, forward=True),
            send_backward_s=_sends(costs, cluster, group, passes.sizes[0], senders, forward=False),
        )
        ops = add_pipeline(builder, shape, seconds, group=g).ops
        for s, stage in enumerate(group.stages):
            numbers = ops[:, s][ops[:, s] >= 0].tolist()
            found += [Passes(tasks=(task,), count=1, ranks=stage.ranks) for task in numbers]
        last = ops.max(axis=(0, 3))
        chunks = [tuple(row) for row in last.tolist()]
    gradients_of = [
        {layer: task for task, span in zip(row, stage.layers, strict=True) for layer in range(*span)}
        for row, stage in zip(chunks, group.stages, strict=True)
    ]
    return _ranks_of(g, group, passes, gradients_of)


def _last_backward(
    builder: ProgramBuilder,
    costs: MeasuredCosts,
    cluster: Cluster,
    g: int,
    group: Group,
    seconds: float,
    start: int,
) -> dict[int, int]:
    """Append the last backward of a stage alone, layer by layer; return the task that ends each layer.

    That task is what sums of gradients add to the layer (`_lengthen`), right after its backward.
    """
    (stage,), (span,) = group.stages, group.stages[0].layers
    device = cluster.device_of(stage.ranks[0]).name
    samples = max(counts_of(stage, group.micro_batch))
    shares = layer_shares(costs, device, stage, "backward_s", samples).tolist()
    task, found = start, {}
    for layer, share in zip(reversed(range(*span)), reversed(shares), strict=True):
        task = builder.add(f"group{g}", share * seconds, [task], kind=Kind.BACKWARD, group=g, stage=0)
        task = builder.add(f"group{g}", 0.0, [task], kind=Kind.GRADIENT_REDUCE, group=g, stage=0)
        found[layer] = task
    return found


def _ranks_of(
    g: int, group: Group, passes: PassSeconds, gradients_of: Sequence[dict[int, int]]
) -> dict[int, RankTasks]:
    """Return the ranks of a group, given the task that completes each layer's gradients on each stage."""
    ranks = {}
    for s, (stage, gradients) in enumerate(zip(group.stages, gradients_of, strict=True)):
        for place, rank in enumerate(stage.ranks):
            ranks[rank] = RankTasks(
                stage=stage,
                group=g,
                place=s,
                part=place % stage.tp,
                work_s=passes.of_rank[rank],
                gradients=gradients,
            )
    return ranks


def _sends(
    costs: MeasuredCosts,
    cluster: Cluster,
    group: Group,
    size: int,
    senders: list[int] | None,
    *,
    forward: bool,
) -> list[float] | float:
    """Return the seconds of a message over each boundary, the one back to the first stage last."""
    stages, found = group.stages, []
    for s, stage in enumerate(stages if group.num_chunks > 1 else stages[:-1]):
        after = stages[(s + 1) % len(stages)]
        last = stage.layers[0][1] - 1
        parts = group.sp or costs.layers_on("", stage.tp)[last].splits_boundary
        size_bytes = costs.layers[last].boundary_bytes(size / min(stage.inner_dp, after.inner_dp)) / (
            stage.tp if parts and stage.tp == after.tp else 1
        )
        pairs = [(a, b) if forward else (b, a) for a in stage.ranks for b in after.ranks if a != b]
        sending = max(senders[s], senders[(s + 1) % len(stages)]) if senders else None
        seconds = max(
            (float(costs.message_s(cluster, a, b, size_bytes, sending)) for a, b in pairs), default=0.0
        )
        found.append(seconds / costs.speed("pipeline_comm"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """A sum of gradients: its task, the ranks that take part, and (layers, bytes) of what they sum."""

    task: int
    owners: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], float]]

    def has(self, layer: int) -> bool:
        """Return whether gradients of a layer are among what is summed."""
        return any(layer in layers for layers, _ in self.pieces)


def _add_rings(
    builder: ProgramBuilder, costs: MeasuredCosts, cluster: Cluster, ranks: dict[int, RankTasks]
) -> list[_Ring]:
    """Append the sums of gradients: one ring for all that the same ranks hold, in the order of the ranks."""
    found: list[_Ring] = []
    rings: dict[tuple[int, ...], list[tuple[tuple[int, ...], float]]] = {}
    if any(tasks.sharded for tasks in ranks.values()):  # of all ranks, or of none
        return found
    for layers, size, part in _pieces(costs, ranks):
        owners = tuple(rank for rank in sorted(ranks) if ranks[rank].holds(layers, part))
        if size > 0 and len(owners) > 1:
            rings.setdefault(owners, []).append((layers, size))
    buckets = [
        (owners, bucket)
        for owners, pieces in sorted(rings.items())
        for bucket in _buckets(pieces, costs.bucket_bytes)
    ]
    for owners, pieces in buckets:
        held = {layer for layers, _ in pieces for layer in layers}
        after: set[int] = set()
        for tasks in (ranks[rank] for rank in owners):
            after.update(task for layer, task in tasks.gradients.items() if layer in held)
            after.update(() if tasks.reduced is None else (tasks.reduced,))
        seconds = float(costs.ring_s(cluster, owners, sum(size for _, size in pieces)))
        seconds /= costs.speed("data_comm")
        first = ranks[owners[0]]
        where = {"kind": Kind.GRADIENT_REDUCE, "group": first.group, "stage": first.place}
        ring = builder.add(f"rings{owners}", seconds, sorted(after), **where)
        found.append(_Ring(task=ring, owners=owners, pieces=pieces))
        for rank in owners:
            ranks[rank].reduced = ring
    return found


def _lengthen(
    program: Program,
    costs: MeasuredCosts,
    cluster: Cluster,
    ranks: dict[int, RankTasks],
    rings: Sequence[_Ring],
) -> None:
    """Let a backward take longer by the copies into its buckets, and by the rings that run beside it.

    What was summed is copied out once the last ring of a rank has ended; stages of a pipeline, whose rings
    come after the last backward, copy in and out there.
    """
    seconds = program.duration_s
    own: dict[int, list[_Ring]] = {}
    for ring in rings:
        for rank in ring.owners:
            own.setdefault(rank, []).append(ring)
    out_s: dict[int, float] = {}
    begun: set[int] = set()
    for rank, tasks in ranks.items():
        if rank not in own:
            continue
        each_s = costs.copied_s.get(cluster.device_of(rank).name, 0.0) / costs.speed("data_comm")
        total = sum(size for ring in own[rank] for _, size in ring.pieces)
        last = own[rank][-1].task
        out_s[last] = max(out_s.get(last, 0.0), (1.0 if tasks.alone else 2.0) * each_s * total)
        if not tasks.alone or tasks.group in begun:  # ranks of a stage run its tasks together
            continue
        begun.add(tasks.group)
        _lengthen_backward(seconds, tasks.gradients, own[rank], contention=costs.contention, copied_s=each_s)
    for task, longer_s in out_s.items():
        seconds[task] += longer_s


def _lengthen_backward(
    seconds: np.ndarray,
    gradients: Mapping[int, int],
    rings: Sequence[_Ring],
    *,
    contention: float,
    copied_s: float,
) -> None:
    """Let the layers of a stage alone take longer by the rings beside them and by copies into its buckets.

    `copied_s` is the time of a byte. The last ring runs beside no backward.
    """
    moved_s = sum(float(seconds[ring.task]) for ring in rings[:-1])
    begins = max(task for layer, task in gradients.items() if rings[0].has(layer))
    beside = np.array([task for task in gradients.values() if task > begins], dtype=int)
    busy_s = seconds[beside - 1]
    total_s = float(busy_s.sum())
    if total_s > 0.0:
        seconds[beside] += contention * min(1.0, moved_s / total_s) * busy_s
    for ring in rings:
        for layers, size in ring.pieces:
            seconds[max(gradients[layer] for layer in layers if layer in gradients)] += copied_s * size


def _buckets(
    pieces: list[tuple[tuple[int, ...], float]], bucket_bytes: float
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Return gradients in the order of the backward, in buckets of at least so many bytes; 0: all in one."""
    if not bucket_bytes:
        return [pieces]
    found: list[list[tuple[tuple[int, ...], float]]] = [[]]
    for layers, size in sorted(pieces, key=lambda piece: -min(piece[0])):
        if sum(known for _, known in found[-1]) >= bucket_bytes:
            found.append([])
        found[-1].append((layers, size))
    return found


def _pieces(
    costs: MeasuredCosts, ranks: dict[int, RankTasks]
) -> Iterator[tuple[tuple[int, ...], float, int | None]]:
    """Yield layers, the bytes of their gradients, and which part it is of those that ranks share out."""
    degrees = {
        layer: tasks.stage.tp for tasks in ranks.values() if tasks.stage.tp > 1 for layer in tasks.gradients
    }
    if costs.by_formula and degrees:
        yield from _traced_pieces(costs, degrees)
        return
    for layers, size in costs.gradients():
        split = 0.0
        if len(layers) == 1 and layers[0] in degrees:  # what layers share is whole on every rank
            tp = degrees[layers[0]]
            split = costs.split_bytes(layers[0], tp)
            for part in range(tp):
                yield layers, split / tp, part
        yield layers, size - split, None


def _traced_pieces(
    costs: MeasuredCosts, degrees: dict[int, int]
) -> Iterator[tuple[tuple[int, ...], float, int | None]]:
    """Yield gradients of stages of tp: ranks of one part hold the same, of split and of whole parameters.

    All ranks sum what each part has a summand of. Stages without tp in the same plan have all gradients; they
    sum them with those of each part in turn.
    """
    tp = max(degrees.values())
    table = costs.layers_on("", tp)
    for (layers, size), (_, whole) in zip(costs.gradients(tp), costs.gradients(), strict=True):
        if not any(layer in degrees for layer in layers):
            yield layers, whole, None
            continue
        summed = table[layers[0]].summed_bytes if len(layers) == 1 else 0.0
        yield layers, summed, None
        for part in range(tp):
            yield layers, size - summed, part
