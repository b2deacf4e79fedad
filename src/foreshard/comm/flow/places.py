"""Where the places of a schedule are on a topology, and which routes its sends take."""

from __future__ import annotations

from functools import cache

import numpy as np

from foreshard.comm.flow.schedule_run import Routing
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.topology.channel_routes import channel_routes
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.routing import Forwarding
from foreshard.comm.topology.routing import Routing as Routes
from foreshard.errors import SpecError
from foreshard.units import number_of


def routing_of(schedule: Schedule, topology: Topology, *, forwarding: Forwarding = "direct") -> Routing:
    """Return the routes of a schedule's sends: shortest paths, by a hash of the channel where several are.

    A schedule whose sends overlap was made for a network: its channels name routes of that (`ChannelRoutes`).
    Rank r is the r-th device. A switch place is the vertex of its name; one without a name of the topology is
    the reducing switch nearest to the places that send to it, each switch once.

    Raises
    ------
    SpecError
        If there are more ranks than devices, or no switch that reduces is left.
    """
    check_devices(schedule.num_ranks, topology)
    routes = Routes(topology, forwarding=forwarding)
    vertices = _vertices(schedule, topology, routes)

    explicit = channel_routes(topology) if schedule.overlaps else None

    @cache
    def route(source: int, target: int, flow: int) -> tuple[int, ...]:
        if explicit is not None:
            return explicit.links(vertices[source], vertices[target], flow)
        return routes.ecmp(vertices[source], vertices[target], flow=flow)

    return route


def check_devices(num_ranks: int, topology: Topology) -> None:
    """Refuse more ranks than devices."""
    if num_ranks > topology.num_ranks:
        raise SpecError(
            f"{num_ranks} ranks on {number_of(topology.num_ranks, 'device')}",
            key="ranks",
            value=num_ranks,
            rule="Every rank is a device of the topology",
            fix=f"Give {topology.num_ranks} ranks or less, or a larger cluster",
        )


def _vertices(schedule: Schedule, topology: Topology, routes: Routes) -> list[int]:
    """Return the vertex of each place."""
    found = topology.devices[: schedule.num_ranks].tolist()
    names = {vertex.name: i for i, vertex in enumerate(topology.vertices)}
    free = [i for i, vertex in enumerate(topology.vertices) if vertex.can_reduce]
    for place, name in enumerate(schedule.switches, start=schedule.num_ranks):
        if name not in names and not free:
            raise SpecError(
                f"{schedule.algorithm} needs {len(schedule.switches)} switches that reduce",
                key="algorithm",
                value=schedule.algorithm,
                rule=f"The topology has {place - schedule.num_ranks}",
                fix="Use an algorithm without switches, or a topology whose switches reduce",
            )
        below = np.unique(schedule.source[(schedule.target == place) & (schedule.source < place)])
        near = [found[one] for one in below.tolist()]
        chosen = names.get(name)
        if chosen is None:
            chosen = min(free, key=lambda switch: max((_hops(routes, v, switch) for v in near), default=0))
        if schedule.algorithm.startswith("nvls"):
            _check_domain(schedule, topology, routes, near, chosen)
        free = [one for one in free if one != chosen]
        found.append(chosen)
    return found


def _check_domain(
    schedule: Schedule, topology: Topology, routes: Routes, members: list[int], switch: int
) -> None:
    """Refuse a switch of a scale-up domain that some ranks reach over a network, or not at all."""
    near = [routes.shortest(one, switch) for one in members if np.isfinite(_hops(routes, one, switch))]
    passed = (topology.vertices[topology.links[link].target] for route in near for link in route)
    if len(near) < len(members) or any(vertex.kind == "nic" for vertex in passed):
        raise SpecError(
            f"{schedule.algorithm} over several scale-up domains",
            key="algorithm",
            value=schedule.algorithm,
            rule="Devices add up in the switch that they are linked to",
            fix="Use nvls-tree, hierarchical or ring, or fewer ranks",
        )


def _hops(routes: Routes, source: int, target: int) -> float:
    try:
        return len(routes.shortest(source, target))
    except SpecError:
        return float("inf")
