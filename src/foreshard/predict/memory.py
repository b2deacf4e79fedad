"""Peak memory of every stage of a plan, from the byte formulas of `cost.memory`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from foreshard.cost.memory import MemoryParts, StageLoad, stage_memory
from foreshard.cost.memory_activations import Recompute
from foreshard.graph.pipeline_schedules import BY_ORDER, held_chunks
from foreshard.graph.shapes import RankShape
from foreshard.predict.batch import PlannedRun, layer_counts, rank_shape, stage_ends, stage_recompute
from foreshard.predict.memory_interval import fits_probability, memory_interval
from foreshard.predict.placement import (
    Worker,
    first_of_equals,
    layer_replicas,
    stage_workers,
    sync_width,
)
from foreshard.predict.run_setup import stacked
from foreshard.spec.plan import Group, Stage
from foreshard.spec.prediction import MEMORY_PARTS, Memory


def in_flight(group: Group, stage: int, *, expert_overlap: bool = False) -> float:
    """Return the micro-batches whose activations each layer of a stage holds at the peak.

    Where exchanges of experts run beside the passes of another micro-batch, an interleaved stage is one chunk
    further ahead.

    Source
    ------
    Megatron-Core schedules: 1F1B min(m, p - i); interleaved 2(p - i - 1) + (v - 1)p + 1 chunks of v (one more
    with overlap_moe_expert_parallel_comm, schedules.py d98e8a6); others by counting their order of work.
    """
    p, m, v = len(group.stages), group.num_micro_batches, group.num_chunks
    if group.schedule in BY_ORDER and p > 1:
        return float(held_chunks(group.schedule, p, m)[stage]) / v
    if group.schedule == "gpipe" and p > 1:
        return float(m)
    if v > 1 and p > 1:
        ahead = expert_overlap and group.stages[stage].ep > 1
        return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1 + ahead) / v
    return float(min(m, p - stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One kind of rank of one stage."""

    g: int
    s: int
    group: Group
    stage: Stage
    worker: Worker
    replicas: float  # ranks over all groups that hold the same dense weights, apart from cp


def _rows(case: PlannedRun, groups: Iterable[int]) -> list[_Row]:
    replicas = layer_replicas(case.plan, case.model.num_layers)
    return [
        _Row(g=g, s=s, group=group, stage=stage, worker=worker, replicas=sync_width(stage, replicas))
        for g, group in ((g, case.plan.groups[g]) for g in groups)
        for s, stage in enumerate(group.stages)
        for worker in stage_workers(case.cluster, group, stage)
    ]


def _samples(row: _Row) -> float:
    """Return the samples of a micro-batch on the rank; a step may hold fewer than one micro-batch."""
    if row.stage.rank_shares is not None:
        return row.worker.share
    return min(row.worker.share, math.ceil(row.group.share / row.stage.inner_dp))


def _load(case: PlannedRun, rows: list[_Row]) -> StageLoad:
    """Return what each kind of rank holds."""
    model, nodes, setup = case.model, case.cluster.nodes, case.setup()
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    counts = np.array([layer_counts(model, row.stage, kinds) for row in rows])
    ends = np.array([stage_ends(model, row.stage) for row in rows])
    ranks = [
        rank_shape(setup, row.group, row.stage, samples=_samples(row), replicas=row.replicas) for row in rows
    ]
    overlapped = setup.hides("expert_overlap")
    rules = [stage_recompute(row.stage, sum(count)) for row, count in zip(rows, counts, strict=True)]
    return setup.load(
        stacked(ranks, RankShape),
        counts=list(counts.T),
        has_embedding=ends[:, 0],
        has_head=ends[:, 1],
        in_flight=np.array([in_flight(row.group, row.s, expert_overlap=overlapped) for row in rows]),
        num_micro_batches=np.array([float(row.group.num_micro_batches) for row in rows]),
        num_stages=np.array([float(len(row.group.stages)) for row in rows]),
        devices=[nodes[row.worker.node_group].device for row in rows],
        recompute=stacked(rules, Recompute),
    )


def plan_memory(case: PlannedRun) -> tuple[Memory, MemoryParts]:
    """Return the peak of the fullest rank (peak over capacity) and the parts of every stage.

    Ranks of one stage that differ in device or samples are priced apart; the fullest stands for the stage.
    The parts have one row per stage, group by group.
    """
    first = first_of_equals(case.cluster, case.plan)
    rows = _rows(case, dict.fromkeys(first))
    parts = stage_memory(_load(case, rows), case.framework)
    capacity = np.array([case.cluster.nodes[row.worker.node_group].device.capacity_bytes for row in rows])
    fullest_first = np.argsort(-(parts.peak / capacity), kind="stable")
    chosen: dict[tuple[int, int], int] = {}
    for i in fullest_first.tolist():
        chosen.setdefault((rows[i].g, rows[i].s), i)
    of_stages = [
        [chosen[like, s] for s in range(len(group.stages))]
        for like, group in zip(first, case.plan.groups, strict=True)
    ]
    fullest = int(fullest_first[0])
    breakdown = {name: float(getattr(parts, name)[fullest]) for name in MEMORY_PARTS}
    allocated = float(parts.allocated[fullest])
    peak, room = sum(breakdown.values()), float(capacity[fullest])
    per_node = np.array([case.cluster.nodes[row.worker.node_group].per_node for row in rows])
    host = parts.host * np.minimum(per_node, len(case.plan.ranks))
    rooms = (case.cluster.nodes[row.worker.node_group].host_memory_bytes for row in rows)  # where stated
    fits_hosts = all(room is None or used <= room for room, used in zip(rooms, host.tolist(), strict=True))
    memory = Memory(
        peak_bytes=peak,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=float(parts.cached[fullest]),
        peak_rank=rows[fullest].worker.rank,
        capacity_bytes=room,
        fits=bool(np.all(parts.peak <= capacity)) and fits_hosts,
        breakdown_bytes=breakdown,
        per_stage_peak_bytes=tuple(tuple(float(parts.peak[i]) for i in own) for own in of_stages),
        peak_interval_bytes=memory_interval(case.framework, peak),
        peak_allocated_interval_bytes=memory_interval(case.framework, allocated, figure="allocated"),
        fits_probability=fits_probability(case.framework, peak, room),
        host_peak_bytes=float(host.max()),
    )
    every = list(chain.from_iterable(of_stages))
    return memory, MemoryParts(**{f.name: getattr(parts, f.name)[every] for f in fields(MemoryParts)})
