"""What no plan of a cell or of a pass falls below, and the score of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from foreshard.cost.energy import BUSY_PARTS, WAITING_POWER
from foreshard.planner.grid.space import MOST_ETP, GridRequest, chunks_of, distinct
from foreshard.predict.analytical.engine import StepTimes
from foreshard.predict.analytical.stage import stage_times
from foreshard.predict.placement import domain_block
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
    """
    first, of = distinct([getattr(cells, name) for name in _OF_WORK])
    if not len(first):
        return np.empty(0), np.inf
    some = cells.take(first)
    work_s, compute_s = _work(request, some) * some.num_micro_batches / some.pp
    bounds = _score_bound(request, work_s * _factor(request), np.zeros(len(some)))
    return bounds[of], float(compute_s.min())


_OF_WORK = ("tp", "cp", "ep", "etp", "micro_batch")
"""Columns that decide the work of a micro-batch in all stages: how many of them there are does not."""


@dataclass(slots=True)
class _KnownWork:
    """Work and computation of a micro-batch in all stages, shape (2, known), by ascending code."""

    code: np.ndarray
    seconds: np.ndarray


@lru_cache(maxsize=8)
def _known_work(**asked: Any) -> _KnownWork:
    """Return what is known of one model on one kind of nodes: all numbers of nodes ask for the same."""
    return _KnownWork(np.empty(0, dtype=np.int64), np.empty((2, 0)))


def _work(request: GridRequest, cells: PlanTable) -> np.ndarray:
    """Return seconds of a micro-batch in all stages of each cell, of all work and of computation: (2, cells).

    Recomputation and virtual stages add to it or cut it otherwise; of sequence parallelism the better counts.
    """
    asked = {name: getattr(request, name) for name in _OF_COMPUTATION if name != "cluster"}
    nodes, network = request.cluster.nodes[0], request.cluster.network
    # Of the number of nodes matters whether there are several, and how many devices share a domain.
    domains = domain_block(nodes), min(nodes.nvlink_domain, nodes.num_devices)
    known = _known_work(
        nodes=replace(nodes, count=min(nodes.count, 2)), network=network, domains=domains, **asked
    )
    code = np.zeros(len(cells), dtype=np.int64)
    for name, values in zip(_OF_WORK, _choices_of_work(request), strict=True):
        column = getattr(cells, name)
        digit = np.searchsorted(values, column)
        assert np.array_equal(values[digit], column), f"{name} has values that no code stands for"
        code = code * len(values) + digit
    place = np.searchsorted(known.code, code)
    is_new = known.code[np.minimum(place, len(known.code) - 1)] != code if len(known.code) else code >= 0
    if is_new.any():
        parts = [_least_work(request, some) for some in chunks_of(cells.take(np.flatnonzero(is_new)))]
        codes = np.concatenate([known.code, code[is_new]])
        order = np.argsort(codes, kind="stable")
        known.code = codes[order]
        known.seconds = np.concatenate([known.seconds, *parts], axis=1)[:, order]
        place = np.searchsorted(known.code, code)
    return known.seconds[:, place]


def _choices_of_work(request: GridRequest) -> tuple[np.ndarray, ...]:
    """Return what each of the columns may be, on any number of devices."""
    blocks = [block for block, _ in request.model.block_kinds()]
    experts = max(block.num_experts for block in blocks)
    # Models without attention have no heads: their channels divide over tensor-parallel ranks.
    widths = [(block.num_heads, block.ffn, block.shared_ffn) for block in blocks]
    heads = int(np.gcd.reduce(np.ravel(widths)))
    one = np.array([1])
    return (
        divisors(heads),
        divisors(request.seq_len),
        divisors(experts) if experts else one,
        np.arange(1, MOST_ETP + 1) if experts else one,
        divisors(request.global_batch),
    )


def _least_work(request: GridRequest, cells: PlanTable) -> np.ndarray:
    """Return the same for a few cells, priced."""
    both = []
    for sp in range(1 + request.offers.cuts_sequences):
        # Other stages, and other numbers of them, may lie better on the nodes than those of this cell.
        table = replace(cells, sp=np.full(len(cells), sp) * (cells.tp > 1))
        batch = request.priced(table).batch(request.constants, aligned=True)
        stage = stage_times(batch)
        work = sum(stage.parts[name] for name in _RECURRING[:5])
        both.append([(one * batch.multiplicity).sum(0) for one in (work, stage.parts["compute"])])
    return np.min(both, axis=0)


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
    tp, cp, ep, etp, sizes = _choices_of_work(request)
    etp = etp[(etp & (etp - 1)) == 0]
    columns = [axis.ravel() for axis in np.meshgrid(tp, cp, ep, etp, sizes, indexing="ij")]
    devices = request.cluster.num_devices
    fits = (columns[0] * columns[1] <= devices) & (columns[2] * columns[3] <= devices)
    columns = [column[fits] for column in columns]
    table = PlanTable.from_columns(dict(zip(_OF_WORK, columns, strict=True)))
    least, cuts = np.inf, int(request.offers.cuts_sequences)
    # Sequence parallelism cuts computation over more ranks: without it there is no less.
    for some in chunks_of(replace(table, dp=table.ep * table.etp, sp=cuts * (table.tp > 1))):
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
