"""The dual of the long-term problem over states and what runs in them: a bound, and what budgets are worth.

The best stationary policy that knows every state is a linear program: in each state, how often each structure
runs. At any multipliers of the budgets, the sum over states of the least time plus priced excess is below its
value; at the best ones it is the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.slots import SECONDS, Budget

_PIVOTS = 200
"""Most columns that enter the basis of the linear program: some tens do."""
_DIRECTIONS = 256
"""Random weights of several budgets whose best rows are kept: one product of matrices."""
_FEW = 64
"""Rows of a state up to which all are kept: corners are looked for to carry fewer, and these are few."""
_MANY = 256
"""Points beyond which a hull first leaves out those above a rough one: its loop is Python."""
_PARTS = 64
"""Parts whose lowest points make the rough hull: of the thousands of rows of a state."""
_NONE = 1e-9
"""Excess that is none, as a part of the largest excess of a budget: rounding."""
_EXACT = 1e-4
"""To which the least excess is found, as a part of the budget and the excess: measured costs are no finer."""
_RATIO_STEPS = 50
"""Newton steps for the weight of a second; a handful is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DualTable:
    """What runs in all states, in one list: seconds, and cost above budget by budget.

    Attributes
    ----------
    starts : ndarray of int, shape (states,)
        First row of each state.
    weight : ndarray, shape (states,)
        How often each state is; the sum is 1.
    time_s : ndarray, shape (rows,)
    excess : ndarray, shape (rows, budgets)
    state : ndarray of int, shape (rows,)
        State of each row.
    """

    starts: np.ndarray
    weight: np.ndarray
    time_s: np.ndarray
    excess: np.ndarray
    state: np.ndarray

    def value(self, multipliers: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the dual at some multipliers, and how far the choices there are above the budgets."""
        least, chosen = self.least(self.time_s + self.excess @ multipliers)
        return least, self.weight @ self.excess[chosen]

    def second_weight(self, frame: float, excess_weight: np.ndarray, start: float = 0.0) -> float:
        """Return the weight of a second with which the best mean step, excess included, comes to `frame`.

        It is the largest mean of `frame` less weighed excess over mean seconds that a stationary policy has.

        Parameters
        ----------
        frame : float
        excess_weight : ndarray, shape (budgets,)
        start : float
            Where the search begins; what is found does not depend on it.

        Source
        ------
        Dinkelbach 1967: Newton's method on the least mean step, which is concave in the weight and made of
        finitely many pieces.
        """
        priced, found = self.excess @ excess_weight, start
        for _ in range(_RATIO_STEPS):
            least, chosen = self.least(found * self.time_s + priced)
            step = (frame - least) / float(self.weight @ self.time_s[chosen])
            found += step
            if abs(step) <= 1e-12 * abs(found):
                break
        return found

    def least(self, total: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean of the least of each state, and its rows."""
        if len(self.starts) == 1:
            best = int(total.argmin())
            return float(self.weight[0] * total[best]), np.array([best])
        least = np.minimum.reduceat(total, self.starts)
        at = np.flatnonzero(total == least[self.state])
        return float(self.weight @ least), at[np.searchsorted(at, self.starts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dual:
    """The best multipliers and the value there.

    Attributes
    ----------
    value_s : float
    multipliers : tuple of float
        Seconds per unit of cost.
    feasible : bool
        False when nothing keeps the budgets: the multipliers are then 0 and the value that without budgets.
    """

    value_s: float
    multipliers: tuple[float, ...]
    feasible: bool


def table_of(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], weight: Sequence[float], budgets: Sequence[Budget]
) -> DualTable:
    """Return the table of states, each with seconds, shape (n,), and costs, shape (n, budgets)."""
    time_s, costs = np.concatenate([state[0] for state in rows]), np.concatenate([state[1] for state in rows])
    allowed = [allowances(budget, time_s) for budget in budgets]
    total, sizes = np.asarray(weight, float), [len(state[0]) for state in rows]
    return DualTable(
        starts=np.cumsum([0, *sizes[:-1]]),
        state=np.repeat(np.arange(len(rows)), sizes),
        weight=total / total.sum(),
        time_s=time_s,
        excess=costs - np.stack(allowed, axis=1) if allowed else np.zeros((len(time_s), 0)),
    )


def allowances(budget: Budget, time_s: np.ndarray) -> np.ndarray:
    """Return what steps of so many seconds may cost in the mean."""
    if budget.per == "step":
        return np.full(len(time_s), budget.limit)
    return budget.limit * time_s / SECONDS[budget.per]


def solve(table: DualTable, budgets: Sequence[Budget]) -> Dual:
    """Return the multipliers that maximise the dual."""
    multipliers, feasible = np.zeros(len(budgets)), True
    if len(budgets) and (table.excess > 0.0).any():
        found = _Mixture(table)
        feasible = found.keeps_all()
        # Where nothing keeps the budgets the dual has no end: the bound is then that without budgets.
        multipliers = found.multipliers() if feasible else multipliers
    value, _ = table.value(multipliers)
    return Dual(
        value_s=value, multipliers=tuple(float(multiplier) for multiplier in multipliers), feasible=feasible
    )


class _Mixture:
    """The best mixture of what runs in all states that keeps the budgets: a linear program.

    Its columns are choices of one row in every state, far too many to list; the one that enters the basis is
    found state by state at the duals of the basis. The rows are the budgets and that the mixture is whole.

    Source
    ------
    Dantzig, Wolfe 1960, Decomposition principle for linear programs.
    """

    def __init__(self, table: DualTable):
        self._scale = np.maximum(np.abs(table.excess).max(0), 1e-300)
        self._table = replace(table, excess=table.excess / self._scale)
        self._size = size = table.excess.shape[1]
        fastest, excess = self._table.value(np.zeros(size))
        self._worst = int(excess.argmax())
        # The basis: one choice, slacks, and in the place of the slack of the worst budget its excess.
        self._basis = np.eye(size + 1)
        self._basis[:-1, self._worst], self._basis[:, -1] = -1.0, np.append(excess, 1.0)
        self._cost = np.append(np.zeros(size), fastest)
        self._is_over = bool(excess[self._worst] > 0.0)
        if not self._is_over:
            self._basis[:-1, self._worst] = np.eye(size)[self._worst]

    def keeps_all(self) -> bool:
        """Return whether some mixture keeps all budgets, after which the basis is one that does."""
        if not self._is_over:
            return True
        excess = np.eye(self._size + 1)[self._worst]
        for _ in range(_PIVOTS):
            dual = np.linalg.solve(self._basis.T, excess)
            entering = self._entering(dual, 0.0)
            if entering is None:
                break
            if self._enter(*entering) == self._worst:
                return True
        level = np.linalg.solve(self._basis, np.eye(self._size + 1)[-1])[self._worst]
        self.weights = np.maximum(-dual[:-1], 0.0)
        if level > _NONE:
            return False
        # What is left is rounding; a slack takes its place.
        inverse = np.linalg.inv(self._basis)[self._worst, :-1]
        self._basis[:, self._worst] = np.eye(self._size + 1)[int(np.abs(inverse).argmax())]
        return True

    def separating(self) -> np.ndarray:
        """Return weights of the budgets at which every mixture is too dear, where none keeps them all."""
        return np.asarray(self.weights / self._scale)

    def multipliers(self) -> np.ndarray:
        """Return the multipliers of the best mixture."""
        best, best_value = np.zeros(self._size), -math.inf
        for _ in range(_PIVOTS):
            dual = np.linalg.solve(self._basis.T, self._cost)
            found = np.maximum(-dual[:-1], 0.0)
            entering = self._entering(dual, 1.0)
            if entering is None:
                return found / self._scale
            value, _ = self._table.value(found)
            if value > best_value:
                best, best_value = found, value
            self._enter(*entering)
        return best / self._scale

    def _entering(self, dual: np.ndarray, second: float) -> tuple[np.ndarray, float] | None:
        """Return the column that lowers the mean most, and its seconds; None where none does.

        `second` is what a second weighs: nothing while the budgets are not yet kept.
        """
        weights = -dual[:-1]
        least = int(weights.argmin())
        if weights[least] < -_NONE * max(1.0, float(weights.max())):
            return np.eye(self._size + 1)[least], 0.0
        table = self._table
        value, chosen = table.least(second * table.time_s + table.excess @ np.maximum(weights, 0.0))
        if value >= dual[-1] - _NONE * max(abs(dual[-1]), abs(value), 1e-3):
            return None
        excess, seconds = table.weight @ table.excess[chosen], table.weight @ table.time_s[chosen]
        return np.append(excess, 1.0), float(seconds)

    def _enter(self, column: np.ndarray, cost: float) -> int:
        """Let a column into the basis; return the place it takes."""
        sides = np.stack([column, np.eye(self._size + 1)[-1]], axis=1)
        change, level = np.linalg.solve(self._basis, sides).T
        ratio = np.full(len(change), math.inf)
        falls = change > 1e-12
        ratio[falls] = np.maximum(level[falls], 0.0) / change[falls]
        at = int(ratio.argmin())
        if ratio[self._worst] <= ratio[at]:
            at = self._worst
        self._basis[:, at], self._cost[at] = column, cost
        return at


def least_excess(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], weight: Sequence[float], budgets: Sequence[Budget]
) -> tuple[float, Dual]:
    """Return by what part all budgets must be exceeded together, and the dual of what is then fastest.

    Returns
    -------
    float, Dual
        0 and the dual of the budgets where they can be kept.

    Source
    ------
    Dinkelbach 1967: weights at which every mixture is too dear show by how much; so much and a little more is
    then allowed, until no weights are left.
    """
    table = table_of(rows, weight, budgets)
    found = solve(table, budgets)
    if found.feasible:
        return 0.0, found
    allowed = np.stack([allowances(budget, table.time_s) for budget in budgets], axis=1)
    part, raised = 0.0, table
    while not found.feasible:
        mixture = _Mixture(raised)
        mixture.keeps_all()
        least = _least_ratio(table, mixture.separating(), allowed)
        part = max(part + _EXACT * (1.0 + part), least + _EXACT * (1.0 + least))
        raised = replace(table, excess=table.excess - part * allowed)
        found = solve(raised, budgets)
    return part, found


def _least_ratio(table: DualTable, weights: np.ndarray, allowed: np.ndarray) -> float:
    """Return the least weighed excess over weighed allowance that a mixture has."""
    excess, allowance, ratio = table.excess @ weights, allowed @ weights, 0.0
    for _ in range(_RATIO_STEPS):
        _, chosen = table.least(excess - ratio * allowance)
        found = float(table.weight @ excess[chosen]) / float(table.weight @ allowance[chosen])
        if abs(found - ratio) <= 1e-12 * abs(found):
            break
        ratio = found
    return ratio


def corners(time_s: np.ndarray, costs: np.ndarray, few: int = _FEW) -> np.ndarray:
    """Return the rows that are best for some weights of time and of costs that are not negative.

    Exact for one budget. For several: the corners of each with time alone, and the best of many directions.
    """
    if len(time_s) <= few:
        return np.arange(len(time_s))
    found: set[int] = set()
    for i in range(costs.shape[1]):
        found.update(_lower_hull(time_s, costs[:, i]))
    if costs.shape[1] > 1:
        rng = np.random.default_rng(0)
        scale = np.maximum(np.abs(costs).max(0), 1e-300)
        weigh = rng.lognormal(0.0, 2.0, size=(_DIRECTIONS, costs.shape[1])) / scale
        found.update(np.argmin(time_s[:, None] / time_s.max() + costs @ weigh.T, axis=0).tolist())
    return np.array(sorted(found or {int(np.argmin(time_s))}))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Return the points of the lower convex hull (Andrew 1979), of many first those below that of a few."""
    order = np.lexsort((y, x))
    if len(order) > _MANY:
        parts = [part[np.argmin(y[part])] for part in np.array_split(order, _PARTS)]
        few = np.array([order[0], *parts, order[-1]])
        rough = few[_lower_hull(x[few], y[few])]
        order = order[y[order] <= np.interp(x[order], x[rough], y[rough])]
    hull: list[int] = []
    for at in order.tolist():
        if hull and x[hull[-1]] == x[at]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (x[b] - x[a]) * (y[at] - y[a]) - (y[b] - y[a]) * (x[at] - x[a]) > 0.0:
                break
            hull.pop()
        hull.append(at)
    return hull
