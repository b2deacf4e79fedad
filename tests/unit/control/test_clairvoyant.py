"""The bound: the linear program it claims to be, and below every policy that keeps the budgets."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from foreshard.control.search.subsets import even_shares
from foreshard.control.slots import Budget, Chain, State
from foreshard.simulate.clairvoyant_bound import bound_of
from foreshard.simulate.dynamics import Path
from foreshard.simulate.environment import Environment
from foreshard.simulate.workload import Workload

WIDTH = 4


def environment_of(seed=0, slots=200):
    rng = np.random.default_rng(seed)
    chain = Chain(
        layer_s=np.full((WIDTH, 2), 0.05),
        boundary_bytes=np.ones(1),
        sync_bytes=np.full(2, 1e6),
        state_bytes=np.full(2, 1e6),
        saved_bytes=np.ones(2),
        memory_bytes=np.full(WIDTH, 1e9),
    )
    square = np.ones((WIDTH, WIDTH))
    state = State(
        speed=np.ones(WIDTH),
        available=np.ones(WIDTH, bool),
        bandwidth_bytes_per_s=1e7 * square,
        latency_s=1e-4 * square,
        usd_per_h=np.array([1.0, 1.0, 3.0, 3.0]),
        busy_w=np.full(WIDTH, 300.0),
        idle_w=np.full(WIDTH, 100.0),
        usd_per_byte=0.0 * square,
        kg_per_j=np.full(WIDTH, 1e-7),
    )
    conditions = 3
    path = Path(
        condition=rng.integers(conditions, size=slots),
        pattern=rng.integers(2, size=slots),
        speed=rng.choice([0.25, 0.5, 1.0], size=(conditions, WIDTH)),
        price=rng.choice([0.5, 1.0], size=(conditions, WIDTH)),
        link=np.ones((conditions, 0)),
        carbon=np.ones((conditions, WIDTH)),
        available=np.array([[True] * WIDTH, [True, False, True, True]]),
    )
    work = Workload(chain=chain, state=state, link_of=np.full((WIDTH, WIDTH), -1), batch=64, micro_batch=1)
    return Environment(work=work, path=path, pause_s=0.5)


def program(environment, budgets):
    """Return the optimum of the linear program over states and subsets, by scipy."""
    from scipy.optimize import linprog

    path = environment.path
    pairs, counts = np.unique(np.stack([path.condition, path.pattern], 1), axis=0, return_counts=True)
    tables = [environment.subsets(int(c), int(p)) for c, p in pairs]
    weight = counts / path.num_slots
    cost = np.concatenate([w * one.time_s for w, one in zip(weight, tables, strict=True)])
    spent = np.concatenate([w * one.costs[:, 0] for w, one in zip(weight, tables, strict=True)])
    rows, limits = [], []
    for budget in budgets:
        rows.append(spent if budget.per == "step" else spent - budget.limit / 3600.0 * cost)
        limits.append(budget.limit if budget.per == "step" else 0.0)
    one_each = np.zeros((len(tables), len(cost)))
    at = 0
    for i, one in enumerate(tables):
        one_each[i, at : at + len(one.time_s)] = 1.0
        at += len(one.time_s)
    return linprog(
        cost,
        A_ub=np.array(rows) if rows else None,
        b_ub=limits or None,
        A_eq=one_each,
        b_eq=np.ones(len(tables)),
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("per", ["step", "hour"])
def test_the_bound_is_the_value_of_the_linear_program(seed, per):
    pytest.importorskip("scipy")
    environment = environment_of(seed)
    free = bound_of(environment, ())
    fast = np.array(
        [
            environment.subsets(int(c), int(p))
            for c, p in zip(environment.path.condition, environment.path.pattern, strict=True)
        ]
    )
    mean = np.mean([one.costs[one.time_s.argmin(), 0] for one in fast])
    rate = 3600.0 * mean / free.mean_step_time_s
    budget = Budget(name="usd", kind="usd", limit=0.75 * (mean if per == "step" else rate), per=per)
    found, exact = bound_of(environment, (budget,)), program(environment, (budget,))
    assert found.feasible == (exact.status == 0)
    if found.feasible:
        assert found.mean_step_time_s == pytest.approx(exact.fun, rel=1e-6)
        assert found.mean_step_time_s <= exact.fun * (1.0 + 1e-9)
        assert found.multipliers[0] == pytest.approx(-exact.ineqlin.marginals[0], rel=1e-3)
    assert free.mean_step_time_s == pytest.approx(program(environment, ()).fun)


def test_two_budgets_bind_below_the_program():
    pytest.importorskip("scipy")
    environment = environment_of(2)
    one = bound_of(environment, ())
    cost = np.mean(
        [
            environment.subsets(int(c), int(p)).costs[:, 0].min()
            for c, p in zip(environment.path.condition, environment.path.pattern, strict=True)
        ]
    )
    budgets = (
        Budget(name="a", kind="usd", limit=1.3 * cost),
        Budget(name="b", kind="usd", limit=0.9 * 3600.0 * 3.0 * cost / one.mean_step_time_s, per="hour"),
    )
    found, exact = bound_of(environment, budgets), program(environment, budgets)
    assert exact.status == 0 and one.mean_step_time_s <= found.mean_step_time_s <= exact.fun * (1.0 + 1e-9)


def test_a_budget_that_nobody_can_keep_is_said():
    environment, budget = environment_of(), Budget(name="usd", kind="usd", limit=1e-9)
    found = bound_of(environment, (budget,))
    cheapest = bound_of(environment, (replace(budget, limit=1e-9 * (1.0 + found.least_excess)),))
    assert not found.feasible and cheapest.feasible and found.least_excess > 1.0
    assert found.mean_step_time_s == cheapest.mean_step_time_s
    barely = bound_of(environment, (replace(budget, limit=1e-9 * (1.0 + 0.999 * found.least_excess)),))
    assert not barely.feasible


def test_a_wide_budget_costs_nothing():
    environment = environment_of()
    wide = bound_of(environment, (Budget(name="usd", kind="usd", limit=1e9),))
    assert wide.multipliers == (0.0,)
    assert wide.mean_step_time_s == bound_of(environment, ()).mean_step_time_s


@pytest.mark.parametrize("per", ["step", "hour", None])
@pytest.mark.parametrize("seed", range(3))
def test_equal_shares_in_budget_are_the_best_mixture_of_all_subsets_with_equal_shares(seed, per):
    from scipy.optimize import linprog

    environment = environment_of(seed)
    environment = replace(environment, work=replace(environment.work, batch=60), _memo={})
    limit = {"step": 3.5e-3, "hour": 2.0, None: 1.0}[per]
    budgets = [Budget(name="b", kind="usd", limit=limit, per=per)] if per else []
    path = environment.path
    pairs, counts = np.unique(np.stack([path.condition, path.pattern], 1), axis=0, return_counts=True)
    cost, over, owner = [], [], []
    for at, ((condition, pattern), count) in enumerate(zip(pairs.tolist(), counts.tolist(), strict=True)):
        there = np.flatnonzero(path.available[pattern]).tolist()
        for size in range(1, len(there) + 1):
            for workers in combinations(there, size):
                shares = tuple(even_shares(size, 60).tolist())
                time_s, costs = environment.batch(environment.structure(workers), shares, condition, pattern)
                cost.append(count * time_s)
                over.append([count * (costs["usd"] - one.allowance(time_s)) for one in budgets])
                owner.append(at)
    rows = (np.array(owner)[None, :] == np.arange(len(pairs))[:, None]).astype(float)
    best = linprog(
        cost,
        A_ub=np.array(over).T if budgets else None,
        b_ub=[0.0] if budgets else None,
        A_eq=rows,
        b_eq=np.ones(len(pairs)),
    )
    found = bound_of(environment, budgets, equal=True)
    assert best.success == found.feasible
    assert found.mean_step_time_s == pytest.approx(best.fun / path.num_slots, rel=1e-6)
    assert found.mean_step_time_s >= bound_of(environment, budgets).mean_step_time_s
