"""Sends from one rank to another: at once, or along a chain in pieces."""

from __future__ import annotations

from itertools import pairwise

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder


def chain_send(num_ranks: int, *, channels: int = 1, parts: int | None = None) -> Schedule:
    """Return a send from rank 0 to the last through all others, in pieces that follow each other.

    Examples
    --------
    >>> int(chain_send(3, parts=4).rounds().max())
    4
    """
    return _send("chain", list(range(num_ranks)), channels, parts)


def direct_send(num_ranks: int, *, channels: int = 1, parts: int | None = None) -> Schedule:
    """Return a send from rank 0 to the last rank, piece by piece.

    Examples
    --------
    >>> direct_send(3).num_sends
    1
    """
    return _send("direct", [0, num_ranks - 1], channels, parts)


def _send(algorithm: str, ranks: list[int], channels: int, parts: int | None) -> Schedule:
    """Return a send along some ranks."""
    pieces, num_ranks = channels if parts is None else parts, ranks[-1] + 1
    build = SequentialBuilder("send", algorithm, num_ranks, chunks_of("send", num_ranks, pieces))
    for piece in range(pieces):
        channel = piece % channels
        for source, target in pairwise(ranks):
            build.send(source, target, piece, channel=channel, turn=(source, channel))
    return build.schedule()
