"""Tiers of a topology, from devices up to the core, and a smaller topology in which boxes stand for many."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.graph import Kind, Topology
from foreshard.units import number_of

# Tiers inside a machine; switches of the fabric follow by distance.
_DEVICE, _SWITCH, _CPU, _NIC = range(4)
_MAX_BOXES = 48  # of nodes, and of a tier, before one stands for the rest


def tiers(topology: Topology) -> list[int]:
    """Return the tier of each vertex: devices 0, in machines switches 1, CPUs 2 and NICs 3, then the fabric.

    A switch of the fabric is one tier above the nearest vertex of a machine, or switch, that leads to it.
    """
    near: list[set[int]] = [set() for _ in topology.vertices]
    for link in topology.links:
        near[link.source].add(link.target)
        near[link.target].add(link.source)
    of_kind = {"device": _DEVICE, "switch": _SWITCH, "cpu": _CPU, "nic": _NIC}
    fabric = {i for i, vertex in enumerate(topology.vertices) if vertex.kind == "switch" and vertex.node < 0}
    found = [of_kind[vertex.kind] for vertex in topology.vertices]
    edge = [i for i in range(len(found)) if i not in fabric]
    tier, left = _NIC, set(fabric)
    while left:
        tier += 1
        here = {i for below in edge for i in near[below] if i in left} or left
        for i in here:
            found[i] = tier
        left, edge = left - here, sorted(here)
    return found


def summarised(topology: Topology) -> Topology:
    """Return a topology with a device for each machine, and one box for all of a tier that has too many.

    Links between two boxes become one of the sum of their bandwidths and the least of their latencies.
    """
    labels = _labels(topology)
    members: dict[str, list[int]] = defaultdict(list)
    for i, label in enumerate(labels):
        members[label].append(i)
    draft = Draft()
    box = {label: draft.vertex(_kind(topology, inside), label) for label, inside in members.items()}
    rates: dict[tuple[str, str], float] = defaultdict(float)
    latencies: dict[tuple[str, str], float] = {}
    for link in topology.links:
        ends = labels[link.source], labels[link.target]
        if ends[0] != ends[1]:
            rates[ends] += link.bytes_per_s
            latencies[ends] = min(latencies.get(ends, link.latency_s), link.latency_s)
    for (one, other), rate in rates.items():
        draft.send(box[one], box[other], rate, latencies[one, other])
    return draft.topology(topology.name)


def _kind(topology: Topology, inside: Sequence[int]) -> Kind:
    kinds = {topology.vertices[i].kind for i in inside}
    return "device" if "device" in kinds else min(kinds)


def _labels(topology: Topology) -> list[str]:
    """Return the box of each vertex."""
    devices = Counter(vertex.node for vertex in topology.vertices if vertex.kind == "device")
    nodes = sorted({vertex.node for vertex in topology.vertices if vertex.node >= 0})
    shown = set(nodes if len(nodes) <= _MAX_BOXES else nodes[: _MAX_BOXES - 1])
    rest = number_of(len(nodes) - len(shown), "more node")
    labels = []
    many = _crowded(topology)
    for tier, vertex in zip(tiers(topology), topology.vertices, strict=True):
        if vertex.node in shown:
            labels.append(f"node {vertex.node}: {number_of(devices[vertex.node], 'device')}")
        elif vertex.node >= 0:
            labels.append(rest)
        else:
            labels.append(many.get((tier, vertex.kind), vertex.name))
    return labels


def _crowded(topology: Topology) -> Mapping[tuple[int, Kind], str]:
    """Return the box of each tier outside machines that has too many vertices of a kind."""
    counts = Counter(
        (tier, vertex.kind)
        for tier, vertex in zip(tiers(topology), topology.vertices, strict=True)
        if vertex.node < 0
    )
    names = {"device": "device", "cpu": "CPU", "nic": "NIC"}
    return {
        place: f"{count:,} switches, tier {place[0] - _NIC}"
        if place[1] == "switch"
        else number_of(count, names[place[1]])
        for place, count in counts.items()
        if count > _MAX_BOXES
    }
