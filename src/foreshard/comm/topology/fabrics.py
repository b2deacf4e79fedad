"""Fabrics between machines: one switch, leaf-spine, fat-tree, rails, two planes, dragonfly.

Every fabric takes machines of any kinds in order (see ``machines.py``), so that a pod of different machines
is a list of them. Switches do not slow what passes them: their links bound it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from foreshard.comm.topology.draft import Draft, Port
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import Machine
from foreshard.comm.topology.regular import neighbours
from foreshard.errors import SpecError


def one_machine(machine: Machine, *, name: str = "one machine") -> Topology:
    """Return a machine on its own; its NICs lead nowhere."""
    draft = Draft()
    machine(draft, 0)
    return draft.topology(name)


def flat(machines: Sequence[Machine], *, can_reduce: bool = False, name: str = "flat") -> Topology:
    """Return machines around one switch that passes all they send.

    Examples
    --------
    >>> from foreshard.comm.topology.machines import machine
    >>> flat([machine("hgx-h100")] * 2).num_ranks
    16
    """
    draft = Draft()
    ports = _built(draft, machines)
    switch = draft.switch("fabric", can_reduce=can_reduce)
    for port in _all(ports):
        draft.plug(port, switch)
    return draft.topology(name)


def leaf_spine(
    machines: Sequence[Machine],
    *,
    nodes_per_leaf: int,
    num_spines: int,
    oversubscription: float = 1.0,
    hop_s: float = 0.0,
    name: str = "leaf-spine",
) -> Topology:
    """Return two levels: machines on leaves, every leaf joined to every spine.

    Parameters
    ----------
    oversubscription : float, >= 1
        What the machines of a leaf send over what its links to the spines carry.
    hop_s : float, seconds
        Latency between a leaf and a spine.
    """
    _at_least(nodes_per_leaf=nodes_per_leaf, num_spines=num_spines, oversubscription=oversubscription)
    draft = Draft()
    ports = _built(draft, machines)
    groups = [ports[i : i + nodes_per_leaf] for i in range(0, len(ports), nodes_per_leaf)]
    leaves = {f"leaf{i}": _all(group) for i, group in enumerate(groups)}
    _two_levels(draft, leaves, [f"spine{i}" for i in range(num_spines)], oversubscription, hop_s)
    return draft.topology(name)


def rail_optimised(
    machines: Sequence[Machine],
    *,
    num_spines: int,
    oversubscription: float = 1.0,
    hop_s: float = 0.0,
    name: str = "rail-optimised",
) -> Topology:
    """Return rails: the r-th ports of all machines meet at switch r, and rails meet at the spines.

    Without spines, traffic changes rails inside machines only.
    """
    _at_least(oversubscription=oversubscription)
    draft = Draft()
    rails: dict[str, list[Port]] = defaultdict(list)
    for ports in _built(draft, machines):
        for rail, port in enumerate(ports):
            rails[f"rail{rail}"].append(port)
    _two_levels(draft, rails, [f"spine{i}" for i in range(num_spines)], oversubscription, hop_s)
    return draft.topology(name)


def dual_plane(
    machines: Sequence[Machine],
    *,
    nodes_per_leaf: int,
    num_spines: int,
    oversubscription: float = 1.0,
    hop_s: float = 0.0,
    name: str = "dual-plane",
) -> Topology:
    """Return two separate leaf-spine planes; every port has half of its rate on each.

    As in Alibaba HPN (Qian et al., SIGCOMM 2024), where the two ports of a NIC lead to different planes.
    `num_spines` counts those of one plane.
    """
    _at_least(nodes_per_leaf=nodes_per_leaf, num_spines=num_spines, oversubscription=oversubscription)
    draft = Draft()
    ports = _built(draft, machines)
    halves = [[replace(port, bytes_per_s=port.bytes_per_s / 2) for port in some] for some in ports]
    for plane in "ab":
        leaves = {
            f"leaf{plane}{i // nodes_per_leaf}": _all(halves[i : i + nodes_per_leaf])
            for i in range(0, len(halves), nodes_per_leaf)
        }
        _two_levels(draft, leaves, [f"spine{plane}{i}" for i in range(num_spines)], oversubscription, hop_s)
    return draft.topology(name)


def fat_tree(
    machines: Sequence[Machine],
    *,
    radix: int,
    oversubscription: float = 1.0,
    hop_s: float = 0.0,
    name: str = "fat-tree",
) -> Topology:
    """Return three levels of switches with `radix` ports (Al-Fares et al., SIGCOMM 2008).

    Edge switches take radix / 2 ports of machines each; a pod has radix / 2 edge and radix / 2 aggregation
    switches. Oversubscription slows the links above the edge.

    Raises
    ------
    SpecError
        For an odd radix, or more ports than radix ** 3 / 4.
    """
    _at_least(radix=radix, oversubscription=oversubscription)
    draft, half = Draft(), radix // 2
    ports = _all(_built(draft, machines))
    if radix % 2 or len(ports) > half * half * radix:
        rule = f"Switches have an even number of ports, and {radix} take {half * half * radix:,} NICs"
        raise SpecError(f"{len(ports):,} NICs on a fat-tree", key="radix", value=radix, rule=rule)
    cores = [draft.switch(f"core{i}") for i in range(half * half)]
    for pod in range(ceil(len(ports) / (half * half))):
        inside = ports[pod * half * half : (pod + 1) * half * half]
        above = [draft.switch(f"agg{pod}.{i}") for i in range(half)]
        edges = [inside[i : i + half] for i in range(0, len(inside), half)]
        rate = max(port.bytes_per_s for port in inside) / oversubscription
        for i, some in enumerate(edges):
            edge = draft.switch(f"edge{pod}.{i}")
            for port in some:
                draft.plug(port, edge)
            for agg in above:
                draft.join(edge, agg, rate, hop_s)
        for i, agg in enumerate(above):
            for core in cores[i * half : (i + 1) * half]:
                draft.join(agg, core, rate, hop_s)
    return draft.topology(name)


def dragonfly(
    machines: Sequence[Machine],
    *,
    nodes_per_router: int,
    routers_per_group: int,
    local_bytes_per_s: float,
    global_bytes_per_s: float,
    hop_s: float = 0.0,
    name: str = "dragonfly",
) -> Topology:
    """Return groups of routers (Kim et al., ISCA 2008): all of a group joined, one link between two groups.

    The links of a group to others are dealt to its routers in turn.
    """
    _at_least(nodes_per_router=nodes_per_router, routers_per_group=routers_per_group)
    draft = Draft()
    ports = _built(draft, machines)
    routers = []
    for i in range(ceil(len(ports) / nodes_per_router)):
        group, place = divmod(i, routers_per_group)
        routers.append(draft.switch(f"router{group}.{place}"))
        for port in _all(ports[i * nodes_per_router : (i + 1) * nodes_per_router]):
            draft.plug(port, routers[-1])
    groups = [routers[i : i + routers_per_group] for i in range(0, len(routers), routers_per_group)]
    for inside in groups:
        for one, other in neighbours("full", len(inside)):
            draft.join(inside[one], inside[other], local_bytes_per_s, hop_s)
    for first, second in neighbours("full", len(groups)):
        ends = (groups[first][(second - 1) % len(groups[first])], groups[second][first % len(groups[second])])
        draft.join(*ends, global_bytes_per_s, hop_s)
    return draft.topology(name)


def _built(draft: Draft, machines: Sequence[Machine]) -> list[tuple[Port, ...]]:
    """Add all machines and return their ports, machine by machine."""
    if not machines:
        raise SpecError("no machine", key="machines", rule="A fabric joins at least one machine")
    return [machine(draft, node) for node, machine in enumerate(machines)]


def _all(ports: Iterable[Sequence[Port]]) -> list[Port]:
    return [port for some in ports for port in some]


def _two_levels(
    draft: Draft, leaves: dict[str, list[Port]], spines: Sequence[str], oversubscription: float, hop_s: float
) -> None:
    """Add leaves with their ports, and spines that carry an equal part of each leaf's traffic."""
    top = [draft.switch(spine) for spine in spines]
    for name, ports in leaves.items():
        leaf = draft.switch(name)
        for port in ports:
            draft.plug(port, leaf)
        uplink = sum(port.bytes_per_s for port in ports) / oversubscription
        for spine in top:
            draft.join(leaf, spine, uplink / len(top), hop_s)


def _at_least(**values: float) -> None:
    """Refuse a count or ratio below 1."""
    for key, value in values.items():
        if value < 1:
            raise SpecError(f"{key} {value:g}", key=key, value=value, rule="It is at least 1")
