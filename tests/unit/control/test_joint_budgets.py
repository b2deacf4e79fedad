"""Budgets that cannot be kept together: the controller itself against the linear program over all subsets."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard.control.controller import Controller
from foreshard.control.experts import WINDOW
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.subsets import SubsetClasses
from foreshard.control.slots import Budget
from foreshard.spec.online import StepMeasured
from foreshard.spec.plan_file import parse_plan

RANKS, LAYERS, BATCH, STEPS = 4, 4, 64, 1000


def least(time_s, costs, limits):
    """Return the least part by which all budgets are exceeded, and the least mean seconds with it."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    over = (costs / limits).T
    size = len(time_s)
    one = {"A_eq": np.r_[np.ones(size), 0.0][None], "b_eq": [1.0]}
    part = linprog(
        np.r_[np.zeros(size), 1.0],
        A_ub=np.c_[over, -np.ones(len(over))],
        b_ub=np.ones(len(over)),
        bounds=[(0, None)] * (size + 1),
        **one,
    ).fun
    above = np.full(len(over), 1.0 + part * (1.0 + 1e-6) + 1e-6)
    mean_s = linprog(time_s, A_ub=over, b_ub=above, A_eq=np.ones((1, size)), b_eq=[1.0]).fun
    return part, mean_s


def first_plan():
    groups = [
        {"share": BATCH // RANKS, "stages": [{"ranks": [r], "layers": [[0, LAYERS]]}]} for r in range(RANKS)
    ]
    return parse_plan({"global_batch": BATCH, "seq_len": 8, "groups": groups, "defaults": {"micro_batch": 1}})


@pytest.mark.parametrize("seed", range(4))
def test_budgets_that_cannot_be_kept_together_are_exceeded_by_the_least_part_and_no_slower(cases, seed):
    rng = np.random.default_rng(seed)
    busy_w = rng.choice([200.0, 400.0, 800.0], RANKS)
    state = cases.state(
        rng.choice([0.3, 0.6, 1.0], RANKS),
        usd_per_h=rng.choice([900.0, 1800.0, 7200.0], RANKS),
        busy_w=busy_w,
        idle_w=busy_w * rng.choice([0.1, 0.6], RANKS),
        kg_per_j=rng.choice([1e-8, 1e-7, 3e-7], RANKS),
    )
    chain = cases.chain(np.full(LAYERS, 0.15), RANKS, sync=rng.choice([0.01, 0.3]))
    kinds = rng.choice(["usd", "joule", "carbon_kg"], rng.integers(2, 4), replace=False).tolist()
    subsets = SubsetClasses.of(chain, state, BATCH, micro_batch=1)
    costs = subsets.column([Budget(name=kind, kind=kind, limit=1.0) for kind in kinds])
    limits = costs.min(0) * rng.uniform(0.6, 1.05, len(kinds))
    part, mean_s = least(subsets.time_s, costs, limits)
    budgets = [
        Budget(name=kind, kind=kind, limit=float(limit)) for kind, limit in zip(kinds, limits, strict=True)
    ]
    controller = Controller(chain, state, first_plan(), budgets=budgets, horizon=STEPS, max_stages=1)
    for step in range(STEPS):
        structure = structure_of(controller.plan)
        real = evaluate(chain, state, structure, shares_of(controller.plan), micro_batch=1)
        speeds = {rank: float(state.speed[rank]) for rank in structure.workers}
        spent = {one.name: real.costs[one.key] for one in budgets}
        controller.on(StepMeasured(step=step, time_s=real.time_s, relative_speed=speeds, costs=spent))
    controller.check_invariants()
    excess = max(controller.queues[kind].violation for kind in kinds)
    assert (excess - part) * STEPS <= WINDOW, (excess, part)
    assert controller.queues.total_s / STEPS <= 1.05 * mean_s
