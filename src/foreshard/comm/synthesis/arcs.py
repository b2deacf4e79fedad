"""Which devices reach each other without passing another device, and over which links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.topology.channel_routes import bottleneck_bytes_per_s, routes_from
from foreshard.comm.topology.graph import Topology

MUCH_FASTER = 1.5
"""Ratio of transfer times from which the slower of two arcs leaves to the faster what both could carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arc:
    """A route from one device to another over links and switches only."""

    # source, target: ranks
    source: int
    target: int
    # which of the routes between the two it is: sends of channel c take route c modulo their number
    channel: int
    links: tuple[int, ...]
    resources: tuple[int, ...]  # links, then the shared resources they occupy
    # latency_s, bytes_per_s: sum over the links; the narrowest resource
    latency_s: float
    bytes_per_s: float


def arcs_of(topology: Topology, check: Check = unlimited) -> list[Arc]:
    """Return every arc of a topology, by source, target and channel.

    Examples
    --------
    >>> from foreshard.comm.topology.graph import Edge, Vertex
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
        routes = routes_from(topology, vertex)
        reached = sorted((rank_of[target], target) for target in routes if target in rank_of)
        for other, target in reached:
            check()
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


def speed_tiers(transfer_s: np.ndarray) -> np.ndarray:
    """Return the tier of each way, 0 the fastest: from one to the next, transfers are `MUCH_FASTER`."""
    order = np.unique(transfer_s)
    step = np.concatenate([[False], order[1:] > order[:-1] * MUCH_FASTER])
    tier: np.ndarray = np.cumsum(step)[np.searchsorted(order, transfer_s)]
    return tier


def reversed_topology(topology: Topology) -> Topology:
    """Return the topology with every link turned round; links keep their numbers."""
    links = (replace(link, source=link.target, target=link.source) for link in topology.links)
    return replace(topology, links=tuple(links))
