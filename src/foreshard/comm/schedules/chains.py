"""Sends from one rank to another: at once, or along a chain in pieces."""

from __future__ import annotations

from itertools import pairwise

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder


def piped_send(algorithm: str, num_ranks: int, *, channels: int = 1, parts: int | None = None) -> Schedule:
    """Return a send from rank 0 to the last in pieces that follow each other: direct, or by a chain of all.

    Examples
    --------
    >>> int(piped_send("chain", 3, parts=4).rounds().max())
    4
    >>> piped_send("direct", 3).num_sends
    1
    """
    ranks = range(num_ranks) if algorithm == "chain" else (0, num_ranks - 1)
    pieces = channels if parts is None else parts
    build = SequentialBuilder("send", algorithm, num_ranks, chunks_of("send", num_ranks, pieces))
    for piece in range(pieces):
        channel = piece % channels
        for source, target in pairwise(ranks):
            build.send(source, target, piece, channel=channel, turn=(source, channel))
    return build.schedule()
