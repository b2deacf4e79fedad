"""The topology of a cluster file: who meets where, at what rate, and rings on it against the closed form."""

from collections import Counter

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.comm.collectives import all_reduce
from foreshard.comm.fabric import fabric_of
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.comm.topology.routing import Routing
from foreshard.errors import SpecError

BOARD = """
[[nodes]]
count = 128
device = "h100-sxm"
per_node = 8
nic = "3200 Gb/s"
nic_latency = "5 us"
"""


def cluster(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_cluster(path)


def slowest_and_latency(topology, route):
    rates = [topology.capacity_bytes_per_s[i] for i in topology.resources_of(route)]
    return min(rates), sum(topology.latency_s[list(route)])


def rotated_rings(num_nodes: int, per_node: int) -> list[list[int]]:
    """Return one ring for each device of a node: each leaves its node by another device's NIC."""
    return [
        [node * per_node + (start + i) % per_node for node in range(num_nodes) for i in range(per_node)]
        for start in range(per_node)
    ]


def ring_s_per_byte(topology: Topology, rings: list[list[int]]) -> float:
    """Return the transfer time of an all-reduce of one byte, an equal part on each ring."""
    routing = Routing(topology)
    load = np.zeros(len(topology.capacity_bytes_per_s))
    for ring in rings:
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
            route = routing.between_ranks(one, other)
            load[list(topology.resources_of(route))] += 2.0 * (len(ring) - 1) / len(ring) / len(rings)
    return float(np.max(load / topology.capacity_bytes_per_s))


def test_a_ring_over_128_nodes_has_the_steps_of_the_datasheet(tmp_path):
    topology = topology_of(cluster(tmp_path, BOARD))
    assert topology.num_ranks == 1024
    routing = Routing(topology)
    steps = [
        slowest_and_latency(topology, routing.between_ranks(rank, (rank + 1) % 1024)) for rank in range(1024)
    ]
    apart, inside = steps[7::8], [step for rank, step in enumerate(steps) if rank % 8 < 7]
    assert all(rate == 50e9 and latency == pytest.approx(5e-6, rel=1e-12) for rate, latency in apart)
    assert all(rate == 450e9 and latency < 1e-6 for rate, latency in inside)


@pytest.mark.parametrize(
    ("rate", "reached"), [("100Gb/s", 12.5e9), ("2x100Gb/s", 12.5e9), ("8x25Gb/s", 3.125e9)]
)
def test_a_rank_sends_at_the_rate_of_its_nodes_card(rate, reached):
    topology = topology_of(load_cluster(f"2x8xh100-sxm@{rate}"))
    assert slowest_and_latency(topology, Routing(topology).between_ranks(0, 15))[0] == reached


@pytest.mark.parametrize(
    "name", ["2x8xh100-sxm", "4x8xa100-sxm-80gb@1600Gb/s", "2x8xl40s", "1x8xh100-sxm", "2x16xv100-sxm3-32gb"]
)
def test_fitted_rings_take_as_long_as_the_closed_form(name):
    whole = load_cluster(name)
    (group,) = whole.nodes
    topology = topology_of(whole, rates="fitted")
    fabric = fabric_of(group)
    form = all_reduce(whole.num_devices, 1, fabric).ring
    copied = fabric.copy / (fabric.intra_bytes_per_s * fabric.ring_eff) / whole.num_devices
    wire = float(form.per_byte_s) - copied
    rings = rotated_rings(group.count, group.per_node) if group.count > 1 else [list(range(group.per_node))]
    assert ring_s_per_byte(topology, rings) == pytest.approx(wire, rel=0.1)


def test_boards_have_the_links_of_their_devices():
    v100 = topology_of(load_cluster("1x8xv100-sxm-16gb"))
    inside = [link for link in v100.links if v100.vertices[link.target].kind == "device"]
    direct = [one for one in inside if v100.vertices[one.source].kind == "device"]
    assert Counter(link.bytes_per_s for link in direct) == {25e9: 16, 50e9: 16}
    mi300 = topology_of(load_cluster("1x8xmi300x"))
    direct = [link for link in mi300.links if mi300.vertices[link.source].kind != "nic"]
    assert sum(link.bytes_per_s == 64e9 for link in direct) == 56
    dies = topology_of(load_cluster("1x16xmi250-gcd"))
    direct = [link.bytes_per_s for link in dies.links if dies.vertices[link.target].kind == "device"]
    assert sum(rate for rate in direct if rate > 20e9) == 2 * 56 * 50e9
    tpu = topology_of(load_cluster("16x4xtpu-v4"))
    out = Counter(link.source for link in tpu.links if tpu.vertices[link.target].kind == "device")
    assert set(out[int(device)] for device in tpu.devices) == {6}
    dgx2 = topology_of(load_cluster("1x16xv100-sxm3-32gb"))
    assert sum(vertex.name.startswith("node0.nvswitch") for vertex in dgx2.vertices) == 1


def test_a_scale_up_domain_spans_nodes():
    topology = topology_of(load_cluster("36x4xgb200-nvl72"))
    switches = [vertex for vertex in topology.vertices if ".nvswitch" in vertex.name]
    assert len(switches) == 2 and all(vertex.can_reduce for vertex in switches)
    routing = Routing(topology)
    assert len(routing.between_ranks(0, 71)) == 2
    assert len(routing.between_ranks(71, 72)) == 4


def test_pcie_boxes_meet_at_the_host():
    topology = topology_of(load_cluster("2x4xl40s"))
    rate, _ = slowest_and_latency(topology, Routing(topology).between_ranks(0, 3))
    assert rate == 31e9


def test_devices_share_a_nic_where_there_are_fewer(tmp_path):
    topology = topology_of(cluster(tmp_path, BOARD.replace("128", "2")), nics_per_node=2)
    nics = [vertex for vertex in topology.vertices if vertex.kind == "nic"]
    assert len(nics) == 4
    rate, _ = slowest_and_latency(topology, Routing(topology).between_ranks(0, 15))
    assert rate == 200e9


@pytest.mark.parametrize("kind", ["flat", "leaf-spine", "rail"])
def test_oversubscription_bounds_what_leaves_a_node(tmp_path, kind):
    text = BOARD.replace("128", "4") + f'\n[network]\nkind = "{kind}"\noversubscription = 4.0\n'
    topology = topology_of(cluster(tmp_path, text))
    up = [
        link
        for link in topology.links
        if topology.vertices[link.target].name == "core" and topology.vertices[link.source].kind == "switch"
    ]
    assert sum(link.bytes_per_s for link in up) == pytest.approx(4 * 400e9 / 4)
    routing = Routing(topology)
    assert len(routing.between_ranks(0, 8)) == (4 if kind == "rail" else 6)


def test_racks_meet_over_their_links(tmp_path):
    text = """
[[nodes]]
count = 2
device = "h100-sxm"
per_node = 8
rack = "a"
[[nodes]]
count = 1
device = "a100-sxm-80gb"
per_node = 8
rack = "b"
[[nodes]]
count = 1
device = "l40s"
per_node = 4
[[links]]
between = ["a", "b"]
bandwidth = "10 Gb/s"
latency = "1 ms"
"""
    topology = topology_of(cluster(tmp_path, text))
    routing = Routing(topology)
    rate, latency = slowest_and_latency(topology, routing.between_ranks(0, 16))
    assert rate == 1.25e9 and latency > 1e-3
    rate, latency = slowest_and_latency(topology, routing.between_ranks(0, 8))
    assert rate > 1.25e9 and latency < 1e-4
    rate, _ = slowest_and_latency(topology, routing.between_ranks(0, 24))
    assert rate > 1.25e9


def test_names_are_unique_and_nodes_counted_over_groups():
    whole = load_cluster("2x8xh100-sxm+1x4xl40s")
    topology = topology_of(whole)
    places = [topology.vertices[device].node for device in topology.devices]
    assert places == [whole.node_of(rank) for rank in range(whole.num_devices)]


def test_impossible_wishes_are_refused():
    whole = load_cluster("2x8xh100-sxm")
    with pytest.raises(SpecError, match="guessed"):
        topology_of(whole, rates="guessed")
    with pytest.raises(SpecError, match="nics_per_node 0"):
        topology_of(whole, nics_per_node=0)


LEAVES = """
[[nodes]]
count = 8
device = "a100-pcie-40gb"
per_node = 1
nic = "50 Gb/s"

[network]
kind = "leaf-spine"
nodes_per_leaf = 4
spines = 2
oversubscription = 2.0
"""


def test_leaves_and_spines_of_a_cluster_file(tmp_path):
    """Two leaves of four; each spine link carries a quarter of what a leaf's servers send."""
    path = tmp_path / "leaves.toml"
    path.write_text(LEAVES)
    topology = topology_of(load_cluster(str(path)))
    routing = Routing(topology)
    near, far = (routing.between_ranks(0, other) for other in (3, 7))
    ends = [int(topology.devices[rank]) for rank in (0, 7)]
    assert routing.num_paths(*ends) == 2 and len(far) == len(near) + 2
    rates = [topology.links[link].bytes_per_s for link in far]
    assert min(rates) == pytest.approx(6.25e9) and max(rates) == pytest.approx(6.25e9)
    racks = [vertex.name for vertex in topology.vertices if "leaf" in vertex.name]
    assert len(racks) == 2


@pytest.mark.parametrize(
    ("old", "new", "key", "cause"),
    [
        ('"leaf-spine"', '"flat"', "network.nodes_per_leaf", "Only leaf-spine"),
        ('"leaf-spine"\nnodes_per_leaf = 4', '"fat-tree"', "network.spines", "leaf-spine and rail"),
        ("spines = 2", "spines = 0", "network.spines", "from 1"),
    ],
)
def test_switches_that_a_kind_does_not_have_are_refused(tmp_path, old, new, key, cause):
    path = tmp_path / "leaves.toml"
    path.write_text(LEAVES.replace(old, new))
    with pytest.raises(SpecError, match=cause) as caught:
        load_cluster(str(path))
    assert caught.value.key == key and caught.value.file == str(path)
