"""Seconds of a schedule on a topology when every link serves its sends in the order they are listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from foreshard.comm.compiled import is_worth_compiling, loops
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.arcs import routes_between, routes_from
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError

_FEW_TARGETS = 8
"""Targets of a place up to which routes are searched one by one, not to the whole fabric at once."""


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
    busy_s = 1.0 / topology.capacity_bytes_per_s
    ends, end = schedule.ways
    routes = _Routes(schedule, topology, ends)
    links = [routes.links(source, target, channel) for source, target, channel in ends]
    used = [topology.resources_of(route) for route in links]
    first = np.concatenate([[0], np.cumsum([len(held) for held in used])]).astype(np.int64)
    resources = np.array([resource for held in used for resource in held], dtype=np.int64)
    latency = topology.latency_s.tolist()
    latency_s = np.array([sum(latency[link] for link in route) for route in links])
    slowest_s = np.maximum.reduceat(busy_s[resources], first[:-1]) if len(used) else np.zeros(0)
    arrived = np.zeros(schedule.num_sends)
    kernel = loops("foreshard.comm.synthesis._timing_kernel", is_worth_compiling(schedule.num_sends))
    kernel.serve(
        end,
        schedule.weight * num_bytes,
        schedule.indptr.astype(np.int64),
        schedule.indices.astype(np.int64),
        first,
        resources,
        (busy_s, latency_s, slowest_s),
        np.zeros(len(busy_s)),
        arrived,
    )
    return arrived


class _Routes:
    """Links from place to place on a channel: routes past devices only where no other leads there."""

    def __init__(self, schedule: Schedule, topology: Topology, ends: Iterable[tuple[int, int, int]]) -> None:
        named = {vertex.name: i for i, vertex in enumerate(topology.vertices)}
        self._vertex = [*topology.devices.tolist(), *(named[name] for name in schedule.switches)]
        self._topology = topology
        self._num_targets = Counter(source for source, _ in {end[:2] for end in ends})
        self._from: dict[tuple[int, bool], dict[int, list[tuple[int, ...]]]] = {}
        self._between: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def links(self, source: int, target: int, channel: int) -> tuple[int, ...]:
        """Return the links of the route that a channel takes."""
        pair = self._vertex[source], self._vertex[target]
        if pair not in self._between:
            few = self._num_targets[source] <= _FEW_TARGETS
            direct = self._found(*pair, few=few, through_devices=False)
            self._between[pair] = direct or self._found(*pair, few=few, through_devices=True)
        routes = self._between[pair]
        if routes:
            return routes[channel % len(routes)]
        start, end = pair
        names = " -> ".join(self._topology.vertices[vertex].name for vertex in (start, end))
        raise SpecError(
            f"the schedule sends {names}",
            key="schedule",
            value=names,
            rule="Places that exchange data are connected",
        )

    def _found(self, start: int, end: int, *, few: bool, through_devices: bool) -> list[tuple[int, ...]]:
        if few:
            return routes_between(self._topology, start, end, through_devices=through_devices)
        key = start, through_devices
        if key not in self._from:
            self._from[key] = routes_from(self._topology, start, through_devices=through_devices)
        return self._from[key].get(end, [])
