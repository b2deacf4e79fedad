"""Kernels timed on the machine at hand: a table that `--costs` takes, written row by row.

Matrix products, those of experts in one launch, causal attention forward and backward, and a sum that streams
memory. An interrupted table goes on where it stopped, on the same device with the same software. On a GPU
launches follow each other without waiting, as in training, so that a kernel shorter than its launch takes a
launch.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from foreshard.cost.tables import ATTENTION, COLUMNS
from foreshard.cost.tables import SIZES as PRODUCT
from foreshard.errors import SpecError
from foreshard.file_replacement import replace_file
from foreshard.profile.layer_times import processor_name, require_device

KINDS = ("product", "experts", "attention", "stream")
"""Kinds of kernels that are timed; attention forward and backward."""
_NAMES = tuple(dict.fromkeys((*PRODUCT, *COLUMNS["experts"], *ATTENTION, *COLUMNS["stream"])))
HEADER = ("device", "dtype", "op", *_NAMES, "latency_ms", "threads", "torch")
SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
"""Rows, columns and inner sizes of products."""
HEADS = {"cpu": (1, 4, 16), "cuda": (4, 16, 64, 256)}
LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 16384)}
EXPERTS = {"cpu": (2, 8, 32), "cuda": (2, 8, 32, 128)}
"""Experts of a rank, in one launch of `torch.nn.functional.grouped_mm`."""
EXPERT_ROWS = {"cpu": (4, 32, 256), "cuda": (16, 64, 256, 1024, 4096)}
"""Rows of each expert."""
EXPERT_WIDTHS = {"cpu": (128, 512), "cuda": (1024, 2048, 4096, 8192)}
"""Columns and inner sizes of experts: hidden and intermediate sizes of a model."""
_MOST_EXPERT_ELEMENTS = 2**31  # 4 GiB in 16 bit: small devices hold them too
_DIMS, _SHARES = (64, 128), (1, 4)  # of a head; heads that share keys and values
BYTES = {
    "cpu": tuple(2**power for power in range(16, 28, 2)),
    "cuda": tuple(2**power for power in range(18, 32, 2)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_NARROW = ("product",)  # kinds with kernels in 8 bit: operands have one scale each, their product is in bf16
Kernel = tuple[str, Mapping[str, int]]
"""A kind of kernels (`cost.tables.COLUMNS`) and its sizes."""
_LEAST_S = 0.01
"""Seconds that one timing of a kernel lasts at least, by running it again and again."""
_SHOWN = 20
"""Lines of progress over a whole table."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How kernels run on a device: `prepare` makes one from its kind and sizes, `wait` ends all."""

    name: str
    prepare: Callable[[str, Mapping[str, int]], Callable[[], Any]]
    wait: Callable[[], None]
    now: Callable[[], float] = time.perf_counter


def bench_on(device: str, dtype: str, threads: int = 1) -> Bench:
    """Return how kernels run on the processor, by so many threads, or on the GPU.

    Raises
    ------
    SpecError
        Where there is no GPU.
    """
    require_device(device)
    torch.set_num_threads(threads)

    def values(*shape: int, gradient: bool = False) -> torch.Tensor:
        made = torch.randn(shape, device=device, dtype=torch.float32).to(DTYPES[dtype])
        return made.requires_grad_(gradient)

    def prepare(op: str, sizes: Mapping[str, int]) -> Callable[[], Any]:
        if op == "product" and dtype == "fp8":
            return _scaled(values(sizes["m"], sizes["k"]), values(sizes["n"], sizes["k"]).t())
        if op == "product":
            a, b = values(sizes["m"], sizes["k"]), values(sizes["k"], sizes["n"])
            return lambda: a @ b
        if op == "experts":
            return _experts(sizes, values)
        if op == "stream":  # two tensors are read, one is written
            one, other, out = (values(sizes["bytes"] // (3 * DTYPES[dtype].itemsize)) for _ in range(3))
            return lambda: torch.add(one, other, out=out)
        return _attention(op, sizes, values)

    if device == "cuda":
        return Bench(name=torch.cuda.get_device_name(), prepare=prepare, wait=torch.cuda.synchronize)
    return Bench(name=processor_name(), prepare=prepare, wait=lambda: None)


def _scaled(a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any]:
    """Return the product of 8-bit matrices, the second one laid out by columns, as matrix units read it."""
    one, by = torch.ones((), device=a.device), F.ScalingType.TensorWise
    fast = a.is_cuda  # sums of a few terms in less than 32 bit, as torchao's forward products
    return lambda: F.scaled_mm(a, b, one, by, one, by, use_fast_accum=fast)


def _experts(sizes: Mapping[str, int], values: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    """Return the products of experts that get as many rows each."""
    experts, m, n, k = (sizes[name] for name in COLUMNS["experts"])
    rows, weights = values(experts * m, k), values(experts, k, n)
    ends = torch.arange(m, experts * m + 1, m, dtype=torch.int32, device=rows.device)
    return lambda: F.grouped_mm(rows, weights, offs=ends)


def _attention(op: str, sizes: Mapping[str, int], values: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    """Return causal attention of whole sequences, forward or backward."""
    batch, heads, kv_heads, length, dim = (sizes[name] for name in ATTENTION)
    is_backward = op == "attention_backward"
    query = values(batch, heads, length, dim, gradient=is_backward)
    key, value = (values(batch, kv_heads, length, dim, gradient=is_backward) for _ in range(2))
    shared = heads != kv_heads

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)

    if not is_backward:
        return forward
    out = forward()
    given = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (query, key, value), given, retain_graph=True)


def kernels_of(
    kinds: Sequence[str], device: str, sizes: Sequence[int] = (), dtype: str = "bf16"
) -> list[Kernel]:
    """Return the kernels of some kinds that are timed on a device; `sizes` are those of products.

    Of no kinds all that there are in the precision.

    Raises
    ------
    SpecError
        For a kind that is not known, or has no kernel in the precision.
    """
    found: list[Kernel] = []
    narrow = dtype == "fp8"
    for kind in kinds or (_NARROW if narrow else KINDS):
        if narrow and kind not in _NARROW:
            rule, fix = "In fp8 there are products alone", "Name product, or another --dtype"
            raise SpecError(f"no kernel of {kind} in fp8", key="--kernels", value=kind, rule=rule, fix=fix)
        if kind not in KINDS:
            rule, fix = f"Kinds are {', '.join(KINDS)}", "Name some of them"
            raise SpecError(f"unknown kind {kind!r}", key="--kernels", value=kind, rule=rule, fix=fix)
        if kind == "product":
            grid = product(sorted(set(sizes or SIZES[device])), repeat=3)
            found += [("product", dict(zip(PRODUCT, size, strict=True))) for size in grid]
        elif kind == "experts":
            widths = EXPERT_WIDTHS[device]
            found += [
                ("experts", dict(zip(COLUMNS["experts"], (count, m, n, k), strict=True)))
                for count, m, n, k in product(EXPERTS[device], EXPERT_ROWS[device], widths, widths)
                if count * (m * (n + k) + n * k) <= _MOST_EXPERT_ELEMENTS
            ]
        elif kind == "stream":
            found += [("stream", {"bytes": size}) for size in BYTES[device]]
        else:
            forms = product(
                ("attention", "attention_backward"), _DIMS, _SHARES, HEADS[device], LENGTHS[device]
            )
            for op, dim, share, heads, length in forms:
                if heads >= share:
                    own = (1, heads, heads // share, length, dim)
                    found.append((op, dict(zip(ATTENTION, own, strict=True))))
    return found


def time_kernels(
    bench: Bench,
    out: Path,
    kernels: Sequence[Kernel],
    *,
    dtype: str,
    repeats: int,
    tell: Tell = lambda text: None,
) -> int:
    """Time every kernel that `out` lacks, append its row, and return how many were timed.

    Parameters
    ----------
    bench : Bench
    out : Path
        A table begun here is continued.
    kernels : sequence of Kernel
    dtype : str
    repeats : int
        Timings of each kernel; their median is written.

    Raises
    ------
    SpecError
        For another file, or a table begun on another device or with other software.
    """
    told = {"device": bench.name, "dtype": dtype, "threads": str(torch.get_num_threads())}
    told["torch"] = torch.__version__
    done = _begun(out, told)
    missing = [kernel for kernel in kernels if _identity(*kernel) not in done]
    with out.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, HEADER, restval="")
        if not out.stat().st_size:
            writer.writeheader()
        for count, (op, sizes) in enumerate(missing):
            if count % max(1, len(missing) // _SHOWN) == 0:
                said = " x ".join(str(size) for size in sizes.values())
                tell(f"timing kernels ({count + 1} of {len(missing)}: {op.replace('_', ' ')} {said})")
            seconds = _timed(bench, bench.prepare(op, sizes), repeats)
            writer.writerow(told | {"op": op, **sizes, "latency_ms": f"{1e3 * seconds:.6g}"})
            stream.flush()
    return len(missing)


def _identity(op: str, sizes: Mapping[str, Any]) -> tuple[str, ...]:
    return (op, *(str(sizes[name]) for name in COLUMNS[op]))


def _timed(bench: Bench, run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a kernel, each timing long enough for the clock."""

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


def _begun(out: Path, told: dict[str, str]) -> set[tuple[str, ...]]:
    """Return the kernels that a table begun here holds; an unfinished last row is taken away."""
    if not out.exists() or not out.stat().st_size:
        return set()
    text = out.read_text(encoding="utf-8")
    if not text.startswith(",".join(HEADER)):
        rule, fix = "profile writes a table of its own", "Name another file with -o"
        raise SpecError("is no table of timed kernels", file=str(out), key="-o", rule=rule, fix=fix)
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # written while it was interrupted
        replace_file(out, whole)
    rows = list(csv.DictReader(whole.splitlines()))
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
    return {_identity(row["op"], row) for row in rows}
