"""Closed-form times of collectives, vectorised over plans.

Sizes are the bytes that nccl-tests prints: the whole buffer of an all-reduce or broadcast, the gathered
output of an all-gather, the input of a reduce-scatter, a rank's whole buffer in an all-to-all, the message
of a send. All numeric arguments broadcast; results are float64 seconds; one rank or no bytes is 0. Measured
tables (`cost.tables`) give the time inside one domain where they cover it.
Derivation, constants and their data: ``docs/derivations/collectives.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshard.comm.fabric import Fabric, PartialFabric
from foreshard.cost.tables import tabled_s

Times = NDArray[np.float64]


def _spread(num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> tuple[Any, Any, Any]:
    """Return ranks, members in one scale-up domain, and domains of a strided group."""
    ranks = np.maximum(np.asarray(num_ranks, dtype=float), 1.0)
    inside = np.minimum(ranks, np.maximum(1.0, np.floor(fabric.domain / np.asarray(stride, dtype=float))))
    return ranks, inside, np.ceil(ranks / inside)


def _scale(inside: Any, exponent: Any, fabric: Fabric) -> Any:
    """Return the factor on link bandwidth from the number of ranks on it."""
    if not np.count_nonzero(exponent):
        return 1.0
    return (np.maximum(inside, 2.0) / fabric.reference) ** exponent


def _nic_share(inside: Any, fabric: Fabric) -> Any:
    """Return NIC bytes/s that a group's members in one domain reach together."""
    return inside * (fabric.nic_bytes_per_s / fabric.nic_sharers)


def _ramp_s(fill_s: Any, transfer_s: Any, ramp: Any) -> Any:
    """Return what a pipeline loses to filling: the best chunk size costs 2 sqrt(fill * transfer).

    ``fill_s`` is the latency inside one domain only: over the network, chunks are already in flight
    (measured: 64 GPUs lose no more than 8 do).
    """
    return 2.0 * ramp * np.sqrt(fill_s * transfer_s)


def _finish(time_s: Any, num_bytes: Any, ranks: Any) -> Times:
    """Zero the time where nothing moves."""
    return np.where(num_bytes * (ranks - 1.0) > 0.0, time_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Measured tables of a collective, 0 where there is none or ranks are in several domains."""

    tables: Any
    ranks: Any


def _measured(table: Any, spread: tuple[Any, Any, Any]) -> Measured | None:
    """Return the tables of a group of ranks, None without any."""
    if not np.count_nonzero(table):
        return None
    ranks, _, domains = spread
    inside = np.broadcast_arrays(domains == 1.0, np.asarray(table, dtype=object))
    return Measured(tables=np.where(inside[0], inside[1], 0.0), ranks=ranks)


def _by_table(measured: Measured | None, num_bytes: Any, time_s: Any) -> Any:
    """Return the time by the table where it covers ranks and bytes, else as it is."""
    if measured is None:
        return time_s
    return tabled_s(time_s, measured.tables, (measured.ranks, num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A collective that passes chunks on while more arrive: its seconds as a function of its bytes."""

    start_s: Any  # before the first byte; infinite where the collective cannot run this way
    fill_s: Any  # latency that filling the pipeline costs again
    per_byte_s: Any
    ramp: Any  # see :func:`_ramp_s`
    moves: Any  # whether there is more than one rank
    measured: Measured | None = None

    def time_s(self, num_bytes: Any) -> Times:
        """Return the time for ``num_bytes``, 0 where nothing moves."""
        time_s = _by_table(self.measured, num_bytes, self.busy_s(num_bytes))
        return np.where(self.moves & (num_bytes > 0.0), time_s, 0.0)

    def busy_s(self, num_bytes: Any) -> Any:
        """Return the time where something moves."""
        transfer = num_bytes * self.per_byte_s
        return self.start_s + transfer + _ramp_s(self.fill_s, transfer, self.ramp)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """An all-reduce as a function of its bytes: the faster of ring and tree."""

    ring: Pipelined
    tree: Pipelined | None  # where nothing crosses domains and no switch reduces, none can win
    whole: AllReduce | None = None  # decides, where this one has a part of the fabric
    measured: Measured | None = None

    def time_s(self, num_bytes: Any) -> Times:
        """Return the time for ``num_bytes``, 0 where nothing moves."""
        time_s = self.ring.busy_s(num_bytes)
        if self.tree is not None:
            by_tree_s = self.tree.busy_s(num_bytes)
            if self.whole is None:
                time_s = np.minimum(time_s, by_tree_s)
            else:
                time_s = np.where(self.whole.by_tree(num_bytes), by_tree_s, time_s)
        time_s = _by_table(self.measured, num_bytes, time_s)
        return np.where(self.ring.moves & (num_bytes > 0.0), time_s, 0.0)

    def by_tree(self, num_bytes: Any) -> Any:
        """Return whether the tree is faster than the ring."""
        if self.tree is None:
            return False
        return self.tree.busy_s(num_bytes) < self.ring.busy_s(num_bytes)


def _ring(spread: tuple[Any, Any, Any], fabric: Fabric, *, passes: float, eff: Any) -> Pipelined:
    """Return ``passes`` trips of the ring: 2 for all-reduce, 1 for gather, scatter."""
    ranks, inside, domains = spread
    link = fabric.intra_bytes_per_s * eff * _scale(inside, fabric.scaling, fabric)
    hop_s = passes * fabric.hop_s
    fill = fabric.launch_s + (inside - 1.0) * hop_s
    crosses = domains > 1.0
    bus, start = link, fill
    if np.count_nonzero(crosses):
        bus = _edge(link, inside, crosses, fabric)
        # Of ranks - 1 hops, domains - 1 lead over the network.
        over_s = (domains - 1.0) * (passes * fabric.nic_latency_s) + crosses * fabric.nic_launch_s
        start = fabric.launch_s + (ranks - domains) * hop_s + over_s
    # The wire carries every rank's share but one; a rank's own block is copied at link speed.
    per_byte = (passes * (ranks - 1.0) / bus + fabric.copy / link) / ranks
    return Pipelined(start_s=start, fill_s=fill, per_byte_s=per_byte, ramp=fabric.ramp, moves=ranks > 1.0)


def _edge(link: Any, inside: Any, crosses: Any, fabric: Fabric) -> Any:
    """Return bytes/s of a ring's slowest edge: every byte passes every edge, NVLink and NIC alike."""
    nic = inside * (_nic_share(1.0, fabric) * fabric.nic_ring_eff)
    between = np.where(inside > 1.0, np.minimum(link, nic), nic)
    return np.where(crosses, between, link)


def _tree(spread: tuple[Any, Any, Any], fabric: Fabric) -> Pipelined:
    """Return an all-reduce by tree over domains, reduced in the switch or along a chain inside each."""
    ranks, inside, domains = spread
    switched = (fabric.in_network > 0.0) & (inside > 2.0)
    # In the switch: own buffer out once, own share of the sum once. Along a chain: up, then down.
    link = fabric.intra_bytes_per_s * _scale(inside, fabric.scaling, fabric)
    per_byte: Any = 2.0 / fabric.ring_eff
    fill = fabric.launch_s + (inside - 1.0) * (2.0 * fabric.hop_s)
    ramp = fabric.ramp
    if np.count_nonzero(switched):
        per_byte = np.where(switched, (1.0 + 1.0 / inside) / fabric.switch_eff, per_byte)
        fill = np.where(switched, fabric.switch_launch_s, fill)
        ramp = np.where(switched, fabric.switch_ramp, ramp)
    local = (inside > 1.0) * (per_byte / link)
    # A double binary tree sends each byte of the domain out twice, less the root's edge.
    nic = inside * (_nic_share(0.5, fabric) * fabric.nic_tree_eff)
    across = (1.0 - 1.0 / domains) / nic
    crosses = domains > 1.0
    hops = np.ceil(np.log2(domains)) * (2.0 * fabric.nic_latency_s) + crosses * fabric.nic_launch_s
    return Pipelined(
        start_s=np.where(switched | crosses, fill + hops, np.inf),
        fill_s=fill,
        per_byte_s=np.maximum(local, across),
        ramp=ramp,
        moves=ranks > 1.0,
    )


def all_reduce(num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> AllReduce:
    """Return an all-reduce over a group, to be asked for the time of any size."""
    spread = _spread(num_ranks, stride, fabric)
    may_tree = np.count_nonzero(fabric.in_network) or np.count_nonzero(spread[2] > 1.0)
    whole = all_reduce(num_ranks, stride, fabric.whole) if isinstance(fabric, PartialFabric) else None
    ring = _ring(spread, fabric, passes=2.0, eff=fabric.ring_eff)
    tree = _tree(spread, fabric) if may_tree and not np.all(fabric.ring_only > 0.0) else None
    if tree is not None and np.count_nonzero(fabric.tree_only):
        runs = (fabric.tree_only > 0.0) & np.isfinite(tree.start_s)
        ring = replace(ring, start_s=np.where(runs, np.inf, ring.start_s))
    measured = _measured(fabric.all_reduce_table, spread)
    return AllReduce(ring=ring, tree=tree, whole=whole, measured=measured)


def all_reduce_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of an all-reduce: the faster of ring and tree (in-switch inside a domain).

    The ranks of the group are `stride` apart in cluster order.
    """
    return all_reduce(num_ranks, stride, fabric).time_s(np.asarray(num_bytes, dtype=float))


def all_gather(num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Pipelined:
    """Return an all-gather by ring over a group, to be asked for the time of any size."""
    spread = _spread(num_ranks, stride, fabric)
    ring = _ring(spread, fabric, passes=1.0, eff=fabric.gather_eff)
    return replace(ring, measured=_measured(fabric.all_gather_table, spread))


def all_gather_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of an all-gather of ``num_bytes`` gathered output, by ring."""
    return all_gather(num_ranks, stride, fabric).time_s(np.asarray(num_bytes, dtype=float))


def reduce_scatter_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of a reduce-scatter of ``num_bytes`` input, by ring."""
    return all_gather_s(num_bytes, num_ranks, stride, fabric)


def all_to_all_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of an all-to-all: direct sends, links and NIC busy at once."""
    num_bytes = np.asarray(num_bytes, dtype=float)
    spread = _spread(num_ranks, stride, fabric)
    ranks, inside, _ = spread
    each = num_bytes / ranks
    time_s = _exchange_s(each * (inside - 1.0), each * (ranks - inside), each, spread, fabric)
    measured = _measured(fabric.all_to_all_table, spread)
    return np.where(time_s > 0.0, _by_table(measured, num_bytes, time_s), 0.0)


def token_exchange_s(
    token_bytes: ArrayLike,
    top_k: ArrayLike,
    num_ranks: ArrayLike,
    stride: ArrayLike,
    fabric: Fabric,
    *,
    reached: ArrayLike = 1.0,
) -> Times:
    """Return the time of sending tokens to their experts by a dispatcher that sends no token twice.

    A token goes over the NIC to one rank of every other domain that holds one of its `top_k` experts, and
    from there over links to the ranks that do; the results take the same way back. Of n ranks or domains k
    independent draws meet n (1 - (1 - 1/n)^k).

    Parameters
    ----------
    token_bytes : array_like
        Of the tokens of one rank, each counted once.
    top_k, num_ranks, stride : array_like
    fabric : Fabric
    reached : array_like
        Part of the ranks and domains among which routing chooses, where it is limited to groups of experts.

    Returns
    -------
    ndarray, seconds of one direction

    Source
    ------
    DeepEP README (normal kernels) and csrc/kernels/internode.cu: NIC, then forwarding over NVLink.
    """
    token_bytes, top_k = np.asarray(token_bytes, dtype=float), np.asarray(top_k, dtype=float)
    spread = _spread(num_ranks, stride, fabric)
    ranks, inside, domains = spread

    def met(among: Any) -> Any:
        among = np.maximum(among * reached, 1.0)
        return among * (1.0 - (1.0 - 1.0 / among) ** top_k)

    to_ranks, to_domains = token_bytes * met(ranks), token_bytes * met(domains)
    over_links = to_ranks * (inside - 1.0) / inside
    return _exchange_s(over_links, to_domains * (domains - 1.0) / domains, to_ranks / ranks, spread, fabric)


def _exchange_s(
    over_links: Any, over_nic: Any, own: Any, spread: tuple[Any, Any, Any], fabric: Fabric
) -> Times:
    """Return the time in which each rank sends bytes over links and over its NIC, and copies its own."""
    ranks, inside, domains = spread
    link = fabric.intra_bytes_per_s * fabric.exchange_eff * _scale(inside, fabric.exchange_scaling, fabric)
    nic = _nic_share(1.0, fabric) * fabric.nic_exchange_eff
    transfer = np.maximum((over_links + own * fabric.exchange_copy) / link, over_nic / nic)
    fill = fabric.exchange_launch_s + (inside - 1.0) * fabric.exchange_hop_s
    peers = (ranks - inside) * fabric.exchange_hop_s
    outside = (domains > 1.0) * (fabric.nic_latency_s + fabric.nic_launch_s) + peers
    time_s = fill + outside + transfer + _ramp_s(fill, transfer, fabric.exchange_ramp)
    return _finish(time_s, over_links + over_nic + own, ranks)


def broadcast_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of a broadcast: a pipelined chain through all ranks."""
    num_bytes = np.asarray(num_bytes, dtype=float)
    ranks, inside, domains = _spread(num_ranks, stride, fabric)
    crosses = domains > 1.0
    link = fabric.intra_bytes_per_s * fabric.gather_eff * _scale(inside, fabric.scaling, fabric)
    transfer = num_bytes / _edge(link, inside, crosses, fabric)
    fill = fabric.launch_s + (inside - 1.0) * fabric.hop_s
    outside = (ranks - inside - domains + 1.0) * fabric.hop_s + (domains - 1.0) * fabric.nic_latency_s
    outside = outside + crosses * fabric.nic_launch_s
    return _finish(fill + outside + transfer + _ramp_s(fill, transfer, fabric.ramp), num_bytes, ranks)


def send_s(num_bytes: ArrayLike, crosses_node: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of one message between neighbours, over the link or the sender's share of the NIC.

    In a mesh two devices share the links of one pair alone.
    """
    num_bytes = np.asarray(num_bytes, dtype=float)
    crosses = np.asarray(crosses_node, dtype=bool)
    link = fabric.intra_bytes_per_s * fabric.exchange_eff
    nic = _nic_share(1.0, fabric) * fabric.nic_exchange_eff
    fill = fabric.exchange_launch_s
    outside = crosses * (fabric.nic_latency_s + fabric.nic_launch_s)
    pair = link * _scale(2.0, np.maximum(fabric.exchange_scaling, 0.0), fabric)
    transfer = num_bytes / np.where(crosses, np.minimum(link, nic), pair)
    time_s = fill + outside + transfer + _ramp_s(fill, transfer, fabric.exchange_ramp)
    return np.where(num_bytes > 0.0, time_s, 0.0)
