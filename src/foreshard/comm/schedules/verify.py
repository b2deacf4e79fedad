"""Static verification of a schedule: what every place holds of every chunk, in any order the sends may take.

Abstract interpretation: the value of a chunk at a place is the multiset of ranks whose contributions it sums.
Every conflicting pair of accesses must be ordered by dependencies or by a channel, so that one topological
order stands for all. A send reads between its start and its arrival; it writes when it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from foreshard.comm.schedules.schedule import Schedule, rounds_by_level

MAX_FAULTS = 20  # of one kind of check; more say the same again
_READ, _ADD, _COPY = range(3)
_SHOWN = 6  # sends or ranks that a fault lists


def verify(schedule: Schedule) -> tuple[str, ...]:
    """Return what a schedule does wrong, in sentences: nothing where every order computes its collective.

    Examples
    --------
    >>> from foreshard.comm.schedules.ring import ring
    >>> verify(ring("all-gather", 3))
    ()
    """
    faults = tuple(islice(malformed(schedule), MAX_FAULTS))
    if faults:
        return faults
    fifo = _previous(_channels(schedule))
    round_of = _rounds(schedule, fifo)
    stuck = np.flatnonzero(round_of < 0)
    if len(stuck):
        listed = ", ".join(map(str, stuck[:_SHOWN].tolist())) + (", ..." if len(stuck) > _SHOWN else "")
        return (f"deadlock: sends {listed} wait for each other, or for sends that do",)
    return tuple(_Interpreter(schedule, fifo, round_of).faults())


def channel_rounds(schedule: Schedule) -> np.ndarray:
    """Return a round of each send after those it waits for and those before it on its channel.

    Raises
    ------
    ValueError
        If sends wait for each other.
    """
    round_of = _rounds(schedule, _previous(_channels(schedule)))
    if (round_of < 0).any():
        raise ValueError("sends wait for each other")
    return round_of


def malformed(schedule: Schedule) -> Iterator[str]:
    """Yield why it is no schedule at all: columns of other lengths, and numbers out of range."""
    count, places = schedule.num_sends, schedule.num_places
    columns = (schedule.target, schedule.chunk, schedule.is_reduced, schedule.channel)
    if any(len(one) != count for one in columns) or len(schedule.indptr) != count + 1:
        yield "columns have different lengths"
        return
    if (
        schedule.indptr[0] != 0
        or schedule.indptr[-1] != len(schedule.indices)
        or (np.diff(schedule.indptr) < 0).any()
    ):
        yield "indptr does not split indices"
        return
    limits = (
        ("source", schedule.source, places),
        ("target", schedule.target, places),
        ("chunk", schedule.chunk, len(schedule.chunks)),
    )
    for name, column, limit in limits:
        for send in np.flatnonzero((column < 0) | (column >= limit)).tolist():
            yield f"send {send} has {name} {column[send]}, beyond the {limit} there are"
    for send in np.flatnonzero(schedule.source == schedule.target).tolist():
        yield f"send {send} goes from place {schedule.source[send]} to itself"
    if ((schedule.indices < 0) | (schedule.indices >= count)).any():
        yield "a send waits for one that does not exist"
    if not schedule.chunks:
        yield "there are no chunks"
    for number, chunk in enumerate(schedule.chunks):
        ranks = {*chunk.sources, *chunk.targets}
        if not (chunk.sources and 0 <= min(ranks) <= max(ranks) < schedule.num_ranks):
            yield f"chunk {number} has no sources, or ranks that do not exist"
        if not 0.0 <= chunk.weight < np.inf:
            yield f"chunk {number} has weight {chunk.weight}"


def _channels(schedule: Schedule) -> np.ndarray:
    """Return a number of the channel between two places of each send."""
    source, target, channel = (
        column.astype(np.int64) for column in (schedule.source, schedule.target, schedule.channel)
    )
    return (channel - channel.min(initial=0)) * schedule.num_places**2 + source * schedule.num_places + target


def _previous(*keys: np.ndarray) -> np.ndarray:
    """Return the send before each one with the same keys, -1 for none."""
    order = np.lexsort(keys)
    same = np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in keys])
    previous = np.full(len(order), -1, dtype=np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _rounds(schedule: Schedule, fifo: np.ndarray) -> np.ndarray:
    """Return a round of each send, after those of all it follows, -1 for sends that can never start.

    For a deadlock it makes no difference that a channel orders starts and arrivals apart: whatever circle
    goes through a channel also goes through the starts of its sends.
    """
    has = np.flatnonzero(fifo >= 0)
    after = np.concatenate([np.repeat(np.arange(schedule.num_sends), np.diff(schedule.indptr)), has])
    return rounds_by_level(after, np.concatenate([schedule.indices, fifo[has]]), schedule.num_sends)


class _Interpreter:
    """Goes through the sends of each chunk in topological order."""

    def __init__(self, schedule: Schedule, fifo: np.ndarray, round_of: np.ndarray) -> None:
        self.schedule, self.fifo, self.round_of = schedule, fifo.tolist(), round_of
        self.found: list[str] = []
        self.order = np.lexsort((round_of, schedule.chunk))
        self.same_chunk_fifo = _previous(schedule.chunk, _channels(schedule)).tolist()
        self.source, self.target = schedule.source.tolist(), schedule.target.tolist()
        self.adds = schedule.is_reduced.tolist()
        self.chunk_of = schedule.chunk.tolist()
        self.indptr, self.indices = schedule.indptr.tolist(), schedule.indices.tolist()

    def faults(self) -> list[str]:
        """Return the faults of all chunks, at most about `MAX_FAULTS`."""
        ends = np.searchsorted(self.schedule.chunk[self.order], np.arange(len(self.schedule.chunks) + 1))
        for chunk in range(len(self.schedule.chunks)):
            sends = self.order[ends[chunk] : ends[chunk + 1]].tolist()
            self._chunk(chunk, sends)
            if len(self.found) >= MAX_FAULTS:
                break
        return self.found

    def _chunk(self, chunk: int, sends: list[int]) -> None:
        """Interpret the sends of one chunk; bit n of a mask is the n-th of them."""
        local = {send: n for n, send in enumerate(sends)}
        started: list[int] = []  # what has arrived before each send starts
        arrived: list[int] = []  # and before it arrives
        held = {rank: (1 << rank, 0) for rank in self.schedule.chunks[chunk].sources}
        runs: dict[int, tuple[int, int, int, int]] = {}  # per place: kind and sends of the last two runs
        for n, send in enumerate(sends):
            start = 0
            for other in self.indices[self.indptr[send] : self.indptr[send + 1]]:
                if self.chunk_of[other] == chunk:
                    at = local[other]
                    start |= arrived[at] | 1 << at
            arrive = start
            previous = self.same_chunk_fifo[send]
            if previous >= 0:
                at = local[previous]
                start |= started[at]
                arrive |= started[at] | arrived[at] | 1 << at
            started.append(start)
            arrived.append(arrive)
            here, there = self.source[send], self.target[send]
            kind = _ADD if self.adds[send] else _COPY
            for place, access in ((here, _READ), (there, kind)):
                missing, starts = self._access(runs, place, access, n, start, arrive)
                if missing:
                    others = [sends[at] for at in _bits(missing)]
                    self._race(chunk, place, send, others, starts=starts)
            self._move(chunk, send, held)
        self._targets(chunk, held)

    @staticmethod
    def _access(
        runs: dict[int, tuple[int, int, int, int]], place: int, kind: int, n: int, start: int, arrive: int
    ) -> tuple[int, bool]:
        """Note an access; return the conflicting ones before that its chunk's own order leaves open.

        Where one of both is a read, the earlier must have arrived before the later starts (True); between two
        writes the order of arrivals suffices.
        """
        last, members, before, earlier = runs.get(place, (kind, 0, kind, 0))
        if kind != last or kind == _COPY:
            before, earlier, members = last, members, 0
        runs[place] = (kind, members | 1 << n, before, earlier)
        starts = _READ in (kind, before)
        return earlier & ~(start if starts else arrive), starts

    def _race(self, chunk: int, place: int, send: int, others: list[int], *, starts: bool) -> None:
        """Report those of the other accesses that no path through other chunks orders either."""
        ordered = self._ancestors(send, min(self.round_of[others]), starts=starts)
        for other in others:
            if 2 * other + 1 not in ordered and len(self.found) < MAX_FAULTS:
                name = _place(self.schedule, place)
                self.found.append(
                    f"race: sends {other} and {send} access chunk {chunk} at {name} in no fixed order"
                )

    def _ancestors(self, send: int, oldest: int, *, starts: bool) -> set[int]:
        """Return the starts (2 i) and arrivals (2 i + 1) before a send's start, or before its arrival."""
        open_events, seen = [2 * send if starts else 2 * send + 1], set()
        while open_events:
            one, is_arrival = divmod(open_events.pop(), 2)
            before = [2 * one] if is_arrival else []
            if not is_arrival:
                before += [2 * i + 1 for i in self.indices[self.indptr[one] : self.indptr[one + 1]]]
            if self.fifo[one] >= 0:
                before.append(2 * self.fifo[one] + is_arrival)
            for event in before:
                if event not in seen and self.round_of[event // 2] >= oldest:
                    seen.add(event)
                    open_events.append(event)
        return seen

    def _move(self, chunk: int, send: int, held: dict[int, tuple[int, int]]) -> None:
        """Add or copy the contributions at a send's source to those at its target."""
        here, there = self.source[send], self.target[send]
        value = held.get(here)
        if value is None:
            self._report(f"{self._sent(send)} sends what {_place(self.schedule, here)} does not hold")
            return
        if self.adds[send] and there in held:
            once, twice = held[there]
            held[there] = (once | value[0], twice | value[1] | once & value[0])
            return
        if self.adds[send] and there < self.schedule.num_ranks:
            name = _place(self.schedule, there)
            self._report(f"{self._sent(send)} adds to chunk {chunk} at {name}, which holds nothing of it")
        held[there] = value

    def _targets(self, chunk: int, held: dict[int, tuple[int, int]]) -> None:
        """Report the targets that do not end with every source exactly once."""
        wanted = sum(1 << rank for rank in set(self.schedule.chunks[chunk].sources))
        for rank in self.schedule.chunks[chunk].targets:
            once, twice = held.get(rank, (0, 0))
            if not once:
                self._report(f"rank {rank} ends without chunk {chunk}")
            elif twice or once != wanted:
                lacks, more = list(_bits(wanted & ~once)), list(_bits(twice))
                what = [f"without ranks {lacks[:_SHOWN]}"] if lacks else []
                what += [f"with ranks {more[:_SHOWN]} more than once"] if more else []
                self._report(f"rank {rank} ends with chunk {chunk} {' and '.join(what)}")

    def _sent(self, send: int) -> str:
        ends = (_place(self.schedule, one) for one in (self.source[send], self.target[send]))
        return f"send {send} ({' -> '.join(ends)}, chunk {self.chunk_of[send]})"

    def _report(self, what: str) -> None:
        if len(self.found) < MAX_FAULTS:
            self.found.append(what)


def _place(schedule: Schedule, place: int) -> str:
    ranks = schedule.num_ranks
    return f"rank {place}" if place < ranks else f"{schedule.switches[place - ranks]} {place - ranks}"


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
