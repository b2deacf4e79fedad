"""What a search of arrangements knows so far: the best, pipelines, and what is not worth a look."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.solver.columns import ColumnTable
from foreshard.planner.solver.hops import recut
from foreshard.planner.solver.pricing import PricedStages, Pricing
from foreshard.planner.solver.problem import (
    Arrangement,
    PipelineFamily,
    Problem,
    Template,
    pace_of,
    spread_factor,
    step_seconds,
    tail_seconds,
)
from foreshard.planner.solver.shares import balance
from foreshard.planner.solver.work_bounds import fluid_s, least_work


@dataclass(slots=True, kw_only=True)
class SearchState:
    """What is known so far: the best arrangement, the columns, and prices by number of pipelines.

    priced : seconds for which prices of devices were found last, and pipelines at those prices
    """

    problem: Problem
    deadline: float
    target_gap: float
    best: Arrangement | None = None
    best_s: float = np.inf
    beat_s: float = np.inf
    made: dict[Arrangement, float] = field(default_factory=dict)
    columns: dict[Template, None] = field(default_factory=dict)
    prices: np.ndarray = field(default_factory=lambda: np.zeros(1))
    stages: dict[tuple[int, int], dict[PipelineFamily, PricedStages]] = field(default_factory=dict)
    evaluated: int = 0
    interrupted: bool = False
    priced: dict[tuple[int, int], tuple[float, Pricing]] = field(default_factory=dict)
    _table: ColumnTable | None = None
    _spread: tuple[float, float] | None = None
    _work: float | None = None

    @property
    def longest_s(self) -> float:
        """Return a time that no stage of a plan worth looking at takes."""
        usable = np.isfinite(self.problem.time_s) & (self.problem.max_in_flight > 0)
        return min(self.best_s, float(self.problem.far_s[usable].max()) if usable.any() else np.inf)

    @property
    def aim_s(self) -> float:
        """Return the time, spread apart, below which a range of pipelines is worth working out."""
        return min(self.best_s, self.beat_s) / self.factor / (1.0 + self.target_gap)

    def pricing(self, pipelines: tuple[int, int], prices: np.ndarray) -> Pricing:
        """Return pipelines at some prices, for a number of them in a range."""
        return Pricing(
            problem=self.problem,
            pipelines=pipelines,
            prices=prices,
            longest_s=self.longest_s,
            stages=self.stages.setdefault(pipelines, {}),
        )

    def learn(self, templates: Iterable[Template]) -> None:
        """Add pipelines to the columns, cut anew too where messages cost by both their ends."""
        fresh = dict.fromkeys(templates)
        self.columns.update(fresh)
        self.columns.update(dict.fromkeys(recut(self.problem, fresh)))

    def table(self) -> ColumnTable:
        """Return the numbers of all columns."""
        if self._table is None:
            self._table = ColumnTable(self.problem)
        self._table.extend(self.columns)
        return self._table

    def near(self, bound_s: float) -> bool:
        """Return whether no more than the wanted gap can lie between a bound and the best arrangement."""
        return bound_s * (1.0 + 1e-9) >= self.aim_s

    @property
    def late(self) -> bool:
        """Return whether the time is up."""
        return time.perf_counter() >= self.deadline

    @property
    def factor(self) -> float:
        """Return the spread factor of a number of devices: fewer could not be as fast as the best found."""
        if self.problem.jitter == 0.0:
            return 1.0
        best = min(self.best_s, self.beat_s)
        if self._spread is None or self._spread[0] != best:
            few, many = 1.0, float(sum(self.problem.counts))
            for _ in range(12):
                middle = 0.5 * (few + many)
                few, many = (few, middle) if self.fluid_s(middle) < best else (middle, many)
            self._spread = best, spread_factor(self.problem, few)
        return self._spread[1]

    def fluid_s(self, devices: float) -> float:
        """Return a time that no plan on at most so many devices beats, whatever its pipelines."""
        if self.prices.max() <= 0:
            return 0.0
        if self._work is None:
            self._work = least_work(self.problem, self.prices)
        return fluid_s(self.problem, self.prices, self._work, devices)

    def offer(self, templates: Sequence[Template]) -> None:
        """Balance shares over some pipelines and keep the arrangement if it is good."""
        if not templates:
            return
        copies = len(templates)
        tails = [tail_seconds(self.problem, one, copies) for one in templates]
        shares = balance([pace_of(self.problem, one) for one in templates], tails, self.problem.global_batch)
        if shares is None:
            return
        made = Arrangement(templates=tuple(templates), shares=shares)
        seconds = step_seconds(self.problem, made)
        self.made[made] = seconds
        if seconds < self.best_s:
            self.best, self.best_s = made, seconds
