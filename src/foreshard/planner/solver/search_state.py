"""State of a search over arrangements: best so far, generated columns, duals by range, what is proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from foreshard.planner.solver.hops import recut
from foreshard.planner.solver.least_pricing import LeastPricing
from foreshard.planner.solver.pricing import PricedStages, Pricing, UnfilledPricing
from foreshard.planner.solver.problem import (
    Arrangement,
    Filling,
    PipelineColumns,
    PipelineFamily,
    Problem,
    Template,
    pipeline_columns,
    spread_factor,
    step_seconds,
)
from foreshard.planner.solver.shares import balance
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.planner.solver.work_bounds import fluid_s, least_work

_BISECTIONS = 12
"""Halvings of the number of devices a plan may leave out: to a thousandth of 4,096 devices."""


@dataclass(slots=True, kw_only=True)
class SearchState:
    """What is known so far of a problem.

    Attributes
    ----------
    problem : Problem
    budget : TimeBudget
        Of the present part of the search.
    target_gap : float
        Proven gap at which a range of pipelines is closed.
    filling : {'least', 'full'}
        By which pipelines are generated: the least proves bounds, the full finds good plans sooner.
    best, best_s : Arrangement or None, float
    beat_s : float
        Step time known from elsewhere: only what is faster is worth finding.
    made : dict of Arrangement to float
        Every arrangement offered, with its step time in seconds.
    columns : dict of Template to None
        Pipelines generated so far, in that order.
    rates : ndarray, shape (kinds,), samples per second
        Of a device of each kind alone; they weigh devices in bounds from work.
    stages : dict
        Stages that pipelines choose from, by range, pricing and family.
    evaluated : int
        Pipelines priced.
    pricings : dict of range to (seconds, Pricing)
        The step time for which duals of a range were found last, and its pipelines at those duals.
    """

    problem: Problem
    budget: TimeBudget
    target_gap: float
    filling: Filling = "least"
    best: Arrangement | None = None
    best_s: float = np.inf
    beat_s: float = np.inf
    made: dict[Arrangement, float] = field(default_factory=dict)
    columns: dict[Template, None] = field(default_factory=dict)
    rates: np.ndarray = field(default_factory=lambda: np.zeros(1))
    stages: dict[tuple[tuple[int, int], type[Pricing]], dict[PipelineFamily, PricedStages]] = field(
        default_factory=dict
    )
    evaluated: int = 0
    pricings: dict[tuple[int, int], tuple[float, Pricing]] = field(default_factory=dict)
    _table: PipelineColumns | None = None
    _spread: tuple[float, float] | None = None
    _work: float | None = None

    @property
    def longest_s(self) -> float:
        """Return a time that no stage of a useful plan exceeds."""
        usable = np.isfinite(self.problem.time_s) & (self.problem.max_in_flight > 0)
        return min(self.best_s, float(self.problem.far_s[usable].max()) if usable.any() else np.inf)

    @property
    def aim_s(self) -> float:
        """Return the step time, without spread, from which on a range of pipelines is closed."""
        return min(self.best_s, self.beat_s) / self.factor / (1.0 + self.target_gap)

    @property
    def is_late(self) -> bool:
        """Return whether the time is up and there is a plan; without one the search goes on for a while."""
        return self.budget.is_past or (self.best is not None and self.budget.is_over)

    def pricing(self, pipelines: tuple[int, int], duals: np.ndarray, *, fills: bool = True) -> Pricing:
        """Return the pipelines of a range at some duals of devices."""
        made = (LeastPricing if self.filling == "least" else Pricing) if fills else UnfilledPricing
        return made(
            problem=self.problem,
            pipelines=pipelines,
            duals=duals,
            longest_s=self.longest_s,
            stages=self.stages.setdefault((pipelines, made), {}),
        )

    def learn(self, templates: Iterable[Template]) -> None:
        """Add pipelines to the columns, with other cuts too where messages cost by both their ends."""
        fresh = dict.fromkeys(templates)
        self.columns.update(fresh)
        self.columns.update(dict.fromkeys(recut(self.problem, fresh)))

    def table(self) -> PipelineColumns:
        """Return all columns as arrays, in the order in which they were generated."""
        filling = self.filling
        known = pipeline_columns(self.problem, [], filling=filling) if self._table is None else self._table
        fresh = list(islice(self.columns, known.takes.shape[1], None))
        if fresh:
            known = known.followed_by(pipeline_columns(self.problem, fresh, filling=filling))
        self._table = known
        return known

    def is_closed(self, bound_s: float) -> bool:
        """Return whether a bound is within the target gap of the best arrangement."""
        return bound_s * (1.0 + 1e-9) >= self.aim_s

    @property
    def factor(self) -> float:
        """Return the least spread factor of any plan as fast as the best: that of the fewest devices."""
        if self.problem.jitter == 0.0:
            return 1.0
        best = min(self.best_s, self.beat_s)
        if self._spread is None or self._spread[0] != best:
            few, many = 1.0, float(sum(self.problem.counts))
            for _ in range(_BISECTIONS):
                middle = 0.5 * (few + many)
                few, many = (few, middle) if self.fluid_s(middle) < best else (middle, many)
            self._spread = best, spread_factor(self.problem, few)
        return self._spread[1]

    def fluid_s(self, devices: float) -> float:
        """Return a step time that no plan on at most so many devices beats, from work alone."""
        if self.rates.max() <= 0:
            return 0.0
        if self._work is None:
            self._work = least_work(self.problem, self.rates)
        return fluid_s(self.problem, self.rates, self._work, devices)

    def offer(self, templates: Sequence[Template], *, filling: Filling = "full") -> None:
        """Balance shares over some pipelines; keep the arrangement, and as best if it is."""
        if not templates:
            return
        columns = pipeline_columns(self.problem, templates, filling=filling)
        rates = [columns.rate(i) for i in range(len(templates))]
        tails = columns.tails(self.problem, len(templates)).tolist()
        # Gradients are summed when the last pipeline has them: then the longest tail follows all of them.
        for own in (tails, [max(tails)] * len(tails)):
            shares = balance(rates, own, self.problem.global_batch)
            if shares is None:
                return
            made = Arrangement(templates=tuple(templates), shares=shares)
            seconds = step_seconds(self.problem, made, filling=filling)
            self.made[made] = seconds
            if seconds < self.best_s:
                self.best, self.best_s = made, seconds
