"""Engine `analytical`: closed formulas over a batch of pipelines.

A pipeline takes its slowest stage m times, plus one passage of the others (divided by the virtual
chunks); what gradient and weight collectives do not hide behind one micro-batch is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.graph.pace import pipeline_pace
from foreshard.predict.batch import Batch
from foreshard.predict.tasks.collectives import (
    Sharing,
    across_groups_s,
    every_reduce_s,
    expert_replicas,
    message_s,
    region_times,
    sharded_layer_s,
    sharded_table_s,
    sharing_of,
    sync_times,
    tied_sync_s,
)
from foreshard.predict.tasks.formula import EndTimes, LayerTimes, end_times, layer_times
from foreshard.predict.tasks.host import optimizer_s
from foreshard.spec.prediction import TIME_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each distinct stage, shape (stages, pipelines)."""

    forward: np.ndarray
    backward: np.ndarray
    device_forward: np.ndarray  # of `forward`, without the host
    parts: dict[str, np.ndarray]  # sum to `total`
    total: np.ndarray
    moved: np.ndarray
    """`total` without weight gradients and their collectives, which zero-bubble schedules move; `total` where
    no pipeline has one."""
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
    forward, backward, later, host, host_later = (np.zeros(shape) for _ in range(5))
    params, experts, every = (np.zeros(shape) for _ in range(3))
    for kind, count in zip(batch.kinds, batch.counts, strict=True):
        as_wide = not np.count_nonzero(kind.hidden - p.hidden)
        times = layer_times(
            kind, machine, batch.recompute, region=region if as_wide else None, dense_sharing=dense
        )
        _add_layers(parts, times, count)
        forward += count * times.forward_s
        backward += count * times.backward_s
        later += count * (times.backward_weight + times.reduce_backward)
        host += count * (times.host_forward + times.host_backward)
        host_later += count * times.host_backward / 2
        trained = np.where(kind.trainable > 0, kind.trainable, 0.0)
        params += count * times.dense_params * trained
        experts += count * times.expert_params * (1.0 - np.asarray(kind.frozen, dtype=float))
        every += count * (times.dense_params + times.expert_params)
        later += _add_fsdp(parts, batch, times, count, dense)
    _add_ends(parts, batch, ends)
    forward += batch.has_embedding * ends.embedding_forward + batch.has_head * (
        ends.head_forward + ends.head_tensor / 2
    )
    backward += batch.has_embedding * ends.embedding_backward + batch.has_head * (
        ends.head_backward + ends.head_tensor / 2
    )
    table = p.hidden * p.vocab / machine.rank.tp
    matrices = batch.has_embedding + batch.has_head * (1.0 - p.tied * (batch.has_embedding > 0))
    params = params + matrices * table * (1.0 - p.head_frozen)
    every = every + matrices * table
    later += batch.has_embedding * ends.embedding_backward + batch.has_head * ends.head_backward / 2
    later += _add_tables(parts, batch, table, ends, dense)
    device = np.asarray(sum(parts.values()))
    host += 2.0 * p.num_chunks * machine.constants.host_micro_batch * (1.0 - (machine.traits.graphs >= 1.0))
    sharpness = machine.constants.host_sharpness
    total = _join(device, host, sharpness)
    waits = total - device
    parts["host"] += waits
    messages = _messages(batch)
    parts["pipeline_comm"] += messages
    moved = total
    if np.count_nonzero(p.zero_bubble):  # no other schedule asks
        moved = _join(device - later, host - host_later, sharpness)
    return StageTimes(
        # Collectives also run while the host holds the device up.
        forward=forward + waits,
        backward=backward + waits,
        device_forward=forward,
        parts=parts,
        total=total + messages,
        moved=moved + messages,
        params=params,
        expert_params=experts,
        all_params=every,
    )


def _join(device: np.ndarray, host: np.ndarray, sharpness: float) -> np.ndarray:
    """Return the longer of two times, rounded where they are close."""
    ratio = host / np.maximum(device, 1e-12)
    return device * (1.0 + ratio**sharpness) ** (1.0 / sharpness)


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


def _add_fsdp(
    parts: dict[str, np.ndarray], batch: Batch, times: LayerTimes, count: np.ndarray, dense: Sharing
) -> Any:
    """Add what gathering weights and scattering gradients of each layer leaves exposed.

    Returns how much of it goes with the weight gradients.
    """
    given = times.backward_s - times.backward_weight
    forward, first, both = sharded_layer_s(
        times.dense_params,
        times.expert_params,
        times.forward_s,
        given,
        times.backward_weight,
        batch.machine,
        dense=dense,
    )
    parts["data_comm"] += count * (forward + both)
    return count * (both - first)


def _add_tables(
    parts: dict[str, np.ndarray], batch: Batch, table: Any, ends: EndTimes, dense: Sharing
) -> Any:
    """Add the collectives of the tables of both ends in every micro-batch (ZeRO 2 and 3).

    Returns how much of it goes with the weight gradients.
    """
    p, machine = batch.pipeline, batch.machine
    first = batch.has_embedding * table
    last = batch.has_head * (1.0 - p.tied * (batch.has_embedding > 0)) * table
    gather, scatter = sharded_table_s(first + last, machine, dense=dense)
    reduce: Any = 0.0
    if np.count_nonzero(machine.rank.zero == 2):
        tables = np.array((first, last)) * (1.0 - p.head_frozen)
        busy = np.array((np.zeros_like(last), ends.head_backward + np.zeros_like(last)))
        reduce = every_reduce_s(tables, 0.0, machine, busy, dense=dense).sum(0)
    parts["data_comm"] += gather + scatter + reduce
    return scatter + reduce


def _messages(batch: Batch) -> Any:
    """Return the seconds of a micro-batch's messages between stages that nothing hides.

    The host waits for them.
    """
    p, machine = batch.pipeline, batch.machine
    c = machine.constants
    one = message_s(p.hidden, p.crosses_node, machine)
    hidden = np.where((p.num_chunks > 1) & (machine.traits.p2p_overlap > 0), c.pipeline_hidden, 0.0)
    return np.where(p.num_stages > 1, 2.0 * p.num_chunks * one * (1.0 - hidden), 0.0)


def tail_times(batch: Batch, stage: StageTimes) -> tuple[np.ndarray, np.ndarray]:
    """Return what follows the last micro-batch on each stage: exposed gradient collectives, the optimizer."""
    optimizer = optimizer_s(stage.params, stage.expert_params, sum(batch.counts), batch.machine)
    return _gradient_sync(batch, stage), optimizer


def _gradient_sync(batch: Batch, stage: StageTimes) -> np.ndarray:
    """Return seconds per stage that gradient reduction and weight gathering leave exposed after a step."""
    machine, p = batch.machine, batch.pipeline
    rank, traits, limit = machine.rank, machine.traits, machine.constants.data_hidden
    exposed = 0.0
    for params, ranks, stride, own in (
        (stage.params, rank.dp * rank.cp, rank.sync_stride, rank.own_stride),
        (stage.expert_params, expert_replicas(rank), rank.expert_stride, rank.own_expert_stride),
    ):
        if np.count_nonzero(params):
            reduce, gather = sync_times(params, ranks, stride, machine, own_stride=own)
            exposed = exposed + _unhidden(reduce, stage.backward, traits.grad_overlap, limit)
            exposed = exposed + _unhidden(gather, stage.forward, traits.param_gather_overlap, limit)
    exposed = np.where(rank.zero >= 3, 0.0, exposed) + across_groups_s(
        stage.params, stage.expert_params, machine
    )
    if not np.count_nonzero(p.tied):
        return exposed
    tied = tied_sync_s(p.hidden, p.vocab, p.crosses_node, machine) * p.tied
    tied = tied * np.maximum(batch.has_embedding, batch.has_head)
    return exposed + np.where(p.num_stages > 1, tied, 0.0)


def _unhidden(moved: Any, behind: Any, overlaps: Any, limit: float) -> Any:
    """Return what is left of `moved` seconds when up to `limit` of it can run behind `behind` seconds."""
    return moved - overlaps * np.minimum(limit * moved, behind)


def _of_stage(stage: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return what picks one stage of each pipeline from an array (stages, pipelines)."""
    flat = stage * stage.size + np.arange(stage.size)
    return lambda values: values.take(flat)


def _zero_bubble(stage: StageTimes, batch: Batch, m: np.ndarray, t_max: np.ndarray) -> np.ndarray:
    """Return the idle seconds of zero-bubble H1: the longest of two paths, less the work of a stage.

    A stage puts off the weight gradients of as many micro-batches as stages follow it. What has to pass all
    stages then has none of them; no stage ends before the passage of the others' forwards. Both paths are
    sums of task times, so a faster task never lengthens the step.
    """
    count = batch.multiplicity
    present = count > 0
    moved, forward = np.where(present, stage.moved, 0.0), np.where(present, stage.device_forward, 0.0)
    put_off = np.minimum(m, count.sum(0) - 1.0)
    passing = (moved * count).sum(0) - moved.max(0) + put_off * moved.max(0) + (m - put_off) * t_max
    waiting = (forward * count).sum(0) - forward.max(0) + m * t_max
    return np.maximum(passing, waiting) - m * t_max


def step_times(batch: Batch) -> StepTimes:
    """Return the step time of every pipeline and its parts on the rank that sets the pace.

    Returns
    -------
    StepTimes
        Arrays of shape (pipelines,).

    Source
    ------
    docs/derivations/step.md.
    """
    p = {
        name: np.asarray(getattr(batch.pipeline, name))[0]
        for name in ("num_micro_batches", "num_chunks", "num_devices", "zero_bubble")
    }
    stage = stage_times(batch)
    present = batch.multiplicity > 0
    once, t_max, slowest = pipeline_pace(stage.total, batch.multiplicity)
    pace = _of_stage(slowest)
    m = p["num_micro_batches"]
    if np.count_nonzero(p["zero_bubble"]):
        once = np.where(p["zero_bubble"] > 0, _zero_bubble(stage, batch, m, t_max), once)
    parts = {name: m * pace(value) for name, value in stage.parts.items()}
    parts["bubble"] = once / p["num_chunks"]
    sync, optimizer = (np.where(present, after, 0.0) for after in tail_times(batch, stage))
    tail = sync + optimizer
    latest = _of_stage(tail.argmax(0))
    parts["data_comm"] = parts["data_comm"] + latest(sync)
    parts["optimizer"] = latest(optimizer)
    busy = m * t_max + parts["bubble"] + latest(tail)
    doublings = np.maximum(0.0, np.log2(np.maximum(p["num_devices"], 1.0) / 8.0))
    parts["straggler"] = batch.machine.constants.jitter * doublings * busy
    return StepTimes(total=busy + parts["straggler"], parts=parts, stage=slowest)
