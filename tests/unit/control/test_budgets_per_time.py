"""Budgets per hour on the controller itself: slow plans are no way to save."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foreshard.control.controller import Controller
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.subsets import data_parallel
from foreshard.control.slots import Budget
from foreshard.spec.online import StepMeasured
from foreshard.spec.plan_file import parse_plan

RANKS, LAYERS, BATCH = 4, 4, 64
STAY = 0.98
"""Chance that the straggler is the same in the next step."""


class Cluster:
    """Workers of random speeds and rents, of which one at a time is a straggler; a budget per hour."""

    def __init__(self, cases, seed, steps):
        rng = np.random.default_rng(seed)
        self.stated = rng.choice([1.0, 0.5, 0.25], size=RANKS)
        self.rent = 3600.0 * self.stated ** rng.uniform(0.5, 1.5)
        slower, who, self.path = rng.choice([2.0, 4.0, 8.0]), 0, []
        for _ in range(steps):
            who = who if rng.random() < STAY else int(rng.integers(RANKS))
            self.path.append(np.where(np.arange(RANKS) == who, 1.0 / slower, 1.0) * self.stated)
        self.limit = rng.uniform(0.35, 0.8) * self.rent.sum()
        self.chain = cases.chain(np.full(LAYERS, 0.15), RANKS, sync=0.01)
        self.state = lambda speed: cases.state(speed, usd_per_h=self.rent)

    def took(self, structure, shares, speed):
        """Return seconds and dollars of a step."""
        found = evaluate(self.chain, self.state(speed), structure, shares, micro_batch=1)
        return found.time_s, found.costs["usd"]

    def best_fixed_s(self):
        """Return the mean step of the best workers within the budget, shares by stated or by mean speeds."""
        best, distinct = np.inf, {speed.tobytes(): speed for speed in self.path}
        count = {key: sum(speed.tobytes() == key for speed in self.path) for key in distinct}
        for size in range(1, RANKS + 1):
            for some in itertools.combinations(range(RANKS), size):
                who = list(some)
                if self.rent[who].sum() > self.limit:
                    continue
                for speed in (self.stated, 1.0 / np.mean(1.0 / np.array(self.path), axis=0)):
                    shares = np.floor(BATCH * speed[who] / speed[who].sum()).astype(int)
                    shares[0] += BATCH - shares.sum()
                    plan = data_parallel(some, self.chain), tuple(shares.tolist())
                    mean_s = sum(count[key] * self.took(*plan, now)[0] for key, now in distinct.items())
                    best = min(best, mean_s / len(self.path))
        return best


@pytest.mark.parametrize("steps", [100, 300, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_a_budget_per_hour_is_kept_and_no_fixed_plan_is_much_faster(cases, seed, steps):
    cluster = Cluster(cases, seed, steps)
    budget = Budget(name="money", kind="usd", limit=cluster.limit, per="hour")
    groups = [
        {"share": BATCH // RANKS, "stages": [{"ranks": [r], "layers": [[0, LAYERS]]}]} for r in range(RANKS)
    ]
    plan = parse_plan({"global_batch": BATCH, "seq_len": 8, "groups": groups, "defaults": {"micro_batch": 1}})
    controller = Controller(
        cluster.chain, cluster.state(cluster.stated), plan, budgets=[budget], horizon=steps, max_stages=1
    )
    for step, speed in enumerate(cluster.path):
        structure = structure_of(controller.plan)
        time_s, usd = cluster.took(structure, shares_of(controller.plan), speed)
        seen = {rank: float(speed[rank]) for rank in structure.workers}
        controller.on(StepMeasured(step=step, time_s=time_s, relative_speed=seen, costs={"money": usd}))
    controller.check_invariants()
    queues = controller.queues
    # One and a half steps of a hundred: the last change comes a step sooner or later.
    assert queues.violation <= 0.015
    # What is left of the budget in a run of 100 steps, some ten of them, may cost it a quarter of its speed.
    assert queues.total_s / steps <= (1.05 if steps > 100 else 1.3) * cluster.best_fixed_s()
