"""Links timed between the ranks at hand: messages there and back, sums over ranks, what a launch takes.

A message's time is half of there and back; a sum has ended when its slowest rank has. Pairs are timed one
after another while the others wait. The same code runs over gloo on processors and over NCCL on GPUs.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foreshard.errors import SpecError
from foreshard.profile.address import own_address

SIZES = (8, 2**10, 2**14, 2**17, 2**20, 2**23)
"""Bytes: the smallest takes the latency alone, the largest the bandwidth alone."""
_MOST_BYTES = 2**25
"""Per size and direction: large messages repeat less often."""
_WARM_UP = 3
"""Turns before the first that counts: connections are made in them."""
_LAUNCHES = 2000
"""Launches timed: their median is steady within a microsecond, and all take milliseconds."""
_ALL_PAIRS = 4
"""Ranks up to which every pair is timed; more are timed around a ring."""
_TIMEOUT = timedelta(minutes=10)
"""Ranks of slower devices come late; one that is gone is noticed at once."""


Tell = Callable[[str], None]


class TimedRanks:
    """The ranks at hand, as one of them sees them.

    They meet at `store`; `address` is that of this host, where the others reach this rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, *, address: str):
        self.rank, self.size, self.device = rank, size, device
        self._store, self._address = store, address
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store.set(f"host/{rank}", os.uname().nodename)
        self.hosts = [store.get(f"host/{r}").decode() for r in range(size)]
        store.set(f"device/{rank}", _device_name(device))
        self.devices = [store.get(f"device/{r}").decode() for r in range(size)]

    def group(self, ranks: Sequence[int], name: str) -> Any:
        """Return the process group of some ranks; all of them ask for it."""
        store = dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self._store)
        place = list(ranks).index(self.rank)
        if self.device.type == "cuda":
            chosen = dist.ProcessGroupNCCL.Options()
            chosen._timeout = _TIMEOUT
            return dist.ProcessGroupNCCL(store, place, len(ranks), chosen)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        return dist.ProcessGroupGloo(store, place, len(ranks), options)

    def apart(self, ranks: Sequence[int]) -> bool:
        """Return whether some of the ranks are on different hosts."""
        return len({self.hosts[r] for r in ranks}) > 1


def _device_name(device: torch.device) -> str:
    """Return what a device calls itself: a GPU its product name, a processor cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def time_links(ranks: TimedRanks, *, repeats: int, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Return the seconds of messages and sums between the ranks; all of them call it and get the same.

    Small messages are repeated `repeats` times, larger ones less.
    """
    world = ranks.group(range(ranks.size), "world")
    found: dict[str, Any] = {
        "ranks": ranks.size,
        "hosts": len(set(ranks.hosts)),
        "launch_s": launch_s(ranks.device),
        "backend": "nccl" if ranks.device.type == "cuda" else "gloo",
        "messages": [],
        "sums": [],
    }
    for pair in pairs_of(ranks.size):
        tell(f"messages between ranks {pair[0]} and {pair[1]}")
        for size in SIZES:
            seconds = _there_and_back(ranks, world, pair, size, _times(size, repeats))
            found["messages"].append(_row(ranks, pair, size, seconds))
    for count in counts_of(ranks.size):
        tell(f"sums over {count} ranks")
        members = list(range(count))
        group = ranks.group(members, "sums") if ranks.rank < count else None
        for size in SIZES:
            seconds = _sums(ranks, world, group, size, _times(size, repeats))
            found["sums"].append(_row(ranks, members, size, seconds))
    _together(ranks, world)
    return found


def _row(ranks: TimedRanks, members: list[int], size: int, seconds: list[float]) -> dict[str, Any]:
    return {"ranks": members, "apart": ranks.apart(members), "bytes": size, "seconds": seconds}


def pairs_of(size: int) -> list[list[int]]:
    """Return the pairs to time: all of few ranks, neighbours of many."""
    if size <= _ALL_PAIRS:
        return [[a, b] for a in range(size) for b in range(a + 1, size)]
    return [[a, (a + 1) % size] for a in range(size)]


def counts_of(size: int) -> list[int]:
    """Return over how many ranks to sum: powers of two, and all."""
    powers = {2**k for k in range(1, size.bit_length())}
    return sorted(powers | {size}) if size > 1 else []


def launch_s(device: torch.device) -> float:
    """Return the seconds that starting an operation on one number keeps the host busy, the median of many."""
    number, spans = torch.zeros(1, device=device), []
    for _ in range(_LAUNCHES):
        began = time.perf_counter()
        number.add_(1)
        spans.append(time.perf_counter() - began)
    _wait(device)
    return sorted(spans)[len(spans) // 2]


def _times(size: int, repeats: int) -> int:
    return max(5, min(repeats, _MOST_BYTES // max(size, 1)))


def _there_and_back(
    ranks: TimedRanks, world: Any, pair: Sequence[int], size: int, repeats: int
) -> list[float]:
    """Return the seconds of one way, half of there and back as the first of the pair sees it."""
    data = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    spans = torch.zeros(repeats, dtype=torch.float64, device=ranks.device)
    _together(ranks, world)
    if ranks.rank in pair:
        first = ranks.rank == pair[0]
        peer = pair[1] if first else pair[0]
        for turn in range(-_WARM_UP, repeats):
            began = time.perf_counter()
            for sends in (first, not first):
                (world.send if sends else world.recv)([data], peer, 1).wait()
            _wait(ranks.device)
            if first and turn >= 0:
                spans[turn] = (time.perf_counter() - began) / 2
    return _largest(world, spans)


def _sums(ranks: TimedRanks, world: Any, group: Any, size: int, repeats: int) -> list[float]:
    """Return the seconds of an all-reduce of so many bytes, of the slowest member each time."""
    data = torch.zeros(max(size // 4, 1), dtype=torch.float32, device=ranks.device)
    spans = torch.zeros(repeats, dtype=torch.float64, device=ranks.device)
    _together(ranks, world)
    if group is not None:
        for turn in range(-_WARM_UP, repeats):
            _together(ranks, group)
            began = time.perf_counter()
            group.allreduce([data]).wait()
            _wait(ranks.device)
            if turn >= 0:
                spans[turn] = time.perf_counter() - began
    return _largest(world, spans)


def turn_s(ranks: TimedRanks, group: Any, call: Callable[[], Any], *, times: int = 1) -> float:
    """Return the seconds of a call on the slowest rank, of several in a row that all ranks begin together."""
    _together(ranks, group)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(ranks.device)
    span = torch.tensor([(time.perf_counter() - began) / times], dtype=torch.float64, device=ranks.device)
    return _largest(group, span)[0]


def _largest(world: Any, spans: torch.Tensor) -> list[float]:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    world.allreduce([spans], options).wait()
    return [float(span) for span in spans.tolist()]


def _together(ranks: TimedRanks, group: Any) -> None:
    group.allreduce([torch.zeros(1, device=ranks.device)]).wait()
    _wait(ranks.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def local_links(count: int, device: str, *, repeats: int, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Return what `time_links` finds between so many ranks of this machine, started and ended for it."""
    others = partial(time_links, repeats=repeats)
    return on_local_ranks(count, device, partial(others, tell=tell), others=others)


def on_local_ranks(
    count: int, device: str, work: Callable[[TimedRanks], Any], *, others: Callable[[TimedRanks], Any]
) -> Any:
    """Return what `work` does as the first of so many ranks of this machine; the rest do that of the others.

    They are processes started and ended for it, to which `others` goes by pickle.

    Raises
    ------
    SpecError
        Fewer NVIDIA devices than ranks.
    """
    if device == "cuda" and count > torch.cuda.device_count():
        what = f"{count} ranks on {torch.cuda.device_count()} GPUs"
        fix = "Give --local the number of GPUs, or --device cpu"
        raise SpecError(what, key="--local", value=count, rule="NCCL takes one rank a GPU", fix=fix)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work").write_bytes(pickle.dumps(others))  # for our own processes alone
        command = [sys.executable, "-c", "from foreshard.profile import link_times; link_times.join()"]
        command += [folder, device, str(count)]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(1, count)]
        try:
            return work(_met_in(folder, device, count, 0))
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


def join() -> None:
    """Take part as the rank that the command line states."""
    torch.set_num_threads(1)
    folder, device, count, rank = sys.argv[1:]
    pickle.loads((Path(folder) / "work").read_bytes())(_met_in(folder, device, int(count), int(rank)))


def _met_in(folder: str, device: str, count: int, rank: int) -> TimedRanks:
    store = dist.FileStore(str(Path(folder) / "meet"), count)
    store.set_timeout(_TIMEOUT)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    return TimedRanks(store, rank, count, here, address="127.0.0.1")


def torchrun_ranks(device: str) -> TimedRanks | None:
    """Return the ranks that torchrun started, None if it did not start several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=_TIMEOUT)))
    store = dist.PrefixStore(f"profile/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    place = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device(device, place) if device == "cuda" else torch.device(device)
    same_host = size <= int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    address = "127.0.0.1" if same_host else own_address(os.environ["MASTER_ADDR"])
    return TimedRanks(store, rank, size, here, address=address)
