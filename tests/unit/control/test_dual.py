"""The dual equals the linear program; rows that can never be best are the only ones left out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from foreshard.control.budgets import dual
from foreshard.control.slots import Budget


def states_of(seed, states=5, rows=40, budgets=1):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(states):
        time_s = rng.uniform(1.0, 5.0, rows)
        made.append((time_s, rng.uniform(0.5, 1.5, (rows, budgets)) * 6.0 / time_s[:, None]))
    return made, rng.uniform(0.1, 1.0, states)


def program(states, weight, budgets):
    """Return the least mean time over all mixtures, by scipy."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    weight = weight / weight.sum()
    time_s = np.concatenate([w * one[0] for w, one in zip(weight, states, strict=True)])
    costs = np.concatenate([w * one[1] for w, one in zip(weight, states, strict=True)])
    above = [
        costs[:, i] if one.per == "step" else costs[:, i] - one.limit * time_s
        for i, one in enumerate(budgets)
    ]
    limits = [one.limit if one.per == "step" else 0.0 for one in budgets]
    each = np.zeros((len(states), len(time_s)))
    at = 0
    for i, one in enumerate(states):
        each[i, at : at + len(one[0])] = 1.0
        at += len(one[0])
    return linprog(time_s, A_ub=np.array(above), b_ub=limits, A_eq=each, b_eq=np.ones(len(states)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per", ["step", "second"])
def test_one_budget_gives_the_value_of_the_linear_program(seed, per):
    states, weight = states_of(seed)
    budgets = [Budget(name="b", kind="usd", limit=1.6 if per == "step" else 0.6, per=per)]
    exact = program(states, weight, budgets)
    assert exact.status == 0
    found = dual.solve(dual.table_of(states, weight, budgets), budgets)
    assert found.feasible and found.value_s == pytest.approx(exact.fun, rel=1e-6)
    assert found.multipliers[0] == pytest.approx(-exact.ineqlin.marginals[0], rel=1e-3)


def random_program(seed):
    """Return states, their weights and budgets: few or many rows, equal ones too, kept or not."""
    rng = np.random.default_rng(seed)
    states, rows, budgets = int(rng.choice([1, 2, 5, 30])), int(rng.choice([2, 3, 8, 40])), 1 + seed % 3
    made, weight = states_of(seed, states, rows, budgets)
    if rng.random() < 0.5:
        made = [(np.round(time_s), np.round(costs, 1)) for time_s, costs in made]
    asked = []
    for i in range(budgets):
        per = str(rng.choice(["step", "second"]))
        limit = rng.uniform(0.8, 2.5) if per == "step" else rng.uniform(0.2, 0.9)
        asked.append(Budget(name=str(i), kind="usd", limit=limit, per=per))
    return made, weight, asked


def raised(budgets, part):
    return [replace(budget, limit=budget.limit * (1.0 + part)) for budget in budgets]


@pytest.mark.parametrize("seed", range(60))
def test_several_budgets_give_the_value_of_the_linear_program_or_the_least_excess(seed):
    states, weight, budgets = random_program(seed)
    exact = program(states, weight, budgets)
    found = dual.solve(dual.table_of(states, weight, budgets), budgets)
    assert found.feasible == (exact.status == 0)
    part, least = dual.least_excess(states, weight, budgets)
    if found.feasible:
        assert part == 0.0 and found.value_s == pytest.approx(exact.fun, rel=1e-6)
        return
    exact = program(states, weight, raised(budgets, part))
    assert exact.status == 0 and least.value_s == pytest.approx(exact.fun, rel=1e-5)
    assert program(states, weight, raised(budgets, part - 3e-4 * (1.0 + part))).status != 0


def test_what_nothing_keeps_is_said():
    states, weight = states_of(0)
    budgets = [Budget(name="b", kind="usd", limit=1e-3)]
    found = dual.solve(dual.table_of(states, weight, budgets), budgets)
    assert not found.feasible and found.multipliers == (0.0,)
    assert found.value_s == pytest.approx(
        sum(w * one[0].min() for w, one in zip(weight, states, strict=True)) / weight.sum()
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budgets", [1, 2])
def test_corners_keep_what_is_best_for_any_weights(seed, budgets):
    rng = np.random.default_rng(seed)
    ((time_s, costs),), _ = states_of(seed, states=1, rows=500, budgets=budgets)
    kept = dual.corners(time_s, costs)
    assert len(kept) < 200
    for _ in range(200):
        weigh = rng.lognormal(0.0, 1.5, budgets)
        score = time_s + costs @ weigh
        best = score[kept].min()
        assert best <= score.min() * (1.0 if budgets == 1 else 1.01) + 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_the_weight_of_a_second_is_the_best_rate_of_all_stationary_policies(seed):
    rng = np.random.default_rng(seed)
    states, weight = states_of(seed, states=3, rows=7, budgets=2)
    budgets = [Budget(name=str(i), kind="usd", limit=0.8, per="second") for i in range(2)]
    table = dual.table_of(states, weight, budgets)
    frame, prices = 10.0, rng.uniform(0.0, 40.0, 2)
    best = -np.inf
    for rows in itertools.product(range(7), repeat=3):
        at = table.starts + rows
        spent = table.weight @ (table.excess[at] @ prices)
        best = max(best, (frame - spent) / (table.weight @ table.time_s[at]))
    assert table.second_weight(frame, prices) == pytest.approx(best, rel=1e-9)


def test_few_rows_are_all_kept():
    assert dual.corners(np.ones(5), np.ones((5, 1))).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("per", ["step", "second"])
def test_budgets_that_cannot_be_kept_together_are_exceeded_by_the_least_part(seed, per):
    """Each budget can be kept alone; a program with the excess found can be solved, with less it cannot."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(seed)
    states, weight = states_of(seed, rows=20, budgets=2)
    weight = weight / weight.sum()
    allowed = [
        np.ones((len(time_s), 2)) if per == "step" else np.stack([time_s] * 2, 1) for time_s, _ in states
    ]
    alone = [
        max(
            sum(
                w * (costs[:, i] / a[:, i]).min()
                for w, (_, costs), a in zip(weight, states, allowed, strict=True)
            ),
            0.0,
        )
        for i in range(2)
    ]
    limits = np.array(alone) * rng.uniform(1.0, 1.3, 2)
    budgets = [Budget(name=str(i), kind="usd", limit=float(limit), per=per) for i, limit in enumerate(limits)]
    found, best = dual.least_excess(states, weight, budgets)

    def kept(part):
        raised = [Budget(name=one.name, kind="usd", limit=one.limit * (1 + part), per=per) for one in budgets]
        return program(states, weight, raised)

    assert kept(found * (1 + 1e-3) + 2e-3).status == 0
    assert found < 2e-3 or kept(found * (1 - 1e-3) - 2e-3).status == 2
    assert best.feasible and best.value_s <= weight @ [time_s.max() for time_s, _ in states]
    exact = kept(found * (1 + 1e-3) + 2e-3)
    assert best.value_s >= 0.98 * exact.fun
