"""Closed form of a schedule's time: latency and load of each round, congestion of shared links included.

A round of the schedule takes the largest load of a resource over its capacity, plus the largest latency of a
route. That equals the formulas of Hockney's model, and the flow simulation, where ranks proceed in lockstep
and nothing contends (`RoundTraffic.is_lockstep`). Of sends listed by rounds it is nowhere less than the bytes
of a resource over its capacity, nor than the longest chain of sends. Where the simulation is faster, ranks go
on before the slowest send of a round; where it is slower, fair shares leave the busiest resource idle later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.schedules.schedule import Schedule, numbered
from foreshard.comm.topology.graph import Topology

Route = Callable[[int, int, int], Sequence[int]]
"""The links from one place to another on a channel; none for what stays in one device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundCost:
    """Latency and time for each byte of the collective, round by round."""

    latency_s: np.ndarray  # shape (rounds,)
    # shape (rounds,); load of the round's bottleneck over its capacity, for each byte of the collective's
    # size
    s_per_byte: np.ndarray
    # int, shape (rounds,); the resource of the topology that bounds each round; -1 where nothing leaves its
    # device
    bottleneck: np.ndarray

    def time_s(self, num_bytes: float) -> float:
        """Return seconds of a collective of this size."""
        return float(self.latency_s.sum() + num_bytes * self.s_per_byte.sum())


class RoundTraffic:
    """What each pair of places sends in each round of a schedule, and the resources that it takes.

    Parameters
    ----------
    schedule : Schedule
    topology : Topology
    route : callable
        The links between two places of the schedule, ranks, then switches, on a channel; asked once for each.

    Attributes
    ----------
    when, way, load : ndarray, shape (rows,)
        Round, number of the way, and bytes for each byte of the collective.
    ways : list of (int, int, int)
        Source, target and channel.
    row, resource : ndarray of int, shape (entries,)
        The rows that occupy a resource.
    latency_s : ndarray, shape (ways,)

    Examples
    --------
    >>> from foreshard.comm.schedules.ring import ring
    >>> from foreshard.comm.topology.regular import full_mesh
    >>> mesh, number = full_mesh(2, 2.0, 1.0), {(0, 1): 0, (1, 0): 1}
    >>> traffic = RoundTraffic(ring("all-reduce", 2), mesh, lambda a, b, channel: (number[a, b],))
    >>> traffic.cost().time_s(8.0), traffic.is_lockstep()
    (6.0, True)
    >>> RoundTraffic(ring("all-reduce", 2), mesh, lambda a, b, channel: (0,)).is_lockstep()
    False
    """

    def __init__(self, schedule: Schedule, topology: Topology, route: Route) -> None:
        self.schedule, self.topology = schedule, topology
        ways, way = schedule.ways()
        self.ways = ways
        routes = [tuple(route(*one)) for one in ways]
        used, at = numbered(schedule.rounds() * len(ways) + way)
        self.load = np.bincount(at, weights=schedule.weight, minlength=len(used))
        self.when, self.way = used // max(len(ways), 1), used % max(len(ways), 1)
        self.latency_s = np.array([topology.latency_s[list(one)].sum() if one else 0.0 for one in routes])
        resources = [topology.resources_of(one) for one in routes]
        counts = np.array([len(some) for some in resources], dtype=np.int64)
        flat = np.array([one for some in resources for one in some], dtype=np.int64)
        each, begins = counts[self.way], (np.cumsum(counts) - counts)[self.way]
        self.row = np.repeat(np.arange(len(used)), each)
        self.resource = flat[np.repeat(begins - (np.cumsum(each) - each), each) + np.arange(each.sum())]

    def cost(self) -> RoundCost:
        """Return the cost of each round."""
        capacity = self.topology.capacity_bytes_per_s
        num_resources = max(len(capacity), 1)
        key, at = numbered(self.when[self.row] * num_resources + self.resource)
        when, resource = key // num_resources, key % num_resources
        total = np.bincount(at, weights=self.load[self.row], minlength=len(key))
        time = total / capacity[resource]
        num_rounds = int(self.when.max(initial=-1)) + 1
        latency_s, s_per_byte = np.zeros(num_rounds), np.zeros(num_rounds)
        np.maximum.at(latency_s, self.when, self.latency_s[self.way])
        bottleneck = np.full(num_rounds, -1, dtype=np.int64)
        order = np.argsort(time, kind="stable")
        # the last write of each round is that of its largest time
        s_per_byte[when[order]], bottleneck[when[order]] = time[order], resource[order]
        return RoundCost(latency_s=latency_s, s_per_byte=s_per_byte, bottleneck=bottleneck)

    def is_lockstep(self) -> bool:
        """Return whether nothing contends and ranks proceed in lockstep, so that no simulation differs.

        In each round no resource carries what two pairs of places send each other; channels of one pair send
        equal bytes; all messages take equally long; and every send waits for the end of a message of the
        round before, so that none starts early.
        """
        num_places = self.schedule.num_places
        ends = np.array([source * num_places + target for source, target, _ in self.ways])
        pair = numbered(ends.astype(np.int64))[1]
        pair = pair[self.way]
        capacity = self.topology.capacity_bytes_per_s
        num_resources = max(len(capacity), 1)
        key, at = numbered(self.when[self.row] * num_resources + self.resource)
        same_load = _is_same(self.load, numbered(self.when * (pair.max(initial=0) + 1) + pair)[1])
        if not same_load or not _is_same(pair[self.row], at):
            return False
        total = np.bincount(at, weights=self.load[self.row], minlength=len(key))[at]
        slowest = np.zeros(len(self.when))
        np.maximum.at(slowest, self.row, total / capacity[self.resource])
        is_even = _is_same(slowest, self.when) and _is_same(self.latency_s[self.way], self.when)
        return is_even and _waits_for_messages(self.schedule)


def _is_same(values: np.ndarray, number: np.ndarray) -> bool:
    """Return whether all values of each number are the same, to rounding."""
    first = np.zeros(int(number.max(initial=-1)) + 1, dtype=values.dtype)
    first[number[::-1]] = values[::-1]
    return bool(np.allclose(values, first[number], rtol=1e-9, atol=0.0))


def _waits_for_messages(schedule: Schedule) -> bool:
    """Return whether every send waits for the last chunk of a message of the round before its own."""
    rounds, way = schedule.rounds(), schedule.ways()[1]
    order = np.argsort(way, kind="stable")
    step, is_last = np.diff(rounds[order]), np.ones(schedule.num_sends, dtype=bool)
    is_same_way = np.diff(way[order]) == 0
    is_last[order[:-1][is_same_way & (step == 0)]] = False
    send = np.repeat(np.arange(schedule.num_sends), np.diff(schedule.indptr))
    before = schedule.indices
    waits = np.zeros(schedule.num_sends, dtype=bool)
    waits[send[is_last[before] & (rounds[before] == rounds[send] - 1)]] = True
    return bool((waits | (rounds == 0)).all() and (step[is_same_way] >= 0).all())
