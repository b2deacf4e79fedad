"""The parts of a search on devices of several kinds, each within its own time; all add to what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from foreshard.planner.baselines.grid import Best
from foreshard.planner.baselines.ordered import amp, hetpipe
from foreshard.planner.baselines.pipedream import pipedream
from foreshard.planner.mixed.found import MixedFound, judge_plans, known, named
from foreshard.planner.mixed.interleaving import interleaved_bound, interleaved_plans
from foreshard.planner.mixed.node_sets import capped, faster_by_s
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_prices import price_stages, without
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Problem, faults, spread_factor
from foreshard.planner.solver.solve import Solution, solve
from foreshard.planner.solver.work_bounds import work_bound
from foreshard.predict.placement import domain_block

QUICK = (hetpipe, amp)
"""Planners that find a plan in tenths of a second."""
_LEAST_S = 0.5
_PLAIN = 0.5
_INTERLEAVED = 0.4
_NEAR = 1.55
_JUDGING = 0.05
_AIM = 0.003
_CLOSED = 0.005
_ROOMIER = 4
"""Times that plans are looked for with more memory left free, where none fits."""
_LITTLE = 0.001
"""Part of a step by which fewer node groups may be faster and still be no search of their own at first."""
_CLOSE, _WORTH = 0.02, 0.05
"""Gap of a proven plan, and the part of a step that an interleaved plan of a wider gap must gain on it."""


def _is_spoken_for(request: PlanRequest, sets: Sequence[tuple[int, ...]], found: MixedFound, i: int) -> bool:
    """Return whether the search of all node groups says nearly all of a set of fewer.

    What it says enters the bound in any case, unless computation alone says as much.
    """
    work = found.work_s(request, sets[0])
    limit = found.best_s if np.isfinite(found.best_s) else _NEAR * work
    if not set(sets[i]) <= set(sets[0]) or request.max_devices is not None:
        return False
    if i not in found.spoken_for and found.work_s(request, sets[i]) < found.best_s:
        whole = found.problem(request, sets[0])
        faster_s = faster_by_s(found.problem(request, sets[i]), whole)
        found.spoken_for[i] = 0, faster_s * spread_factor(whole, sum(whole.counts))
    return i in found.spoken_for and found.spoken_for[i][1] <= _LITTLE * limit


def rivals(request: PlanRequest, sets: Sequence[tuple[int, ...]], found: MixedFound, *, every: bool) -> int:
    """Return how many other sets of node groups come near the first by work alone, and will need a search."""
    found.problem(request, sets[0])
    near = _NEAR * found.work_s(request, sets[0])
    return sum(
        found.work_s(request, use) < near and (every or not _is_spoken_for(request, sets, found, i))
        for i, use in enumerate(sets)
        if i and set(use) <= set(sets[0])
    )


def search_set(
    request: PlanRequest, sets: Sequence[tuple[int, ...]], found: MixedFound, deadline: float, *, every: bool
) -> None:
    """Search the plans of the next set of node groups, unless less than that says they cannot be better.

    With `every`, the fastest plan matters no more than others: each set is searched for its own best.
    """
    best, i = np.inf if every else found.best_s, len(found.bounds)
    use = sets[i]
    simple, left = found.work_s(request, use), deadline - time.perf_counter()
    if i and not every and _is_spoken_for(request, sets, found, i):
        found.bounds.append(simple)
        return
    if simple >= best or (left <= 0.0 and found.judged):
        found.bounds.append(simple)
        found.pruned += simple >= best
        found.interrupted |= simple < best
        return
    problem = capped(found.problem(request, use), request.max_devices)
    before = _search_plain(request, problem, found, best, left, every=every)
    if found.stopped and found.judged:
        found.interrupted = True
        return
    solution = solve(
        problem,
        budget_s=max(deadline - time.perf_counter(), 0.05),
        target_gap=_AIM,
        beat_s=best if every else found.best_s,
        columns=before.columns if before else known(problem, found),
        start=before.arrangement if before else None,
    )
    found.columns.update(named(problem, solution))
    found.note(solution, deadline)
    found.pruned += solution.excluded
    found.interrupted |= solution.interrupted
    # Fewer devices than the set has can be chosen in other ways than the one searched.
    fewer = request.max_devices is not None and sum(problem.counts) >= request.max_devices
    bound = work_bound(problem) if fewer else solution.lower_bound_s
    if not fewer:
        found.searched[len(found.bounds)] = problem, solution
    found.bounds.append(bound)
    found.ladder = found.ladder or dict(solution.ladder)
    late = deadline + _JUDGING * request.budget_s
    judge_plans(found, request, problem, solution, late, None if every else found.best_s)


def _search_plain(
    request: PlanRequest, problem: Problem, found: MixedFound, best_s: float, left_s: float, *, every: bool
) -> Solution | None:
    """Search without cut experts, split sequences and joint stages, which take more than short searches have.

    None where there are no such stages; else options have the same numbers, for the plain ones come first.
    """
    alone = without(problem, lambda kind: not kind.is_plain)
    if alone is problem:
        return None
    deadline = time.perf_counter() + max(_PLAIN * left_s, 0.05)
    solution = solve(
        alone,
        budget_s=max(_PLAIN * left_s, 0.05),
        target_gap=_AIM,
        beat_s=best_s,
        columns=known(alone, found),
    )
    found.note(solution, deadline)
    late = deadline + _JUDGING * request.budget_s
    judge_plans(found, request, alone, solution, late, None if every else found.best_s)
    return solution


def search_one_domain(request: PlanRequest, sets: Sequence[tuple[int, ...]], found: MixedFound) -> None:
    """Look for plans inside one link domain of each kind, which are often the cheapest, whatever the time."""
    for use in sets:
        if len(use) == 1:
            most = min(
                domain_block(request.cluster.nodes[use[0]]),
                request.max_devices or request.cluster.num_devices,
            )
            problem = capped(price_stages(request, use, by_domain=True, every=True), most)
            solution = solve(problem, budget_s=_LEAST_S, target_gap=_AIM)
            judge_plans(found, request, problem, solution, time.perf_counter() + _LEAST_S)


def _lowest(found: MixedFound) -> int:
    """Return the set that holds the bound down: the one to search for it to rise."""
    low = int(np.argmin(found.proven))
    return found.spoken_for.get(low, (low, 0.0))[0]


def is_closed(found: MixedFound) -> bool:
    """Return whether no bound can rise by much: the arrangement of the lowest is known to be as good."""
    low = _lowest(found)
    return low in found.searched and found.searched[low][1].gap < _CLOSED


def search_again(found: MixedFound, request: PlanRequest, deadline: float) -> None:
    """Spend the time that is left on the set that holds the bound down, from where its search stood."""
    while found.judged and not found.stopped and deadline - time.perf_counter() > _LEAST_S:
        low = _lowest(found)
        if found.best_s <= found.bounds[low] * (1.0 + _AIM) or low not in found.searched:
            return
        problem, before = found.searched.pop(low)
        solution = solve(
            problem,
            budget_s=deadline - time.perf_counter(),
            target_gap=_AIM,
            beat_s=found.best_s,
            start=before.arrangement,
            columns=before.columns,
            bounds=before.bounds,
        )
        found.note(solution, deadline)
        found.bounds[low] = max(found.bounds[low], solution.lower_bound_s)
        late = deadline + _JUDGING * request.budget_s
        judge_plans(found, request, problem, solution, late, found.best_s)


def search_interleaved(
    request: PlanRequest, sets: Sequence[tuple[int, ...]], found: MixedFound, started: float, deadline: float
) -> None:
    """Look for interleaved plans and for their bound, in the part of the budget that is for them."""

    def priced(use: tuple[int, ...], chunks: int, stages: int | None = None) -> Problem:
        problem = price_stages(request, use, by_domain=True, every=True, chunks=chunks, stages=stages)
        return capped(problem, request.max_devices)

    now = time.perf_counter()
    if deadline - now < _LEAST_S:
        return
    order = sorted(found.judged, key=lambda one: one[0])
    until = min(deadline, now + max(now - started, _INTERLEAVED * request.budget_s))
    made = interleaved_plans(request, order, partial(priced, sets[0]), now + _PLAIN * (until - now))
    if made:
        found.interleaved_s = interleaved_bound(request, sets, priced, made[0][0], until)
        best_s = min(one[0] for one in made)
        proven_s = max(min(found.proven), 1e-12)
        wide = best_s > (1.0 + _CLOSE) * min(proven_s, found.interleaved_s)
        if order[0][0] <= (1.0 + _CLOSE) * proven_s and wide and best_s > (1.0 - _WORTH) * order[0][0]:
            found.set_aside_s = best_s
        else:
            found.judged += made


def offer_published(
    request: PlanRequest,
    use: tuple[int, ...],
    found: MixedFound,
    deadline: float,
    *,
    some: Sequence[Callable[..., object]] = (hetpipe, amp, pipedream),
) -> None:
    """Judge what planners with fixed orders of devices find: columns may miss the few pipelines that fit.

    As long as there is no plan at all, they are asked whatever the time.
    """
    if found.judged and time.perf_counter() >= deadline:
        return
    problem = capped(found.problem(request, use), request.max_devices)
    for planner in some:
        if found.judged and time.perf_counter() >= deadline:
            return
        best = Best(problem=problem, slack=0.25)
        planner(problem, best=best)
        for _, arrangement in best.by_number.values():
            plan = plan_of(request, problem, arrangement)
            if plan is not None and not faults(problem, arrangement):
                found.take(request, plan)


def search_apart(request: PlanRequest, use: tuple[int, ...], found: MixedFound, deadline: float) -> None:
    """Look for plans again with gradient collectives not at their best, which draws the search elsewhere."""
    if time.perf_counter() >= deadline:
        return
    problem = capped(
        without(price_stages(request, use, apart=True, every=True), lambda kind: kind.beside is not None),
        request.max_devices,
    )
    left = deadline - time.perf_counter()
    solution = solve(problem, budget_s=left, target_gap=_AIM, columns=known(problem, found))
    found.note(solution, deadline)
    late = deadline + _JUDGING * request.budget_s
    judge_plans(found, request, problem, solution, late, found.best_s)


def search_roomier(request: PlanRequest, use: tuple[int, ...], found: MixedFound) -> None:
    """Look again, at once, with as much memory left free as plans so far are short of, until one fits.

    The problem knows the buffers of no more than two stages and two pipelines; a real plan may need more.
    """
    reserve = 0.0
    for _ in range(_ROOMIER):
        if found.judged or not np.isfinite(found.short_bytes):
            return
        reserve += 1.5 * found.short_bytes
        found.short_bytes = np.inf
        priced = price_stages(request, use, reserve_bytes=reserve, by_domain=True, every=True)
        problem = capped(priced, request.max_devices)
        left = max(_LEAST_S, 0.1 * request.budget_s)
        solution = solve(problem, budget_s=left, target_gap=0.05, columns=known(problem, found))
        found.evaluated += solution.evaluated
        found.columns.update(named(problem, solution))
        judge_plans(found, request, problem, solution, time.perf_counter() + left)
