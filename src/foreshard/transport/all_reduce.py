"""Sums of a tensor over ranks, in place: by the backend's own all-reduce or by a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreshard.comm.schedules.schedule import Schedule
from foreshard.transport.schedule_execution import ScheduleExecution, elements_of

AllReduce = Callable[[torch.Tensor], None]
"""Replaces a contiguous tensor by its sum over all ranks, and returns when it is there."""


def backend_all_reduce(group: Any) -> AllReduce:
    """Return the all-reduce of a process group's backend."""
    return lambda tensor: group.allreduce([tensor]).wait()


class ScheduledAllReduce:
    """An all-reduce by the sends of a schedule.

    Parameters
    ----------
    schedule : Schedule
        An all-reduce whose chunks are the whole data.
    rank : int
        Of the schedule.
    group : process group
        With `send` and `recv`, and nothing else under way on it.
    """

    def __init__(self, schedule: Schedule, rank: int, group: Any):
        self._schedule = schedule
        self._execution = ScheduleExecution(schedule, rank, group)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum in place."""
        flat = tensor.view(-1)
        sizes = elements_of(self._schedule, flat.numel())
        parts = flat.split(sizes)
        held = self._execution.run(dict(enumerate(parts)), sizes, flat.dtype)
        for number, part in enumerate(parts):
            if held[number] is not part:
                part.copy_(held[number])
