"""Seconds of a schedule on a topology when every link serves its sends in the order they are listed."""

from __future__ import annotations

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.arcs import routes_from
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError


def seconds_of(schedule: Schedule, topology: Topology, num_bytes: float) -> float:
    """Return the seconds of a schedule for a collective of a size: the last arrival of `arrivals_s`.

    The one place where synthesis takes a time from; a flow simulator may stand in its stead.
    """
    return float(arrivals_s(schedule, topology, num_bytes).max(initial=0.0))


def arrivals_s(schedule: Schedule, topology: Topology, num_bytes: float) -> np.ndarray:
    """Return the second at which each send has arrived.

    A send starts when what it waits for has arrived and every resource of its route is free; it occupies each
    resource for its bytes over that resource's rate, and arrives after the narrowest one's and the latency.
    Sends of one resource keep the order of the schedule, so that this is the time of an execution that
    exists, not an estimate of the best one.

    Parameters
    ----------
    schedule : Schedule
        Listed so that a send comes after what it waits for.
    topology : Topology
    num_bytes : float, bytes
        Size of the collective, as `Chunk.weight` is a part of it.

    Returns
    -------
    ndarray, shape (sends,), seconds

    Raises
    ------
    SpecError
        If two places that exchange data are not connected.
    """
    rate = topology.capacity_bytes_per_s
    route_of = _RouteTable(schedule, topology)
    free = [0.0] * len(rate)
    arrived = [0.0] * schedule.num_sends
    size = (schedule.weight * num_bytes).tolist()
    indptr, indices = schedule.indptr.tolist(), schedule.indices.tolist()
    slowness = (1.0 / rate).tolist()
    ends = zip(schedule.source.tolist(), schedule.target.tolist(), schedule.channel.tolist(), strict=True)
    for i, end in enumerate(ends):
        resources, latency_s, slowest = route_of[end]
        start = max((arrived[j] for j in indices[indptr[i] : indptr[i + 1]]), default=0.0)
        start = max(start, max(free[one] for one in resources))
        for one in resources:
            free[one] = start + size[i] * slowness[one]
        arrived[i] = start + size[i] * slowest + latency_s
    return np.array(arrived)


class _RouteTable(dict[tuple[int, int, int], tuple[tuple[int, ...], float, float]]):
    """Resources, latency and seconds per byte of (source place, target place, channel), when asked for."""

    def __init__(self, schedule: Schedule, topology: Topology) -> None:
        super().__init__()
        named = {vertex.name: i for i, vertex in enumerate(topology.vertices)}
        self._vertex = [*topology.devices.tolist(), *(named[name] for name in schedule.switches)]
        self._topology = topology
        self._routes: dict[tuple[int, bool], dict[int, list[tuple[int, ...]]]] = {}

    def __missing__(self, end: tuple[int, int, int]) -> tuple[tuple[int, ...], float, float]:
        links = self._links(*end)
        resources = self._topology.resources_of(links)
        latency_s = float(self._topology.latency_s[list(links)].sum())
        slowest = 1.0 / float(self._topology.capacity_bytes_per_s[list(resources)].min())
        self[end] = resources, latency_s, slowest
        return self[end]

    def _links(self, source: int, target: int, channel: int) -> tuple[int, ...]:
        start, end = self._vertex[source], self._vertex[target]
        for through_devices in (False, True):
            key = start, through_devices
            if key not in self._routes:
                self._routes[key] = routes_from(self._topology, start, through_devices=through_devices)
            routes = self._routes[key].get(end)
            if routes:
                return routes[channel % len(routes)]
        names = " -> ".join(self._topology.vertices[one].name for one in (start, end))
        raise SpecError(
            f"the schedule sends {names}",
            key="schedule",
            value=names,
            rule="Places that exchange data are connected",
        )
