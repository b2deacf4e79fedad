"""A profile from beginning to end: layers first, then links; what is there already is not measured again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from foreshard.profile.heap import keep_heap
from foreshard.profile.layer_times import profile_layers, require_device, write_profile
from foreshard.profile.link_times import TimedRanks, local_links, time_links, torchrun_ranks
from foreshard.profile.timed_chain import Through, TimedPart, Trainable

Tell = Callable[[str], None]


def record(
    job: Trainable,
    *,
    out: Path,
    through: Through,
    device: str = "cpu",
    samples: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 15,
    local: int = 1,
    links: bool = True,
    threads: int = 1,
    tell: Tell = lambda text: None,
    parts: Mapping[int, Callable[[], TimedPart]] | None = None,
    dtype: str = "fp32",
) -> dict[str, Any] | None:
    """Measure a job here, or as one rank of torchrun, and return the profile, None for ranks that write none.

    Under torchrun all ranks time the layers at once, as they will train; the first of each host writes what
    it has seen, the first of all to `out` and the others beside it. `through` is how the runtime runs a
    layer, `samples` are micro-batches to time, `parts` makes a rank's part of the layers for degrees of
    tensor parallelism that are timed as well. `local` ranks will share this machine: it is kept as busy, and
    `links` are timed between as many. `dtype` is fp32, bf16 or fp16, by autocast.
    """
    require_device(device)
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_heap()  # as a worker does
    ranks = torchrun_ranks(device)
    here = ranks.device if ranks is not None else torch.device(device)
    writes = ranks is None or int(os.environ.get("LOCAL_RANK", "0")) == 0
    made = profile_layers(
        job,
        samples=samples,
        repeats=repeats,
        out=_own(out, ranks) if writes else None,
        device=here,
        through=through,
        tell=tell if writes else lambda text: None,
        beside=ranks.size if ranks else local,
        busy=_busy(job, device, samples, threads, 0 if ranks else local - 1),
        parts=parts,
        precision=dtype,
    )
    if links and "links" not in made and (ranks is not None or local > 1):
        made["links"] = (
            time_links(ranks, repeats=repeats, tell=tell if ranks.rank == 0 else lambda text: None)
            if ranks is not None
            else local_links(local, device, repeats=repeats, tell=tell)
        )
    if not writes:
        return None
    made["complete"] = True
    write_profile(_own(out, ranks), made)
    return made


def _busy(
    job: Trainable, device: str, samples: Sequence[int], threads: int, others: int
) -> AbstractContextManager[None]:
    """Return a context in which the processors are as busy as other ranks will keep them."""
    count = min(others, 2 * (os.cpu_count() or 1) - 1)  # more take turns just as these do
    if device != "cpu" or count < 1 or job.path is None:
        return nullcontext()
    return companions(job.path, count, samples=str(max(samples)), threads=threads)


def _own(out: Path, ranks: TimedRanks | None) -> Path:
    return out if ranks is None or ranks.rank == 0 else out.with_suffix(f".rank{ranks.rank}{out.suffix}")


_ENDLESS = 1_000_000
"""Passes, more than any profile waits for: companions are killed, they do not end."""
_UNTIL_ALONE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from foreshard.cli.program import run
run(sys.argv[1:])
"""
"""The command line, ended when the process that started it is gone, however it went."""


@contextmanager
def companions(job: str, count: int, *, samples: str, threads: int) -> Iterator[None]:
    """Keep so many other ranks busy in the body.

    `samples` are as ``--samples`` takes them; small ones would leave the caches to who is timed.
    """
    asked = ["--samples", samples, "--threads", str(threads), "--repeats", str(_ENDLESS)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _UNTIL_ALONE, "profile", job, "-o", f"{folder}/{n}.json", *asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ},
            )
            for n in range(count)
        ]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()
