"""Queues close their books whatever the policy; weights, tuning, place-holders."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard.control.budgets.dual import table_of
from foreshard.control.budgets.queues import Queues
from foreshard.control.slots import Budget
from foreshard.errors import SpecError

STEP = Budget(name="money", kind="usd", limit=2.0)
HOUR = Budget(name="power", kind="joule", limit=7200.0, per="hour")
DUTY = Budget(name="duty", kind="duty", limit=0.5, per="second", worker=0)
amounts = st.floats(0.0, 50.0)


@given(st.lists(st.tuples(amounts, amounts, amounts, amounts), max_size=60), st.floats(0.0, 10.0))
def test_books_close_for_any_policy(steps, first):
    queues = Queues((STEP, HOUR, DUTY), weight=3.0, step_s=1.5)
    queues.place("money", first)
    for time_s, *costs in steps:
        queues.record(time_s, dict(zip(("money", "power", "duty"), costs, strict=True)))
    assert queues.identity_error() <= 1e-9
    for name in ("money", "power", "duty"):
        queue = queues[name]
        grown = queue.backlog - queue.first_backlog
        assert queue.spent - queue.allowed <= grown * queue.unit + 1e-9 * (1 + queue.spent + queue.allowed)


def test_weights_are_of_one_budget_and_one_reference_step():
    queues = Queues((STEP,), weight=10.0, step_s=4.0)
    assert queues.weights() == (2.5, {"money": 0.0})
    queues.record(1.0, {"money": 6.0})
    assert queues["money"].backlog == 2.0 and queues.weights() == (2.5, {"money": 1.0})


def test_budgets_per_second_count_by_time():
    queues = Queues((DUTY,), weight=1.0, step_s=2.0)
    queues.record(4.0, {"duty": 3.0})
    # One second above the half of four, in units of half of the reference step of two.
    assert queues["duty"].backlog == pytest.approx(1.0)
    time_weight, costs = queues.weights()
    assert costs == {"duty": 1.0} and time_weight == pytest.approx(1.0 / 2.0 - 0.5)


def choose(queues, times, costs, name):
    time_weight, weights = queues.weights()
    pick = int(np.argmin(time_weight * times + weights[name] * costs))
    queues.record(float(times[pick]), {name: float(costs[pick])})
    return pick


@pytest.mark.parametrize("per", ["step", "second"])
def test_the_budget_is_met_at_nearly_the_best_time(per):
    times, costs = np.array([1.0, 1.5, 4.0]), np.array([4.0, 2.5, 1.0])
    limit = 2.0 if per == "step" else 1.0
    queues = Queues((Budget(name="b", kind="usd", limit=limit, per=per),), weight=50.0, step_s=1.0)
    for _ in range(20_000):
        choose(queues, times, costs, "b")
    assert queues.violation < 0.01 and queues.identity_error() < 1e-9
    # By hand: 2/3 of the middle and 1/3 of the last; or in time, equal costs and seconds: 3/4 and 1/4.
    best = (2 / 3 * 1.5 + 1 / 3 * 4.0) if per == "step" else 0.75 * 1.5 + 0.25 * 4.0
    assert queues.total_s / queues.steps == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("backlog", [0.0, 50.0, 100.0, 1000.0])
def test_of_plans_that_cost_the_same_a_second_the_fastest_is_best_at_any_backlog(backlog):
    """With V for a second of the reference step, a backlog above V preferred the slowest."""
    times, rate = np.array([1.0, 2.0, 40.0]), 0.4
    costs, dear = rate * times, np.array([2.0])
    budget = Budget(name="b", kind="usd", limit=1.0, per="second")
    queues = Queues((budget,), weight=100.0, step_s=1.0)
    queues.place("b", backlog)
    rows = np.append(times, 0.9), np.append(costs, dear)[:, None]
    queues.states = table_of([rows], [1.0], (budget,))
    time_weight, weights = queues.weights()
    found = time_weight * times + weights["b"] * costs
    assert int(found.argmin()) == 0


def test_no_backlog_means_the_fastest_and_no_weight_the_cheapest():
    times, costs = np.array([1.0, 4.0]), np.array([4.0, 1.0])
    assert choose(Queues((STEP,), weight=1.0, step_s=1.0), times, costs, "money") == 0
    queues = Queues((STEP,), weight=0.0, step_s=1.0)
    queues.place("money", 1.0)
    assert choose(queues, times, costs, "money") == 1


def test_place_holders_spend_the_excess_beforehand():
    times, costs = np.array([1.0, 1.5, 4.0]), np.array([4.0, 2.5, 1.0])
    ends = []
    for backlog in (0.0, 60.0):
        queues = Queues((STEP,), weight=20.0, step_s=1.0)
        queues.place("money", backlog)
        for _ in range(2000):
            choose(queues, times, costs, "money")
        ends.append(queues.violation)
    assert ends[1] < 0.3 * ends[0]


def test_what_is_no_budget_is_refused():
    with pytest.raises(SpecError, match="two budgets"):
        Queues((STEP, STEP), weight=1.0, step_s=1.0)
    with pytest.raises(SpecError, match="weight"):
        Queues((STEP,), weight=math.nan, step_s=1.0)
    with pytest.raises(SpecError, match="cost of nan"):
        Queues((STEP,), weight=1.0, step_s=1.0).record(1.0, {})
    for bad in (
        {"kind": "love"},
        {"kind": "duty"},
        {"kind": "usd", "limit": -1.0},
        {"kind": "usd", "per": "day"},
    ):
        with pytest.raises(SpecError):
            Budget(**{"name": "b", "limit": 1.0, **bad})


def test_a_placed_queue_keeps_what_it_gathered_and_its_books_close():
    queues = Queues((STEP,), weight=1.0, step_s=1.0)
    queues.record(1.0, {"money": 2.0 * STEP.limit}, 5)
    gathered = queues["money"].backlog
    queues.place("money", 40.0)
    assert queues["money"].backlog == pytest.approx(40.0 + gathered)
    queues.record(1.0, {"money": 0.0}, 100)
    queues.place("money", 3.0)
    assert queues["money"].backlog >= 0.0 and queues.identity_error() < 1e-12


@given(st.lists(st.floats(0.1, 20.0), min_size=1, max_size=30), st.floats(0.5, 50.0))
def test_another_reference_step_changes_no_money_and_no_placeholder(costs, step_s):
    """Budgets per step know no seconds; the books close in both units."""
    queues = Queues((STEP, HOUR), weight=3.0, step_s=1.5)
    for name in ("money", "power"):
        queues.place(name, 40.0)
    for cost in costs:
        queues.record(1.0 + cost, {"money": cost, "power": cost})
    before = {name: (queues[name].excess * queues[name].unit, queues[name].unit) for name in queues.backlog}
    queues.refer(step_s)
    for name, (spent, unit) in before.items():
        queue = queues[name]
        assert queue.excess * queue.unit == pytest.approx(spent, rel=1e-9, abs=1e-9)
        assert queue.unit == pytest.approx(unit if name == "money" else unit * step_s / 1.5)
        assert queue.backlog == 0.0 or queue.first_backlog == pytest.approx(40.0)
    assert queues.identity_error() <= 1e-9
