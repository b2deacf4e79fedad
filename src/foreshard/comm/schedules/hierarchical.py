"""Levels: reduce-scatter inside nodes, a collective across them, all-gather inside, of any algorithms.

Rank ``node * per_node + place`` is at a place of a node. Levels nest: the collective across nodes may itself
be one of two levels. Source: Cho et al. 2019 (BlueConnect).
"""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.schedules.schedule import Chunk, Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.errors import SpecError

Phases = Sequence[Schedule]
"""What runs inside a node: reduce-scatter and all-gather for an all-reduce, else one schedule."""


def two_level(
    collective: str,
    inner: Phases,
    outer: Schedule,
    *,
    parts: int = 1,
    channels: int = 1,
    weights: Sequence[float] | None = None,
    algorithm: str = "hierarchical",
) -> Schedule:
    """Return a collective of an inner level of ranks in a node and an outer level across nodes.

    Parameters
    ----------
    inner : sequence of Schedule
    outer : Schedule
        All-reduce: reduce-scatter and all-gather inside with one chunk for each rank, and an all-reduce
        across. All-gather, reduce-scatter: the same collective, one chunk for each rank. Broadcast: the same
        collective.
    parts : int
        Pieces, each of which goes through all levels; a piece follows the one before on every way.
    weights : sequence of float, optional
        Share of each rank (all-gather, reduce-scatter).

    Examples
    --------
    >>> from foreshard.comm.schedules.ring import ring
    >>> inside = [ring("reduce-scatter", 2), ring("all-gather", 2)]
    >>> two_level("all-reduce", inside, ring("all-reduce", 3)).num_sends
    60
    """
    plan = _LevelPlan(collective, inner, outer, parts)
    build = SequentialBuilder(collective, algorithm, plan.num_ranks, plan.chunks(weights), plan.switches())
    last: dict[int, list[list[list[int]]]] = {}
    for part in range(parts):
        channel = part % channels
        before = last.get(channel, [])
        made: list[list[list[int]]] = []
        for schedule, places, chunks in plan.phases(part):
            follows = before[len(made)] if before else None
            made.append(build.embed(schedule, places, chunks, channel=channel, after=follows))
        last[channel] = made
    return build.schedule().listed_by_rounds()


class _LevelPlan:
    """Which schedule runs on which places with which chunks, phase by phase."""

    def __init__(self, collective: str, inner: Phases, outer: Schedule, parts: int) -> None:
        self.collective, self.inner, self.outer, self.parts = collective, inner, outer, parts
        self.per_node, self.num_nodes = inner[0].num_ranks, outer.num_ranks
        self.num_ranks = self.per_node * self.num_nodes
        self.is_owned = collective in ("all-gather", "reduce-scatter")
        for one, size in [(one, self.per_node) for one in inner] + [(outer, self.num_nodes)]:
            owned = one.collective in ("all-gather", "reduce-scatter")
            if owned and len(one.chunks) != size:
                raise SpecError(
                    f"{one.algorithm} has {len(one.chunks)} chunks for {size} ranks",
                    key="parts",
                    value=len(one.chunks),
                    rule="A level has one chunk for each rank; pieces are those of all levels",
                )

    def switches(self) -> list[str]:
        """Return the switches of each node, then those across."""
        return [*self.inner[0].switches] * self.num_nodes + [*self.outer.switches]

    def chunks(self, weights: Sequence[float] | None) -> list[Chunk]:
        """Return the chunks, those of one piece next to each other."""
        if self.is_owned:
            owned = chunks_of(self.collective, self.num_ranks, self.parts, weights=weights)
            return [one for part in range(self.parts) for one in owned[part :: self.parts]]
        every = tuple(range(self.num_ranks))
        sources = every
        if self.collective == "broadcast":
            sources = (self.outer.chunks[0].sources[0] * self.per_node + self.inner[0].chunks[0].sources[0],)
        weight = [[a.weight * b.weight for b in self.outer.chunks] for a in self.inner[0].chunks]
        return [
            Chunk(weight=one / self.parts, sources=sources, targets=every)
            for _ in range(self.parts)
            for row in weight
            for one in row
        ]

    def phases(self, part: int) -> list[tuple[Schedule, list[int], list[list[int]]]]:
        """Return schedules with the places and chunks of one piece that they run on, in order."""
        inside = [[(one, *self._node(node, part)) for node in range(self.num_nodes)] for one in self.inner]
        across = [(self.outer, *self._rail(place, part)) for place in self._rails()]
        if self.collective == "all-reduce":
            return [*inside[0], *across, *inside[1]]
        return [*inside[0], *across] if self.collective == "reduce-scatter" else [*across, *inside[0]]

    def _rails(self) -> range:
        """Return the places of a node whose ranks take part across nodes."""
        if self.collective != "broadcast":
            return range(self.per_node)
        root = self.inner[0].chunks[0].sources[0]
        return range(root, root + 1)

    def _node(self, node: int, part: int) -> tuple[list[int], list[list[int]]]:
        """Return the places of a node, and the chunks that each chunk inside stands for."""
        width = len(self.inner[0].switches)
        first = self.num_ranks + node * width
        places = [node * self.per_node + place for place in range(self.per_node)]
        places += range(first, first + width)
        count = len(self.inner[0].chunks)
        if self.is_owned:
            base = part * self.num_ranks
            chunks = [list(range(base + one, base + self.num_ranks, self.per_node)) for one in range(count)]
        else:
            across = len(self.outer.chunks)
            base = part * count * across
            chunks = [list(range(base + one * across, base + (one + 1) * across)) for one in range(count)]
        return places, chunks

    def _rail(self, place: int, part: int) -> tuple[list[int], list[list[int]]]:
        """Return the ranks at one place of all nodes, and the chunk that each chunk across stands for."""
        first = self.num_ranks + len(self.inner[0].switches) * self.num_nodes
        places = [node * self.per_node + place for node in range(self.num_nodes)]
        places += range(first, first + len(self.outer.switches))
        across, count = len(self.outer.chunks), len(self.inner[0].chunks)
        if self.is_owned:
            base = part * self.num_ranks
            return places, [[base + node * self.per_node + place] for node in range(across)]
        base = part * count * across
        if self.collective == "broadcast":
            return places, [[base + one * across + n for one in range(count)] for n in range(across)]
        return places, [[base + place * across + n] for n in range(across)]
