"""What a search on devices of several kinds has found: plans judged, bounds, pipelines, what was covered."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from foreshard.planner.mixed.node_sets import capped
from foreshard.planner.pricing.engine_times import engine_seconds, engine_shares, short_bytes
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Problem, StageSpan, Template, step_seconds
from foreshard.planner.solver.solve import Solution
from foreshard.planner.solver.work_bounds import work_bound
from foreshard.spec.plan import Plan

_JUDGED = 24
_HASTE_S = 0.2  # before its deadline a search ends at a proven gap, or by Ctrl-C

NamedTemplate = tuple[tuple[Hashable, int, int], ...]
"""A pipeline by the names of its options: (name, start, stop) of each stage."""


@dataclass(slots=True, kw_only=True)
class MixedFound:
    """Plans judged so far, bounds of the sets of node groups, and what the search has covered."""

    judged: list[tuple[float, Plan]] = field(default_factory=list)
    short_bytes: float = np.inf
    bounds: list[float] = field(default_factory=list)
    ladder: dict[str, float] = field(default_factory=dict)
    evaluated: int = 0
    pruned: int = 0
    interleaved_s: float = 0.0
    set_aside_s: float = 0.0
    interrupted: bool = False
    stopped: bool = False
    columns: dict[NamedTemplate, None] = field(default_factory=dict)
    searched: dict[int, tuple[Problem, Solution]] = field(default_factory=dict)
    problems: dict[tuple[int, ...], Problem] = field(default_factory=dict)
    spoken_for: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Sets that a wider one speaks for: its number, and by how many seconds they may be faster."""

    @property
    def proven(self) -> list[float]:
        """Return the bounds of all sets so far, also by those that speak for them."""
        found = list(self.bounds)
        for i, (wider, faster_s) in self.spoken_for.items():
            if max(i, wider) < len(found):
                found[i] = max(found[i], min(found[wider], self.best_s) - faster_s)
        return found

    def problem(self, request: PlanRequest, use: tuple[int, ...]) -> Problem:
        """Return the problem of some node groups, priced once."""
        if use not in self.problems:
            self.problems[use] = price_stages(request, use, by_domain=True, every=True)
        return self.problems[use]

    def work_s(self, request: PlanRequest, use: tuple[int, ...]) -> float:
        """Return a step time that no plan on some node groups beats, from work alone.

        Among more node groups the stages of these take no longer: one problem speaks for all its sets.
        """
        wider = next((one for one in self.problems if set(use) <= set(one)), use)
        problem = self.problem(request, wider)
        counts = tuple(n if g in use else 0 for g, n in enumerate(problem.counts))
        own = np.all(problem.takes <= np.array(counts), axis=1)
        rooms = np.where(own[:, None], problem.max_in_flight, 0)
        return work_bound(capped(replace(problem, counts=counts, max_in_flight=rooms), request.max_devices))

    @property
    def best_s(self) -> float:
        """Return the least step time so far, by the analytical engine."""
        return min((seconds for seconds, _ in self.judged), default=np.inf)

    def take(self, request: PlanRequest, plan: Plan) -> list[float]:
        """Keep a plan that fits and return its step time; of others, what the best is short of."""
        short = short_bytes(request, plan)
        if short:
            self.short_bytes = min(self.short_bytes, short)
            return []
        seconds = engine_seconds(request, [plan])[0]
        self.judged.append((seconds, plan))
        return [seconds]

    def note(self, solution: Solution, deadline: float) -> None:
        """Count what was priced; what ended before its time was ended by the user."""
        self.evaluated += solution.evaluated
        self.stopped |= solution.interrupted and time.perf_counter() < deadline - _HASTE_S


def named(problem: Problem, solution: Solution) -> dict[NamedTemplate, None]:
    """Return a solution's pipelines by what their stages are, which holds in other problems too."""
    return {
        tuple((problem.names[part.option], part.start, part.stop) for part in template): None
        for template in solution.columns
    }


def known(problem: Problem, found: MixedFound) -> list[Template]:
    """Return the pipelines found in other sets of node groups that this problem has all options of."""
    index = {name: i for i, name in enumerate(problem.names)}
    return [
        tuple(StageSpan(option=index[name], start=start, stop=stop) for name, start, stop in named)
        for named in found.columns
        if all(name in index for name, _, _ in named)
    ]


def judge_plans(
    found: MixedFound,
    request: PlanRequest,
    problem: Problem,
    solution: Solution,
    deadline: float,
    beat_s: float | None = None,
) -> None:
    """Judge plans of the arrangements, as they are and with shares balanced anew, by their step times.

    Late, the best arrangement alone. With a time to beat, those that cannot beat it, or the best here, are
    left out: no plan is faster by the engine than its arrangement is by the problem.
    """
    made: list[float] = []
    seen: list[Plan] = []
    for arrangement in solution.others[:_JUDGED]:
        least = step_seconds(problem, arrangement)
        if beat_s is not None and made and least >= min(beat_s, *made):
            continue
        for near in (False, True):
            if made and time.perf_counter() > deadline:
                return
            plan = plan_of(request, problem, arrangement, replicas_near=near)
            if plan is None or plan in seen:
                continue
            seen.append(plan)
            made += found.take(request, plan)
            again = engine_shares(request, problem, arrangement, plan)
            other = None if again is None else plan_of(request, problem, again, replicas_near=near)
            if other is not None:
                made += found.take(request, other)
