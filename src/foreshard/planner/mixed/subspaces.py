"""Parts of the space of mixed plans that are searched side by side, and how time is divided among them.

Each subspace is a problem of its own: the plans on a set of node groups, or interleaved plans of some depth.
Each is searched twice. To find plans, pipelines count as filled in full: that is quick and leads to good
plans soon, but pipelines of unequal stages may take less. What such a search *promises* is by how many
seconds the step may still become shorter: the best step time so far less what it expects at least. The next
step is done where the promise is largest. To prove a bound, a second search counts the least that any
pipeline takes, starting from the pipelines that the first one has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.baselines.registry import BASELINES
from foreshard.planner.mixed.best_so_far import MixedFound
from foreshard.planner.mixed.even_plans import EvenPlans
from foreshard.planner.solver.problem import Arrangement, Filling, Problem, step_seconds, tail_seconds
from foreshard.planner.solver.solve import ProblemSearch
from foreshard.planner.solver.time_budget import TimeBudget

AIM = 0.003
"""Gap between an arrangement and its bound at which a subspace is closed; what plans lose on real ranks comes
on top, and the answer promises 1 %."""
_FIRST_S = 0.5
"""Seconds that count as spent on each subspace from the start: its first plan and bound take this long."""
_FIRST_SLICE_S = 0.5
"""Seconds of the first steps of a subspace: most of them raise its bound in less."""
ABOVE_WORK = 0.03
"""Part by which a bound exceeds that from work alone once pipelines were priced: the least tail is less."""
_KNOWN = 0.25
"""Least weight of a subspace of which pipelines were priced: that says more than how likely it seemed."""
_IN_EARNEST = 2
"""Steps of a search after which it has columns: the first one finds what pipelines there are."""
_PLANNING = 0.8
"""Part of a step for a published planner; the rest is for timing what it finds."""
_TIMED = 24
"""Arrangements of a subspace that the engine times: the best by the problem are among its first few."""
_AT_ONCE = 1
"""Of these after a step of its search, as long as that goes on: the next step may find better ones, and
laying out chunks takes longer than most steps."""


@dataclass(slots=True, kw_only=True, eq=False)
class Subspace:
    """A part of the space: its problem, how its arrangements become plans, and what it promises.

    Attributes
    ----------
    price : callable
        Returns the problem.
    time_plans : callable
        Times the plans of an arrangement and returns the least step time, infinite where none fits.
    floor_s : callable
        Returns a step time that no plan of the subspace is expected to beat, before it was searched.
    weight : float
        Of its promise beside that of others, as long as nothing else is known of it.
    is_wanted : callable
        Whether its search matters at present.
    alone : bool
        Whether its own best plan is looked for, whatever others are faster.
    finds : bool
        Whether plans are looked for by a search of their own.
    proves : bool
        Whether the bound of the answer rests on its bound.
    within : Subspace, optional
        One that holds all of its plans at no higher prices: what bounds that bounds this.
    planners : list of str
        Published planners of few shapes that are asked, one a step, once the search has columns: the next one
        where these are no better than what the one before found.
    beside : callable
        Returns subspaces of the same options at other prices: a proof starts from their pipelines.
    slice_s, proof_slice_s : float
        Seconds of the next step of its search and of its proof at least.
    best_s : float
        Least step time of its own plans.
    """

    price: Callable[[], Problem]
    time_plans: Callable[[Problem, Arrangement], float]
    floor_s: Callable[[], float]
    weight: float = 1.0
    is_wanted: Callable[[], bool] = lambda: True
    alone: bool = False
    finds: bool = True
    proves: bool = False
    within: Subspace | None = None
    planners: list[str] = field(default_factory=list)
    beside: Callable[[], Iterable[Subspace]] = tuple
    slice_s: float = _FIRST_SLICE_S
    proof_slice_s: float = _FIRST_SLICE_S
    best_s: float = np.inf
    spent_s: float = 0.0
    proving_s: float = 0.0
    problem: Problem | None = None
    search: ProblemSearch | None = None
    proof: ProblemSearch | None = None
    is_closed: bool = False
    is_proven: bool = False
    _planned_s: float = 0.0
    _steps: int = 0
    _timed: set[Arrangement] = field(default_factory=set)
    _misfits: set[Arrangement | None] = field(default_factory=set)
    _known: dict[ProblemSearch, tuple[float, float, int]] = field(default_factory=dict)

    @property
    def expected_s(self) -> float:
        """Return a step time that hardly any plan of the subspace beats: none that is filled in full."""
        return max(self.floor_s(), self.search.lower_bound_s if self.search else 0.0)

    @property
    def bound_s(self) -> float:
        """Return a step time that no plan of the subspace beats, as far as its problem is exact."""
        if self.search is not None and (self.search.is_sound or np.isinf(self.search.lower_bound_s)):
            own_s = self.expected_s  # infinite: no pipeline fits, whatever it takes
        else:
            own_s = max(self.floor_s(), self.proof.lower_bound_s if self.proof else 0.0)
        return own_s if self.within is None else max(own_s, self.within.bound_s)

    @property
    def ideal_s(self) -> float:
        """Return the step time of the best pipelines at the prices of its bound, infinite before any."""
        searches = [one for one in (self.search, self.proof) if one is not None and one.is_sound]
        return min((one.state.best_s for one in searches), default=np.inf)

    @property
    def is_priced(self) -> bool:
        """Return whether its bound is one by pipelines with their filling."""
        search = self.search if self.search is None or self.search.is_sound else self.proof
        return search is not None and search.is_filled

    @property
    def is_fresh(self) -> bool:
        """Return whether its first plans are still to be looked for."""
        if self.search is None or not self.search.has_plan or not self._has_columns:
            return True
        return bool(self.planners) and self._is_planned

    @property
    def is_bounded(self) -> bool:
        """Return whether its bound is more than what work alone says, by the prices of its own problem."""
        return self.bound_s >= self._work_s * (1.0 + ABOVE_WORK)

    @property
    def _work_s(self) -> float:
        """Return the step time that work alone says: by its own problem, once there is one, or its floor."""
        return max(self.floor_s(), self.search.ladder.get("compute", 0.0) if self.search else 0.0)

    def is_unproven(self, best_s: float) -> bool:
        """Return whether its bound is to be raised and may be."""
        wanted = self.proves and not self.is_proven and self.is_wanted()
        return wanted and self.bound_s * (1.0 + AIM) < best_s

    def promise_s(self, best_s: float) -> float:
        """Return by how many seconds a step may become shorter, or be proven not to; 0 when closed."""
        if self.is_closed or not self.finds or not self.is_wanted():
            return 0.0
        best_s = self.best_s if self.alone else best_s
        if not np.isfinite(best_s):
            return np.inf
        is_known = self.expected_s > self._work_s * (1.0 + ABOVE_WORK)
        weight = max(self.weight, _KNOWN) if is_known else self.weight
        return weight * max(0.0, best_s - self.expected_s * (1.0 + AIM))

    def advance(self, found: MixedFound, budget: TimeBudget) -> None:
        """Price the problem, or do a step of its search and time what it found."""
        if self.search is None:
            self.problem = self.price()
            filling: Filling = "full" if self.finds else "least"
            self.search = ProblemSearch(self.problem, target_gap=AIM, filling=filling)
            return
        if self.planners and self._is_planned:
            self._ask_planner(found, budget)
            return
        before_s, beat_s = self.search.lower_bound_s, np.inf if self.alone else found.best_s
        self.is_closed = not self._step(self.search, found, budget, beat_s)
        if not self.is_closed and budget.is_over and self.search.lower_bound_s <= before_s:
            self.slice_s *= 2.0  # what was cut short starts anew: the next time it has to end
        self.time_fresh(found, budget)

    def _ask_planner(self, found: MixedFound, budget: TimeBudget) -> None:
        """Offer what the next planner finds."""
        assert self.search is not None and self.problem is not None
        best = BASELINES[self.planners.pop(0)].best(self.problem, budget.part(_PLANNING))
        for _, arrangement in best.by_number.values():
            self.search.offer(arrangement.templates)
        self._planned_s = best.seconds
        self.time_fresh(found, budget)

    @property
    def _is_planned(self) -> bool:
        """Return whether its search has begun in earnest and found nothing better than planners did."""
        return self.search is not None and self._has_columns and self.search.state.best_s >= self._planned_s

    @property
    def _has_columns(self) -> bool:
        """Return whether its search has begun in earnest, or ended before."""
        return self._steps >= _IN_EARNEST or (self.search is not None and not self.search.is_open)

    def prove(self, found: MixedFound, budget: TimeBudget) -> None:
        """Do a step of its proof; of its search as long as that is open and has had less time.

        Not of its search where others know pipelines: a proof needs no more of it.
        """
        left_s = budget.left_s
        known = [one.search for one in self.beside() if one.search is not None and one.search.has_plan]
        searches = self.finds and not known and not self.is_closed and self.spent_s <= self.proving_s
        if self.search is None or searches:
            self.advance(found, budget)
            self.spent_s += left_s - budget.left_s
            return
        if self.proof is None:
            self.proof = self.search.proof()
        self.proof.follow(self.search)
        for other in known:
            self.proof.learn(other)
        before_s = self.bound_s
        self.is_proven = not self._step(self.proof, found, budget, found.known_s)
        if budget.is_over and self.bound_s <= before_s:
            self.proof_slice_s *= 2.0
        self.time_fresh(found, budget)
        self.proving_s += left_s - budget.left_s

    def _step(self, search: ProblemSearch, found: MixedFound, budget: TimeBudget, beat_s: float) -> bool:
        """Do a step of a search unless it is at its end; return whether it was not."""
        state = search.state
        if not search.is_open and found.timed:
            known = search.lower_bound_s, state.best_s, len(state.columns)
            if known != self._known.get(search):
                self._known[search] = known
                search.reopen()
        if not search.is_open:
            return False
        state.beat_s = beat_s
        self._steps += search is self.search
        search.advance(budget)
        return True

    def time_fresh(self, found: MixedFound, budget: TimeBudget) -> None:
        """Time arrangements that were not timed yet, the best first; late, as long as there is no plan.

        Left out are those that cannot be the fastest: no plan is faster than its arrangement is by the
        problem.
        """
        if self.search is None or self.problem is None:
            return
        made, before = self.search.state.made, len(self._timed)
        for arrangement in sorted(made, key=made.__getitem__)[:_TIMED]:
            enough = self.search.is_open and len(self._timed) - before >= _AT_ONCE
            if found.timed and (budget.is_over or enough):
                return
            least_s = step_seconds(self.problem, arrangement, filling="least")
            hopeless = not self.alone and least_s >= found.best_s
            if arrangement not in self._timed and not hopeless:
                self._timed.add(arrangement)
                seconds = self.time_plans(self.problem, arrangement)
                self.best_s = min(self.best_s, seconds)
                if not np.isfinite(seconds):
                    self._misfits.add(arrangement)

    @property
    def longest_tail_s(self) -> float:
        """Return the longest tail of the pipelines of its best arrangement, 0 before there is any."""
        best = self.search.state.best if self.search else None
        if best is None or self.problem is None:
            return 0.0
        return max(tail_seconds(self.problem, one, len(best.templates)) for one in best.templates)

    def lacks_memory(self, best_s: float) -> bool:
        """Return whether its best arrangement does not fit and would be faster than any plan."""
        if self.search is None or self.search.state.best not in self._misfits:
            return False
        return self.search.state.best_s < best_s * (1.0 - AIM)

    @property
    def evaluated(self) -> int:
        """Return the pipelines priced."""
        searches = {self.search, self.proof} - {None}
        return sum(search.state.evaluated for search in searches if search)


Part = Subspace | EvenPlans
"""A part of the space that may hold a better plan, with the seconds it was searched for."""


def next_subspace(subspaces: Sequence[Part], best_s: float) -> tuple[Part | None, float]:
    """Return the subspace that promises most for the time it has had, and its part of all; None of none.

    Without any plan it is the first that is open.
    """
    promises = [subspace.promise_s(best_s) for subspace in subspaces]
    if not any(promises):
        return None, 0.0
    if not np.isfinite(max(promises)):
        return subspaces[int(np.argmax(promises))], 1.0
    rates = [
        promise / (_FIRST_S + subspace.spent_s) for promise, subspace in zip(promises, subspaces, strict=True)
    ]
    first = int(np.argmax(rates))
    return subspaces[first], rates[first] / sum(rates)


def holding_down(subspaces: Sequence[Part], best_s: float) -> Part | None:
    """Return the subspace of the lowest bound that may be raised, of those that the answer's rests on."""
    open_ = [subspace for subspace in subspaces if subspace.is_unproven(best_s)]
    return min(open_, key=lambda subspace: subspace.bound_s, default=None)
