"""The clairvoyant bound: no policy that keeps the budgets on a path has a smaller mean step time.

The best stationary policy that knows every state is a linear program over states and structures with the
frequencies that the path has. Its Lagrangian dual is maximised: at any multipliers the sum over states of the
least time plus priced cost is a bound, at the best ones it is the program's value. Changes of structure are
free in it, and shares are real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.arena import Arena
from foreshard.control.slots import SECONDS, Budget
from foreshard.control.subsets import COSTS

_ROUNDS, _STEPS = 12, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The bound and what a unit of each budget is worth.

    Attributes
    ----------
    mean_step_time_s : float
    multipliers : tuple of float
        Seconds per unit of cost, in the order of the budgets.
    feasible : bool
        False when no policy keeps the budgets; the bound is then that without budgets.
    num_states : int
        Distinct states that were solved.
    """

    mean_step_time_s: float
    multipliers: tuple[float, ...]
    feasible: bool
    num_states: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """All subsets of all states in one list: seconds, and cost above budget by budget."""

    starts: np.ndarray
    weight: np.ndarray
    time_s: np.ndarray
    excess: np.ndarray

    def value(self, multipliers: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the dual at some multipliers, and how far the choices there are above the budgets."""
        total = self.time_s + self.excess @ multipliers
        least = np.minimum.reduceat(total, self.starts)
        size = np.diff(np.append(self.starts, len(total)))
        at = np.flatnonzero(total == np.repeat(least, size))
        first = at[np.searchsorted(at, self.starts)]
        return float(self.weight @ least), self.weight @ self.excess[first]


def bound_of(arena: Arena, budgets: Sequence[Budget]) -> Bound:
    """Return the clairvoyant bound of a path under budgets.

    Parameters
    ----------
    arena : Arena
    budgets : sequence of Budget

    Returns
    -------
    Bound
        Over all data-parallel plans on subsets of the devices, which are listed completely.

    Source
    ------
    Neely 2010, Stochastic Network Optimization, section 4.5: the stationary optimum as a linear program. With
    empirical frequencies it bounds every policy on the path by Jensen: states visited f_s of the time, mixed
    in any way.
    """
    return _dual(_table(arena, budgets, arena.path.num_slots), budgets)


def multipliers_so_far(arena: Arena, budgets: Sequence[Budget], slots: int) -> tuple[float, ...]:
    """Return what a unit of each budget was worth in the first slots: what can be learned by then.

    Infinite where these slots alone could not keep the budgets.
    """
    found = _dual(_table(arena, budgets, slots), budgets)
    return found.multipliers if found.feasible else (np.inf,) * len(budgets)


def _dual(table: _Table, budgets: Sequence[Budget]) -> Bound:
    multipliers = np.zeros(len(budgets))
    value, excess = table.value(multipliers)
    feasible = True
    if len(budgets) and (excess > 0.0).any():
        multipliers, feasible = _ascend(table, budgets)
        # Where no policy keeps the budgets the dual has no end: the bound is then that without budgets.
        multipliers = multipliers if feasible else np.zeros(len(budgets))
        value, _ = table.value(multipliers)
    return Bound(
        mean_step_time_s=value,
        multipliers=tuple(float(one) for one in multipliers),
        feasible=feasible,
        num_states=len(table.starts),
    )


def _table(arena: Arena, budgets: Sequence[Budget], slots: int) -> _Table:
    path = arena.path
    seen = np.stack([path.condition[:slots], path.pattern[:slots]], axis=1)
    pairs, counts = np.unique(seen, axis=0, return_counts=True)
    found: dict[bytes, int] = {}
    times: list[np.ndarray] = []
    floors: list[np.ndarray] = []
    weights: list[int] = []
    for (condition, pattern), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        kinds = arena.kinds(condition, pattern)
        key = kinds.time_s.tobytes() + kinds.floor.tobytes()
        if key in found:
            weights[found[key]] += count
            continue
        found[key] = len(times)
        times.append(kinds.time_s)
        floors.append(kinds.floor)
        weights.append(count)
    time_s, floor = np.concatenate(times), np.concatenate(floors)
    excess = [floor[:, COSTS.index(one.kind)] - allowances(one, time_s) for one in budgets]
    return _Table(
        starts=np.cumsum([0, *(len(one) for one in times[:-1])]),
        weight=np.array(weights) / slots,
        time_s=time_s,
        excess=np.stack(excess, axis=1) if excess else np.zeros((len(time_s), 0)),
    )


def allowances(budget: Budget, time_s: np.ndarray) -> np.ndarray:
    """Return what steps of so many seconds may cost in the mean."""
    if budget.per == "step":
        return np.full(len(time_s), budget.limit)
    return budget.limit * time_s / SECONDS[budget.per]


def _ascend(table: _Table, budgets: Sequence[Budget]) -> tuple[np.ndarray, bool]:
    """Return multipliers that maximise the dual, one budget after another, and whether they are finite."""
    found = np.zeros(len(budgets))
    scale = table.time_s.max() / np.array([max(one.limit, 1e-300) for one in budgets])
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


def _slope(table: _Table, multipliers: np.ndarray, i: int, at: float) -> float:
    tried = multipliers.copy()
    tried[i] = at
    return float(table.value(tried)[1][i])
