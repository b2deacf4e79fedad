"""Bounds equal published optima and brute force, and obey the laws of bandwidth."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreshard.comm.synthesis.bounds import (
    all_gather_bytes_per_s,
    all_reduce_bytes_per_s,
    all_to_all_bytes_per_s,
    latencies_s,
    lower_bound_s,
    reduce_scatter_bytes_per_s,
)
from foreshard.comm.synthesis.symmetry import translations_of
from foreshard.comm.topology.graph import Edge, SharedResource, Topology, Vertex
from foreshard.comm.topology.importers.teccl import teccl_dgx2, teccl_ndv2
from foreshard.errors import SpecError

sys.path.insert(0, str(Path(__file__).parent))
from published_topologies import forestcoll_a100, forestcoll_mi250
from synthesis_cases import random_network, torus

PUBLISHED = {
    "A100 x1": (lambda: forestcoll_a100(1), 342.857),
    "A100 x2": (lambda: forestcoll_a100(2), 346.667),
    "MI250 x1": (lambda: forestcoll_mi250(1), 342.857),
    "MI250 x2": (lambda: forestcoll_mi250(2), 354.133),
    "A100 x4": (lambda: forestcoll_a100(4), 266.667),
    "A100 x8": (lambda: forestcoll_a100(8), 228.571),
    "DGX2 x2": (teccl_dgx2, 129.032),
    "NDv2 x2": (lambda: teccl_ndv2(2), 25.0),
    "NDv2 x4": (lambda: teccl_ndv2(4), 16.667),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_gather_rates_are_the_published_optima(name):
    make, gb_per_s = PUBLISHED[name]
    assert all_gather_bytes_per_s(make()) / 1e9 == pytest.approx(gb_per_s, abs=5e-4)


def cuts(topology):
    for flags in itertools.product([False, True], repeat=len(topology.vertices)):
        inside = np.array(flags)
        held = inside[topology.devices]
        if held.any() and not held.all():
            leaving = (one.bytes_per_s for one in topology.links if inside[one.source] > inside[one.target])
            yield int(held.sum()), sum(leaving)


@pytest.mark.parametrize("seed", range(25))
def test_all_gather_and_all_reduce_equal_brute_force_over_cuts(seed):
    rng = np.random.default_rng(seed)
    devices, switches = int(rng.integers(2, 6)), int(rng.integers(0, 3))
    topology = random_network(rng, devices, switches, rng.uniform(0.1, 0.7))
    every = list(cuts(topology))
    worst = min(out / held for held, out in every)
    assert all_gather_bytes_per_s(topology) == pytest.approx(devices * worst, rel=1e-6)
    vertices = tuple(
        replace(one, can_reduce=True) if one.kind == "switch" else one for one in topology.vertices
    )
    if switches:  # with reduction in switches, only cuts bind
        reducing = Topology(vertices=vertices, links=topology.links)
        assert all_reduce_bytes_per_s(reducing) == pytest.approx(min(out for _, out in every), rel=1e-6)
        assert all_reduce_bytes_per_s(topology) <= all_reduce_bytes_per_s(reducing) * (1 + 1e-9)


COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_bounds_scale_with_bandwidth_and_no_link_slows(collective, seed):
    rng = np.random.default_rng(seed)
    topology = random_network(rng, 5, 1, 0.3)
    bound = lower_bound_s(collective, 100.0, topology)
    twice = tuple(replace(link, bytes_per_s=2 * link.bytes_per_s) for link in topology.links)
    faster = replace(topology, links=twice)
    assert lower_bound_s(collective, 100.0, faster) == pytest.approx(bound / 2, rel=1e-6)
    more = Edge(source=int(rng.integers(3)), target=4, bytes_per_s=3.0)
    wider = replace(topology, links=(*topology.links, more))
    assert lower_bound_s(collective, 100.0, wider) <= bound * (1 + 1e-6)


def test_the_reduce_scatter_is_the_all_gather_backwards():
    topology = random_network(np.random.default_rng(7), 5, 2, 0.3)
    turned = tuple(replace(link, source=link.target, target=link.source) for link in topology.links)
    backwards = all_gather_bytes_per_s(replace(topology, links=turned))
    assert reduce_scatter_bytes_per_s(topology) == pytest.approx(backwards)


def test_a_switch_that_reduces_halves_the_bound_of_an_all_reduce():
    plain = forestcoll_a100(1)
    vertices = tuple(
        replace(one, can_reduce=True, can_multicast=True) if one.kind == "switch" else one
        for one in plain.vertices
    )
    reducing = replace(plain, vertices=vertices)
    assert all_reduce_bytes_per_s(plain) / 1e9 == pytest.approx(300 * 8 / 14)
    assert all_reduce_bytes_per_s(reducing) / 1e9 == pytest.approx(300)


def test_all_to_all_of_a_symmetric_network_equals_that_of_the_whole_program():
    topology = torus(2, 4)
    assert translations_of(topology) is not None
    # one link a hair faster: no shift is left, the optimum stays
    links = list(topology.links)
    links[0] = replace(links[0], bytes_per_s=links[0].bytes_per_s * (1 + 1e-9))
    uneven = replace(topology, links=tuple(links))
    assert translations_of(uneven) is None
    assert all_to_all_bytes_per_s(uneven) == pytest.approx(all_to_all_bytes_per_s(topology), rel=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: teccl_ndv2(2), lambda: forestcoll_a100(2), lambda: torus(4, 4), teccl_dgx2]
)
def test_an_all_to_all_without_time_for_its_program_has_a_looser_bound(make):
    """Catches the solution of a program that ran out of time, which bounds nothing."""
    topology = make()
    exact, at_once = all_to_all_bytes_per_s(topology), all_to_all_bytes_per_s(topology, limit_s=0.0)
    assert exact * (1 - 1e-6) <= at_once < 4 * exact


def test_the_way_of_the_last_byte_comes_behind_the_time_of_its_link():
    """By hand: 31 of 32 chunks of 1 GB over 125 GB/s, and 0.35 us to the switch and from it."""
    bound = lower_bound_s("all-gather", 1e9, teccl_dgx2())
    assert bound == pytest.approx(31 / 32 * 1e9 / 125e9 + 0.7e-6, rel=1e-9)


def test_a_shared_bus_bounds_what_its_links_carry_together():
    vertices = tuple(Vertex(name=name, kind="device") for name in "abc")
    pairs = itertools.permutations(range(3), 2)
    links = tuple(Edge(source=i, target=j, bytes_per_s=10.0, shared=(0,) if j == 2 else ()) for i, j in pairs)
    bus = SharedResource(name="bus", bytes_per_s=5.0)
    topology = Topology(vertices=vertices, links=links, shared=(bus,))
    assert all_gather_bytes_per_s(topology) == pytest.approx(3 * 5.0 / 2)


def test_latency_bounds_small_messages():
    topology = torus(4, 4)
    assert latencies_s("all-gather", topology) == pytest.approx((0.5e-6, 4 * 0.5e-6))
    assert lower_bound_s("all-gather", 1.0, topology) == pytest.approx(2e-6)


def test_unconnected_devices_and_unknown_collectives_are_refused():
    vertices = tuple(Vertex(name=name, kind="device") for name in "ab")
    with pytest.raises(SpecError, match="reach"):
        latencies_s(
            "all-gather", Topology(vertices=vertices, links=(Edge(source=0, target=1, bytes_per_s=1.0),))
        )
    with pytest.raises(SpecError, match="all-gather"):
        lower_bound_s("all-gathr", 1.0, torus(2, 2))
