"""The search of one problem: the best arrangement of pipelines, and a bound on every other.

The numbers of pipelines are cut into ranges. Each range has a bound: first by column generation
(`range_bounds`), then by whole numbers of pipelines (`bound_raising`). The search works on the range whose
bound is lowest, since it holds the bound of the problem down and leaves most room for a better plan.
`ProblemSearch` does one step of this at a time, so that searches of several problems can share a budget;
`solve` takes all steps of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.planner.solver.bound_raising import BoundRaiser
from foreshard.planner.solver.column_enumeration import memory_for
from foreshard.planner.solver.enumeration import (
    all_templates,
    best_of_all,
    undominated,
    with_least_parts,
)
from foreshard.planner.solver.hops import least_hops_in_times
from foreshard.planner.solver.pipeline_mix import fractional_mix
from foreshard.planner.solver.pricing import PricedStages, cheapest_path
from foreshard.planner.solver.problem import (
    Arrangement,
    Filling,
    PipelineFamily,
    Problem,
    Template,
    step_seconds,
)
from foreshard.planner.solver.range_bounds import fractional_bound
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.planner.solver.work_bounds import least_tail, rate_of

Range = tuple[int, int]
"""Fewest and most pipelines."""

_ROUNDS = 25
"""Rounds of column generation for the most pipelines that devices hold; hardly any problem needs five."""
_KEPT = 96
"""Arrangements a solution lists."""
_FEW_DEVICES = 10
"""Problems of so many devices are solved by enumeration where pipelines are few enough: at the optimum."""
_OFFERED: tuple[Filling, ...] = ("full", "typical")
"""Costs of filling by which the best plan of an enumerated problem is offered: either may be nearer."""
_TOLERANCES = (5e-3, 1e-3, 2e-4)
"""Relative tolerances of the bounds of a range by fractions, used one after the other."""
_COARSE = 2e-2
"""The first one of a proof, whose pricing takes long: finer ones follow where they matter."""
_UNFILLED = -1
"""Fineness of a range whose bound is first to rise without the filling of pipelines."""


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
        The pipelines generated; another search may start from them.
    evaluated : int
        Pipelines priced as columns or as shortest paths.
    excluded : int
        Pipelines that another dominates, where all were enumerated.
    interrupted : bool
        Ended by the budget or the keyboard.
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

    @property
    def gap(self) -> float:
        """Return how much longer the step is than the bound, as a fraction of the bound."""
        return self.step_time_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else np.inf


def solve(
    problem: Problem,
    *,
    budget_s: float = 10.0,
    target_gap: float = 0.01,
    columns: Sequence[Template] = (),
    beat_s: float = np.inf,
    filling: Filling = "least",
) -> Solution:
    """Return the best arrangement found and a bound that no arrangement beats.

    Parameters
    ----------
    problem : Problem
    budget_s : float
        Seconds to search; an interrupt from the keyboard ends it sooner.
    target_gap : float
        Proven gap at which to stop.
    columns : sequence of Template
        Pipelines to begin with, such as those of an earlier solution.
    beat_s : float
        Step time known from elsewhere, seconds: what cannot beat it is not worked out.
    filling : {'least', 'full'}
        As for :class:`ProblemSearch`: in full good plans are found sooner, and the bound is one on pipelines
        that take it.
    """
    budget = TimeBudget.of(budget_s)
    search = ProblemSearch(problem, target_gap=target_gap, columns=columns, beat_s=beat_s, filling=filling)
    interrupted = False
    try:
        while search.is_open and not (budget.is_over and search.has_plan):
            search.advance(budget)
    except KeyboardInterrupt:
        interrupted = True
    return search.solution(interrupted=interrupted or (search.has_plan and budget.is_over))


@dataclass(slots=True)
class _Range:
    """An interval of numbers of pipelines: its bound, the rows of tails in it, and the steps it has had.

    `is_filled` says whether the filling of pipelines counts in its bound.
    """

    rows: list[Range]
    bound_s: float
    fineness: int = 0
    is_open: bool = True
    steps: int = 0
    is_filled: bool = False


class ProblemSearch:
    """The search of one problem, a step at a time.

    Parameters
    ----------
    problem : Problem
    target_gap : float
    columns : sequence of Template
    beat_s : float
        As for :func:`solve`; `state.beat_s` may fall between steps.
    filling : {'least', 'full'}
        By which pipelines are generated: only the least proves bounds, the full finds good plans sooner.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        target_gap: float,
        columns: Sequence[Template] = (),
        beat_s: float = np.inf,
        filling: Filling = "least",
    ) -> None:
        self.state = SearchState(
            problem=least_hops_in_times(problem),
            budget=TimeBudget(0.0),
            target_gap=target_gap,
            filling=filling,
            beat_s=beat_s,
            columns=dict.fromkeys(columns),
        )
        self.ladder: dict[str, float] = {}
        self.ranges: dict[Range, _Range] | None = None
        self.excluded = 0
        self.is_small = sum(problem.counts) <= _FEW_DEVICES
        self._raiser: BoundRaiser | None = None
        self._solved_s: float | None = None

    @property
    def has_plan(self) -> bool:
        """Return whether there is an arrangement."""
        return self.state.best is not None

    @property
    def is_open(self) -> bool:
        """Return whether another step may find or prove anything."""
        if self.ranges is None:
            return True
        return self._solved_s is None and any(interval.is_open for interval in self.ranges.values())

    @property
    def lower_bound_s(self) -> float:
        """Return a step time that no arrangement beats; infinite where none exists."""
        if self._solved_s is not None or self.ranges is None:
            return self._solved_s or 0.0
        lower = min((interval.bound_s for interval in self.ranges.values()), default=np.inf)
        return max(lower * self.state.factor, self.ladder.get("compute", 0.0))

    @property
    def is_filled(self) -> bool:
        """Return whether its bound is one by pipelines with their filling."""
        if self._solved_s is not None or not self.ranges:
            return self.ranges is not None
        return min(self.ranges.values(), key=lambda interval: interval.bound_s).is_filled

    @property
    def is_sound(self) -> bool:
        """Return whether its bound holds for the least that pipelines take."""
        return self.state.filling == "least" or self._solved_s is not None

    def proof(self) -> ProblemSearch:
        """Return a search for a bound that holds, from what this one found; itself where its own does."""
        state = self.state
        if self.is_sound:
            return self
        proof = ProblemSearch(state.problem, target_gap=state.target_gap)
        proof.ladder, proof.is_small = self.ladder, False
        proof.state.made = state.made
        proof.follow(self)
        return proof

    def offer(self, templates: Sequence[Template]) -> None:
        """Learn pipelines that were found elsewhere, and keep them as an arrangement."""
        self.state.learn(templates)
        self.state.offer(templates)

    def learn(self, other: ProblemSearch) -> None:
        """Learn the pipelines that a search at other prices of the same options has found since."""
        assert other.state.problem.names == self.state.problem.names
        self.state.columns.update(other.state.columns)

    def follow(self, other: ProblemSearch) -> None:
        """Learn the pipelines that another search of the problem has found, and its best arrangement."""
        self.learn(other)
        if other.state.best_s < self.state.best_s:
            self.state.best, self.state.best_s = other.state.best, other.state.best_s

    def advance(self, budget: TimeBudget) -> None:
        """Work once on the open range of the lowest bound, within a budget as far as that can be."""
        self.state.budget = budget
        if self.ranges is None:
            self._start()
            return
        state, ranges = self.state, self.ranges
        pending = {key: interval for key, interval in ranges.items() if interval.is_open}
        if self.has_plan:
            key = min(pending, key=lambda known: pending[known].bound_s)
        else:  # in turn, most pipelines first: no bound says in which range there is a plan
            key = min(pending, key=lambda known: (pending[known].steps, -known[0]))
        interval = pending[key]
        interval.steps += 1
        if state.is_closed(interval.bound_s):
            interval.is_open = False
            return
        stuck = False
        if interval.fineness == _UNFILLED:
            bound_s = fractional_bound(state, key, interval.bound_s, _COARSE, fills=False)
            interval.bound_s, interval.fineness = max(interval.bound_s, bound_s), 0
            interval.is_open = not state.is_closed(interval.bound_s)
            return
        interval.is_filled = True
        proves = state.filling == "least"
        tolerances = (_COARSE, *_TOLERANCES) if proves else _TOLERANCES
        if self._raiser is not None and interval.fineness > proves:
            interval.bound_s, stuck = self._raiser.attempt(key, interval.bound_s)
        else:
            tolerance = tolerances[interval.fineness]
            closely = self._raiser is None
            bound_s = fractional_bound(state, key, interval.bound_s, tolerance, closely=closely)
            interval.bound_s, interval.fineness = max(interval.bound_s, bound_s), interval.fineness + 1
            stuck = self._raiser is None and interval.fineness == len(tolerances)
        if state.is_closed(interval.bound_s) or stuck:
            interval.is_open = False
        if not state.is_closed(interval.bound_s):
            halves = _halves(key, interval, int(proves), stuck=stuck)
            if halves:
                del ranges[key]
                ranges.update(halves)

    def reopen(self) -> None:
        """Open the ranges again that were given up: with the columns learnt since, more may be proven."""
        for interval in (self.ranges or {}).values():
            interval.is_open = not self.state.is_closed(interval.bound_s) and np.isfinite(interval.bound_s)

    def solution(self, *, interrupted: bool = False) -> Solution:
        """Return what is known so far."""
        state, lower = self.state, self.lower_bound_s
        if state.best is None and not np.isfinite(lower) and self.ranges:
            lower = np.inf
        others = sorted(state.made, key=state.made.__getitem__)[:_KEPT]
        lower = min(lower, state.best_s)
        return Solution(
            arrangement=state.best,
            step_time_s=state.best_s,
            lower_bound_s=lower,
            ladder=self.ladder | {"configuration": lower} if self.ladder else {},
            others=tuple(others),
            columns=tuple(state.columns),
            evaluated=state.evaluated,
            excluded=self.excluded,
            interrupted=interrupted,
        )

    def _start(self) -> None:
        """Find the ranges and their simple bounds; solve a small problem."""
        state, problem = self.state, self.state.problem
        most = min(
            _most_pipelines(state), problem.global_batch, problem.max_pipelines or problem.global_batch
        )
        first = [copies for copies in problem.copies if copies <= most]
        rows = (
            [(low, high - 1) for low, high in zip(first, [*first[1:], most + 1], strict=True)]
            if first
            else []
        )
        if not rows:
            self.ranges = {}
            return
        rates = np.array([rate_of(problem, kind) for kind in range(len(problem.counts))])
        state.rates = np.where(rates > 0, rates, rates.max() * 1e-3)
        compute_s = state.fluid_s(float(sum(problem.counts)))
        self.ladder = {
            "compute": compute_s,
            "sync": compute_s + least_tail(problem, (1, sum(problem.counts))),
        }
        self.ranges = {}
        if self.is_small:
            self._enumerate(rows)
            if self._solved_s is not None:
                return
        memory = memory_for(problem)
        self._raiser = None if memory is None else BoundRaiser(state=state, memory=memory)
        for some in [rows[:1], rows[1:]] if len(rows) > 1 else [rows]:
            key = some[0][0], some[-1][1]
            fineness = _UNFILLED if state.filling == "least" else 0
            bound_s = compute_s + least_tail(problem, key)
            self.ranges[key] = _Range(rows=some, bound_s=bound_s, fineness=fineness)

    def _enumerate(self, rows: list[Range]) -> None:
        """Solve the problem by enumeration, unless there is too much of it for half of the time."""
        state, problem = self.state, self.state.problem
        half = state.budget.part(0.5)
        templates = all_templates(problem, budget=half, every=False)
        if templates is None:
            return
        kept: list[Template] = []
        proven = True
        for filling in _OFFERED if templates else ():
            kept = undominated(problem, templates, filling=filling)
            best, ended = best_of_all(problem, kept, rows, half, filling=filling)
            proven &= ended
            if best is not None:
                state.columns.update(dict.fromkeys(best.templates))
                state.offer(best.templates, filling=filling)
        least = None
        if proven and kept:
            quickest = with_least_parts(problem)
            quick = undominated(quickest, templates, filling="least")
            least, proven = best_of_all(quickest, quick, rows, half, filling="least")
        if proven:
            self._solved_s = np.inf if least is None else step_seconds(quickest, least, filling="least")
            self.excluded = len(templates) - len(kept)
            state.columns = dict.fromkeys(kept)
            state.evaluated = len(kept)


def _halves(key: Range, interval: _Range, fineness: int, *, stuck: bool) -> dict[Range, _Range]:
    """Return the halves of a range of several rows of tails, or of one where nothing raises its bound.

    Those of several begin with a fineness: what is coarser says no more of a half.
    """
    if len(interval.rows) > 1:
        half = len(interval.rows) // 2
        return {
            (rows[0][0], rows[-1][1]): _Range(
                rows=rows,
                bound_s=interval.bound_s,
                fineness=fineness,
                steps=interval.steps,
                is_filled=interval.is_filled,
            )
            for rows in (interval.rows[:half], interval.rows[half:])
        }
    if stuck and key[0] < key[1]:
        middle = (key[0] + key[1]) // 2
        return {
            half: _Range(
                rows=interval.rows,
                bound_s=interval.bound_s,
                fineness=1,
                steps=interval.steps,
                is_filled=interval.is_filled,
            )
            for half in ((key[0], middle), (middle + 1, key[1]))
        }
    return {}


def _most_pipelines(state: SearchState) -> int:
    """Return how many pipelines the devices can hold at most, and keep the columns that show it.

    A linear program over the pipelines of fewest devices; by its own duals, no other pipeline may be cheaper
    than one.
    """
    problem = state.problem
    counts, weights = np.array(problem.counts, dtype=float), np.ones(len(problem.counts))
    bound = float(sum(problem.counts))
    known: dict[PipelineFamily, PricedStages] = {}
    for _ in range(_ROUNDS):
        least, found = fewest_devices(problem, weights, known)
        state.evaluated += 1
        if found is None:
            return 0
        bound = min(bound, float(weights @ counts) / least)
        state.columns[found] = None
        takes = state.table().takes
        mix = fractional_mix(takes, np.ones(takes.shape[1]), problem.counts, (0, sum(problem.counts)))
        if mix is None or mix.samples >= bound - 1e-6 or state.budget.is_past:
            break
        # Devices that are not scarce still count a little, so that the path has something to save.
        weights = mix.device_duals + 1e-9
    return int(bound + 1e-6)


def fewest_devices(
    problem: Problem, weights: np.ndarray, known: dict[PipelineFamily, PricedStages] | None = None
) -> tuple[float, Template | None]:
    """Return the least weight of devices of any pipeline, and that pipeline; infinite where none fits.

    Parameters
    ----------
    problem : Problem
    weights : ndarray, shape (kinds,)
        Of a device of each kind.
    known : dict, optional
        As in :func:`foreshard.planner.solver.pricing.cheapest_path`.
    """
    no_tail = np.zeros_like(problem.time_s)
    best, template = np.inf, None
    for size in np.unique(problem.micro_batch):
        # A second costs next to nothing beside a device.
        found = cheapest_path(problem, no_tail, weights, int(size), 1e-12, (1e12, np.inf), known)
        if found is not None and found[0] < best:
            best, template = found
    return best, template
