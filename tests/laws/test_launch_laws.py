"""Laws of the host thread that launches ahead of the device."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.errors import SpecError
from foreshard.graph.program import Kind, ProgramBuilder
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.event.engine import event_times, simulated
from foreshard.predict.event.noise import NoisyStep
from foreshard.predict.graph.launches import AHEAD_S, launch_wait_s, with_launches
from foreshard.predict.graph.lowering import lower
from foreshard.predict.graph.prices import group_prices
from foreshard.sim import critical_path
from foreshard.spec.variation import Noise

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, runs

SECONDS = st.lists(st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.01)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(SECONDS)
def test_one_stream_is_what_a_loop_over_its_tasks_finds(rows):
    device_s, host_s = np.array(rows).T
    builder = ProgramBuilder()
    tasks = builder.add_many(builder.resource("compute"), device_s, kind=Kind.FORWARD, stage=0)
    builder.add("send", 1e-3, [int(tasks[-1])])
    program, (launches,) = with_launches(builder.build(), [("host", tasks, host_s)])
    times = critical_path.run(program)
    ends: list[float] = []  # of the device's tasks
    launched, before = 0.0, 0.0  # end of the last launch, seconds launched before it
    for place, (own_s, launch_s) in enumerate(rows):
        full = [end for end, until in zip(ends, np.cumsum(host_s), strict=False) if before - until >= AHEAD_S]
        starts = max(launched, *full, 0.0)
        ends.append(max(launched, ends[-1] if place else 0.0) + own_s)
        launched, before = starts + launch_s, before + launch_s
    assert times.end_s[tasks] == pytest.approx(ends, rel=1e-12)
    assert times.makespan_s == pytest.approx(max(ends[-1], launched) + 1e-3, rel=1e-12)
    waits = launch_wait_s(program, times, tasks, launches)
    assert waits == pytest.approx(max(ends[-1], times.end_s[launches[-1]]) - device_s.sum(), abs=1e-12)


def case_of(run):
    model, cluster, plan, _ = built(run)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    return case, build_batch([case], TrainingConstants())


def seconds(prices) -> float:
    return critical_path.run(lower(prices, 0.1).program).makespan_s


@settings(max_examples=12, deadline=None)
@given(runs(seqs=(1024,)))
def test_a_host_that_takes_longer_never_shortens_a_step(run):
    prices = [price.on_host_thread() for price in group_prices(*case_of(run))]

    def taking(factor: float) -> list:
        return [replace(price, launch_s=factor * price.launch_s) for price in prices]

    times = [seconds(taking(factor)) for factor in (0.0, 0.5, 1.0, 4.0)]
    assert times == sorted(times)
    without = [replace(price, launch_s=None) for price in prices]
    assert times[0] == pytest.approx(seconds(without), rel=1e-12)
    for price in prices:
        host_s = price.launch_s[..., None] * np.stack(
            [price_repeats(price, s) for s in range(price.num_stages)], 1
        )
        assert seconds([price]) >= host_s.sum(axis=(0, 2, 3)).max() * (1.0 - 1e-9)


def price_repeats(price, stage: int) -> np.ndarray:
    return lower([price], 0.0).groups[0].repeats(stage)


@settings(max_examples=6, deadline=None)
@given(runs(seqs=(1024,), clusters=("1x8xh100-sxm",)), st.sampled_from(["closed-form", "flow"]))
def test_parts_sum_and_ranks_that_are_alike_are_one(run, network):
    case, batch = case_of(run)
    parts, *_ = event_times(case, batch, network=network, timeline=True, host_thread=True, compiled=False)
    step = simulated(case, batch, network=network, host_thread=True, compiled=False)
    usual_s = parts["straggler"]
    assert sum(parts.values()) == pytest.approx(step.times.makespan_s + usual_s, rel=1e-9)
    assert min(parts.values()) >= -1e-9 * step.times.makespan_s
    noisy = NoisyStep.of(case, step.step, step.times, step.shared, compiled=False)
    rank = case.plan.ranks[0]
    times = [float(noisy.seconds(Noise(slow={rank: factor}))[0]) for factor in (1.0, 2.0)]
    assert times[0] == pytest.approx(step.times.makespan_s, rel=1e-9) and times[1] >= times[0]


def test_only_the_event_engine_has_one():
    asked = {"tp": 1, "pp": 2, "global_batch": 8, "seq_len": 512}
    folded = api.request("gpt2-xl", "1x8xh100-sxm", engine="event", **asked).predict()
    thread = api.request("gpt2-xl", "1x8xh100-sxm", engine="event", host_thread=True, **asked).predict()
    assert thread.step_time_s < folded.step_time_s and "ahead of the device" in thread.assumptions[0]
    for engine in ("graph", "analytical"):
        with pytest.raises(SpecError, match="thread of the host") as caught:
            api.request("gpt2-xl", "1x8xh100-sxm", engine=engine, host_thread=True, **asked).predict()
        assert caught.value.key == "--host-thread"
