"""A schedule executed between real ranks: every send a message of its own, sums where it says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foreshard.comm.schedules.schedule import Schedule
from foreshard.errors import SpecError

_AHEAD = 8
"""Messages that a rank is ready to receive at once: what overlaps without holding all of them in memory."""


class ScheduleExecution:
    """The part of one rank in a schedule.

    All ranks go through their sends in one common order (by round, then by number), send without waiting, and
    receive in that order: whoever waits, waits for a send that comes before, so that no two ranks wait for
    each other.

    Parameters
    ----------
    schedule : Schedule
        Without switches.
    rank : int
    group : process group
        With `send`, `recv` as those of ``torch.distributed``; its rank r is rank r of the schedule.

    Raises
    ------
    SpecError
        If the schedule has sends into switches, which hosts cannot execute.
    """

    def __init__(self, schedule: Schedule, rank: int, group: Any) -> None:
        if schedule.switches:
            raise SpecError(
                f"{schedule.algorithm} reduces in switches",
                key="algorithm",
                value=schedule.algorithm,
                rule="Hosts execute sends between ranks",
                fix="Take an algorithm without switches",
            )
        self._schedule, self._rank, self._group = schedule, rank, group
        own = np.flatnonzero((schedule.source == rank) | (schedule.target == rank))
        self._order = own[np.lexsort((own, schedule.rounds()[own]))].tolist()
        self._arriving = [i for i in self._order if schedule.target[i] == rank]

    def run(
        self, held: dict[int, torch.Tensor], sizes: Sequence[int], dtype: torch.dtype
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
        """
        schedule = self._schedule
        received = self._receive_ahead(sizes, dtype)
        sending: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for i in self._order:
            chunk = int(schedule.chunk[i])
            if schedule.source[i] == self._rank:
                data = held[chunk]
                work = self._group.send([data], int(schedule.target[i]), i)
                sending.setdefault(chunk, []).append((work, data))
                continue
            data = next(received)
            for work, _ in sending.pop(chunk, []):
                work.wait()  # a message on its way reads what is about to change
            if schedule.is_reduced[i] and chunk in held:
                held[chunk] += data
            else:
                held[chunk] = data
        for some in sending.values():
            for work, _ in some:
                work.wait()
        return held

    def _receive_ahead(self, sizes: Sequence[int], dtype: torch.dtype) -> Any:
        """Yield what arrives, in order, with the next few messages already asked for."""
        schedule, waiting = self._schedule, []
        for at in range(len(self._arriving) + _AHEAD):
            if at < len(self._arriving):
                i = self._arriving[at]
                data = torch.empty(sizes[int(schedule.chunk[i])], dtype=dtype)
                waiting.append((self._group.recv([data], int(schedule.source[i]), i), data))
            if at >= _AHEAD - 1 and waiting:
                work, data = waiting.pop(0)
                work.wait()
                yield data


def elements_of(schedule: Schedule, num_elements: int) -> list[int]:
    """Return the elements of each chunk of a collective of so many, shape (chunks,)."""
    return [round(chunk.weight * num_elements) for chunk in schedule.chunks]
