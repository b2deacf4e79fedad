"""Cluster: nodes of devices, their network and price; ranks are device indices in cluster order."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal

from foreshard.spec.codec import Range, check_amount
from foreshard.spec.device import Device
from foreshard.units import number_of

# Ten times the largest training run published (about 100,000 devices); more is a slip of the pen.
MAX_DEVICES = 2**20
NetworkKind = Literal["flat", "fat-tree", "rail", "leaf-spine", "torus", "dragonfly", "graph"]
_ONE_CARD_BYTES_PER_S = 12.5e9
"""A network card is made for up to so much: no node has several of less together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes in a row."""

    # nodes, and devices in each
    count: int
    device: Device
    per_node: int
    # whole node, one direction; one-way latency of a message between nodes
    nic_bytes_per_s: float
    nic_latency_s: float
    nics: int | None = None  # network cards of a node; None: see `num_nics`
    nic_assumed: bool = False  # the rate is that of the device or instance in the catalog, nobody stated it
    usd_per_h: float | None = None  # per node; None when no price is known
    # date of a catalog price as its source writes it; None for a price the user gave, or no price
    price_date: str | None = None
    instance: str | None = None  # name of the cloud instance, where the nodes are of one
    rack: str | None = None
    # power of a device while it computes and while it waits; None: see `device_power_w`
    busy_w: float | None = None
    idle_w: float | None = None
    carbon_kg_per_kwh: float | None = None  # of the electricity; None when not stated
    host_memory_bytes: float | None = None  # of a node, for what is offloaded; None when not stated
    # largest number of consecutive devices that share the device links (NVLink, xGMI, ICI): `per_node` on
    # boards with such links, 72 on nvl72 across nodes, 1 when devices meet only over PCIe
    nvlink_domain: int
    # (name, value) of constants of collectives that were measured here, by the names of `comm.fabric.Fabric`
    collectives: tuple[tuple[str, float], ...] = ()
    # how devices without device links reach each other: as servers with such cards were measured, one bus
    # shared by all; peer to peer through PCIe switches; through the memory of the host
    pcie: Literal["shared", "switch", "host"] = "shared"

    @property
    def num_devices(self) -> int:
        """Return the number of devices of the group."""
        return self.count * self.per_node

    @property
    def num_nics(self) -> int:
        """Return the cards that the devices of a node share; up to 100 Gb/s are those of one, if not stated.

        Of a faster network each device has its own part.
        """
        if self.nics is not None:
            return min(self.nics, self.per_node)
        return 1 if self.nic_bytes_per_s <= _ONE_CARD_BYTES_PER_S else self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The fabric between nodes: its kind, the ratio of edge to core bandwidth, and its switches.

    It is also the ``[network]`` table of a cluster file.
    """

    kind: NetworkKind = "flat"
    oversubscription: Annotated[float, Range(1.0, 1e4)] = 1.0
    nodes_per_leaf: Annotated[int, Range(1, MAX_DEVICES)] = 1
    spines: Annotated[int, Range(1, 4096)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between two racks, one direction."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of nodes in order, the network that joins them, and what was assumed to describe them.

    `warnings` are those of the assumptions that are more likely a slip than meant.
    """

    name: str
    nodes: tuple[NodeGroup, ...]
    network: Network = Network()
    links: tuple[Link, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return name, nodes and the network of each on one line; `nodes` has the rest."""
        groups = " + ".join(
            f"{number_of(group.count, 'node')} of {group.per_node} {group.device.name}, "
            f"{group.nic_bytes_per_s / 1e9:g} GB/s a node"
            for group in self.nodes
        )
        return f"<Cluster {self.name}: {groups}>"

    @property
    def num_devices(self) -> int:
        """Return the number of devices; ranks are 0 to this minus 1."""
        return sum(group.num_devices for group in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of all groups."""
        return sum(group.count for group in self.nodes)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the distinct devices in order of first appearance."""
        return tuple({group.device.name: group.device for group in self.nodes}.values())

    @property
    def usd_per_h(self) -> float | None:
        """Return the price of the whole cluster, or None when any group has none."""
        prices = [group.count * group.usd_per_h for group in self.nodes if group.usd_per_h is not None]
        return sum(prices) if len(prices) == len(self.nodes) else None

    def at_usd_per_device_hour(self, price: float | None) -> Cluster:
        """Return the cluster with every device at a price; None leaves what is known.

        Raises
        ------
        SpecError
            For what is no finite number of at least 0.
        """
        check_amount("--usd-per-device-hour", price, zero=True)
        if price is None:
            return self
        nodes = (replace(group, usd_per_h=price * group.per_node, price_date=None) for group in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def in_use(self, ranks: Collection[int]) -> Cluster:
        """Return the nodes that any of the ranks is on, as a cluster of their own."""
        if len(ranks) == self.num_devices:
            return self
        kept, first = [], 0
        for group in self.nodes:
            last = first + group.num_devices
            if used := {(rank - first) // group.per_node for rank in ranks if first <= rank < last}:
                kept.append(replace(group, count=len(used)))
            first = last
        return replace(self, nodes=tuple(kept))

    def node_group_of(self, rank: int) -> NodeGroup:
        """Return the group whose device has this rank."""
        return self._locate(rank)[0]

    def default_precision(self, *, of_all: bool = True) -> str:
        """Return the precision where none is stated: bf16, fp16 where devices have no bf16, else fp32.

        It is one that all devices have, or any of them.
        """
        devices = [group.device for group in self.nodes]
        have = all if of_all else any
        able = (name for name in ("bf16", "fp16") if have(device.supports(name) for device in devices))
        return next(able, "fp32")

    def device_of(self, rank: int) -> Device:
        """Return the device of this rank."""
        return self._locate(rank)[0].device

    def devices_on(self, ranks: Sequence[int]) -> list[tuple[Device, int]]:
        """Return the device of each group of nodes that any of the ranks is on, and how many of them are."""
        return [(g.device, n) for g, n in zip(self.nodes, self.counts_by_group(ranks), strict=True) if n]

    def counts_by_group(self, ranks: Sequence[int]) -> list[int]:
        """Return how many of the ranks each group of nodes has."""
        if len(self.nodes) == 1:
            return [len(ranks)]
        ends = list(accumulate(group.num_devices for group in self.nodes))
        counts = Counter(bisect_right(ends, rank) for rank in ranks)
        return [counts[place] for place in range(len(ends))]

    def device_counts(self, ranks: Sequence[int]) -> dict[str, int]:
        """Return how many of the ranks are on each kind of device, by its name."""
        counts: Counter[str] = Counter()
        for device, n in self.devices_on(ranks):
            counts[device.name] += n
        return dict(counts)

    def node_of(self, rank: int) -> int:
        """Return the index of the rank's node, counted over all groups."""
        group, nodes_before, inside = self._locate(rank)
        return nodes_before + inside // group.per_node

    def _locate(self, rank: int) -> tuple[NodeGroup, int, int]:
        """Return (group, nodes before it, rank inside it)."""
        nodes_before, inside = 0, rank
        for group in self.nodes:
            if 0 <= inside < group.num_devices:
                return group, nodes_before, inside
            nodes_before += group.count
            inside -= group.num_devices
        raise IndexError(f"rank {rank} is not in 0..{self.num_devices - 1}")
