"""How many of a cluster's equal nodes a plan may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from foreshard.spec.cluster import Cluster

_NEAR = 8
"""Nodes fewer than all that are each tried: degrees divide one of nine numbers in a row."""
_EIGHTHS = (8, 7, 6, 5)
"""Eighths of each power of two that are tried below that: 15 % apart."""


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the first devices of a cluster of equal nodes: whole nodes, or a part of one at its price."""
    nodes = cluster.nodes[0]
    if num_devices == nodes.num_devices:
        return cluster
    if num_devices >= nodes.per_node:
        return replace(cluster, nodes=(replace(nodes, count=num_devices // nodes.per_node),))
    domain = min(nodes.nvlink_domain, num_devices)
    part = replace(nodes, count=1, per_node=num_devices, nvlink_domain=domain)
    return replace(cluster, nodes=(part,))


def sizes_of(cluster: Cluster, max_devices: int | None = None, *, whole_nodes: bool = False) -> Iterator[int]:
    """Yield how many devices to use, the most first.

    All nodes, up to eight fewer, four sizes from each half of them to the next, and powers of two, over which
    batches and heads divide; below one node, devices, unless only whole nodes count and one is allowed.
    """
    nodes = cluster.nodes[0]
    most = min(max_devices or nodes.num_devices, nodes.num_devices)
    unit = nodes.per_node if most >= nodes.per_node else 1
    top = most // unit
    found = {top - i for i in range(_NEAR + 1)} | set(_octaves(top))
    found |= {1 << bits for bits in range(top.bit_length())}
    sizes = {count * unit for count in found if count > 0}
    if unit > 1 and not whole_nodes:
        sizes |= set(_octaves(unit))
    yield from sorted(sizes, reverse=True)


def _octaves(top: int) -> Iterator[int]:
    """Yield 8/8, 7/8, 6/8 and 5/8 of a number, of its half, and so on."""
    while top >= 1:
        yield from (top * eighths // 8 for eighths in _EIGHTHS if top * eighths // 8 >= 1)
        top //= 2
