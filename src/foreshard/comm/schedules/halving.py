"""Recursive halving and doubling, for any number of ranks.

Source: Thakur, Rabenseifner and Gropp 2005. Ranks beyond the largest power of two first give what they have
to a neighbour, and get the result from it at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.schedules.schedule import Chunk, Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder


def halving_doubling(
    collective: str,
    num_ranks: int,
    *,
    channels: int = 1,
    parts: int | None = None,
    weights: Sequence[float] | None = None,
) -> Schedule:
    """Return an all-reduce, a reduce-scatter (halving alone) or an all-gather (doubling alone).

    An all-reduce of a number of ranks that is no power of two has as many chunks as ranks take part, so that
    halves are equal, unless `weights` give the share of each rank.

    Examples
    --------
    >>> int(halving_doubling("all-reduce", 8).rounds().max())
    5
    """
    parts = channels if parts is None else parts
    size = 1 << num_ranks.bit_length() - 1  # ranks that take part
    if collective == "all-reduce" and weights is None:
        every = tuple(range(num_ranks))
        chunks = [Chunk(weight=1.0 / size / parts, sources=every, targets=every)] * (size * parts)
        owners = [n // parts for n in range(len(chunks))]
    else:
        chunks = chunks_of(collective, num_ranks, parts, weights=weights)
        owners = [_position(n // parts, num_ranks, size) for n in range(len(chunks))]
    names = {"all-gather": "recursive-doubling", "reduce-scatter": "recursive-halving"}
    name = names.get(collective, "halving-doubling")
    build = SequentialBuilder(collective, name, num_ranks, chunks)
    halving = _Halving(build, size, owners, channels)
    if collective != "all-gather":
        halving.fold(reduce=True, chunks=range(len(chunks)))
        halving.halve()
    if collective != "reduce-scatter":
        if collective == "all-gather":
            halving.fold(reduce=False, own=parts)
        halving.double()
    halving.unfold(collective, parts)
    return build.schedule()


def _position(rank: int, num_ranks: int, size: int) -> int:
    """Return the participant that stands for a rank: of the first pairs the odd one does."""
    extra = num_ranks - size
    return rank // 2 if rank < 2 * extra else rank - extra


class _Halving:
    """The rounds between participants, each of which ends with the chunks it owns."""

    def __init__(self, build: SequentialBuilder, size: int, owners: Sequence[int], channels: int) -> None:
        self.build, self.size, self.channels = build, size, channels
        self.extra = build.num_ranks - size
        self.owned: list[list[int]] = [[] for _ in range(size)]
        for chunk, owner in enumerate(owners):
            self.owned[owner].append(chunk)

    def _rank(self, position: int) -> int:
        return 2 * position + 1 if position < self.extra else position + self.extra

    def fold(self, *, reduce: bool, chunks: Sequence[int] = (), own: int = 0) -> None:
        """Let the even rank of each of the first pairs give chunks, or its `own` ones, to the odd one."""
        for pair in range(self.extra):
            rank = 2 * pair
            for chunk in chunks or range(rank * own, (rank + 1) * own):
                self._send(rank, rank + 1, chunk, reduce=reduce)
        self.build.next_round()

    def halve(self) -> None:
        """Send the half of a partner's side, and add what comes of the own side, at falling distances."""
        distance = self.size // 2
        while distance:
            self._exchange(distance, reduce=True)
            distance //= 2

    def double(self) -> None:
        """Send all that is complete at rising distances."""
        distance = 1
        while distance < self.size:
            self._exchange(distance, reduce=False)
            distance *= 2

    def _exchange(self, distance: int, *, reduce: bool) -> None:
        for position in range(self.size):
            other = position ^ distance
            side = other if reduce else position  # whose blocks of `distance` participants travel
            first = side - side % distance
            for owner in range(first, first + distance):
                for chunk in self.owned[owner]:
                    self._send(self._rank(position), self._rank(other), chunk, reduce=reduce)
        self.build.next_round()

    def unfold(self, collective: str, parts: int) -> None:
        """Give the even ranks of the first pairs the result."""
        every = range(len(self.build.chunks))
        for pair in range(self.extra):
            rank = 2 * pair
            own = range(rank * parts, (rank + 1) * parts)
            wanted: Sequence[int] = own if collective == "reduce-scatter" else every
            if collective == "all-gather":
                wanted = [chunk for chunk in every if chunk not in own]
            for chunk in wanted:
                self._send(rank + 1, rank, chunk, reduce=False)

    def _send(self, source: int, target: int, chunk: int, *, reduce: bool) -> None:
        self.build.send(source, target, chunk, reduce=reduce, channel=chunk % self.channels)
