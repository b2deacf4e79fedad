"""A library's own collective timed over sizes between ranks of this machine or of torchrun, as nccl-tests do.

The same code runs over gloo on processors and over NCCL on GPUs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from foreshard.comm.prediction import bus_factor
from foreshard.errors import SpecError
from foreshard.profile.link_times import TimedRanks

SWEPT = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all")
"""Collectives that libraries have as one call."""
_TIMEOUT = timedelta(minutes=5)
_WARM_UP = 2
_IN_A_ROW = 20  # calls of a turn that follow each other, as in nccl-tests
_MOST_BYTES = 2**30  # of a turn: large collectives follow each other less often


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A collective timed over sizes, and where: host and device of every rank."""

    collective: str
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]  # size_bytes and time_s


def sweep(ranks: TimedRanks, collective: str, sizes: Sequence[int], *, repeats: int) -> Sweep:
    """Return the seconds of a collective for every size; every rank calls it and gets the same.

    Calls of a turn follow each other, and the device is waited for at its end; a call takes the turn's time
    over their number. Seconds are the median over turns of the slowest rank's. Sizes are those of nccl-tests,
    rounded down to whole floats for every rank.
    """
    world = ranks.group(range(ranks.size), "sweep")
    rows = []
    for size in sizes:
        floats = max(size // 4 // ranks.size, 1) * ranks.size
        call = _call(collective, world, floats, ranks)
        times = max(1, min(_IN_A_ROW, _MOST_BYTES // (4 * floats)))
        turns = [_turn_s(ranks, world, call, times) for _ in range(_WARM_UP + repeats)]
        rows.append({"size_bytes": 4 * floats, "time_s": median(turns[_WARM_UP:])})
    return Sweep(
        collective=collective, hosts=tuple(ranks.hosts), devices=tuple(ranks.devices), rows=tuple(rows)
    )


def _call(collective: str, world: Any, floats: int, ranks: TimedRanks) -> Callable[[], Any]:
    """Return a call of the library's collective; what it returns is waited for."""

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, device=ranks.device)

    whole, part = zeros(floats), zeros(floats // ranks.size)
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: world.allreduce([whole]),
        "broadcast": lambda: world.broadcast([whole]),
        "all-gather": lambda: world._allgather_base(whole, part),
        "reduce-scatter": lambda: world._reduce_scatter_base(part, whole),
        "all-to-all": lambda: world.alltoall_base(other, whole, [], []),
    }
    if collective not in calls:
        raise SpecError(
            f"no library has {collective} as one call",
            key="COLLECTIVE",
            value=collective,
            rule=f"Swept are {', '.join(SWEPT)}",
            fix="Take one of these, or an algorithm by name",
        )
    other = zeros(floats) if collective == "all-to-all" else part
    return calls[collective]


def _turn_s(ranks: TimedRanks, world: Any, call: Callable[[], Any], times: int) -> float:
    """Return the seconds of a call on the slowest rank, of several that all begin together."""
    world.allreduce([torch.zeros(1, device=ranks.device)]).wait()
    _wait(ranks.device)
    began = time.perf_counter()
    for _ in range(times):
        call().wait()
    _wait(ranks.device)
    span = torch.tensor([(time.perf_counter() - began) / times], dtype=torch.float64, device=ranks.device)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    world.allreduce([span], options).wait()
    return float(span.item())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_nccl_tests(swept: Sweep) -> str:
    """Return a sweep as nccl-tests print theirs, with the ranks, for whatever reads that."""
    collective, num_ranks = swept.collective, len(swept.hosts)
    head = "# Using devices\n"
    for rank, (host, device) in enumerate(zip(swept.hosts, swept.devices, strict=True)):
        place = swept.hosts[:rank].count(host)
        head += f"#  Rank {rank:2d} on {host:>10s} device {place:2d} [{place:02d}] {device}\n"
    head += "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
    head += "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)\n"
    lines = []
    for row in swept.rows:
        size, time_s = row["size_bytes"], row["time_s"]
        rate = size / time_s / 1e9
        bus = rate * bus_factor(collective, num_ranks)
        lines.append(f"{size:12d} {size // 4:12d} float none -1 {time_s * 1e6:.2f} {rate:.4g} {bus:.4g} N/A")
    name = collective.replace("-", "_").replace("all_to_all", "alltoall")
    return f"# {name}_perf\n{head}" + "\n".join(lines) + "\n"


def local_sweep(collective: str, num_ranks: int, sizes: Sequence[int], *, repeats: int, device: str) -> Sweep:
    """Return what `sweep` finds between ranks of this machine, started and ended for it.

    Raises
    ------
    SpecError
        Fewer NVIDIA devices than ranks.
    """
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        raise SpecError(
            f"{torch.cuda.device_count()} NVIDIA devices for {num_ranks} ranks",
            key="--local",
            value=num_ranks,
            rule="Every rank has a device of its own",
            fix="Give fewer ranks, or --device cpu",
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "foreshard.profile.collective_sweep", folder, collective, device]
        command += [str(num_ranks), str(repeats), ",".join(map(str, sizes))]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, num_ranks)]
        try:
            return _met_in(folder, 0, num_ranks, collective, sizes, repeats, device)
        finally:
            for process in others:
                process.kill()
            for process in others:
                process.wait()


def _met_in(
    folder: str, rank: int, size: int, collective: str, sizes: Sequence[int], repeats: int, device: str
) -> Sweep:
    store = dist.FileStore(str(Path(folder) / "meet"), size)
    store.set_timeout(_TIMEOUT)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    ranks = TimedRanks(store, rank, size, here, address="127.0.0.1")
    return sweep(ranks, collective, sizes, repeats=repeats)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, name, kind, count, turns, listed, number = sys.argv[1:]
    _met_in(place, int(number), int(count), name, [int(s) for s in listed.split(",")], int(turns), kind)
