"""A bound for every number of pipelines, by linear programs over pipelines that device prices call for."""

from __future__ import annotations

import numpy as np

from foreshard.planner.solver.bound_raising import BoundRaiser
from foreshard.planner.solver.duals import goal_of, priced, varied
from foreshard.planner.solver.integer_heuristic import offer_whole
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.work_bounds import least_tail

_ROUNDS = 25
_TOLERANCES = (5e-3, 1e-3, 2e-4)
_UNMIXED = 4
_FAR = 1.2
"""Times a bound above which a plan is looked for closely, whether or not times are excluded later."""


def bound_ranges(
    progress: SearchState,
    ranges: list[tuple[int, int]],
    compute_s: float,
    bounds: dict[tuple[int, int], float],
    closer: BoundRaiser | None,
) -> None:
    """Work out the range of pipelines that holds the bound down, again and again, in halves where it is wide.

    A range of several rows of tails is bounded with the least of them, so that every number of pipelines has
    a bound at any time. Ranges of one row are bounded by fractions once, then handed over to `closer`;
    without it by fractions more and more finely.
    """
    fineness: dict[tuple[int, int], int] = {}
    if bounds:
        rows = {one: [row for row in ranges if one[0] <= row[0] <= one[1]] for one in bounds}
        fineness = {one: 1 for one in bounds if len(rows[one]) <= 1}
    else:
        whole = [ranges[:1], ranges[1:]] if len(ranges) > 1 else [ranges]
        rows = {(some[0][0], some[-1][1]): some for some in whole}
    for one in rows:
        bounds[one] = max(bounds.get(one, 0.0), compute_s + least_tail(progress.problem, one))
    pending = set(bounds)
    if not progress.columns:
        first_columns(progress, compute_s)
    while pending and not (progress.late and progress.best is not None):
        # The widest range first: most plans are of several pipelines.
        one = min(pending, key=bounds.__getitem__) if progress.best is not None else max(pending)
        if progress.near(bounds[one]):
            pending.remove(one)
            continue
        fine = fineness.get(one, 0)
        if closer is not None and fine:
            bounds[one], stuck = closer.step(one, bounds[one])
        else:
            found = search_range(progress, one, bounds[one], _TOLERANCES[fine], closely=closer is None)
            bounds[one] = max(bounds[one], found)
            fineness[one] = fine + 1
            stuck = closer is None and fine + 1 == len(_TOLERANCES)
        near = progress.near(bounds[one])
        halves = {} if near else _halves(one, rows[one], stuck)
        if near or halves or stuck:
            pending.remove(one)
        for half, some in halves.items():
            rows[half], bounds[half], fineness[half] = some, bounds[one], int(len(some) == len(rows[one]))
            pending.add(half)
        if halves:
            del bounds[one]


def _halves(
    one: tuple[int, int], rows: list[tuple[int, int]], stuck: bool
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the halves of a range and their rows of tails: of several rows, or where it is stuck."""
    if len(rows) > 1:
        some = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        return {(half[0][0], half[-1][1]): half for half in some}
    if stuck and one[0] < one[1]:
        middle = (one[0] + one[1]) // 2
        return {(one[0], middle): rows, (middle + 1, one[1]): rows}
    return {}


def first_columns(progress: SearchState, compute_s: float) -> None:
    """Generate pipelines at the prices that computation alone gives devices."""
    problem = progress.problem
    copies = problem.copies[len(problem.copies) // 3]
    prices = progress.prices * compute_s
    pricing = progress.pricing((copies, copies), prices)
    pricing.start()
    for box in pricing.boxes.values():
        progress.columns[box.template] = None
    goal = goal_of(problem, prices, (copies, copies))
    _, good = pricing.earliest(goal, known_s=np.inf, aim_s=np.inf, tolerance=0.05, deadline=progress.deadline)
    progress.evaluated += pricing.solved
    progress.learn(varied(problem, good))


def search_range(
    progress: SearchState, pipelines: tuple[int, int], floor: float, tolerance: float, *, closely: bool = True
) -> float:
    """Return a bound on steps with a number of pipelines in a range, and offer good ones on the way.

    Prices come from the time in which the columns so far get through the batch, which falls as columns come;
    the bound rises to meet it.
    """
    problem = progress.problem
    bound, mix = floor, priced(progress, pipelines, floor)
    for round_ in range(_ROUNDS):
        reached, prices = mix or (np.inf, progress.prices * max(bound, 1e-12) * 2.0**round_)
        pricing = progress.pricing(pipelines, prices)
        pricing.start()
        if not pricing.boxes:
            return np.inf
        progress.priced[pipelines] = reached, pricing
        proven, better = pricing.earliest(
            goal_of(problem, prices, pipelines),
            known_s=reached * (1.0 - 1e-4),
            aim_s=progress.aim_s,
            tolerance=tolerance,
            deadline=progress.deadline,
        )
        progress.evaluated += pricing.solved
        bound = max(bound, proven)
        fresh = [one for one in varied(problem, better) if one not in progress.columns]
        progress.learn(fresh)
        if (
            progress.near(bound)
            or (progress.late and progress.best is not None)
            or bound >= reached * (1.0 - 2.0 * tolerance)
        ):
            break
        before, mix = mix, priced(progress, pipelines, bound) if fresh or mix is None else mix
        if (not fresh and before is not None) or (mix is None and round_ >= _UNMIXED):
            break
    if not progress.near(bound):
        far = progress.best_s > _FAR * bound * progress.factor
        offer_whole(progress, pipelines, bound, closely=closely or far)
    return bound
