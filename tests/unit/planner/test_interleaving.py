"""Interleaved pipelines: found by the search for 1f1b ones, timed as the engine does, in memory, chosen."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.baselines.registry import BASELINES
from foreshard.planner.mixed.best_so_far import MixedFound
from foreshard.planner.mixed.interleaving import (
    chunk_counts,
    depths,
    in_rounds,
    interleaved,
    scaled,
)
from foreshard.planner.mixed.node_sets import are_short_alike
from foreshard.planner.mixed.search import INTERLEAVED, MixedSearch
from foreshard.planner.mixed.subspaces import Subspace
from foreshard.planner.pricing import stage_prices
from foreshard.planner.pricing.engine_times import engine_seconds
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.result import PlanResult, WiderSpace
from foreshard.planner.search import plan
from foreshard.planner.settings_search import shared_space
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    StageSpan,
    Template,
    pipeline_rate,
    step_seconds,
    tail_seconds,
    template_faults,
)
from foreshard.planner.solver.solve import ProblemSearch
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.predict.analytical.stage import stage_times
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan
from foreshard.spec.plan import Group, Plan, Stage

TWO = "1x4xl4+1x4xa100-sxm-40gb@100Gb/s"
BATCH = 48


def asked(model: str = "gpt2-xl", framework: str = "megatron-core") -> PlanRequest:
    return checked_request(
        load_model(model), load_cluster(TWO), global_batch=BATCH, seq_len=1024, framework=framework
    )


def _template(problem: Problem, rng: np.random.Generator, left: np.ndarray) -> Template | None:
    """Draw a pipeline of two to four stages that fits devices and memory."""
    stages = int(rng.integers(2, 5))
    size = int(rng.choice(problem.micro_batch))
    options = np.flatnonzero((problem.micro_batch == size) & np.all(problem.takes <= left, axis=1))
    if not len(options):
        return None
    cuts = [0, *sorted(rng.choice(np.arange(5, 46), stages - 1, replace=False).tolist()), problem.num_layers]
    made = tuple(
        StageSpan(option=int(option), start=start, stop=stop)
        for option, start, stop in zip(rng.choice(options, stages), cuts[:-1], cuts[1:], strict=True)
    )
    used = problem.takes[[part.option for part in made]].sum(0)
    return None if np.any(used > left) or template_faults(problem, made) else made


@pytest.mark.parametrize(("chunks", "use"), [(2, (1,)), (4, (1,)), (2, (0, 1)), (4, (0, 1))])
def test_an_interleaved_pipeline_costs_about_what_the_engine_says(chunks, use):
    """On devices of one kind; where kinds are joined links are at their best, and it never costs less."""
    request, rng = asked(), np.random.default_rng(chunks)
    priced = price_stages(request, use, by_domain=True, every=True, chunks=chunks, stages=4)
    problem, compared = scaled(priced, chunks), 0
    for _ in range(4000):
        template = _template(problem, rng, np.array(problem.counts))
        if template is None or min(part.stop - part.start for part in template) < chunks or compared >= 15:
            continue
        real = Arrangement(templates=(template,), shares=(BATCH,))
        one = plan_of(request, problem, real)
        made = None if one is None else interleaved(one, chunks)
        if made is None or not np.all(problem.takes[[p.option for p in template]].sum(0)[list(use)] > 0):
            continue
        check_plan(made, request.model, request.cluster)
        assert made.groups[0].num_chunks == chunks
        assert [s.num_layers for s in made.groups[0].stages] == [p.stop - p.start for p in template]
        ours = Arrangement(templates=(template,), shares=(BATCH * chunks,))
        engine = engine_seconds(request, [made])[0]
        assert step_seconds(problem, ours, filling="least") <= engine * 1.02  # chunks hide tails of their own
        assert step_seconds(problem, ours) == pytest.approx(engine, rel=0.15)
        memory = predict(request.model, request.cluster, made, engine="analytical").memory
        assert memory.peak_bytes <= memory.capacity_bytes * 1.02
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("chunks", [2, 4])
def test_prices_shared_by_depths_are_those_of_each_depth_alone(chunks, monkeypatch):
    """The deepest comes first, so that stages it has no memory for are priced for those that follow."""
    request, batches = asked(), []
    how = {"every": True, "chunks": chunks, "apart": True, "reserve_bytes": 12e9}
    alone = {depth: price_stages(request, (0, 1), stages=depth, **how) for depth in (16, 2, 8, 4)}
    monkeypatch.setattr(stage_prices, "stage_times", lambda batch: batches.append(1) or stage_times(batch))
    shared: dict = {}
    found = {depth: price_stages(request, (0, 1), stages=depth, shared=shared, **how) for depth in alone}
    assert len(batches) == len(shared)
    for depth, problem in alone.items():
        for each in fields(Problem):
            if each.init and each.name != "names":
                expected = getattr(problem, each.name)
                np.testing.assert_array_equal(getattr(found[depth], each.name), expected, err_msg=each.name)
    assert np.isfinite(alone[2].time_s).sum() > np.isfinite(alone[16].time_s).sum()


def test_usual_prices_know_how_long_a_chunk_goes_round_over_slow_links():
    """Messages that leave room beside the work still make the way back to the first stage longer than it."""
    request = checked_request(
        load_model("llama3-70b"), load_cluster("4x8xh100-sxm@45Gb/s"), global_batch=128, seq_len=8192
    )
    roomy = {"reserve_bytes": -1e12}  # memory is no matter here
    problem = scaled(price_stages(request, (0,), by_domain=True, chunks=4, stages=4, apart=True, **roomy), 4)
    tensor = [name.tp == 8 and name.inner_dp == 1 and name.recompute == "none" for name in problem.names]
    for option in np.flatnonzero(np.array(tensor) & (problem.micro_batch <= 2)):
        stops = [21, 41, 61, 82]
        template = tuple(
            StageSpan(option=int(option), start=start, stop=stop)
            for start, stop in zip([0, *stops[:-1]], stops, strict=True)
        )
        one = plan_of(request, problem, Arrangement(templates=(template,), shares=(128,)))
        assert one is not None
        made = interleaved(one, 4)
        assert made is not None
        ours_s = step_seconds(problem, Arrangement(templates=(template,), shares=(4 * 128,)))
        assert ours_s == pytest.approx(engine_seconds(request, [made])[0], rel=0.07)


def test_no_less_memory_is_asked_of_interleaved_pipelines():
    request = asked()
    plain = price_stages(request, (0, 1))
    least = price_stages(request, (0, 1), chunks=4)
    real = price_stages(request, (0, 1), chunks=4, stages=4)
    rooms = plain.max_in_flight[[plain.names.index(name) for name in least.names]]
    alone = plain.types[0, -1]
    enough = (plain.lengths >= 4) | (np.arange(len(plain.lengths)) == alone)
    assert np.array_equal(np.where(enough, rooms, 0), least.max_in_flight)
    assert np.all(np.minimum(real.max_in_flight, 4) <= np.minimum(rooms, 4))
    assert np.any(np.minimum(real.max_in_flight, 4) < np.minimum(rooms, 4))


@pytest.mark.parametrize("chunks", [2, 4])
def test_every_device_of_an_interleaved_pipeline_has_layers_for_all_its_chunks(chunks):
    """What the problem allows can be laid out in chunks, and nothing else can."""
    request, rng, tried = asked(), np.random.default_rng(chunks), 0
    problem = price_stages(request, (0, 1), chunks=chunks, stages=4, by_domain=True)
    plain = price_stages(request, (0, 1), by_domain=True)
    while tried < 60:
        template = _template(plain, rng, np.array(plain.counts))
        if template is None or any(plain.names[part.option] not in problem.names for part in template):
            continue
        held = plan_of(request, plain, Arrangement(templates=(template,), shares=(request.global_batch,)))
        sizes = [stage.num_layers for stage in held.groups[0].stages]
        rounds = replace(held.groups[0], share=len(sizes) * held.groups[0].micro_batch)
        laid = interleaved(replace(held, groups=(rounds,)), chunks)
        options = [problem.names.index(plain.names[part.option]) for part in template]
        types = [problem.types[part.start, part.stop] for part in template]
        rooms = problem.max_in_flight[options, types]
        assert (laid is not None) == (min(sizes) >= chunks)
        assert min(sizes) >= chunks or not rooms.all()
        tried += 1


def _ends_s(problem: Problem, template: Template, batch: int) -> np.ndarray:
    """Seconds of one of two pipelines by its share, infinite where that does not come in rounds."""
    rate, size = pipeline_rate(problem, template), int(problem.micro_batch[template[0].option])
    found = np.full(batch + 1, np.inf)
    for share in range(1, batch + 1):
        if -(-share // size) % len(template) == 0:
            found[share] = rate.seconds(2 * share) + tail_seconds(problem, template, 2)
    return found


@pytest.mark.parametrize("batch", [48, 50, 17])
def test_samples_come_in_rounds_and_what_is_left_over_goes_to_one_pipeline(batch):
    request, rng = asked(), np.random.default_rng(batch)
    problem, tried = scaled(price_stages(request, (0, 1), by_domain=True), 2), 0
    for _ in range(1500):
        first = _template(problem, rng, np.array(problem.counts))
        taken = None if first is None else problem.takes[[part.option for part in first]].sum(0)
        second = None if taken is None else _template(problem, rng, np.array(problem.counts) - taken)
        if second is None:
            continue
        found = in_rounds(problem, (first, second), batch)
        if found is None:
            continue
        assert sum(found.shares) == batch
        passes = [
            -(-share // int(problem.micro_batch[one[0].option]))
            for one, share in zip(found.templates, found.shares, strict=True)
        ]
        odd = [number % len(one) > 0 for one, number in zip(found.templates, passes, strict=True)]
        ends = [_ends_s(problem, one, batch) for one in found.templates]
        possible = [max(ends[0][n], ends[1][batch - n]) for n in range(1, batch)]
        possible = [seconds for seconds in possible if np.isfinite(seconds)]
        assert sum(odd) == (not possible)
        if possible:
            mine = max(own[share] for own, share in zip(ends, found.shares, strict=True))
            assert mine == pytest.approx(min(possible))
        tried += 1
    assert tried >= 10


def test_only_what_the_framework_interleaves_and_blocks_alike():
    assert chunk_counts(asked()) == (4, 2)
    assert chunk_counts(asked(framework="megatron-deepspeed")) == ()
    assert chunk_counts(asked(model="deepseek-v2-lite")) == ()


def test_the_space_of_several_settings_is_what_all_their_bounds_speak_of():
    wide, narrow, other = (SimpleNamespace(space=text) for text in ("a; b", "a", "c"))
    assert shared_space(wide, [wide, narrow]) == "a"
    assert shared_space(wide, [wide, other]) == "a; b"


def test_an_interleaved_plan_that_was_not_chosen_leaves_the_bound_alone():
    """By the closed form the interleaved plan was the faster one; the graph said otherwise."""
    chosen, other = _ranked(num_layers=4), _ranked(num_layers=8)
    wider = WiderSpace(
        found=frozenset({other.plan.groups}),
        words="or more",
        lower_bound_step_time_s=1e-9,
        note="of each kind",
    )
    result = PlanResult(
        plans=(chosen, other),
        lower_bound_step_time_s=0.5 * chosen.prediction.step_time_s,
        evaluated=2,
        pruned=0,
        wall_s=0.0,
        space="some",
        wider=(wider, replace(wider, found=frozenset(), words="other")),
    )
    assert result.bounded() == replace(result, wider=())
    last = replace(result, plans=(other, chosen)).bounded()
    assert last.lower_bound_step_time_s == 1e-9 and last.notes == ("of each kind",)
    assert last.space == "some; or more"
    assert last.gap == pytest.approx(other.prediction.step_time_s / 1e-9 - 1.0)


def _ranked(num_layers):
    model = load_model("gpt2-large")
    model = replace(model, blocks=model.blocks[:num_layers])
    found = plan(model, load_cluster("1x2xl4"), global_batch=8, seq_len=256, budget_s=1.0)
    return found.plans[0]


@pytest.mark.slow
def test_a_faster_interleaved_plan_is_chosen_and_the_bound_says_of_what_it_speaks(even_clock):
    """Four devices and sixteen micro-batches: a pipeline fills for a sixth of the step."""
    pytest.importorskip("scipy")
    model, cluster = load_model("gpt2-xl"), load_cluster("1x4xl4+1x4xrtx-3090@25Gb/s")
    found = plan(model, cluster, global_batch=32, seq_len=4096, budget_s=8.0)
    best = found.plans[0]
    check_plan(best.plan, model, cluster)
    assert best.prediction.memory.fits
    assert best.plan.groups[0].schedule == "interleaved" and best.plan.groups[0].num_chunks > 1
    assert 0.0 < found.lower_bound_step_time_s <= best.prediction.step_time_s
    assert INTERLEAVED in found.space or "all virtual stages" in found.space
    assert found.gap == pytest.approx(best.prediction.step_time_s / found.lower_bound_step_time_s - 1.0)


def test_depths_are_searched_once_more_with_one_tail_for_all_pipelines():
    """Not longer than a part of the longest one of the best plan by tails of their own, which then waits."""
    pytest.importorskip("numba")
    search = MixedSearch(asked())
    problem = search._interleaved((0, 1), 2, 4)
    own = ProblemSearch(problem, target_gap=0.01, filling="full")
    while not own.has_plan:
        own.advance(TimeBudget.of(60.0))
    depth = Subspace(price=lambda: problem, time_plans=lambda *_: np.inf, floor_s=lambda: 0.0)
    search._join_tails(depth)
    assert not search._joined  # not searched yet
    depth.problem, depth.search = problem, own
    search._depths[2, 4] = depth
    search._join_tails(depth)
    search._join_tails(depth)
    (joined,) = search._joined.values()
    assert search.others == [joined]
    alike = joined.price()
    (tail_s,) = set(alike.tail_s[alike.tail_s < 1e5].tolist())
    assert 0.0 < tail_s < depth.longest_tail_s
    assert (problem.tail_s[alike.tail_s == tail_s] <= tail_s).all()
    assert not depth.is_wanted()
    joined.is_closed = True
    assert depth.is_wanted()
    again = ProblemSearch(alike, target_gap=0.01, filling="full")
    while not again.has_plan:
        again.advance(TimeBudget.of(60.0))
    best = again.state.best
    assert all(
        tail_seconds(problem, one, len(best.templates)) <= tail_s * (1 + 1e-9) for one in best.templates
    )


def test_a_bound_on_chunks_is_above_that_from_work_by_the_prices_of_its_own_problem():
    """Those of 1f1b pipelines, its floor, may lie below: that is no proof that pipelines were priced."""
    subspace = Subspace(price=lambda: None, time_plans=lambda *_: np.inf, floor_s=lambda: 1.0, finds=False)
    subspace.search = SimpleNamespace(
        is_sound=True, is_filled=False, lower_bound_s=1.11, ladder={"compute": 1.1}
    )
    assert subspace.bound_s == 1.11
    assert not subspace.is_bounded and not subspace.is_priced
    subspace.search.lower_bound_s, subspace.search.is_filled = 1.2, True
    assert subspace.is_bounded and subspace.is_priced


@pytest.mark.parametrize("stages", range(1, 20))
def test_the_first_depth_that_is_searched_holds_the_plan_that_it_is_near(stages):
    made = SimpleNamespace(groups=[SimpleNamespace(stages=[None] * stages)])
    first = next(depth for _, depth in depths(asked(), made))
    assert min(stages, 16) <= first < max(4, 2 * stages)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_search_of_a_depth_ends_no_later_than_the_planners_of_one_shape(stages):
    problem = MixedSearch(asked())._interleaved((0, 1), 2, stages)
    named = ["hetpipe", "pipedream"]
    depth = Subspace(
        price=lambda: problem, time_plans=lambda *_: np.inf, floor_s=lambda: 0.0, planners=list(named)
    )
    found = SimpleNamespace(timed=[], best_s=np.inf, known_s=np.inf)
    while depth.is_fresh:
        depth.advance(found, TimeBudget(np.inf))
    best_s = depth.search.state.best_s
    asked_for = named[: len(named) - len(depth.planners)]
    assert asked_for
    assert all(best_s <= BASELINES[name].best(problem).seconds * (1.0 + 1e-9) for name in asked_for)
    assert not depth.planners or best_s < BASELINES[asked_for[-1]].best(problem).seconds


def test_a_plan_is_laid_out_that_its_closed_form_promises_a_little_too_little_of():
    """Chunks of 6 and 5 layers take 2.5 % less once they are laid out."""
    model = load_model("gpt2-large")
    model = replace(model, blocks=model.blocks[:9])
    how = {"global_batch": 7, "seq_len": 1024, "precision": "fp16"}
    some = checked_request(model, load_cluster("1x2xt4@100Gb/s"), memory_margin=0.0, **how)
    stages = (Stage(ranks=(0,), layers=((0, 6),), zero=1), Stage(ranks=(1,), layers=((6, 11),), zero=1))
    groups = (Group(share=7, micro_batch=2, schedule="1f1b", stages=stages),)
    made = interleaved(Plan(groups=groups, framework="megatron-core", **how), 2)
    (promised_s,) = engine_seconds(some, [made])
    best_s = 0.985 * promised_s
    found = MixedFound(request=some, timed=[(best_s, replace(made, groups=groups))])
    assert found.take_interleaved(made) < best_s


def test_stages_of_unlike_widths_share_a_short_micro_batch_out_of_the_bounded_space():
    """Of a last 3 samples a rank has three quarters of its 4, and one of two has all of its 2."""
    stages = (Stage(ranks=(0,), layers=((0, 4),)), Stage(ranks=(1, 2), layers=((4, 8),)))
    for share, alike in ((7, False), (6, True), (8, True)):
        groups = (Group(share=share, micro_batch=4, schedule="1f1b", stages=stages),)
        assert are_short_alike(Plan(global_batch=share, seq_len=1024, groups=groups)) is alike
