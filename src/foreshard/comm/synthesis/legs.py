"""When each hop of a chunk starts, given the way it takes: a path or a tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.synthesis.arcs import Arc
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.synthesis.quotient import Shifts
from foreshard.comm.topology.graph import Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class HopGraph:
    """Hops that chunks take from place to place, and the resources each keeps busy.

    Of a network as it is, places are ranks and hops are arcs; of a symmetric one, places are how far a
    chunk is from its source, hops are `Shifts`, and resources are orbits.
    """

    num_places: int
    # source, target: int, shape (hops,)
    source: np.ndarray
    target: np.ndarray
    resources: Sequence[tuple[int, ...]]  # of each hop
    busy_s_per_byte: Sequence[tuple[float, ...]]  # for which a byte keeps each of them busy
    # transfer_s_per_byte, latency_s: shape (hops,)
    transfer_s_per_byte: np.ndarray
    latency_s: np.ndarray

    @property
    def num_resources(self) -> int:
        """Resources, used or not."""
        return 1 + max(max(one) for one in self.resources)


def hops_of_arcs(topology: Topology, arcs: list[Arc]) -> HopGraph:
    """Return the hops of a network as it is."""
    rate = topology.capacity_bytes_per_s
    return HopGraph(
        num_places=topology.num_ranks,
        source=np.array([arc.source for arc in arcs]),
        target=np.array([arc.target for arc in arcs]),
        resources=[arc.resources for arc in arcs],
        busy_s_per_byte=[tuple((1.0 / rate[list(arc.resources)]).tolist()) for arc in arcs],
        transfer_s_per_byte=1.0 / np.array([arc.bytes_per_s for arc in arcs]),
        latency_s=np.array([arc.latency_s for arc in arcs]),
    )


def hops_of_shifts(shifts: Shifts) -> HopGraph:
    """Return the hops of a symmetric network, place by place, of each place way by way."""
    ranks, ways = shifts.topology.num_ranks, len(shifts.shift)
    place = np.repeat(np.arange(ranks), ways)
    orbits = [tuple(np.flatnonzero(row).tolist()) for row in shifts.occupancy_s_per_byte]
    busy = [
        tuple(row[list(used)].tolist()) for row, used in zip(shifts.occupancy_s_per_byte, orbits, strict=True)
    ]
    return HopGraph(
        num_places=ranks,
        source=place,
        target=shifts.group.added(place, np.tile(shifts.shift, ranks)),
        resources=orbits * ranks,
        busy_s_per_byte=busy * ranks,
        transfer_s_per_byte=np.tile(shifts.transfer_s_per_byte, ranks),
        latency_s=np.tile(shifts.latency_s, ranks),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class HopOrder:
    """Every hop of every chunk, in the order in which they start."""

    seconds: float
    item: np.ndarray  # int, shape (sends,); demand
    hop: np.ndarray  # int, shape (sends,)
    previous: np.ndarray  # int, shape (sends,); position of the same chunk's hop before, -1 for none


@dataclass(frozen=True, kw_only=True, eq=False)
class Legs:
    """Hops that chunks must take, each after the one that brings the chunk to where it starts."""

    item: np.ndarray  # int, shape (legs,); chunk
    hop: np.ndarray  # int, shape (legs,); of a `HopGraph`
    parent: np.ndarray  # int, shape (legs,); leg that brings the chunk, -1 for none
    # shape (legs,); on each resource the leg with the lowest is first, of those that can start
    turn: np.ndarray


def remaining_s(hops: HopGraph, item_bytes: float, hop: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return the seconds from the start of each leg until all that waits for it could be done.

    Parents come before their children.
    """
    below = [0.0] * len(hop)
    own = (hops.transfer_s_per_byte[hop] * item_bytes + hops.latency_s[hop]).tolist()
    before = parent.tolist()
    for leg in range(len(hop) - 1, -1, -1):
        own[leg] += below[leg]
        if before[leg] >= 0:
            below[before[leg]] = max(below[before[leg]], own[leg])
    return np.array(own)


def ordered(hops: HopGraph, legs: Legs, chunk_bytes: float, check: Check = unlimited) -> HopOrder:
    """Return when each leg starts if every resource is given to the next leg in turn that can start."""
    transfer_s = (hops.transfer_s_per_byte * chunk_bytes + hops.latency_s).tolist()
    used: list[list[int]] = [[] for _ in range(hops.num_resources)]
    for hop in np.unique(legs.hop).tolist():
        for one in hops.resources[hop]:
            used[one].append(hop)
    hop_of, turn = legs.hop.tolist(), legs.turn.tolist()
    children: list[list[int]] = [[] for _ in hop_of]
    for leg, parent in enumerate(legs.parent.tolist()):
        if parent >= 0:
            children[parent].append(leg)
    waiting: dict[int, list[tuple[float, int]]] = {}
    arriving = [(0.0, leg) for leg in np.flatnonzero(legs.parent < 0).tolist()]
    freeing: list[tuple[float, int]] = []
    free = [0.0] * hops.num_resources
    position = [-1] * len(hop_of)
    started: list[int] = []
    end = 0.0
    while arriving or freeing:
        check()
        now = min(heap[0][0] for heap in (arriving, freeing) if heap) * (1 + 1e-12)
        touched: set[int] = set()
        while freeing and freeing[0][0] <= now:
            touched.update(used[heapq.heappop(freeing)[1]])
        while arriving and arriving[0][0] <= now:
            leg = heapq.heappop(arriving)[1]
            heapq.heappush(waiting.setdefault(hop_of[leg], []), (turn[leg], leg))
            touched.add(hop_of[leg])
        for _, leg in sorted(waiting[hop][0] for hop in touched if waiting.get(hop)):
            hop = hop_of[leg]
            if any(free[one] > now for one in hops.resources[hop]):
                continue
            heapq.heappop(waiting[hop])
            for one, busy in zip(hops.resources[hop], hops.busy_s_per_byte[hop], strict=True):
                free[one] = now + busy * chunk_bytes
                heapq.heappush(freeing, (free[one], one))
            position[leg] = len(started)
            started.append(leg)
            arrives = now + transfer_s[hop]
            end = max(end, arrives)
            for child in children[leg]:
                heapq.heappush(arriving, (arrives, child))
    order = np.array(started, dtype=np.int64)
    place = np.array([*position, -1], dtype=np.int64)
    return HopOrder(
        seconds=end, item=legs.item[order], hop=legs.hop[order], previous=place[legs.parent[order]]
    )


def schedule_of_hops(
    order: HopOrder,
    hops: HopGraph,
    arcs: Sequence[Arc],
    *,
    collective: str,
    algorithm: str,
    parts: int,
) -> Schedule:
    """Return the schedule of chunks that take their hops on a network as it is, in an order."""
    waits = order.previous >= 0
    return Schedule(
        collective=collective,
        algorithm=algorithm,
        num_ranks=hops.num_places,
        chunks=tuple(chunks_of(collective, hops.num_places, parts)),
        source=hops.source[order.hop],
        target=hops.target[order.hop],
        chunk=order.item,
        is_reduced=np.zeros(len(order.item), dtype=bool),
        channel=np.array([arc.channel for arc in arcs])[order.hop],
        indptr=np.concatenate([[0], np.cumsum(waits)]),
        indices=order.previous[waits],
    )
