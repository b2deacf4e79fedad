"""Sends listed in program order, from which follows what each must wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreshard.comm.schedules.schedule import Schedule, ScheduleBuilder


@dataclass
class SequentialBuilder(ScheduleBuilder):
    """Collects sends as a sequential program would do them, and derives their dependencies.

    A send waits for the writes of what it reads, and for the reads and writes of what it overwrites.
    Additions to the same chunk commute, so they do not wait for each other. Sends of one round from a place
    also wait for what arrived there in the round before (`next_round`), as a synchronous algorithm does.

    Examples
    --------
    >>> from foreshard.comm.schedules.schedule import Chunk
    >>> chunk = Chunk(weight=1.0, sources=(0, 1), targets=(0, 1))
    >>> build = SequentialBuilder("all-reduce", "example", 2, [chunk])
    >>> build.send(0, 1, 0, reduce=True), build.send(1, 0, 0)
    (0, 1)
    >>> build.schedule().waits_for(1).tolist()
    [0]
    """

    # of each (place, chunk), by number: what a read waits for, what a further addition waits for (only where
    # the last writes were additions), and the reads since the last write
    _writes: dict[int, list[int]] = field(default_factory=dict)
    _before: dict[int, list[int]] = field(default_factory=dict)
    _reads: dict[int, list[int]] = field(default_factory=dict)
    # of each place, the last send of each channel in this round, and what its further sends wait for
    _arrived: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    _gates: dict[int, list[int]] = field(default_factory=dict)
    _last: dict[tuple[int, ...], int] = field(default_factory=dict)  # send of each turn

    def send(
        self,
        source: int,
        target: int,
        chunk: int,
        *,
        reduce: bool = False,
        channel: int = 0,
        after: Sequence[int] = (),
        turn: tuple[int, ...] = (),
    ) -> int:
        """Add a send that follows all before it on the same data, and return its index.

        Sends of one `turn`, such as those of a rank on a channel, follow each other.
        """
        width = len(self.chunks)
        here, there = source * width + chunk, target * width + chunk
        if turn and turn in self._last:
            after = (*after, self._last[turn])
        waits = [*after, *self._gates.get(source, ()), *self._writes.get(here, ())]
        before = self._before.get(there) if reduce and there not in self._reads else None
        if before is None:
            before = [*self._writes.get(there, ()), *self._reads.pop(there, ())]
            self._writes[there] = []
            if reduce:
                self._before[there] = before
            else:
                self._before.pop(there, None)
        waits += before
        made = super().send(
            source,
            target,
            chunk,
            reduce=reduce,
            channel=channel,
            after=sorted(set(waits)) if len(waits) > 1 else waits,
        )
        self._reads.setdefault(here, []).append(made)
        self._writes[there].append(made)
        self._arrived.setdefault(target, {})[source, channel] = made
        if turn:
            self._last[turn] = made
        return made

    def next_round(self) -> None:
        """Let later sends of each place wait for what arrived at it in the round that ends here."""
        self._gates.update({place: list(sends.values()) for place, sends in self._arrived.items()})
        self._arrived = {}

    def embed(
        self,
        part: Schedule,
        places: Sequence[int],
        chunks: Sequence[Sequence[int]],
        *,
        channel: int = 0,
        after: Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """Add the sends of a schedule of some of the places, and return the new sends of each of its sends.

        Parameters
        ----------
        part : Schedule
            Its sends must not wait for later ones.
        places : sequence of int
            Where each of its places is here.
        chunks : sequence of sequence of int
            The chunks here that each of its chunks stands for, equally many for all.
        channel : int
            Added to its channels.
        after : sequence of sequence of int, optional
            Sends here that each of its sends also waits for, one for each chunk.
        """
        made: list[list[int]] = []
        columns = zip(
            part.source.tolist(),
            part.target.tolist(),
            part.chunk.tolist(),
            part.is_reduced.tolist(),
            part.channel.tolist(),
            strict=True,
        )
        for send, (source, target, chunk, reduce, lane) in enumerate(columns):
            waits = part.waits_for(send).tolist()
            made.append(
                [
                    self.send(
                        places[source],
                        places[target],
                        here,
                        reduce=reduce,
                        channel=lane + channel,
                        after=[made[one][n] for one in waits] + ([after[send][n]] if after else []),
                    )
                    for n, here in enumerate(chunks[chunk])
                ]
            )
        return made
