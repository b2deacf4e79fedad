"""Engine `analytical`: closed formulas over a batch of pipelines.

A pipeline takes its slowest stage m times, plus one passage of the others (divided by the virtual
chunks); what gradient and weight collectives do not hide behind one micro-batch is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.predict.batch import Batch
from foreshard.predict.collective_tasks import (
    expert_replicas,
    message_s,
    region_s,
    shard_times,
    sync_times,
    tied_sync_s,
)
from foreshard.predict.formula import EndTimes, LayerTimes, end_times, layer_times
from foreshard.predict.host_tasks import optimizer_s
from foreshard.spec.prediction import TIME_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each distinct stage, shape (stages, pipelines)."""

    forward: np.ndarray
    backward: np.ndarray
    parts: dict[str, np.ndarray]  # sum to `total`
    total: np.ndarray
    weight: np.ndarray  # weight-gradient part of backward, what zero-bubble schedules move
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
    region = region_s(p.hidden, machine)
    ends = end_times(
        p.hidden, p.vocab, p.head_rows, machine, frozen=p.head_frozen, heads=p.heads, region=region
    )
    shape = batch.multiplicity.shape
    parts = {name: np.zeros(shape) for name in TIME_PARTS}
    forward, backward, weight, host = (np.zeros(shape) for _ in range(4))
    params, experts, every = (np.zeros(shape) for _ in range(3))
    for kind, count in zip(batch.kinds, batch.counts, strict=True):
        as_wide = not np.count_nonzero(kind.hidden - p.hidden)
        times = layer_times(kind, machine, batch.recompute, region=region if as_wide else None)
        _add_layers(parts, times, count)
        forward += count * times.forward_s
        backward += count * times.backward_s
        weight += count * times.backward_weight
        host += count * (times.host_forward + times.host_backward)
        trained = np.where(kind.trainable > 0, kind.trainable, 0.0)
        params += count * times.dense_params * trained
        experts += count * times.expert_params * (1.0 - np.asarray(kind.frozen, dtype=float))
        every += count * (times.dense_params + times.expert_params)
        _add_fsdp(parts, batch, times, count)
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
    _add_root(parts, batch, matrices * table)
    _add_messages(parts, batch)
    device = sum(parts.values())
    host += 2.0 * p.num_chunks * machine.constants.host_micro_batch * (1.0 - (machine.traits.graphs >= 1.0))
    q = machine.constants.host_sharpness
    ratio = host / np.maximum(device, 1e-12)
    waits = device * ((1.0 + ratio**q) ** (1.0 / q) - 1.0)
    parts["host"] += waits
    return StageTimes(
        # Collectives also run while the host holds the device up.
        forward=forward + waits,
        backward=backward + waits,
        parts=parts,
        total=device + waits,
        weight=weight,
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


def _add_fsdp(parts: dict[str, np.ndarray], batch: Batch, times: LayerTimes, count: np.ndarray) -> None:
    """Add what gathering weights and scattering gradients of each layer leaves exposed."""
    traits, c = batch.machine.traits, batch.machine.constants
    sharded = batch.machine.rank.zero >= 3
    if not np.count_nonzero(sharded):
        return
    shard = shard_times(times.dense_params, times.expert_params, batch.machine)
    exposed = 2.0 * shard.copy_weights + shard.copy_gradients
    for busy, moved in (
        (times.forward_s, shard.gather),
        (times.backward_s, shard.gather + shard.scatter),
    ):
        overlapped = np.maximum(busy + c.fsdp_contention * np.minimum(busy, moved), moved) - busy
        exposed = exposed + np.where(traits.grad_overlap > 0, overlapped, moved)
    parts["data_comm"] += count * exposed * sharded


def _add_root(parts: dict[str, np.ndarray], batch: Batch, params: np.ndarray) -> None:
    """Add gathering the sharded tables of both ends first and scattering them last, behind nothing."""
    sharded = batch.machine.rank.zero >= 3
    if np.count_nonzero(sharded):
        root = shard_times(params, 0.0, batch.machine)
        moved = root.gather + root.scatter + root.copy_weights + root.copy_gradients
        parts["data_comm"] += moved * sharded


def _add_messages(parts: dict[str, np.ndarray], batch: Batch) -> None:
    """Add the stage-to-stage messages of a micro-batch that nothing hides."""
    p, machine = batch.pipeline, batch.machine
    c = machine.constants
    one = message_s(p.hidden, p.crosses_node, machine)
    hidden = np.where((p.num_chunks > 1) & (machine.traits.p2p_overlap > 0), c.pipeline_hidden, 0.0)
    parts["pipeline_comm"] += np.where(p.num_stages > 1, 2.0 * p.num_chunks * one * (1.0 - hidden), 0.0)


def _gradient_sync(batch: Batch, stage: StageTimes) -> np.ndarray:
    """Return seconds per stage that gradient reduction and weight gathering leave exposed after a step."""
    machine, p = batch.machine, batch.pipeline
    rank, traits, limit = machine.rank, machine.traits, machine.constants.data_hidden
    exposed = 0.0
    for params, ranks, stride in (
        (stage.params, rank.dp * rank.cp, rank.sync_stride),
        (stage.expert_params, expert_replicas(rank), rank.ep * rank.etp),
    ):
        if np.count_nonzero(params):
            reduce, gather = sync_times(params, ranks, stride, machine)
            exposed = exposed + _unhidden(reduce, stage.backward, traits.grad_overlap, limit)
            exposed = exposed + _unhidden(gather, stage.forward, traits.param_gather_overlap, limit)
    exposed = np.where(rank.zero >= 3, 0.0, exposed)
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
    total = np.where(present, stage.total, -1.0)
    slowest = total.argmax(0)
    pace = _of_stage(slowest)
    t_max = pace(total)
    # Zero-bubble H1 fills idle time with weight gradients: only forward + input - weight stays open.
    passage = np.where(p["zero_bubble"] > 0, np.maximum(stage.total - 2.0 * stage.weight, 0.0), stage.total)
    once = (passage * batch.multiplicity).sum(0) - pace(passage)
    m = p["num_micro_batches"]
    parts = {name: m * pace(value) for name, value in stage.parts.items()}
    parts["bubble"] = once / p["num_chunks"]
    sync = np.where(present, _gradient_sync(batch, stage), 0.0)
    once_a_step = optimizer_s(stage.params, stage.expert_params, sum(batch.counts), batch.machine)
    optimizer = np.where(present, once_a_step, 0.0)
    tail = sync + optimizer
    latest = _of_stage(tail.argmax(0))
    parts["data_comm"] = parts["data_comm"] + latest(sync)
    parts["optimizer"] = latest(optimizer)
    busy = m * t_max + parts["bubble"] + latest(tail)
    doublings = np.maximum(0.0, np.log2(np.maximum(p["num_devices"], 1.0) / 8.0))
    parts["straggler"] = batch.machine.constants.jitter * doublings * busy
    return StepTimes(total=busy + parts["straggler"], parts=parts, stage=slowest)
