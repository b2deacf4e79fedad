"""Explicit routes: of the routes of fewest hops from place to place, the one that a channel takes.

Schedules made for a network name the route of each send by its channel; the widest route comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from functools import lru_cache
from math import inf

from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError

MAX_ROUTES = 8
"""Routes of fewest hops kept between two vertices: enough for the eight planes of NVSwitch systems."""
_FEW_TARGETS = 8
"""Targets of a vertex up to which routes are searched one by one, not to the whole fabric at once."""


class ChannelRoutes:
    """Routes of one topology: past devices only where no other leads there."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._num_targets: Counter[int] = Counter()
        self._from: dict[tuple[int, bool], dict[int, list[tuple[int, ...]]]] = {}
        self._between: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def links(self, source: int, target: int, channel: int) -> tuple[int, ...]:
        """Return the links from vertex to vertex that a channel takes.

        Raises
        ------
        SpecError
            If no path leads there.
        """
        routes = self._between.get((source, target))
        if routes is None:
            self._num_targets[source] += 1
            direct = self._found(source, target, through_devices=False)
            routes = direct or self._found(source, target, through_devices=True)
            self._between[source, target] = routes
        if routes:
            return routes[channel % len(routes)]
        names = " -> ".join(self._topology.vertices[vertex].name for vertex in (source, target))
        raise SpecError(
            f"the schedule sends {names}",
            key="schedule",
            value=names,
            rule="Places that exchange data are connected",
            fix="Synthesize the schedule for this topology, or add the links",
        )

    def _found(self, source: int, target: int, *, through_devices: bool) -> list[tuple[int, ...]]:
        key = source, through_devices
        if key not in self._from and self._num_targets[source] <= _FEW_TARGETS:
            return routes_between(self._topology, source, target, through_devices=through_devices)
        if key not in self._from:
            self._from[key] = routes_from(self._topology, source, through_devices=through_devices)
        return self._from[key].get(target, [])


@lru_cache(maxsize=2)
def channel_routes(topology: Topology) -> ChannelRoutes:
    """Return the routes of a topology, which are searched once: those of 512 ranks take a second."""
    return ChannelRoutes(topology)


def routes_from(
    topology: Topology, vertex: int, *, through_devices: bool = False
) -> dict[int, list[tuple[int, ...]]]:
    """Return the routes of fewest hops from a vertex to every other it reaches, the widest first.

    Parameters
    ----------
    topology : Topology
    vertex : int
    through_devices : bool, default False
        Whether a device between the ends forwards.

    Returns
    -------
    dict of int to list of tuple of int
        Links of at most `MAX_ROUTES` routes to each vertex.
    """
    return _routes(topology, vertex, through_devices, range(len(topology.vertices)))


def routes_between(
    topology: Topology, source: int, target: int, *, through_devices: bool = False
) -> list[tuple[int, ...]]:
    """Return the routes of `routes_from` to one vertex; the rest of a large fabric is not visited."""
    among = _between(topology, source, target, through_devices)
    return _routes(topology, source, through_devices, among).get(target, [])


def _between(topology: Topology, source: int, target: int, through_devices: bool) -> set[int]:
    """Return the vertices on routes of fewest hops, by searches from both ends that meet."""
    # which vertices come before each, on the way from either end
    before: tuple[dict[int, list[int]], ...] = ({source: []}, {target: []})
    layers = [[source], [target]]
    both_ways = topology.links_out, topology.links_in
    while all(layers) and not before[0].keys() & before[1].keys():
        work = [sum(len(links[at]) for at in layer) for links, layer in zip(both_ways, layers, strict=True)]
        side = int(work[1] < work[0])
        ahead: dict[int, list[int]] = {}
        for at in layers[side]:
            for link in both_ways[side][at]:
                other = topology.links[link].source if side else topology.links[link].target
                passes = through_devices or topology.vertices[other].kind != "device"
                if other not in before[side] and (passes or other in (source, target)):
                    ahead.setdefault(other, []).append(at)
        before[side].update(ahead)
        layers[side] = list(ahead)
    met = before[0].keys() & before[1].keys()
    found = set(met)
    for way in before:
        layer = set(met)
        while layer:
            layer = {one for at in layer for one in way[at]}
            found |= layer
    return found


def _routes(
    topology: Topology, vertex: int, through_devices: bool, among: Container[int]
) -> dict[int, list[tuple[int, ...]]]:
    """Return the routes of fewest hops over some vertices, which have all such routes to each of them."""
    # of each route: minus the rate of its narrowest resource, so that the widest sorts first
    found: dict[int, list[tuple[float, tuple[int, ...]]]] = {vertex: [(-inf, ())]}
    rates, ends = topology.link_bytes_per_s, topology.link_targets
    layer = [vertex]
    while layer:
        ahead: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        for at in layer:
            if at != vertex and not through_devices and topology.vertices[at].kind == "device":
                continue
            ways = found[at]
            for link in topology.links_out[at]:
                target = ends[link]
                if target in found or target not in among:
                    continue
                more = ahead.setdefault(target, [])
                rate = -rates[link]
                for width, route in ways:
                    more.append((width if width > rate else rate, (*route, link)))
        for target, routes in ahead.items():
            if len(routes) > 1:
                routes.sort()
            found[target] = routes[:MAX_ROUTES]
        layer = list(ahead)
    del found[vertex]
    return {target: [route for _, route in routes] for target, routes in found.items()}


def bottleneck_bytes_per_s(topology: Topology, route: tuple[int, ...]) -> float:
    """Return the rate of the narrowest resource of a route."""
    return min(topology.link_bytes_per_s[link] for link in route)
