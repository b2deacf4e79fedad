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
LAST_PART, MOST_LAST, MOST_CORRECTION = 0.05, 500, 0.2
"""The excess so far is worked off by the end: over at least a part of the run, by at most a part of a budget.

The part is no more than MOST_LAST steps, so that what is left in the end does not grow with the run.

An excess of MOST_CORRECTION budgets for every step that is left can no longer wait.

Far from the budget the multipliers are known from few states.
"""
MOST_LEFT = 0.05
"""Part of a run's budget by which it may be exceeded on the way.

States to come can be dearer than those seen, and leave nothing to work it off with. In short runs, where V
weighs what is known against a few steps, V is far more of the budget than this.
"""
MOST_WORKING = 5000
"""Steps over which an excess is worked off at most.

What was learned wrongly of the costs of a step adds to the excess for that long, however long the run is.
"""
MOST_MISLED = LEAST_WEIGHT = 100.0
"""Budgets of a step by which one may be exceeded where forecasts are wrong, and V of short runs.

To exceed a budget now is a bet that what was learned says what is to come: V where it does. Where plans are
judged because it does not, the bet may not grow with the run, as V does. Smaller V let a few steps above the
budget outweigh what is known of it (ablation).
"""
MARGIN = 0.004
"""Part of the budget that is aimed to be left: what changes and late sight cost is not in what is learned."""
MOST_WORTH = 20.0
"""Largest multiplier that is believed, in reference steps per budget of a step."""
SLACK = 0.02
"""Part of the budget that a slot leaves which is to keep it by itself, so that the excess falls."""
MOST_WEIGHT = 1000.0
"""V of long runs: the excess on the way is up to V where forecasts hold, so that V may not grow with them."""
_MOST_STATES = 2048
"""States kept, some dozen rows each, since an update goes over all; the rarest are forgotten first."""
Rows = Sequence[tuple[np.ndarray, np.ndarray]]


@dataclass(slots=True, kw_only=True)
class _Visited:
    """A state: for how many steps it was seen, and what can run in it, on the corners only.

    `alone` is what budgets are worth where it is to keep them by itself, once that was asked.
    """

    steps: float = 0.0
    visits: int = 0
    time_s: np.ndarray
    costs: np.ndarray
    alone: tuple[np.ndarray, dual.DualTable] | None = None


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
        self._visited: dict[bytes, _Visited] = {}
        self._seen, self._next = 0, 1
        self._before: tuple[np.ndarray, dual.DualTable] | None = None
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
            rare = sorted(self._visited, key=lambda key: self._visited[key].steps)[: _MOST_STATES // 4]
            for other in rare:
                if other != key:
                    del self._visited[other]

    def saw(self, key: bytes, steps: int) -> None:
        """Count steps in a state whose rows are known."""
        self._visited[key].steps += steps
        self._visited[key].visits += 1
        self._seen += 1

    @property
    def due(self) -> bool:
        """Return whether an update is due."""
        return self._seen >= self._next and bool(self._visited)

    def place(self, queues: Queues, ratio: np.ndarray, late: np.ndarray) -> None:
        """Move the place-holders of the queues to what the states seen so far make of them.

        Budgets that cannot be kept together in these states are raised by the least part with which they can.

        Parameters
        ----------
        queues : Queues
        ratio : ndarray, shape (1 + budgets,)
            Seconds and costs that are measured over those of the model.
        late : ndarray, shape (1 + budgets,)
            Those of following the forecasts over those that were forecast.
        """
        self._next = max(min(2 * self._seen, self._seen + self._later), FIRST if self._seen > 1 else 2)
        visited = list(self._visited.values())
        weight = [max(state.steps, 1e-9) for state in visited]
        states = [(state.time_s * ratio[0], state.costs * ratio[1:]) for state in visited]
        part, _ = dual.least_excess(states, weight, self.budgets)
        for budget in self.budgets:
            queues[budget.name].concede(part)
        for state in visited:
            state.alone = None
        real = [(time_s * late[0], costs * late[1:]) for time_s, costs in states]
        left = self._left(queues)
        found = dual.solve(dual.table_of(real, weight, left), left)
        if not found.feasible:
            # Where only late forecasts break the budgets, queues do the rest.
            real, (_, found) = states, dual.least_excess(states, weight, left)
        self._move(queues, real, weight, found)

    def place_by(self, queues: Queues, time_s: np.ndarray, costs: np.ndarray) -> None:
        """Move the place-holders to the multipliers of one state, of which only some plans count."""
        rows = [(time_s, costs)]
        _, found = dual.least_excess(rows, [1.0], self._left(queues))
        self._move(queues, rows, [1.0], found)

    def _move(self, queues: Queues, rows: Rows, weight: Sequence[float], found: dual.Dual) -> None:
        """Move the place-holders to V times multipliers, and let slots be weighed by the states of these."""
        if queues.is_per_time:
            queues.refer(found.value_s)
        worth = self._worth(queues, found)
        queues.states = dual.table_of(rows, weight, self._raised(queues))
        if any(queues[budget.name].conceded for budget in self.budgets):
            # The least excess is as near as can be when time only decides between what costs the same.
            worth = worth * (MOST_WORTH / max(float(worth.max()), 1e-300))
        for budget, each in zip(self.budgets, worth, strict=True):
            queues.place(budget.name, queues.weight * min(float(each), MOST_WORTH))

    def _worth(self, queues: Queues, found: dual.Dual) -> np.ndarray:
        """Return multipliers as parts of V: by the reference step, with budgets per time by the mean one."""
        units = np.array([queues[budget.name].unit for budget in self.budgets])
        step_s = found.value_s if queues.is_per_time else queues.step_s
        return np.array(found.multipliers) * units / step_s

    def bet(self, queues: Queues, misled: bool) -> float:
        """Return the budgets of a step by which one may be exceeded on the way: V, or less where misled."""
        return min(queues.weight, MOST_MISLED) if misled else queues.weight

    def _steps_left(self, queues: Queues) -> float:
        """Return the steps over which an excess is worked off."""
        total = max(self.horizon, queues.steps)
        return max(total - queues.steps, min(LAST_PART * total, MOST_LAST))

    def secure(self, queues: Queues, key: bytes, ratio: np.ndarray, judged: Rows | None) -> None:
        """Let every budget that is exceeded weigh so much that the present slot keeps all of them, if it can.

        In proportion to the excess: as much as is needed when that is the bet, a part of the run's budget, or
        what the steps left can just work off; the excess stays near the least of these and ends near 0.

        Parameters
        ----------
        queues : Queues
        key : bytes
            Of the state. What budgets are worth in a new one is not known: that of the state before counts.
        ratio : ndarray, shape (1 + budgets,)
            Seconds and costs that following the forecasts came to over those of the model.
        judged : rows, optional
            What plans came to that were judged because forecasts are wrong; they count instead of the model.
        """
        bet, left = self.bet(queues, judged is not None), self._steps_left(queues)
        most = min(bet, MOST_LEFT * self.horizon, MOST_CORRECTION * left)
        part = max(queues[budget.name].excess for budget in self.budgets) / most
        visited, alone = self._visited.get(key), self._before
        if part <= 0.0:
            alone = None
        elif judged is not None:
            alone = self._alone(queues, judged)
        elif visited is not None:
            if visited.alone is None:
                visited.alone = self._alone(queues, [(visited.time_s * ratio[0], visited.costs * ratio[1:])])
            alone = self._before = visited.alone
        for budget in self.budgets:
            queues[budget.name].least = 0.0
        if alone is not None:
            worth, table = np.minimum(alone[0], MOST_WORTH) * part, alone[1]
            units = np.array([queues[budget.name].unit for budget in self.budgets])
            second = 1.0 / queues.step_s
            if queues.is_per_time:
                second = table.second_weight(1.0, worth / units)
            for budget, each in zip(self.budgets, worth / units / second, strict=True):
                queues[budget.name].least = float(each)

    def _alone(self, queues: Queues, rows: Rows) -> tuple[np.ndarray, dual.DualTable]:
        """Return what budgets are worth where one slot is to keep them alone, or 0; and what runs in it."""
        raised, found = dual.least_excess(rows, [1.0], self._raised(queues, SLACK))
        worth = self._worth(queues, found) * (raised <= SLACK)
        return worth, dual.table_of(rows, [1.0], self._raised(queues))

    def _raised(self, queues: Queues, spare: float = 0.0) -> list[Budget]:
        """Return the budgets with what is conceded, less a part of them that is to be left."""
        return [
            replace(budget, limit=budget.limit * (1.0 + queues[budget.name].conceded - spare))
            for budget in self.budgets
        ]

    def _left(self, queues: Queues) -> list[Budget]:
        """Return the budgets less what was spent too much, spread over the steps that are left."""
        total, found = max(self.horizon, queues.steps), []
        for budget in self.budgets:
            queue = queues[budget.name]
            mean = (1.0 + queue.conceded) * queue.allowed / queues.steps if queues.steps else 1.0
            saved = -queue.excess * queue.unit / mean - MARGIN * total * (not queue.conceded)
            left = self._steps_left(queues)
            part = saved / (left if saved > 0.0 else min(left, MOST_WORKING))
            part = min(max(part, -MOST_CORRECTION), MOST_CORRECTION)
            found.append(replace(budget, limit=budget.limit * (1.0 + queue.conceded) * (1.0 + part)))
        return found


def weight_for(violation: float, horizon: float) -> float:
    """Return the V with which an excess of `violation` of the budget after `horizon` steps weighs a sixth.

    Of a reference step: from a place-holder backlog, that excess raises what a budget of cost is worth by a
    sixth of a step. Larger V act on less knowledge of the budget, smaller ones answer every swing of the
    excess, of which most is chance: with a third, mixtures went beyond the two plans that are best.

    Examples
    --------
    >>> weight_for(0.01, 10_000)
    600.0
    """
    return min(max(LEAST_WEIGHT, 6.0 * violation * horizon), MOST_WEIGHT)
