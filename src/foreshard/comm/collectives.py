"""Closed-form times of collectives, vectorised over plans.

Sizes are the bytes that nccl-tests prints: the whole buffer of an all-reduce or broadcast, the gathered
output of an all-gather, the input of a reduce-scatter, a rank's whole buffer in an all-to-all, the message
of a send. All numeric arguments broadcast; results are float64 seconds; one rank or no bytes is 0.
Derivation, constants and their data: ``docs/derivations/collectives.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshard.comm.fabric import Fabric

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
    return inside * (fabric.nic_bytes_per_s / fabric.per_node)


def _ramp_s(fill_s: Any, transfer_s: Any, ramp: Any) -> Any:
    """Return what a pipeline loses to filling: the best chunk size costs 2 sqrt(fill * transfer).

    ``fill_s`` is the latency inside one domain only: over the network, chunks are already in flight
    (measured: 64 GPUs lose no more than 8 do).
    """
    return 2.0 * ramp * np.sqrt(fill_s * transfer_s)


def _finish(time_s: Any, num_bytes: Any, ranks: Any) -> Times:
    """Zero the time where nothing moves."""
    return np.where((num_bytes > 0.0) & (ranks > 1.0), time_s, 0.0)


def _ring_s(num_bytes: Any, spread: tuple[Any, Any, Any], fabric: Fabric, *, passes: float, eff: Any) -> Any:
    """Return the time of ``passes`` trips of the ring: 2 for all-reduce, 1 for gather, scatter."""
    ranks, inside, domains = spread
    crosses = domains > 1.0
    link = fabric.intra_bytes_per_s * eff * _scale(inside, fabric.scaling, fabric)
    bus = _edge(link, inside, crosses, fabric)
    # The wire carries every rank's share but one; a rank's own block is copied at link speed.
    transfer = num_bytes / ranks * (passes * (ranks - 1.0) / bus + fabric.copy / link)
    fill = fabric.launch_s + (inside - 1.0) * (passes * fabric.intra_latency_s)
    # Of ranks - 1 hops, domains - 1 lead over the network.
    hops = (ranks - domains) * (passes * fabric.intra_latency_s) + (domains - 1.0) * (
        passes * fabric.nic_latency_s
    )
    start = fabric.launch_s + hops + crosses * fabric.nic_launch_s
    return start + transfer + _ramp_s(fill, transfer, fabric.ramp)


def _edge(link: Any, inside: Any, crosses: Any, fabric: Fabric) -> Any:
    """Return bytes/s of a ring's slowest edge: every byte passes every edge, NVLink and NIC alike."""
    nic = inside * (_nic_share(1.0, fabric) * fabric.nic_ring_eff)
    return np.where(crosses, np.where(inside > 1.0, np.minimum(link, nic), nic), link)


def _tree_s(num_bytes: Any, spread: tuple[Any, Any, Any], fabric: Fabric) -> Any:
    """Return an all-reduce by tree over domains, reduced in the switch or along a chain inside each."""
    _, inside, domains = spread
    switched = (fabric.in_network > 0.0) & (inside > 2.0)
    # In the switch: own buffer out once, own share of the sum once. Along a chain: up, then down.
    link = fabric.intra_bytes_per_s * _scale(inside, fabric.scaling, fabric)
    per_byte: Any = 2.0 / fabric.ring_eff
    start = fabric.launch_s + (inside - 1.0) * (2.0 * fabric.intra_latency_s)
    ramp = fabric.ramp
    if np.count_nonzero(switched):
        per_byte = np.where(switched, (1.0 + 1.0 / inside) / fabric.switch_eff, per_byte)
        start = np.where(switched, fabric.switch_launch_s, start)
        ramp = np.where(switched, fabric.switch_ramp, ramp)
    local = num_bytes * (inside > 1.0) * (per_byte / link)
    # A double binary tree sends each byte of the domain out twice, less the root's edge.
    nic = inside * (_nic_share(0.5, fabric) * fabric.nic_tree_eff)
    across = (1.0 - 1.0 / domains) * num_bytes / nic
    crosses = domains > 1.0
    hops = np.ceil(np.log2(domains)) * (2.0 * fabric.nic_latency_s) + crosses * fabric.nic_launch_s
    transfer = np.maximum(local, across)
    return np.where(switched | crosses, start + hops + transfer + _ramp_s(start, transfer, ramp), np.inf)


def all_reduce_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of an all-reduce: the faster of ring and tree (in-switch inside a domain).

    Parameters
    ----------
    num_bytes
        Bytes of the buffer.
    num_ranks, stride
        Ranks of the group, and their distance in cluster order.
    fabric
        What the group runs on; fields may be arrays of the same rows.
    """
    num_bytes = np.asarray(num_bytes, dtype=float)
    spread = _spread(num_ranks, stride, fabric)
    ring = _ring_s(num_bytes, spread, fabric, passes=2.0, eff=fabric.ring_eff)
    if np.count_nonzero(fabric.in_network) or np.count_nonzero(spread[2] > 1.0):
        ring = np.minimum(ring, _tree_s(num_bytes, spread, fabric))
    return _finish(ring, num_bytes, spread[0])


def all_gather_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of an all-gather of ``num_bytes`` gathered output, by ring."""
    num_bytes = np.asarray(num_bytes, dtype=float)
    spread = _spread(num_ranks, stride, fabric)
    return _finish(
        _ring_s(num_bytes, spread, fabric, passes=1.0, eff=fabric.gather_eff), num_bytes, spread[0]
    )


def reduce_scatter_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of a reduce-scatter of ``num_bytes`` input, by ring."""
    return all_gather_s(num_bytes, num_ranks, stride, fabric)


def all_to_all_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of an all-to-all: direct sends, links and NIC busy at once."""
    num_bytes = np.asarray(num_bytes, dtype=float)
    ranks, inside, domains = _spread(num_ranks, stride, fabric)
    link = fabric.intra_bytes_per_s * fabric.exchange_eff * _scale(inside, fabric.exchange_scaling, fabric)
    local = num_bytes * (inside - 1.0 + fabric.exchange_copy) / ranks / link
    nic = _nic_share(1.0, fabric) * fabric.nic_exchange_eff
    transfer = np.maximum(local, num_bytes * (ranks - inside) / ranks / nic)
    fill = fabric.exchange_launch_s + (inside - 1.0) * fabric.exchange_hop_s
    peers = (ranks - inside) * fabric.exchange_hop_s
    outside = (domains > 1.0) * (fabric.nic_latency_s + fabric.nic_launch_s) + peers
    return _finish(
        fill + outside + transfer + _ramp_s(fill, transfer, fabric.exchange_ramp), num_bytes, ranks
    )


def broadcast_s(num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of a broadcast: a pipelined chain through all ranks."""
    num_bytes = np.asarray(num_bytes, dtype=float)
    ranks, inside, domains = _spread(num_ranks, stride, fabric)
    crosses = domains > 1.0
    link = fabric.intra_bytes_per_s * fabric.gather_eff * _scale(inside, fabric.scaling, fabric)
    transfer = num_bytes / _edge(link, inside, crosses, fabric)
    fill = fabric.launch_s + (inside - 1.0) * fabric.intra_latency_s
    outside = (ranks - inside - domains + 1.0) * fabric.intra_latency_s + (
        domains - 1.0
    ) * fabric.nic_latency_s
    outside = outside + crosses * fabric.nic_launch_s
    return _finish(fill + outside + transfer + _ramp_s(fill, transfer, fabric.ramp), num_bytes, ranks)


def send_s(num_bytes: ArrayLike, crosses_node: ArrayLike, fabric: Fabric) -> Times:
    """Return the time of one message between neighbours, over the link or the sender's share of the NIC."""
    num_bytes = np.asarray(num_bytes, dtype=float)
    crosses = np.asarray(crosses_node, dtype=bool)
    link = fabric.intra_bytes_per_s * fabric.exchange_eff
    nic = _nic_share(1.0, fabric) * fabric.nic_exchange_eff
    fill = fabric.exchange_launch_s
    outside = crosses * (fabric.nic_latency_s + fabric.nic_launch_s)
    transfer = num_bytes / np.where(crosses, np.minimum(link, nic), link)
    time_s = fill + outside + transfer + _ramp_s(fill, transfer, fabric.exchange_ramp)
    return np.where(num_bytes > 0.0, time_s, 0.0)
