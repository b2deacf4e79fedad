"""Exhaustive search of the plans that degree flags span, on equal nodes.

The space is a product: degrees and micro-batch (a *cell*), then virtual stages, sequence parallelism and
recomputation (a *pass* through the pipeline), then sharding, schedule and offload (a *row*). What a pass
recurs with bounds every row of it from below, what a cell must compute bounds every pass, so that most rows
are excluded without being priced. The search goes on in order of the bounds until no bound is below the
best plans: then they are the best of all.
"""

from __future__ import annotations

import time

import numpy as np

from foreshard.planner.found import Found
from foreshard.planner.grid_bounds import cell_bounds, pass_bounds, score_of
from foreshard.planner.grid_space import (
    CHUNK,
    SPACE,
    GridRequest,
    cell_sizes,
    cells_of,
    chunks_of,
    num_rows,
    passes_of,
    rows_of,
)
from foreshard.predict.analytical import step_times
from foreshard.predict.plan_table import PlanTable


def search_rows(
    request: GridRequest,
    *,
    keep: int = 5,
    deadline: float = np.inf,
    beat: float = np.inf,
    patience_s: float = 0.0,
) -> Found:
    """Return the best rows of the whole space and how many were timed and excluded.

    Parameters
    ----------
    request : GridRequest
    keep : int
        Plans to return, of different degrees.
    deadline : float
        Of `time.perf_counter`; what is left then is bounded, not priced.
    patience_s : float
        How much longer to look while there is no plan at all.
    beat : float
        Plans of this score or more are of no interest.
    """
    found = Found(keep=keep, beat=beat)
    cells = cells_of(request)
    bound, found.floor_s = cell_bounds(request, cells)
    order = np.argsort(bound, kind="stable")
    cells, bound = cells.take(order), bound[order]
    sizes = cell_sizes(request, cells)
    start, batch = 0, 8
    try:
        while start < len(cells) and bound[start] < found.worst:
            if time.perf_counter() >= deadline + (0.0 if len(found.score) else patience_s):
                break
            stop = min(start + batch, len(cells))
            _search_cells(request, cells.take(slice(start, stop)), found)
            start, batch = stop, min(4 * batch, 512)
    except KeyboardInterrupt:
        found.interrupted = True
    best = min([*found.score[:1], beat])
    if start < len(cells) and bound[start] < found.worst:
        found.interrupted = True
        found.bound = min(float(bound[start]), best)
    else:
        found.bound = best
        found.pruned += int(sizes[start:].sum())
    return found


def _search_cells(request: GridRequest, cells: PlanTable, found: Found) -> None:
    """Price what can beat the kept plans in some cells."""
    passes = passes_of(request, cells)
    bounds, rows = [], []
    for some in chunks_of(passes):
        bounds.append(pass_bounds(request, some))
        rows.append(num_rows(request, some))
    bound, count = np.concatenate(bounds), np.concatenate(rows)
    order = np.argsort(bound, kind="stable")
    start = 0
    while start < len(order):
        if bound[order[start]] >= found.worst:
            found.pruned += int(count[order[start:]].sum())
            return
        per = max(1, int(np.ceil(count[order[start : start + 64]].mean())))
        stop = start + max(1, CHUNK // per)
        chosen = order[start:stop]
        _price_rows(request, rows_of(request, passes.take(chosen)), found)
        start = stop


def _price_rows(request: GridRequest, rows: PlanTable, found: Found) -> None:
    """Time the rows that fit, and keep the best."""
    for some in chunks_of(rows):
        memory = request.memory(some)
        least = int(memory.peak_bytes.argmin())
        if memory.peak_bytes[least] < found.least_peak_bytes:
            found.least_peak_bytes = float(memory.peak_bytes[least])
            found.least_peak = some.take(slice(least, least + 1))
        fits = np.flatnonzero(memory.fits)
        found.pruned += len(some) - len(fits)
        if len(fits):
            fitting = some.take(fits)
            step = step_times(request.batch(fitting))
            found.evaluated += len(fitting)
            found.least_step_s = min(found.least_step_s, float(step.total.min()))
            found.add(fitting, score_of(request, step), step.total, most_s=request.max_step_s)


__all__ = ["SPACE", "Found", "GridRequest", "search_rows"]
