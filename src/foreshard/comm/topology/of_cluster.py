"""Topology of a cluster: its nodes, what joins their devices, their NICs and the network between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from foreshard.catalog.fabrics import link_generation
from foreshard.comm.fabric import Fabric, fabric_of
from foreshard.comm.topology.draft import Draft, Port
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import CUBE_MESH, MI250_LINKS, full_lanes, lanes_of, nics
from foreshard.comm.topology.regular import neighbours
from foreshard.errors import SpecError, unknown

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster, NodeGroup

Rates = Literal["datasheet", "fitted"]

# Devices on a board with direct links have one to each of seven others, or as many as their domain.
_BOARD = 8
# Dies of AMD MI250 are joined as ``machines.MI250_LINKS`` says, 50 GB/s for each link.
_DIES, _DIE_LINK = ("mi250-gcd", "mi250x-gcd"), 50e9


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Rates and latencies of a node group's links."""

    device_bytes_per_s: float  # of one device, all links of the scale-up domain together
    pcie_bytes_per_s: float
    nic_bytes_per_s: float  # whole node
    hop_s: float  # device to device
    nic_latency_s: float  # NIC to NIC
    can_reduce: bool  # whether the switch of the scale-up domain adds up


@dataclass(frozen=True, slots=True)
class _Node:
    """A node in a draft: its place and its ports."""

    rack: str
    ports: tuple[Port, ...]


def topology_of(
    cluster: Cluster,
    *,
    rates: Rates = "datasheet",
    nics_per_node: int | None = None,
) -> Topology:
    """Return the topology of a cluster; rank r of the cluster is rank r of it.

    Devices of one scale-up domain meet at a switch, over direct links (cube mesh, full mesh, torus) or over
    PCIe, as the catalog says. Every node has its NIC rate in equal parts on its NICs. With oversubscription,
    leaves carry that much less to the spines than their nodes send; a network of kind ``rail`` has a switch
    for the i-th NICs of all nodes. Racks between which the cluster file gives links meet over these. Other
    kinds of network than ``rail`` have leaves and spines, one unless the cluster file says more.

    A ring leaves a node by one NIC: it takes as many rings as a node has NICs, each through another, to take
    as long as ``comm/collectives.py`` says at fitted rates.

    Parameters
    ----------
    cluster : Cluster
    rates : {'datasheet', 'fitted'}
        Link rates and latencies of datasheets, or those that rings reach (``comm/fabric.py``).
    nics_per_node : int, optional
        Those of the cluster unless given: one up to 100 Gb/s, else one for each device.

    Raises
    ------
    SpecError
        If the rate of a link is not known, or several nodes have no NIC.
    """
    if rates not in ("datasheet", "fitted"):
        raise unknown("rates", str(rates), ("datasheet", "fitted"), key="rates")
    if nics_per_node is not None and nics_per_node < 1:
        what, rule = f"nics_per_node {nics_per_node}", "It is at least 1"
        raise SpecError(what, key="nics_per_node", value=nics_per_node, rule=rule)
    draft = Draft()
    nodes: list[_Node] = []
    for g, group in enumerate(cluster.nodes):
        speeds = _speeds(group, rates)
        if cluster.num_nodes > 1 and not speeds.nic_bytes_per_s:
            rule = "Nodes of a cluster of several have a NIC"
            raise SpecError(f"nodes[{g}] has none", key=f"nodes[{g}].nic", value=0.0, rule=rule)
        nodes += _group(draft, group, speeds, first=len(nodes), nics_per_node=nics_per_node or group.num_nics)
    _join_nodes(draft, cluster, nodes, cluster.network.nodes_per_leaf)
    return draft.topology(cluster.name)


def _speeds(group: NodeGroup, rates: Rates) -> _Speeds:
    """Return the rates of a group's links: of the datasheet, or as far as rings reach them."""
    ideal = rates == "datasheet"
    fabric = fabric_of(group, fidelity="datasheet" if ideal else "zero-shot")
    device = fabric.intra_bytes_per_s if ideal else _reached(fabric)
    pcie = group.device.pcie_bytes_per_s
    return _Speeds(
        device_bytes_per_s=device,
        pcie_bytes_per_s=device if group.nvlink_domain <= 1 else (pcie or device),
        nic_bytes_per_s=group.nic_bytes_per_s * (1.0 if ideal else fabric.nic_ring_eff),
        hop_s=fabric.hop_s,
        nic_latency_s=group.nic_latency_s,
        can_reduce=bool(fabric.in_network),
    )


def _reached(fabric: Fabric) -> float:
    """Return what a ring over a whole domain reaches of a device's links."""
    inside = max(fabric.domain, 2.0)
    scale = (inside / fabric.reference) ** fabric.scaling if fabric.scaling else 1.0
    return float(fabric.intra_bytes_per_s * fabric.ring_eff * scale)


def _group(draft: Draft, group: NodeGroup, speeds: _Speeds, *, first: int, nics_per_node: int) -> list[_Node]:
    """Add the nodes of a group, the first of which has a number."""
    devices = [
        draft.vertex("device", f"node{first + i}.gpu{j}", node=first + i)
        for i in range(group.count)
        for j in range(group.per_node)
    ]
    per_node, domain = group.per_node, group.nvlink_domain
    if domain > 1:
        for start in range(0, len(devices), domain):
            inside = devices[start : start + domain]
            _join_domain(draft, group, inside, speeds, name=f"node{first + start // per_node}")
    nodes = []
    for i in range(group.count):
        own, node = devices[i * per_node : (i + 1) * per_node], first + i
        slots = _join_host(draft, own, speeds, node) if domain < per_node else {}
        ports: tuple[Port, ...] = ()
        if speeds.nic_bytes_per_s:
            each = speeds.nic_bytes_per_s / nics_per_node
            # Half of the latency on the way into the network, half on the way out.
            ports = nics(draft, node, own, nics_per_node, each, speeds.nic_latency_s / 2, slots=slots)
        nodes.append(_Node(group.rack or "", ports))
    return nodes


def _join_host(
    draft: Draft, devices: Sequence[int], speeds: _Speeds, node: int
) -> dict[int, tuple[int, int]]:
    """Join the devices of a node over PCIe; return the slot of each, which its NIC traffic passes too.

    A slot is two shared resources: out of the device and into it.
    """
    host, rate = draft.switch(f"node{node}.pcie", node=node), speeds.pcie_bytes_per_s
    slots = {}
    for i, device in enumerate(devices):
        out, into = (draft.resource(f"node{node}.gpu{i}.pcie {way}", rate) for way in ("out", "in"))
        draft.send(device, host, rate, speeds.hop_s / 2, shared=(out,))
        draft.send(host, device, rate, speeds.hop_s / 2, shared=(into,))
        slots[device] = out, into
    return slots


def _join_domain(
    draft: Draft, group: NodeGroup, devices: Sequence[int], speeds: _Speeds, *, name: str
) -> None:
    """Join the devices of one scale-up domain: by a switch, or by direct links where the device has those."""
    if len(devices) < 2:
        return
    lanes = _direct_links(group, len(devices))
    if lanes:
        for one, other, part in lanes:
            draft.join(devices[one], devices[other], part * speeds.device_bytes_per_s, speeds.hop_s)
        return
    node = int(name.removeprefix("node"))
    switch = draft.switch(
        f"{name}.nvswitch{devices[0]}", node=node, can_reduce=speeds.can_reduce and len(devices) > 2
    )
    for device in devices:
        draft.join(device, switch, speeds.device_bytes_per_s, speeds.hop_s / 2)


def _direct_links(group: NodeGroup, size: int) -> list[tuple[int, int, float]]:
    """Return direct links of a domain as (device, device, part of a device's rate); none behind a switch."""
    device = group.device
    generation = link_generation(device.arch, device.link, name=device.name)
    if generation == "volta-nvlink" and size <= _BOARD:
        rows = [row[:size] for row in CUBE_MESH[:size]]
        return [(one, other, lanes / 6) for one, other, lanes in lanes_of(rows)]
    if device.link.startswith("ICI"):
        return _torus_links(size, 3 if "6 links" in device.link or size > 256 else 2)
    if device.name in _DIES and size <= 16:
        lane = _DIE_LINK / device.link_bytes_per_s
        return [(one, other, lanes * lane) for one, other, lanes in MI250_LINKS if max(one, other) < size]
    if generation == "mesh":
        peers = max(_BOARD, size) - 1
        return [(one, other, 1 / peers) for one, other, _ in full_lanes(size)]
    return []


def _torus_links(size: int, num_dimensions: int) -> list[tuple[int, int, float]]:
    """Return the links of a torus of sides as equal as the number of devices allows."""
    sides = _sides(size, num_dimensions)
    found, stride = [], 1
    for side in reversed(sides):
        for start in range(size):
            if start // stride % side == 0:
                found += [
                    (start + one * stride, start + other * stride, 0.5 / num_dimensions)
                    for one, other in neighbours("ring", side)
                ]
        stride *= side
    return found


def _sides(size: int, num_dimensions: int) -> list[int]:
    """Return whole sides with a product, the first as near to the root of it as divides it.

    Examples
    --------
    >>> _sides(64, 3), _sides(32, 2)
    ([4, 4, 4], [4, 8])
    """
    sides: list[int] = []
    for left in range(num_dimensions, 1, -1):
        rest = size // prod(sides)
        root = round(rest ** (1 / left))
        sides.append(max(side for side in range(1, root + 1) if rest % side == 0))
    return [*sides, size // prod(sides)]


def _join_nodes(draft: Draft, cluster: Cluster, nodes: Sequence[_Node], nodes_per_leaf: int) -> None:
    """Join the nodes of a cluster, rack by rack where links between racks are given."""
    if len(nodes) < 2:
        return
    if not cluster.links:
        _core(draft, cluster, nodes, "core", nodes_per_leaf)
        return
    racks = {rack: [node for node in nodes if node.rack == rack] for rack in {node.rack: 0 for node in nodes}}
    cores = {
        rack: _core(draft, cluster, some, f"rack {rack}" if rack else "no rack", nodes_per_leaf)
        for rack, some in racks.items()
    }
    for link in cluster.links:
        one, other = (cores[rack] for rack in link.between)
        draft.join(one, other, link.bandwidth_bytes_per_s, link.latency_s)
    # Racks that no chain of links joins meet over a network that does not bound them.
    apart = _components(list(racks), [link.between for link in cluster.links])
    if len(apart) > 1:
        rate = sum(port.bytes_per_s for node in nodes for port in node.ports)
        center = draft.switch("core")
        for rack in apart:
            draft.join(cores[rack], center, rate)


def _components(racks: Sequence[str], links: Sequence[tuple[str, str]]) -> list[str]:
    """Return one rack of each set that links join."""
    first = {rack: rack for rack in racks}
    for one, other in links:
        old, new = first[other], first[one]
        first = {rack: new if known == old else known for rack, known in first.items()}
    return list(dict.fromkeys(first.values()))


def _core(draft: Draft, cluster: Cluster, nodes: Sequence[_Node], name: str, nodes_per_leaf: int) -> int:
    """Join nodes at a core switch, over leaves or rails if they bound what passes, and return the core.

    Several spines share what a leaf sends; the first of them is returned.
    """
    network, spines = cluster.network, [draft.switch(name)]
    spines += [draft.switch(f"{name}.spine{i}") for i in range(1, network.spines)]
    if network.kind == "rail":
        rails = max(len(node.ports) for node in nodes)
        leaves = [[node.ports[rail] for node in nodes if rail < len(node.ports)] for rail in range(rails)]
    elif network.oversubscription > 1.0 or nodes_per_leaf > 1 or len(spines) > 1:
        starts = range(0, len(nodes), nodes_per_leaf)
        leaves = [
            [port for node in nodes[start : start + nodes_per_leaf] for port in node.ports]
            for start in starts
        ]
    else:
        for node in nodes:
            for port in node.ports:
                draft.plug(port, spines[0])
        return spines[0]
    kind = "rail" if network.kind == "rail" else "leaf"
    for i, ports in enumerate(leaves):
        leaf = draft.switch(f"{name}.{kind}{i}")
        for port in ports:
            draft.plug(port, leaf)
        uplink = sum(port.bytes_per_s for port in ports) / network.oversubscription
        for spine in spines:
            draft.join(leaf, spine, uplink / len(spines))
    return spines[0]
