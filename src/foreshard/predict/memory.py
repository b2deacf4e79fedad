"""Peak memory of every stage of a plan, from the byte formulas of `cost.memory`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from foreshard.cost.memory import CHANNELS, MemoryParts, StageLoad, optimizer_state_bytes, stage_memory
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.predict.batch import (
    Case,
    Worker,
    layer_counts,
    layer_replicas,
    stage_workers,
    sync_width,
)
from foreshard.spec.device import Device
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Stage
from foreshard.spec.prediction import MEMORY_PARTS, Memory

_NVLINK_BYTES_PER_S = 25e9  # one link, one direction, NVLink 2 to 4
_EIGHT_BIT = ("fp8", "mxfp8")


def in_flight(group: Group, stage: int) -> float:
    """Return the micro-batches whose activations each layer of a stage holds at the peak.

    Source
    ------
    Megatron-Core schedules: 1F1B min(m, p - i); interleaved 2(p - i - 1) + (v - 1)p + 1 chunks of v.
    """
    p, m, v = len(group.stages), group.num_micro_batches, group.num_chunks
    if group.schedule == "gpipe":
        return float(m)
    if v > 1 and p > 1:
        return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
    return float(min(m, p - stage))


def _padded_vocab(case: Case, stage: Stage) -> int:
    unit = case.framework.vocab_multiple * stage.tp
    return math.ceil(case.model.vocab / unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One kind of rank of one stage."""

    g: int
    s: int
    group: Group
    stage: Stage
    worker: Worker
    replicas: float  # ranks over all groups that hold the same dense weights, apart from cp


def _rows(case: Case) -> list[_Row]:
    replicas = layer_replicas(case.plan, case.model.num_layers)
    return [
        _Row(g=g, s=s, group=group, stage=stage, worker=worker, replicas=sync_width(stage, replicas))
        for g, group in enumerate(case.plan.groups)
        for s, stage in enumerate(group.stages)
        for worker in stage_workers(case.cluster, group, stage)
    ]


def _samples(row: _Row) -> float:
    """Return the samples of a micro-batch on the rank; a step may hold fewer than one micro-batch."""
    if row.stage.rank_shares is not None:
        return row.worker.share
    return min(row.worker.share, math.ceil(row.group.share / row.stage.inner_dp))


def _load(case: Case, rows: list[_Row]) -> StageLoad:
    """Return what each kind of rank holds."""
    plan, model = case.plan, case.model
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    stages = [row.stage for row in rows]
    counts = np.array([layer_counts(model, stage, kinds) for stage in stages])
    rules = [
        recompute_of(stage.recompute, max(1, round(sum(row) / len(stage.layers))))
        for stage, row in zip(stages, counts, strict=True)
    ]
    last = model.num_layers + 2

    def column(value: Callable[[_Row], float]) -> np.ndarray:
        return np.array([value(row) for row in rows], dtype=np.float64)

    return StageLoad(
        kinds=tuple((block, counts[:, i]) for block, i in kinds.items()),
        has_embedding=column(lambda r: any(start == 0 for start, _ in r.stage.layers)),
        has_head=column(lambda r: any(stop == last for _, stop in r.stage.layers)),
        hidden=model.hidden,
        vocab=column(lambda r: _padded_vocab(case, r.stage)),
        tied=float(model.tied_embeddings),
        in_flight=column(lambda r: in_flight(r.group, r.s)),
        num_micro_batches=column(lambda r: r.group.num_micro_batches),
        num_stages=column(lambda r: len(r.group.stages)),
        channels=column(lambda r: nccl_channels(case.cluster.nodes[r.worker.node_group].device)),
        micro_batch=column(lambda r: _samples(r)),
        seq_len=float(plan.seq_len),
        tp=column(lambda r: r.stage.tp),
        cp=column(lambda r: r.stage.cp),
        ep=column(lambda r: r.stage.ep),
        etp=column(lambda r: r.stage.etp),
        dp=column(lambda r: r.replicas * r.stage.cp),
        expert_dp=column(
            lambda r: max(1.0, r.replicas * r.stage.cp * r.stage.tp / (r.stage.ep * r.stage.etp))
        ),
        shard_size=column(lambda r: r.stage.shard_size or r.stage.inner_dp * r.stage.cp),
        zero=column(lambda r: r.stage.zero),
        sp=column(lambda r: r.group.sp and r.stage.tp > 1),
        activation_bytes_per_element=4.0 if plan.precision in ("fp32", "tf32") else 2.0,
        fp8=float(plan.precision in _EIGHT_BIT),
        fp4=float(plan.precision == "nvfp4"),
        recompute=Recompute.stack(rules),
        offload_optimizer=column(lambda r: r.stage.offload in ("optimizer", "all")),
        offload_activations=column(lambda r: r.stage.offload in ("activations", "all")),
        state_bytes=optimizer_state_bytes(plan.optimizer, case.framework.moment_bytes),
        outer_params=_outer_params(model),
        embedding_trainable=float(not model.embedding_frozen),
        head_trainable=float(not model.head_frozen),
    )


def nccl_channels(device: Device) -> int:
    """Return the NCCL channels of a collective: two per NVLink up to 24, two without.

    Source
    ------
    nccl#964 (24 on A100 with its 12 links of 25 GB/s); later links are faster, the bound holds there.
    """
    return max(2, min(CHANNELS, round(2 * device.link_bytes_per_s / _NVLINK_BYTES_PER_S)))


def _outer_params(model: Model) -> float:
    return float(model.learned_positions * model.hidden)


def plan_memory(case: Case) -> tuple[Memory, MemoryParts]:
    """Return the peak of the fullest rank (peak over capacity) and the parts of every stage.

    Ranks of one stage that differ in device or samples are priced apart; the fullest stands for the stage.

    Returns
    -------
    memory : Memory
    parts : MemoryParts
        One row per stage, group by group.
    """
    rows = _rows(case)
    overlapped = bool(case.plan.comm.get("tp_overlap", case.framework.tp_overlap))
    parts = stage_memory(_load(case, rows), replace(case.framework, tp_overlap=overlapped))
    capacity = np.array([case.cluster.nodes[row.worker.node_group].device.capacity_bytes for row in rows])
    fullest_first = np.argsort(-(parts.peak / capacity), kind="stable")
    chosen: dict[tuple[int, int], int] = {}
    for i in fullest_first.tolist():
        chosen.setdefault((rows[i].g, rows[i].s), i)
    table: list[list[float]] = [[0.0] * len(group.stages) for group in case.plan.groups]
    for (g, s), i in chosen.items():
        table[g][s] = float(parts.peak[i])
    fullest = int(fullest_first[0])
    breakdown = {
        name: float(np.broadcast_to(getattr(parts, name), parts.peak.shape)[fullest]) for name in MEMORY_PARTS
    }
    memory = Memory(
        peak_bytes=sum(breakdown.values()),
        peak_allocated_bytes=float(parts.allocated[fullest]),
        peak_rank=rows[fullest].worker.rank,
        capacity_bytes=float(capacity[fullest]),
        fits=bool(np.all(parts.peak <= capacity)),
        breakdown_bytes=breakdown,
        per_stage_peak_bytes=tuple(tuple(row) for row in table),
    )
    return memory, _take(parts, [chosen[where] for where in sorted(chosen)])


def _take(parts: MemoryParts, rows: list[int]) -> MemoryParts:
    """Return some rows of the parts."""
    shape = parts.peak.shape
    values = {f.name: np.broadcast_to(getattr(parts, f.name), shape)[rows] for f in fields(MemoryParts)}
    return MemoryParts(**values)
