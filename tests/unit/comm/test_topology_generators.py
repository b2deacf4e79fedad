"""Regular networks, machines and fabrics: how many links, how much a cut carries, and published bounds."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from foreshard.comm.topology import fabrics, regular
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import CUBE_MESH, MACHINES, machine, pcie_box
from foreshard.comm.topology.regular import Dimension
from foreshard.comm.topology.routing import Routing
from foreshard.errors import SpecError

sys.path.insert(0, str(Path(__file__).parent))
from published_topologies import PUBLISHED

H100 = [machine("hgx-h100")] * 8
FABRICS = {
    "flat": fabrics.flat(H100),
    "leaf-spine": fabrics.leaf_spine(H100, nodes_per_leaf=2, num_spines=4, oversubscription=2.0),
    "rail": fabrics.rail_optimised(H100, num_spines=2),
    "dual-plane": fabrics.dual_plane(H100, nodes_per_leaf=4, num_spines=2),
    "fat-tree": fabrics.fat_tree(H100, radix=8),
    "dragonfly": fabrics.dragonfly(
        H100,
        nodes_per_router=1,
        routers_per_group=2,
        local_bytes_per_s=400e9,
        global_bytes_per_s=200e9,
    ),
    "mixed": fabrics.leaf_spine(
        [machine("hgx-b200"), machine("ndv2"), machine("mi250"), machine("pcie-8")],
        nodes_per_leaf=2,
        num_spines=2,
    ),
}


def bandwidths(topology: Topology) -> Counter:
    return Counter((link.source, link.target, link.bytes_per_s, link.latency_s) for link in topology.links)


def leaving(topology: Topology, inside: set[int]) -> float:
    return sum(
        link.bytes_per_s for link in topology.links if link.source in inside and link.target not in inside
    )


def named(topology: Topology, *starts: str) -> set[int]:
    return {i for i, vertex in enumerate(topology.vertices) if vertex.name.startswith(starts)}


@pytest.mark.parametrize(
    ("topology", "num_links"),
    [
        (regular.ring(8, 1e9), 16),
        (regular.ring(2, 1e9), 2),
        (regular.ring(1, 1e9), 0),
        (regular.torus((4, 4), 1e9), 64),
        (regular.torus((3, 4, 5), 1e9), 6 * 60),
        (regular.mesh((5, 5), 1e9), 80),
        (regular.mesh((2, 3, 4), 1e9), 2 * (12 + 16 + 18)),
        (regular.hypercube(5, 1e9), 5 * 32),
        (regular.full_mesh(8, 1e9), 56),
        (regular.star(8, 1e9), 16),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_regular_networks_have_the_links_of_their_definition(topology, num_links):
    assert len(topology.links) == num_links
    out = Counter(link.source for link in topology.links)
    into = Counter(link.target for link in topology.links)
    assert out == into


def test_dimensions_differ_in_shape_and_rate():
    topology = regular.grid(
        [
            Dimension(shape="switch", size=4, bytes_per_s=50e9, latency_s=2e-6),
            Dimension(shape="full", size=3, bytes_per_s=300e9, latency_s=1e-6),
        ]
    )
    assert topology.num_ranks == 12
    assert Counter(link.bytes_per_s for link in topology.links) == {50e9: 2 * 12, 300e9: 4 * 6}
    # Ranks count the last dimension fastest: 0, 1 and 2 are one full mesh.
    routing = Routing(topology)
    assert len(routing.between_ranks(0, 2)) == 1 and len(routing.between_ranks(0, 3)) == 2


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ([], "no dimension"),
        ([Dimension(shape="ring", size=0, bytes_per_s=1e9)], "size 0"),
        ([Dimension(shape="moebius", size=4, bytes_per_s=1e9)], "moebius"),
        ([Dimension(shape="ring", size=2**10, bytes_per_s=1e9)] * 2, "1,048,576 devices"),
        ([Dimension(shape="full", size=2**12, bytes_per_s=1e9)], "16,773,120 links"),
        ([Dimension(shape="ring", size=4, bytes_per_s=0.0)], "0 B/s"),
    ],
)
def test_impossible_dimensions_are_refused(dimensions, message):
    with pytest.raises(SpecError, match=message):
        regular.grid(dimensions)


@pytest.mark.parametrize("topology", FABRICS.values(), ids=FABRICS)
def test_both_directions_are_equal_and_all_ranks_connected(topology):
    there = bandwidths(topology)
    assert there == Counter((b, a, rate, latency) for a, b, rate, latency in there.elements())
    routing = Routing(topology)
    for rank in range(1, topology.num_ranks):
        assert routing.between_ranks(0, rank) and routing.between_ranks(rank, 0)


@pytest.mark.parametrize("name", MACHINES)
def test_machines_connect_their_devices(name):
    topology = fabrics.one_machine(machine(name))
    routing = Routing(topology)
    for rank in range(1, topology.num_ranks):
        assert routing.between_ranks(rank, 0)
    assert len({vertex.node for vertex in topology.vertices}) == 1


@pytest.mark.parametrize(
    ("name", "num_devices", "bytes_per_s", "nic_bytes_per_s"),
    [
        ("dgx-1", 8, 150e9, 50e9),
        ("ndv2", 8, 150e9, 12.5e9),
        ("dgx-2", 16, 150e9, 100e9),
        ("hgx-a100", 8, 300e9, 200e9),
        ("hgx-h100", 8, 450e9, 400e9),
        ("hgx-b200", 8, 900e9, 400e9),
        ("nvl72", 72, 900e9, 3600e9),
        ("mi300x", 8, 448e9, 400e9),
    ],
)
def test_machines_have_the_rates_of_their_datasheets(name, num_devices, bytes_per_s, nic_bytes_per_s):
    topology = fabrics.flat([machine(name)])
    assert topology.num_ranks == num_devices
    nics = named(topology, "node0.nic") | named(topology, "node0.pcie")
    for device in topology.devices:
        links = [topology.links[i] for i in topology.links_out[device]]
        assert sum(one.bytes_per_s for one in links if one.target not in nics) == bytes_per_s
    assert leaving(topology, named(topology, "fabric")) == nic_bytes_per_s


def test_a_cube_mesh_has_six_lanes_everywhere():
    assert all(sum(row) == 6 for row in CUBE_MESH)
    assert np.array_equal(CUBE_MESH, np.transpose(CUBE_MESH))


def test_an_unknown_machine_is_refused():
    with pytest.raises(SpecError, match="hgx-h100"):
        machine("hgx-h10")


def test_devices_of_a_pcie_box_are_spread_over_its_switches():
    topology = fabrics.one_machine(pcie_box())
    behind = Counter(
        topology.links[i].target for device in topology.devices for i in topology.links_out[device]
    )
    assert sorted(behind.values()) == [2, 2, 2, 2]
    assert len(Routing(topology).between_ranks(0, 7)) == 5  # switch, CPU, CPU, switch, device


def test_oversubscription_bounds_what_leaves_a_leaf():
    topology = FABRICS["leaf-spine"]
    below = named(topology, "leaf0", "node0.", "node1.")
    assert leaving(topology, below) == pytest.approx(2 * 400e9 / 2.0)
    assert leaving(topology, named(topology, "node0.")) == 400e9
    assert Routing(topology).num_paths(topology.devices[0], topology.devices[63]) == 4


def test_rails_meet_at_the_spines_only():
    topology, routing = FABRICS["rail"], Routing(FABRICS["rail"])
    assert len(routing.between_ranks(0, 8)) == 4  # NIC, rail, NIC, device
    assert len(routing.between_ranks(0, 9)) == 6
    rails_only = fabrics.rail_optimised(H100, num_spines=0)
    with pytest.raises(SpecError, match="no path"):
        Routing(rails_only).between_ranks(0, 9)
    assert Routing(rails_only, forwarding="any").between_ranks(0, 9)
    assert leaving(topology, named(topology, "rail0")) == pytest.approx(2 * 8 * 50e9)


def test_two_planes_share_each_port():
    topology, routing = FABRICS["dual-plane"], Routing(FABRICS["dual-plane"])
    assert routing.num_paths(topology.devices[0], topology.devices[8]) == 2
    assert routing.num_paths(topology.devices[0], topology.devices[63]) == 4
    assert leaving(topology, named(topology, "node0.")) == pytest.approx(400e9)


def test_a_fat_tree_carries_all_that_its_edge_sends():
    topology = FABRICS["fat-tree"]
    assert len(named(topology, "core")) == 16
    pod = named(topology, "edge0.", "agg0.", "node0.", "node1.")
    assert leaving(topology, pod) == pytest.approx(2 * 400e9)
    assert Routing(topology).num_paths(topology.devices[0], topology.devices[63]) == 16
    slowed = fabrics.fat_tree(H100, radix=8, oversubscription=4.0)
    assert leaving(slowed, pod) == pytest.approx(2 * 400e9 / 4)


def test_groups_of_a_dragonfly_are_one_link_apart():
    topology = FABRICS["dragonfly"]
    for one in range(4):
        inside = named(topology, f"router{one}.", f"node{2 * one}.", f"node{2 * one + 1}.")
        assert leaving(topology, inside) == pytest.approx(3 * 200e9)
    switches = {topology.links[i].target for i in Routing(topology).between_ranks(0, 63)}
    assert 2 <= len(switches & named(topology, "router")) <= 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fabrics.flat([]), "no machine"),
        (lambda: fabrics.leaf_spine(H100, nodes_per_leaf=0, num_spines=1), "nodes_per_leaf 0"),
        (lambda: fabrics.leaf_spine(H100, nodes_per_leaf=1, num_spines=0), "num_spines 0"),
        (lambda: fabrics.rail_optimised(H100, num_spines=1, oversubscription=0.5), "oversubscription 0.5"),
        (lambda: fabrics.fat_tree(H100, radix=4), "64 NICs"),
        (lambda: fabrics.fat_tree(H100, radix=9), "even number"),
    ],
)
def test_impossible_fabrics_are_refused(build, message):
    with pytest.raises(SpecError, match=message):
        build()


def gathers(topology: Topology, bytes_per_s: float) -> bool:
    """Return whether all ranks can send each other data at a rate each: a flow of all to every sink."""
    unit = 1e6
    source = len(topology.vertices)
    ends = [(link.source, link.target, round(link.bytes_per_s / unit)) for link in topology.links]
    rate = round(bytes_per_s / unit)
    ends += [(source, int(device), rate) for device in topology.devices]
    one, other, rates = np.array(ends, dtype=np.int32).T
    graph = csr_array((rates, (one, other)), shape=(source + 1, source + 1), dtype=np.int32)
    total = rate * topology.num_ranks
    return all(maximum_flow(graph, source, int(sink)).flow_value == total for sink in topology.devices)


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("forestcoll-a100-x1", 342.857),
        ("forestcoll-a100-x2", 346.667),
        ("forestcoll-a100-x4", 266.667),
        ("forestcoll-a100-x8", 228.571),
        ("forestcoll-mi250-x1", 342.857),
        ("forestcoll-mi250-x2", 354.133),
        ("teccl-dgx2-x2", 129.032),
        ("teccl-ndv2-x2", 25.0),
        ("teccl-ndv2-x4", 16.667),
    ],
)
def test_published_topologies_have_their_all_gather_bound(name, gb_per_s):
    build, bound = PUBLISHED[name]
    topology = build()
    assert bound / 1e9 == pytest.approx(gb_per_s, abs=5e-4)
    each = bound / topology.num_ranks
    assert gathers(topology, np.floor(each / 1e6) * 1e6)
    assert not gathers(topology, np.floor(each / 1e6 + 1) * 1e6)
