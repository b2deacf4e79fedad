"""No plan of the stated space is faster by the engine than by the problem; alone, both agree."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import frameworks, load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.offers import offers_of
from foreshard.planner.mixed.interleaving import loosest
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_prices import COPIES, FEW_COPIES, joins_alike, price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.solver.enumeration import all_templates
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    StageSpan,
    faults,
    step_seconds,
    takes_of,
    template_faults,
)
from foreshard.planner.solver.solve import ProblemSearch
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.predict.placement import domain_block, link_domains, stage_strides
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan
from foreshard.spec.plan import Plan

BATCH = 64
CASES = [
    ("llama3-8b", "1x8xa100-sxm-80gb+1x8xh100-sxm@400Gb/s", 4096, "bf16"),
    ("llama3.2-1b", "2x4xa100-sxm-40gb+2x4xv100-sxm-16gb@100Gb/s", 2048, "fp16"),
    ("gemma-2b", "1x8xa100-sxm-80gb+2x4xa100-sxm-40gb", 2048, "bf16"),
    ("llama3-70b", "4x8xh100-sxm+4x8xa100-sxm-80gb@400Gb/s", 4096, "bf16"),
    ("llama3.2-1b", "1x1xrtx-3090+1x1xa100-sxm-40gb@10Gb/s", 1024, "bf16"),
    ("gemma-2b", "1x8xa100-sxm-80gb+2x4xa100-sxm-40gb@10Gb/s", 2048, "bf16"),
]


def asked(model: str, cluster: str, seq_len: int, precision: str) -> PlanRequest:
    return checked_request(
        load_model(model),
        load_cluster(cluster),
        global_batch=BATCH,
        seq_len=seq_len,
        precision=precision,
    )


def some_arrangement(problem: Problem, rng: np.random.Generator) -> Arrangement | None:
    """Draw pipelines of random options and cuts, and random shares: of one stage any, else a micro-batch."""
    left, templates = np.array(problem.counts), []
    for _ in range(int(rng.integers(1, 5))):
        size, stages = int(rng.choice(problem.micro_batch)), int(rng.integers(1, 5))
        options = np.flatnonzero((problem.micro_batch == size) & np.all(problem.takes <= left, axis=1))
        if not len(options):
            continue
        chosen = rng.choice(options, stages)
        inner = sorted(rng.choice(np.arange(1, problem.num_layers), stages - 1, replace=False).tolist())
        cuts = [0, *inner, problem.num_layers]
        template = tuple(
            StageSpan(option=int(o), start=a, stop=b)
            for o, a, b in zip(chosen, cuts[:-1], cuts[1:], strict=True)
        )
        if np.all(takes_of(problem, template) <= left) and not template_faults(problem, template):
            templates.append(template)
            left = left - takes_of(problem, template)
    sizes = [int(problem.micro_batch[one[0].option]) if len(one) > 1 else 1 for one in templates]
    if not templates or sum(sizes) > BATCH:
        return None
    extra = rng.multinomial(BATCH - sum(sizes), rng.dirichlet(np.ones(len(sizes))))
    shares = tuple(int(size + more) for size, more in zip(sizes, extra, strict=True))
    return Arrangement(templates=tuple(templates), shares=shares)


def in_space(plan: Plan, request: PlanRequest) -> bool:
    """Return whether a plan keeps the last three terms of the stated space."""
    nodes, domains = request.cluster.nodes, link_domains(request.cluster)
    ends = np.cumsum([group.num_devices for group in nodes])
    stages = [stage for group in plan.groups for stage in group.stages]
    pipeline = {stage.ranks: g for g, group in enumerate(plan.groups) for stage in group.stages}
    for stage in stages:
        (start, stop), *_ = stage.layers
        for other in stages:
            meets = other.layers[0][0] < stop and start < other.layers[0][1]
            if meets and stage.inner_dp > 2 * other.inner_dp:
                return False
            near = set(domains[list(stage.ranks)].tolist()) & set(domains[list(other.ranks)].tolist())
            if meets and near and pipeline[stage.ranks] != pipeline[other.ranks]:
                return False
        group = nodes[int(np.searchsorted(ends, stage.ranks[0], side="right"))]
        strides = stage_strides(plan, stage, domains, domain_block(group), {})
        if len(plan.groups) > 1 and strides["sync_stride"] < stage.tp * (1 - 1e-6):
            return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
@pytest.mark.slow
def test_no_plan_is_faster_by_the_engine(case):
    request, rng = asked(*case), np.random.default_rng(11)
    judged = 0
    for use in ((0, 1), (0,), (1,)):
        problem = price_stages(request, use, by_domain=True, every=True)
        for _ in range(1500):
            arrangement = some_arrangement(problem, rng)
            if arrangement is None or judged >= 40 * (1 + len(use) % 2):
                continue
            used = np.sum([takes_of(problem, one) for one in arrangement.templates], axis=0)
            if not np.all(used[list(use)] > 0):
                continue
            plan = plan_of(request, problem, arrangement)
            if plan is None or not in_space(plan, request):
                continue
            assert not faults(problem, arrangement)
            check_plan(plan, request.model, request.cluster)
            assert step_seconds(problem, arrangement, filling="least") <= engine_seconds(request, [plan])[
                0
            ] * (1 + 1e-9)
            judged += 1
    assert judged >= 20


def test_messages_in_turn_count_once_while_a_pipeline_fills():
    """They hold both stages twice in the steady state; a bound that took as much for filling was too high."""
    request = checked_request(
        load_model("llama3-8b"),
        load_cluster("2x2xa100-sxm-80gb@10Gb/s"),
        global_batch=BATCH,
        seq_len=1024,
        framework="megatron-deepspeed",
    )
    problem = price_stages(request, (0,), by_domain=True)
    alike = [kind.tp == 2 and kind.samples == 8 and kind.recompute == "full" for kind in problem.names]
    option, last = alike.index(True), problem.num_layers
    for cut in (6, 17, 28):
        template = tuple(StageSpan(option=option, start=a, stop=b) for a, b in ((0, cut), (cut, last)))
        arrangement = Arrangement(templates=(template,), shares=(BATCH,))
        real_s = engine_seconds(request, [plan_of(request, problem, arrangement)])[0]
        assert real_s / 1.1 < step_seconds(problem, arrangement, filling="least") <= real_s * (1 + 1e-9)


@pytest.mark.parametrize("share", [64, 60, 48])
def test_a_short_last_micro_batch_may_leave_fewer_gradients_exposed(share):
    """Collectives slow what they run beside, of which it has less."""
    request = checked_request(
        load_model("llama3-8b"),
        load_cluster("2x8xv100-sxm-16gb@100Gb/s"),
        global_batch=share,
        seq_len=1024,
        precision="fp16",
        framework="nemo",
    )
    problem = price_stages(request, (0,), by_domain=True)
    alike = [(kind.tp, kind.samples, kind.recompute) == (8, 24, "full") for kind in problem.names]
    span = StageSpan(option=alike.index(True), start=0, stop=problem.num_layers)
    arrangement = Arrangement(templates=((span,),), shares=(share,))
    real_s = engine_seconds(request, [plan_of(request, problem, arrangement)])[0]
    assert real_s / 1.05 < step_seconds(problem, arrangement, filling="least") <= real_s * (1 + 1e-9)


@pytest.mark.parametrize(("case", "by_domain"), [(3, False), (1, True), (2, True)])
def test_a_pipeline_alone_costs_about_what_the_engine_says(case, by_domain):
    """One kind of device, one pipeline over several nodes: unknown are what unequal stages hide and which
    messages leave a node.

    Tables that the ends share are summed inside a link domain or across, as the pipeline lies.
    """
    request, rng = asked(*CASES[case]), np.random.default_rng(5)
    problem = price_stages(request, (0,) if case != 2 else (1,), by_domain=by_domain)
    compared = 0
    while compared < 15:
        arrangement = some_arrangement(problem, rng)
        if arrangement is None or len(arrangement.templates) > 1:
            continue
        plan = plan_of(request, problem, arrangement)
        if plan is None:
            continue
        seconds = engine_seconds(request, [plan])[0]
        assert step_seconds(problem, arrangement, filling="least") <= seconds * (1 + 1e-9)
        assert step_seconds(problem, arrangement) == pytest.approx(seconds, rel=0.15)
        compared += 1


@pytest.mark.slow
def test_usual_prices_are_nearer_to_what_plans_take_over_slow_links():
    """Half-node stages: at its best each has both neighbours in its node, which no pipeline of four can."""
    request = asked("llama3.2-1b", "2x4xa100-sxm-80gb+2x4xh100-sxm@10Gb/s", 512, "bf16")
    rng = np.random.default_rng(3)
    best = price_stages(request, (0, 1), by_domain=True, every=True)
    usual = price_stages(request, (0, 1), by_domain=True, every=True, apart=True)
    assert best.names == usual.names and np.all(usual.far_s >= best.far_s * (1 - 1e-12))
    off = {"best": [], "usual": []}
    for _ in range(20_000):
        arrangement = some_arrangement(best, rng)
        if arrangement is None or max(len(one) for one in arrangement.templates) < 3:
            continue
        if any(best.takes[stage.option].sum() < 2 for one in arrangement.templates for stage in one):
            continue
        plan = plan_of(request, best, arrangement)
        if plan is not None and len(off["best"]) < 40:
            seconds = engine_seconds(request, [plan])[0]
            off["best"].append(abs(step_seconds(best, arrangement) / seconds - 1.0))
            off["usual"].append(abs(step_seconds(usual, arrangement) / seconds - 1.0))
    assert len(off["best"]) == 40
    assert np.median(off["usual"]) < 0.6 * np.median(off["best"])


def test_usual_prices_know_that_every_pipeline_leaves_its_node():
    """A model that no node holds, on half nodes: every stage has one neighbour in another node."""
    request = asked("llama3-70b", "4x8xa100-sxm-80gb+4x8xh100-sxm@25Gb/s", 4096, "bf16")
    usual = price_stages(request, (0, 1), by_domain=True, every=True, apart=True)
    halves = [
        option
        for option, kind in enumerate(usual.names)
        if (kind.tp, kind.num_devices, kind.micro_batch, kind.recompute) == (4, 4, 1, "full")
    ]
    for stages in (12, 16):  # of each kind of node all halves are used
        cuts = np.linspace(0, usual.num_layers, stages + 1).round().astype(int).tolist()
        options = sorted(halves * (stages // 2))
        spans = tuple(
            StageSpan(option=o, start=a, stop=b) for o, a, b in zip(options, cuts[:-1], cuts[1:], strict=True)
        )
        arrangement = Arrangement(templates=(spans,), shares=(BATCH,))
        plan = plan_of(request, usual, arrangement)
        assert step_seconds(usual, arrangement) == pytest.approx(engine_seconds(request, [plan])[0], rel=0.05)


@pytest.mark.parametrize(
    ("cluster", "shares"),
    [
        ("1x4xt4+1x1xl4@400Gb/s", (2, 2, 2, 2, 5)),
        ("2x4xrtx-3090@100Gb/s", (2,) * 8),
        ("1x8xv100-sxm-16gb@25Gb/s", (2,) * 8),
    ],
)
def test_usual_prices_know_that_more_pipelines_than_link_domains_share_them(cluster, shares):
    """A whole model on every device, shares by speed: gradients of a node leave it over one network card."""
    request = asked("gpt2-large", cluster, 1024, "fp16")
    use = tuple(range(len(request.cluster.nodes)))
    usual = price_stages(request, use, by_domain=True, apart=True, reserve_bytes=-1e11)  # memory is no matter
    whole = {
        kind.node_group: StageSpan(option=option, start=0, stop=usual.num_layers)
        for option, kind in enumerate(usual.names)
        if (kind.num_devices, kind.micro_batch, kind.recompute) == (1, 1, "full")
    }
    templates = [(whole[g],) for g, count in enumerate(usual.counts) for _ in range(count)]
    arrangement = Arrangement(templates=tuple(templates), shares=shares)
    plan = replace(plan_of(request, usual, arrangement), global_batch=sum(shares))
    assert step_seconds(usual, arrangement) == pytest.approx(engine_seconds(request, [plan])[0], rel=0.2)


@pytest.mark.parametrize(("model", "cluster", "seq_len", "precision"), CASES)
def test_the_bound_speaks_of_no_more_pipelines_than_link_domains(model, cluster, seq_len, precision):
    """Stages of the same layers lie in different ones, so each has its own, unless there is one for all."""
    request = asked(model, cluster, seq_len, precision)
    first = np.cumsum([0, *(group.num_devices for group in request.cluster.nodes)])
    for use in ((0, 1), (0,), (1,)):
        ranks = np.concatenate([np.arange(first[g], first[g + 1]) for g in use])
        domains = len(np.unique(link_domains(request.cluster)[ranks]))
        most = price_stages(request, use, by_domain=True, every=True).max_pipelines
        assert most == (domains if domains > 1 else None)


def test_engine_seconds_are_those_of_a_prediction():
    request, rng = asked(*CASES[0]), np.random.default_rng(2)
    problem = price_stages(request, (0, 1))
    arrangement = next(one for one in (some_arrangement(problem, rng) for _ in range(1000)) if one)
    plan = plan_of(request, problem, arrangement)
    found = predict(request.model, request.cluster, plan, engine="analytical")
    assert engine_seconds(request, [plan])[0] == pytest.approx(found.step_time_s, rel=1e-12)


def test_memory_of_the_problem_is_never_more_than_the_engine_finds():
    """A stage with room for its micro-batches fits but for communicators of plans with many pipelines."""
    request, rng = asked(*CASES[3]), np.random.default_rng(9)
    problem = price_stages(request, (0,))
    checked = 0
    while checked < 12:
        arrangement = some_arrangement(problem, rng)
        plan = None if arrangement is None else plan_of(request, problem, arrangement)
        if plan is None:
            continue
        memory = predict(request.model, request.cluster, plan, engine="analytical").memory
        assert memory.peak_bytes <= memory.capacity_bytes * 1.02
        checked += 1


@pytest.mark.parametrize(
    ("model", "blocks", "cluster", "use"),
    [
        ("llama3.2-1b", 7, "1x1xrtx-3090+1x1xv100-sxm-16gb@10Gb/s", (1,)),
        ("llama3.2-1b", 8, "1x4xv100-sxm-16gb", (0,)),
        ("gpt2-xl", 12, "1x2xt4+1x2xrtx-3090", (0, 1)),
    ],
)
def test_every_pipeline_alone_that_fits_by_the_engine_has_room(model, blocks, cluster, use):
    """The bound speaks of all plans that fit: also of those without buffers to sum gradients."""
    whole = load_model(model)
    request = replace(
        asked(model, cluster, 1024, "fp16"),
        model=replace(whole, blocks=whole.blocks[:blocks]),
        cluster=load_cluster(cluster),
    )
    problem, fitted = price_stages(request, use, by_domain=True, every=True), 0
    for option in range(len(problem.takes)):
        template = (StageSpan(option=option, start=0, stop=problem.num_layers),)
        plan = plan_of(request, problem, Arrangement(templates=(template,), shares=(BATCH,)))
        if plan is None or plan.groups[0].micro_batch > BATCH:
            continue
        memory = predict(request.model, request.cluster, plan, engine="analytical", timeline=False).memory
        fitted += memory.fits
        assert problem.max_in_flight[option, problem.types[0, -1]] >= 1 or not memory.fits, problem.names[
            option
        ]
    assert fitted >= 3


def test_compute_alone_is_less_than_all():
    request = asked(*CASES[0])
    whole, least = price_stages(request, (0, 1)), price_stages(request, (0, 1), compute_only=True)
    finite = np.isfinite(whole.time_s)
    assert np.all(least.time_s[finite] < whole.time_s[finite])


@pytest.mark.parametrize("name", sorted({framework.name for framework in frameworks()}))
def test_stages_are_those_that_the_framework_runs(name):
    request = replace(
        asked("gpt2", "1x2xa100-sxm-80gb+1x2xh100-sxm", 1024, "bf16"), framework=load_framework(name)
    )
    problem, offers = price_stages(request, (0, 1)), offers_of(request.framework)
    assert np.isfinite(problem.time_s).any()
    assert (problem.max_stages > 1) == ("1f1b" in offers.schedules)
    assert {kind.zero for kind in problem.names if kind.inner_dp > 1} <= set(offers.zero)


@pytest.mark.parametrize(("model", "cluster", "seq_len", "precision"), CASES)
def test_stages_without_room_are_not_priced_and_those_with_room_do_not_change(
    model, cluster, seq_len, precision
):
    request = asked(model, cluster, seq_len, precision)
    tight = price_stages(request, (0, 1), by_domain=True, every=True)
    roomy = price_stages(request, (0, 1), by_domain=True, every=True, reserve_bytes=-1e12)
    runs = tight.max_in_flight > 0
    assert (roomy.max_in_flight > 0).sum() > runs.sum()
    assert np.isinf(tight.time_s[~runs]).all()
    if tight.domains == roomy.domains and (tight.leave_s is None) == (roomy.leave_s is None):
        np.testing.assert_array_equal(tight.time_s[runs], roomy.time_s[runs])
    assert np.isfinite(tight.far_s[runs]).all()
    assert np.isfinite(tight.tail_s).all()


def fullest(problem: Problem, option: int) -> tuple[StageSpan, ...]:
    """Return the pipeline of one option whose stages hold all the layers they have room for, last first."""
    spans: list[StageSpan] = []
    stop, room = problem.num_layers, problem.max_in_flight[option]
    while stop and len(spans) < problem.max_stages:
        depth = len(spans) + 1
        start = next((i for i in range(stop) if room[problem.types[i, stop]] >= depth), None)
        if start is None:
            return ()
        spans.insert(0, StageSpan(option=option, start=start, stop=stop))
        stop = start
    return tuple(spans) if stop == 0 else ()


def test_full_stages_at_usual_prices_fit_beside_each_other():
    """Communicators of three stages and three pipelines take more than those of two."""
    request = asked("llama3-70b", "8x8xa100-sxm-80gb+1x8xh100-sxm@400Gb/s", 4096, "bf16")
    usual = price_stages(request, (0, 1), by_domain=True, every=True, apart=True)
    tried = 0
    for option, kind in enumerate(usual.names):
        template = fullest(usual, option)
        if (
            kind.node_group
            or kind.samples > 4
            or len(template) < 3
            or 3 * len(template) * kind.num_devices > 64
        ):
            continue
        plan = plan_of(request, usual, Arrangement(templates=(template,) * 3, shares=(20, 20, 24)))
        tried += 1
        assert missing_bytes(request, plan) == 0.0
    assert tried >= 5


def test_chunks_for_which_fewer_pipelines_have_room_are_bounded_together():
    """A device has room for chunks of one layer only where they are two: more pipelines are side by side."""
    request = asked("llama3-8b", "32x1xt4+4x1xp100-pcie-16gb", 1024, "fp16")
    by_chunks = {chunks: price_stages(request, (0,), every=True, chunks=chunks) for chunks in (4, 2)}
    assert by_chunks[4].copies != by_chunks[2].copies
    loose = loosest(by_chunks)
    for problem in by_chunks.values():
        runs = problem.max_in_flight > 0
        for number in loose.copies:
            tail_s = problem.tail_between((number, number))
            assert (loose.tail_between((number, number))[runs] <= tail_s[runs]).all()


def test_tails_at_few_numbers_of_pipelines_are_no_longer_than_at_all():
    """A bound that is priced at few holds for those between."""
    request = asked("gpt2-large", "8x1xt4+4x1xp100-pcie-16gb", 512, "fp16")
    fine, coarse = (
        price_stages(request, (0, 1), every=True, chunks=2, by_domain=True, copies_at=copies)
        for copies in (COPIES, FEW_COPIES)
    )
    assert len(coarse.copies) < len(fine.copies)
    runs = fine.max_in_flight > 0
    for number in range(1, 13):
        own = number, number
        assert (coarse.tail_between(own)[runs] <= fine.tail_between(own)[runs] * (1 + 1e-12)).all()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("use", [(0, 2), (1, 2)])
def test_prices_of_fewer_node_groups_are_no_lower_where_gradients_join_alike(use, chunks):
    """So that what bounds plans on all of them bounds those on fewer: every stage, far and near, any tail."""
    model = load_model("gpt2-xl")
    request = checked_request(
        replace(model, blocks=model.blocks[:6]),
        load_cluster("2x4xh100-sxm+1x4xh200-sxm+1x4xb200-sxm@400Gb/s"),
        global_batch=64,
        seq_len=1024,
    )
    assert joins_alike(request, use, (0, 1, 2)) and not joins_alike(request, (2,), (0, 1, 2))
    more, fewer = (
        price_stages(request, some, every=True, by_domain=True, chunks=chunks) for some in ((0, 1, 2), use)
    )
    rows = [more.names.index(name) for name in fewer.names]
    runs = fewer.max_in_flight > 0
    assert runs.any() and (more.max_in_flight[rows] >= fewer.max_in_flight)[runs].all()
    for table in ("time_s", "far_s", "forward_s", "backward_s"):
        least = getattr(more, table)[rows]
        assert (least <= getattr(fewer, table) * (1 + 1e-12))[runs].all(), table
    for number in fewer.copies:
        least, own = (one.tail_between((number, number)) for one in (more, fewer))
        assert (least[rows] <= own * (1 + 1e-12))[runs].all()
    assert more.max_pipelines >= fewer.max_pipelines


def test_stages_without_a_price_are_compared_without_warnings():
    """Of the stages without room, which have no price, none is worth a try."""
    request = asked("llama3.2-1b", "1x1xrtx-3090+1x1xa100-sxm-40gb@10Gb/s", 1024, "bf16")
    problem = price_stages(request, (0, 1), by_domain=True)
    without_room = problem.max_in_flight == 0
    assert np.isinf(problem.time_s[without_room]).all() and without_room.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = all_templates(problem, every=False)
    assert found
    options, types = zip(
        *((part.option, problem.types[part.start, part.stop]) for one in found for part in one), strict=True
    )
    assert np.isfinite(problem.time_s[options, types]).all()


def test_few_devices_are_solved_exactly_whatever_the_layers():
    """Listed are pipelines of stages worth a try, of which two devices and 24 blocks leave few."""
    request = checked_request(
        load_model("gpt2-medium"), load_cluster("1x1xa100-sxm-80gb+1x1xl4@100Gb/s"), global_batch=16
    )
    search = ProblemSearch(price_stages(request, (0, 1), by_domain=True), target_gap=0.003, filling="full")
    search.advance(TimeBudget.of(600.0))
    assert search.is_sound and not search.is_open
    assert search.lower_bound_s <= step_seconds(search.state.problem, search.state.best, filling="least")
