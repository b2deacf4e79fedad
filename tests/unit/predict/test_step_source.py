"""Steps of several plans that are priced at once."""

from __future__ import annotations

from dataclasses import replace

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.pricing.engine_times import engine_seconds, steps_of
from foreshard.planner.request import checked_request
from foreshard.predict.placement import first_of_equals
from foreshard.predict.step import predict
from foreshard.spec.plan import Group, Plan, Stage


def test_plans_that_are_priced_together_take_what_each_takes_alone():
    """Of one pipeline and of several, of few stages and of many, with and without chunks."""
    cluster = load_cluster("1x2xa100-sxm-80gb+1x2xl4@25Gb/s")
    request = checked_request(
        load_model("gpt2-large"), cluster, global_batch=16, seq_len=512, precision="fp16", budget_s=1.0
    )
    places = request.model.num_layers + 2

    def stage(ranks, *layers, **how):
        return Stage(ranks=ranks, layers=layers, **how)

    def plan(*groups):
        return Plan(
            global_batch=16,
            seq_len=512,
            precision="fp16",
            optimizer="adamw",
            framework="megatron-core",
            groups=groups,
        )

    whole = (0, places)
    uneven = Group(
        share=16,
        micro_batch=3,
        stages=(stage((0,), (0, 25)), stage((1,), (25, 36)), stage((2,), (36, places))),
    )
    in_chunks = Group(
        share=16,
        micro_batch=2,
        schedule="interleaved",
        stages=(stage((0, 1), (0, 8), (20, 28)), stage((2, 3), (8, 20), (28, places))),
    )
    alone = Group(share=16, micro_batch=16, stages=(stage((0, 1), whole, tp=2),), sp=True)
    pair = (
        replace(alone, share=12, micro_batch=4),
        Group(share=4, micro_batch=1, stages=(stage((2,), whole),)),
    )
    plans = [plan(uneven), plan(*pair), plan(in_chunks), plan(alone)]
    steps = steps_of(request)
    assert engine_seconds(request, plans) == [steps.seconds(one) for one in plans]
    assert len(set(engine_seconds(request, plans))) == 4
    assert engine_seconds(request, []) == []


def test_pipelines_that_differ_in_the_numbers_of_their_ranks_alone_are_priced_once():
    """One whose first stage lies in two nodes is another."""
    model, cluster = load_model("gpt2-large"), load_cluster("3x4xa100-sxm-80gb+1x2xl4@25Gb/s")
    places = model.num_layers + 2

    def pipeline(*ranks):
        stages = zip((ranks[:2], ranks[2:]), ((0, 20), (20, places)), strict=True)
        own = tuple(Stage(ranks=own, layers=(span,)) for own, span in stages)
        return Group(share=8, micro_batch=2, schedule="1f1b", stages=own)

    alike = (pipeline(0, 1, 2, 3), pipeline(8, 9, 10, 11), pipeline(4, 5, 6, 7))
    crossing = (pipeline(0, 1, 2, 3), pipeline(7, 8, 9, 10))
    back = (pipeline(0, 1, 4, 5), pipeline(10, 11, 6, 7))  # to a node that comes before its own
    how = {"seq_len": 512, "precision": "fp16", "framework": "megatron-core"}
    for some, first in ((alike, [0, 0, 0]), (crossing, [0, 1]), (back, [0, 0])):
        made = Plan(global_batch=sum(group.share for group in some), groups=some, **how)
        assert first_of_equals(cluster, made) == first
        request = checked_request(
            model, cluster, global_batch=made.global_batch, seq_len=512, precision="fp16"
        )
        (seconds,) = engine_seconds(request, [made])
        each = predict(model, cluster, made, engine="analytical")
        assert seconds == each.step_time_s
        assert len(each.memory.per_stage_peak_bytes) == len(some)
