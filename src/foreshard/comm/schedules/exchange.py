"""Exchanges in which each rank has its own data for each other: direct, or through the ranks of a node.

Rank ``node * per_node + place`` is at a place of a node. Source of the ways through a node: msccl-tools
alltoall_a100_two_step, alltoall_a100_three_step; NCCL PXN for the rail-aware one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from foreshard.comm.schedules.schedule import Chunk, Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.errors import SpecError

Matrix = Sequence[Sequence[float]]


def direct(
    collective: str,
    num_ranks: int,
    *,
    channels: int = 1,
    parts: int | None = None,
    weights: Sequence[float] | Matrix | None = None,
) -> Schedule:
    """Return a collective in which each rank sends to each other one, the next ranks first.

    Examples
    --------
    >>> int(direct("all-to-all", 5).rounds().max())
    3
    """
    parts = channels if parts is None else parts
    if collective == "all-to-all" and weights is not None:
        return _all_to_all("direct", num_ranks, [], parts, channels, weights)  # type: ignore[arg-type]
    chunks = chunks_of(collective, num_ranks, parts, weights=weights)  # type: ignore[arg-type]
    if collective != "all-reduce":
        return _shifted(collective, num_ranks, chunks, parts, channels)
    build = SequentialBuilder(collective, "direct", num_ranks, chunks)
    for reduces in (True, False):
        for shift in range(1, num_ranks):
            for rank in range(num_ranks):
                other = (rank + shift) % num_ranks
                for part in range(parts):
                    chunk = (other if reduces else rank) * parts + part
                    build.send(rank, other, chunk, reduce=reduces, channel=part % channels)
            build.next_round()
    return build.schedule()


def _shifted(collective: str, num_ranks: int, chunks: Sequence[Chunk], parts: int, channels: int) -> Schedule:
    """Return an exchange whose chunks move once: in round n, all parts go to the n-th next rank.

    Columns are built whole: 1,024 ranks exchange a million chunks.
    """
    grid = (num_ranks - 1, num_ranks, parts)
    shift, rank, part = (one.ravel() for one in np.indices(grid, dtype=np.int32))
    target = (rank + shift + 1) % num_ranks
    group = {"all-gather": rank, "reduce-scatter": target}.get(collective, rank * num_ranks + target)
    # a rank goes on when the same part has arrived there in the round before, from the rank that far back
    before = ((shift - 1) * num_ranks + (rank - shift) % num_ranks) * parts + part
    waits = shift > 0
    return Schedule(
        collective=collective,
        algorithm="direct",
        num_ranks=num_ranks,
        chunks=tuple(chunks),
        source=rank,
        target=target,
        chunk=group * parts + part,
        is_reduced=np.full(len(rank), collective == "reduce-scatter"),
        channel=part % channels,
        indptr=np.concatenate([[0], np.cumsum(waits)]),
        indices=before[waits],
    )


Way = Callable[[int, int, int], int]
"""Where a chunk is after a step: (source, target, ranks of a node) -> rank."""


def _same_place_there(source: int, target: int, size: int) -> int:
    """Return the rank of the target's node at the source's place: across first, then inside."""
    return target // size * size + source % size


def _same_node_target_place(source: int, target: int, size: int) -> int:
    """Return the rank of the source's node at the target's place: inside first, then across on its rail."""
    return source // size * size + target % size


def _gathered(source: int, target: int, size: int) -> int:
    """Return the rank of the source's node that sends to the target's node."""
    return source // size * size + target // size % size


def _received(source: int, target: int, size: int) -> int:
    """Return the rank of the target's node that the source's node sends to."""
    return target // size * size + source // size % size


WAYS: dict[str, tuple[Way, ...]] = {
    "two-step": (_same_place_there,),
    "rail": (_same_node_target_place,),
    "three-step": (_gathered, _received),
}
"""Places on the way of a chunk to another node, by algorithm."""


def through_nodes(
    algorithm: str,
    num_ranks: int,
    *,
    per_node: int,
    channels: int = 1,
    parts: int | None = None,
    weights: Matrix | None = None,
) -> Schedule:
    """Return an all-to-all that goes through ranks of the source's or target's node (`WAYS`).

    Chunks of one node go direct.

    Examples
    --------
    >>> through_nodes("rail", 4, per_node=2).num_sends
    16
    """
    ways = [_inside_direct(way, per_node) for way in WAYS[algorithm]]
    return _all_to_all(algorithm, num_ranks, ways, channels if parts is None else parts, channels, weights)


def _inside_direct(way: Way, size: int) -> Callable[[int, int], int]:
    """Return where a chunk is after a step; it stays at its source if its target is in the same node."""

    def place(source: int, target: int) -> int:
        return source if source // size == target // size else way(source, target, size)

    return place


def _all_to_all(
    algorithm: str,
    num_ranks: int,
    ways: Sequence[Callable[[int, int], int]],
    parts: int,
    channels: int,
    weights: Matrix | None,
) -> Schedule:
    """Return an all-to-all whose chunks pass given places; those of the next rank go first in each step."""
    chunks, pairs = _pairs(num_ranks, parts, weights)
    build = SequentialBuilder("all-to-all", algorithm, num_ranks, chunks)
    stops = [lambda source, target: source, *ways, lambda source, target: target]
    for before, after in pairwise(stops):
        legs: dict[int, list[tuple[int, int, int]]] = {}
        for chunk, (source, target) in enumerate(pairs):
            here, there = before(source, target), after(source, target)
            if here != there:
                legs.setdefault((there - here) % num_ranks, []).append((here, there, chunk))
        for shift in sorted(legs):
            for here, there, chunk in legs[shift]:
                build.send(here, there, chunk, channel=chunk % parts % channels)
            build.next_round()
    return build.schedule().listed_by_rounds()


def _pairs(num_ranks: int, parts: int, weights: Matrix | None) -> tuple[list[Chunk], list[tuple[int, int]]]:
    """Return chunks and their (source, target); pairs that exchange nothing have no chunk."""
    every = [(source, target) for source in range(num_ranks) for target in range(num_ranks)]
    if weights is None:
        return chunks_of("all-to-all", num_ranks, parts), [pair for pair in every for _ in range(parts)]
    matrix = np.asarray(weights, dtype=float)
    if matrix.shape != (num_ranks, num_ranks) or not (np.isfinite(matrix) & (matrix >= 0.0)).all():
        rule = f"An all-to-all has a {num_ranks} x {num_ranks} matrix of parts of at least 0, source first"
        raise SpecError("no matrix of weights", key="weights", value=str(matrix.shape), rule=rule)
    pairs = [pair for pair in every if matrix[pair] > 0.0 for _ in range(parts)]
    chunks = [Chunk(weight=float(matrix[a, b]) / parts, sources=(a,), targets=(b,)) for a, b in pairs]
    return chunks, pairs
