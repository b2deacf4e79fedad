"""Changes of a plan by the engine's own times, against every cut, micro-batch and rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed.interleaving import interleaved
from foreshard.planner.mixed.local_search import changed_in_chunks, improved
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


@pytest.mark.parametrize("cluster", ["2x1xt4+1x1xl4@10Gb/s", "3x1xl4@25Gb/s"])
@pytest.mark.slow
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


def test_changes_in_chunks_lead_to_the_best_cut_micro_batch_and_rules():
    request = asked("1x2xl4", batch=16)

    def in_chunks(cut, size, rules):
        plain = plan_with(request, pipeline((cut,), ranks=(0, 1), share=16, size=size, rules=rules))
        return interleaved(plain, 2)

    every = [in_chunks(*of) for of in product(range(2, LAYERS - 1), (1, 2, 4, 8), product(RULES, repeat=2))]
    every = [made for made in every if not missing_bytes(request, made)]
    times = engine_seconds(request, every)
    seconds, best_s, before_s = max(times), min(times), float("inf")
    found = every[times.index(seconds)]
    while seconds < before_s:
        before_s = seconds
        for made in changed_in_chunks(request, found, 2):
            check_plan(made, request.model, request.cluster)
            assert made.groups[0].num_chunks == 2
            made_s = float("inf") if missing_bytes(request, made) else engine_seconds(request, [made])[0]
            if made_s < seconds:
                seconds, found = made_s, made
    assert best_s <= seconds <= best_s * 1.002
