"""Closed form of a schedule's time: latency and load of each round, congestion of shared links included.

A round of the schedule takes the largest load of a resource over its capacity, plus the largest latency of a
route. That is exact where routes are fixed and rounds are synchronous, and equals the formulas of Hockney's
model on a network without contention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.topology.graph import Topology

Route = Callable[[int, int], tuple[int, ...]]
"""The links from one place to another; none for what stays in one device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundCost:
    """Latency and time for each byte of the collective, round by round.

    Attributes
    ----------
    latency_s : ndarray, shape (rounds,)
    s_per_byte : ndarray, shape (rounds,)
        Load of the round's bottleneck over its capacity, for each byte of the collective's size.
    bottleneck : ndarray of int, shape (rounds,)
        The resource of the topology that bounds each round; -1 where nothing leaves its device.
    """

    latency_s: np.ndarray
    s_per_byte: np.ndarray
    bottleneck: np.ndarray

    def time_s(self, num_bytes: float) -> float:
        """Return seconds of a collective of this size."""
        return float(self.latency_s.sum() + num_bytes * self.s_per_byte.sum())


def round_cost(schedule: Schedule, topology: Topology, route: Route) -> RoundCost:
    """Return the cost of each round of a schedule on a network.

    Parameters
    ----------
    schedule : Schedule
    topology : Topology
    route : callable
        The links between two places of the schedule: ranks, then switches.

    Examples
    --------
    >>> from foreshard.comm.schedules.ring import ring
    >>> from foreshard.comm.topology.graph import Edge, Vertex
    >>> ends = [(0, 1), (1, 0)]
    >>> links = tuple(Edge(source=a, target=b, bytes_per_s=2.0, latency_s=1.0) for a, b in ends)
    >>> two = tuple(Vertex(name=name, kind="device") for name in "ab")
    >>> pair = Topology(vertices=two, links=links)
    >>> round_cost(ring("all-reduce", 2), pair, lambda source, target: (source,)).time_s(8.0)
    6.0
    """
    rounds = schedule.rounds()
    num_rounds = int(rounds.max(initial=-1)) + 1
    keys = schedule.source.astype(np.int64) * schedule.num_places + schedule.target
    pairs, pair = np.unique(keys, return_inverse=True)
    routes = [route(*divmod(int(key), schedule.num_places)) for key in pairs]
    # bytes of each pair in each round, then of each resource
    both = rounds * len(pairs) + pair
    used, at = np.unique(both, return_inverse=True)
    load = np.bincount(at, weights=schedule.weight, minlength=len(used))
    when, way = used // max(len(pairs), 1), used % max(len(pairs), 1)
    latency = np.array([topology.latency_s[list(links)].sum() if links else 0.0 for links in routes])
    latency_s = np.zeros(num_rounds)
    np.maximum.at(latency_s, when, latency[way])
    resources = [topology.resources_of(links) for links in routes]
    counts = np.array([len(one) for one in resources], dtype=np.int64)
    flat = np.array([one for some in resources for one in some], dtype=np.int64)
    begins = np.cumsum(counts) - counts
    each = counts[way]
    index = np.repeat(begins[way] - (np.cumsum(each) - each), each) + np.arange(each.sum())
    return _busiest(topology, np.repeat(when, each), flat[index], np.repeat(load, each), latency_s)


def _busiest(
    topology: Topology, when: np.ndarray, resource: np.ndarray, load: np.ndarray, latency_s: np.ndarray
) -> RoundCost:
    """Return the cost of rounds of which loads of resources are given."""
    num_resources = max(len(topology.capacity_bytes_per_s), 1)
    key, at = np.unique(when * num_resources + resource, return_inverse=True)
    total = np.bincount(at, weights=load, minlength=len(key))
    when, resource = key // num_resources, key % num_resources
    time = total / topology.capacity_bytes_per_s[resource]
    s_per_byte, bottleneck = np.zeros(len(latency_s)), np.full(len(latency_s), -1, dtype=np.int64)
    order = np.argsort(time, kind="stable")
    # the last write of each round is that of its largest time
    s_per_byte[when[order]], bottleneck[when[order]] = time[order], resource[order]
    return RoundCost(latency_s=latency_s, s_per_byte=s_per_byte, bottleneck=bottleneck)
