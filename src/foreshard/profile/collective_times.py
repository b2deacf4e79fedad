"""A schedule timed between ranks of this machine or of torchrun, beside the library's own collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from foreshard.comm.schedules.schedule import Schedule
from foreshard.profile.collective_sweep import SWEPT, library_call
from foreshard.profile.link_times import TimedRanks, on_local_ranks, turn_s
from foreshard.transport.schedule_execution import ScheduleExecution, elements_of

_WARM_UP = 1


def time_schedule(ranks: TimedRanks, schedule: Schedule, num_bytes: int, *, repeats: int) -> dict[str, Any]:
    """Return whether a schedule is exact, its seconds, and those of the library; every rank calls it.

    Whole numbers are summed to the last bit first. Seconds are the median over turns of the slowest rank.

    Parameters
    ----------
    ranks : TimedRanks
    schedule : Schedule
        Of as many ranks.
    num_bytes : int
        Size of the collective, in elements of 4 bytes.
    repeats : int
    """
    world = ranks.group(range(ranks.size), "schedule")
    run = ScheduleExecution(schedule, ranks.rank, world)
    sizes = elements_of(schedule, max(num_bytes // 4, 1))
    exact = torch.tensor([float(_is_exact(run, schedule, ranks.rank, sizes))])
    world.allreduce([exact]).wait()

    def times_s(call: Callable[[], Any]) -> list[float]:
        return [turn_s(ranks, world, call) for _ in range(_WARM_UP + repeats)][_WARM_UP:]

    own_s = times_s(lambda: run.run(_zeros(schedule, ranks.rank, sizes), sizes, torch.float32))
    library_s = None
    if schedule.collective in SWEPT:
        floats = max(num_bytes // 4 // ranks.size, 1) * ranks.size
        library_s = median(times_s(library_call(schedule.collective, world, floats, ranks)))
    return {
        "is_exact": int(exact.item()) == ranks.size,
        "time_s": median(own_s),
        "library_s": library_s,
    }


def _value(rank: int, chunk: int, size: int) -> torch.Tensor:
    """Return what a rank contributes to a chunk: whole numbers that no sum repeats by chance."""
    place = torch.arange(size, dtype=torch.int32)
    return (place * 7919 + rank * 104729 + chunk * 1299709) % 1000003


def _is_exact(run: ScheduleExecution, schedule: Schedule, rank: int, sizes: list[int]) -> bool:
    """Return whether this rank ends with the sum of every source, bit by bit."""
    chunks = list(enumerate(schedule.chunks))
    held = {c: _value(rank, c, sizes[c]) for c, chunk in chunks if rank in chunk.sources}
    found = run.run(held, sizes, torch.int32)
    for c, chunk in chunks:
        if rank in chunk.targets:
            wanted = torch.stack([_value(source, c, sizes[c]) for source in chunk.sources]).sum(
                0, dtype=torch.int32
            )
            if c not in found or not torch.equal(found[c], wanted):
                return False
    return True


def _zeros(schedule: Schedule, rank: int, sizes: list[int]) -> dict[int, torch.Tensor]:
    return {c: torch.zeros(sizes[c]) for c, chunk in enumerate(schedule.chunks) if rank in chunk.sources}


def local_times(schedule: Schedule, num_bytes: int, *, repeats: int) -> dict[str, Any]:
    """Return what `time_schedule` finds between ranks of this machine, started and ended for it."""
    work = partial(time_schedule, schedule=schedule, num_bytes=num_bytes, repeats=repeats)
    found: dict[str, Any] = on_local_ranks(schedule.num_ranks, "cpu", work, others=work)
    return found
