"""Changes of a plan by the engine's own times, against every cut, micro-batch and rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed.local_search import improved
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes
from foreshard.planner.request import checked_request
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget
from foreshard.spec.checks import check_plan
from foreshard.spec.plan import Group, Plan, Stage

LAYERS = 7
RULES = ("none", "selective:core_attn+mlp+layernorm", "full")


def asked(cluster, *, batch):
    model = load_model("llama3.2-1b")
    model = replace(model, blocks=model.blocks[: LAYERS - 2])
    return checked_request(model, load_cluster(cluster), global_batch=batch, seq_len=512, precision="fp16")


def plan_with(request, *groups):
    return Plan(
        global_batch=request.global_batch,
        seq_len=512,
        precision="fp16",
        optimizer="adamw",
        framework="megatron-core",
        groups=groups,
    )


def pipeline(cuts, *, ranks, share, size, rules):
    ends = zip([0, *cuts], [*cuts, LAYERS], ranks, rules, strict=True)
    stages = tuple(Stage(ranks=(r,), layers=((a, b),), zero=1, recompute=rule) for a, b, r, rule in ends)
    return Group(share=share, stages=stages, micro_batch=size, schedule="1f1b", sp=False)


@pytest.mark.parametrize("cluster", ["1x3xl4@25Gb/s", "2x1xt4+1x1xl4@10Gb/s", "3x1xl4@25Gb/s"])
def test_the_best_cut_micro_batch_and_rules_are_found_from_anywhere(cluster):
    request = asked(cluster, batch=22)
    every = {}
    for cuts, size, rules in product(
        combinations(range(1, LAYERS), 2), (1, 2, 4, 8), product(RULES[::2], repeat=3)
    ):
        made = plan_with(request, pipeline(cuts, ranks=(0, 1, 2), share=22, size=size, rules=rules))
        if not missing_bytes(request, made):
            every[made.groups] = engine_seconds(request, [made])[0]
    worst, best_s = max(every, key=every.__getitem__), min(every.values())
    found, seconds = improved(request, plan_with(request, *worst), every[worst], ENDLESS)
    assert seconds <= best_s * 1.002
    assert seconds == engine_seconds(request, [found])[0]
    check_plan(found, request.model, request.cluster)


def test_samples_move_to_the_faster_pipeline():
    request = asked("1x1xt4+1x1xh100-sxm@100Gb/s", batch=24)
    even = [pipeline((), ranks=(r,), share=12, size=1, rules=("none",)) for r in (0, 1)]
    plan = plan_with(request, *even)
    found, _ = improved(request, plan, engine_seconds(request, [plan])[0], ENDLESS)
    slow, fast = found.groups
    assert fast.share > 2 * slow.share and fast.share + slow.share == 24
    assert min(group.share - group.micro_batch for group in found.groups) >= 0


def test_a_search_without_time_has_the_plan_it_began_with():
    request = asked("1x3xl4@25Gb/s", batch=22)
    start = pipeline((1, 2), ranks=(0, 1, 2), share=22, size=1, rules=("full",) * 3)
    plan = plan_with(request, start)
    seconds = engine_seconds(request, [plan])[0]
    assert improved(request, plan, seconds, TimeBudget.of(0.0)) == (plan, seconds)
    assert improved(request, plan, seconds, ENDLESS)[1] < seconds
