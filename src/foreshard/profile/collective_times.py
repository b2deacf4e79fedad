"""A schedule timed between ranks of this machine or of torchrun, beside the library's own collective."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from foreshard.comm.schedules.schedule import Schedule
from foreshard.profile.link_times import TimedRanks
from foreshard.transport.schedule_execution import ScheduleExecution, elements_of

_TIMEOUT = timedelta(minutes=5)
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
    own_s = [
        _turn_s(world, lambda: run.run(_zeros(schedule, ranks.rank, sizes), sizes, torch.float32))
        for _ in range(repeats + _WARM_UP)
    ]
    other = _library(schedule.collective, world, max(num_bytes // 4, 1), ranks.size)
    library_s = [_turn_s(world, other) for _ in range(repeats + _WARM_UP)] if other else []
    return {
        "is_exact": int(exact.item()) == ranks.size,
        "time_s": median(own_s[_WARM_UP:]),
        "library_s": median(library_s[_WARM_UP:]) if library_s else None,
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


def _turn_s(world: Any, call: Any) -> float:
    """Return the seconds of a call on the slowest rank, all of which begin together."""
    world.allreduce([torch.zeros(1)]).wait()
    began = time.perf_counter()
    call()
    span = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    world.allreduce([span], options).wait()
    return float(span.item())


def _library(collective: str, world: Any, num_elements: int, num_ranks: int) -> Any:
    """Return a call of the library's own collective, None where it has none for these sizes."""
    if collective == "all-reduce":
        data = torch.zeros(num_elements)
        return lambda: world.allreduce([data]).wait()
    if collective == "broadcast":
        data = torch.zeros(num_elements)
        return lambda: world.broadcast([data]).wait()
    if collective == "all-gather":
        part = torch.zeros(max(num_elements // num_ranks, 1))
        whole = [torch.zeros_like(part) for _ in range(num_ranks)]
        return lambda: world.allgather([whole], [part]).wait()
    return None


def local_times(schedule: Schedule, num_bytes: int, *, repeats: int) -> dict[str, Any]:
    """Return what `time_schedule` finds between ranks of this machine, started and ended for it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "schedule").write_bytes(pickle.dumps(schedule))  # for our own processes alone
        command = [
            sys.executable,
            "-m",
            "foreshard.profile.collective_times",
            folder,
            str(num_bytes),
            str(repeats),
        ]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, schedule.num_ranks)]
        try:
            return _met_in(folder, 0, num_bytes, repeats)
        finally:
            for process in others:
                process.kill()
            for process in others:
                process.wait()


def _met_in(folder: str, rank: int, num_bytes: int, repeats: int) -> dict[str, Any]:
    schedule: Schedule = pickle.loads((Path(folder) / "schedule").read_bytes())
    store = dist.FileStore(str(Path(folder) / "meet"), schedule.num_ranks)
    store.set_timeout(_TIMEOUT)
    ranks = TimedRanks(store, rank, schedule.num_ranks, torch.device("cpu"), address="127.0.0.1")
    return time_schedule(ranks, schedule, num_bytes, repeats=repeats)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, size, times, number = sys.argv[1:]
    _met_in(place, int(number), int(size), int(times))
