"""Steps of several plans that are priced at once."""

from __future__ import annotations

from dataclasses import replace

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.pricing.engine_times import engine_seconds, steps_of
from foreshard.planner.request import checked_request
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
