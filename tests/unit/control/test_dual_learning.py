"""Queues are placed by what the states seen so far make of the budgets."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard.control.budgets import dual
from foreshard.control.budgets.dual_learning import MARGIN, MOST_WORTH, DualLearning, weight_for
from foreshard.control.budgets.queues import Queues
from foreshard.control.slots import Budget

TIMES, COSTS = np.array([1.0, 1.5, 4.0]), np.array([[4.0], [2.5], [1.0]])


def taught(limit=2.0, horizon=1000, steps=0, cost=2.0, weight=100.0, per="step"):
    budgets = (Budget(name="b", kind="usd", limit=limit, per=per),)
    queues, learning = Queues(budgets, weight=weight, step_s=1.0), DualLearning(budgets, horizon)
    if steps:
        queues.record(1.0, {"b": cost}, steps)
    learning.rows(b"one", TIMES, COSTS)
    learning.saw(b"one", max(steps, 1))
    assert learning.due
    learning.place(queues, np.ones(2), np.ones(2))
    return queues, learning


def test_a_queue_is_placed_at_the_weight_times_the_multiplier():
    queues, learning = taught()
    left = [Budget(name="b", kind="usd", limit=2.0 * (1.0 - MARGIN))]
    table = dual.table_of([(TIMES, COSTS)], [1.0], left)
    (multiplier,) = dual.solve(table, left).multipliers
    assert multiplier == pytest.approx(2.5 / 1.5, rel=1e-6), "between 1.5 s at 2.5 and 4 s at 1"
    assert queues["b"].backlog == pytest.approx(100.0 * multiplier * 2.0)
    time_weight, costs = queues.weights()
    assert costs["b"] / time_weight == pytest.approx(multiplier)
    assert not queues["b"].conceded and not learning.due and queues.identity_error() < 1e-12


@pytest.mark.parametrize(("cost", "more"), [(3.0, True), (1.0, False)])
def test_what_was_spent_too_much_is_worked_off(cost, more):
    even, _ = taught(limit=2.4, steps=300, cost=2.4)
    found, _ = taught(limit=2.4, steps=300, cost=cost)
    gathered = 300 * (cost - 2.4) / 2.4
    first = found["b"].first_backlog
    assert (first >= even["b"].first_backlog) if more else (first <= even["b"].first_backlog)
    assert found["b"].backlog == pytest.approx(max(first + gathered, 0.0), abs=1e-6) or not more


def test_a_budget_that_no_state_can_keep_is_raised_by_the_least_part_and_the_cheapest_plan_is_best():
    queues, _ = taught(limit=0.5, steps=100, cost=1.0)
    assert queues["b"].conceded == pytest.approx(1.0, abs=1e-3), "the cheapest costs 1"
    assert queues["b"].excess == pytest.approx(0.0, abs=0.1) and queues.identity_error() < 1e-12
    assert queues["b"].backlog == pytest.approx(100.0 * MOST_WORTH, rel=0.01)
    time_weight, costs = queues.weights()
    assert int(np.argmin(time_weight * TIMES + costs["b"] * COSTS[:, 0])) == 2


def test_what_was_conceded_is_taken_back_when_a_cheaper_plan_is_found():
    queues, learning = taught(limit=0.5, steps=100, cost=1.0)
    learning.rows(b"one", np.append(TIMES, 5.0), np.append(COSTS, [[0.4]], axis=0))
    learning.place(queues, np.ones(2), np.ones(2))
    assert queues["b"].conceded == 0.0 and queues["b"].excess == pytest.approx(100.0)
    assert queues.identity_error() < 1e-12


def test_an_excess_of_v_makes_the_slot_keep_the_budget_by_itself():
    queues, learning = taught(limit=2.0, steps=200, cost=4.0)
    assert queues["b"].excess > queues.weight
    queues.place("b", 0.0)
    learning.secure(queues, b"one", np.ones(2), None)
    time_weight, costs = queues.weights()
    assert COSTS[np.argmin(time_weight * TIMES + costs["b"] * COSTS[:, 0]), 0] < 2.0
    # Plans that were judged count instead: none of these keeps the budget, and nothing is asked of them.
    learning.secure(queues, b"one", np.ones(2), [(TIMES, COSTS + 5.0)])
    assert queues["b"].least == 0.0


def test_what_can_hardly_be_worked_off_before_the_end_weighs_at_once():
    least = []
    for horizon in (1000, 100_000):
        queues, learning = taught(limit=2.0, horizon=horizon, steps=990, cost=2.004)
        assert 0.0 < queues["b"].excess < 0.02 * queues.weight
        learning.secure(queues, b"one", np.ones(2), None)
        least.append(queues["b"].least)
    assert least[0] >= 5.0 * least[1] > 0.0


def test_a_slot_that_keeps_the_budgets_without_room_to_spare_secures_them_too():
    queues, learning = taught(limit=2.0, steps=200, cost=4.0)
    rows = np.array([1.0, 4.0]), np.array([[4.0], [1.99]])
    learning.secure(queues, b"one", np.ones(2), [rows])
    assert queues["b"].least > 0.0


def test_budgets_per_time_are_placed_by_the_mean_step():
    queues, _ = taught(limit=1.5, per="second", steps=200, cost=3.0)
    time_weight, costs = queues.weights()
    # The cheapest and the middle, or any two around 1.5 a second, are equally good there.
    score = time_weight * TIMES + costs["b"] * COSTS[:, 0]
    assert sorted(np.argsort(score)[:2].tolist()) in ([0, 1], [1, 2])


def test_rows_are_looked_at_again_less_and_less_often():
    learning = DualLearning((Budget(name="b", kind="usd", limit=1.0),), 100)
    looked = 0
    for _ in range(100):
        if learning.needs(b"x"):
            learning.rows(b"x", TIMES, COSTS)
            looked += 1
        learning.saw(b"x", 1)
    assert looked == 8


def test_the_weight_follows_the_wanted_excess():
    assert weight_for(0.02, 5_000) == 2 * weight_for(0.01, 5_000)
    assert weight_for(0.01, 10) > 0.0
    assert weight_for(0.01, 10**9) == weight_for(0.01, 10**8), "V does not grow with the run for ever"


def test_costs_that_are_measured_above_the_model_are_worth_more():
    budgets = (Budget(name="b", kind="usd", limit=3.0),)
    found = []
    for ratio in (1.0, 1.25):
        queues, learning = Queues(budgets, weight=100.0, step_s=1.0), DualLearning(budgets, 1000)
        learning.rows(b"one", TIMES, COSTS)
        learning.saw(b"one", 1)
        learning.place(queues, np.array([1.0, ratio]), np.ones(2))
        found.append(queues["b"].backlog)
    assert found[0] < found[1]


@pytest.mark.parametrize(("horizon", "apart"), [(100, 16), (1000, 25), (10_000, 250), (10**6, 250)])
def test_updates_double_in_distance_until_a_run_has_forty_of_them(horizon, apart):
    queues, learning = taught(horizon=horizon)
    at, seen = [1], 1
    while len(at) < 14:
        learning.saw(b"one", 1)
        seen += 1
        if learning.due:
            learning.place(queues, np.ones(2), np.ones(2))
            at.append(seen)
    apart_now = np.diff(at)
    assert at[:3] == [1, 2, 16] and apart_now.max() == apart_now[-1] == apart


def test_what_a_short_run_may_exceed_its_budget_by_on_the_way_is_a_part_of_it_and_not_v():
    least = {}
    for horizon in (1000, 10_000):
        queues, learning = taught(limit=2.0, horizon=horizon, steps=10, cost=6.0)
        learning.secure(queues, b"one", np.ones(2), None)
        least[horizon] = queues["b"].least
    # Of the same V: 5 % of 1,000 steps are 50 budgets of a step, of 10,000 they are more than V.
    assert least[1000] / least[10_000] == pytest.approx(queues.weight / 50.0)


def test_a_new_state_does_not_make_an_excess_weigh_nothing():
    budgets = (Budget(name="b", kind="usd", limit=3.0),)
    queues, learning = Queues(budgets, weight=100.0, step_s=1.0), DualLearning(budgets, 1000)
    learning.rows(b"known", TIMES, COSTS)
    learning.saw(b"known", 1)
    queues.record(1.0, {"b": 60.0})
    ratio = np.ones(2)
    learning.secure(queues, b"known", ratio, None)
    least = queues["b"].least
    assert least > 0.0
    learning.secure(queues, b"new", ratio, None)
    assert queues["b"].least == least
