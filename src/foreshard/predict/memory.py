"""Peak memory of every stage of a plan, from the byte formulas of `cost.memory`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foreshard.cost.memory import MemoryParts, StageLoad, optimizer_state_bytes, stage_memory
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.predict.batch import Case, layer_counts, rank_micro_batch, sync_width
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import MEMORY_PARTS, Memory

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


def stage_loads(case: Case) -> tuple[StageLoad, list[tuple[int, int]]]:
    """Return what every stage of every group holds, and the (group, stage) of each row."""
    plan, model = case.plan, case.model
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    where = [(g, s) for g, group in enumerate(plan.groups) for s in range(len(group.stages))]
    stages = [(plan.groups[g], plan.groups[g].stages[s], s) for g, s in where]
    counts = np.array([layer_counts(model, stage, kinds) for _, stage, _ in stages])
    rules = [
        recompute_of(stage.recompute, max(1, round(sum(row) / len(stage.layers))))
        for (_, stage, _), row in zip(stages, counts, strict=True)
    ]

    def column(values: Sequence[float]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    dense = column([sync_width(plan, stage) * stage.cp for _, stage, _ in stages])
    load = StageLoad(
        kinds=tuple((block, counts[:, i]) for block, i in kinds.items()),
        has_embedding=column([any(a == 0 for a, _ in stage.layers) for _, stage, _ in stages]),
        has_head=column([any(b == model.num_layers + 2 for _, b in stage.layers) for _, stage, _ in stages]),
        hidden=model.hidden,
        vocab=column([_padded_vocab(case, stage) for _, stage, _ in stages]),
        tied=float(model.tied_embeddings),
        in_flight=column([in_flight(group, s) for group, _, s in stages]),
        num_micro_batches=column([group.num_micro_batches for group, _, _ in stages]),
        micro_batch=column([rank_micro_batch(group, stage) for group, stage, _ in stages]),
        seq_len=float(plan.seq_len),
        tp=column([stage.tp for _, stage, _ in stages]),
        cp=column([stage.cp for _, stage, _ in stages]),
        ep=column([stage.ep for _, stage, _ in stages]),
        etp=column([stage.etp for _, stage, _ in stages]),
        dp=dense,
        expert_dp=column([_expert_ranks(plan, stage) for _, stage, _ in stages]),
        shard_size=np.minimum(dense, column([stage.shard_size or 2**40 for _, stage, _ in stages])),
        zero=column([stage.zero for _, stage, _ in stages]),
        sp=column([group.sp and stage.tp > 1 for group, stage, _ in stages]),
        activation_bytes_per_element=4.0 if plan.precision in ("fp32", "tf32") else 2.0,
        fp8=float(plan.precision in _EIGHT_BIT),
        fp4=float(plan.precision == "nvfp4"),
        recompute=Recompute.stack(rules),
        offload_optimizer=column([stage.offload in ("optimizer", "all") for _, stage, _ in stages]),
        offload_activations=column([stage.offload in ("activations", "all") for _, stage, _ in stages]),
        state_bytes=optimizer_state_bytes(plan.optimizer, case.framework.moment_bytes),
        outer_params=_outer_params(model),
        embedding_trainable=float(not model.embedding_frozen),
        head_trainable=float(not model.head_frozen),
    )
    return load, where


def _expert_ranks(plan: Plan, stage: Stage) -> float:
    return max(1.0, sync_width(plan, stage) * stage.cp * stage.tp / (stage.ep * stage.etp))


def _outer_params(model: Model) -> float:
    return float(model.learned_positions * model.hidden)


def plan_memory(case: Case) -> tuple[Memory, MemoryParts]:
    """Return the peak of the fullest rank (peak over capacity) and the parts of every stage."""
    load, where = stage_loads(case)
    parts = stage_memory(load, case.framework)
    capacities = np.array(
        [
            min(case.cluster.device_of(rank).capacity_bytes for rank in _sample(case.plan.groups[g].stages[s]))
            for g, s in where
        ]
    )
    peak = parts.peak
    fullest = int(np.argmax(peak / capacities))
    g, s = where[fullest]
    stage = case.plan.groups[g].stages[s]
    rank = min(_sample(stage), key=lambda r: case.cluster.device_of(r).capacity_bytes)
    breakdown = {name: float(np.broadcast_to(getattr(parts, name), peak.shape)[fullest]) for name in MEMORY_PARTS}
    table: list[list[float]] = [[] for _ in case.plan.groups]
    for (group, _), value in zip(where, peak, strict=True):
        table[group].append(float(value))
    total = sum(breakdown.values())
    memory = Memory(
        peak_bytes=total,
        peak_allocated_bytes=float(np.broadcast_to(parts.allocated, peak.shape)[fullest]),
        peak_rank=rank,
        capacity_bytes=float(capacities[fullest]),
        fits=bool(np.all(peak <= capacities)),
        breakdown_bytes=breakdown,
        per_stage_peak_bytes=tuple(tuple(row) for row in table),
    )
    return memory, parts


def _sample(stage: Stage) -> tuple[int, ...]:
    return stage.ranks
