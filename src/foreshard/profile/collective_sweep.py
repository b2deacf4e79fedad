"""A library's own collective timed over sizes between ranks of this machine or of torchrun, as nccl-tests do.

The same code runs over gloo on processors and over NCCL on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from foreshard.comm.prediction import bus_factor
from foreshard.errors import SpecError
from foreshard.profile.link_times import TimedRanks, on_local_ranks, turn_s

SWEPT = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all")
"""Collectives that libraries have as one call."""
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
        call = library_call(collective, world, floats, ranks)
        times = max(1, min(_IN_A_ROW, _MOST_BYTES // (4 * floats)))
        turns = [turn_s(ranks, world, call, times=times) for _ in range(_WARM_UP + repeats)]
        rows.append({"size_bytes": 4 * floats, "time_s": median(turns[_WARM_UP:])})
    return Sweep(
        collective=collective, hosts=tuple(ranks.hosts), devices=tuple(ranks.devices), rows=tuple(rows)
    )


def library_call(collective: str, world: Any, floats: int, ranks: TimedRanks) -> Callable[[], Any]:
    """Return a call of the library's collective that waits for its end; ranks divide the floats."""

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
    begin = calls[collective]
    return lambda: begin().wait()


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
    """Return what `sweep` finds between ranks of this machine, started and ended for it."""
    work = partial(sweep, collective=collective, sizes=sizes, repeats=repeats)
    found: Sweep = on_local_ranks(num_ranks, device, work, others=work)
    return found
