"""Data parallelism inside stages: the choice against all stages, cuts and shares."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from foreshard.control.orders import plan_of
from foreshard.control.slots import MP_OVER_DP, Budget, Pipeline, Structure, evaluate
from foreshard.control.stages import solve_stages
from foreshard.errors import InfeasibleError
from foreshard.spec.plan import parse_plan

RENT = (Budget(name="money", kind="usd", limit=1.0),)


def splits(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in splits(total - first, parts - 1))


def everything(made, now, batch, micro_batch):
    """Return all choices: every worker in a stage or none, all cuts, all shares."""
    workers, layers = made.num_workers, made.num_layers
    for count in range(1, layers + 1):
        for place in itertools.product(range(-1, count), repeat=workers):
            stages = [tuple(w for w in range(workers) if place[w] == k) for k in range(count)]
            if not all(stages):
                continue
            for inner in itertools.combinations(range(1, layers), count - 1):
                ends = (0, *inner, layers)
                groups = tuple(Pipeline(workers=s, cuts=ends[k : k + 2]) for k, s in enumerate(stages))
                made_of = Structure(groups=groups, reading=MP_OVER_DP)
                for shares in itertools.product(*(splits(micro_batch, len(stage)) for stage in stages)):
                    flat = tuple(itertools.chain(*shares))
                    yield evaluate(made, now, made_of, flat, micro_batch=micro_batch, batch=batch)


@pytest.mark.parametrize("price", [0.0, 0.3])
def test_choice_is_nearly_always_the_best_of_all(cases, price):
    rng = np.random.default_rng(3)
    gaps = []
    for at in range(6):
        made, now = cases.random_case(rng, 3, layers=3, tight=at % 2 == 1)
        worths = [
            one.time_s + price * one.costs["usd"]
            for one in everything(made, now, 24, 4) if math.isfinite(one.time_s)
        ]  # fmt: skip
        asked = {"batch": 24, "micro_batch": 4, "time_weight": 1.0, "cost_weights": {"money": price}}
        if not worths:
            with pytest.raises(InfeasibleError):
                solve_stages(made, now, **asked, budgets=RENT)
            continue
        choice = solve_stages(made, now, **asked, budgets=RENT)
        gaps.append((choice.time_s + price * choice.costs["usd"]) / min(worths) - 1.0)
    assert len(gaps) >= 4 and min(gaps) > -1e-9 and max(gaps) < 0.1
    assert np.mean(np.array(gaps) < 1e-9) >= 0.7, gaps


def test_stages_become_one_group_with_rank_shares(cases):
    made = cases.chain([1.0] * 4, 3, boundary=0.01, sync=500.0)
    choice = solve_stages(
        made, cases.state([2.0, 1.0, 3.0]), batch=48, micro_batch=6, time_weight=1.0, max_stages=2
    )  # fmt: skip
    running = parse_plan({
        "global_batch": 48, "seq_len": 8,
        "groups": [{"share": 48, "stages": [{"ranks": [0], "layers": [[0, 4]]}]}],
    })  # fmt: skip
    plan = plan_of(running, choice, micro_batch=6)
    (group,) = plan.groups
    assert group.share == 48 and group.micro_batch == 6
    for stage in group.stages:
        assert len(stage.ranks) == 1 or sum(stage.rank_shares) == 6
    assert parse_plan(plan.to_dict()) == plan
