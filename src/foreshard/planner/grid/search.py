"""Exhaustive search of the plans that degree flags span, on equal nodes.

The space is a product: degrees and micro-batch (a *cell*), then virtual stages and sequence parallelism (a
*shape*), then recomputation (a *pass* through the pipeline), then sharding, schedule and offload (a *row*).
What a pass recurs with bounds every row of it from below, what a cell must compute bounds every pass, so that
most rows are excluded without being priced. The search goes on in order of the bounds until no bound is below
the best plans: then they are the best of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foreshard.planner.grid.best_so_far import Found
from foreshard.planner.grid.bounds import cell_bounds, pass_bounds, score_of
from foreshard.planner.grid.space import (
    GridRequest,
    cell_sizes,
    cells_of,
    chunks_of,
    least_memory_rows,
    num_rows,
    rows_of,
    shapes_of,
    with_rules,
)
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.plan_table import PlanTable

_FIRST_CELLS, _MOST_CELLS, _PASSES = 8, 512, 4096
"""Cells bounded at once, first and later, and passes priced at once: few while bounds exclude little."""
_LEAST_CELLS = 64
"""Cells searched however late it is, as long as there is no plan: 0.2 s, which a busy machine may lack."""


def search_rows(
    request: GridRequest,
    *,
    keep: int = 5,
    deadline: float = np.inf,
    beat: float = np.inf,
    patience_s: float = 0.0,
    executor: str = "local",
    refusals: Callable[[PlanTable], tuple[str, ...]] | None = None,
) -> Found:
    """Return the best rows of the whole space and how many were timed and excluded.

    Parameters
    ----------
    request : GridRequest
    keep : int
        Plans to return, of different degrees.
    deadline : float
        Of `time.perf_counter`; what is left then is bounded, not priced.
    beat : float
        Plans of this score or more are of no interest.
    patience_s : float
        How much longer to look while there is no plan at all.
    executor : str
        'local', or as :mod:`foreshard.planner.grid.ray_sweep` takes it.
    refusals : callable, optional
        Of a table of one row: reasons not to keep its plan.
    """
    found = Found(keep=keep, beat=beat, refusals=refusals)
    space, found.floor_s = cells_in_order(request)
    if executor == "local":
        walk(request, space, found, deadline=deadline, patience_s=patience_s)
    else:
        from foreshard.planner.grid.ray_sweep import walk_with_ray

        walk_with_ray(request, space, found, deadline=deadline, patience_s=patience_s, executor=executor)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells, a score that no row of each falls below, and the rows of each."""

    table: PlanTable
    bound: np.ndarray
    size: np.ndarray

    def take(self, index: slice) -> Cells:
        """Return some of them."""
        return Cells(table=self.table.take(index), bound=self.bound[index], size=self.size[index])


def cells_in_order(request: GridRequest) -> tuple[Cells, float]:
    """Return all cells, the lowest bound first, and seconds that no step falls below."""
    table = cells_of(request)
    bound, floor_s = cell_bounds(request, table)
    order = np.argsort(bound, kind="stable")
    table = table.take(order)
    return Cells(table=table, bound=bound[order], size=cell_sizes(request, table)), floor_s


def walk(
    request: GridRequest,
    cells: Cells,
    found: Found,
    *,
    deadline: float = np.inf,
    patience_s: float = 0.0,
) -> None:
    """Search cells in order until none that is left can hold a plan to keep, or time is over."""
    start, batch = 0, _FIRST_CELLS
    try:
        while start < len(cells.bound) and not found.excludes(cells.bound[start]):
            late = time.perf_counter() >= deadline + (0.0 if len(found.score) else patience_s)
            if late and (len(found.score) or start >= _LEAST_CELLS):
                break
            stop = min(start + batch, len(cells.bound))
            began = time.perf_counter()
            _search_cells(request, cells.table.take(slice(start, stop)), found)
            ended = time.perf_counter()
            # On a busy machine a large batch would outlast the budget: as many as fit what is left of it.
            left = (deadline - ended) * (stop - start) / (ended - began)
            start, batch = stop, max(_FIRST_CELLS, int(min(4 * batch, _MOST_CELLS, max(left, 0.0))))
    except KeyboardInterrupt:
        found.interrupted = found.stopped = True
    best = min([*found.score[:1], found.beat])
    if start < len(cells.bound) and not found.excludes(cells.bound[start]):
        found.interrupted = True
        found.bound = min(float(cells.bound[start]), best)
    else:
        found.bound = best
        found.pruned += int(cells.size[start:].sum())


def _search_cells(request: GridRequest, cells: PlanTable, found: Found) -> None:
    """Price what can beat the kept plans in some cells."""
    shapes = shapes_of(request, cells)
    passes, shape = with_rules(request, shapes)
    if not len(passes):
        return
    count = num_rows(request, passes)
    # Recomputation only adds to what recurs: what a shape alone excludes is not bounded rule by rule.
    open_ = np.flatnonzero(~found.excludes(_pass_bounds(request, shapes)[shape]))
    found.pruned += int(count.sum() - count[open_].sum())
    passes, count = passes.take(open_), count[open_]
    bound = _pass_bounds(request, passes)
    order = np.argsort(bound, kind="stable")
    start = 0
    while start < len(order):
        block = order[start : start + _PASSES]
        block = block[~found.excludes(bound[block])]
        if not len(block):
            found.pruned += int(count[order[start:]].sum())
            return
        fitting = _fitting_passes(request, passes.take(block), found)
        found.pruned += int(count[block].sum())
        if len(fitting):
            rows = rows_of(request, fitting)
            found.pruned -= len(rows)
            _price_rows(request, rows, found)
        start += len(block)


def _pass_bounds(request: GridRequest, passes: PlanTable) -> np.ndarray:
    return np.concatenate([np.empty(0), *(pass_bounds(request, some) for some in chunks_of(passes))])


def _fitting_passes(request: GridRequest, passes: PlanTable, found: Found) -> PlanTable:
    """Return the passes of which some row fits the memory."""
    rows, index = least_memory_rows(request, passes)
    fits = np.zeros(len(passes), dtype=bool)
    first = 0
    for some in chunks_of(rows):
        memory = request.memory(some)
        found.note_peak(some, memory.peak_bytes)
        fits[index[first : first + len(some)][memory.fits]] = True
        first += len(some)
    return passes.take(np.flatnonzero(fits))


def _price_rows(request: GridRequest, rows: PlanTable, found: Found) -> None:
    """Time the rows that fit, and keep the best."""
    for some in chunks_of(rows):
        memory = request.memory(some)
        found.note_peak(some, memory.peak_bytes)
        fits = np.flatnonzero(memory.fits)
        found.pruned += len(some) - len(fits)
        if len(fits):
            fitting = some.take(fits)
            step = step_times(request.batch(fitting))
            found.evaluated += len(fitting)
            found.least_step_s = min(found.least_step_s, float(step.total.min()))
            found.add(fitting, score_of(request, step), step.total, most_s=request.max_step_s)
