"""What a search of mixed clusters has found: plans timed by the engine, pipelines, and what was covered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from foreshard.planner.mixed.chunk_layout import laid_out
from foreshard.planner.mixed.node_sets import capped
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes, predicted
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Problem
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget
from foreshard.planner.solver.work_bounds import work_bound
from foreshard.predict.step import graph_takes
from foreshard.spec.plan import Group, Plan

_SPARED = 0.03
"""Part of what the closed form promises of a plan in chunks that laying them out may spare: of 359 random
plans a quarter spare 4 % or more, half .8 %."""


@dataclass(slots=True, kw_only=True)
class MixedFound:
    """Plans timed so far, and problems priced so far.

    Attributes
    ----------
    request : PlanRequest
    timed : list of (seconds, Plan)
        Plans that fit, with their step times by the closed form, or by the graph where they are interleaved.
    missing_bytes : float
        Least memory that a plan that does not fit lacks on its fullest rank.
    problems : dict
        By node groups.
    even : list of Plan
        Of those timed, the plans of the grid.
    graph_s : float
        Least seconds that the graph took for a plan so far, 0 before the first.
    taken_s : dict
        Step times of 1f1b plans that fit, by their groups.
    laid_s : dict
        Step times of interleaved plans whose chunks were laid out to the end, by their groups before that.
    """

    request: PlanRequest
    timed: list[tuple[float, Plan]] = field(default_factory=list)
    missing_bytes: float = np.inf
    problems: dict[tuple[int, ...], Problem] = field(default_factory=dict)
    even: list[Plan] = field(default_factory=list)
    graph_s: float = 0.0
    taken_s: dict[tuple[Group, ...], float] = field(default_factory=dict)
    laid_s: dict[tuple[Group, ...], float] = field(default_factory=dict)

    def problem(self, use: tuple[int, ...]) -> Problem:
        """Return the problem of some node groups, priced once."""
        if use not in self.problems:
            self.problems[use] = price_stages(self.request, use, by_domain=True, every=True)
        return self.problems[use]

    def work_s(self, use: tuple[int, ...]) -> float:
        """Return a step time that no plan on some node groups beats, from work alone.

        Among more node groups the stages of these take no longer: one problem serves all its subsets.
        """
        wider = next((known for known in self.problems if set(use) <= set(known)), use)
        problem = self.problem(wider)
        counts = tuple(n if g in use else 0 for g, n in enumerate(problem.counts))
        own = np.all(problem.takes <= np.array(counts), axis=1)
        rooms = np.where(own[:, None], problem.max_in_flight, 0)
        alone = replace(problem, counts=counts, max_in_flight=rooms)
        return work_bound(capped(alone, self.request.max_devices))

    @property
    def best(self) -> tuple[float, Plan | None]:
        """Return the least step time so far and its plan."""
        return min(self.timed, key=lambda timed: timed[0], default=(np.inf, None))

    @property
    def best_s(self) -> float:
        """Return the least step time so far."""
        return self.best[0]

    @property
    def known_s(self) -> float:
        """Return the least step time known, of other searches too: a bound above it is of no use."""
        return min(self.best_s, self.request.known_s)

    @property
    def is_interleaved(self) -> bool:
        """Return whether the fastest plan so far is interleaved, and none of the grid."""
        plan = self.best[1]
        return plan is not None and is_interleaved(plan) and plan not in self.even

    def may_be_fastest(self, promised_s: float) -> bool:
        """Return whether a plan in chunks of which the closed form promises so much may be the fastest."""
        return promised_s * (1.0 - _SPARED) <= self.best_s

    def plain(self, number: int) -> list[tuple[float, Plan]]:
        """Return the fastest 1f1b plans."""
        return sorted((t for t in self.timed if not is_interleaved(t[1])), key=lambda timed: timed[0])[
            :number
        ]

    def take(self, plan: Plan) -> float:
        """Keep a plan if it fits and is as stated; return its step time, infinite if it does not."""
        if plan.groups in self.taken_s:
            return self.taken_s[plan.groups]
        if not self.request.choices.holds(plan):
            return np.inf
        missing = missing_bytes(self.request, plan)
        if missing:
            self.missing_bytes = min(self.missing_bytes, missing)
            return np.inf
        seconds = engine_seconds(self.request, [plan])[0]
        self.timed.append((seconds, plan))
        self.taken_s[plan.groups] = seconds
        return seconds

    def take_even(self, plan: Plan) -> None:
        """Keep a plan of the grid if it fits."""
        if plan not in self.even and np.isfinite(self.take(plan)):
            self.even.append(plan)

    def take_interleaved(
        self, plan: Plan, budget: TimeBudget = ENDLESS, *, promised_s: float | None = None
    ) -> float:
        """Keep an interleaved plan, its chunks laid out anew, if it fits and may be the fastest.

        The closed form knows layers of stages, not those of their chunks: where it promises enough, the graph
        decides.
        `promised_s` is what it promises, where that is known.
        Nothing is tried, once there is a plan, where time is left for neither chunks nor the graph.
        """
        if plan.groups in self.laid_s:
            return self.laid_s[plan.groups]
        laying = TimeBudget(budget.ends_at - self.graph_s)
        if self.timed and laying.is_over:
            return np.inf
        if not self.request.choices.holds(plan) or not graph_takes(plan) or missing_bytes(self.request, plan):
            return np.inf
        if promised_s is None:
            promised_s = engine_seconds(self.request, [plan])[0]
        if not self.may_be_fastest(promised_s):
            return np.inf
        laid = laid_out(self.request, plan, laying)
        if missing_bytes(self.request, laid) or not self.request.choices.holds(laid):
            laid = plan
        started = time.perf_counter()
        seconds = predicted(replace(self.request, engine="graph", network="closed-form"), laid).step_time_s
        took_s = time.perf_counter() - started
        self.graph_s = min(self.graph_s or took_s, took_s)
        self.timed.append((seconds, laid))
        if not laying.is_over:
            self.laid_s[plan.groups] = seconds
        return seconds


def is_interleaved(plan: Plan) -> bool:
    """Return whether any pipeline of a plan holds several chunks of layers on a device."""
    return any(group.num_chunks > 1 for group in plan.groups)
