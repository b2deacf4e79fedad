"""Cuts of a topology that often bind: single devices and whole nodes, and what crosses a cut."""

from __future__ import annotations

import numpy as np

from foreshard.comm.topology.graph import Topology


def single_devices(topology: Topology) -> list[np.ndarray]:
    """Return the sets of one device, as masks of the vertices."""
    return [np.arange(len(topology.vertices)) == v for v in topology.devices.tolist()]


def whole_nodes(topology: Topology) -> list[np.ndarray]:
    """Return the vertices of each node, where every device has a node and there are two nodes at least."""
    node = np.array([vertex.node for vertex in topology.vertices])
    owned = np.unique(node[topology.devices])
    if owned.min() < 0 or len(owned) < 2:
        return []
    return [node == one for one in owned.tolist()]


def device_partitions(topology: Topology) -> list[list[np.ndarray]]:
    """Return the devices one by one, and the nodes where there are several."""
    return [groups for groups in (single_devices(topology), whole_nodes(topology)) if groups]


def crossing_bytes_per_s(topology: Topology, inside: np.ndarray, inward: bool | int = False) -> float:
    """Return the bytes/s that leave (or enter) a set of vertices, shared resources considered."""
    side = ~inside if inward else inside
    out = side[topology.link_ends[:, 0]] & ~side[topology.link_ends[:, 1]]
    links_bytes_per_s, shared_bytes_per_s = np.split(topology.capacity_bytes_per_s, [len(topology.links)])
    shared, rate = topology.tightest_shared[out], links_bytes_per_s[out]
    offered = np.bincount(shared[shared >= 0], rate[shared >= 0], minlength=len(shared_bytes_per_s))
    return float(rate[shared < 0].sum() + np.minimum(offered, shared_bytes_per_s).sum())
