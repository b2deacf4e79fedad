"""Seconds of a schedule on a topology when every link serves its sends in the order they are listed."""

from __future__ import annotations

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.topology.channel_routes import channel_routes
from foreshard.comm.topology.graph import Topology
from foreshard.compiled import is_worth_compiling, loops


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
    ways, way = schedule.ways()
    named = {vertex.name: i for i, vertex in enumerate(topology.vertices)}
    place = [*topology.devices.tolist(), *(named[name] for name in schedule.switches)]
    routes = channel_routes(topology)
    links = [routes.links(place[source], place[target], channel) for source, target, channel in ways]
    used = [topology.resources_of(route) for route in links]
    first = np.concatenate([[0], np.cumsum([len(held) for held in used])]).astype(np.int64)
    resources = np.array([resource for held in used for resource in held], dtype=np.int64)
    latency = topology.latency_s.tolist()
    latency_s = np.array([sum(latency[link] for link in route) for route in links])
    slowest_s = np.maximum.reduceat(busy_s[resources], first[:-1]) if len(used) else np.zeros(0)
    arrived = np.zeros(schedule.num_sends)
    kernel = loops("foreshard.comm.synthesis._timing_kernel", is_worth_compiling(schedule.num_sends))
    kernel.serve(
        way,
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
