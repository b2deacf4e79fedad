"""Routes: shortest by latency and hops, equal-cost paths, who forwards, how much of a fabric is searched."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.fabrics import flat, leaf_spine
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.teccl import teccl_dgx2, teccl_ndv2
from foreshard.comm.topology.machines import machine, switched
from foreshard.comm.topology.regular import ring, torus
from foreshard.comm.topology.routing import Routing
from foreshard.errors import SpecError


def random_topology(rng, latencies) -> Topology:
    draft = Draft()
    kinds = ["device"] * int(rng.integers(2, 7)) + ["switch"] * int(rng.integers(0, 5))
    for i, kind in enumerate(kinds):
        draft.vertex(kind, f"v{i}")
    for _ in range(int(rng.integers(len(kinds), 4 * len(kinds)))):
        source, target = (int(i) for i in rng.choice(len(kinds), 2, replace=False))
        draft.send(source, target, 1e9, float(rng.choice(latencies)))
    return draft.topology("random")


def all_shortest(topology: Topology, source: int, target: int, *, direct: bool) -> set[tuple[int, ...]]:
    """Return the shortest routes by trying all of them."""
    device = [vertex.kind == "device" for vertex in topology.vertices]
    best: list = [None, set()]

    def walk(vertex, path, seen):
        if vertex == target:
            cost = (round(sum(topology.links[i].latency_s for i in path) * 1e15), len(path))
            if best[0] is None or cost < best[0]:
                best[0], best[1] = cost, set()
            if cost == best[0]:
                best[1].add(tuple(path))
            return
        for i in topology.links_out[vertex]:
            to = topology.links[i].target
            passes = device[to] and path and device[topology.links[path[-1]].source]
            if direct and path and device[vertex] and not passes:
                continue
            if to not in seen:
                walk(to, [*path, i], seen | {to})

    walk(source, [], {source})
    return best[1]


@pytest.mark.parametrize("forwarding", ["direct", "any"])
@pytest.mark.parametrize("seed", range(25))
def test_routes_are_those_of_trying_all_paths(seed, forwarding):
    rng = np.random.default_rng(seed)
    topology = random_topology(rng, [0.0, 1e-6, 2e-6] if seed % 2 else [0.0])
    routing = Routing(topology, forwarding=forwarding)
    pairs = [(a, b) for a in topology.devices for b in topology.devices if a != b]
    rng.shuffle(pairs)  # searches are continued, whatever was asked first
    for source, target in pairs:
        wanted = all_shortest(topology, source, target, direct=forwarding == "direct")
        if not wanted:
            with pytest.raises(SpecError, match="no path"):
                routing.shortest(source, target)
            continue
        assert routing.num_paths(source, target) == len(wanted)
        assert {route for route, _ in routing.spray(source, target, limit=10**6)} == wanted
        assert routing.shortest(source, target) in wanted
        assert routing.ecmp(source, target, flow=seed) in wanted


@pytest.mark.parametrize("seed", range(10))
def test_routes_connect_and_have_no_loop(seed):
    rng = np.random.default_rng(100 + seed)
    topology = leaf_spine(
        [machine(str(rng.choice(["hgx-h100", "ndv2", "mi300x", "pcie-8"]))) for _ in range(6)],
        nodes_per_leaf=2,
        num_spines=3,
    )
    routing = Routing(topology)
    for _ in range(100):
        source, target = (int(i) for i in rng.choice(topology.num_ranks, 2, replace=False))
        route = routing.between_ranks(source, target, flow=int(rng.integers(1000)))
        links = [topology.links[i] for i in route]
        assert links[0].source == topology.devices[source]
        assert links[-1].target == topology.devices[target]
        assert all(one.target == other.source for one, other in pairwise(links))
        passed = [links[0].source, *(link.target for link in links)]
        assert len(set(passed)) == len(passed)


def test_lower_latency_is_shorter_than_fewer_hops():
    draft = Draft()
    a, b, c = (draft.vertex("device", name) for name in "abc")
    draft.send(a, c, 1e9, 3e-6)
    draft.send(a, b, 1e9, 1e-6)
    draft.send(b, c, 1e9, 1e-6)
    assert Routing(draft.topology("triangle")).shortest(a, c) == (1, 2)


def test_devices_behind_a_switch_do_not_forward():
    """Two machines joined only by a link from device to device: others of the machine cannot use it."""
    topology = teccl_dgx2()
    with pytest.raises(SpecError, match=r"no path leads from 'node0\.gpu2' to 'node1\.gpu2'"):
        Routing(topology).between_ranks(2, 18)
    route = Routing(topology, forwarding="any").between_ranks(2, 18)
    assert len(route) == 3


def test_devices_of_a_cube_mesh_forward():
    assert len(Routing(teccl_ndv2(2)).between_ranks(5, 8 + 5)) == 4
    topology = flat([machine("dgx-1")])
    through = [topology.links[i].target for i in Routing(topology).between_ranks(0, 5)]
    assert [topology.vertices[i].kind for i in through] == ["device", "device"]


def test_disconnected_devices_are_named():
    draft = Draft()
    draft.vertex("device", "left")
    draft.vertex("device", "right")
    with pytest.raises(SpecError) as caught:
        Routing(draft.topology("apart")).shortest(0, 1)
    assert "'left'" in str(caught.value) and "'right'" in str(caught.value)


def test_equal_cost_paths_share_flows_by_a_fixed_hash():
    topology = leaf_spine([machine("hgx-h100")] * 4, nodes_per_leaf=1, num_spines=4)
    routing = Routing(topology)
    assert routing.num_paths(topology.devices[0], topology.devices[9]) == 4
    used = Counter(routing.between_ranks(0, 9, flow=flow) for flow in range(400))
    assert len(used) == 4 and min(used.values()) > 60
    again = Routing(topology)
    assert [again.between_ranks(0, 9, flow=flow) for flow in range(20)] == [
        routing.between_ranks(0, 9, flow=flow) for flow in range(20)
    ]
    spread = routing.spray(topology.devices[0], topology.devices[9])
    assert [part for _, part in spread] == [0.25] * 4


def test_spray_keeps_to_a_limit_and_its_parts_sum_to_one():
    routing = Routing(torus((8, 8, 8), 1e9))
    assert routing.num_paths(0, 4 * 64 + 4 * 8 + 4) == 277200
    spread = routing.spray(0, 4 * 64 + 4 * 8 + 4, limit=50)
    assert len({route for route, _ in spread}) == 50
    assert sum(part for _, part in spread) == pytest.approx(1.0)


def test_ranks_are_those_of_the_topology():
    with pytest.raises(SpecError, match="no rank 4"):
        Routing(ring(4, 1e9)).between_ranks(0, 4)


def test_a_route_to_itself_has_no_links():
    routing = Routing(ring(4, 1e9))
    assert routing.shortest(1, 1) == routing.ecmp(1, 1) == routing.between_ranks(1, 1) == ()
    assert routing.spray(1, 1) == (((), 1.0),)
    assert routing.num_paths(1, 1) == 1


def test_neighbours_on_a_large_fabric_are_found_without_visiting_it(monkeypatch):
    node = switched(8, 450e9, num_nics=8, nic_bytes_per_s=50e9)
    topology = leaf_spine([node] * 128, nodes_per_leaf=32, num_spines=8)
    visited = []
    expand = Routing._expand

    def counted(self, search, *, forward):
        visited.append(expand(self, search, forward=forward))
        return visited[-1]

    monkeypatch.setattr(Routing, "_expand", counted)
    routing = Routing(topology)
    for rank in range(1024):
        routing.between_ranks(rank, (rank + 1) % 1024)
    assert len(topology.vertices) > 2000
    assert len(visited) < 8 * 1024, len(visited)


@pytest.mark.parametrize("seed", range(5))
def test_routes_do_not_depend_on_the_order_of_vertices_and_links(seed):
    rng = np.random.default_rng(seed)
    topology = leaf_spine(
        [machine("ndv2"), machine("hgx-a100"), machine("mi250")], nodes_per_leaf=1, num_spines=2
    )
    place = rng.permutation(len(topology.vertices))  # of each vertex in the other topology
    order = np.argsort(place)
    links = [
        replace(link, source=int(place[link.source]), target=int(place[link.target]))
        for link in topology.links
    ]
    other = Topology(
        vertices=tuple(topology.vertices[i] for i in order),
        links=tuple(links[i] for i in rng.permutation(len(links))),
    )
    routing, relabelled = Routing(topology), Routing(other)
    for _ in range(60):
        source, target = (int(i) for i in rng.choice(topology.devices, 2, replace=False))
        ends = int(place[source]), int(place[target])
        assert routing.num_paths(source, target) == relabelled.num_paths(*ends)
        there, here = relabelled.shortest(*ends), routing.shortest(source, target)
        assert len(there) == len(here)
        assert sum(other.latency_s[list(there)]) == pytest.approx(sum(topology.latency_s[list(here)]))
