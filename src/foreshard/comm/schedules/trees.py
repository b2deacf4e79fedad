"""Trees: a pair of binary trees that share the work of every rank, and the binomial tree.

Source: Sanders, Speck and Traeff 2009 (two trees whose inner ranks are leaves of each other).
"""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.schedules.schedule import Chunk, Schedule
from foreshard.comm.schedules.sequential import SequentialBuilder


def binary_tree(num_ranks: int) -> list[int]:
    """Return the parent of each rank in a tree whose odd ranks are leaves, -1 for the root 0.

    Examples
    --------
    >>> binary_tree(8)
    [-1, 2, 4, 2, 0, 6, 4, 6]
    """
    parents = [-1]
    for rank in range(1, num_ranks):
        level = rank & -rank
        above = (rank ^ level) | level << 1
        parents.append(above if above < num_ranks else rank ^ level)
    return parents


def two_trees(num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the parents in two trees: the second is the first with ranks mirrored, or shifted if odd.

    Examples
    --------
    >>> two_trees(4)
    ([-1, 2, 0, 2], [1, 3, 1, -1])
    """
    first = binary_tree(num_ranks)
    there = [(rank + 1) % num_ranks if num_ranks % 2 else num_ranks - 1 - rank for rank in range(num_ranks)]
    second = [-1] * num_ranks
    for rank, parent in enumerate(first):
        second[there[rank]] = -1 if parent < 0 else there[parent]
    return first, second


def top_down(parents: Sequence[int]) -> list[int]:
    """Return the ranks of a tree, each after its parent, by depth."""
    depth: dict[int, int] = {}
    for rank in range(len(parents)):
        path = []
        while rank >= 0 and rank not in depth:
            path.append(rank)
            rank = parents[rank]
        for below in reversed(path):
            depth[below] = 0 if parents[below] < 0 else depth[parents[below]] + 1
    return sorted(depth, key=lambda rank: (depth[rank], rank))


def send_up(build: SequentialBuilder, parents: Sequence[int], chunk: int, *, channel: int = 0) -> None:
    """Add up a chunk towards the root of a tree, one chunk at a time on each edge."""
    for rank in reversed(top_down(parents)):
        if parents[rank] >= 0:
            turn = (rank, parents[rank], channel)
            build.send(rank, parents[rank], chunk, reduce=True, channel=channel, turn=turn)


def send_down(build: SequentialBuilder, parents: Sequence[int], chunk: int, *, channel: int = 0) -> None:
    """Copy a chunk from the root of a tree to all, one chunk at a time on each edge."""
    for rank in top_down(parents):
        if parents[rank] >= 0:
            turn = (parents[rank], rank, channel)
            build.send(parents[rank], rank, chunk, channel=channel, turn=turn)


def double_tree(
    collective: str, num_ranks: int, *, channels: int = 1, parts: int | None = None, root: int = 0
) -> Schedule:
    """Return an all-reduce or broadcast on two binary trees, `parts` pieces on each tree of each channel.

    Examples
    --------
    >>> double_tree("all-reduce", 4, parts=2).num_sends
    24
    """
    pieces = 2 * channels * (1 if parts is None else parts)
    chunks = equal_chunks(collective, num_ranks, pieces, root=root)
    build = SequentialBuilder(collective, "double-tree", num_ranks, chunks)
    trees = _rooted_trees(num_ranks, root) if collective == "broadcast" else two_trees(num_ranks)
    for piece in range(pieces):
        tree, channel = trees[piece % 2], piece % (2 * channels)
        if collective == "all-reduce":
            send_up(build, tree, piece, channel=channel)
        send_down(build, tree, piece, channel=channel)
    return build.schedule()


def equal_chunks(collective: str, num_ranks: int, pieces: int, *, root: int = 0) -> list[Chunk]:
    """Return equal pieces of an all-reduce or broadcast, however many ranks there are."""
    every = tuple(range(num_ranks))
    sources = (root,) if collective == "broadcast" else every
    return [Chunk(weight=1.0 / pieces, sources=sources, targets=every)] * pieces


def _rooted_trees(num_ranks: int, root: int) -> tuple[list[int], list[int]]:
    """Return two trees of the other ranks, both below one root."""
    others = [(root + 1 + n) % num_ranks for n in range(num_ranks - 1)]
    made = ([-1] * num_ranks, [-1] * num_ranks)
    for tree, parents in zip(made, two_trees(num_ranks - 1), strict=True):
        for n, parent in enumerate(parents):
            tree[others[n]] = root if parent < 0 else others[parent]
    return made


def binomial_broadcast(
    num_ranks: int, *, channels: int = 1, parts: int | None = None, root: int = 0
) -> Schedule:
    """Return a broadcast in which the number of ranks that hold a piece doubles in each round.

    Examples
    --------
    >>> int(binomial_broadcast(9).rounds().max())
    3
    """
    pieces = channels * (1 if parts is None else parts)
    chunks = equal_chunks("broadcast", num_ranks, pieces, root=root)
    build = SequentialBuilder("broadcast", "binomial", num_ranks, chunks)
    for piece in range(pieces):
        channel = piece % channels
        for rank in range(1, num_ranks):
            source = (root + rank - (1 << rank.bit_length() - 1)) % num_ranks
            target = (root + rank) % num_ranks
            build.send(source, target, piece, channel=channel, turn=(source, channel))
    return build.schedule()
