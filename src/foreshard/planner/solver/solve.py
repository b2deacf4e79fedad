"""The best arrangement of pipelines and a bound on every other, from a problem with priced stages.

For every number of pipelines the configuration program (`configuration`) bounds the step and names pipelines
(`ranges`); whole numbers of those and exact shares make a plan (`whole`). From there on times are excluded
one after the other, or undercut (`closing`). What is not proven by then is stated as a gap.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.solver.bound_raising import BoundRaiser, vary
from foreshard.planner.solver.column_enumeration import room_for
from foreshard.planner.solver.enumeration import all_templates, best_of_all, undominated
from foreshard.planner.solver.hops import least_hops_in_times
from foreshard.planner.solver.pipeline_mix import columns_of, fractional_mix
from foreshard.planner.solver.pricing import PricedStages, cheapest_path
from foreshard.planner.solver.problem import Arrangement, PipelineFamily, Problem, Template
from foreshard.planner.solver.range_bounds import bound_ranges
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.work_bounds import least_tail, rate_of

_ROUNDS = 25
_KEPT = 96
_FEW_DEVICES = 10
_FEW_LAYERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An arrangement, how long its step takes, and how long any step must take.

    Attributes
    ----------
    arrangement : Arrangement or None
        None when no pipeline fits.
    step_time_s, lower_bound_s : float
    ladder : dict of str to float
        Bounds from the simplest to the tightest, seconds.
    others : tuple of Arrangement
        Good ones of other make, best first.
    columns : tuple of Template
        What the progress generated; a later progress may start from them.
    evaluated : int
        Pipelines priced as columns or as shortest paths.
    bounds : dict of (fewest, most) pipelines to float
        What is proven of steps with so many, spread apart; a later progress may go on from there.
    """

    arrangement: Arrangement | None
    step_time_s: float
    lower_bound_s: float
    ladder: dict[str, float]
    others: tuple[Arrangement, ...]
    columns: tuple[Template, ...]
    evaluated: int
    excluded: int
    interrupted: bool
    bounds: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return how much longer the step is than the bound, as a fraction of the bound."""
        return self.step_time_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else np.inf


def solve(
    problem: Problem,
    *,
    budget_s: float = 10.0,
    target_gap: float = 0.01,
    start: Arrangement | None = None,
    columns: Sequence[Template] = (),
    beat_s: float = np.inf,
    bounds: Mapping[tuple[int, int], float] | None = None,
) -> Solution:
    """Return the best arrangement found and a bound that no arrangement beats.

    Parameters
    ----------
    problem : Problem
    budget_s : float
        Seconds to search; an interrupt from the keyboard ends it sooner.
    target_gap : float
        Proven gap at which to stop.
    start : Arrangement, optional
        A running one to begin with.
    columns : sequence of Template
        Pipelines to begin with, such as those of an earlier solution.
    beat_s : float
        A step time known from elsewhere: what cannot beat it is not worked out.
    bounds : mapping, optional
        Of an earlier solution of the same problem.
    """
    problem = least_hops_in_times(problem)
    progress = SearchState(
        beat_s=beat_s, problem=problem, deadline=time.perf_counter() + budget_s, target_gap=target_gap
    )
    ranges = _ranges(progress)
    bounds = dict(bounds or {})
    ladder = {"compute": 0.0, "sync": 0.0}
    if not ranges:
        return _nothing(progress)
    try:
        ladder = _simple_bounds(progress)
        small = _solve_small(progress, ranges, ladder) if _is_small(problem) else None
        if small is not None:
            return small
        _seed(progress, start, columns)
        room = room_for(problem)
        closer = None if room is None else BoundRaiser(progress=progress, room=room)
        bound_ranges(progress, ranges, ladder["compute"], bounds, closer)
        vary(progress, bounds)
    except KeyboardInterrupt:
        progress.interrupted = True
    lower = max(min(bounds.values(), default=0.0) * progress.factor, ladder["compute"])
    if progress.best is None and not np.isfinite(lower):
        lower = 0.0
    ladder["configuration"] = min(lower, progress.best_s)
    others = sorted(progress.made, key=progress.made.__getitem__)[:_KEPT]
    return Solution(
        arrangement=progress.best,
        step_time_s=progress.best_s,
        lower_bound_s=min(lower, progress.best_s),
        ladder=ladder,
        others=tuple(others),
        columns=tuple(progress.columns),
        evaluated=progress.evaluated,
        excluded=0,
        interrupted=progress.interrupted or (progress.late and progress.best is not None),
        bounds=bounds,
    )


def _is_small(problem: Problem) -> bool:
    return sum(problem.counts) <= _FEW_DEVICES and problem.num_layers <= _FEW_LAYERS


def _solve_small(
    progress: SearchState, ranges: list[tuple[int, int]], ladder: dict[str, float]
) -> Solution | None:
    """Return the best of all arrangements, every pipeline being listed.

    None when there are too many of them or half of the time does not do; what was found stays.
    """
    problem = progress.problem
    half = 0.5 * (time.perf_counter() + progress.deadline)
    templates = all_templates(problem, deadline=half)
    if templates is None:
        return None
    kept = undominated(problem, templates)
    best, proven = best_of_all(problem, kept, ranges, half) if kept else (None, True)
    if not proven:
        _seed(progress, best, ())
        return None
    if best is None:
        return _nothing(progress)
    progress.offer(best.templates)
    return Solution(
        arrangement=progress.best,
        step_time_s=progress.best_s,
        lower_bound_s=progress.best_s,
        ladder=ladder | {"configuration": progress.best_s},
        others=tuple(progress.made),
        columns=tuple(kept),
        evaluated=len(kept),
        excluded=len(templates) - len(kept),
        interrupted=False,
    )


def _nothing(progress: SearchState) -> Solution:
    """Return that no pipeline fits."""
    return Solution(
        arrangement=None,
        step_time_s=np.inf,
        lower_bound_s=np.inf,
        ladder={},
        others=(),
        columns=(),
        evaluated=progress.evaluated,
        excluded=0,
        interrupted=False,
    )


def _ranges(progress: SearchState) -> list[tuple[int, int]]:
    """Return (fewest, most) pipelines of each stretch of numbers of the same tails, as far as devices go."""
    problem = progress.problem
    most = min(_most_pipelines(progress), problem.global_batch)
    first = [copies for copies in problem.copies if copies <= most]
    if not first:
        return []
    return [(low, high - 1) for low, high in zip(first, [*first[1:], most + 1], strict=True)]


def _most_pipelines(progress: SearchState) -> int:
    """Return how many pipelines the devices can hold at most, and keep the columns that show it.

    A linear program over the pipelines of fewest devices; priced with its own duals, no other pipeline may be
    cheaper than one.
    """
    problem = progress.problem
    counts, weights = np.array(problem.counts, dtype=float), np.ones(len(problem.counts))
    bound = float(sum(problem.counts))
    known: dict[PipelineFamily, PricedStages] = {}
    for _ in range(_ROUNDS):
        least, found = _fewest(problem, weights, known)
        progress.evaluated += 1
        if found is None:
            return 0
        bound = min(bound, float(weights @ counts) / least)
        progress.columns[found] = None
        takes = columns_of(problem, list(progress.columns))
        mix = fractional_mix(takes, np.ones(takes.shape[1]), problem.counts, (0, sum(problem.counts)))
        if mix is None or mix.samples >= bound - 1e-6:
            break
        # Devices that are not scarce still count a little, so that the path has something to save.
        weights = mix.device_prices + 1e-9
    return int(bound + 1e-6)


def _fewest(
    problem: Problem, weights: np.ndarray, known: dict[PipelineFamily, PricedStages]
) -> tuple[float, Template | None]:
    """Return the least weight of devices of any pipeline, and that pipeline."""
    none = np.zeros_like(problem.time_s)
    best, template = np.inf, None
    for size in np.unique(problem.micro_batch):
        # A second of filling counts next to nothing beside a device.
        limits = 1e12 * float(size), 1e12
        found = cheapest_path(problem, none, weights, int(size), limits, np.inf, known)
        if found is not None and found[0] < best:
            best, template = found
    return best, template


def _simple_bounds(progress: SearchState) -> dict[str, float]:
    """Return the bounds that know no pipelines: computation alone, and with the least tail."""
    problem = progress.problem
    rates = np.array([rate_of(problem, kind) for kind in range(len(problem.counts))])
    progress.prices = np.where(rates > 0, rates, rates.max() * 1e-3)
    compute = progress.fluid_s(float(sum(problem.counts)))
    return {"compute": compute, "sync": compute + least_tail(problem, (1, sum(problem.counts)))}


def _seed(progress: SearchState, start: Arrangement | None, columns: Sequence[Template]) -> None:
    progress.columns.update(dict.fromkeys(columns))
    if start is not None:
        progress.columns.update(dict.fromkeys(start.templates))
        progress.offer(start.templates)
