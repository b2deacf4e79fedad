"""Stages of several workers over many slots: budgets kept, near the linear program over all mixtures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.unit.control.test_stages import everything

from foreshard.control.budgets.queues import Queues
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.slot_search import solve_slot
from foreshard.control.slots import MP_OVER_DP, Budget

BATCH, MICRO_BATCH, SLOTS, WEIGHT = 24, 4, 1200, 10.0
CHANCE = np.array([0.5, 0.3, 0.2])


def world_of(cases):
    """Return a chain and three states: all well, the dear worker four times slower, slow links."""
    made = cases.chain([1.0, 2.0, 1.5], 3, boundary=2.0, sync=8.0, states=1.0, saved=0.05, memory=2.7)
    price = np.array([7200.0, 2400.0, 1800.0])
    speeds = ([4.0, 2.0, 1.5], [1.0, 2.0, 1.5], [4.0, 2.0, 1.5])
    rates = (20.0, 20.0, 4.0)
    return made, [
        cases.state(speed, usd_per_h=price, bandwidth_bytes_per_s=np.full((3, 3), rate))
        for speed, rate in zip(speeds, rates, strict=True)
    ]


def program(rows, chance, limit):
    """Return the least mean time over mixtures that keep the budget, and what the budget is worth."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    both = list(zip(chance, rows, strict=True))
    time_s = np.concatenate([p * np.array([one.time_s for one in each]) for p, each in both])
    usd = np.concatenate([p * np.array([one.costs["usd"] for one in each]) for p, each in both])
    sizes = [len(each) for each in rows]
    sums = np.repeat(np.eye(len(rows)), sizes, axis=1)
    found = linprog(time_s, A_ub=[usd], b_ub=[limit], A_eq=sums, b_eq=np.ones(len(rows)))
    assert found.status == 0
    return found.fun, -found.ineqlin.marginals[0]


@pytest.fixture(scope="module")
def played(cases):
    """Play slots drawn independently with the exact solver; return what happened and the program's value."""
    made, states = world_of(cases)
    rows = [
        [one for one in everything(made, now, BATCH, MICRO_BATCH) if math.isfinite(one.time_s)]
        for now in states
    ]
    fast = [min(each, key=lambda one: one.time_s) for each in rows]
    cheap = [min(each, key=lambda one: one.costs["usd"]) for each in rows]
    usd = [CHANCE @ [one.costs["usd"] for one in some] for some in (fast, cheap)]
    limit = 0.4 * usd[0] + 0.6 * usd[1]
    budget = Budget(name="money", kind="usd", limit=float(limit))
    queues = Queues((budget,), weight=WEIGHT, step_s=fast[0].time_s)
    memo, drawn, chosen, backlog = SearchCache(), np.random.default_rng(0).choice(3, SLOTS, p=CHANCE), [], []
    for at in drawn:
        time_weight, cost_weights = queues.weights()
        choice = solve_slot(
            made,
            states[at],
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            time_weight=time_weight,
            cost_weights=cost_weights,
            budgets=(budget,),
            cache=memo,
            reading=MP_OVER_DP,
        )
        queues.record(choice.time_s, {"money": choice.costs["usd"]})
        chosen.append(choice)
        backlog.append(queues.backlog["money"])
    chance = np.bincount(drawn, minlength=3) / SLOTS
    return queues, chosen, np.array(backlog), program(rows, chance, limit), fast[0].time_s, rows


def test_books_close_and_the_budget_is_kept(played):
    queues, chosen, backlog, *_ = played
    spent = np.mean([one.costs["usd"] for one in chosen])
    limit = queues["money"].budget.limit
    assert queues.identity_error() < 1e-12
    assert spent / limit - 1.0 <= backlog[-1] / SLOTS + 1e-9, "the excess is what is left in the queue"
    assert spent <= 1.02 * limit


def test_mean_time_is_within_the_bound_of_the_linear_program(played):
    queues, chosen, _, (least_s, _), step_s, rows = played
    usd = np.array([one.costs["usd"] for each in rows for one in each]) / queues["money"].budget.limit
    drift = 0.5 * max(1.0, usd.max() - 1.0) ** 2
    mean_s = np.mean([one.time_s for one in chosen])
    assert mean_s <= least_s + drift / WEIGHT * step_s
    assert mean_s <= 1.02 * least_s, "in practice far within it"
    assert len({one.structure for one in chosen}) > 2 and any(len(one.shares) > 1 for one in chosen)


def test_backlogs_settle_near_the_worth_of_the_budget(played):
    queues, _, backlog, (_, worth), step_s, _ = played
    wanted = worth * queues["money"].budget.limit / step_s
    assert wanted > 0.1
    assert backlog[SLOTS // 3 :].mean() / WEIGHT == pytest.approx(wanted, rel=0.25)
