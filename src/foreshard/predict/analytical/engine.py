"""Engine `analytical`: closed formulas over a batch of pipelines.

What one micro-batch takes on every stage, and the longest path through the pipeline: down the stages, the
steady state on one of them, up again, with the gradient and weight collectives that nothing hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from foreshard.graph.pace import PipelineRows, PipelineSpan, pipeline_span
from foreshard.predict.analytical.by_order import span_by_order
from foreshard.predict.analytical.sharded import ShardedUnit, on_device, waits
from foreshard.predict.batch import Batch
from foreshard.predict.tasks.collectives import (
    ShardTimes,
    Sharing,
    across_groups_s,
    bucket_elements,
    contention,
    every_reduce_s,
    gradient_sync_s,
    message_s,
    region_times,
    shard_times,
    sharing_of,
    tied_sync_s,
)
from foreshard.predict.tasks.formula import EndTimes, LayerTimes, end_times, layer_times
from foreshard.predict.tasks.host import joined_s, optimizer_s
from foreshard.predict.tasks.orthogonal import orthogonal_s
from foreshard.spec.prediction import TIME_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Seconds of a run's messages between stages, one way, of one chunk and one micro-batch."""

    # one message inside a link domain, and one that leaves it
    near: Any
    far: Any
    # from the last stage of the run to the stage after it
    after: Any
    # to or from all neighbours of a stage, one after another
    each: Any
    # through the busier of a stage's two ports, to the network and to its link domain
    port: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each run of equal stages, shape (runs, pipelines)."""

    forward: np.ndarray
    backward: np.ndarray
    messages: Messages
    parts: dict[str, np.ndarray]  # sum to `total`
    total: np.ndarray  # in the steady state, with the messages that nothing hides
    last_share: np.ndarray  # work of the last micro-batch over that of the others
    host: np.ndarray  # what the host needs, of `forward` and `backward`
    later: np.ndarray  # of `backward` what zero-bubble schedules move; 0 where no pipeline has one
    params: np.ndarray  # trained parameters of a rank, dense and expert
    expert_params: np.ndarray
    all_params: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step for each pipeline, shape (pipelines,); parts sum to `total`."""

    total: np.ndarray
    parts: dict[str, np.ndarray]
    stage: np.ndarray  # index of the stage that sets the pace


def stage_times(batch: Batch) -> StageTimes:
    """Return what one micro-batch costs on each distinct stage, collectives inside it included."""
    p, machine = batch.pipeline, batch.machine
    region = region_times(p.hidden, machine)
    ends = end_times(
        p.hidden, p.vocab, p.head_rows, machine, frozen=p.head_frozen, heads=p.heads, region=region
    )
    dense = sharing_of(machine)
    shape = batch.multiplicity.shape
    parts = {name: np.zeros(shape) for name in TIME_PARTS}
    forward, later, host = (np.zeros(shape) for _ in range(3))
    params, experts, every = (np.zeros(shape) for _ in range(3))
    layers: list[LayerTimes] = []
    for kind, count in zip(batch.kinds, batch.counts, strict=True):
        as_wide = not np.count_nonzero(kind.hidden - p.hidden)
        times = layer_times(
            kind, machine, batch.recompute, region=region if as_wide else None, dense_sharing=dense
        )
        layers.append(times)
        _add_layers(parts, times, count)
        forward += count * times.forward_s
        later += count * (times.backward_weight + times.reduce_backward)
        host += count * (times.host_forward + times.host_backward)
        trained = np.where(kind.trainable > 0, kind.trainable, 0.0)
        params += count * times.dense_params * trained
        experts += count * times.expert_params * (1.0 - np.asarray(kind.frozen, dtype=float))
        every += count * (times.dense_params + times.expert_params)
    _add_ends(parts, batch, ends)
    forward += batch.has_embedding * (ends.embedding_forward + ends.embedding_tensor / 2)
    forward += batch.has_head * (ends.head_forward + ends.head_tensor / 2)
    table = p.hidden * p.vocab / machine.rank.tp
    matrices = batch.has_embedding + batch.has_head * (1.0 - p.tied * (batch.has_embedding > 0))
    params = params + matrices * table * (1.0 - p.head_frozen)
    every = every + matrices * table
    later += batch.has_embedding * ends.embedding_backward + batch.has_head * ends.head_backward / 2
    later += _reduce_tables(parts, batch, table, ends, dense)
    computed = np.asarray(sum(parts.values()))
    beside, waited = np.zeros((3, *shape)), np.zeros((4, *shape))
    units = _units(batch, layers, ends, table, dense)
    if units:
        added = on_device(units, machine)
        beside = np.stack([np.zeros(shape) + seconds for seconds in (added.forward, added.first, added.late)])
    device = computed + beside.sum(0)
    host += 2.0 * p.num_chunks * machine.constants.host_micro_batch * (1.0 - (machine.traits.graphs >= 1.0))
    sharpness = machine.constants.host_sharpness
    joined = joined_s(device, host, sharpness)
    # The host holds up the tasks of forward and backward in proportion.
    longer = 1.0 + (joined - device) / np.maximum(computed, 1e-12)
    # The host launches the kernels of a short micro-batch too.
    short = p.num_micro_batches - np.ceil(p.num_micro_batches - 1e-9) + 1.0
    last = joined_s(short * computed + beside.sum(0), host, sharpness)
    if units:
        shorter = 1.0 + (last - beside.sum(0) - computed) / np.maximum(computed, 1e-12)
        waited = _unit_waits(batch, units, longer, shorter)
    work = joined + waited[0] + waited[1]
    last_share = np.where(short < 1.0 - 1e-9, (last + waited[2]) / np.maximum(work, 1e-12), 1.0)
    parts["host"] += joined - device
    parts["data_comm"] += beside.sum(0) + waited[0] + waited[1]
    if np.count_nonzero(p.zero_bubble):
        later = p.zero_bubble * np.maximum(longer * later + beside[2] + waited[1] - waited[3], 0.0)
    else:
        later = np.zeros(shape)
    forward = longer * forward + beside[0] + waited[0]
    messages = _messages(batch)
    total = _steady(batch, work, messages)
    parts["pipeline_comm"] += total - work
    return StageTimes(
        forward=forward,
        backward=work - forward,
        messages=messages,
        parts=parts,
        total=total,
        last_share=last_share,
        host=host,
        later=later,
        params=params,
        expert_params=experts,
        all_params=every,
    )


def _add_layers(parts: dict[str, np.ndarray], times: LayerTimes, count: np.ndarray) -> None:
    """Add the tasks of `count` layers to the parts of a stage."""
    parts["compute"] += count * (times.forward + times.backward_input + times.backward_weight)
    parts["recompute"] += count * times.recompute
    parts["tensor_comm"] += count * (times.tensor_forward + times.tensor_backward + times.tensor_recompute)
    parts["context_comm"] += count * (times.context_forward + times.context_backward)
    parts["expert_comm"] += count * (times.expert_forward + times.expert_backward + times.expert_recompute)
    parts["data_comm"] += count * times.reduce_backward
    parts["host"] += count * (times.offload_forward + times.offload_backward)


def _add_ends(parts: dict[str, np.ndarray], batch: Batch, ends: EndTimes) -> None:
    """Add embedding and head to the stages that hold them."""
    first, last = batch.has_embedding, batch.has_head
    parts["compute"] += first * (ends.embedding_forward + ends.embedding_backward)
    parts["compute"] += last * (ends.head_forward + ends.head_backward)
    parts["tensor_comm"] += first * ends.embedding_tensor + last * ends.head_tensor


def _units(
    batch: Batch, layers: list[LayerTimes], ends: EndTimes, table: Any, dense: Sharing
) -> list[ShardedUnit]:
    """Return the units of each stage that are sharded one by one (ZeRO 3): layers by kind, embedding, head.

    No unit where no stage is.
    """
    p, machine = batch.pipeline, batch.machine
    sharded = machine.rank.zero >= 3
    if not np.count_nonzero(sharded):
        return []

    def shard(params: Any, experts: Any, trained: Any, trained_experts: Any) -> ShardTimes:
        whole = shard_times(params, experts, machine, dense=dense)
        part = shard_times(params * trained, experts * trained_experts, machine, dense=dense)
        return ShardTimes(
            gather=sharded * whole.gather,
            scatter=sharded * part.scatter,
            copy_weights=sharded * whole.copy_weights,
            copy_gradients=sharded * part.copy_gradients,
        )

    own = 1.0 - p.tied * (batch.has_embedding > 0)
    again = _regathered(batch, layers, batch.has_head * own * table)
    units = [
        ShardedUnit(
            count=count,
            forward=times.forward_s,
            backward=times.backward_s,
            late=times.backward_weight + times.reduce_backward,
            counting=times.counting,
            shard=shard(
                times.dense_params,
                times.expert_params,
                np.maximum(kind.trainable, 0.0),
                1.0 - np.asarray(kind.frozen, dtype=float),
            ),
            regathers=again,
        )
        for kind, count, times in zip(batch.kinds, batch.counts, layers, strict=True)
    ]
    halves = {name: getattr(ends, f"{name}_tensor") / 2 for name in ("embedding", "head")}
    for name, count, held in (("embedding", batch.has_embedding, 1.0), ("head", batch.has_head, own)):
        backward = getattr(ends, f"{name}_backward")
        units.append(
            ShardedUnit(
                count=count,
                forward=getattr(ends, f"{name}_forward") + halves[name],
                backward=backward + halves[name],
                late=backward / (1.0 + (name == "head")),
                counting=0.0,
                shard=shard(table * held, 0.0, 1.0 - p.head_frozen, 1.0),
                regathers=0.0,
            )
        )
    return units


def _regathered(batch: Batch, layers: list[LayerTimes], head: Any) -> Any:
    """Return the share of a stage's layers whose weights are gathered again before backward."""
    traits = batch.machine.traits
    if not np.count_nonzero(traits.kept_elements):
        return traits.regathers
    count = np.maximum(np.asarray(sum(batch.counts)), 1.0)
    held = sum(
        number * (times.dense_params + times.expert_params)
        for number, times in zip(batch.counts, layers, strict=True)
    )
    kept = np.ceil(np.maximum(traits.kept_elements - head, 0.0) * count / np.maximum(held, 1.0))
    return traits.regathers * (1.0 - np.minimum(kept / count, 1.0))


def _unit_waits(batch: Batch, units: list[ShardedUnit], longer: Any, shorter: Any) -> np.ndarray:
    """Return what stages wait for in forward, backward, both of the last micro-batch, half a backward.

    That half are the gradients of inputs, before those of weights.
    """
    *layers, embedding, head = units
    of = partial(waits, layers, embedding, head, batch.machine, chunks=batch.pipeline.num_chunks)
    forward, backward = of(longer=longer)
    first = backward
    if np.count_nonzero(batch.pipeline.zero_bubble):
        first = of(longer=longer, given_only=True)[1]
    short = forward + backward
    if np.count_nonzero(shorter < longer):
        short = sum(of(longer=shorter))
    shape = batch.multiplicity.shape
    return np.stack([np.zeros(shape) + seconds for seconds in (forward, backward, short, first)])


def _reduce_tables(
    parts: dict[str, np.ndarray], batch: Batch, table: Any, ends: EndTimes, dense: Sharing
) -> Any:
    """Add, and return, what reducing the tables of both ends every micro-batch leaves exposed (ZeRO 2)."""
    p, machine = batch.pipeline, batch.machine
    if not np.count_nonzero(machine.rank.zero == 2):
        return 0.0
    first = batch.has_embedding * table
    last = batch.has_head * (1.0 - p.tied * (batch.has_embedding > 0)) * table
    tables = np.array((first, last)) * (1.0 - p.head_frozen)
    busy = np.array((np.zeros_like(last), ends.head_backward + np.zeros_like(last)))
    reduce = every_reduce_s(tables, 0.0, machine, busy, dense=dense).sum(0)
    parts["data_comm"] += reduce
    return reduce


def _messages(batch: Batch) -> Messages:
    """Return what messages between stages take, whether or not anything hides them."""
    p, machine, places = batch.pipeline, batch.machine, batch.boundaries
    # The first chunk has no stage before it, the last none after it.
    ends = np.minimum(batch.has_embedding + batch.has_head, 1.0) / p.num_chunks
    neighbours = np.where(p.num_stages > 1, 2.0 - ends, 0.0)
    near, far = (message_s(p.hidden, leaves, machine) for leaves in (0.0, 1.0))
    after = np.where(places.far_last > 0, far, near)
    outside = np.minimum(places.far_each, neighbours)
    by_link, by_network = (neighbours - outside) * near, outside * far
    if places.is_chain and len(near) > 1:
        after, waited = _by_slower_end(batch, after, near, far)
        by_network = by_network + waited * (places.far_each > 0)
        by_link = by_link + waited * (places.far_each <= 0)
    return Messages(
        near=near, far=far, after=after, each=by_link + by_network, port=np.maximum(by_link, by_network)
    )


def _by_slower_end(batch: Batch, own: Any, near: Any, far: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of the message after each run of stages, and what its stages wait for slower neighbours.

    A message takes as long as the slower of its ends needs; those of a stage of more than one are inside its
    run, where both ends are equal.
    """
    count, leaves = (
        batch.multiplicity,
        np.broadcast_to(batch.boundaries.far_last, batch.multiplicity.shape) > 0,
    )
    own, near, far = (np.broadcast_to(seconds, count.shape) for seconds in (own, near, far))
    joined = (count[1:] > 0) & (count[:-1] > 0)
    behind = np.where(leaves[:-1], far[1:], near[1:])
    after = np.array(own)
    after[:-1] = np.where(joined, np.maximum(own[:-1], behind), own[:-1])
    waited_after, waited_before = after - own, np.zeros(count.shape)
    waited_before[1:] = np.where(joined, after[:-1] - behind, 0.0)
    both = waited_after + waited_before
    return after, np.where(count > 1, np.maximum(waited_after, waited_before), both)


def _steady(batch: Batch, work: np.ndarray, messages: Messages) -> Any:
    """Return seconds of a micro-batch in the steady state on a stage that works so long.

    1F1B exchanges with one neighbour after the forward and with the other after the backward, both ways at
    once; GPipe has no opposite messages. Interleaved stages exchange with both at once, or beside their work.
    """
    p, traits = batch.pipeline, batch.machine.traits
    in_line = (1.0 + np.maximum(p.all_forward, traits.p2p_in_turn)) * messages.each
    port = p.num_chunks * messages.port
    is_beside = np.where(p.num_chunks > 1, traits.p2p_overlap > 0, p.zero_bubble > 0)
    alone = np.where(p.num_chunks > 1, port, in_line)
    return np.where(is_beside, np.maximum(work, port), work + alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfStep:
    """What gradients and weights take outside the steady state on each run of stages, seconds."""

    # gathering the weights that the first forward needs first, and waiting for those it needs later
    ready: np.ndarray
    wait: np.ndarray
    # from the last backward until the gradients are reduced
    tail: np.ndarray
    # the optimizer, and gathering updated weights that no forward hides
    update: np.ndarray


def end_of_step(batch: Batch, stage: StageTimes) -> EndOfStep:
    """Return what precedes the first micro-batch and follows the last one on each run of stages."""
    machine, p = batch.machine, batch.pipeline
    rank, traits = machine.rank, machine.traits
    buckets = _num_buckets(batch, stage)
    reduce, gather = (
        np.where(rank.zero >= 3, 0.0, buckets * seconds)
        for seconds in gradient_sync_s(stage.params / buckets, stage.expert_params / buckets, machine)
    )
    first, last = _bucket_shares(batch, stage)
    # Chunks of layers end one passage of the pipeline after another.
    chunks, apart = p.num_chunks, (p.num_chunks - 1.0) / p.num_chunks * p.num_stages
    # The last gradients of weights put off come in the last piece of the backward alone.
    last_backward = np.where(p.zero_bubble > 0, stage.later, stage.backward)
    hidden_b = last_backward * np.where(chunks > 1, apart, 1.0 - first)
    hidden_f = stage.forward * np.where(chunks > 1, apart, 1.0 - last)
    # Compute beside a collective is slowed, which counts where compute is what the step waits for.
    slowed = contention(machine) * (chunks == 1)
    slowed_b = slowed * np.minimum(hidden_b, reduce * (1.0 - last))
    slowed_f = slowed * np.minimum(hidden_f, gather * (1.0 - last))
    exposed = np.maximum(reduce * last + slowed_b, reduce - hidden_b)
    waited = np.maximum(slowed_f, gather * (1.0 - last) - hidden_f)
    # Every stage waits for its own buckets, if it has several; a chunk that is one bucket does not.
    each = (chunks == 1) | (traits.bucket_elements > 0)
    in_turn = np.where(chunks > 1, (1.0 - last) * np.maximum(gather - stage.forward, 0.0), waited)
    tail = np.where(traits.grad_overlap > 0, exposed, reduce)
    tail = tail + across_groups_s(stage.params, stage.expert_params, machine)
    if np.count_nonzero(p.tied):
        tied = tied_sync_s(p.hidden, p.vocab, p.ends_cross, machine) * p.tied
        ends = np.maximum(batch.has_embedding, batch.has_head)
        # Each end waits for the other, and the sum takes as long as the slower one needs.
        slower = (ends * tied).max(0) if batch.boundaries.is_chain else tied
        tail = tail + np.where(p.num_stages > 1, ends * slower, 0.0)
    optimizer = optimizer_s(stage.params, stage.expert_params, sum(batch.counts), machine, p.num_devices)
    optimizer = optimizer + orthogonal_s(batch.kinds, batch.counts, machine)
    beside = traits.param_gather_overlap > 0
    return EndOfStep(
        ready=np.where(beside, gather * last + np.where(each, 0.0, waited), 0.0),
        wait=np.where(beside & each, in_turn, 0.0),
        tail=tail,
        update=optimizer + np.where(beside, 0.0, gather),
    )


def _bucket_limit(batch: Batch) -> Any:
    """Return the elements after which a bucket of each stage leaves."""
    traits, rank = batch.machine.traits, batch.machine.rank
    first = (batch.has_embedding > 0) & (traits.grad_overlap > 0)
    return bucket_elements(traits.bucket_elements, rank.dp * rank.cp, first)


def _num_buckets(batch: Batch, stage: StageTimes) -> Any:
    """Return in how many collectives the gradients of a stage move, which each take their start-up.

    A bucket leaves behind the layer that fills it.
    """
    limit = _bucket_limit(batch)
    params = np.maximum(stage.params + stage.expert_params, 1.0)
    layer = params / np.maximum(np.asarray(sum(batch.counts)), 1.0)
    filled = np.where(np.isfinite(limit), np.ceil(np.minimum(limit, params) / layer) * layer, params)
    return np.maximum(params / filled, 1.0)


def _bucket_shares(batch: Batch, stage: StageTimes) -> tuple[Any, Any]:
    """Return the shares of a stage's gradients in the bucket that leaves first, and last.

    The last holds the embedding, if the stage does; chunks of layers are buckets at least.
    """
    p, rank, limit = batch.pipeline, batch.machine.rank, _bucket_limit(batch)
    params = np.maximum(stage.params + stage.expert_params, 1.0)
    first = np.minimum(1.0, limit / params)
    table = (1.0 - p.head_frozen) * p.hidden * p.vocab / rank.tp
    own = batch.has_embedding + batch.has_head * (1.0 - p.tied * (batch.has_embedding > 0))
    chunk = np.maximum(params - own * table, 0.0) / p.num_chunks
    table = batch.has_embedding * table
    layer = chunk / np.maximum(np.asarray(sum(batch.counts)) / p.num_chunks, 1.0)
    held, most = np.broadcast_arrays(chunk + table, limit)
    rest = np.mod(held, most, where=np.isfinite(most), out=np.full(held.shape, np.inf))
    rest = np.where(limit <= layer, layer, rest)
    last = np.minimum(np.maximum(rest, table), chunk + table)
    return np.minimum(first, 1.0 / p.num_chunks), np.where(first >= 1.0, 1.0 / p.num_chunks, last / params)


def _of_run(run: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return what picks one run of each pipeline from an array (runs, pipelines)."""
    flat = run * run.size + np.arange(run.size)
    return lambda values: np.broadcast_to(values, (values.shape[0], run.size)).take(flat)


def _rows(batch: Batch, stage: StageTimes, end: EndOfStep) -> PipelineRows:
    """Return the runs of stages as `pipeline_span` takes them."""
    p, places, count = batch.pipeline, batch.boundaries, batch.multiplicity
    shape, messages, chunks = count.shape, stage.messages, p.num_chunks
    behind = p.num_stages - 1.0 - places.first
    is_cut = chunks > 1
    is_beside = is_cut | (p.zero_bubble > 0)
    warm_up = np.where(is_cut, 2.0 * behind + (chunks - 1.0) * p.num_stages, behind)
    after_last = messages.after
    after_first = np.where(count > 1, np.where(places.far_first > 0, messages.far, messages.near), after_last)
    is_last = places.first + count >= p.num_stages
    after = np.where(is_last | (p.num_stages <= 1) | (count <= 0), 0.0, after_last)
    wrap = np.where(is_last & is_cut & (count > 0), after_last, 0.0).max(0)
    forward, backward = stage.forward / chunks, (stage.backward - stage.later) / chunks
    near = np.maximum(count - 1.0, 0.0) - places.far_inside
    inside = near * messages.near + places.far_inside * messages.far
    widest = np.where(places.far_each > 0, messages.far, messages.near)
    rounds = p.num_micro_batches
    whole = np.ceil(rounds - 1e-9)

    def full(values: Any) -> np.ndarray:
        return np.broadcast_to(values, shape) * 1.0

    return PipelineRows(
        count=count,
        forward_s=full(forward),
        backward_s=full(backward),
        inside_s=full(inside),
        after_s=after,
        wrap_s=wrap,
        beside_s=full(np.where(is_cut, widest, messages.each)),
        period_s=full(stage.total / chunks),
        call_first_s=np.where(is_beside | (is_last & (count <= 1)), 0.0, after_first),
        call_s=np.where(is_beside, 0.0, after),
        late_s=full(stage.later),
        warm_up=full(np.where(p.all_forward > 0, whole, warm_up)),
        per_stage=full(np.where(p.all_forward > 0, 0.0, 1.0 + is_cut)),
        ready_s=full(end.ready),
        wait_s=full(end.wait / chunks),
        tail_s=full(end.tail),
        last_share=full(stage.last_share),
        rounds=full(whole * chunks)[0],
        chunks=full(chunks)[0],
        stages=full(p.num_stages)[0],
    )


def _unequal_chunks_s(batch: Batch, rows: PipelineRows) -> np.ndarray:
    """Return seconds that stages wait for each other where chunks differ by a layer, shape (pipelines,).

    The way down and up passes the larger chunks. In the steady state every stage comes from a larger chunk to
    a smaller one once in a turn of as many micro-batches as stages, one after the other, and waits in part;
    where one stage sets the pace, the others wait anyway. The first two turns have waits of their own.
    """
    layers = np.broadcast_to(sum(batch.counts), rows.count.shape)
    chunks, present = rows.chunks, rows.count > 0
    if not np.count_nonzero((chunks > 1.0) & present & (np.mod(layers, chunks) > 0.0)):
        return np.zeros_like(chunks)
    each = chunks * (rows.forward_s + rows.backward_s) / np.maximum(layers, 1.0)
    layer_s = np.where(present & (layers > 0.0), each, np.inf).min(0)
    layer_s = np.where((chunks > 1.0) & (rows.stages > 1.0) & np.isfinite(layer_s), layer_s, 0.0)
    larger, smaller = np.ceil(layers / chunks), np.floor(layers / chunks)
    over, gap = (np.where(present, n, 0.0) for n in (larger - layers / chunks, larger - smaller))
    fill = (rows.count * over).sum(0) - over.max(0)
    least = np.where(present, smaller, np.inf).min(0)
    turn = (rows.count * gap).sum(0) - 2.0 * gap.max(0) - least
    turns = np.maximum(rows.rounds / chunks / np.maximum(rows.stages, 1.0) - 2.0, 0.0)
    pair_s = rows.forward_s + rows.backward_s
    idle_s = np.where(present, pair_s, 0.0).max(0) - np.where(present, pair_s, np.inf).min(0)
    return layer_s * fill + turns * np.maximum(layer_s * turn - rows.stages * chunks * idle_s, 0.0)


def step_times(batch: Batch, *, joined: bool = False) -> StepTimes:
    """Return the step time of every pipeline and its parts on the rank that sets the pace.

    Pipelines that are `joined` are the groups of one plan: none has its gradients before the slowest.

    Source
    ------
    docs/derivations/step.md.
    """
    stage = stage_times(batch)
    end = end_of_step(batch, stage)
    rows = _rows(batch, stage, end)
    span = pipeline_span(rows)
    span = span._replace(seconds=span.seconds + _unequal_chunks_s(batch, rows))
    if np.count_nonzero(batch.pipeline.by_order):
        span = span_by_order(rows, span, np.broadcast_to(batch.pipeline.by_order, rows.rounds[None].shape)[0])
    waits = _waits(batch, rows, span) if joined and span.seconds.size > 1 else 0.0
    pace = _of_run(span.run)
    num_devices, m = (
        np.asarray(values)[0] for values in (batch.pipeline.num_devices, batch.pipeline.num_micro_batches)
    )
    parts = {name: m * pace(value) for name, value in stage.parts.items()}
    extra = np.ceil(m - 1e-9) - 1.0 + stage.last_share - m
    parts["host"] = parts["host"] + pace(extra * (stage.forward + stage.backward))
    parts["data_comm"] = parts["data_comm"] + span.data_s
    # Collectives of another stage run beside the last work of the one that sets the pace.
    beside_s = np.maximum(sum(parts.values()) - span.seconds, 0.0)
    parts["data_comm"] = np.maximum(parts["data_comm"] - beside_s, 0.0)
    busy = sum(parts.values())
    parts["bubble"] = np.maximum(span.seconds - busy, 0.0) + waits
    parts["optimizer"] = np.where(batch.multiplicity > 0, end.update, 0.0).max(0)
    busy = busy + parts["bubble"] + parts["optimizer"]
    doublings = np.maximum(0.0, np.log2(np.maximum(num_devices, 1.0) / 8.0))
    parts["straggler"] = batch.machine.constants.jitter * doublings * busy
    return StepTimes(total=busy + parts["straggler"], parts=parts, stage=span.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastGradients:
    """The stages of one group, each with the layers whose gradients it has last; shape (stages,)."""

    start: np.ndarray
    stop: np.ndarray
    ready_s: np.ndarray
    tail_s: np.ndarray


def _last_gradients(batch: Batch, rows: PipelineRows) -> list[_LastGradients]:
    """Return of each pipeline when its stages have their last gradients, the first stage last of all."""
    ends_s = pipeline_span(replace(rows, tail_s=np.zeros_like(rows.tail_s))).seconds
    layers = np.broadcast_to(sum(batch.counts) / batch.pipeline.num_chunks, rows.count.shape)
    found = []
    for g, end_s in enumerate(ends_s.tolist()):
        count = rows.count[:, g].astype(int)
        run = np.repeat(np.arange(len(count)), count)
        stop = layers[run, g].cumsum()
        start = stop - layers[run, g]
        start[0], stop[-1] = start[0] - 1.0, stop[-1] + 1.0  # the tables of both ends
        message_s = rows.inside_s[run, g] / np.maximum(count[run] - 1, 1)
        message_s[count.cumsum()[count > 0] - 1] = rows.after_s[count > 0, g]
        passed_s = rows.last_share[run, g] * rows.backward_s[run, g] + message_s
        found.append(
            _LastGradients(
                start=start,
                stop=stop,
                ready_s=end_s - (passed_s.cumsum() - passed_s),
                tail_s=rows.tail_s[run, g],
            )
        )
    return found


def _waits(batch: Batch, rows: PipelineRows, span: PipelineSpan) -> np.ndarray:
    """Return how long each pipeline has to wait for gradients of the others, seconds.

    The gradients of a stage are summed when every pipeline has those of its layers.
    """
    groups = _last_gradients(batch, rows)
    ends_s = []
    for own in groups:
        ready_s = np.full(len(own.start), -np.inf)
        for other in groups:
            shared = (own.start[:, None] < other.stop) & (other.start < own.stop[:, None])
            ready_s = np.maximum(ready_s, np.where(shared, other.ready_s, -np.inf).max(1))
        ends_s.append((ready_s + own.tail_s).max())
    return np.maximum(0.0, np.array(ends_s) - span.seconds)


def slowest_parts(step: StepTimes) -> dict[str, float]:
    """Return the parts of the group that the others wait for.

    Gradients join all groups, so every optimizer starts after the slowest group; the slowest of them ends
    the step.
    """
    last = step.parts["optimizer"]
    slowest = int((step.total - last).argmax())
    parts = {name: float(step.parts[name][slowest]) for name in TIME_PARTS}
    parts["bubble"] += float(last.max() - last[slowest])
    return parts
