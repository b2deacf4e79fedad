"""All-reduces and broadcasts that switches which add up and copy do for the devices."""

from __future__ import annotations

from foreshard.comm.schedules.schedule import Chunk, Schedule, ScheduleBuilder
from foreshard.comm.topology.graph import Topology


def reducing_planes(topology: Topology) -> dict[int, float]:
    """Return the switches that reduce and multicast and are linked with every device, and their bandwidth.

    Returns
    -------
    dict of int to float, bytes/s
        Vertex, and rate of its slowest link to or from a device.
    """
    rate: dict[tuple[int, int], float] = {}
    for link in topology.links:
        ends = link.source, link.target
        rate[ends] = rate.get(ends, 0.0) + link.bytes_per_s
    planes: dict[int, float] = {}
    devices = topology.devices.tolist()
    for switch, vertex in enumerate(topology.vertices):
        if not (vertex.kind == "switch" and vertex.can_reduce and vertex.can_multicast):
            continue
        if all((device, switch) in rate and (switch, device) in rate for device in devices):
            planes[switch] = min(min(rate[one, switch], rate[switch, one]) for one in devices)
    return planes


def in_network_schedule(collective: str, topology: Topology, pieces: int) -> Schedule:
    """Return the all-reduce or broadcast whose data goes to a switch and comes back from it.

    Of an all-reduce, every rank sends each piece to a switch, which adds them up and sends the sum to all; of
    a broadcast, rank 0 alone sends.

    Parameters
    ----------
    collective : {'all-reduce', 'broadcast'}
    topology : Topology
        With `reducing_planes`.
    pieces : int, at least 1
        Of what goes through each switch, by bandwidth.
    """
    planes = reducing_planes(topology)
    every = tuple(range(topology.num_ranks))
    senders = every if collective == "all-reduce" else (0,)
    total = sum(planes.values())
    weights = [rate / total / pieces for rate in planes.values()] * pieces
    chunks = [Chunk(weight=weight, sources=senders, targets=every) for weight in weights]
    names = [topology.vertices[switch].name for switch in planes]
    build = ScheduleBuilder(collective, "in-network", len(every), chunks, names)
    for chunk in range(len(chunks)):
        place = len(every) + chunk % len(planes)
        up = [build.send(rank, place, chunk, reduce=len(senders) > 1) for rank in senders]
        for rank in every:
            if collective == "all-reduce" or rank not in senders:
                build.send(place, rank, chunk, after=up)
    return build.schedule()
