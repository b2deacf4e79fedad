"""Laws of a step whose transfers share a network, and the same step with every rank simulated."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.flow.program import FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate
from foreshard.graph.program import ProgramBuilder
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.engine import graph_times, shared_times
from foreshard.predict.graph.lowering import lower
from foreshard.predict.graph.prices import group_prices
from foreshard.predict.graph.transfers import COLLECTIVES, SharedPorts
from foreshard.predict.tasks.collectives import contention as slowdown
from foreshard.sim import contention, critical_path
from foreshard.sim.contention import Phases, SharedNetwork
from foreshard.spec.prediction import TIME_PARTS

sys.path.insert(0, str(Path(__file__).parent))
from planned_runs import built, cluster_of, faster, model_of, relabelled, runs

FRAMEWORKS = ("megatron-core", "megatron-bridge@26.06", "composer", "megatron-deepspeed@2022")
CLUSTERS = (
    "1x8xh100-sxm",
    "2x8xh100-sxm",
    "2x8xa100-sxm-80gb@100Gb/s",
    "4x8xh100-sxm@400Gb/s",
    "2x8xl40s@100Gb/s",
    str(Path(__file__).parent / "two_racks.toml"),
)
SWITCHES = st.fixed_dictionaries(
    {name: st.booleans() for name in ("grad_overlap", "param_gather_overlap", "p2p_overlap", "tp_overlap")}
)
crowded = runs(frameworks=FRAMEWORKS, clusters=CLUSTERS)


def case_of(run, comm):
    model, cluster, plan, _ = built(run)
    plan = replace(plan, comm=comm)
    return PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(plan.framework))


def lowered(case):
    batch = build_batch([case], TrainingConstants())
    return batch, lower(group_prices(case, batch), float(np.max(slowdown(batch.machine))))


def shared_run(case):
    batch, step = lowered(case)
    return step, SharedPorts.of(case, batch).run(step, compiled=False)


def seconds(case):
    return sum(shared_times(case, build_batch([case], TrainingConstants()), timeline=False)[0].values())


def private(phases: Phases, network: SharedNetwork) -> tuple[Phases, SharedNetwork]:
    """Return the same phases, each on a resource of its own that is as fast as its route."""
    alone, own = network.alone_bytes_per_s(), SharedNetwork()
    route = phases.route.copy()
    for phase in np.flatnonzero(phases.route >= 0).tolist():
        route[phase] = own.route([own.resource("own", float(alone[route[phase]]))], [1.0])
    return replace(phases, route=route), own


@settings(max_examples=25, deadline=None)
@given(crowded, SWITCHES)
def test_transfers_that_share_nothing_take_what_the_closed_forms_say(run, comm):
    case = case_of(run, comm)
    step, shared = shared_run(case)
    program = shared.run.program
    network = SharedNetwork(capacity_bytes_per_s=program.capacity_bytes_per_s.tolist())
    for start, stop in zip(program.route_indptr[:-1], program.route_indptr[1:], strict=True):
        network.route(program.route_resources[start:stop].tolist(), program.route_usage[start:stop].tolist())
    alone = contention.run(step.program, *private(shared.phases, network), compiled=False).times
    expected = critical_path.run(step.program)
    np.testing.assert_allclose(alone.start_s, expected.start_s, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(alone.end_s, expected.end_s, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(crowded, SWITCHES)
def test_sharing_never_shortens_a_step(run, comm):
    case = case_of(run, comm)
    step, shared = shared_run(case)
    closed = critical_path.run(step.program)
    assert np.all(shared.run.times.end_s >= closed.end_s * (1.0 - 1e-9))
    if shared.run.longer_s.max() < 1e-12 and shared.run.waited_s.max() < 1e-12:
        np.testing.assert_allclose(shared.run.times.end_s, closed.end_s, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(crowded, SWITCHES)
def test_no_resource_carries_more_than_its_rate(run, comm):
    _, shared = shared_run(case_of(run, comm))
    makespan_s = shared.run.times.makespan_s
    assert shared.run.program.resource_s.max() <= makespan_s * (1.0 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(crowded, SWITCHES)
def test_parts_sum_to_the_step_and_classes_are_never_faster(run, comm):
    case = case_of(run, comm)
    batch = build_batch([case], TrainingConstants())
    parts, _, classes = shared_times(case, batch, timeline=False)
    step, _ = graph_times(case, batch, timeline=False)
    assert tuple(parts) == TIME_PARTS and min(parts.values()) >= -1e-9 * sum(parts.values())
    assert sum(parts.values()) >= sum(step.values()) * (1.0 - 1e-9)
    for one in classes:
        assert one.collective in COLLECTIVES
        assert one.flow_s >= one.closed_form_s * (1.0 - 1e-9)
        assert 0.0 <= one.utilisation <= 1.0 + 1e-9


@pytest.mark.parametrize("what", ["nic", pytest.param("link", marks=pytest.mark.slow)])
@settings(max_examples=20, deadline=None)
@given(crowded, SWITCHES, st.sampled_from([1.01, 1.5, 4.0]))
def test_a_faster_network_is_never_slower(what, run, comm, factor):
    case = case_of(run, comm)
    before, after = seconds(case), seconds(replace(case, cluster=faster(case.cluster, **{what: factor})))
    slack = 1e-3 if case.plan.groups[0].schedule == "zb-h1" else 1e-9
    assert after <= before * (1.0 + slack)


@settings(max_examples=25, deadline=None)
@given(crowded, SWITCHES, st.randoms(use_true_random=False))
def test_relabelling_ranks_changes_nothing(run, comm, random):
    case = case_of(run, comm)
    per_node = case.cluster.nodes[0].per_node
    nodes, inside = list(range(case.cluster.num_nodes)), list(range(per_node))
    random.shuffle(nodes)
    random.shuffle(inside)
    plan = relabelled(case.plan, lambda rank: nodes[rank // per_node] * per_node + inside[rank % per_node])
    assert seconds(replace(case, plan=plan)) == pytest.approx(seconds(case), rel=1e-9)


def communicators(stage, label: int) -> np.ndarray:
    """Return, for each rank of a stage, a number that the ranks share with which it transfers."""
    place = np.arange(len(stage.ranks))
    name = COLLECTIVES[label]
    if name == "tensor_comm":
        return place // stage.tp
    if name == "expert_comm":
        return place // (stage.ep * stage.etp)
    if name in ("gradient_reduce", "parameter_gather"):
        return place % stage.tp
    return place


def unfolded_times(case, step, shared) -> np.ndarray:
    """Simulate every rank, with ports of its own; ranks of a communicator wait for each other.

    Returns the end of each task of the folded program on each rank, shape (tasks, ranks of a stage).
    """
    folded = shared.run.program
    (group,) = case.plan.groups
    width = len(group.stages[0].ranks)
    owner = np.full(folded.num_tasks, -1)
    owner[shared.run.phase] = shared.phases.task
    for task in range(folded.num_tasks - 2, -1, -1):  # instants before a phase belong to its task
        if owner[task] < 0:
            owner[task] = owner[task + 1]
    owner[owner < 0] = owner.max(initial=0)
    label = np.full(folded.num_tasks, -1)
    label[shared.run.phase] = shared.label
    builder = FlowProgramBuilder(np.repeat(folded.capacity_bytes_per_s, width))
    routes = np.full((folded.num_routes, width), -1)
    for route in range(folded.num_routes):
        ends = slice(*folded.route_indptr[route : route + 2])
        for rank in range(width):
            own = folded.route_resources[ends] * width + rank
            routes[route, rank] = builder.route(own.tolist(), folded.route_usage[ends].tolist())
    builder.new_queue(folded.num_queues * width)
    before_in_queue: dict[int, int] = {}
    for task in range(folded.num_tasks):
        queue = int(folded.queue[task])
        waits = folded.indices[folded.indptr[task] : folded.indptr[task + 1]].tolist()
        waits += [before_in_queue[queue]] if queue in before_in_queue else []
        if queue >= 0:
            before_in_queue[queue] = task
        members = np.arange(width)
        if label[task] >= 0:
            members = communicators(group.stages[int(step.program.stage[owner[task]])], int(label[task]))
        elif step.program.stage[owner[task]] < 0:
            members = np.zeros(width)  # all wait for all gradients
        for rank in range(width):
            alike = np.flatnonzero(members == members[rank]).tolist()
            builder.send(
                int(routes[folded.route[task], rank]) if folded.route[task] >= 0 else -1,
                float(folded.num_bytes[task]),
                latency_s=float(folded.delay_s[task]),
                weight=float(folded.weight[task]),
                queue=queue * width + rank if queue >= 0 else -1,
                after=[before * width + one for before in waits for one in alike],
            )
    return simulate(builder.build(), compiled=False).end_s.reshape(-1, width)


@settings(max_examples=10, deadline=None)
@given(runs(frameworks=FRAMEWORKS, clusters=CLUSTERS, seqs=(1024,)), SWITCHES)
def test_a_rank_that_stands_for_others_runs_as_each_of_them(run, comm):
    case = case_of(run, comm)
    step, shared = shared_run(case)
    assume(shared.run.program.num_tasks <= 1500)
    every = unfolded_times(case, step, shared)
    np.testing.assert_allclose(every, shared.run.flows.end_s[:, None] + 0.0 * every, rtol=1e-9)


def test_transfers_on_one_nic_take_as_long_as_all_their_bytes():
    """Whatever their classes: half of the rate each, then the rest of the longer one."""
    builder = ProgramBuilder()
    for stream in ("one", "other"):
        builder.add(stream, 0.0)
    network = SharedNetwork()
    nic = network.route([network.resource("NIC", 50e9)], [1.0])
    phases = Phases(
        task=np.array([0, 1]),
        delay_s=np.zeros(2),
        num_bytes=np.array([50e9, 150e9]),
        route=np.array([nic, nic]),
        beside=np.zeros(2, dtype=bool),
    )
    run = contention.run(builder.build(), phases, network)
    assert run.times.end_s.tolist() == pytest.approx([2.0, 4.0])
    assert run.longer_s.tolist() == pytest.approx([1.0, 1.0])


def across_racks(bandwidth: float, order: list[int]) -> PlannedRun:
    """Two stages of eight ranks, taken in an order, over two racks that a link joins."""
    cluster = cluster_of(str(Path(__file__).parent / "two_racks.toml"))
    cluster = replace(cluster, links=(replace(cluster.links[0], bandwidth_bytes_per_s=bandwidth),))
    made = api.make_plan(model_of("llama3-8b"), cluster, tp=1, pp=2, global_batch=32, seq_len=1024, zero=0)
    plan = replace(relabelled(made, lambda rank: order[rank]), comm={"grad_overlap": False})
    framework = load_framework(plan.framework)
    return PlannedRun(model=model_of("llama3-8b"), cluster=cluster, plan=plan, framework=framework)


BOTH_IN_BOTH = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
"""Half of each stage in each rack: the gradients of both stages cross the link."""


def test_stages_whose_gradients_cross_a_link_share_it():
    """A link so slow that nothing else counts: alone each stage would take half of what both need."""
    step, shared = shared_run(across_racks(1e6, BOTH_IN_BOTH))
    program, gradients = shared.run.program, shared.label == COLLECTIVES.index("gradient_reduce")
    names = [name for name in shared.resources if name.startswith("link ")]
    assert names == ["link r0 to r1", "link r1 to r0"]
    busy_s = dict(zip(shared.resources, program.resource_s, strict=True))
    alone_s = shared.transfer_s[gradients]
    assert gradients.sum() == 2 and alone_s.sum() == pytest.approx(busy_s["link r0 to r1"], rel=1e-3)
    makespan_s = shared.run.times.makespan_s
    assert makespan_s == pytest.approx(alone_s.sum(), rel=0.01) and makespan_s > 1.5 * alone_s.max()
    assert critical_path.run(step.program).makespan_s == pytest.approx(alone_s.max(), rel=0.01)


def test_messages_cross_a_link_in_their_direction_and_inside_racks_not_at_all():
    _, shared = shared_run(across_racks(12.5e9, list(range(16))))
    busy_s = dict(zip(shared.resources, shared.run.program.resource_s, strict=True))
    forward, backward = busy_s["link r0 to r1"], busy_s["link r1 to r0"]
    assert forward > 0.0 and forward == pytest.approx(backward, rel=1e-9)
    _, beside = shared_run(across_racks(12.5e9, BOTH_IN_BOTH))
    pipeline = beside.phases.route[beside.label == COLLECTIVES.index("pipeline_comm")]
    flows = beside.run.program
    used = {
        beside.resources[one]
        for route in pipeline.tolist()
        for one in flows.route_resources[slice(*flows.route_indptr[route : route + 2])].tolist()
    }
    assert not any(name.startswith("link ") for name in used)
