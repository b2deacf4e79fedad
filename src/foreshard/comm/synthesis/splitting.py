"""Switches split off: whole numbers of trees that each route between devices may carry."""

from __future__ import annotations

from itertools import product

import numpy as np

from foreshard.comm.synthesis.arcs import Arc
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.topology.graph import Topology

_SCALINGS = 6
"""Scalings tried before a number of trees is given up; from one to the next some link holds one tree more."""
_SLACK = 1e-9
"""Relative rounding allowed where a bandwidth holds a whole number of trees exactly."""

Path = tuple[int, ...]


class TreeFlows:
    """Maximum flows on whole capacities, which say whether trees that reach all devices can still be packed.

    As many trees as start at all roots together must flow from a super-source to every device (Edmonds).
    The super-source is the last row of `capacity`.

    Parameters
    ----------
    capacity : ndarray of int, shape (vertices + 1, vertices + 1)
    sinks : list of int
        Devices.
    needed : int
        Trees of all roots.
    """

    def __init__(self, capacity: np.ndarray, sinks: list[int], needed: int, check: Check = unlimited) -> None:
        self.capacity, self.sinks, self.needed, self.check = capacity, list(sinks), needed, check

    def shortfall(self, sink: int) -> int:
        """Return by how much the flow to a device falls short."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import maximum_flow

        self.check()
        graph = csr_matrix(self.capacity.astype(np.int32))
        return self.needed - int(maximum_flow(graph, len(self.capacity) - 1, sink).flow_value)

    def largest_shortfall(self, enough: int) -> int:
        """Return the largest shortfall of any device, or the first found that is enough.

        Devices that fell short are tried first the next time.
        """
        largest = 0
        for position, sink in enumerate(self.sinks):
            largest = max(largest, self.shortfall(sink))
            if largest >= enough:
                self.sinks.insert(0, self.sinks.pop(position))
                break
        return largest


def tree_capacities(
    topology: Topology, arcs: list[Arc], trees: np.ndarray, rate_bytes_per_s: float, check: Check
) -> tuple[float, np.ndarray] | None:
    """Return seconds per byte of a tree's data, and the trees that each arc may carry at once.

    Bandwidths are scaled so that links hold whole numbers of trees, by the smallest factor that leaves room
    for the trees of every rank. Then switches are split off one by one: a link into a switch and
    one out of it become one between their other ends, by as much as leaves that room.

    Parameters
    ----------
    topology : Topology
        Without shared resources.
    arcs : list of Arc
    trees : ndarray of int, shape (ranks,)
        That start at each rank.
    rate_bytes_per_s : float
        Of all trees together, that no schedule exceeds.
    check : callable
        Ends the search by an exception.

    Returns
    -------
    (float, ndarray of int, shape (arcs,)) or None
        None where arcs alone leave no room at any scaling tried.

    Source
    ------
    Zhao et al., ForestColl, arXiv 2402.06787, sections 5.2 and 5.4; splitting off: Mader 1982, Frank 1988.
    """
    rate = topology.capacity_bytes_per_s
    low = float(trees.sum()) / rate_bytes_per_s
    high = low + 1.0 / float(rate.min())
    # a scaling matters only where some link holds one tree more
    steps = [np.arange(np.ceil(low * one), np.floor(high * one) + 1) / one for one in np.unique(rate)]
    scalings = np.unique(np.concatenate([[low], *steps]).clip(min=low))
    first, last = 0, len(scalings) - 1
    while first < last:
        middle = (first + last) // 2
        flows = _flows(topology, _whole(topology, scalings[middle]), trees, check)
        first, last = (first, middle) if flows.largest_shortfall(1) == 0 else (middle + 1, last)
    for scaling in scalings[first : first + _SCALINGS]:
        found = _split_off(topology, arcs, _whole(topology, scaling), trees, check)
        if found is not None:
            return float(scaling), found
    return None


def _whole(topology: Topology, scaling: float) -> np.ndarray:
    """Return the trees that each link carries at a scaling."""
    scaled = topology.capacity_bytes_per_s[: len(topology.links)] * scaling
    return np.floor(scaled * (1 + _SLACK)).astype(np.int64)


def _flows(topology: Topology, room: np.ndarray, trees: np.ndarray, check: Check) -> TreeFlows:
    count = len(topology.vertices)
    capacity = np.zeros((count + 1, count + 1), dtype=np.int64)
    for link, number in zip(topology.links, room.tolist(), strict=True):
        capacity[link.source, link.target] += number
    devices = topology.devices
    capacity[count, devices] = trees
    return TreeFlows(capacity, devices.tolist(), int(trees.sum()), check)


def _split_off(
    topology: Topology, arcs: list[Arc], room: np.ndarray, trees: np.ndarray, check: Check
) -> np.ndarray | None:
    """Return the trees of each arc when all switches are split off, None where that leaves too few."""
    flows = _flows(topology, room, trees, check)
    capacity = flows.capacity
    ends = [(link.source, link.target) for link in topology.links]
    held: dict[Path, int] = {(i,): int(number) for i, number in enumerate(room) if number}
    allowed = {
        arc.links[i:j]
        for arc in arcs
        for i in range(len(arc.links))
        for j in range(i + 2, len(arc.links) + 1)
    }
    switches = [v for v, vertex in enumerate(topology.vertices) if vertex.kind != "device"]
    for switch in sorted(switches, key=lambda v: (int((capacity[v] > 0).sum()), v)):
        into = [path for path in held if ends[path[-1]][1] == switch]
        out = [path for path in held if ends[path[0]][0] == switch]
        pairs = sorted(
            product(into, out),
            key=lambda pair: _same_node(topology, ends[pair[0][0]][0], ends[pair[1][-1]][1]),
        )
        for first, second in pairs:
            joined = first + second
            amount = min(held[first], held[second])
            if not amount or joined not in allowed:
                continue
            start, end = ends[first[0]][0], ends[second[-1]][1]
            _shift(capacity, start, switch, end, amount)
            back = min(flows.largest_shortfall(amount), amount)
            _shift(capacity, start, switch, end, -back)
            if amount > back:
                held[first] -= amount - back
                held[second] -= amount - back
                held[joined] = held.get(joined, 0) + amount - back
        for path in into + out:
            held.pop(path, None)
        capacity[switch] = 0
        capacity[:, switch] = 0
    if flows.largest_shortfall(1):
        return None
    return np.array([held.get(arc.links, 0) for arc in arcs])


def _same_node(topology: Topology, first: int, second: int) -> bool:
    """Return whether two vertices are of one host, whose own links join them better than a switch outside."""
    node = topology.vertices[first].node
    return node >= 0 and node == topology.vertices[second].node


def _shift(capacity: np.ndarray, start: int, switch: int, end: int, amount: int) -> None:
    """Move capacity of a way through a switch to a direct one."""
    capacity[start, switch] -= amount
    capacity[switch, end] -= amount
    capacity[start, end] += amount
