"""The plain graph file, TOML or JSON: vertices and links by name, rates and latencies with units.

::

    name = "two"
    vertices = [{ name = "gpu0", kind = "device" }, { name = "gpu1", kind = "device" }]
    links = [{ source = "gpu0", target = "gpu1", bandwidth = "50 GB/s", latency = "1 us", both_ways = true }]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from foreshard.comm.topology.graph import Edge, Name, SharedResource, Topology, Vertex
from foreshard.comm.topology.importers.connected import connected
from foreshard.errors import SpecError, unknown
from foreshard.spec import codec
from foreshard.spec.codec import Range, Size, Unit

_Rate = Annotated[float, Unit("bytes_per_s"), Range(1.0, 1e18)]
_Latency = Annotated[float, Unit("s"), Range(0.0, 60.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyLinkTable:
    """One link of the file, or two of opposite directions."""

    source: Name
    target: Name
    bandwidth: _Rate
    latency: _Latency = 0.0
    shared: tuple[Name, ...] = ()
    both_ways: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTable:
    """One capacity that links share."""

    name: Name
    bandwidth: _Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyFile:
    """A plain graph file."""

    name: str = ""
    vertices: Annotated[tuple[Vertex, ...], Size(1)]
    links: tuple[TopologyLinkTable, ...] = ()
    shared: tuple[SharedTable, ...] = ()


def plain_topology(text: str, *, file: str | None = None) -> Topology:
    """Return the topology of a plain graph file, JSON if its text starts with a brace and TOML if not.

    Raises
    ------
    SpecError
        For anything that is none: it says where, and names unknown vertices and devices apart.
    """
    is_json = text.lstrip().startswith("{")
    data = codec.parse_json(text, file=file) if is_json else codec.parse_toml(text, file=file)
    table = codec.decode(TopologyFile, data, file=file)
    at = _indices([vertex.name for vertex in table.vertices], "vertices", file)
    resources = _indices([resource.name for resource in table.shared], "shared", file)
    links: list[Edge] = []
    for i, link in enumerate(table.links):
        ends = [_known(name, at, f"links[{i}]", file) for name in (link.source, link.target)]
        shared = tuple(_known(name, resources, f"links[{i}].shared", file) for name in link.shared)
        for source, target in (ends, ends[::-1])[: 1 + link.both_ways]:
            links.append(
                Edge(
                    source=source,
                    target=target,
                    bytes_per_s=link.bandwidth,
                    latency_s=link.latency,
                    shared=shared,
                )
            )
    topology = Topology(
        vertices=table.vertices,
        links=tuple(links),
        shared=tuple(SharedResource(name=each.name, bytes_per_s=each.bandwidth) for each in table.shared),
        name=table.name,
    )
    return connected(topology, file=file)


def plain_graph(topology: Topology) -> dict[str, Any]:
    """Return a topology as the data of a plain graph file, to be written as JSON or TOML."""
    names = [vertex.name for vertex in topology.vertices]
    return {
        "name": topology.name,
        "vertices": [_vertex_data(vertex) for vertex in topology.vertices],
        "links": [
            {
                "source": names[link.source],
                "target": names[link.target],
                "bandwidth": f"{link.bytes_per_s!r} B/s",
                "latency": f"{link.latency_s!r} s",
                "shared": [topology.shared[i].name for i in link.shared],
            }
            for link in topology.links
        ],
        "shared": [{"name": each.name, "bandwidth": f"{each.bytes_per_s!r} B/s"} for each in topology.shared],
    }


def _vertex_data(vertex: Vertex) -> dict[str, Any]:
    data: dict[str, Any] = {"name": vertex.name, "kind": vertex.kind, "node": vertex.node}
    if vertex.kind == "switch":
        data |= {"can_reduce": vertex.can_reduce, "can_multicast": vertex.can_multicast}
    return data


def _indices(names: Sequence[str], key: str, file: str | None) -> dict[str, int]:
    """Return the index of each name."""
    found: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in found:
            rule = "Names are unique"
            raise SpecError(f"two are named {name!r}", file=file, key=key, value=name, rule=rule)
        found[name] = i
    return found


def _known(name: str, known: Mapping[str, int], key: str, file: str | None) -> int:
    if name not in known:
        raise unknown("name", name, list(known)[:20], key=key, file=file)
    return known[name]
