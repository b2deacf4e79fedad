"""What NCCL knows about the ranks of a collective: nodes, links, architecture and channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import TYPE_CHECKING

from foreshard.comm.fabric import Fabric, fabric_between
from foreshard.comm.nccl.channels import (
    ChannelLinks,
    Channels,
    ring_channels,
    switch_channels,
    tree_channels,
)
from foreshard.comm.nccl.constants import (
    GIGA,
    Constants,
    capability_of,
    channel_speeds,
    limit,
    nvlink_bytes_per_s,
    pcie_bytes_per_s,
    row_of,
)
from foreshard.errors import SpecError
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster, NodeGroup
    from foreshard.spec.device import Device

_SLOWEST_CARD = 12.5 * GIGA  # network cards of a data centre carry 100 Gb/s or more
# From Hopper on, rings over nodes that are faster than this get four channels each, up to so many channels.
_FAST_RING = 45.0 * GIGA
_ENOUGH_CHANNELS = 16
_REPORTED_FROM_S = 30e-6  # least latency that a network plugin reports (EFA's: 35 and 75 us)
_SWITCHED = 8  # devices of a node that NVLink joins through a switch, Volta's cube mesh aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """Ranks of a collective as NCCL's cost model sees them.

    A node is a set of ranks that NVLink joins, also across hosts (NVL72), or a host without NVLink.
    """

    num_ranks: int
    num_nodes: int
    capability: int  # least compute capability, times 10
    nvlink: bool  # the ranks of a node meet over NVLink
    switched: bool  # through a switch
    ring: Channels
    tree: Channels
    switch: Channels | None  # that reduce in the switch, None where no switch can
    cpu: str = "intel"  # vendor: "intel" also stands for Arm
    collnet: bool = False  # the network reduces (SHARP), and NCCL is told to use it
    plugin_latency_s: float = 0.0  # of a hop, as the network plugin reports it; InfiniBand's reports none
    release: str = ""  # whose rules hold: one of `releases`, empty for that of the tables
    simple_tree: bool = False  # a tree enters and leaves a node at one device, as with a card for each device
    far_cards: bool = False  # network cards are not below a PCIe switch with the devices, which LL128 needs
    constants: Constants = field(default_factory=dict)  # of this machine, in place of NCCL's tables

    @property
    def row(self) -> str:
        """Return the row of the tuning tables."""
        return row_of(self.capability)

    @property
    def ranks_per_node(self) -> float:
        """Return the mean number of ranks of a node."""
        return self.num_ranks / self.num_nodes

    @property
    def num_channels(self) -> int:
        """Return the channels that a ring runs on: two for each one of the search."""
        doubled = 2 * self.ring.count
        fast = self.ring.intra_bytes_per_s > _FAST_RING
        again = self.capability >= 90 and self.num_nodes > 1 and fast and doubled < _ENOUGH_CHANNELS
        return min(limit("channels"), 2 * doubled if again else doubled)


def communicator_of(
    cluster: Cluster, num_ranks: int, *, collnet: bool = False, release: str = ""
) -> Communicator:
    """Return the communicator of the first `num_ranks` devices of a cluster.

    Network cards are not part of a cluster's description: every device is taken to have its share of the
    node's rate on a card of its own, or cards of 100 Gb/s where that share is less. A NIC latency far
    above that of InfiniBand is taken as what the network plugin reports. `release` is one of `releases()`.

    Raises
    ------
    SpecError
        There are not two ranks, or a device is not of NVIDIA, which NCCL needs.
    """
    if num_ranks < 2:
        raise SpecError(
            f"a communicator of {number_of(num_ranks, 'rank')}",
            key="CLUSTER",
            value=num_ranks,
            rule="NCCL chooses between two ranks or more",
            fix="Take a cluster of several devices",
        )
    fabric = fabric_between(cluster, range(num_ranks))
    groups = _groups(cluster, num_ranks)
    devices = {group.device for group in groups}
    capability = min(_capability(device) for device in devices)
    # NVLink between pairs inside a host does not join the host's other devices: they meet over PCIe.
    joined = all(group.nvlink_domain > 1 and group.nvlink_domain >= group.per_node for group in groups)
    inside = int(min(num_ranks, fabric.domain if joined else fabric.per_node))
    nodes = ceil(num_ranks / inside)
    nvlink = inside > 1 and joined
    in_switch = bool(fabric.in_network) and nvlink
    links = _links(devices, fabric, inside, nodes, capability, joined=joined, release=release)
    ring = ring_channels(links, capability)
    latency_s = float(fabric.nic_latency_s)
    return Communicator(
        num_ranks=num_ranks,
        num_nodes=nodes,
        capability=capability,
        nvlink=nvlink,
        switched=in_switch or bool(nvlink and fabric.domain >= _SWITCHED and capability >= 80),
        ring=ring,
        tree=tree_channels(links, ring),
        switch=switch_channels(links) if in_switch else None,
        collnet=collnet,
        plugin_latency_s=latency_s if nodes > 1 and latency_s >= _REPORTED_FROM_S else 0.0,
        release=release,
        # From Hopper on: where a balanced tree finds no card for a second device, the search tries this one.
        simple_tree=nodes > 1 and (inside == 1 or (capability >= 90 and links.cards >= inside)),
    )


def communicator_between(cluster: Cluster, ranks: Sequence[int]) -> Communicator:
    """Return the communicator of any ranks of a cluster, each of which has its share of its node's cards.

    Examples
    --------
    >>> from foreshard.catalog.clusters import load_cluster
    >>> found = communicator_between(load_cluster("4x8xh100-sxm"), range(0, 32, 8))
    >>> found.num_ranks, found.num_nodes
    (4, 4)
    """
    parts, first = [], 0
    for group in cluster.nodes:
        inside = [rank - first for rank in ranks if first <= rank < first + group.num_devices]
        first += group.num_devices
        linked = max(Counter(rank // group.nvlink_domain for rank in inside).values(), default=1)
        per_node = Counter(rank // group.per_node for rank in inside)
        for width, count in sorted(Counter(per_node.values()).items()):
            share = group.nic_bytes_per_s * width / group.per_node
            parts.append(
                replace(group, count=count, per_node=width, nic_bytes_per_s=share, nvlink_domain=linked)
            )
    return communicator_of(replace(cluster, nodes=tuple(parts)), len(ranks))


def has_nccl(cluster: Cluster, num_ranks: int) -> bool:
    """Return whether NCCL runs on the first `num_ranks` devices of a cluster."""
    devices = [group.device for group in _groups(cluster, num_ranks)]
    return all(device.vendor == "nvidia" and capability_of(device.arch, device.name) for device in devices)


def _groups(cluster: Cluster, num_ranks: int) -> list[NodeGroup]:
    """Return the groups of nodes that the first ranks reach."""
    found, start = [], 0
    for group in cluster.nodes:
        if start < num_ranks:
            found.append(group)
        start += group.num_devices
    return found


def _capability(device: Device) -> int:
    found = capability_of(device.arch, device.name)
    if device.vendor != "nvidia" or found is None:
        raise SpecError(
            f"NCCL does not run on {device.name}",
            key="CLUSTER",
            value=device.name,
            rule="NCCL runs on devices of NVIDIA from Pascal on",
            fix="Take a cluster of such devices",
        )
    return found


def _links(
    devices: set[Device],
    fabric: Fabric,
    inside: int,
    nodes: int,
    capability: int,
    *,
    joined: bool,
    release: str,
) -> ChannelLinks:
    """Return what the slowest device of a node gives to channels."""
    pcie = min(pcie_bytes_per_s(device.pcie_bytes_per_s or 0.0) for device in devices)
    links = inf
    if inside > 1:
        links = nvlink_bytes_per_s(float(fabric.intra_bytes_per_s), capability) if joined else pcie
    cards, card = _cards(fabric, inside) if nodes > 1 else (0, inf)
    speeds = channel_speeds(capability, over_network=nodes > 1, release=release)
    return ChannelLinks(
        ranks=inside,
        device_bytes_per_s=links,
        cards=cards,
        card_bytes_per_s=min(card, pcie),
        speeds=speeds,
    )


def _cards(fabric: Fabric, inside: int) -> tuple[int, float]:
    """Return the network cards that the ranks of a node use, and bytes/s of each."""
    rate = float(fabric.nic_bytes_per_s) * inside / float(fabric.per_node)
    cards = max(1, min(inside, round(rate / _SLOWEST_CARD)))
    return cards, rate / cards
