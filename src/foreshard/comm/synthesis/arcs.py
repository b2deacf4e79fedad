"""Which devices reach each other without passing another device, and over which links."""

from __future__ import annotations

from dataclasses import dataclass

from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.topology.graph import Edge, Topology

MAX_ROUTES = 8
"""Routes of fewest hops kept between two vertices: enough for the eight planes of NVSwitch systems."""
MUCH_FASTER = 1.5
"""Ratio of transfer times from which the slower of two arcs leaves to the faster what both could carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arc:
    """A route from one device to another over links and switches only.

    Attributes
    ----------
    source, target : int
        Ranks.
    channel : int
        Which of the routes between the two it is: sends of channel c take route c modulo their number.
    links : tuple of int
    resources : tuple of int
        Links, then the shared resources they occupy.
    latency_s, bytes_per_s : float
        Sum over the links; the narrowest resource.
    """

    source: int
    target: int
    channel: int
    links: tuple[int, ...]
    resources: tuple[int, ...]
    latency_s: float
    bytes_per_s: float


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
    found: dict[int, list[tuple[int, ...]]] = {vertex: [()]}
    layer = [vertex]
    while layer:
        ahead: dict[int, list[tuple[int, ...]]] = {}
        for at in layer:
            if at != vertex and not through_devices and topology.vertices[at].kind == "device":
                continue
            for link in topology.links_out[at]:
                target = topology.links[link].target
                if target not in found:
                    ahead.setdefault(target, []).extend((*route, link) for route in found[at])
        for target, routes in ahead.items():
            if len(routes) > 1:
                routes.sort(key=lambda route: (-bottleneck_bytes_per_s(topology, route), route))
            found[target] = routes[:MAX_ROUTES]
        layer = list(ahead)
    del found[vertex]
    return found


def bottleneck_bytes_per_s(topology: Topology, route: tuple[int, ...]) -> float:
    """Return the rate of the narrowest resource of a route."""
    return min(float(topology.capacity_bytes_per_s[one]) for one in topology.resources_of(route))


def arcs_of(topology: Topology, check: Check = unlimited) -> list[Arc]:
    """Return every arc of a topology, by source, target and channel.

    Examples
    --------
    >>> from foreshard.comm.topology.graph import Topology, Vertex
    >>> names = ("device", "device", "switch")
    >>> vertices = tuple(Vertex(name=f"{i}", kind=kind) for i, kind in enumerate(names))
    >>> pairs = ((0, 2), (2, 0), (1, 2), (2, 1))
    >>> links = tuple(Edge(source=i, target=j, bytes_per_s=1e9) for i, j in pairs)
    >>> [(arc.source, arc.target, arc.links) for arc in arcs_of(Topology(vertices=vertices, links=links))]
    [(0, 1, (0, 3)), (1, 0, (2, 1))]
    """
    rank_of = {vertex: rank for rank, vertex in enumerate(topology.devices.tolist())}
    made = []
    for vertex, rank in rank_of.items():
        check()
        routes = routes_from(topology, vertex)
        reached = sorted((rank_of[target], target) for target in routes if target in rank_of)
        for other, target in reached:
            for channel, links in enumerate(routes[target]):
                made.append(
                    Arc(
                        source=rank,
                        target=other,
                        channel=channel,
                        links=links,
                        resources=topology.resources_of(links),
                        latency_s=float(sum(topology.links[link].latency_s for link in links)),
                        bytes_per_s=bottleneck_bytes_per_s(topology, links),
                    )
                )
    return made


def reversed_topology(topology: Topology) -> Topology:
    """Return the topology with every link turned round; links keep their numbers."""
    links = tuple(
        Edge(
            source=link.target,
            target=link.source,
            bytes_per_s=link.bytes_per_s,
            latency_s=link.latency_s,
            shared=link.shared,
        )
        for link in topology.links
    )
    return Topology(vertices=topology.vertices, links=links, shared=topology.shared, name=topology.name)
