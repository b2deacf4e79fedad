"""Routes over a topology: shortest, one of the equal-cost paths by hash, all of them, or a given one.

A path is shorter by latency, then by hops. Devices forward for others between their direct links to other
devices only (ring, torus, mesh, DGX-1): a device behind a switch, or its NIC, carries no traffic of others.

The search runs from both ends at once, so that a route between neighbours never visits the rest of a large
fabric; what a search found is kept per end and continued for the next route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError, unknown

Route = tuple[int, ...]
"""Links in order; the route from a vertex to itself has none."""

Forwarding = Literal["direct", "any"]

# Costs are integers, so that equal-cost paths compare equal: femtoseconds, and hops in the low bits.
_PER_S = 1e15
_HOP_BITS = 24
# A link as a search follows it, forward or backward: (link, vertex it leads to, cost, whether exactly one of
# its ends is a device).
_Step = tuple[int, int, int, bool]


@dataclass(slots=True)
class _Search:
    """Shortest paths from one root, as far as they were needed."""

    root: int
    # lowest known cost of each vertex reached; final where it is at most the radius
    cost: dict[int, int] = field(default_factory=dict)
    # last steps of the shortest paths to a vertex, as (link, vertex before)
    last: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    # number of shortest paths to each vertex that the search continued from
    ways: dict[int, int] = field(default_factory=dict)
    heap: list[tuple[int, int]] = field(default_factory=list)  # vertices to continue from

    def __post_init__(self) -> None:
        """Start at the root."""
        self.cost[self.root] = 0
        self.heap.append((0, self.root))

    def radius(self) -> int | None:
        """Return the cost of the next vertex to continue from, None when there is none."""
        while self.heap and self.heap[0][1] in self.ways:
            heappop(self.heap)
        return self.heap[0][0] if self.heap else None

    def count(self, vertex: int) -> int:
        """Return the number of shortest paths to a vertex of final cost."""
        if vertex == self.root:
            return 1
        known = self.ways.get(vertex)
        return known or sum(self.ways[before] for _, before in self.last[vertex])

    def expand(self, vertex: int, steps: Sequence[_Step]) -> None:
        """Continue over steps from the nearest vertex."""
        reached = self.cost[vertex]
        self.ways[vertex] = self.count(vertex)
        for link, to, cost, _ in steps:
            total, known = reached + cost, self.cost.get(to)
            if known is None or total < known:
                self.cost[to] = total
                self.last[to] = [(link, vertex)]
                heappush(self.heap, (total, to))
            elif total == known:
                self.last[to].append((link, vertex))

    def walk(self, vertex: int, choice: int) -> list[int]:
        """Return the links of one of the shortest paths, from the vertex back to the root."""
        links = []
        while vertex != self.root:
            for link, before in self.last[vertex]:
                if choice < self.ways[before]:
                    links.append(link)
                    vertex = before
                    break
                choice -= self.ways[before]
        return links


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A link where the two halves of equal-cost paths meet, and the number of halves on either side."""

    link: int
    before: int
    after: int
    ways_before: int
    ways_after: int

    @property
    def ways(self) -> int:
        """Number of paths over the link."""
        return self.ways_before * self.ways_after


class Routing:
    """Routes of one topology.

    Parameters
    ----------
    topology : Topology
    forwarding : {'direct', 'any'}
        Whether devices forward between their links to other devices only, or between any two links, as
        schedules that were synthesised for a sparse fabric do.
    """

    def __init__(self, topology: Topology, *, forwarding: Forwarding = "direct") -> None:
        if forwarding not in ("direct", "any"):
            raise unknown("forwarding", str(forwarding), ("direct", "any"), key="forwarding")
        self.topology = topology
        self._direct = forwarding == "direct"
        self._device = [vertex.kind == "device" for vertex in topology.vertices]
        self._out, self._in = _steps(topology, self._device)
        self._through_out, self._through_in = self._through(self._out), self._through(self._in)
        self._forward: dict[int, _Search] = {}
        self._backward: dict[int, _Search] = {}

    def num_paths(self, source: int, target: int) -> int:
        """Return the number of equal-cost shortest paths from vertex to vertex."""
        if source == target:
            return 1
        return sum(crossing.ways for crossing in self._meet(source, target))

    def shortest(self, source: int, target: int) -> Route:
        """Return the first of the equal-cost shortest paths from vertex to vertex.

        Raises
        ------
        SpecError
            If there is no path; it names both ends.
        """
        return self._path(source, target, 0) if source != target else ()

    def ecmp(self, source: int, target: int, *, flow: int = 0) -> Route:
        """Return the equal-cost path that a hash of source, target and flow picks, the same in every run."""
        if source == target:
            return ()
        return self._path(source, target, _hash(source, target, flow))

    def spray(self, source: int, target: int, *, limit: int = 64) -> tuple[tuple[Route, float], ...]:
        """Return the equal-cost paths and the fraction of the bytes that each carries.

        Of more than `limit` paths, evenly spaced ones stand for all.
        """
        if source == target:
            return (((), 1.0),)
        crossings = self._meet(source, target)
        total = sum(crossing.ways for crossing in crossings)
        used = min(total, limit)
        picks = (i * total // used for i in range(used))
        return tuple((self._walk(source, target, crossings, pick), 1.0 / used) for pick in picks)

    def between_ranks(self, source: int, target: int, *, flow: int | None = None) -> Route:
        """Return the route from rank to rank: the shortest path, or with a `flow` the one of its hash."""
        ends = [self._vertex_of(rank) for rank in (source, target)]
        return self.shortest(*ends) if flow is None else self.ecmp(*ends, flow=flow)

    def _vertex_of(self, rank: int) -> int:
        if not 0 <= rank < self.topology.num_ranks:
            rule = f"Ranks of this topology are 0 to {self.topology.num_ranks - 1}"
            raise SpecError(f"no rank {rank}", key="rank", value=rank, rule=rule)
        return int(self.topology.devices[rank])

    def _through(self, steps: list[list[_Step]]) -> list[list[_Step]]:
        """Return the steps from each vertex for traffic of others."""
        return [[step for step in some if not step[3]] for some in steps] if self._direct else steps

    def _expand(self, search: _Search, *, forward: bool) -> int:
        """Continue a search from its nearest vertex, and return that."""
        vertex = search.heap[0][1]
        every, through = (self._out, self._through_out) if forward else (self._in, self._through_in)
        is_end = vertex == search.root and self._device[vertex]
        search.expand(vertex, (every if is_end else through)[vertex])
        return vertex

    def _joins(self, step: _Step, near: _Search, vertex: int, far: _Search) -> int | None:
        """Return the cost of the paths that a step from one search joins to the other, None for none."""
        _, to, cost, mixed = step
        known = far.cost.get(to)
        if known is None:
            return None
        if mixed and self._direct and (vertex != near.root if self._device[vertex] else to != far.root):
            return None
        return near.cost[vertex] + cost + known

    def _best(self, near: _Search, vertices: Sequence[int], far: _Search, *, forward: bool) -> int | None:
        """Return the least cost of the paths that leave one search at these vertices."""
        steps = self._out if forward else self._in
        costs = [self._joins(step, near, vertex, far) for vertex in vertices for step in steps[vertex]]
        return min((cost for cost in costs if cost is not None), default=None)

    def _meet(self, source: int, target: int) -> list[_Crossing]:
        """Return where the equal-cost shortest paths cross from one search to the other."""
        ahead = self._forward.setdefault(source, _Search(source))
        behind = self._backward.setdefault(target, _Search(target))
        for search in (ahead, behind):
            if not search.ways:
                self._expand(search, forward=search is ahead)
        near, far = sorted((ahead, behind), key=lambda search: len(search.ways))
        best = self._best(near, list(near.ways), far, forward=near is ahead)
        while True:
            reach, back = ahead.radius(), behind.radius()
            if reach is None or back is None or (best is not None and reach + back >= best):
                break
            near, far = (ahead, behind) if reach <= back else (behind, ahead)
            vertex = self._expand(near, forward=near is ahead)
            best = _least(best, self._best(near, (vertex,), far, forward=near is ahead))
        if best is None:
            ends = [self.topology.vertices[i].name for i in (source, target)]
            raise SpecError(
                f"no path leads from {ends[0]!r} to {ends[1]!r}",
                key="path",
                value=f"{ends[0]} -> {ends[1]}",
                rule="Devices that communicate are connected",
                fix="Add a link, or let devices forward: forwarding='any'",
            )
        near, far = sorted((ahead, behind), key=lambda search: len(search.ways))
        return self._crossings(near, far, best, forward=near is ahead)

    def _crossings(self, near: _Search, far: _Search, best: int, *, forward: bool) -> list[_Crossing]:
        """Return the links that lead out of one search on paths of the least cost.

        Every such path leaves the radius of a search once, from a vertex whose cost is final there to one
        whose cost is final in the other search.
        """
        found = []
        radius = near.radius()
        edge = best if radius is None else min(radius, best)
        steps = self._out if forward else self._in
        for vertex in near.ways:
            reached = near.cost[vertex]
            if reached >= edge:
                continue
            for step in steps[vertex]:
                if reached + step[2] >= edge and self._joins(step, near, vertex, far) == best:
                    ends = (vertex, step[1]) if forward else (step[1], vertex)
                    ways = (near.count(vertex), far.count(step[1]))
                    found.append(_Crossing(step[0], *ends, *(ways if forward else ways[::-1])))
        return sorted(found, key=lambda crossing: crossing.link)

    def _path(self, source: int, target: int, choice: int) -> Route:
        crossings = self._meet(source, target)
        total = sum(crossing.ways for crossing in crossings)
        return self._walk(source, target, crossings, choice % total)

    def _walk(self, source: int, target: int, crossings: list[_Crossing], choice: int) -> Route:
        """Return the path of a number below that of all equal-cost paths."""
        for crossing in crossings:
            if choice < crossing.ways:
                break
            choice -= crossing.ways
        first, second = divmod(choice, crossing.ways_after)
        before = self._forward[source].walk(crossing.before, first)
        return (*reversed(before), crossing.link, *self._backward[target].walk(crossing.after, second))


def _steps(topology: Topology, device: list[bool]) -> tuple[list[list[_Step]], list[list[_Step]]]:
    """Return the steps out of each vertex, and those into it as a search from the target follows them."""
    out: list[list[_Step]] = [[] for _ in device]
    into: list[list[_Step]] = [[] for _ in device]
    for i, link in enumerate(topology.links):
        cost = (round(link.latency_s * _PER_S) << _HOP_BITS) + 1
        mixed = device[link.source] != device[link.target]
        out[link.source].append((i, link.target, cost, mixed))
        into[link.target].append((i, link.source, cost, mixed))
    return out, into


def _least(one: int | None, other: int | None) -> int | None:
    known = [cost for cost in (one, other) if cost is not None]
    return min(known, default=None)


def _hash(*values: int) -> int:
    """Return 64 bits that depend on all values, equal on every machine (steps of SplitMix64)."""
    mask, state = (1 << 64) - 1, 0
    for value in values:
        state = (state + (int(value) & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state
