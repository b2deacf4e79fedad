"""A topology while it is built: add vertices, join them, and take the finished topology."""

from __future__ import annotations

from dataclasses import dataclass

from foreshard.comm.topology.graph import Edge, Kind, SharedResource, Topology, Vertex


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A vertex of a machine that takes a cable of the fabric, and what that cable carries."""

    vertex: int  # a NIC, or a device whose NIC is not modelled on its own
    bytes_per_s: float  # one direction
    latency_s: float = 0.0  # from the vertex to the first switch of the fabric


class Draft:
    """Vertices and links in the order they were added."""

    def __init__(self) -> None:
        self._vertices: list[Vertex] = []
        self._links: list[Edge] = []
        self._shared: list[SharedResource] = []

    def vertex(self, kind: Kind, name: str, *, node: int = -1) -> int:
        """Add a device, NIC, CPU or plain switch and return its index."""
        self._vertices.append(Vertex(name=name, kind=kind, node=node))
        return len(self._vertices) - 1

    def switch(self, name: str, *, node: int = -1, can_reduce: bool = False) -> int:
        """Add a switch, which multicasts if it reduces, and return its index."""
        self._vertices.append(
            Vertex(name=name, kind="switch", node=node, can_reduce=can_reduce, can_multicast=can_reduce)
        )
        return len(self._vertices) - 1

    def resource(self, name: str, bytes_per_s: float) -> int:
        """Add a capacity that links share and return its index."""
        self._shared.append(SharedResource(name=name, bytes_per_s=bytes_per_s))
        return len(self._shared) - 1

    def send(
        self,
        source: int,
        target: int,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        shared: tuple[int, ...] = (),
    ) -> None:
        """Add a link of one direction."""
        self._links.append(
            Edge(source=source, target=target, bytes_per_s=bytes_per_s, latency_s=latency_s, shared=shared)
        )

    def join(self, one: int, other: int, bytes_per_s: float, latency_s: float = 0.0) -> None:
        """Add two links, one each way, of the same bandwidth and latency."""
        self.send(one, other, bytes_per_s, latency_s)
        self.send(other, one, bytes_per_s, latency_s)

    def plug(self, port: Port, switch: int) -> None:
        """Join a port of a machine to a switch of the fabric."""
        self.join(port.vertex, switch, port.bytes_per_s, port.latency_s)

    def topology(self, name: str) -> Topology:
        """Return what was built."""
        return Topology(
            vertices=tuple(self._vertices),
            links=tuple(self._links),
            shared=tuple(self._shared),
            name=name,
        )
