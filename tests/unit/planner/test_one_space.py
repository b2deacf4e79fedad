"""One space for every cluster: what is written otherwise, or holds a device more, is never worse."""

import random
from dataclasses import replace

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.grid.equal_nodes import search_homogeneous
from foreshard.planner.mixed import search as search_module
from foreshard.planner.mixed.node_sets import are_apart
from foreshard.planner.mixed.search import MixedSearch
from foreshard.planner.pricing.engine_times import engine_seconds
from foreshard.planner.pricing.stage_options import fits_alone, stage_options
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import checked_request, in_fewest_groups
from foreshard.planner.search import plan
from foreshard.planner.solver.problem import Arrangement, StageSpan, faults, step_seconds
from foreshard.predict.step import predict
from foreshard.spec.plan import Group, Plan, Stage

pytest.importorskip("scipy", reason="pipelines that differ need the extra `plan`")

LOST = 0.01
"""Part of a step that searches promise to come to."""
ODD = [
    ("llama3-8b", "7x8xh100-sxm", 2.37),
    pytest.param("llama2-13b", "5x8xa100-sxm-80gb", 13.3, marks=pytest.mark.slow),
]
"""Seconds that hand-made unequal pipelines need; equal ones take 2.68 and 14.1 s."""
DEVICES = ("h100-sxm", "a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm-32gb", "rtx-4090", "l4")


def step_s(model, cluster, **asked):
    found = plan(load_model(model), load_cluster(cluster), **asked)
    return found.plans[0].prediction.step_time_s if found.plans else float("inf")


def test_a_stage_alone_takes_all_of_its_share_at_once(even_clock):
    """A share between two sizes of the space is one short micro-batch, where memory is for no more."""
    model, cluster = load_model("gpt2-large"), load_cluster("1x1xrtx-3090+1x1xt4@400Gb/s")
    model = replace(model, blocks=model.blocks[:8])
    asked = {"global_batch": 15, "seq_len": 1024, "precision": "fp16", "memory_margin": 0.0}
    found = plan(model, cluster, budget_s=3.0, **asked)
    alone = {"layers": ((0, 10),), "tp": 1, "zero": 1, "recompute": "none"}
    known = replace(
        found.plans[0].plan,
        groups=(
            Group(share=12, stages=(Stage(ranks=(0,), **alone),), micro_batch=16, schedule="1f1b"),
            Group(share=3, stages=(Stage(ranks=(1,), **alone),), micro_batch=4, schedule="1f1b"),
        ),
    )
    by_hand = predict(model, cluster, known, engine="graph", timeline=False)
    assert by_hand.memory.fits
    assert found.plans[0].prediction.step_time_s <= by_hand.step_time_s * (1 + 1e-3)
    assert found.lower_bound_step_time_s <= by_hand.step_time_s


@pytest.mark.parametrize(("model", "cluster", "known_s"), ODD)
def test_equal_nodes_that_no_degree_divides_are_all_used(model, cluster, known_s, even_clock):
    asked = {"global_batch": 256, "seq_len": 4096, "budget_s": 6.0, "memory_margin": 0.0}
    found = plan(load_model(model), load_cluster(cluster), **asked)
    assert max(found.ladder.values()) <= found.plans[0].prediction.step_time_s <= known_s
    assert "any shares" in found.space and "as evenly as they go" in found.space
    assert "faster" not in found.space, "the bound is none on plans that its space leaves out"
    request = checked_request(load_model(model), load_cluster(cluster), **asked)
    assert found.lower_bound_step_time_s < search_homogeneous(request).lower_bound_step_time_s


@pytest.mark.parametrize("cluster", ["3x4xh100-sxm+4x4xh100-sxm", "1x2xl4+2x2xl4+1x1xl4"])
def test_equal_nodes_written_apart_are_one_group(cluster):
    apart = load_cluster(cluster)
    whole = in_fewest_groups(apart)
    assert len(whole.nodes) < len(apart.nodes) and whole.num_devices == apart.num_devices
    model = load_model("gpt2-xl")
    found = plan(model, apart, global_batch=20, seq_len=1024, budget_s=3.0).plans[0]
    assert predict(model, apart, found.plan, engine=found.prediction.engine).step_time_s == pytest.approx(
        found.prediction.step_time_s, rel=1e-9
    )


def test_link_domains_across_nodes_stay_apart():
    rack = load_cluster("4x4xgb200-nvl72").nodes[0]
    cluster = replace(load_cluster("4x4xgb200-nvl72"), nodes=(rack, rack))
    assert in_fewest_groups(cluster) == cluster


def drawn(seed: int) -> tuple[str, str, dict[str, int]]:
    """Return a small cluster, the same with a node more, and what to train."""
    draw = random.Random(seed)
    rate = draw.choice(["", "@10Gb/s", "@100Gb/s", "@400Gb/s"])
    terms = [
        f"{draw.choice((1, 1, 2))}x{draw.choice((1, 2, 4))}x{draw.choice(DEVICES)}"
        for _ in range(draw.choice((1, 1, 2)))
    ]
    more = f"1x{draw.choice((1, 2, 4))}x{draw.choice(DEVICES)}"
    asked = {"global_batch": draw.choice((7, 16, 24, 60)), "seq_len": draw.choice((1024, 2048))}
    return "+".join(terms) + rate, "+".join([*terms, more]) + rate, asked


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_node_more_never_makes_the_answer_slower(seed, even_clock):
    fewer, more, asked = drawn(seed)
    least = step_s("gpt2-large", fewer, precision="fp16", budget_s=3.0, **asked)
    assert step_s("gpt2-large", more, precision="fp16", budget_s=3.0, **asked) <= least * (1 + LOST), (
        fewer,
        more,
        asked,
    )


def test_without_the_extra_equal_nodes_have_the_grid_and_say_so(monkeypatch):
    monkeypatch.setattr(search_module, "find_spec", lambda name: None)
    found = plan(load_model("gpt2-large"), load_cluster("1x3xl4"), global_batch=8, seq_len=1024)
    assert found.plans and search_module.WITHOUT_EXTRA in found.notes and "any shares" not in found.space


def test_ranks_of_a_stage_may_take_a_small_batch_at_once(even_clock):
    model = load_model("gpt2-xl")
    model = replace(model, blocks=model.blocks[:7])
    cluster = load_cluster("1x3xv100-sxm-16gb+1x1xrtx-3090@1Gb/s")
    found = plan(model, cluster, global_batch=7, seq_len=512, precision="fp16", budget_s=3.0).plans[0]
    stage = Stage(ranks=(0, 1, 2), layers=((0, 9),), zero=1)
    group = Group(share=7, stages=(stage,), micro_batch=9, schedule="1f1b", sp=False)
    by_hand = predict(model, cluster, replace(found.plan, groups=(group,)), engine="analytical")
    assert found.prediction.step_time_s <= by_hand.step_time_s * (1 + 1e-9)


def test_a_stage_of_the_head_alone_is_in_the_space():
    """More devices than blocks: the bound speaks of pipelines whose last stage is the head."""
    model = load_model("gpt2-xl")
    model = replace(model, blocks=model.blocks[:3])
    cluster = load_cluster("1x3xt4+1x1xt4@100Gb/s")
    found = plan(
        model, cluster, global_batch=18, seq_len=1024, precision="fp16", budget_s=5.0, memory_margin=0
    )
    cuts = ((2, (0, 2)), (3, (2, 3)), (1, (3, 4)), (0, (4, 5)))
    stages = tuple(Stage(ranks=(rank,), layers=(cut,), recompute="none") for rank, cut in cuts)
    made = replace(found.plans[0].plan, groups=(Group(share=18, stages=stages, micro_batch=1),))
    by_hand = predict(model, cluster, made)
    assert found.lower_bound_step_time_s <= by_hand.step_time_s
    assert found.plans[0].prediction.step_time_s <= by_hand.step_time_s * 1.01


@pytest.mark.parametrize("objective", ["cost", "energy"])
def test_the_cheapest_of_as_many_devices_comes_before_the_fastest(objective):
    """On no grid does a search give up since others are faster, nor does it go on for a bound on time."""
    model, cluster = load_model("gpt2"), load_cluster("1x1xh100-sxm+1x1xt4@100Gb/s")
    asked = {"global_batch": 8, "seq_len": 512, "precision": "fp16", "objective": objective, "top": 1}
    search = MixedSearch(checked_request(model, cluster, engine="analytical", **asked))
    stage = Stage(ranks=(0,), layers=((0, 14),), zero=1)
    fast = Plan(global_batch=8, seq_len=512, precision="fp16", groups=(Group(share=8, stages=(stage,)),))
    slow = replace(fast, groups=(Group(share=8, stages=(replace(stage, ranks=(1,)),)),))
    slow_s, fast_s = search.found.take(slow), search.found.take(fast)
    assert fast_s < slow_s
    first, second = search._predictions()[:2]
    assert first.plan == slow and second.plan == fast
    of = {"cost": lambda one: one.cost.usd_per_step, "energy": lambda one: one.energy_j_per_step}[objective]
    assert of(first) < of(second)
    assert all(grid.promise_s(1e-9) > 0.0 for grid in search.even)
    assert search._holding_down() is None


def test_a_device_more_in_a_node_costs_no_energy():
    """It may be left out: joules are those of devices in use."""
    asked = {"global_batch": 2, "seq_len": 256, "objective": "energy", "memory_margin": 0.0}
    one, two = (
        plan(load_model("gpt2"), load_cluster(cluster), **asked).plans[0].prediction.energy_j_per_step
        for cluster in ("1x1xl4", "1x2xl4")
    )
    assert two <= one * (1 + 1e-3)


@pytest.mark.parametrize("seq_len", [1024, 2048, 4096])
def test_interleaved_pipelines_take_as_many_samples_at_once_as_others(seq_len):
    """Save all of the batch, which is one micro-batch: 1f1b plans of the space are of it in chunks, too."""
    request = checked_request(
        load_model("gpt2-xl"), load_cluster("1x2xh100-sxm"), global_batch=64, seq_len=seq_len
    )
    plain = {kind for kind in stage_options(request, (0,)) if not fits_alone(request, kind)}
    several = {kind for kind in plain if kind.samples < request.global_batch}
    assert several <= set(stage_options(request, (0,), at_once=False))


def in_a_row(first: tuple[int, ...], last: tuple[int, ...]) -> Group:
    """Return a pipeline of two stages on some ranks, half of a batch of 14."""
    made = (Stage(ranks=ranks, layers=(span,), zero=1) for ranks, span in ((first, (0, 4)), (last, (4, 6))))
    return Group(share=7, stages=tuple(made), micro_batch=1)


def test_nodes_of_odd_sizes_hold_stages_of_any_and_pipelines_beside_each_other():
    """On five devices two pipelines of two took 7 % less than the printed bound; no stage had two of them."""
    model = load_model("gpt2-xl")
    model = replace(model, blocks=model.blocks[:4])
    asked = {"global_batch": 14, "seq_len": 2048, "engine": "analytical"}
    request = checked_request(model, load_cluster("1x5xa10@1Gb/s"), **asked)
    assert {kind.num_devices for kind in stage_options(request, (0,))} == {1, 2, 3, 4, 5}
    problem = price_stages(request, (0,), by_domain=True, every=True)
    single = next(
        i
        for i, kind in enumerate(problem.names)
        if kind.num_devices == kind.micro_batch == 1 and kind.recompute == "none"
    )
    template = tuple(StageSpan(option=single, start=a, stop=b) for a, b in ((0, 4), (4, 6)))
    both = Arrangement(templates=(template, template), shares=(7, 7))
    assert not faults(problem, both)
    made = Plan(global_batch=14, seq_len=2048, groups=(in_a_row((0,), (1,)), in_a_row((2,), (3,))))
    assert step_seconds(problem, both, filling="least") <= engine_seconds(request, [made])[0] * (1 + 1e-9)
    several = checked_request(model, load_cluster("2x3xa10@100Gb/s"), **asked)
    assert {kind.num_devices for kind in stage_options(several, (0,))} == {1, 2, 3, 6}


def test_a_bound_speaks_of_pipelines_that_keep_apart_or_says_that_it_does_not():
    nodes = load_cluster("2x4xl4+1x4xa10@100Gb/s")

    def apart(*groups: Group) -> bool:
        return are_apart(nodes, Plan(global_batch=14, seq_len=512, groups=groups))

    assert apart(in_a_row((0,), (1,)), in_a_row((4,), (5,)))
    assert not apart(in_a_row((0,), (1,)), in_a_row((2,), (3,)))
    assert apart(in_a_row((8,), (9,)), in_a_row((10,), (11,))), "node groups of one domain know no other"
    assert apart(in_a_row((0,), (4,)), in_a_row((5,), (1,))), "of other layers"
    assert not apart(in_a_row((0,), (1,)), in_a_row((4, 5, 6), (7,)))


def test_one_device_need_not_shard_in_a_framework_that_does():
    """By joules, from the grid, it is as by time."""
    model = load_model("gpt2")
    cluster, asked = load_cluster("1x1xl4"), {"global_batch": 4, "seq_len": 256, "framework": "fsdp2"}
    found = [
        search_homogeneous(checked_request(model, cluster, objective=objective, engine="analytical", **asked))
        for objective in ("energy", "time")
    ]
    assert {one.plans[0].plan.groups[0].stages[0].zero for one in found} == {1}
    assert found[0].plans[0].prediction.step_time_s == found[1].plans[0].prediction.step_time_s


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_equal_devices_share_samples_that_do_not_divide_over_them_in_any_framework(objective, even_clock):
    """Devices of a node are paid for: with all three in use a step is shorter and cheaper."""
    model, cluster = load_model("gpt2"), load_cluster("1x3xl4")
    model = replace(model, blocks=model.blocks[:4])
    asked = {"global_batch": 11, "seq_len": 1000, "framework": "deepspeed", "memory_margin": 0.0}
    found = plan(model, cluster, objective=objective, budget_s=3.0, **asked).plans[0]
    stage = Stage(ranks=(0, 1, 2), layers=((0, 6),), zero=1)
    by_hand = replace(found.plan, groups=(Group(share=11, stages=(stage,), micro_batch=12),))
    assert found.prediction.step_time_s <= predict(model, cluster, by_hand).step_time_s * (1 + 1e-3)
