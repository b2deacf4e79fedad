"""A schedule executed between real ranks: every send a message of its own, sums where it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from foreshard.comm.schedules.schedule import Schedule

_AHEAD = 8
"""Messages that a rank is ready to receive at once: what overlaps without holding all of them in memory."""


class ScheduleExecution:
    """The part of one rank in a schedule.

    Every rank goes through the rounds of the schedule. In each it first sends, without waiting, then receives
    in the order of numbers: whoever waits, waits for a send of the same round, which its source has posted
    after the rounds before, so that no ranks wait for each other. What a round sends does not depend on what
    it receives. Chunks without elements are not sent.

    Parameters
    ----------
    schedule : Schedule
        Without switches.
    rank : int
    group : process group
        With `send`, `recv` as those of ``torch.distributed``.
    places : sequence of int, optional
        Rank of the group that each rank of the schedule is; the same unless given.

    Raises
    ------
    SpecError
        If the schedule has sends into switches, which hosts cannot execute.
    """

    def __init__(
        self, schedule: Schedule, rank: int, group: Any, places: Sequence[int] | None = None
    ) -> None:
        schedule.check_hosts_execute()
        self._rank, self._group = rank, group
        self._places = range(schedule.num_ranks) if places is None else places
        own = np.flatnonzero((schedule.source == rank) | (schedule.target == rank))
        order = own[np.lexsort((own, schedule.source[own] != rank, schedule.rounds()[own]))]
        columns = (schedule.source, schedule.target, schedule.chunk, schedule.is_reduced)
        self._sends: list[tuple[int, int, int, int, bool]] = list(
            zip(order.tolist(), *(column[order].tolist() for column in columns), strict=True)
        )

    def begin(
        self, held: dict[int, torch.Tensor], sizes: Sequence[int], tag: int
    ) -> list[tuple[Any, torch.Tensor]]:
        """Begin the sends of a rank that receives nothing; return them, each with what it reads until then.

        Parameters are those of `run`.
        """
        return [
            (self._group.send([held[chunk]], self._places[target], tag), held[chunk])
            for _, _, target, chunk, _ in self._sends
            if sizes[chunk]
        ]

    def run(
        self,
        held: dict[int, torch.Tensor],
        sizes: Sequence[int],
        dtype: torch.dtype,
        tag: int | None = None,
    ) -> dict[int, torch.Tensor]:
        """Execute the sends and return what this rank holds of each chunk at the end.

        Parameters
        ----------
        held : dict of chunk to tensor, one dimension
            What it holds at first; these tensors are changed.
        sizes : sequence of int
            Elements of each chunk.
        dtype : torch.dtype
            Of all chunks.
        tag : int, optional
            Of all messages, where other messages are under way on the group; two ranks send each other those
            of one tag in order.
        """
        received = self._receive_ahead(sizes, dtype, tag)
        sending: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for number, source, target, chunk, is_reduced in self._sends:
            if not sizes[chunk]:
                held.setdefault(chunk, torch.empty(0, dtype=dtype))
                continue
            if source == self._rank:
                data = held[chunk]
                work = self._group.send([data], self._places[target], number if tag is None else tag)
                sending.setdefault(chunk, []).append((work, data))
                continue
            data = next(received)
            for work, _ in sending.pop(chunk, []):
                work.wait()  # a message on its way reads what is about to change
            if is_reduced and chunk in held:
                held[chunk] += data
            else:
                held[chunk] = data
        for some in sending.values():
            for work, _ in some:
                work.wait()
        return held

    def _receive_ahead(
        self, sizes: Sequence[int], dtype: torch.dtype, tag: int | None
    ) -> Iterator[torch.Tensor]:
        """Yield what arrives, in order, with the next few messages already asked for."""
        waiting: list[tuple[Any, torch.Tensor]] = []
        arriving = [send for send in self._sends if send[2] == self._rank and sizes[send[3]]]
        for at in range(len(arriving) + _AHEAD):
            if at < len(arriving):
                number, source, _, chunk, _ = arriving[at]
                data = torch.empty(sizes[chunk], dtype=dtype)
                work = self._group.recv([data], self._places[source], number if tag is None else tag)
                waiting.append((work, data))
            if at >= _AHEAD - 1 and waiting:
                work, data = waiting.pop(0)
                work.wait()
                yield data


def elements_of(schedule: Schedule, num_elements: int) -> list[int]:
    """Return the elements of each chunk of a collective of so many, shape (chunks,).

    Chunks whose weights add up to 1 have that many elements together.

    Examples
    --------
    >>> from foreshard.comm.schedules.ring import ring
    >>> elements_of(ring("all-reduce", 3), 10)
    [3, 4, 3]
    """
    ends = np.rint(np.cumsum([chunk.weight for chunk in schedule.chunks]) * num_elements).astype(np.int64)
    return np.diff(ends, prepend=0).tolist()  # type: ignore[no-any-return]
