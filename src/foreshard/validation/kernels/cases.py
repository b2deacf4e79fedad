"""Measured kernels as cases: predicted seconds of every row of a table, one vectorised call per device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_constants, kernel_model
from foreshard.cost.attention import flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.errors import SpecError
from foreshard.validation.collective_cases import NOT_MODELLED, TimedCase, reason_of
from foreshard.validation.kernels.deepbench import (
    CONVOLUTIONS,
    RECURRENT,
    device_of,
    precision_of,
    timed_passes,
)
from foreshard.validation.kernels.intervals import kernel_group, kernel_half_widths
from foreshard.validation.tables import MeasuredTable, table_rules
from foreshard.words import spelled

Rows = list[Mapping[str, str]]
Sizes = Mapping[str, NDArray[np.float64]]
"""Columns of a table as numbers, one a row."""
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
# Streams of a NeuSight elementwise kernel: operands in and out of add, mul, div; two passes elsewhere.
STREAMS = {"add": 3, "mul": 3, "div": 3, "ln": 3, "softmax": 3}
_UNPRICED = {
    "All-Reduce": "an all-reduce whose links are not stated",
    "Sparse Matrix Multiplication": "sparse products, of which no kernel is priced",
}
"""Sections of DeepBench that are not predicted, and why."""


@cache
def _kernels(device: str, precision: str, attention: str = "fa2") -> KernelModel:
    """Return the constants of a kernel timed alone."""
    return kernel_model(resolve_device(device), precision, attention=attention, sustained=False)


def _with_overhead(kernels: KernelModel, table: str, device: str, field: str) -> KernelModel:
    """Return the constants with the host overhead that a table's timings hold in place of the launch."""
    overhead_s = kernel_constants()["table_overhead_s"][table].get(resolve_device(device).name)
    return kernels if overhead_s is None else replace(kernels, **{field: overhead_s})


def _gemm(shared: Mapping[str, str], rows: Rows, sizes: Sizes) -> NDArray[np.float64]:
    precision = spelled(shared["dtype"].lower(), tuple(_BYTES))
    if precision not in _BYTES:
        raise SpecError(NOT_MODELLED)
    kernels = _kernels(shared["device"], precision)
    if "b" in sizes:  # NeuSight times calls from the host
        kernels = _with_overhead(kernels, "gemm_fp32", shared["device"], "gemm_launch_s")
    width, batch = _BYTES[precision], sizes.get("b", np.float64(1.0))
    return gemm_s(sizes["m"], sizes["n"], sizes["k"], kernels, bytes_per_element=width, batch=batch)


def attention_kernel(device: str, framework: str) -> str:
    """Return the kernel of attention that an inference library runs on a device."""
    if framework == "trtllm":
        return "trtllm"
    return {"hopper": "fa3", "blackwell": "cudnn"}.get(resolve_device(device).arch, "fa2")


def _attention(shared: Mapping[str, str], rows: Rows, sizes: Sizes) -> NDArray[np.float64]:
    device = shared["device"]
    kernels = _kernels(device, "bf16", attention_kernel(device, shared["framework"]))
    heads, seq, head_dim = sizes["num_heads"], sizes["seq_len"], sizes["head_dim"]
    kv_heads = np.where(sizes["num_kv_heads"] > 0, sizes["num_kv_heads"], heads)
    return flash_attention_forward_s(
        sizes["batch"], heads, kv_heads, seq, seq, head_dim, head_dim, kernels, causal=True
    )


def _elementwise(shared: Mapping[str, str], rows: Rows, sizes: Sizes) -> NDArray[np.float64]:
    device = shared["device"]
    kernels = _with_overhead(_kernels(device, "fp32"), "elementwise", device, "stream_launch_s")
    passes = np.array([STREAMS.get(row["op"], 2) for row in rows], float)
    return stream_s(4.0 * sizes["b"] * sizes["h"] * passes, kernels)


def _deepbench(shared: Mapping[str, str], rows: Rows, sizes: Sizes) -> NDArray[np.float64]:
    section, sheet = shared["section"], shared["sheet_precision"]
    if section in CONVOLUTIONS or section.startswith(RECURRENT):
        passes = timed_passes(shared["device"], section, sheet, rows)
        return np.array([sum(predicted_s for _, predicted_s in each) for each in passes])
    if section in _UNPRICED:
        raise SpecError(_UNPRICED[section])
    found = [re.search(r"M=(\d+);N=(\d+);K=(\d+)", row["params"]) for row in rows]
    if section != "Dense Matrix Multiplication" or not all(found):
        raise SpecError(NOT_MODELLED)
    precision = precision_of(sheet, section)
    m, n, k = np.array([[float(part) for part in match.groups()] for match in found if match]).T
    kernels = _kernels(device_of(shared["device"]).name, precision)
    return gemm_s(m, n, k, kernels, bytes_per_element=_BYTES[precision])


def _grouped(shared: Mapping[str, str], rows: Rows, sizes: Sizes) -> NDArray[np.float64]:
    """Return a fused expert layer: two grouped products, and gather, activation and weighted sum."""
    kernels = _kernels(shared["device"], "bf16")
    tokens = sizes["num_tokens"] * sizes["topk"] / sizes["moe_ep"]
    experts = sizes["experts"] / sizes["moe_ep"]
    hidden, inner = sizes["hidden"], sizes["inter"] / sizes["moe_tp"]
    moved = tokens * 2.0 * (2.0 * hidden + 3.0 * inner + 2.0 * hidden)
    first = grouped_gemm_s(tokens, experts, 2.0 * inner, hidden, kernels)
    return first + grouped_gemm_s(tokens, experts, hidden, inner, kernels) + stream_s(moved, kernels)


_Cost = Callable[[Mapping[str, str], Rows, Sizes], NDArray[np.float64]]
_LAYOUTS: Mapping[str, _Cost] = {
    "gemm": _gemm,
    "op-gemm": _gemm,
    "attention": _attention,
    "grouped-gemm": _grouped,
    "elementwise": _elementwise,
    "deepbench": _deepbench,
}
"""Seconds of rows, by layout; their first argument has the cells that all rows share."""


def _stated_s(row: Mapping[str, str]) -> float | None:
    """Return a positive measured time in seconds, None when blank, zero or not a number."""
    rules = table_rules()
    if row.get("op_or_pass") in rules["not_times"]:
        return None
    column, unit = next(((name, unit) for name, unit in rules["times"].items() if name in row), ("", 1))
    value = _number(row.get(column, "")) or 0.0
    return value * unit if 0.0 < value * unit < float("inf") else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def kernel_cases(table: MeasuredTable) -> list[TimedCase]:
    """Return one case per row of a table of kernels; layouts without a cost are `not modelled`."""
    if table.layout not in _LAYOUTS:
        return [TimedCase(measured_s=_stated_s(row), reason=NOT_MODELLED) for row in table.rows]
    rules = table_rules()["kernels"][table.layout]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(table.rows):
        groups.setdefault(tuple(row.get(key, "") for key in rules["shared"]), []).append(index)
    cases: dict[int, TimedCase] = {}
    for cells, indices in groups.items():
        shared = dict(zip(rules["shared"], cells, strict=True))
        rows = [table.rows[i] for i in indices]
        made = _cases(shared, rows, rules["sizes"], _LAYOUTS[table.layout])
        cases |= zip(indices, _with_intervals(made, table.layout, shared), strict=True)
    return [cases[i] for i in range(len(table.rows))]


def _with_intervals(
    cases: Iterator[TimedCase], layout: str, shared: Mapping[str, str]
) -> Iterator[TimedCase]:
    """Yield cases with intervals by the same kernels of other devices, where there are any."""
    halves: Mapping[float, float] = {}
    for case in cases:
        if case.predicted_s is None:
            yield case
            continue
        halves = halves or kernel_half_widths(kernel_group(layout, shared), device_of(shared["device"]).name)
        ends = {
            level: (case.predicted_s * math.exp(-half), case.predicted_s * math.exp(half))
            for level, half in halves.items()
        }
        yield replace(case, intervals_s=ends, evidence="fitted" if ends else None)


def _cases(shared: Mapping[str, str], rows: Rows, sizes: Sequence[str], cost: _Cost) -> Iterator[TimedCase]:
    """Yield the cases of rows that share a call; a cell that is no number costs its own row only."""
    numbers = [[_number(row.get(key, "")) for key in sizes] for row in rows]
    bad = {i: sizes[found.index(None)] for i, found in enumerate(numbers) if None in found}
    good = [i for i in range(len(rows)) if i not in bad]
    columns = np.array([numbers[i] for i in good], float).reshape(len(good), len(sizes)).T
    predicted, failed = np.full(len(rows), np.nan), None
    try:
        with np.errstate(all="ignore"):
            predicted[good] = cost(shared, [rows[i] for i in good], dict(zip(sizes, columns, strict=True)))
    except SpecError as error:
        failed = reason_of(error)
    for i, row in enumerate(rows):
        measured = _stated_s(row)
        wrong = f"{bad[i]}: a cell of {bad[i]} is not a number. Sizes are numbers." if i in bad else None
        why = failed or wrong or _refusal(row, measured, float(predicted[i]))
        yield TimedCase(measured_s=measured, predicted_s=None if why else float(predicted[i]), reason=why)


def _refusal(row: Mapping[str, str], measured_s: float | None, predicted_s: float) -> str | None:
    """Return why one row of a modelled group is not compared."""
    if row.get("flag"):
        return f"flagged by its source: {row['flag']}"
    if measured_s is None:
        return "no time stated"
    return None if 0.0 < predicted_s < float("inf") else "the prediction is not a positive time"
