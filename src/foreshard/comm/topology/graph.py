"""A network as a directed multigraph: vertices, links with capacities, and resources that links share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, Literal

import numpy as np

from foreshard.errors import SpecError
from foreshard.spec.codec import Range, Size

Kind = Literal["device", "switch", "nic", "cpu"]
Name = Annotated[str, Size(1, 200)]  # of a vertex or a resource, where a file states it


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """A place that data passes or stays at."""

    name: Name  # unique in its topology
    kind: Kind
    node: Annotated[int, Range(-1, 2**31)] = -1  # the host it is part of, -1 for none
    # can_reduce, can_multicast: whether a switch adds up what arrives, and sends one arriving message to
    # several places
    can_reduce: bool = False
    can_multicast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One direction of a cable, a bus or a group of lanes."""

    # source, target: vertices
    source: int
    target: int
    bytes_per_s: float
    latency_s: float = 0.0
    shared: tuple[int, ...] = ()  # shared resources of the topology that its bytes also occupy


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResource:
    """A capacity that several links have in common: a bus, a NIC's injection, a switch's backplane."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """Vertices, links, and what links share.

    Rank r is the r-th vertex of kind 'device'. All engines see one table of resources: the links in order,
    then the shared resources.

    Raises
    ------
    SpecError
        For names that are not unique, ends that do not exist, or a capacity that is not above 0.
    """

    vertices: tuple[Vertex, ...]
    links: tuple[Edge, ...]
    shared: tuple[SharedResource, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no network."""
        names = [vertex.name for vertex in self.vertices]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SpecError(
                f"two vertices are named {twice!r}", key="vertices", value=twice, rule="Names are unique"
            )
        for link in self.links:
            ends = f"{link.source} -> {link.target}"
            if not (0 <= link.source < len(names) and 0 <= link.target < len(names)):
                raise SpecError(f"link {ends}", key="links", value=ends, rule="Both ends are vertices")
            if not (0.0 < link.bytes_per_s < np.inf and 0.0 <= link.latency_s < np.inf):
                raise SpecError(
                    f"link {names[link.source]} -> {names[link.target]} has {link.bytes_per_s:g} B/s",
                    key="links",
                    value=link.bytes_per_s,
                    rule="A link has a finite bandwidth above 0 and a latency of at least 0",
                )
            if any(not 0 <= one < len(self.shared) for one in link.shared):
                raise SpecError(f"link {ends}", key="links", value=link.shared, rule="Shared resources exist")
        for one in self.shared:
            if not 0.0 < one.bytes_per_s < np.inf:
                raise SpecError(
                    f"{one.name} has {one.bytes_per_s:g} B/s",
                    key="shared",
                    value=one.bytes_per_s,
                    rule="A shared resource has a finite bandwidth above 0",
                )

    @cached_property
    def devices(self) -> np.ndarray:
        """Vertices of the ranks, shape (ranks,)."""
        return np.array([i for i, one in enumerate(self.vertices) if one.kind == "device"], dtype=np.int64)

    @property
    def num_ranks(self) -> int:
        """Devices."""
        return len(self.devices)

    @cached_property
    def capacity_bytes_per_s(self) -> np.ndarray:
        """Bandwidth of every resource: links, then shared resources; shape (resources,)."""
        links, shared = ([one.bytes_per_s for one in some] for some in (self.links, self.shared))
        return np.array(links + shared)

    @cached_property
    def latency_s(self) -> np.ndarray:
        """Latency of every link, shape (links,)."""
        return np.array([link.latency_s for link in self.links])

    @cached_property
    def link_ends(self) -> np.ndarray:
        """Source and target of every link, shape (links, 2)."""
        return np.array([(link.source, link.target) for link in self.links], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def link_targets(self) -> list[int]:
        """Vertex that every link leads to."""
        return [link.target for link in self.links]

    @cached_property
    def tightest_shared(self) -> np.ndarray:
        """Narrowest shared resource of every link, -1 where it has none; shape (links,)."""
        rates = [one.bytes_per_s for one in self.shared]
        return np.array(
            [min(link.shared, key=rates.__getitem__, default=-1) for link in self.links], dtype=np.int64
        )

    @cached_property
    def link_bytes_per_s(self) -> list[float]:
        """Bandwidth of every link, or of what it shares where that is narrower."""
        shared = [one.bytes_per_s for one in self.shared]
        return [min(link.bytes_per_s, *(shared[one] for one in link.shared), inf) for link in self.links]

    @cached_property
    def links_out(self) -> tuple[tuple[int, ...], ...]:
        """Links that leave each vertex."""
        found: list[list[int]] = [[] for _ in self.vertices]
        for i, link in enumerate(self.links):
            found[link.source].append(i)
        return tuple(tuple(one) for one in found)

    @cached_property
    def links_in(self) -> tuple[tuple[int, ...], ...]:
        """Links that lead to each vertex."""
        found: list[list[int]] = [[] for _ in self.vertices]
        for i, link in enumerate(self.links):
            found[link.target].append(i)
        return tuple(tuple(one) for one in found)

    def resources_of(self, route: Sequence[int]) -> tuple[int, ...]:
        """Return the resources that bytes on a route of links occupy, each once."""
        if not self.shared:
            return tuple(dict.fromkeys(route))
        shared = (len(self.links) + one for link in route for one in self.links[link].shared)
        return tuple(dict.fromkeys((*route, *shared)))
