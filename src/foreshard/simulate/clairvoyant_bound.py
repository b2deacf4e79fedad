"""The clairvoyant bound: no policy that keeps the budgets on a path has a smaller mean step time.

The best stationary policy that knows every state is a linear program over states and structures with the
frequencies that the path has; its dual (`dual.py`) is maximised. Changes of structure are free in it, and
shares are real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.budgets import dual
from foreshard.control.slots import Budget
from foreshard.simulate.environment import Environment
from foreshard.simulate.equal_shares import equal_shares


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


def bound_of(arena: Environment, budgets: Sequence[Budget], *, equal: bool = False) -> Bound:
    """Return the clairvoyant bound of a path under budgets.

    Parameters
    ----------
    arena : Environment
    budgets : sequence of Budget
    equal : bool
        Only equal shares: the least mean time of whoever knows the path and never balances.

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
    path = arena.path
    seen = np.stack([path.condition, path.pattern], axis=1)
    pairs, counts = np.unique(seen, axis=0, return_counts=True)
    found: dict[bytes, int] = {}
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    weights: list[float] = []
    for (condition, pattern), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        kinds = arena.kinds(condition, pattern)
        if equal:
            state = arena.state(condition, pattern)
            kinds = equal_shares(kinds, arena.work.chain, state, arena.work.batch)
        floor = kinds.column(budgets, floor=True)
        key = kinds.time_s.tobytes() + floor.tobytes()
        if key in found:
            weights[found[key]] += count
            continue
        found[key] = len(rows)
        rows.append((kinds.time_s, floor))
        weights.append(count)
    best = dual.solve(dual.table_of(rows, weights, budgets), budgets)
    return Bound(
        mean_step_time_s=best.value_s,
        multipliers=best.multipliers,
        feasible=best.feasible,
        num_states=len(rows),
    )
