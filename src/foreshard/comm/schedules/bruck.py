"""Logarithmic rounds at distances that double: Bruck's all-gather and all-to-all, and NCCL's PAT.

Source: Bruck et al. 1997; for PAT, Jeaugey 2025 (parallel aggregated trees): the same trees from the farthest
distance to the nearest, so that buffers stay small.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder


def _distances(num_ranks: int) -> list[int]:
    return [1 << bit for bit in range((num_ranks - 1).bit_length())]


def bruck_all_gather(
    num_ranks: int, *, channels: int = 1, parts: int | None = None, weights: Sequence[float] | None = None
) -> Schedule:
    """Return an all-gather in which each rank's run of shares doubles in each round.

    Examples
    --------
    >>> int(bruck_all_gather(6).rounds().max())
    2
    """
    parts = channels if parts is None else parts
    chunks = chunks_of("all-gather", num_ranks, parts, weights=weights)
    build = SequentialBuilder("all-gather", "bruck", num_ranks, chunks)
    for distance in _distances(num_ranks):
        for rank in range(num_ranks):
            for ahead in range(min(distance, num_ranks - distance)):
                owner = (rank + ahead) % num_ranks
                _send_parts(build, rank, (rank - distance) % num_ranks, owner, parts, channels)
        build.next_round()
    return build.schedule()


def bruck_all_to_all(num_ranks: int, *, channels: int = 1, parts: int | None = None) -> Schedule:
    """Return an all-to-all in which a chunk moves by the powers of two that its way is the sum of.

    Examples
    --------
    >>> int(bruck_all_to_all(6).rounds().max())
    2
    """
    parts = channels if parts is None else parts
    build = SequentialBuilder("all-to-all", "bruck", num_ranks, chunks_of("all-to-all", num_ranks, parts))
    for distance in _distances(num_ranks):
        for rank in range(num_ranks):
            for way in range(1, num_ranks):
                if way & distance:
                    first = (rank - way % distance) % num_ranks
                    pair = first * num_ranks + (first + way) % num_ranks
                    _send_parts(build, rank, (rank + distance) % num_ranks, pair, parts, channels)
        build.next_round()
    return build.schedule()


def pat(
    collective: str,
    num_ranks: int,
    *,
    channels: int = 1,
    parts: int | None = None,
    weights: Sequence[float] | None = None,
) -> Schedule:
    """Return an all-gather or reduce-scatter on one binomial tree for each rank.

    Examples
    --------
    >>> pat("reduce-scatter", 5).num_sends
    20
    """
    parts = channels if parts is None else parts
    chunks = chunks_of(collective, num_ranks, parts, weights=weights)
    build = SequentialBuilder(collective, "pat", num_ranks, chunks)
    gathers, distances = collective == "all-gather", _distances(num_ranks)
    for distance in reversed(distances) if gathers else distances:
        for owner in range(num_ranks):
            for way in range(0, num_ranks - distance, 2 * distance):
                near, far = (owner + way) % num_ranks, (owner + way + distance) % num_ranks
                ends = (near, far) if gathers else (far, near)
                _send_parts(build, *ends, owner, parts, channels, reduce=not gathers)
        build.next_round()
    return build.schedule()


def _send_parts(
    build: SequentialBuilder,
    source: int,
    target: int,
    group: int,
    parts: int,
    channels: int,
    *,
    reduce: bool = False,
) -> None:
    """Send all parts of a share or pair, each on its channel."""
    for part in range(parts):
        build.send(source, target, group * parts + part, reduce=reduce, channel=part % channels)
