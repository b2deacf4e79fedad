"""Schedules on topologies: the figures of SimGrid and of closed forms."""

import numpy as np
import pytest

from foreshard.api import load_cluster
from foreshard.comm.flow import symmetry
from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.program import FlowProgramBuilder
from foreshard.comm.flow.schedule_run import add_schedule, run_schedule
from foreshard.comm.flow.simulation import simulate
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.topology.graph import Edge, SharedResource, Topology, Vertex
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.errors import SpecError

GIB = 2.0**30
NODE = 8
NVLINK_BYTES_PER_S, NVLINK_S = 450e9, 1e-6
NIC_BYTES_PER_S, NIC_S = 50e9, 5e-6


def ring(num_ranks: int, stride: int = 1) -> Schedule:
    """All-reduce of rings that connect every `stride`-th rank; each reduces its part of the size."""
    rounds = 2 * (num_ranks // stride - 1)
    at, source = np.repeat(np.arange(rounds), num_ranks), np.tile(np.arange(num_ranks), rounds)
    before = (at - 1) * num_ranks + (source - stride) % num_ranks
    waits = at > 0
    return Schedule(
        collective="all-reduce",
        algorithm="ring",
        num_ranks=num_ranks,
        chunks=tuple(chunks_of("all-reduce", num_ranks)),
        source=source,
        target=(source + stride) % num_ranks,
        chunk=(source - stride * at) % num_ranks,
        is_reduced=at < rounds // 2,
        channel=np.zeros(len(source), dtype=np.int64),
        indptr=np.concatenate([[0], np.cumsum(waits)]),
        indices=before[waits],
    )


def devices(num_ranks: int) -> tuple[Vertex, ...]:
    return tuple(Vertex(name=f"gpu{i}", kind="device", node=i // NODE) for i in range(num_ranks))


def node_ring(num_ranks: int) -> Topology:
    """Link r goes from rank r to the next: NVLink in the node, a NIC of 50 GB/s between nodes."""
    links = [
        Edge(source=r, target=(r + 1) % num_ranks, bytes_per_s=NIC_BYTES_PER_S, latency_s=NIC_S)
        if r % NODE == NODE - 1
        else Edge(source=r, target=(r + 1) % num_ranks, bytes_per_s=NVLINK_BYTES_PER_S, latency_s=NVLINK_S)
        for r in range(num_ranks)
    ]
    return Topology(vertices=devices(num_ranks), links=tuple(links))


def rails(num_ranks: int, oversubscription: float) -> Topology:
    """Link r goes from rank r to the same place in the next node; eight share the uplink and the downlink."""
    nodes = num_ranks // NODE
    capacity = NODE * NIC_BYTES_PER_S / oversubscription
    shared = [SharedResource(name=f"up{i}", bytes_per_s=capacity) for i in range(nodes)]
    shared += [SharedResource(name=f"down{i}", bytes_per_s=capacity) for i in range(nodes)]
    links = tuple(
        Edge(
            source=r,
            target=(r + NODE) % num_ranks,
            bytes_per_s=NIC_BYTES_PER_S,
            latency_s=NIC_S,
            shared=(r // NODE, nodes + (r // NODE + 1) % nodes),
        )
        for r in range(num_ranks)
    )
    return Topology(vertices=devices(num_ranks), links=links, shared=tuple(shared))


def own_link(source: int, target: int, flow: int) -> tuple[int, ...]:
    return (source,)


@pytest.mark.parametrize(("num_ranks", "ms"), [(64, 42.908584), (256, 45.331901), (1024, 53.137730)])
def test_ring_over_nodes_takes_what_simgrid_finds(num_ranks, ms):
    """design/COMM.md 2a: 2 (N - 1) rounds of 5 us and 1 GiB / N at 50 GB/s, NVLink hidden behind the NIC."""
    run = run_schedule(ring(num_ranks), GIB, node_ring(num_ranks), own_link)
    assert run.seconds * 1e3 == pytest.approx(ms, abs=1e-6)
    alpha_beta_s = 2 * (num_ranks - 1) * (NIC_S + GIB / num_ranks / NIC_BYTES_PER_S)
    assert run.seconds == pytest.approx(alpha_beta_s, rel=1e-9)
    assert run.lower_bound_s == pytest.approx(run.seconds, rel=1e-9)
    assert run.num_sends == 2 * (num_ranks - 1) * num_ranks
    assert run.num_simulated == run.num_sends // (num_ranks // NODE)
    nics = set(range(NODE - 1, num_ranks, NODE))
    assert {resource for resource, _ in run.busiest[: len(nics)]} <= nics


@pytest.mark.parametrize(
    ("num_ranks", "oversubscription", "ms"),
    [
        (64, 4.0, 18.860482),
        (512, 4.0, 21.769292),
        (1024, 4.0, 22.577064),
        (64, 1.0, 4.767620),
        (512, 1.0, 5.914823),
        (1024, 1.0, 6.596766),
    ],
)
def test_rail_rings_share_the_uplink_as_simgrid_finds(num_ranks, oversubscription, ms):
    """design/COMM.md 2a: each of eight rings of N / 8 ranks reduces 1 GiB / 8 over its node's uplink."""
    run = run_schedule(ring(num_ranks, NODE), GIB, rails(num_ranks, oversubscription), own_link)
    assert run.seconds * 1e3 == pytest.approx(ms, abs=1e-6)
    assert run.num_simulated == 2 * (num_ranks // NODE - 1)
    if oversubscription > 1.0:
        assert run.busiest[0][0] >= num_ranks  # an uplink or a downlink
        assert run.busiest[0][1] < 1.0


@pytest.mark.parametrize(("num_ranks", "stride"), [(16, 1), (24, 8), (32, 8)])
def test_folding_changes_nothing(num_ranks, stride):
    topology = node_ring(num_ranks) if stride == 1 else rails(num_ranks, 4.0)
    arguments = (ring(num_ranks, stride), 1e6, topology, own_link)
    folded, whole = run_schedule(*arguments), run_schedule(*arguments, folded=False)
    assert folded.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert folded.num_simulated < whole.num_simulated == whole.num_sends
    assert dict(folded.busiest) == pytest.approx(dict(whole.busiest))


@pytest.mark.parametrize("stride", [1, 8])
def test_the_numbers_of_ranks_and_sends_do_not_matter(stride):
    """Otherwise folding would depend on the generator's order."""
    num_ranks, rng = 32, np.random.default_rng(stride)
    schedule = ring(num_ranks, stride)
    topology = node_ring(num_ranks) if stride == 1 else rails(num_ranks, 4.0)
    rank, send = rng.permutation(num_ranks), rng.permutation(schedule.num_sends)
    # sends of a channel keep their order: sort the new numbers of each rank's sends
    for one in range(num_ranks):
        own = schedule.source == one
        send[own] = np.sort(send[own])
    old = np.argsort(send)
    count = np.diff(schedule.indptr)[old]
    other = Schedule(
        collective="all-reduce",
        algorithm="ring",
        num_ranks=num_ranks,
        chunks=schedule.chunks,
        source=rank[schedule.source[old]],
        target=rank[schedule.target[old]],
        chunk=schedule.chunk[old],
        is_reduced=schedule.is_reduced[old],
        channel=schedule.channel[old],
        indptr=np.concatenate([[0], np.cumsum(count)]),
        indices=send[schedule.indices[schedule.indptr[old][count > 0]]],
    )
    expected = run_schedule(schedule, GIB, topology, own_link)
    place = np.argsort(rank)
    found = run_schedule(other, GIB, topology, lambda source, target, flow: (int(place[source]),))
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-12)
    assert found.num_simulated == expected.num_simulated < expected.num_sends


def test_plain_python_finds_the_same():
    arguments = (ring(16), 1e6, node_ring(16), own_link)
    compiled, plain = (run_schedule(*arguments, compiled=one) for one in (True, False))
    assert plain.seconds == pytest.approx(compiled.seconds, rel=1e-12)
    assert plain.num_simulated == compiled.num_simulated


def test_one_slow_link_ends_the_symmetry_but_not_the_bound():
    topology = node_ring(16)
    links = list(topology.links)
    links[3] = Edge(source=3, target=4, bytes_per_s=10e9, latency_s=NVLINK_S)
    run = run_schedule(ring(16), GIB, Topology(vertices=topology.vertices, links=tuple(links)), own_link)
    assert run.num_simulated == run.num_sends
    assert run.busiest[0][0] == 3
    assert run.seconds == pytest.approx(30 * (NVLINK_S + GIB / 16 / 10e9), rel=1e-3)
    assert run.lower_bound_s <= run.seconds * (1 + 1e-12)


def test_the_route_is_asked_once_for_each_channel():
    asked = []

    def route(source, target, flow):
        asked.append((source, target, flow))
        return (source,)

    run_schedule(ring(16), 1e6, node_ring(16), route)
    assert sorted(asked) == [(r, (r + 1) % 16, 0) for r in range(16)]


def test_two_jobs_on_one_network_take_twice_as_long_together():
    topology, schedule = rails(16, 4.0), ring(16, NODE)
    builder = FlowProgramBuilder(topology.capacity_bytes_per_s)
    for _ in range(2):
        add_schedule(builder, schedule, GIB, topology, own_link)
    alone_s = run_schedule(schedule, GIB, topology, own_link).seconds
    assert simulate(builder.build()).makespan_s == pytest.approx(2 * alone_s, rel=1e-3)


def test_a_size_below_zero_is_refused():
    with pytest.raises(SpecError, match="size is -1 bytes"):
        run_schedule(ring(16), -1.0, node_ring(16), own_link)


def test_a_chain_over_nodes_is_simulated_whole_before_its_classes_are_all_found(monkeypatch):
    """Each round of refinement tells one more rank apart: as many rounds as ranks took minutes."""
    rounds = []
    numbered = symmetry._numbered
    monkeypatch.setattr(symmetry, "_numbered", lambda hashes: rounds.append(0) or numbered(hashes))
    topology = topology_of(load_cluster("40x8xh100-sxm"))
    schedule = schedule_of("broadcast", "ring", 320, parts=4)
    run = run_schedule(schedule, 1e6, topology, routing_of(schedule, topology))
    assert run.num_simulated == run.num_sends and len(rounds) <= 2 * symmetry.MAX_ROUNDS + 2
