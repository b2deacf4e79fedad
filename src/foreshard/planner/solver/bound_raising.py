"""From bounds by fractions to bounds by whole numbers: times that no plan takes, one after the other.

For a number of pipelines and a time all pipelines that a plan of that time can be made of are listed
(`contenders`) and put together (`combination`). Either nothing reaches the batch, and the bound rises to that
time, or there is a better plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.solver.column_enumeration import ColumnEnumeration, LabelTable, Room
from foreshard.planner.solver.duals import goal_of, priced, varied
from foreshard.planner.solver.integer_combination import combine
from foreshard.planner.solver.integer_heuristic import offer_whole
from foreshard.planner.solver.pipeline_mix import fractional_mix
from foreshard.planner.solver.problem import Problem, pace_of, spread_factor, tail_seconds
from foreshard.planner.solver.search_state import SearchState

_STEP, _LONGEST_STEP, _SHORTEST_STEP = 0.003, 0.02, 2e-4
_FIRST = 0.25
_WIDE = 0.2
"""Part of the way to the aim that a step may go at once, where that is longer."""
_QUICK, _SLOW = 0.08, 0.2
"""Parts of the time left that an attempt may take to be followed by a longer step, and by one as long."""
_PART = 0.5
_LEAST_S = 2.0
_STALE = 0.004
_ROUNDS = 3
_LEARNT = 48
_BARGAIN = 0.5
"""Samples beyond its price by which a pipeline may be better, for prices to be good."""
_SAME = 1e-3
_REFINED = 40
_KEPT = 12
_TOLERANCE = 5e-3
_VARIED = 0.12
_VARIANTS = 24


@dataclass(slots=True, kw_only=True)
class BoundRaiser:
    """Raises bounds of ranges of pipelines, each by steps as long as the time allows."""

    progress: SearchState
    room: Room
    _steps: dict[tuple[int, int], float] = field(default_factory=dict)
    _costs: dict[tuple[int, int], float] = field(default_factory=dict)
    _mixed: set[tuple[int, int]] = field(default_factory=set)

    def step(self, pipelines: tuple[int, int], bound: float) -> tuple[float, bool]:
        """Return the bound of a range after one attempt to raise it, and whether another is no use."""
        progress, started = self.progress, time.perf_counter()
        left = progress.deadline - started
        if progress.best is None:
            # Without a plan the search goes on, whatever the time.
            left = max(left, _LEAST_S)
        # Far from the aim a short first step proves next to nothing, and lists too few pipelines for a plan.
        first = min(_LONGEST_STEP, max(_STEP, _FIRST * (progress.aim_s / bound - 1.0)))
        step = self._steps.get(pipelines, first)
        if progress.best is not None and self._costs.get(pipelines, 0.0) > left:
            return bound, True
        seconds, before = min(bound * (1.0 + step), progress.aim_s), progress.best_s
        excluded = _excluded(progress, pipelines, seconds, self.room, started + _PART * left)
        cost = time.perf_counter() - started
        if excluded:
            step *= 1.6 if cost < _QUICK * left else 1.0 if cost < _SLOW * left else 0.5
        elif progress.best_s >= before:
            step, cost = 0.4 * step, 0.3 * cost
            if pipelines not in self._mixed:
                # What was learnt may make a better plan all the same, which leaves less to exclude.
                self._mixed.add(pipelines)
                offer_whole(progress, pipelines, bound)
        longest = max(_LONGEST_STEP, min(_WIDE * (progress.aim_s / bound - 1.0), 1.0))
        self._steps[pipelines], self._costs[pipelines] = min(step, longest), cost
        if excluded and seconds >= longest_step_s(progress.problem):
            return np.inf, True
        return seconds if excluded else bound, step < _SHORTEST_STEP


def longest_step_s(problem: Problem) -> float:
    """Return a time that is enough for any pipeline that can run to get through the batch alone."""
    usable = np.isfinite(problem.far_s) & (problem.max_in_flight > 0)
    slowest = float(problem.far_s[usable].max(initial=0.0) + problem.hop_s.max(initial=0.0))
    tails = problem.tail_s.max(0) + (0.0 if problem.leave_tail_s is None else problem.leave_tail_s)
    return slowest * (problem.max_stages + problem.global_batch) + float(tails[usable].max(initial=0.0))


def _excluded(
    progress: SearchState, pipelines: tuple[int, int], seconds: float, room: Room, deadline: float
) -> bool:
    """Return whether it is proven that no such plan takes so few seconds; offer what is found."""
    problem = progress.problem
    contenders = _priced_well(progress, pipelines, seconds, room, deadline)
    if contenders is None or not contenders.find_all():
        return False
    spread = spread_factor(problem, sum(problem.counts))
    for _ in range(_REFINED):
        table = contenders.table()
        takes = room.demands(table.codes)
        combined = combine(takes, table.samples, table.worth, problem.counts, pipelines, keep=_KEPT)
        for rows in combined.sets:
            templates = [contenders.template(int(table.at[i]), int(table.row[i])) for i in rows]
            progress.offer(templates)
            progress.learn(templates)
        if not combined.proven or time.perf_counter() > deadline:
            return False
        if not combined.sets or combined.samples[0] < problem.global_batch - 0.5:
            return True
        if progress.best_s <= seconds * spread or not _refined(
            contenders, table, combined.sets[0], pipelines
        ):
            return False
    return False


def _priced_well(
    progress: SearchState, pipelines: tuple[int, int], seconds: float, room: Room, deadline: float
) -> ColumnEnumeration | None:
    """Return the bargains there are, at prices that leave few; None when they are too many all the same."""
    problem = progress.problem
    prices = None
    for round_ in range(_ROUNDS):
        before, pricing = progress.priced.get(pipelines, (0.0, None))
        if round_ or pricing is None or abs(seconds / before - 1.0) > _STALE:
            prices = _whole_prices(progress, pipelines, seconds) if prices is None else prices
            if prices is not None:
                pricing = progress.pricing(pipelines, prices)
                progress.priced[pipelines] = seconds, pricing
        if pricing is None:
            return None
        contenders = ColumnEnumeration(
            pricing=pricing,
            seconds=seconds,
            goal=goal_of(problem, pricing.prices, pipelines),
            num_pipelines=pipelines[1],
            room=room,
            deadline=deadline,
        )
        solved = pricing.solved
        complete = contenders.find_bargains()
        progress.evaluated += pricing.solved - solved
        table = contenders.table()
        best = np.argsort(table.worth, kind="stable")[:_LEARNT]
        learnt = (contenders.template(int(table.at[i]), int(table.row[i])) for i in best)
        progress.learn(learnt)
        if not complete:
            return None
        if contenders.short >= -_BARGAIN or pipelines[1] == 1:
            break
        prices = _whole_prices(progress, pipelines, seconds)
        if prices is None or np.allclose(prices, pricing.prices, rtol=_SAME):
            break
    return contenders if _sharpened(contenders, pipelines) else None


def _sharpened(contenders: ColumnEnumeration, pipelines: tuple[int, int]) -> bool:
    """Look closer at the best bargains as long as they are flattered; return whether the list is whole."""
    for _ in range(_REFINED):
        if contenders.short >= -_BARGAIN:
            break
        table = contenders.table()
        best = int(np.argmin(table.worth))
        if _flattery(contenders, table, best, pipelines) <= _BARGAIN:
            break
        if not contenders.sharpen(int(table.at[best]), int(table.row[best])):
            break
    return contenders.whole


def _whole_prices(progress: SearchState, pipelines: tuple[int, int], seconds: float) -> np.ndarray | None:
    """Return what devices are worth when the columns, mixed in fractions, get through whole samples."""
    problem = progress.problem
    table = progress.table()
    samples = table.whole_samples(seconds - table.tails_s(pipelines[0]))
    mix = fractional_mix(table.takes, samples, problem.counts, pipelines)
    return None if mix is None else mix.device_prices


def _refined(
    contenders: ColumnEnumeration, table: LabelTable, rows: Sequence[int], pipelines: tuple[int, int]
) -> bool:
    """Look closer at the pipeline of a set that is flattered most; False when nothing is left to see."""
    flattery = [_flattery(contenders, table, i, pipelines) for i in rows]
    worst = rows[int(np.argmax(flattery))]
    return max(flattery) > 0.0 and contenders.refine(int(table.at[worst]), int(table.row[worst]))


def _flattery(
    contenders: ColumnEnumeration, table: LabelTable, row: int, pipelines: tuple[int, int]
) -> float:
    """Return how many samples a contender is said to get through more than it does."""
    problem = contenders.pricing.problem
    template = contenders.template(int(table.at[row]), int(table.row[row]))
    left = contenders.seconds - tail_seconds(problem, template, pipelines[0])
    return float(table.samples[row]) - pace_of(problem, template).samples(left)


def vary(progress: SearchState, bounds: dict[tuple[int, int], float]) -> None:
    """Look for better whole numbers with the time left, among pipelines that other prices call for."""
    if progress.best is None or not bounds:
        return
    rng, ranges = np.random.default_rng(0), sorted(bounds, key=bounds.__getitem__)
    for i in range(_VARIANTS):
        if progress.late or progress.near(min(bounds.values())):
            return
        size = len(progress.best.templates)
        own = [one for one in ranges if one[0] <= size <= one[1]]
        pipelines = (own or ranges)[0] if i % 2 == 0 else ranges[i // 2 % len(ranges)]
        mix = priced(progress, pipelines, bounds[pipelines])
        if mix is None:
            continue
        prices = mix[1] * np.exp(rng.normal(0.0, _VARIED, len(mix[1])))
        pricing = progress.pricing(pipelines, prices)
        pricing.start()
        goal = goal_of(progress.problem, prices, pipelines)
        _, good = pricing.earliest(
            goal, known_s=np.inf, aim_s=np.inf, tolerance=_TOLERANCE, deadline=progress.deadline
        )
        progress.evaluated += pricing.solved
        before = len(progress.columns)
        progress.learn(varied(progress.problem, good))
        if len(progress.columns) > before:
            offer_whole(progress, pipelines, bounds[pipelines])
