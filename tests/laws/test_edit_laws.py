"""An edit of a priced step gives what a fresh prediction of the edited input gives, wherever both exist."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.errors import SpecError
from foreshard.graph.program import ProgramBuilder
from foreshard.predict import predict
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.critical import critical_path, critical_tasks
from foreshard.predict.graph.edits import (
    CLASSES,
    OVERLAPS,
    rewired,
    sped_up,
    takes,
    with_micro_batches,
    with_transfers_of,
)
from foreshard.predict.graph.engine import PricedStep
from foreshard.predict.tasks.kernels import KERNELS
from foreshard.sim import critical_path as execution

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, faster, runs

EXACT = 1e-9
law = settings(max_examples=20, deadline=None)


def _case(model, cluster, plan):
    return PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))


def priced(model, cluster, plan, constants=None):
    case = _case(model, cluster, plan)
    return PricedStep.of(case, build_batch([case], constants or TrainingConstants()))


def seconds(step, prices=None):
    return sum(step.parts(prices).values())


def with_recompute(plan, rule):
    groups = tuple(
        replace(group, stages=tuple(replace(stage, recompute=rule) for stage in group.stages))
        for group in plan.groups
    )
    return replace(plan, groups=groups)


@pytest.mark.parametrize("name", OVERLAPS)
@law
@given(run=runs(), on=st.booleans())
def test_an_overlap_switched_by_an_edit(name, run, on):
    model, cluster, plan, _ = built(run)
    before = priced(model, cluster, replace(plan, comm={**plan.comm, name: not on}))
    assume(takes(before.prices, name))
    after = priced(model, cluster, replace(plan, comm={**plan.comm, name: on}))
    edited = seconds(before, rewired(before.prices, {name: on}))
    assert edited == pytest.approx(seconds(after), rel=EXACT)


@law
@given(run=runs(), factor=st.integers(2, 4))
def test_more_micro_batches_by_an_edit(run, factor):
    model, cluster, plan, _ = built(run)
    assume(all(group.share % group.micro_batch == 0 for group in plan.groups))
    groups = tuple(replace(group, share=factor * group.share) for group in plan.groups)
    after = priced(model, cluster, replace(plan, global_batch=factor * plan.global_batch, groups=groups))
    step = priced(model, cluster, plan)
    assert seconds(step, with_micro_batches(step.prices, factor)) == pytest.approx(seconds(after), rel=EXACT)


@law
@given(run=runs(), factor=st.sampled_from([0.5, 2.0, 8.0]), algorithm=st.sampled_from(["ring", "tree"]))
def test_another_network_or_algorithm_by_an_edit(run, factor, algorithm):
    model, cluster, plan, _ = built(run)
    step = priced(model, cluster, plan)
    after = priced(model, faster(cluster, nic=factor, link=factor), replace(plan, collectives=algorithm))
    edited = seconds(step, with_transfers_of(step.prices, after.prices))
    assert edited == pytest.approx(seconds(after), rel=EXACT)


_HOST_TIMES = tuple(
    field.name
    for field in fields(TrainingConstants)
    if field.name.startswith("host_")
    and field.name not in ("host_backward", "host_tensor", "host_sharpness", "host_arm")
)


@law
@given(run=runs(), factor=st.sampled_from([0.5, 2.0, 10.0]))
def test_a_faster_host_by_an_edit(run, factor):
    model, cluster, plan, _ = built(run)
    constants = TrainingConstants()
    quick = replace(constants, **{name: getattr(constants, name) / factor for name in _HOST_TIMES})
    step = priced(model, cluster, plan)
    edited = seconds(step, sped_up(step.prices, {"host": factor}))
    assert edited == pytest.approx(seconds(priced(model, cluster, plan, quick)), rel=EXACT)


@law
@given(run=runs(dense=True))
def test_free_recomputation_of_attention_is_none(run):
    model, cluster, plan, _ = built(run)
    assume(plan.groups[0].stages[0].cp == 1)  # else keys and values are passed again too
    step = priced(model, cluster, with_recompute(plan, "selective:core_attn"))
    edited = seconds(step, sped_up(step.prices, {"recompute": float("inf")}))
    assert edited == pytest.approx(seconds(priced(model, cluster, with_recompute(plan, "none"))), rel=EXACT)


@law
@given(run=runs(), factor=st.sampled_from([0.5, 2.0, 3.0]))
def test_everything_faster_makes_the_step_as_much_faster(run, factor):
    model, cluster, plan, _ = built(run)
    step = priced(model, cluster, plan)
    edited = seconds(step, sped_up(step.prices, dict.fromkeys(CLASSES, factor)))
    assert edited * factor == pytest.approx(seconds(step), rel=EXACT)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=6, deadline=None)
@given(run=runs())
def test_a_faster_class_is_never_slower_and_free_is_the_least(name, run):
    model, cluster, plan, _ = built(run)
    step = priced(model, cluster, plan)
    now, twice, free = (
        seconds(step, sped_up(step.prices, {name: factor})) for factor in (1.0, 2.0, float("inf"))
    )
    # computation that ends sooner hides less of what is beside it, as in test_engine_laws
    slack = 1e-3 if plan.groups[0].schedule == "zb-h1" else EXACT
    assert free <= twice * (1 + slack) and twice <= now * (1 + slack)
    assert now == pytest.approx(seconds(step), rel=EXACT)


@law
@given(run=runs(), name=st.sampled_from(sorted(CLASSES)))
def test_a_prediction_with_speeds_is_the_edit(run, name):
    model, cluster, plan, _ = built(run)
    constants = TrainingConstants()
    made = predict(model, cluster, plan, speeds={name: 2.0}, constants=constants, timeline=False)
    step = priced(model, cluster, plan)
    assert made.step_time_s == pytest.approx(seconds(step, sped_up(step.prices, {name: 2.0})), rel=EXACT)
    assert "2 times as fast" in made.assumptions[0]


@cache
def _small():
    from planned_runs import cluster_of, model_of

    return model_of("llama3-8b"), cluster_of("1x8xh100-sxm")


@pytest.mark.parametrize(
    "options",
    [
        {"speeds": {"attentions": 2.0}},
        {"speeds": {"compute": 0.0}},
        {"speeds": {"compute": -1.0}},
        {"speeds": {"compute": float("nan")}},
        {"speeds": {"compute": 2.0}, "engine": "analytical"},
        {"speeds": {"compute": 2.0}, "network": "flow"},
    ],
)
def test_speeds_that_make_no_sense_are_refused(options):
    from foreshard.spec.degrees import plan_from_degrees

    model, cluster = _small()
    plan = plan_from_degrees(model.num_layers, 8, tp=8, seq_len=1024)
    with pytest.raises(SpecError) as caught:
        predict(model, cluster, plan, **options)
    assert caught.value.rule


@law
@given(run=runs())
def test_the_critical_path_is_one_unbroken_chain(run):
    model, cluster, plan, _ = built(run)
    step, times, _ = priced(model, cluster, plan).executed()
    tasks = critical_tasks(step.program, times)
    ends, starts = times.end_s[tasks], times.start_s[tasks]
    assert starts[0] == 0.0 and ends[-1] == times.makespan_s
    assert np.all(starts[1:] >= ends[:-1])
    stretches = critical_path(step, times)
    assert sum(one.seconds for one in stretches) == pytest.approx(times.makespan_s, rel=EXACT)
    assert all(second >= 0.0 for one in stretches for second in one.parts_s.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_chain_is_as_long_as_the_longest_by_brute_force(data):
    """Every chain of a small program is tried; the one found is the longest, and has no gap."""
    builder, count = ProgramBuilder(), data.draw(st.integers(1, 8))
    before = {}
    last = {}
    durations = []
    for task in range(count):
        resource = data.draw(st.sampled_from("ab"))
        seconds_ = float(data.draw(st.integers(0, 5)))
        after = data.draw(st.lists(st.integers(0, task - 1), unique=True)) if task else []
        builder.add(resource, seconds_, after)
        before[task] = {*after, *([last[resource]] if resource in last else [])}
        last[resource] = task
        durations.append(seconds_)
    program = builder.build()
    times = execution.run(program)

    def longest(task):
        return durations[task] + max(map(longest, before[task]), default=0.0)

    chain = critical_tasks(program, times)
    assert sum(durations[task] for task in chain) == max(map(longest, range(count)))
    assert all(one in before[other] for one, other in pairwise(chain))


@law
@given(run=runs(), factor=st.sampled_from([0.5, 2.0, 5.0]))
def test_all_kernels_faster_are_computation_faster(run, factor):
    """Priced afresh with faster kernels, or edited, with the transfers of which these hide less."""
    model, cluster, plan, _ = built(run)
    step = priced(model, cluster, plan)
    fresh = PricedStep.of(_case(model, cluster, plan), step.batch, dict.fromkeys(KERNELS, factor))
    faster_compute = sped_up(step.prices, {"compute": factor, "recompute": factor})
    edited = seconds(step, with_transfers_of(faster_compute, fresh.prices))
    assert seconds(fresh) == pytest.approx(edited, rel=EXACT)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=6, deadline=None)
@given(run=runs())
def test_a_faster_class_of_kernels_is_never_slower(name, run):
    model, cluster, plan, _ = built(run)
    case, step = _case(model, cluster, plan), priced(model, cluster, plan)
    now, twice, free = (
        seconds(PricedStep.of(case, step.batch, {name: factor})) for factor in (1.0, 2.0, float("inf"))
    )
    slack = 1e-3 if plan.groups[0].schedule == "zb-h1" else EXACT
    assert now == seconds(step)
    assert free <= twice * (1 + slack) and twice <= now * (1 + slack)
