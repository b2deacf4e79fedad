"""The event engine by measured costs: equal to the longest path, and steps of ranks that differ."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.predict.test_measured import costs, lab, pipeline, plan

from foreshard.errors import SpecError
from foreshard.predict.event.jitter import slowest_of
from foreshard.predict.measured.engine import predict_measured
from foreshard.predict.measured.lowering import lower_measured
from foreshard.predict.measured.noise import drawn_seconds
from foreshard.sim import critical_path
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.variation import Noise

ALIKE = {"a": 1.0, "b": 1.0, "c": 1.0}


def replicas(count, share=8, micro_batch=2):
    """One group of a lone stage whose ranks share its samples."""
    stage = Stage(ranks=tuple(range(count)), layers=((0, 4),), zero=0)
    return plan(Group(share=share, micro_batch=micro_batch, schedule="1f1b", stages=(stage,)))


@settings(max_examples=20, deadline=None)
@given(
    cut=st.integers(1, 3),
    share=st.integers(2, 12),
    micro=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
)
def test_both_engines_find_the_same_step(cut, share, micro, schedule):
    made = plan(
        pipeline([0, cut, 4], [0, 1], share=share, micro_batch=min(micro, share), schedule=schedule),
        pipeline([0, 4], [2], share=3, micro_batch=1),
    )
    graph, event = (predict_measured(costs(), lab(), made, engine=e) for e in ("graph", "event"))
    assert event.step_time_s == pytest.approx(graph.step_time_s, rel=1e-12)
    assert event.time_breakdown_s == pytest.approx(graph.time_breakdown_s, rel=1e-9, abs=1e-15)
    even = predict_measured(costs(), lab(), made, engine="event", noise=Noise(jitter=0.0))
    assert even.step_time_s == pytest.approx(graph.step_time_s, rel=1e-12)


def test_every_task_that_computes_is_a_pass_of_some_ranks():
    made = plan(pipeline([0, 2, 4], [0, 1], schedule="zb-h1"), pipeline([0, 4], [2], share=3, micro_batch=1))
    step = lower_measured(costs(), lab(), made)
    tasks = [task for passes in step.passes for task in passes.tasks]
    assert len(tasks) == len(set(tasks))
    busy_s = sum(float(step.program.duration_s[list(p.tasks)].sum()) for p in step.passes)
    assert busy_s == pytest.approx(sum(sum(r.work_s.values()) for r in step.ranks.values()), rel=1e-9)


def test_a_lone_rank_waits_for_nobody_and_its_passes_even_out():
    made = plan(pipeline([0, 4], [0], share=64, micro_batch=1))
    step = lower_measured(costs(), lab("a"), made)
    alike_s = critical_path.run(step.program).makespan_s
    drawn = drawn_seconds(step, Noise(jitter=0.4, seeds=2000))
    assert drawn.mean() == pytest.approx(alike_s, rel=0.01)
    own_s = sum(step.ranks[0].work_s.values())
    assert drawn.std() == pytest.approx(0.4 * own_s / np.sqrt(128), rel=0.1)  # 128 passes, each by itself


@pytest.mark.parametrize("tail", ["lognormal", "pareto"])
def test_replicas_in_a_stage_wait_for_the_slowest_as_replicas_in_groups_do(tail):
    noise = Noise(jitter=0.3, jitter_tail=tail, seeds=3000)
    told = costs(slow=ALIKE)
    inside = lower_measured(told, lab(), replicas(2))
    apart = lower_measured(
        told, lab(), plan(*(pipeline([0, 4], [r], share=4, micro_batch=1) for r in (0, 1)))
    )
    one, two = drawn_seconds(inside, noise), drawn_seconds(apart, noise)
    assert one.mean() == pytest.approx(two.mean(), rel=0.01)
    assert np.quantile(one, 0.9) == pytest.approx(np.quantile(two, 0.9), rel=0.03)
    # Drawn by hand: two ranks, eight passes each, of two lengths.
    rng = np.random.default_rng(1)
    passes = slowest_of(rng, 1, (3000, 8, 2), jitter=0.3, tail=tail).mean(axis=1).max(axis=1)
    work_s = sum(inside.ranks[0].work_s.values())
    rest_s = critical_path.run(inside.program).makespan_s - work_s
    assert one.mean() == pytest.approx(rest_s + work_s * passes.mean(), rel=0.01)


@settings(max_examples=15, deadline=None)
@given(factor=st.floats(1.0, 9.0), rank=st.integers(0, 2), more=st.floats(1.0, 2.0))
def test_a_slower_rank_never_helps_and_parts_sum(factor, rank, more):
    made = plan(pipeline([0, 2, 4], [0, 1]), pipeline([0, 4], [2], share=3, micro_batch=1))
    steps = [
        predict_measured(
            costs(), lab(), made, engine="event", noise=Noise(jitter=0.1, seeds=4, slow={rank: f})
        )
        for f in (1.0, factor, factor * more)
    ]
    assert steps[0].step_time_s <= steps[1].step_time_s <= steps[2].step_time_s
    for step in steps:
        found = step.step_time_distribution
        assert sum(step.time_breakdown_s.values()) == pytest.approx(step.step_time_s, rel=1e-9)
        added_s = found.jitter_s + found.slow_ranks_s + found.slow_links_s
        assert found.alike_s + added_s == pytest.approx(found.mean_s, rel=1e-9)
        assert found.p50_s <= found.p90_s <= found.p99_s


def test_slow_ranks_are_the_factor_of_their_device():
    made = plan(pipeline([0, 2, 4], [0, 1]), pipeline([0, 4], [2], share=3, micro_batch=1))
    told = costs(slow=ALIKE)
    by_rank = predict_measured(told, lab(), made, engine="event", noise=Noise(slow={1: 3.0}))
    slower = replace(told, slow=ALIKE | {"b": 3.0})
    optimizer_s = slower.optimizer_s("b", range(2, 4), 1) - told.optimizer_s("b", range(2, 4), 1)
    by_device = predict_measured(slower, lab(), made).step_time_s
    assert by_rank.step_time_s == pytest.approx(by_device, abs=1.01 * float(optimizer_s))


def test_the_same_seed_gives_the_same_numbers():
    made = replicas(3)
    one, two, other = (
        predict_measured(costs(), lab(), made, engine="event", noise=Noise(jitter=0.2, seed=s)).step_time_s
        for s in (4, 4, 5)
    )
    assert one == two != other


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"engine": "analytical"}, "--engine: the analytical engine has no tasks"),
        ({"engine": "exact"}, "--engine"),
        ({"noise": Noise(jitter=0.1)}, "Use --engine event"),
        ({"engine": "event", "noise": Noise(slow={7: 2.0})}, "--slow: rank 7 is not in the plan"),
        ({"engine": "event", "noise": Noise(slow_link={1: 2.0})}, "--slow-link: slow links where sums"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked, what):
    made: Plan = replicas(2)
    with pytest.raises(SpecError, match=what):
        predict_measured(costs(), lab(), made, **asked)
