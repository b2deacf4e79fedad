"""Where places of a schedule are on a topology: ranks, and switches that reduce."""

from dataclasses import replace

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.schedule_run import run_schedule, send_times
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.topology.channel_routes import routes_from
from foreshard.comm.topology.fabrics import leaf_spine
from foreshard.comm.topology.machines import switched
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.errors import SpecError


def on(cluster):
    return topology_of(load_cluster(cluster))


def test_nvls_reduces_in_the_switch_of_its_node():
    topology, schedule = on("1x8xh100-sxm"), schedule_of("all-reduce", "nvls", 8, parts=16)
    route = routing_of(schedule, topology)
    switch = topology.vertices[topology.links[route(0, 8, 0)[-1]].target]
    assert switch.can_reduce and switch.kind == "switch"
    ring = schedule_of("all-reduce", "ring", 8)
    ring_s = run_schedule(ring, 2**30, topology, routing_of(ring, topology)).seconds
    assert run_schedule(schedule, 2**30, topology, route).seconds < ring_s


def test_each_node_of_an_nvls_tree_has_its_own_switch():
    topology = on("4x8xh100-sxm")
    schedule = schedule_of("all-reduce", "nvls-tree", 32, per_node=8)
    route = routing_of(schedule, topology)
    for place in range(32, 32 + len(schedule.switches)):
        members = schedule.source[(schedule.target == place) & (schedule.source < 32)]
        targets = {topology.links[route(int(rank), place, 0)[-1]].target for rank in members}
        nodes = {topology.vertices[topology.devices[rank]].node for rank in members}
        assert len(targets) == len(nodes) == 1
        assert topology.vertices[targets.pop()].node == nodes.pop()


@pytest.mark.parametrize(
    ("cluster", "algorithm", "said"),
    [
        ("2x8xh100-sxm", "nvls", "several scale-up domains"),
        ("1x8xa100-sxm-80gb", "nvls", "switches that reduce"),
    ],
)
def test_switches_that_cannot_reduce_for_all_ranks_are_refused(cluster, algorithm, said):
    topology = on(cluster)
    with pytest.raises(SpecError, match=said):
        routing_of(schedule_of("all-reduce", algorithm, topology.num_ranks), topology)


def test_channels_of_a_schedule_that_was_made_for_a_network_name_its_routes():
    """Others take the routes of a hash, by which two channels may meet on one spine."""
    topology = leaf_spine(
        [switched(1, 1e9, num_nics=1, nic_bytes_per_s=1e9)] * 4, nodes_per_leaf=2, num_spines=2
    )
    made = schedule_of("send", "direct", 4, channels=4, parts=4)
    routes = routes_from(topology, int(topology.devices[0]))[int(topology.devices[3])]
    assert len(routes) == 2
    route = routing_of(replace(made, overlaps=True), topology)
    assert [route(0, 3, channel) for channel in range(4)] == routes * 2


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(SpecError, match="9 ranks on 8 devices"):
        routing_of(schedule_of("all-reduce", "ring", 9), on("1x8xh100-sxm"))


def test_times_of_sends_end_with_the_run():
    topology, schedule = on("2x8xh100-sxm"), schedule_of("all-gather", "ring", 16)
    route = routing_of(schedule, topology)
    start_s, end_s = send_times(schedule, 2**24, topology, route)
    assert (start_s < end_s).all()
    assert end_s.max() == pytest.approx(run_schedule(schedule, 2**24, topology, route).seconds, rel=1e-9)
