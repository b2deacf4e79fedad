"""Budgets that end before the search is loaded."""

from __future__ import annotations

import sys

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed import loading, search
from foreshard.planner.mixed.best_so_far import MixedFound
from foreshard.planner.mixed.node_sets import node_sets
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import checked_request
from foreshard.planner.search import plan
from foreshard.planner.solver.solve import ProblemSearch, solve

MIXED = "1x4xa100-sxm-40gb+1x4xv100-sxm-16gb@100Gb/s"
ASKED = {"global_batch": 32, "seq_len": 1024, "precision": "fp16"}


def test_only_budgets_shorter_than_loading_are_hasty(monkeypatch):
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    assert loading.is_hasty(0.5) and not loading.is_hasty(2.0)


def test_nothing_to_load_is_no_haste(monkeypatch):
    for name in ("scipy.optimize", "numba.core.dispatcher"):
        monkeypatch.setitem(sys.modules, name, sys)
    assert not loading.is_hasty(0.01)


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_a_hasty_answer_is_a_plan_with_a_bound_that_says_so(monkeypatch, objective):
    monkeypatch.setattr(search, "is_hasty", lambda budget_s: budget_s < 1.0)

    def never(*arguments, **options):
        raise AssertionError("searched")

    monkeypatch.setattr(ProblemSearch, "advance", never)
    found = plan(load_model("gpt2-xl"), load_cluster(MIXED), budget_s=0.3, objective=(objective,), **ASKED)
    best = found.plans[0].prediction.step_time_s
    assert 0.0 < found.lower_bound_step_time_s <= best and found.gap > 0.0
    assert found.interrupted and loading.HASTE in found.notes
    assert best == pytest.approx(found.lower_bound_step_time_s * (1.0 + found.gap))


def test_a_part_of_a_long_search_is_not_hasty(monkeypatch):
    asked = []
    monkeypatch.setattr(search, "is_hasty", lambda budget_s: asked.append(budget_s) or False)
    model, cluster = load_model("gpt2-xl"), load_cluster(MIXED)
    plan(model, cluster, budget_s=1.5, **{**ASKED, "precision": ("fp16", "fp32")})
    assert asked and set(asked) == {1.5}


@pytest.mark.parametrize("cluster", [MIXED, "1x2xl4+2x2xt4+1x8xa100-sxm-40gb@10Gb/s"])
@pytest.mark.slow
def test_bounds_of_sets_by_the_prices_of_more_groups_hold(cluster):
    request = checked_request(load_model("gpt2-xl"), load_cluster(cluster), **ASKED)
    found, sets = MixedFound(request=request), node_sets(request)
    for use in sets:
        own = solve(price_stages(request, use, by_domain=True), budget_s=1.0).step_time_s
        assert 0.0 < found.work_s(use) <= own * (1 + 1e-9), use
    assert list(found.problems) == sets[:1]
