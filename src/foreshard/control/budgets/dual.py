"""The dual of the long-term problem over states and what runs in them: a bound, and what budgets are worth.

The best stationary policy that knows every state is a linear program: in each state, how often each structure
runs. At any multipliers of the budgets, the sum over states of the least time plus priced excess is below its
value; at the best ones it is the value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.slots import SECONDS, Budget

_ROUNDS = 12
"""Most times that all multipliers are climbed in turn; a round that gains less than 1e-9 is the last."""
_STEPS = 60
"""Halvings of the interval of a multiplier: the 53 bits of a float and some to spare."""
_DIRECTIONS = 256
"""Random weights of several budgets whose best rows are kept: one product of matrices."""
_FEW = 64
"""Rows of a state up to which all are kept: corners are looked for to carry fewer, and these are few."""
_MANY = 256
"""Points beyond which a hull first leaves out those above a rough one: its loop is Python."""
_PARTS = 64
"""Parts whose lowest points make the rough hull: of the thousands of rows of a state."""
_MOST_CUTS = 24
"""Cuts in which weights are sought that show budgets to be incompatible: their corners are all listed."""
_NONE = 1e-9
"""Excess that is none, as a part of the largest excess of a budget: rounding."""
_EXACT = 1e-4
"""To which the least excess is found, as a part of the budget and the excess: measured costs are no finer."""
_RATIO_STEPS = 50
"""Newton steps for the weight of a second; a handful is needed."""
_TEMPERATURES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
"""Of the smoothed duals, as parts of the mean least step: each about a third of the one before."""
_NEWTON = 12
"""Most Newton steps at a temperature: each starts near its end."""


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
    """

    starts: np.ndarray
    weight: np.ndarray
    time_s: np.ndarray
    excess: np.ndarray

    def value(self, multipliers: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the dual at some multipliers, and how far the choices there are above the budgets."""
        least, chosen = self._least(self.time_s + self.excess @ multipliers)
        return least, self.weight @ self.excess[chosen]

    def second_weight(self, frame: float, excess_weight: np.ndarray) -> float:
        """Return the weight of a second with which the best mean step, excess included, comes to `frame`.

        It is the largest mean of `frame` less weighed excess over mean seconds that a stationary policy has.

        Parameters
        ----------
        frame : float
        excess_weight : ndarray, shape (budgets,)

        Source
        ------
        Dinkelbach 1967: Newton's method on the least mean step, which is concave in the weight and made of
        finitely many pieces.
        """
        priced, found = self.excess @ excess_weight, 0.0
        for _ in range(_RATIO_STEPS):
            least, chosen = self._least(found * self.time_s + priced)
            step = (frame - least) / float(self.weight @ self.time_s[chosen])
            found += step
            if abs(step) <= 1e-12 * abs(found):
                break
        return found

    def _least(self, total: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean of the least of each state, and its rows."""
        least = np.minimum.reduceat(total, self.starts)
        size = np.diff(np.append(self.starts, len(total)))
        at = np.flatnonzero(total == np.repeat(least, size))
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
    total = np.asarray(weight, float)
    return DualTable(
        starts=np.cumsum([0, *(len(state[0]) for state in rows[:-1])]),
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
    multipliers = np.zeros(len(budgets))
    value, excess = table.value(multipliers)
    feasible = True
    if len(budgets) and (excess > 0.0).any():
        multipliers, feasible = _ascend(table, budgets)
        feasible = feasible and not (len(budgets) > 1 and _is_separable(table))
        if feasible and len(budgets) > 1:
            multipliers = _polished(table, multipliers)
        # Where nothing keeps the budgets the dual has no end: the bound is then that without budgets.
        multipliers = multipliers if feasible else np.zeros(len(budgets))
        value, _ = table.value(multipliers)
    return Dual(
        value_s=value, multipliers=tuple(float(multiplier) for multiplier in multipliers), feasible=feasible
    )


def _is_separable(table: DualTable) -> bool:
    """Return whether some weights of the budgets make every mixture too dear: none then keeps all of them.

    Cutting planes (Kelley 1960) for the best such weights, whose sum is 1; the small program between two
    cuts is solved by its corners.
    """
    size = table.excess.shape[1]
    excess = table.excess / np.maximum(np.abs(table.excess).max(0), 1e-300)
    free = replace(table, time_s=np.zeros(len(excess)), excess=excess)
    weights, cuts = np.full(size, 1.0 / size), np.zeros((0, size))
    for _ in range(_MOST_CUTS):
        value, mean = free.value(weights)
        if value > _NONE:
            return True
        cuts = np.concatenate([cuts, mean[None]])
        # Unknown are the weights and the value: so many of the cuts and signs hold with equality.
        rows = np.concatenate([np.c_[-cuts, np.ones(len(cuts))], np.c_[-np.eye(size), np.zeros(size)]])
        active = np.array(list(itertools.combinations(range(len(rows)), size)))
        total = np.broadcast_to(np.r_[np.ones(size), 0.0], (len(active), 1, size + 1))
        corners = np.concatenate([rows[active], total], axis=1)
        solved = corners[np.abs(np.linalg.det(corners)) > 1e-12]
        found = np.linalg.solve(
            solved, np.broadcast_to(np.eye(size + 1)[-1][:, None], (len(solved), size + 1, 1))
        )
        inside = found[(found[:, :, 0] @ rows.T <= 1e-9).all(1), :, 0]
        if not len(inside):
            return False
        best = inside[inside[:, -1].argmax()]
        if best[-1] <= _NONE:
            return False
        weights = np.maximum(best[:-1], 0.0)
    return False


def least_excess(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], weight: Sequence[float], budgets: Sequence[Budget]
) -> tuple[float, Dual]:
    """Return by what part all budgets must be exceeded together, and the dual of what is then fastest.

    Returns
    -------
    float, Dual
        0 and the dual of the budgets where they can be kept.
    """

    def raised(part: float) -> list[Budget]:
        return [replace(budget, limit=budget.limit * (1.0 + part)) for budget in budgets]

    def is_too_little(part: float) -> bool:
        return _is_separable(table_of(rows, weight, raised(part)))

    found = solve(table_of(rows, weight, budgets), budgets)
    if found.feasible:
        return 0.0, found
    low, high = 0.0, 1.0
    while is_too_little(high):
        low, high = high, 2.0 * high
    while high - low > _EXACT * (1.0 + low):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_too_little(middle) else (low, middle)
    # At the very edge multipliers have no bound.
    while not (found := solve(table_of(rows, weight, raised(high)), raised(high))).feasible:
        high += _EXACT * (1.0 + high)
    return high, found


def _ascend(table: DualTable, budgets: Sequence[Budget]) -> tuple[np.ndarray, bool]:
    """Return multipliers that maximise the dual, one budget after another, and whether they are finite."""
    found = np.zeros(len(budgets))
    scale = table.time_s.max() / np.array([max(budget.limit, 1e-300) for budget in budgets])
    feasible, best = True, -np.inf
    for _ in range(_ROUNDS if len(budgets) > 1 else 1):
        for i in range(len(budgets)):
            low, high = 0.0, float(scale[i])
            for _ in range(20):
                if _slope(table, found, i, high) <= 0.0:
                    break
                low, high = high, high * 4.0
            else:
                feasible = False
            if _slope(table, found, i, 0.0) <= 0.0:
                found[i] = 0.0
                continue
            for _ in range(_STEPS):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if _slope(table, found, i, middle) > 0.0 else (low, middle)
            found[i] = low
        value, _ = table.value(found)
        if value <= best * (1.0 + 1e-9):
            break
        best = value
    return found, feasible


def _polished(table: DualTable, start: np.ndarray) -> np.ndarray:
    """Return multipliers at least as good, found on smoothed duals: one at a time can end in a corner.

    With a temperature the least of a state becomes a soft one; the dual is then smooth and concave, and
    Newton's method climbs it. Temperatures fall, each start is the end of the one before.

    Source
    ------
    Nesterov 2005, Smooth minimization of non-smooth functions.
    """
    best, best_value = start, table.value(start)[0]
    scale = 1.0 / np.maximum(np.abs(table.excess).max(0), 1e-300)
    found = start / scale
    for part in _TEMPERATURES:
        heat = part * float(table.weight @ np.minimum.reduceat(table.time_s, table.starts))
        for _ in range(_NEWTON):
            slope, bend = _softened(table, found * scale, heat)
            slope, bend = slope * scale, bend * np.outer(scale, scale)
            free = (found > 0.0) | (slope > 0.0)
            if not free.any() or not np.isfinite(bend).all():
                break
            most = 0.5 * max(float(np.abs(found).max()), heat)
            # Where the dual is flat the step is along the slope, and no longer than may be gone.
            ridge = 1e-9 * float(bend.max()) + max(float(np.abs(slope).max()), 1e-300) / (100.0 * most)
            bend = bend[np.ix_(free, free)] + ridge * np.eye(int(free.sum()))
            step = np.zeros(len(found))
            step[free] = np.linalg.solve(bend, slope[free])
            step *= min(1.0, most / max(float(np.abs(step).max()), 1e-300))
            found = np.maximum(found + step, 0.0)
            if np.abs(step).max() < 1e-6 * most:
                break
        value, _ = table.value(found * scale)
        if value > best_value:
            best, best_value = found * scale, value
    return np.asarray(best)


def _softened(table: DualTable, multipliers: np.ndarray, heat: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the slope of the smoothed dual, and how fast it falls."""
    total = table.time_s + table.excess @ multipliers
    size = np.diff(np.append(table.starts, len(total)))
    least = np.repeat(np.minimum.reduceat(total, table.starts), size)
    part = np.exp((least - total) / heat)
    part /= np.repeat(np.add.reduceat(part, table.starts), size)
    part *= np.repeat(table.weight, size)
    mean = np.add.reduceat(part[:, None] * table.excess, table.starts, axis=0)
    spread = (part[:, None] * table.excess).T @ table.excess - (mean / table.weight[:, None]).T @ mean
    return mean.sum(0), spread / heat


def _slope(table: DualTable, multipliers: np.ndarray, i: int, at: float) -> float:
    tried = multipliers.copy()
    tried[i] = at
    return float(table.value(tried)[1][i])


def corners(time_s: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the rows that are best for some weights of time and of costs that are not negative.

    Exact for one budget. For several: the corners of each with time alone, and the best of many directions.
    """
    if len(time_s) <= _FEW:
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
