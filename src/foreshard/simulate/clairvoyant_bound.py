"""The clairvoyant bound: no policy that keeps the budgets on a path has a smaller mean step time.

The best stationary policy that knows every state is a linear program over states and structures with the
frequencies that the path has; its dual (`dual.py`) is maximised. Changes of structure are free in it, and
shares are real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.budgets import dual
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.subsets import SubsetClasses, sample_s
from foreshard.control.slots import Budget, Chain, State
from foreshard.simulate.environment import Environment
from foreshard.simulate.pipeline_bound import pipeline_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The bound and what a unit of each budget is worth."""

    mean_step_time_s: float
    multipliers: tuple[float, ...]  # seconds per unit of cost, in the order of the budgets
    # false when no policy keeps all budgets together; the bound is then that of the least excess
    feasible: bool
    num_states: int  # distinct states that were solved
    least_excess: float = 0.0  # by what part some budget is exceeded at least; 0 where all can be kept


def bound_of(
    environment: Environment, budgets: Sequence[Budget], *, equal: bool = False, max_stages: int = 1
) -> Bound:
    """Return the clairvoyant bound of a path under budgets.

    Parameters
    ----------
    environment : Environment
    budgets : sequence of Budget
    equal : bool
        Only equal shares: the least mean time of whoever knows the path and never balances.
    max_stages : int
        Longest pipeline. With 1 plans are data-parallel.

    Returns
    -------
    Bound
        Over all data-parallel plans on subsets of the devices, which are listed completely; or over all
        pipelines side by side, by what none of their sets of devices comes below (`pipeline_bound`).

    Source
    ------
    Neely 2010, Stochastic Network Optimization, section 4.5: the stationary optimum as a linear program. With
    empirical frequencies it bounds every policy on the path by Jensen: states visited f_s of the time, mixed
    in any way.
    """
    path = environment.path
    seen = np.stack([path.condition, path.pattern], axis=1)
    pairs, counts = np.unique(seen, axis=0, return_counts=True)
    found: dict[bytes, int] = {}
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    weights: list[float] = []
    cache, work = SearchCache(), environment.work
    for (condition, pattern), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        if max_stages > 1:
            asked = {"batch": work.batch, "micro_batch": work.micro_batch, "max_stages": max_stages}
            state = environment.state(condition, pattern)
            rows.append(pipeline_rows(work.chain, state, budgets, **asked, cache=cache))
            weights.append(count)
            continue
        subsets = environment.subsets(condition, pattern)
        if equal:
            state = environment.state(condition, pattern)
            subsets = equal_shares(subsets, environment.work.chain, state, environment.work.batch)
        floor = subsets.column(budgets, floor=True)
        key = subsets.time_s.tobytes() + floor.tobytes()
        if key in found:
            weights[found[key]] += count
            continue
        found[key] = len(rows)
        rows.append((subsets.time_s, floor))
        weights.append(count)
    excess, best = dual.least_excess(rows, weights, budgets)
    return Bound(
        mean_step_time_s=best.value_s,
        multipliers=best.multipliers,
        feasible=excess == 0.0,
        num_states=len(rows),
        least_excess=excess,
    )


def equal_shares(subsets: SubsetClasses, chain: Chain, state: State, batch: int) -> SubsetClasses:
    """Return all subsets with the same share for every device, parts of samples allowed.

    Everybody waits for the slowest; gradients are summed as with any shares. Duty is taken to be free.
    """
    first = np.array([kind[0] for kind in subsets.members])
    counts, each_s = subsets.counts, sample_s(chain, state)[first]
    share = batch / counts.sum(1)
    busy_s = share * np.where(counts > 0, each_s, 0.0).max(1)
    time_s = busy_s + (subsets.time_s - subsets.busy_s)
    rent, egress = subsets.costs[:, 1] / subsets.time_s * time_s, subsets.costs[:, 2]
    costs = [rent + egress, rent, egress]
    for scale in (np.ones(len(first)), state.kg_per_j[first]):
        idle = counts @ (scale * state.idle_w[first])
        more = counts @ (scale * (state.busy_w - state.idle_w)[first] * each_s)
        costs.append(idle * time_s + more * share)
    priced = np.stack(costs, axis=1)
    return replace(subsets, time_s=time_s, busy_s=busy_s, costs=priced, floor=priced)
