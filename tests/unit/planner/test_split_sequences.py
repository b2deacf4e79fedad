"""Stages that split sequences over ranks: never faster by the engine, in memory, chosen where they win."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planner.test_cut_experts import stages_of_best

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.pricing.engine_times import engine_seconds
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_options import context_degrees, stage_options
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.search import plan
from foreshard.planner.settings import settings
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    StageSpan,
    faults,
    step_seconds,
)
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan

TWO = "2x8xa100-sxm-80gb+2x8xh100-sxm@400Gb/s"
BATCH, LONG = 16, 65536


def asked(seq_len: int = LONG, model: str = "llama3-8b", framework: str = "megatron-core") -> PlanRequest:
    return checked_request(
        load_model(model),
        load_cluster(TWO),
        global_batch=BATCH,
        seq_len=seq_len,
        framework=framework,
    )


@pytest.mark.parametrize(("seq_len", "degrees"), [(8192, {1}), (16384, {1, 2}), (LONG, {1, 2, 4, 8})])
def test_long_sequences_are_split_until_a_rank_has_8192_tokens(seq_len, degrees):
    found = stage_options(asked(seq_len), (0, 1), every=True)
    assert {kind.cp for kind in found} == degrees
    assert all(kind.micro_batch == 1 for kind in found if kind.cp > 1)
    assert {kind for kind in found if kind.ep == kind.cp == 1} == set(stage_options(asked(seq_len), (0, 1)))


def test_a_sequence_is_split_only_where_degrees_and_framework_allow():
    odd = asked(3 * 8192)
    assert context_degrees(odd) == [1, 2]
    assert all(odd.seq_len % (kind.tp * kind.cp) == 0 for kind in stage_options(odd, (0,), every=True))
    assert context_degrees(asked(framework="megatron-deepspeed")) == [1]


@pytest.mark.parametrize(("seq_len", "both"), [(8192, 1), (16384, 2)])
def test_how_keys_are_brought_is_searched_where_sequences_may_be_split(seq_len, both):
    found = list(settings(asked(seq_len), ("bf16",), ("context_gather",)))
    assert len(found) == both


def _template(problem: Problem, rng: np.random.Generator, left: np.ndarray) -> tuple[StageSpan, ...]:
    """Draw a pipeline of one or two stages of one micro-batch, the first of split sequences."""
    split = np.array([kind.cp > 1 for kind in problem.names])
    first = int(rng.choice(np.flatnonzero(split & np.all(problem.takes <= left, axis=1))))
    rest = left - problem.takes[first]
    same = (problem.micro_batch == problem.micro_batch[first]) & np.all(problem.takes <= rest, axis=1)
    if rng.random() < 0.5 or not same.any():
        return (StageSpan(option=first, start=0, stop=problem.num_layers),)
    second, at = int(rng.choice(np.flatnonzero(same))), int(rng.integers(8, problem.num_layers - 8))
    return StageSpan(option=first, start=0, stop=at), StageSpan(
        option=second, start=at, stop=problem.num_layers
    )


def _in_space(problem: Problem, templates: list[tuple[StageSpan, ...]]) -> bool:
    """Return whether pipelines fill link domains of their own and are as wide as each other, to a half."""
    kinds = [problem.names[part.option] for template in templates for part in template]
    widths = [kind.inner_dp for kind in kinds]
    own = all(kind.split * kind.inner_dp % 8 == 0 for kind in kinds)
    # A collective has as many members in a domain as its stage's tp leaves room for.
    return len(templates) == 1 or (own and max(widths) <= 2 * min(widths) and len({k.tp for k in kinds}) == 1)


@pytest.mark.parametrize("by_domain", [False, True])
def test_no_plan_of_split_sequences_is_faster_by_the_engine(by_domain):
    """Pipelines of one or both kinds of devices, alone and beside one of another cp."""
    request, rng = asked(), np.random.default_rng(3)
    problem = price_stages(request, (0, 1), by_domain=by_domain, every=True)
    judged: list[int] = []
    degrees = set()
    for _ in range(3000):
        templates = [_template(problem, rng, np.array(problem.counts))]
        if rng.random() < 0.6:
            left = np.array(problem.counts) - problem.takes[[part.option for part in templates[0]]].sum(0)
            if left.sum() >= 8 and np.any(left >= 8):
                templates.append(_template(problem, rng, left))
        shares = (BATCH,) if len(templates) == 1 else (BATCH // 2, BATCH // 2)
        arrangement = Arrangement(templates=tuple(templates), shares=shares)
        if judged.count(len(templates)) >= 25 or faults(problem, arrangement):
            continue
        made = plan_of(request, problem, arrangement)
        if made is None or not _in_space(problem, templates):
            continue
        used = problem.takes[[part.option for template in templates for part in template]].sum(0)
        if not np.all(used > 0):  # gradients join over the links between both kinds
            continue
        check_plan(made, request.model, request.cluster)
        assert step_seconds(problem, arrangement, filling="least") <= engine_seconds(request, [made])[0] * (
            1 + 1e-9
        )
        if len(judged) % 5 == 0:
            memory = predict(request.model, request.cluster, made, engine="analytical").memory
            assert memory.peak_bytes <= memory.capacity_bytes * 1.02
        judged.append(len(templates))
        degrees.add(tuple(group.stages[0].cp for group in made.groups))
    assert judged.count(1) >= 15 and judged.count(2) >= 15
    assert any(len(set(one)) > 1 for one in degrees)


def test_a_pipeline_of_split_sequences_alone_costs_about_what_the_engine_says():
    request, rng = asked(), np.random.default_rng(7)
    problem = price_stages(request, (0,), by_domain=True, every=True)
    compared = 0
    for _ in range(400):
        arrangement = Arrangement(
            templates=(_template(problem, rng, np.array(problem.counts)),), shares=(BATCH,)
        )
        made = None if faults(problem, arrangement) else plan_of(request, problem, arrangement)
        if made is None or compared >= 20:
            continue
        seconds = engine_seconds(request, [made])[0]
        assert step_seconds(problem, arrangement, filling="least") <= seconds * (1 + 1e-9)
        assert step_seconds(problem, arrangement) == pytest.approx(seconds, rel=0.1)
        compared += 1
    assert compared >= 10


@pytest.mark.slow
def test_long_sequences_are_planned_with_split_ones(even_clock):
    """Without, pipelines are longer than sixteen samples fill."""
    pytest.importorskip("scipy")
    request = asked(131072)
    found = plan(request.model, request.cluster, global_batch=BATCH, seq_len=131072, budget_s=4.0)
    assert any(stage.cp > 1 for stage in stages_of_best(request, found, within=0.15))
