"""Matrix products timed on the machine at hand: a table that `--costs` takes, written row by row.

An interrupted table goes on where it stopped, on the same device with the same software. On a GPU launches
follow each other without waiting, as in training, so that a product shorter than its launch takes a launch.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from foreshard.errors import SpecError
from foreshard.profile.layer_times import processor_name

COLUMNS = ("device", "dtype", "m", "n", "k", "latency_ms", "threads", "torch")
SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_S = 0.01
"""Seconds that one timing of a product lasts at least, by running it again and again."""
_SHOWN = 20
"""Lines of progress over a whole table."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How products run on a device: `prepare` makes one from (rows, columns, inner), `wait` ends all."""

    name: str
    prepare: Callable[[int, int, int], Callable[[], Any]]
    wait: Callable[[], None]
    now: Callable[[], float] = time.perf_counter


def bench_on(device: str, dtype: str, threads: int = 1) -> Bench:
    """Return how products run on the processor, by so many threads, or on the GPU.

    Raises
    ------
    SpecError
        Where there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        rule, fix = "The device is on this machine", "Use --device cpu, or profile where the GPU is"
        raise SpecError("no CUDA device here", key="--device", value=device, rule=rule, fix=fix)
    torch.set_num_threads(threads)

    def prepare(m: int, n: int, k: int) -> Callable[[], Any]:
        shapes = ((m, k), (k, n))
        a, b = (torch.randn(shape, device=device, dtype=torch.float32).to(DTYPES[dtype]) for shape in shapes)
        return lambda: a @ b

    if device == "cuda":
        return Bench(name=torch.cuda.get_device_name(), prepare=prepare, wait=torch.cuda.synchronize)
    return Bench(name=processor_name(), prepare=prepare, wait=lambda: None)


def time_products(
    bench: Bench, out: Path, *, dtype: str, sizes: Sequence[int], repeats: int, tell: Tell = lambda text: None
) -> int:
    """Time every product of a grid that `out` lacks, append its row, and return how many were timed.

    Parameters
    ----------
    bench : Bench
    out : Path
        A table begun here is continued.
    dtype : str
    sizes : sequence of int
        Rows, columns and inner sizes.
    repeats : int
        Timings of each product; their median is written.

    Raises
    ------
    SpecError
        For another file, or a table begun on another device or with other software.
    """
    told = {"device": bench.name, "dtype": dtype, "threads": str(torch.get_num_threads())}
    told["torch"] = torch.__version__
    done = _begun(out, told)
    missing = [size for size in product(sorted(set(sizes)), repeat=3) if size not in done]
    with out.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        if not out.stat().st_size:
            writer.writeheader()
        for count, (m, n, k) in enumerate(missing):
            if count % max(1, len(missing) // _SHOWN) == 0:
                tell(f"timing products ({count + 1} of {len(missing)}: {m} x {n} x {k})")
            seconds = _timed(bench, bench.prepare(m, n, k), repeats)
            writer.writerow(told | {"m": m, "n": n, "k": k, "latency_ms": f"{1e3 * seconds:.6g}"})
            stream.flush()
    return len(missing)


def _timed(bench: Bench, run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a product, each timing long enough for the clock."""

    def seconds(turns: int) -> float:
        bench.wait()
        start = bench.now()
        for _ in range(turns):
            run()
        bench.wait()
        return (bench.now() - start) / turns

    seconds(1)  # chooses its kernel, fills the caches
    turns = max(1, round(_LEAST_S / max(seconds(1), 1e-7)))
    return median(seconds(turns) for _ in range(repeats))


def _begun(out: Path, told: dict[str, str]) -> set[tuple[int, int, int]]:
    """Return the sizes that a table begun here holds; an unfinished last row is taken away."""
    if not out.exists() or not out.stat().st_size:
        return set()
    text = out.read_text(encoding="utf-8")
    if not text.endswith("\n"):  # written while it was interrupted
        text = text[: text.rfind("\n") + 1]
        out.write_text(text, encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    if not text.startswith(",".join(COLUMNS)):
        rule, fix = "profile writes a table of its own", "Name another file with -o"
        raise SpecError("is no table of timed products", file=str(out), key="-o", rule=rule, fix=fix)
    for row in rows:
        for key, value in told.items():
            if row[key] != value:
                raise SpecError(
                    f"a table of {key} {row[key]!r}, here it is {value!r}",
                    file=str(out),
                    key=key,
                    value=row[key],
                    rule="A table goes on where it was begun, with the same software",
                    fix="Name another file with -o",
                )
    return {(int(row["m"]), int(row["n"]), int(row["k"])) for row in rows}
