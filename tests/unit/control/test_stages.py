"""Data parallelism inside stages: the choice against all stages, cuts and shares."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from foreshard.control.orders import plan_of
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.slot_search import solve_slot
from foreshard.control.slots import MP_OVER_DP, Budget, Structure, WorkerPipeline
from foreshard.errors import InfeasibleError
from foreshard.spec.plan_file import parse_plan

ALL_KINDS = (
    Budget(name="money", kind="usd", limit=1.0),
    Budget(name="energy", kind="joule", limit=1.0),
    Budget(name="rest", kind="duty", limit=1.0, worker=0),
)


def splits(total, parts):
    if parts == 1:
        yield from [(total,)] * (total > 0)
        return
    for first in range(1, total + 1):
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
                groups = tuple(WorkerPipeline(workers=s, cuts=ends[k : k + 2]) for k, s in enumerate(stages))
                made_of = Structure(groups=groups, reading=MP_OVER_DP)
                for shares in itertools.product(*(splits(micro_batch, len(stage)) for stage in stages)):
                    flat = tuple(itertools.chain(*shares))
                    yield evaluate(made, now, made_of, flat, micro_batch=micro_batch, batch=batch)


def uneven(made, rng):
    """Return the chain on workers that are good at different layers."""
    return replace(made, layer_s=made.layer_s * rng.uniform(0.7, 1.4, made.layer_s.shape))


@pytest.mark.parametrize(("workers", "layers", "cases_of"), [(3, 4, 10), (4, 3, 3)])
def test_choice_is_the_best_of_all_at_any_weights(cases, workers, layers, cases_of):
    rng, wide, deep = np.random.default_rng(1), 0, 0
    for at in range(cases_of):
        made, now = cases.random_case(rng, workers, layers=layers, tight=at % 2 == 1, egress=at % 3 == 0)
        made = uneven(made, rng) if at % 4 == 2 else made
        weights = {
            "money": rng.uniform(0.0, 0.5),
            "energy": rng.uniform(0.0, 1e-3) * (at % 2),
            "rest": rng.uniform(0.0, 2.0) * (at % 5 == 0),
        }

        def worth(one, weights=weights):
            return one.time_s + sum(weights[each.name] * one.costs[each.key] for each in ALL_KINDS)

        least = min(worth(one) for one in everything(made, now, 24, 4) if math.isfinite(one.time_s))
        choice = solve_slot(
            made,
            now,
            batch=24,
            micro_batch=4,
            time_weight=1.0,
            cost_weights=weights,
            budgets=ALL_KINDS,
            reading=MP_OVER_DP,
        )
        assert worth(choice) == pytest.approx(least, rel=1e-9)
        wide += max(len(group.workers) for group in choice.structure.groups) > 1
        deep += len(choice.structure.groups) > 1
    assert wide and deep, "trivial cases"


def test_a_state_that_stays_is_searched_to_what_a_long_search_finds(cases):
    """A slot has time for few structures: what it had no time for is looked at in later ones."""
    rng = np.random.default_rng(1)
    for at in range(4):
        made, now = cases.random_case(rng, 7, kinds=4, layers=6, tight=at % 2 == 1, egress=at % 3 == 0)
        weights = {"money": rng.uniform(0.0, 0.5), "energy": rng.uniform(0.0, 1e-3) * (at % 2)}
    asked = {"batch": 96, "micro_batch": 16, "time_weight": 1.0, "cost_weights": weights}
    asked |= {"budgets": ALL_KINDS[:2], "reading": MP_OVER_DP}

    def worth(one):
        return one.time_s + sum(weights[each.name] * one.costs[each.key] for each in ALL_KINDS[:2])

    least, cache = worth(solve_slot(made, now, **asked)), SearchCache()
    choice = solve_slot(made, replace(now, speed=np.ones(7)), cache=cache, **asked)
    for _ in range(16):
        choice = solve_slot(made, now, running=choice, cache=cache, **asked)
    assert worth(choice) <= least * (1.0 + 1e-9)


def test_where_nothing_fits_it_is_said(cases):
    made, now = cases.chain([1.0] * 3, 2, memory=1.2), cases.state([1.0, 2.0])
    with pytest.raises(InfeasibleError, match="no stages of 2 workers"):
        solve_slot(made, now, batch=24, micro_batch=4, time_weight=1.0, reading=MP_OVER_DP)


def test_stages_become_one_group_with_rank_shares(cases):
    made = cases.chain([1.0] * 4, 3, boundary=0.01, sync=500.0)
    choice = solve_slot(
        made,
        cases.state([2.0, 1.0, 3.0]),
        batch=48,
        micro_batch=6,
        time_weight=1.0,
        max_stages=2,
        reading=MP_OVER_DP,
    )
    running = parse_plan(
        {
            "global_batch": 48,
            "seq_len": 8,
            "groups": [{"share": 48, "stages": [{"ranks": [0], "layers": [[0, 4]]}]}],
        }
    )
    plan = plan_of(running, choice, micro_batch=6)
    (group,) = plan.groups
    assert group.share == 48 and group.micro_batch == 6
    for stage in group.stages:
        assert len(stage.ranks) == 1 or sum(stage.rank_shares) == 6
    assert parse_plan(plan.to_dict()) == plan
