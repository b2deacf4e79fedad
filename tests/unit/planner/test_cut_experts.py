"""Stages that cut experts over their ranks: never faster by the engine, in memory, chosen where they fit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planner.test_brute_force import random_problem

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.pricing.engine_times import engine_seconds
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_options import stage_options
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.search import plan
from foreshard.planner.solver import solve as solving
from foreshard.planner.solver.problem import Arrangement, StageSpan, faults, step_seconds
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan

TWO = "1x8xa100-sxm-80gb+1x8xh100-sxm@400Gb/s"
BATCH = 64


def asked(cluster: str = TWO, model: str = "mixtral-8x7b") -> PlanRequest:
    return checked_request(load_model(model), load_cluster(cluster), global_batch=BATCH, seq_len=4096)


def test_experts_are_cut_over_ranks_that_divide_both():
    found = stage_options(asked(), (0, 1), every=True)
    assert {kind.ep for kind in found} == {1, 2, 4, 8}
    assert all(kind.tp * kind.inner_dp % kind.ep == 0 for kind in found)
    assert {kind for kind in found if kind.ep == kind.cp == 1} == set(stage_options(asked(), (0, 1)))
    dense = asked(model="llama3-8b")
    assert stage_options(dense, (0, 1), every=True) == stage_options(dense, (0, 1))


@pytest.mark.parametrize("pipelines", [1, 2])
def test_no_plan_with_cut_experts_is_faster_by_the_engine(pipelines):
    """Pipelines on devices of one kind each, alike in what the terms of the space bound."""
    request, rng = asked(TWO.replace("1x8x", "2x8x")), np.random.default_rng(pipelines)
    problem = price_stages(request, (0, 1), by_domain=True, every=True)
    cut, judged, memory_checked = np.array([kind.ep > 1 for kind in problem.names]), 0, 0
    middle = problem.num_layers // 2
    roomy = problem.max_in_flight[:, problem.types[0, middle]] > 1
    for _ in range(600):
        templates = []
        for kind in range(pipelines):
            # A stage in each of two nodes, and pipelines on kinds of their own: no domain is shared.
            own = np.flatnonzero(cut & (problem.takes[:, kind] == 8) & roomy)
            first = int(rng.choice(own))
            same = own[problem.micro_batch[own] == problem.micro_batch[first]]
            second, at = int(rng.choice(same)), int(rng.integers(middle - 3, middle + 4))
            ends = (
                StageSpan(option=first, start=0, stop=at),
                StageSpan(option=second, start=at, stop=problem.num_layers),
            )
            templates.append(ends)
        shares = (BATCH,) if pipelines == 1 else (BATCH // 2, BATCH // 2)
        arrangement = Arrangement(templates=tuple(templates), shares=shares)
        if judged >= 30 or faults(problem, arrangement) or not _alike(problem, templates):
            continue
        made = plan_of(request, problem, arrangement)
        check_plan(made, request.model, request.cluster)
        assert [stage.ep for stage in made.groups[0].stages] == [
            problem.names[p.option].ep for p in templates[0]
        ]
        assert step_seconds(problem, arrangement, filling="least") <= engine_seconds(request, [made])[0] * (
            1 + 1e-9
        )
        if memory_checked < 10:
            memory = predict(request.model, request.cluster, made, engine="analytical").memory
            assert memory.peak_bytes <= memory.capacity_bytes * 1.03
            memory_checked += 1
        judged += 1
    assert judged >= 20


@pytest.mark.parametrize("pipelines", [1, 2])
def test_ranks_of_several_nodes_with_the_same_experts_join_over_the_network(pipelines):
    """A node holds all experts once: nothing of what their gradients take stays inside."""
    request = asked(TWO.replace("1x8x", "2x8x"))
    problem = price_stages(
        request, (0, 1), by_domain=True, every=True, reserve_bytes=-1e12
    )  # as if all fitted
    templates = []
    for kind in range(pipelines):
        wide = [
            i
            for i, one in enumerate(problem.names)
            if (one.node_group, one.tp, one.inner_dp, one.micro_batch, one.ep) == (kind, 4, 4, 1, 8)
            and one.recompute == "none"
        ]
        templates.append((StageSpan(option=wide[0], start=0, stop=problem.num_layers),))
    shares = (BATCH // pipelines,) * pipelines
    arrangement = Arrangement(templates=tuple(templates), shares=shares)
    made = plan_of(request, problem, arrangement)
    seconds, judged = step_seconds(problem, arrangement), engine_seconds(request, [made])[0]
    assert seconds <= judged * (1 + 1e-9)
    assert seconds >= judged * (0.98 if pipelines == 1 else 0.9)  # others may be half as wide


def _alike(problem, templates) -> bool:
    """Return whether stages of different pipelines differ at most by a factor of two, as the space says."""
    stages = [problem.names[part.option] for template in templates for part in template]
    widths = [kind.inner_dp for kind in stages]
    replicas = [kind.tp * kind.inner_dp / kind.ep for kind in stages]
    return len(templates) == 1 or (max(widths) <= 2 * min(widths) and max(replicas) <= 2 * min(replicas))


def stages_of_best(request, found, within=0.1):
    """Return the stages of the chosen plan, which is sound, fits and has a gap of less than `within`."""
    best = found.plans[0]
    check_plan(best.plan, request.model, request.cluster)
    assert best.prediction.memory.fits
    assert found.gap < within
    assert 0.0 < found.lower_bound_step_time_s <= best.prediction.step_time_s
    return [stage for group in best.plan.groups for stage in group.stages]


@pytest.mark.slow
def test_a_mixture_of_experts_is_planned_with_cut_experts(even_clock, monkeypatch):
    """Without, each rank of a stage holds all experts, and pipelines are as long as devices are many."""
    pytest.importorskip("scipy")
    request = asked()
    with monkeypatch.context() as patch:  # compiling asks for the time as well
        patch.setattr(solving, "_FEW_DEVICES", 0)
        solving.solve(random_problem(323), budget_s=30.0)
    # Half of the time goes into plans without: one that cuts experts is faster than what that found.
    found = plan(request.model, request.cluster, global_batch=BATCH, seq_len=4096, budget_s=16.0)
    assert any(stage.ep > 1 for stage in stages_of_best(request, found))
