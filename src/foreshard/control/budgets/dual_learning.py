"""Dual learning: place-holder backlogs from the multipliers of the states seen so far.

The queues of drift plus penalty settle near V times the multipliers of the long-term problem. Those of the
states seen so far are known long before a queue has filled: queues start from there, and are moved when more
is learned, so that they have only to correct what was learned wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.budgets import dual
from foreshard.control.budgets.queues import Queues
from foreshard.control.slots import Budget

FIRST, LATER, UPDATES = 16, 250, 40
"""Decisions between updates: they double up to FIRST, and are then LATER, or less so that a run has UPDATES.

An update takes milliseconds, and what it learns changes ever more slowly.
"""
LAST_PART, MOST_CORRECTION = 0.05, 0.2
"""The excess so far is worked off by the end: over at least a part of the run, by at most a part of a budget.

Far from the budget the multipliers are known from few states.
"""
MARGIN = 0.004
"""Part of the budget that is aimed to be left: what changes and late sight cost is not in what is learned."""
MOST_WORTH, UNKEPT_WORTH = 20.0, 3.0
"""Multipliers, in reference steps per budget of a step: the largest believed; where nothing is enough."""
UNKEPT_GROWTH, MOST_UNKEPT = 4.0, 1e4
"""What cannot be kept weighs so much more in every further update that says so, until time does not count."""
LEAST_WEIGHT = 100.0
"""V of short runs: smaller ones let a few steps above the budget outweigh what is known of it (ablation)."""
MOST_WEIGHT = 1000.0
"""V of long runs: the excess after N steps is O(V / N), so that V may not grow with them."""
_MOST_STATES = 2048
Rows = Sequence[tuple[np.ndarray, np.ndarray]]


@dataclass(slots=True, kw_only=True)
class _Visited:
    """A state: for how many steps it was seen, and what can run in it, on the corners only."""

    steps: float = 0.0
    visits: int = 0
    time_s: np.ndarray
    costs: np.ndarray


class DualLearning:
    """Keeps states and what can run in them, and places queues at V times their multipliers.

    Parameters
    ----------
    budgets : sequence of Budget
    horizon : int, steps
        Of the run.

    Source
    ------
    Huang, Liu, Hao 2014 (The power of online learning in stochastic network optimization): backlogs replaced
    by learned multipliers.
    """

    def __init__(self, budgets: Sequence[Budget], horizon: int):
        self.budgets, self.horizon = tuple(budgets), horizon
        self.feasible = True
        self._visited: dict[bytes, _Visited] = {}
        self._seen, self._next, self._unkept = 0, 1, 0
        self._later = max(FIRST, min(LATER, horizon // UPDATES))

    def knows(self, key: bytes) -> bool:
        """Return whether it is known what runs in a state."""
        return key in self._visited

    def needs(self, key: bytes) -> bool:
        """Return whether a state is new, or was seen so often that its rows are worth another look."""
        found = self._visited.get(key)
        return found is None or (found.visits & (found.visits - 1)) == 0

    def rows(self, key: bytes, time_s: np.ndarray, costs: np.ndarray) -> None:
        """Take in what can run in a state."""
        kept = dual.corners(time_s, costs)
        old = self._visited.get(key)
        self._visited[key] = _Visited(time_s=time_s[kept], costs=costs[kept])
        if old is not None:
            self._visited[key].steps, self._visited[key].visits = old.steps, old.visits
        if len(self._visited) > _MOST_STATES:
            rare = sorted(self._visited, key=lambda one: self._visited[one].steps)[: _MOST_STATES // 4]
            for one in rare:
                if one != key:
                    del self._visited[one]

    def saw(self, key: bytes, steps: int) -> None:
        """Count steps in a state whose rows are known."""
        self._visited[key].steps += steps
        self._visited[key].visits += 1
        self._seen += 1

    @property
    def due(self) -> bool:
        """Return whether an update is due."""
        return self._seen >= self._next and bool(self._visited)

    def place(self, queues: Queues, ratio: np.ndarray) -> None:
        """Move the place-holders of the queues to what the states seen so far make of them.

        Parameters
        ----------
        queues : Queues
        ratio : ndarray, shape (1 + budgets,)
            Seconds and costs that are measured over those of the model.
        """
        self._next = max(min(2 * self._seen, self._seen + self._later), FIRST if self._seen > 1 else 2)
        weight = [max(one.steps, 1e-9) for one in self._visited.values()]
        states = [(one.time_s, one.costs) for one in self._visited.values()]
        real = [(time_s * ratio[0], costs * ratio[1:]) for time_s, costs in states]
        # Where only late forecasts break the budgets, queues do the rest.
        self.place_by(queues, real, weight, otherwise=states)

    def place_by(
        self, queues: Queues, rows: Rows, weight: Sequence[float], *, otherwise: Rows | None = None
    ) -> None:
        """Move the place-holders to the multipliers of states.

        Parameters
        ----------
        queues : Queues
        rows : sequence of (ndarray, ndarray), shape (n,), (n, budgets)
            Seconds and costs of what runs in each state.
        weight : sequence of float
            How often each is.
        otherwise : as rows, optional
            What counts where no budgets can be kept with `rows`.
        """
        left = [self._left(queues, one) for one in self.budgets]
        for tried in (rows, otherwise) if otherwise is not None else (rows,):
            table = dual.table_of(tried, weight, left)
            found = dual.solve(table, left)
            if found.feasible:
                break
        self.feasible = found.feasible
        self._unkept = 0 if found.feasible else self._unkept + 1
        if not found.feasible:
            self._give_up(queues, table)
            return
        for one, multiplier in zip(self.budgets, found.multipliers, strict=True):
            worth = multiplier * queues[one.name].unit / queues.step_s
            queues.place(one.name, queues.weight * min(worth, MOST_WORTH))

    def _give_up(self, queues: Queues, table: dual.DualTable) -> None:
        """Place the queues where nothing keeps the budgets: those that nothing keeps alone come first."""
        least = table.weight @ np.minimum.reduceat(table.excess, table.starts, axis=0)
        lost = least > 0.0 if (least > 0.0).any() else np.ones(len(least), bool)
        grown = min(UNKEPT_WORTH * UNKEPT_GROWTH ** min(self._unkept - 1, 10), MOST_UNKEPT)
        for one, alone in zip(self.budgets, lost, strict=True):
            queues.place(one.name, queues.weight * (grown if alone else UNKEPT_WORTH))

    def _left(self, queues: Queues, budget: Budget) -> Budget:
        """Return the budget less what was spent too much, spread over the steps that are left."""
        queue, steps = queues[budget.name], queues.steps
        if not steps:
            return replace(budget, limit=budget.limit * (1.0 - MARGIN))
        total = max(self.horizon, steps)
        saved = (queue.allowed - queue.spent) / (queue.allowed / steps) - MARGIN * total
        part = saved / max(total - steps, LAST_PART * total)
        part = min(max(part, -MOST_CORRECTION), MOST_CORRECTION)
        return replace(budget, limit=budget.limit * (1.0 + part))


def weight_for(violation: float, horizon: float) -> float:
    """Return the V with which an excess of `violation` of the budget after `horizon` steps weighs a third.

    Of a reference step: from a place-holder backlog, that excess raises what a budget of cost is worth by a
    third of a step. Larger V act on less knowledge of the budget, smaller ones waste what they know.

    Examples
    --------
    >>> weight_for(0.01, 10_000)
    300.0
    """
    return min(max(LEAST_WEIGHT, 3.0 * violation * horizon), MOST_WEIGHT)
