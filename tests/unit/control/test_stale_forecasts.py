"""Budgets and times of the controller where forecasts are late or wrong, on the controller itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foreshard.control.budgets.dual_learning import weight_for
from foreshard.control.controller import Controller
from foreshard.control.experts import WINDOW
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.subsets import data_parallel, even_shares
from foreshard.control.slots import Budget
from foreshard.spec.online import DeviceSeen, RankLost, StepMeasured
from foreshard.spec.plan_file import parse_plan

RANKS, LAYERS, BATCH, SLOW = 4, 4, 64, 0.25
EXCESS = 2.0 * WINDOW
"""c of the guarantee: all excess that a run may have, in budgets of a step, however long it is."""
PATHS = {
    "swap": lambda rng, steps: [np.where((t % 2 == 0) == FIRST_HALF, 1.0, SLOW) for t in range(steps)],
    "swap every third": lambda rng, steps: [
        np.where((t // 3 % 2 == 0) == FIRST_HALF, 1.0, SLOW) for t in range(steps)
    ],
    "independent": lambda rng, steps: list(np.where(rng.random((steps, RANKS)) < 0.5, 1.0, SLOW)),
}
FIRST_HALF = np.arange(RANKS) < RANKS // 2
ALIKE = np.ones(RANKS)


def first_plan():
    groups = [
        {"share": BATCH // RANKS, "stages": [{"ranks": [r], "layers": [[0, LAYERS]]}]} for r in range(RANKS)
    ]
    return parse_plan({"global_batch": BATCH, "seq_len": 8, "groups": groups, "defaults": {"micro_batch": 1}})


class Truth:
    """Seconds and dollars of plans as they really are, remembered."""

    def __init__(self, cases, factor=lambda structure: 1.0, **given):
        self.chain = cases.chain(np.full(LAYERS, 0.15), RANKS, sync=0.01)
        self.state, self.factor, self._known = lambda speed: cases.state(speed, **given), factor, {}

    def __call__(self, structure, shares, speed):
        key = (structure, shares, speed.tobytes())
        if key not in self._known:
            found = evaluate(self.chain, self.state(speed), structure, shares, micro_batch=1)
            self._known[key] = np.array([found.time_s, found.costs["usd"]]) * self.factor(structure)
        return self._known[key]

    def fixed(self, path, stated=ALIKE):
        """Return seconds and dollars of all subsets in every step, shares as stated: (plans, steps, 2)."""
        subsets = (list(c) for n in range(1, RANKS + 1) for c in itertools.combinations(range(RANKS), n))
        return np.array([[self(*self.plan(c, stated[c]), s) for s in path] for c in subsets])

    def plan(self, some, speed):
        """Return replicas on some ranks with shares in proportion to speeds."""
        shares = even_shares(len(some), BATCH)
        if len(set(speed)) > 1:
            shares = np.floor(BATCH * speed / speed.sum()).astype(int)
            shares[speed.argmax()] += BATCH - shares.sum()
        return data_parallel(some, self.chain), tuple(shares.tolist())


def played(truth, path, limit, horizon=None, per="step", stated=ALIKE):
    """Return mean seconds, and the most that was ever spent above the budget, in budgets of a step."""
    budgets = (Budget(name="money", kind="usd", limit=limit, per=per),)
    stated = truth.state(stated)
    controller = Controller(
        truth.chain, stated, first_plan(), budgets=budgets, horizon=horizon or len(path), max_stages=1
    )
    total, worst = np.zeros(2), 0.0
    for step, speed in enumerate(path):
        structure = structure_of(controller.plan)
        took = truth(structure, shares_of(controller.plan), speed)
        total += took
        allowed = limit * (step + 1) if per == "step" else budgets[0].allowance(total[0])
        worst = max(worst, (step + 1) * (total[1] / allowed - 1.0))
        seen = {rank: float(speed[rank]) for rank in structure.workers}
        event = StepMeasured(step=step, time_s=took[0], relative_speed=seen, costs={"money": float(took[1])})
        controller.on(event)
    controller.check_invariants()
    return total[0] / len(path), worst


def best_fixed(rows, limit, slack):
    """Return the least mean seconds of a plan that keeps so much less than the budget in every window."""
    sums = np.cumsum(rows[:, :, 1], axis=1)
    windows = (sums[:, WINDOW:] - sums[:, :-WINDOW]) / WINDOW
    kept = windows.max(1) <= (1.0 - slack) * limit
    assert kept.any()
    return rows[kept, :, 0].mean(1).min()


@pytest.mark.parametrize(
    ("kind", "horizon"),
    [
        ("swap", 2000),
        pytest.param("independent", 2000, marks=pytest.mark.slow),
        pytest.param("swap every third", 2000, marks=pytest.mark.slow),
        pytest.param("swap", 80_000, marks=pytest.mark.slow),
    ],
)
def test_speeds_that_are_no_forecast_of_the_next_step_break_no_budget(cases, kind, horizon):
    """Nor in the first steps of a run that is long, in which V is ten times as large."""
    truth, steps = Truth(cases), 2000
    path = PATHS[kind](np.random.default_rng(0), steps)
    rows = truth.fixed(path)
    limit = 1.25 * rows[:, :, 1].mean(1).min()
    mean_s, excess = played(truth, path, limit, horizon)
    assert excess <= EXCESS
    assert mean_s <= 1.05 * best_fixed(rows, limit, 0.02)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_budget_per_hour_is_spent_where_steps_are_far_longer_than_stated(cases, seed):
    """And a rank out of use, which nobody sees, is not taken to stay as it was.

    Two ranks keep the budget in every step. To learn what speeds are like takes up to a tenth of so short a
    run.
    """
    rng, steps = np.random.default_rng(seed), 1000
    stated = rng.choice([1.0, 0.5, 0.25], RANKS)
    rent = 3600.0 * stated ** rng.uniform(0.5, 1.5)
    truth = Truth(cases, usd_per_h=rent)
    path = list(np.where(rng.random((steps, RANKS)) < 0.5, 1.0, SLOW / 2.0) * stated)
    pair = rng.permutation(RANKS)[:2]
    mean_s, excess = played(truth, path, rent[pair].sum(), per="hour", stated=stated)
    rows = truth.fixed(path, stated)
    kept = rows[:, 0, 1] / rows[:, 0, 0] <= rent[pair].sum() / 3600.0 * (1.0 + 1e-9)
    assert excess <= EXCESS and mean_s <= 1.1 * rows[kept, :, 0].mean(1).min()


@pytest.mark.slow
def test_an_excess_stays_near_v_where_a_budget_leaves_next_to_nothing(cases):
    """No plan keeps the budget in every window, and no forecast is worth anything."""
    truth, steps = Truth(cases), 2000
    path = PATHS["independent"](np.random.default_rng(0), steps)
    rows = truth.fixed(path)
    _, excess = played(truth, path, 1.05 * rows[:, :, 1].mean(1).min())
    assert excess <= weight_for(0.01, steps) + WINDOW


@pytest.mark.parametrize(("odd", "steps"), [(1.0, 2000), pytest.param(1.3, 5000, marks=pytest.mark.slow)])
def test_a_truth_above_the_forecast_breaks_no_budget(cases, odd, steps):
    """All steps take 1.5 times what the model says, with rank 0 even more; speeds say nothing of it."""
    prices = np.array([7200.0, 7200.0, 1800.0, 1800.0])
    truth = Truth(cases, lambda structure: 1.5 * (odd if 0 in structure.workers else 1.0), usd_per_h=prices)
    path = [np.ones(RANKS)] * steps
    rows = truth.fixed(path[: WINDOW + 1])
    costs, seconds = rows[:, 0, 1], rows[:, 0, 0]
    limit = 0.5 * (costs.min() + costs[seconds.argmin()])
    mean_s, excess = played(truth, path, limit)
    assert excess <= EXCESS and mean_s <= 1.05 * seconds[costs <= 0.95 * limit].min()


@pytest.mark.parametrize("limit", [0.2, pytest.param(1.25, marks=pytest.mark.slow)])
def test_ranks_may_be_lost_and_return_while_a_plan_stays(cases, limit):
    """Also while the guard runs one: it leaves a lost rank at once."""
    truth, rng, there = Truth(cases), np.random.default_rng(0), np.ones(RANKS, bool)
    path = PATHS["independent"](rng, 300)
    budget = Budget(name="money", kind="usd", limit=limit * truth.fixed(path[:1])[:, :, 1].min())
    controller = Controller(truth.chain, truth.state(ALIKE), first_plan(), budgets=[budget], max_stages=1)
    for step, speed in enumerate(path):
        rank = int(rng.integers(RANKS))
        if step % 30 == 29 and (there.sum() > 1 or not there[rank]):
            there[rank] = not there[rank]
            back = DeviceSeen(step=step, rank=rank, relative_speed=float(speed[rank]))
            controller.on(back if there[rank] else RankLost(step=step, rank=rank, reason="taken"))
        structure = structure_of(controller.plan)
        assert there[list(structure.workers)].all()
        time_s, usd = truth(structure, shares_of(controller.plan), speed)
        seen = {rank: float(speed[rank]) for rank in structure.workers}
        event = StepMeasured(step=step, time_s=time_s, relative_speed=seen, costs={"money": float(4.0 * usd)})
        controller.on(event)
        controller.check_invariants()
