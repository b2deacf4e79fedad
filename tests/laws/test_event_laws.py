"""Laws of the event engine: where nothing is shared, it finds what the graph engine finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.event.engine import event_times, simulated
from foreshard.predict.graph.engine import graph_times, shared_times
from foreshard.spec.prediction import TIME_PARTS

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, runs

SWITCHES = st.fixed_dictionaries(
    {name: st.booleans() for name in ("grad_overlap", "param_gather_overlap", "p2p_overlap", "tp_overlap")}
)


def priced(run, comm):
    model, cluster, plan, _ = built(run)
    plan = replace(plan, comm=comm)
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))
    return case, build_batch([case], TrainingConstants())


@settings(max_examples=60, deadline=None)
@given(runs(), SWITCHES)
def test_without_contention_the_event_engine_is_the_graph_engine(run, comm):
    case, batch = priced(run, comm)
    events, _, classes = event_times(case, batch, network="closed-form", timeline=False, compiled=False)
    graph, _ = graph_times(case, batch, timeline=False)
    assert tuple(events) == TIME_PARTS and classes == ()
    assert sum(events.values()) == pytest.approx(sum(graph.values()), rel=1e-9)
    for name, seconds in graph.items():
        assert events[name] == pytest.approx(seconds, abs=1e-9 * sum(graph.values())), name


@settings(max_examples=30, deadline=None)
@given(runs(), SWITCHES)
def test_with_contention_it_is_the_graph_engine_on_a_shared_network(run, comm):
    case, batch = priced(run, comm)
    events, _, classes = event_times(case, batch, network="flow", timeline=False, compiled=False)
    graph, _, others = shared_times(case, batch, timeline=False, compiled=False)
    assert sum(events.values()) == pytest.approx(sum(graph.values()), rel=1e-9)
    assert [one.collective for one in classes] == [one.collective for one in others]


@settings(max_examples=10, deadline=None)
@given(runs(), SWITCHES)
def test_the_compiled_loop_is_the_plain_one(run, comm):
    case, batch = priced(run, comm)
    plain, fast = (simulated(case, batch, network="flow", compiled=way).times for way in (False, True))
    np.testing.assert_allclose(fast.end_s, plain.end_s, rtol=1e-12)
