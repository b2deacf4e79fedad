"""A tensor from the ranks that hold it to those of the next stage that need it, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from foreshard.comm.schedules.schedule import Schedule
from foreshard.transport.schedule_execution import ScheduleExecution, elements_of

ScheduleFor = Callable[[int], Schedule]
"""Number of ranks -> a broadcast from rank 0 to all others, which sends rank 0 nothing."""


class StageMessages:
    """Messages between stages over a group, each as broadcasts by a schedule.

    The ranks that compute the same samples of a stage all have the tensor. Each of them broadcasts an equal
    part of it to those of the other stage, which pass parts on to each other as the schedule says. So the
    tensor need not cross a link between two hosts more than once.

    Parameters
    ----------
    schedule_for : ScheduleFor
    group : process group
    place_of : callable
        The rank of the group that a rank is.
    rank : int
        This one.
    """

    def __init__(self, schedule_for: ScheduleFor, group: Any, place_of: Callable[[int], int], rank: int):
        self._group, self._place_of, self._rank = group, place_of, rank
        self._schedule_for = cache(schedule_for)
        self._execution = cache(self._made_execution)

    def begin(
        self, tensor: torch.Tensor, senders: Sequence[int], receivers: Sequence[int], tag: int
    ) -> list[tuple[Any, torch.Tensor]]:
        """Begin to send this rank's part of a contiguous tensor; return what is under way, and its data."""
        index = tuple(senders).index(self._rank)
        part = tensor.view(-1)[slice(*_bounds(tensor.numel(), len(senders))[index])]
        schedule, execution = self._execution(index, self._rank, tuple(receivers))
        sizes = elements_of(schedule, part.numel())
        return execution.begin(dict(enumerate(part.split(sizes))), sizes, tag)

    def receive(
        self, tensor: torch.Tensor, senders: Sequence[int], receivers: Sequence[int], tag: int
    ) -> None:
        """Fill a contiguous tensor with what the senders hold, and pass parts on; return when it is there."""
        flat = tensor.view(-1)
        for index, (lo, hi) in enumerate(_bounds(flat.numel(), len(senders))):
            schedule, execution = self._execution(index, senders[index], tuple(receivers))
            sizes = elements_of(schedule, hi - lo)
            held = execution.run({}, sizes, flat.dtype, tag)
            for number, part in enumerate(flat[lo:hi].split(sizes)):
                part.copy_(held[number])

    def _made_execution(
        self, index: int, sender: int, receivers: tuple[int, ...]
    ) -> tuple[Schedule, ScheduleExecution]:
        """Return the schedule of a sender's part and this rank's share in it.

        Senders begin with receivers of their own number, so that first sends go side by side.
        """
        first = index % len(receivers)
        ranks = (sender, *receivers[first:], *receivers[:first])
        schedule, places = self._schedule_for(len(ranks)), [self._place_of(rank) for rank in ranks]
        return schedule, ScheduleExecution(schedule, ranks.index(self._rank), self._group, places)


def _bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Return the first and past the last element of each of so many equal parts.

    Examples
    --------
    >>> _bounds(5, 2)
    [(0, 2), (2, 5)]
    """
    return list(pairwise(count * part // parts for part in range(parts + 1)))
