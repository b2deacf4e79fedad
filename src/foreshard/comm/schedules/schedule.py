"""A collective as a graph of sends: chunks, what each send carries, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from foreshard.compiled import is_worth_compiling, loops
from foreshard.errors import SpecError

_MANY_SENDS = 100_000
"""Sends whose rounds numpy counts in about the time in which compiled loops are loaded."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send")
"""Names as on the command line. Sizes are those that nccl-tests prints (see ``comm/collectives.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of the data that moves as one."""

    weight: float  # part of the collective's size, at least 0
    sources: tuple[int, ...]  # ranks that hold it at first; where several do, what is wanted is their sum
    targets: tuple[int, ...]  # ranks that hold it, or the sum, at the end


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Sends between places, in an order that dependencies give.

    Places 0 to num_ranks - 1 are ranks; those after them are switches that reduce or multicast, one buffer
    each. A send copies what its source place holds of a chunk; the target adds it to what it holds, or takes
    it instead. A switch place holds nothing at first, so that several sends into it add up.

    Attributes
    ----------
    collective : str
        One of `COLLECTIVES`.
    algorithm : str
    num_ranks : int
    chunks : tuple of Chunk
    source, target : ndarray of int, shape (sends,)
        Places.
    chunk : ndarray of int, shape (sends,)
    is_reduced : ndarray of bool, shape (sends,)
        Whether the target adds.
    channel : ndarray of int, shape (sends,)
        Sends of one channel between the same two places keep their order, the lower index first. Those of one
        round that follow each other there are one message: its chunks leave back to back.
    indptr, indices : ndarray of int
        What a send waits for: sends `indices[indptr[i]:indptr[i + 1]]` have arrived (CSR).
    switches : tuple of str
        Names of the vertices that the places after the ranks stand for; a generator that does not know the
        topology writes 'switch'.
    overlaps : bool
        Whether a message of a channel starts when the bytes of the one before have left, as copies in flight
        do; else when they have arrived, as a ring of blocking steps does.
    """

    collective: str
    algorithm: str
    num_ranks: int
    chunks: tuple[Chunk, ...]
    source: np.ndarray
    target: np.ndarray
    chunk: np.ndarray
    is_reduced: np.ndarray
    channel: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    switches: tuple[str, ...] = ()
    overlaps: bool = False

    @property
    def num_sends(self) -> int:
        """Sends."""
        return len(self.source)

    @property
    def num_places(self) -> int:
        """Ranks and switches."""
        return self.num_ranks + len(self.switches)

    @cached_property
    def weight(self) -> np.ndarray:
        """Part of the size that each send carries, shape (sends,)."""
        return np.array([chunk.weight for chunk in self.chunks])[self.chunk]

    def ways(self) -> tuple[list[tuple[int, int, int]], np.ndarray]:
        """Return each channel between two places (source, target, channel), and the number of each send's."""
        places = max(self.num_places, 1)
        key = (self.channel * places + self.source) * places + self.target
        keys, way = numbered(key)
        return [(one // places % places, one % places, one // places**2) for one in keys.tolist()], way

    def waits_for(self, send: int) -> np.ndarray:
        """Return the sends that a send waits for."""
        return self.indices[self.indptr[send] : self.indptr[send + 1]]

    def rounds(self) -> np.ndarray:
        """Return the earliest round of each send if all sends take one round, shape (sends,).

        Raises
        ------
        ValueError
            If sends wait for each other in a circle.
        """
        found = None
        if self.num_sends >= _MANY_SENDS and is_worth_compiling(self.num_sends):
            found = _rounds_in_order(self.indptr, self.indices)
        if found is None:
            send = np.repeat(np.arange(self.num_sends), np.diff(self.indptr))
            found = rounds_by_level(send, self.indices, self.num_sends)
        if (found < 0).any():
            raise ValueError("sends wait for each other in a circle")
        return found

    def check_hosts_execute(self) -> None:
        """Raise SpecError if the schedule has sends into switches, which hosts cannot execute."""
        if self.switches:
            raise SpecError(
                f"{self.algorithm} reduces in switches",
                key="algorithm",
                value=self.algorithm,
                rule="Hosts execute sends between ranks",
                fix="Take an algorithm without switches",
            )

    def listed_by_rounds(self) -> Schedule:
        """Return the same sends round by round: links that serve them in order wait for none that is late."""
        order = np.argsort(self.rounds(), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(self.num_sends)
        count = np.diff(self.indptr)[order]
        indptr = np.concatenate([[0], np.cumsum(count)])
        entry = np.repeat(self.indptr[order] - indptr[:-1], count) + np.arange(len(self.indices))
        columns = ("source", "target", "chunk", "is_reduced", "channel")
        return replace(
            self,
            **{name: getattr(self, name)[order] for name in columns},
            indptr=indptr,
            indices=place[self.indices[entry]],
        )


def numbered(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys that there are, ascending, and the number of each entry's among them."""
    size = int(key.max(initial=-1)) + 1
    if size > 4 * len(key) + 2**20:
        return np.unique(key, return_inverse=True)
    is_used = np.zeros(size, dtype=bool)  # a table is several times faster than sorting millions of entries
    is_used[key] = True
    return np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[key]


def _rounds_in_order(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    """Return the round of each send by a compiled loop; None where one is listed before what it waits for.

    Numbers are always of 32 bits: a loop compiled for several types has several entries in numba's cache,
    which two processes that both write the first one mix up for good.
    """
    if max(len(indptr), len(indices)) > np.iinfo(np.int32).max:
        return None
    first, before = (np.ascontiguousarray(numbers, dtype=np.int32) for numbers in (indptr, indices))
    found = np.zeros(len(indptr) - 1, dtype=np.int64)
    kernel = loops("foreshard.comm.schedules._rounds_kernel", True)
    return found if kernel.count_rounds(first, before, found) else None


def load_rounds() -> None:
    """Load the compiled loop of `Schedule.rounds`: the wall time of what follows is its own."""
    _rounds_in_order(np.zeros(2, dtype=np.int32), np.zeros(0, dtype=np.int32))


def rounds_by_level(sends: np.ndarray, before: np.ndarray, count: int) -> np.ndarray:
    """Return the round of each of `count` sends, of which some wait for others, in whatever order listed.

    All of a round are found at once. Sends in circles, and those behind them, have round -1.

    Parameters
    ----------
    sends, before : ndarray of int, shape (waits,)
        Send that waits, and what it waits for.
    count : int
    """
    left = np.bincount(sends, minlength=count)
    of = sends[np.argsort(before, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
    found = np.full(count, -1)
    ready, at = np.flatnonzero(left == 0), 0
    while len(ready):
        found[ready] = at
        each = first[ready + 1] - first[ready]
        ends = np.cumsum(each)
        waiting, number = np.unique(
            of[np.repeat(first[ready] - ends + each, each) + np.arange(ends[-1])], return_counts=True
        )
        left[waiting] -= number
        ready, at = waiting[left[waiting] == 0], at + 1
    return found


@dataclass
class ScheduleBuilder:
    """Collects sends one by one, with what each waits for.

    Examples
    --------
    >>> chunk = Chunk(weight=1.0, sources=(0,), targets=(0, 1, 2))
    >>> build = ScheduleBuilder("broadcast", "chain", 3, [chunk])
    >>> first = build.send(0, 1, 0)
    >>> build.send(1, 2, 0, after=[first])
    1
    >>> build.schedule().rounds().tolist()
    [0, 1]
    """

    collective: str
    algorithm: str
    num_ranks: int
    chunks: Sequence[Chunk]
    switches: Sequence[str] = ()
    _rows: list[tuple[int, int, int, bool, int]] = field(default_factory=list)
    _after: list[Sequence[int]] = field(default_factory=list)

    def send(
        self,
        source: int,
        target: int,
        chunk: int,
        *,
        reduce: bool = False,
        channel: int = 0,
        after: Sequence[int] = (),
    ) -> int:
        """Add a send and return its index."""
        self._rows.append((source, target, chunk, reduce, channel))
        self._after.append(after)
        return len(self._rows) - 1

    def schedule(self) -> Schedule:
        """Return the schedule of all sends so far."""
        columns = np.array(self._rows, dtype=np.int64).reshape(-1, 5).T
        counts = [len(after) for after in self._after]
        flat = [i for after in self._after for i in after]
        return Schedule(
            collective=self.collective,
            algorithm=self.algorithm,
            num_ranks=self.num_ranks,
            chunks=tuple(self.chunks),
            source=columns[0],
            target=columns[1],
            chunk=columns[2],
            is_reduced=columns[3].astype(bool),
            channel=columns[4],
            indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            indices=np.array(flat, dtype=np.int64),
            switches=tuple(self.switches),
        )


def chunks_of(
    collective: str, num_ranks: int, parts: int = 1, *, root: int = 0, weights: Sequence[float] | None = None
) -> list[Chunk]:
    """Return the chunks of a collective, those of one rank next to each other.

    Of an all-reduce or broadcast there are `num_ranks * parts` and `parts` equal ones; of an all-gather or
    reduce-scatter, `parts` for each rank; of an all-to-all, `parts` for each pair (source, target), source
    first, itself included; a send goes from rank 0 to the last rank. `weights` are the parts of the size
    that each rank owns (all-gather, reduce-scatter, all-reduce), equal unless given.

    Examples
    --------
    >>> chunks_of("all-gather", 2)
    [Chunk(weight=0.5, sources=(0,), targets=(0, 1)), Chunk(weight=0.5, sources=(1,), targets=(0, 1))]
    """
    every = tuple(range(num_ranks))
    share = [1.0 / num_ranks] * num_ranks if weights is None else list(weights)
    made: list[Chunk] = []
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    if collective in ("broadcast", "send"):
        targets = every if collective == "broadcast" else (num_ranks - 1,)
        sources = (root,) if collective == "broadcast" else (0,)
        made = [Chunk(weight=1.0, sources=sources, targets=targets)]
    elif collective == "all-to-all":
        ends = [(rank,) for rank in every]
        made = [Chunk(weight=1.0 / num_ranks, sources=one, targets=other) for one in ends for other in ends]
    else:
        for rank in every:
            sources = (rank,) if collective == "all-gather" else every
            targets = (rank,) if collective == "reduce-scatter" else every
            made.append(Chunk(weight=share[rank], sources=sources, targets=targets))
    if parts == 1:
        return made
    return [
        Chunk(weight=one.weight / parts, sources=one.sources, targets=one.targets)
        for one in made
        for _ in range(parts)
    ]
