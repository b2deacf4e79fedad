"""What no plan of a cell or of a pass falls below, and the score of a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from foreshard.cost.energy import BUSY_PARTS, WAITING_POWER
from foreshard.planner.grid.space import GridRequest, chunks_of, distinct
from foreshard.predict.analytical.engine import StepTimes
from foreshard.predict.analytical.stage import stage_times
from foreshard.predict.plan_table import PlanTable
from foreshard.predict.space import divisors

_RECURRING = ("compute", "recompute", "tensor_comm", "context_comm", "expert_comm", "pipeline_comm")
"""Parts of a step that recur with every micro-batch; all but the last are work inside a stage."""


def score_of(request: GridRequest, step: StepTimes) -> np.ndarray:
    """Return what is made small: seconds of a step, or joules of a step; dollars go with seconds."""
    if request.objective != "energy":
        return step.total
    busy = sum(step.parts[name] for name in BUSY_PARTS)
    return _watts(request) * (busy + WAITING_POWER * (step.total - busy))


def _watts(request: GridRequest) -> float:
    return sum(nodes.device.tdp_w * nodes.num_devices for nodes in request.cluster.nodes)


def _score_bound(request: GridRequest, step_s: np.ndarray, busy_s: np.ndarray) -> np.ndarray:
    if request.objective != "energy":
        return step_s
    return _watts(request) * (busy_s + WAITING_POWER * (step_s - busy_s))


def _factor(request: GridRequest) -> float:
    """Return how waiting for the slowest of all devices lengthens a step."""
    doublings = max(0.0, float(np.log2(request.cluster.num_devices / 8.0)))
    return 1.0 + request.constants.jitter * doublings


def cell_bounds(request: GridRequest, cells: PlanTable) -> tuple[np.ndarray, float]:
    """Return a score no row of each cell falls below, and seconds that no step falls below.

    The work of all stages is spread evenly over them; of that computation alone is what every engine counts.

    Recomputation and virtual stages add to it or cut it otherwise; of sequence parallelism the better counts.
    """
    # Of one tensor, context and expert degrees and one micro-batch, more stages take as much less time each
    # as there are fewer replicas to share the micro-batches: such cells have one bound.
    first, of = distinct((cells.tp, cells.cp, cells.ep, cells.etp, cells.micro_batch))
    bounds, floor = [], np.inf
    for some in chunks_of(cells.take(first)):
        both = []
        for sp in (0, 1):
            table = replace(some, sp=np.full(len(some), sp) * (some.tp > 1))
            batch = request.batch(table)
            stage = stage_times(batch)
            count = batch.multiplicity
            work = sum(stage.parts[name] for name in _RECURRING[:5])
            even = (work * count).sum(0) * some.num_micro_batches / some.pp
            both.append(_score_bound(request, even * _factor(request), np.zeros(len(some))))
            alone = (stage.parts["compute"] * count).sum(0) * some.num_micro_batches / some.pp
            floor = min(floor, float(alone.min()))
        bounds.append(np.minimum(*both))
    return (np.concatenate(bounds)[of] if bounds else np.empty(0)), floor


def device_seconds_floor(request: GridRequest) -> float:
    """Return device-seconds that no step takes fewer of, on any number of these devices.

    The least computation of a sample over every choice of tensor, context and expert parallelism and of
    micro-batch that any number of devices allows; how many replicas and stages there are does not change it,
    nor what communication is hidden.
    """
    return _device_seconds_floor(**{name: getattr(request, name) for name in _OF_COMPUTATION})


_SETUP = ("model", "cluster", "framework", "constants")
_OF_COMPUTATION = (*_SETUP, "global_batch", "seq_len", "precision", "costs")
"""Fields of a request that its computation depends on."""


@lru_cache(maxsize=8)
def _device_seconds_floor(**asked: Any) -> float:
    request = GridRequest(**asked)
    blocks = [block for block, _ in request.model.block_kinds()]
    experts = max(block.num_experts for block in blocks)
    tp = divisors(int(np.gcd.reduce([block.num_heads for block in blocks])))
    cp, ep = divisors(request.seq_len), divisors(experts) if experts else np.array([1])
    etp = np.array([1, 2, 4, 8, 16, 32, 64]) if experts else np.array([1])
    sizes = divisors(request.global_batch)
    columns = [axis.ravel() for axis in np.meshgrid(tp, cp, ep, etp, sizes, indexing="ij")]
    devices = request.cluster.num_devices
    fits = (columns[0] * columns[1] <= devices) & (columns[2] * columns[3] <= devices)
    columns = [column[fits] for column in columns]
    table = PlanTable.from_columns(dict(zip(("tp", "cp", "ep", "etp", "micro_batch"), columns, strict=True)))
    least = np.inf
    # Sequence parallelism cuts computation over more ranks: without it there is no less.
    for some in chunks_of(replace(table, dp=table.ep * table.etp, sp=1 * (table.tp > 1))):
        stage = stage_times(request.batch(some))
        seconds = stage.parts["compute"].sum(0) * some.tp * some.cp / some.micro_batch
        least = min(least, float(seconds.min()))
    return least * request.global_batch


def pass_bounds(request: GridRequest, passes: PlanTable) -> np.ndarray:
    """Return a score no row of each pass falls below: what recurs on the busiest stage."""
    batch = request.batch(passes)
    stage = stage_times(batch)
    present = batch.multiplicity > 0
    work = np.where(present, sum(stage.parts[name] for name in _RECURRING), 0.0).max(0)
    # Which stage sets the pace may depend on the row; its work is at least that of the least busy one.
    busy = np.where(present, stage.parts["compute"] + stage.parts["recompute"], np.inf).min(0)
    rounds = passes.num_micro_batches
    return _score_bound(request, work * rounds * _factor(request), busy * rounds)
