"""Whether all devices of an imported topology reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError


def connected(topology: Topology, *, file: str | None = None) -> Topology:
    """Return the topology.

    Raises
    ------
    SpecError
        If it has no device, or a device that does not reach another by links; it names both.
    """
    if not topology.num_ranks:
        raise SpecError("no device", file=file, key="vertices", rule="A topology has at least one device")
    into: list[list[int]] = [[] for _ in topology.vertices]
    for link in topology.links:
        into[link.target].append(link.source)
    out = [[topology.links[i].target for i in some] for some in topology.links_out]
    first = int(topology.devices[0])
    for steps, one_way in ((out, "{0} to {1}"), (into, "{1} to {0}")):
        reached = _reached(first, steps)
        for device in topology.devices:
            if int(device) not in reached:
                names = [repr(topology.vertices[i].name) for i in (first, int(device))]
                what = f"no path leads from {one_way.format(*names)}"
                rule, fix = "All devices are connected, both ways", "Add the links that are missing"
                raise SpecError(what, file=file, key="links", value=names[1], rule=rule, fix=fix)
    return topology


def _reached(start: int, steps: Sequence[Sequence[int]]) -> set[int]:
    found, left = {start}, [start]
    while left:
        for vertex in steps[left.pop()]:
            if vertex not in found:
                found.add(vertex)
                left.append(vertex)
    return found
