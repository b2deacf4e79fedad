"""What one micro-batch takes on every stage of a batch of pipelines, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from foreshard.graph.pipeline_schedules import BY_ORDER, PAIRED
from foreshard.predict.analytical.sharded import ShardedUnit, Waits, on_device, waits
from foreshard.predict.batch import Batch
from foreshard.predict.tasks.collectives import (
    ShardTimes,
    Sharing,
    accumulates_whole,
    every_reduce_s,
    has_replicas,
    message_s,
    region_times,
    shard_times,
    sharing_of,
)
from foreshard.predict.tasks.formula import EndTimes, LayerTimes, end_times, layer_times
from foreshard.predict.tasks.host import joined_s
from foreshard.spec.prediction import TIME_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Seconds of a run's messages between stages, one way, of one chunk and one micro-batch."""

    near: Any  # one message inside a link domain
    far: Any  # one that leaves it
    after: Any  # from the last stage of the run to the stage after it
    each: Any  # to or from all neighbours of a stage, one after another
    widest: Any  # the longer of a stage's messages
    port: Any  # through the busier of a stage's two ports, to the network and to its link domain


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each run of equal stages, shape (runs, pipelines)."""

    forward: np.ndarray
    backward: np.ndarray
    messages: Messages
    parts: dict[str, np.ndarray]  # sum to `total`
    total: np.ndarray  # in the steady state, with the messages that nothing hides
    last_share: np.ndarray  # work of the last micro-batch over that of the others
    reduce_once: np.ndarray  # of that work what reducing the gradients of all micro-batches adds
    host: np.ndarray  # what the host needs, of `forward` and `backward`
    later: np.ndarray  # of `backward` what zero-bubble schedules move; 0 where no pipeline has one
    waits: Waits | None  # of both what passes wait for sharded weights; in pipelines alone
    # what the head takes of `forward`, `backward` but for `later`, and `later`, where stages have it
    head: tuple[Any, Any, Any]
    params: np.ndarray  # trained parameters of a rank, dense and expert
    expert_params: np.ndarray


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
    params, experts = np.zeros(shape), np.zeros(shape)
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
    at_layers = sum(parts.values())
    _add_ends(parts, batch, ends)
    at_ends = sum(parts.values()) - at_layers
    forward += batch.has_embedding * (ends.embedding_forward + ends.embedding_tensor / 2)
    forward += batch.has_head * (ends.head_forward + ends.head_tensor / 2)
    table = p.hidden * p.vocab / machine.rank.tp
    params = params + (batch.has_embedding + batch.own_head) * table * (1.0 - p.head_frozen)
    later += batch.has_embedding * ends.embedding_backward + batch.has_head * ends.head_backward / 2
    later += _reduce_tables(parts, batch, table, ends, dense)
    computed = np.asarray(sum(parts.values()))
    beside, waited, unit_waits = np.zeros((3, *shape)), np.zeros((4, *shape)), None
    beside_last = beside.sum(0)
    last_units = _units(batch, layers, ends, table, dense)
    once = np.asarray(accumulates_whole(machine)) if last_units else np.zeros(shape, dtype=bool)
    units = [unit.accumulating(once) for unit in last_units] if once.any() else last_units
    if units:
        beside = on_device(units, machine, shape)
        beside_last = (on_device(last_units, machine, shape) if once.any() else beside).sum(0)
    device = computed + beside.sum(0)
    between = 2.0 * machine.constants.host_micro_batch * (1.0 - (machine.traits.graphs >= 1.0))
    in_layers, host = host, host + p.num_chunks * between
    of_chunks = partial(_chunk_seconds, batch, at_ends, in_layers, between)
    joined = of_chunks(device)
    # The host holds up the tasks of forward and backward in proportion.
    longer = 1.0 + (joined - device) / np.maximum(computed, 1e-12)
    # The host launches the kernels of a short micro-batch too.
    short = p.num_micro_batches - np.ceil(p.num_micro_batches - 1e-9) + 1.0
    last = of_chunks(short * computed + beside_last, short)
    if units:
        shorter = 1.0 + (last - beside_last - computed) / np.maximum(computed, 1e-12)
        waited, unit_waits = _unit_waits(batch, units, last_units, longer, shorter)
    work = joined + waited[0] + waited[1]
    is_other = (short < 1.0 - 1e-9) | once
    last_share = np.where(is_other, (last + waited[2]) / np.maximum(work, 1e-12), 1.0)
    reduce_once = once * (beside_last + waited[2] - beside.sum(0) - waited[0] - waited[1])
    parts["host"] += joined - device
    sent = has_replicas(machine.rank) | ((p.tied > 0) & (np.asarray(p.num_stages) > 1))
    sharding = beside.sum(0) + waited[0] + waited[1]
    parts["data_comm"] += sharding * sent
    parts["compute"] += sharding * ~sent
    if np.count_nonzero(p.zero_bubble):
        later = p.zero_bubble * np.maximum(longer * later + beside[2] + waited[1] - waited[3], 0.0)
    else:
        later = np.zeros(shape)
    head_s = longer * batch.has_head
    half_tensor, half_backward = ends.head_tensor / 2, ends.head_backward / 2
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
        reduce_once=reduce_once,
        host=host,
        later=later,
        waits=unit_waits,
        head=(
            head_s * (ends.head_forward + half_tensor),
            head_s * (half_backward + half_tensor),
            head_s * half_backward,
        ),
        params=params,
        expert_params=experts,
    )


def _chunk_seconds(
    batch: Batch, at_ends: Any, host: Any, between: Any, device: Any, short: Any = 1.0
) -> np.ndarray:
    """Return the seconds of device and host together, which each chunk of a stage joins by itself.

    Chunks differ by a layer at most. The first has the embedding and the last the head, `at_ends` seconds of
    `device`, of a micro-batch of the part `short`; `host` is of the layers, `between` of each chunk besides.
    """
    sharpness = batch.machine.constants.host_sharpness
    chunks = np.asarray(batch.pipeline.num_chunks)
    one = joined_s(device, host + chunks * between, sharpness)
    if not np.count_nonzero(chunks > 1):
        return np.asarray(one)
    layers = np.maximum(np.asarray(sum(batch.counts)), 1.0)
    ends = short * at_ends
    found, larger = 0.0, layers - chunks * np.floor(layers / chunks)
    of_layer, host_of_layer = (device - ends) / layers, host / layers
    with_ends = (batch.has_embedding > 0) * 1.0 + (batch.has_head > 0)
    for count, held in ((larger, np.ceil(layers / chunks)), (chunks - larger, np.floor(layers / chunks))):
        own, launched = held * of_layer, held * host_of_layer + between
        found = found + count * joined_s(own, launched, sharpness)
    # The ends are in chunks of their own kind: the first ones have more layers.
    for has, held in (
        (batch.has_embedding > 0, np.ceil(layers / chunks)),
        (batch.has_head > 0, np.floor(layers / chunks)),
    ):
        own, launched = held * of_layer, held * host_of_layer + between
        more = joined_s(own + ends / np.maximum(with_ends, 1.0), launched, sharpness)
        found = found + has * (more - joined_s(own, launched, sharpness))
    return np.where(chunks > 1, found, one)


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
        moved = params * trained, experts * trained_experts
        whole = shard_times(params, experts, machine, dense=dense, trained=moved)
        part = shard_times(*moved, machine, dense=dense)
        return ShardTimes(
            gather=sharded * whole.gather,
            scatter=sharded * part.scatter,
            copy_weights=sharded * whole.copy_weights,
            copy_gradients=sharded * part.copy_gradients,
            add_gradients=sharded * part.add_gradients,
        )

    own = 1.0 - p.tied * (batch.has_embedding > 0)
    again, table_again = _regathered(batch, layers, batch.has_head * own * table)
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
    for name, count, held, more in (
        ("embedding", batch.has_embedding, 1.0, table_again),
        ("head", batch.has_head, own, 0.0),
    ):
        backward = getattr(ends, f"{name}_backward")
        units.append(
            ShardedUnit(
                count=count,
                forward=getattr(ends, f"{name}_forward") + halves[name],
                backward=backward + halves[name],
                late=backward / (1.0 + (name == "head")),
                counting=0.0,
                shard=shard(table * held, 0.0, 1.0 - p.head_frozen, 1.0),
                regathers=more,
            )
        )
    return units


def _regathered(batch: Batch, layers: list[LayerTimes], head: Any) -> tuple[Any, Any]:
    """Return the share of a stage's layers that are gathered again before backward, and of its embedding."""
    traits = batch.machine.traits
    table = traits.regathers * traits.regathers_table * (np.asarray(batch.pipeline.tied) <= 0)
    if not np.count_nonzero(traits.kept_elements):
        return traits.regathers, table
    count = np.maximum(np.asarray(sum(batch.counts)), 1.0)
    held = sum(
        number * (times.dense_params + times.expert_params)
        for number, times in zip(batch.counts, layers, strict=True)
    )
    kept = np.ceil(np.maximum(traits.kept_elements - head, 0.0) * count / np.maximum(held, 1.0))
    return traits.regathers * (1.0 - np.minimum(kept / count, 1.0)), table * (
        held + head >= traits.kept_elements
    )


def _unit_waits(
    batch: Batch, units: list[ShardedUnit], last_units: list[ShardedUnit], longer: Any, shorter: Any
) -> tuple[np.ndarray, Waits | None]:
    """Return what stages wait for in forward, backward, both of the last micro-batch, half a backward.

    That half are the gradients of inputs, before those of weights: what pipelines with zero bubble pass on.
    Beside it the waits of a pass that pipelines pass on.
    """

    def of(*, longer: Any, units: list[ShardedUnit] = units, **part: Any) -> Waits:
        *layers, embedding, head = units
        own = {"order": batch.order, "longer": longer, "chunks": batch.pipeline.num_chunks}
        return waits(layers, embedding, head, batch.machine, **own, **part)

    whole = of(longer=longer)
    passed = whole
    is_split = np.asarray(batch.pipeline.zero_bubble) > 0
    if np.count_nonzero(is_split):
        given, late = of(longer=longer, part="given"), of(longer=longer, part="late")
        # Backwards that run beside forwards are whole.
        paired = [1 + BY_ORDER.index(name) for name in PAIRED]
        in_two = is_split & ~np.isin(batch.pipeline.by_order, paired)
        whole = whole._replace(backward=np.where(in_two, given.backward + late.backward, whole.backward))
        passed = whole._replace(
            backward=np.where(is_split, given.backward, whole.backward),
            after_backward=np.where(is_split, given.after_backward, whole.after_backward),
        )
    short = whole.forward + whole.backward
    if last_units is not units or np.count_nonzero(shorter < longer):
        last = of(longer=shorter, units=last_units)
        short = last.forward + last.backward
    shape = batch.multiplicity.shape
    stated = (whole.forward, whole.backward, short, passed.backward)
    waited = np.stack([np.zeros(shape) + seconds for seconds in stated])
    # Interleaved passes follow each other in their rounds too; schedules of `BY_ORDER` know which do.
    is_pipeline = (batch.pipeline.num_stages > 1) & (
        (batch.pipeline.num_chunks <= 1) | (np.asarray(batch.pipeline.by_order) > 0)
    )
    if not np.count_nonzero(is_pipeline):
        return waited, None
    return waited, Waits(*(np.zeros(shape) + is_pipeline * seconds for seconds in passed))


def _reduce_tables(
    parts: dict[str, np.ndarray], batch: Batch, table: Any, ends: EndTimes, dense: Sharing
) -> Any:
    """Add, and return, what reducing the tables of both ends every micro-batch leaves exposed (ZeRO 2)."""
    p, machine = batch.pipeline, batch.machine
    if not np.count_nonzero(machine.rank.zero == 2):
        return 0.0
    first = batch.has_embedding * table
    last = batch.own_head * table
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
        near=near,
        far=far,
        after=after,
        each=by_link + by_network,
        widest=np.where(places.far_each > 0, far, near),
        port=np.maximum(by_link, by_network),
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
