"""Topology files of NCCL, ASTRA-sim, TE-CCL and TACCL, and the plain graph: read right, or refused."""

import json
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from foreshard.comm.topology.fabrics import leaf_spine
from foreshard.comm.topology.importers.astra_sim import astra_sim_topology
from foreshard.comm.topology.importers.formats import read_topology
from foreshard.comm.topology.importers.nccl_xml import nccl_topology
from foreshard.comm.topology.importers.plain_graph import plain_graph, plain_topology
from foreshard.comm.topology.importers.teccl import teccl_dgx2, teccl_ndv2, teccl_topology
from foreshard.comm.topology.machines import machine
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.comm.topology.regular import torus
from foreshard.comm.topology.routing import Routing
from foreshard.errors import SpecError

sys.path.insert(0, str(Path(__file__).parent))
from published_topologies import PUBLISHED


def same(one, other) -> bool:
    return (one.vertices, one.links, one.shared) == (other.vertices, other.links, other.shared)


# Plain graph


def test_a_plain_graph_reads_what_was_written():
    from foreshard.catalog.clusters import load_cluster

    for topology in (
        torus((3, 4), 50e9, 0.7e-6),
        teccl_dgx2(),
        topology_of(load_cluster("2x4xl40s")),
        leaf_spine([machine("hgx-h100"), machine("ndv2")], nodes_per_leaf=1, num_spines=3),
    ):
        assert same(topology, plain_topology(json.dumps(plain_graph(topology))))


def test_a_plain_graph_in_toml():
    topology = plain_topology("""
name = "pair"
vertices = [{ name = "a", kind = "device" }, { name = "b", kind = "device" }, { name = "s", kind = "switch" }]
shared = [{ name = "bus", bandwidth = "60 GB/s" }]
[[links]]
source = "a"
target = "s"
bandwidth = "50 GB/s"
latency = "1 us"
both_ways = true
shared = ["bus"]
[[links]]
source = "s"
target = "b"
bandwidth = "400 Gb/s"
both_ways = true
""")
    assert [link.bytes_per_s for link in topology.links] == [50e9] * 4
    assert topology.links[0].latency_s == 1e-6
    assert topology.resources_of([0]) == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("50 GB/s", "0 GB/s"), "bandwidth"),
        (("50 GB/s", "fast"), "cannot read 'fast'"),
        (('"target": "b"', '"target": "c"'), "unknown name 'c'"),
        (('"kind": "device"', '"kind": "gpu"'), "kind"),
        (('"name": "b"', '"name": "a"'), "two are named 'a'"),
        (('"both_ways": true', '"both_ways": false'), "no path leads from 'b' to 'a'"),
        (('"links"', '"edges"'), "edges"),
        (("{", "{{"), "not valid JSON"),
    ],
)
def test_bad_plain_graphs_are_refused(change, message):
    text = json.dumps(
        {
            "vertices": [{"name": "a", "kind": "device"}, {"name": "b", "kind": "device"}],
            "links": [{"source": "a", "target": "b", "bandwidth": "50 GB/s", "both_ways": True}],
        }
    )
    plain_topology(text)
    with pytest.raises(SpecError) as caught:
        plain_topology(text.replace(*change, 1) if change[0] != '"name": "b"' else text.replace(*change))
    assert message in str(caught.value)


def test_devices_apart_are_named():
    text = '{"vertices": [{"name": "a", "kind": "device"}, {"name": "b", "kind": "device"}]}'
    with pytest.raises(SpecError, match="no path leads from 'a' to 'b'"):
        plain_topology(text, file="apart.json")


# NCCL


def nccl_pci(bus: str, inside: str, kind: str = "0x030200") -> str:
    return f'<pci busid="{bus}" class="{kind}" link_speed="16.0 GT/s PCIe" link_width="16">{inside}</pci>\n'


def nccl_gpu(i: int, *, links: str, sm: int = 80) -> str:
    return nccl_pci(f"0000:0{i}:00.0", f'<gpu dev="{i}" sm="{sm}" rank="{3 - i}" gdr="1">{links}</gpu>')


def nccl_nic(i: int) -> str:
    net = f'<net name="mlx5_{i}" dev="{i}" speed="200000" port="1" latency="0.000000" gdr="1"/>'
    return nccl_pci(f"0000:1{i}:00.0", f"<nic>{net}</nic>", "0x020700")


def nccl_box(links) -> str:
    """Return two sockets with a PCIe switch each, two devices and a NIC below it."""
    sockets = ""
    for socket in range(2):
        below = "".join(nccl_gpu(i, links=links(i)) for i in (2 * socket, 2 * socket + 1)) + nccl_nic(socket)
        sockets += (
            f'<cpu numaid="{socket}" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">\n'
            f"{nccl_pci(f'ffff:ff:0{socket}.0', below, '0x060400')}</cpu>\n"
        )
    return f'<system version="1">\n{sockets}</system>\n'


SWITCHED = nccl_box(lambda i: '<nvlink target="0000:c5:00.0" count="12" tclass="0x068000"/>')
DIRECT = nccl_box(
    lambda i: (
        f'<nvlink target="0000:0{i ^ 1}:00.0" count="4" tclass="0x030200"/>'
        f'<nvlink target="0000:0{i ^ 2}:00.0" count="2" tclass="0x030200"/>'
    )
)


def test_an_nccl_dump_has_its_switch_pcie_tree_and_nics():
    topology = nccl_topology(SWITCHED)
    assert Counter(vertex.kind for vertex in topology.vertices) == {
        "device": 4,
        "switch": 3,
        "nic": 2,
        "cpu": 2,
    }
    # NCCL: 12 links of 20 GB/s; PCIe 4 x16 24 GB/s; Zen 2 sockets 16 GB/s.
    assert Counter(link.bytes_per_s for link in topology.links) == {240e9: 8, 24e9: 16, 16e9: 2}
    assert len(Routing(topology).between_ranks(0, 3)) == 2


def test_ranks_of_an_nccl_dump_are_its_ranks():
    topology = nccl_topology(DIRECT)
    # Device i has rank 3 - i; devices 0 and 1 have four links.
    (link,) = Routing(topology).between_ranks(3, 2)
    assert topology.links[link].bytes_per_s == 80e9
    (link,) = Routing(topology).between_ranks(3, 1)
    assert topology.links[link].bytes_per_s == 40e9
    assert len(Routing(topology).between_ranks(3, 0)) == 2


def test_nvlinks_to_several_switches_are_one_link():
    """A dump of HGX H100 has four NVSwitches, with 5, 5, 4 and 4 links to each device."""
    links = "".join(
        f'<nvlink target="0000:0{bus}:00.0" count="{count}" tclass="0x068000"/>'
        for bus, count in ((7, 5), (6, 5), (5, 4), (8, 4))
    )
    topology = nccl_topology(nccl_box(lambda i: links).replace('sm="80"', 'sm="90"'))
    (up, down) = Routing(topology).between_ranks(0, 1)
    assert topology.links[up].bytes_per_s == topology.links[down].bytes_per_s == pytest.approx(18 * 20.6e9)


def test_several_machines_of_a_dump_meet_at_a_switch():
    topology = nccl_topology(SWITCHED, num_nodes=3)
    assert topology.num_ranks == 12
    route = Routing(topology).between_ranks(0, 11)
    assert min(topology.links[i].bytes_per_s for i in route) == 24e9
    assert {vertex.node for vertex in topology.vertices} == {-1, 0, 1, 2}


def test_a_file_for_nccl_to_fill_in_has_devices_by_class():
    text = re.sub("<gpu.*?</gpu>|<nic>.*?</nic>", "", SWITCHED)
    topology = nccl_topology(text, num_nodes=2)
    assert topology.num_ranks == 8
    assert len(Routing(topology).between_ranks(0, 3)) == 5
    assert len(Routing(topology).between_ranks(0, 4)) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<!DOCTYPE s [<!ENTITY a "b">]><system/>', "DOCTYPE"),
        ('<!doctype s [<!ENTITY a "b">]><system/>', "DOCTYPE"),
        ("<system><cpu></system>", "not valid XML: mismatched tag"),
        ("", "not valid XML"),
        ("<graphs/>", "<graphs>"),
        ("<system/>", "no device"),
        (SWITCHED.replace('count="12"', 'count="0"'), "count 0"),
        (SWITCHED.replace('count="12"', 'count="many"'), "count 'many'"),
        ("<system>" + "<cpu/>" * 300 + "</system>", "300 CPUs"),
        (DIRECT.replace('target="0000:01:00.0"', 'target="0000:99:00.0"'), "no device at '0000:99:00.0'"),
        ("<system><cpu>" + "<pci>" * 99 + "<gpu/>" + "</pci>" * 99 + "</cpu></system>", "nested too deeply"),
    ],
)
def test_bad_xml_is_refused(text, message):
    with pytest.raises(SpecError, match=message) as caught:
        nccl_topology(text, file="topo.xml")
    assert str(caught.value).startswith("topo.xml")


# ASTRA-sim


def test_an_astra_sim_network():
    topology = astra_sim_topology(
        "topology: [ Ring, Switch ]  # inside first\n"
        "npus_count: [ 4, 2 ]\nbandwidth: [ 200.0, 50.0 ]  # GB/s\nlatency: [ 50.0, 500.0 ]  # ns\n"
    )
    assert topology.num_ranks == 8
    assert Counter(link.bytes_per_s / 2**30 for link in topology.links) == {200: 16, 50: 16}
    routing = Routing(topology)
    (link,) = routing.between_ranks(0, 1)
    assert topology.links[link].latency_s == pytest.approx(50e-9)
    assert len(routing.between_ranks(0, 4)) == 2


def test_astra_sim_lists_may_have_an_entry_a_line():
    lines = "topology:\n  - FullyConnected\nnpus_count:\n  - 8\nbandwidth:\n  - 50\nlatency:\n  - 0\n"
    assert len(astra_sim_topology(lines).links) == 56


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [50]\n", "no latency"),
        ("topology: [Ring, Ring]\nnpus_count: [4]\nbandwidth: [50]\nlatency: [1]\n", "topology 2"),
        ("topology: [Torus]\nnpus_count: [4]\nbandwidth: [50]\nlatency: [1]\n", "Torus"),
        ("topology: [Ring]\nnpus_count: [4.5]\nbandwidth: [50]\nlatency: [1]\n", "npus_count"),
        ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [0]\nlatency: [1]\n", "bandwidth"),
        ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [x]\nlatency: [1]\n", "bandwidth"),
        ("topology: [Ring]\nnpus_count: [4]\nbandwidth: [50]\nlatency: [-1]\n", "latency"),
        ("topology: {a: b}}]\n", "cannot read line 1"),
        ("", "no topology"),
    ],
)
def test_bad_astra_sim_networks_are_refused(text, message):
    with pytest.raises(SpecError, match=message):
        astra_sim_topology(text, file="network.yml")


# TE-CCL and TACCL


def matrix_of(topology) -> dict:
    size = len(topology.vertices)
    capacity, alpha = ([[0.0] * size for _ in range(size)] for _ in range(2))
    for link in topology.links:
        capacity[link.source][link.target] = link.bytes_per_s / 1e9
        alpha[link.source][link.target] = link.latency_s
    switches = [i for i, vertex in enumerate(topology.vertices) if vertex.kind == "switch"]
    return {"capacity": capacity, "alpha": alpha, "switch_indices": switches}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "a100-x" not in name or name.endswith("x1")])
def test_a_matrix_of_capacities_has_the_links_of_the_topology(name):
    topology = PUBLISHED[name].build()
    read = teccl_topology(json.dumps(matrix_of(topology)))
    assert sorted(read.links, key=repr) == sorted(topology.links, key=repr)
    assert list(read.devices) == list(topology.devices)


def test_te_ccl_input_names_a_topology():
    read = teccl_topology('{"TopologyParams": {"name": "NDv2", "chassis": 4, "chunk_size": 1}}')
    assert same(read, teccl_ndv2(4))


def test_a_taccl_profile_has_the_rates_of_a_machine():
    profile = {
        "name": "NDv2_1MB",
        "gpus_per_node": 8,
        "nics_per_node": 1,
        "alpha": 0.3,
        "node_betas_list": [23, 46],
        "node_invbws_list": [23, 46],
        "remote_invbw": 107,
        "remote_alpha": 2.6,
        "remote_beta": 105,
    }
    topology = teccl_topology(json.dumps(profile))
    rates = Counter(round(link.bytes_per_s / 1e9, 2) for link in topology.links)
    assert rates == {21.74: 32, 43.48: 32, 9.35: 2 * 16 + 4}
    (link,) = Routing(topology).between_ranks(0, 1)
    assert topology.links[link].latency_s == pytest.approx(0.3e-6)
    with pytest.raises(SpecError, match="remote_invbw"):
        teccl_topology(json.dumps(profile | {"remote_invbw": 0}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no topology"),
        ({"a": 1}, "no topology"),
        ({"capacity": []}, "no such matrix"),
        ({"capacity": [[0, 1], [1]]}, "no such matrix"),
        ({"capacity": [[0, -1], [1, 0]]}, r"capacity\[0\]\[1\]"),
        ({"capacity": [[0, "x"], [1, 0]]}, r"capacity\[0\]\[1\]"),
        ({"capacity": [[0, 1], [1, 0]], "switch_indices": [5]}, "switch_indices"),
        ({"capacity": [[0, 1], [0, 0]]}, "no path leads from 'gpu1' to 'gpu0'"),
        ({"TopologyParams": {"name": "DGX7"}}, "DGX7"),
        ({"TopologyParams": {"name": "NDv2", "chassis": 0}}, "chassis 0"),
        ({"gpus_per_node": 8, "nics_per_node": 0}, "nics_per_node 0"),
    ],
)
def test_bad_synthesizer_files_are_refused(data, message):
    with pytest.raises(SpecError, match=message):
        teccl_topology(json.dumps(data), file="topo.json")


# Any of them


def test_the_name_of_a_file_tells_its_format(tmp_path):
    files = {
        "dump.xml": SWITCHED,
        "network.yml": "topology: [Ring]\nnpus_count: [4]\nbandwidth: [50]\nlatency: [1]\n",
        "matrix.json": json.dumps(matrix_of(teccl_ndv2(2))),
        "graph.json": json.dumps(plain_graph(torus((4,), 1e9))),
    }
    ranks = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        ranks[name] = read_topology(tmp_path / name).num_ranks
    assert ranks == {"dump.xml": 4, "network.yml": 4, "matrix.json": 16, "graph.json": 4}
    (tmp_path / "graph.txt").write_text(files["graph.json"])
    assert read_topology(tmp_path / "graph.txt", format="plain").num_ranks == 4
    with pytest.raises(SpecError, match=r"unknown suffix '\.txt'"):
        read_topology(tmp_path / "graph.txt")
    with pytest.raises(SpecError, match="unknown format 'nccl2'"):
        read_topology(tmp_path / "graph.txt", format="nccl2")


@pytest.mark.parametrize("seed", range(20))
def test_spoiled_files_are_read_or_refused(seed):
    """Characters and lines are dropped, doubled and swapped; nothing but a refusal may come of it."""
    rng = np.random.default_rng(seed)
    readers = {
        SWITCHED: nccl_topology,
        DIRECT: nccl_topology,
        json.dumps(matrix_of(teccl_ndv2(2))): teccl_topology,
        '{"TopologyParams": {"name": "NDv2", "chassis": 4, "chunk_size": 1}}': teccl_topology,
        "topology: [Ring]\nnpus_count: [4]\nbandwidth: [50]\nlatency: [1]\n": astra_sim_topology,
        json.dumps(plain_graph(teccl_dgx2())): plain_topology,
    }
    for text, reader in readers.items():
        for _ in range(10):
            parts = list(text) if rng.random() < 0.5 else re.split("([ ,<>])", text)
            for _ in range(int(rng.integers(1, 4))):
                i, j = (int(k) for k in rng.integers(0, len(parts), 2))
                change = rng.integers(3)
                parts[i] = ("", parts[j], parts[i] * 2)[change]
            with suppress(SpecError):
                reader("".join(parts))
