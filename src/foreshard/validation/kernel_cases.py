"""Measured kernels as cases: predicted seconds of every row of a table, one vectorised call per device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_constants, kernel_model
from foreshard.cost.attention import flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.errors import SpecError
from foreshard.spec.codec import spelled
from foreshard.validation.collective_cases import NOT_MODELLED, TimedCase, reason_of
from foreshard.validation.tables import MeasuredTable

Rows = list[Mapping[str, str]]
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
# Streams of a NeuSight elementwise kernel: operands in and out of add, mul, div; two passes elsewhere.
_STREAMS = {"add": 3, "mul": 3, "div": 3, "ln": 3, "softmax": 3}


def _column(rows: Rows, key: str) -> NDArray[np.float64]:
    try:
        return np.array([float(row[key]) for row in rows])
    except ValueError:
        raise SpecError(f"a cell of {key} is not a number", key=key, rule="Sizes are numbers") from None


@cache
def _kernels(device: str, precision: str, attention: str = "fa2") -> KernelModel:
    """Return the constants of a kernel timed alone."""
    return kernel_model(resolve_device(device), precision, attention=attention, sustained=False)


def _with_overhead(kernels: KernelModel, table: str, device: str, field: str) -> KernelModel:
    """Return the constants with the host overhead that a table's timings hold in place of the launch."""
    overhead_s = kernel_constants()["table_overhead_s"][table].get(resolve_device(device).name)
    return kernels if overhead_s is None else replace(kernels, **{field: overhead_s})


def _gemm(rows: Rows) -> NDArray[np.float64]:
    dtype = rows[0]["dtype"].lower()
    precision = spelled(dtype, tuple(_BYTES))
    if precision not in _BYTES:
        raise SpecError(NOT_MODELLED, key="dtype", value=dtype)
    kernels = _kernels(rows[0]["device"], precision)
    batch: Any = 1.0
    if "b" in rows[0]:  # NeuSight times calls from the host
        kernels = _with_overhead(kernels, "gemm_fp32", rows[0]["device"], "gemm_launch_s")
        batch = _column(rows, "b")
    m, n, k = (_column(rows, key) for key in "mnk")
    return gemm_s(m, n, k, kernels, bytes_per_element=_BYTES[precision], batch=batch)


def _attention_kernel(device: str, framework: str) -> str:
    """Return the kernel an inference library runs on a device."""
    if framework == "trtllm":
        return "trtllm"
    return {"hopper": "fa3", "blackwell": "cudnn"}.get(resolve_device(device).arch, "fa2")


def _attention(rows: Rows) -> NDArray[np.float64]:
    kernels = _kernels(rows[0]["device"], "bf16", _attention_kernel(rows[0]["device"], rows[0]["framework"]))
    batch, seq, heads, kv_heads, head_dim = (
        _column(rows, key) for key in ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim")
    )
    kv_heads = np.where(kv_heads > 0, kv_heads, heads)
    return flash_attention_forward_s(
        batch, heads, kv_heads, seq, seq, head_dim, head_dim, kernels, causal=True
    )


def _elementwise(rows: Rows) -> NDArray[np.float64]:
    device = rows[0]["device"]
    kernels = _with_overhead(_kernels(device, "fp32"), "elementwise", device, "stream_launch_s")
    passes = np.array([_STREAMS.get(row["op"], 2) for row in rows], float)
    return stream_s(4.0 * _column(rows, "b") * _column(rows, "h") * passes, kernels)


def _deepbench(rows: Rows) -> NDArray[np.float64]:
    sheet = rows[0]["sheet_precision"]
    if rows[0]["section"] != "Dense Matrix Multiplication" or "FP32" not in sheet:
        raise SpecError(NOT_MODELLED, key="section", value=rows[0]["section"])
    found = [re.search(r"M=(\d+);N=(\d+);K=(\d+)", row["params"]) for row in rows]
    if not all(found):
        raise SpecError(NOT_MODELLED, key="params")
    m, n, k = np.array([[float(part) for part in match.groups()] for match in found if match]).T
    kernels = _kernels(rows[0]["device"].replace("_", " ").replace("NV ", ""), "fp32")
    return gemm_s(m, n, k, kernels, bytes_per_element=4)


def _grouped(rows: Rows) -> NDArray[np.float64]:
    """Return a fused expert layer: two grouped products, and gather, activation and weighted sum."""
    kernels = _kernels(rows[0]["device"], "bf16")
    tokens = _column(rows, "num_tokens") * _column(rows, "topk") / _column(rows, "moe_ep")
    experts = _column(rows, "experts") / _column(rows, "moe_ep")
    hidden, inner = _column(rows, "hidden"), _column(rows, "inter") / _column(rows, "moe_tp")
    moved = tokens * 2.0 * (2.0 * hidden + 3.0 * inner + 2.0 * hidden)
    first = grouped_gemm_s(tokens, experts, 2.0 * inner, hidden, kernels)
    return first + grouped_gemm_s(tokens, experts, hidden, inner, kernels) + stream_s(moved, kernels)


# layout -> (columns that a vectorised call shares, seconds of rows)
_LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Rows], NDArray[np.float64]]]] = {
    "gemm": (("device", "dtype"), _gemm),
    "op-gemm": (("device", "dtype", "op"), _gemm),
    "attention": (("device", "framework"), _attention),
    "grouped-gemm": (("device",), _grouped),
    "elementwise": (("device", "dtype"), _elementwise),
    "deepbench": (("device", "section", "sheet_precision"), _deepbench),
}
# Columns of a measured time, the first that a table has, and their units.
_TIME_COLUMNS = {
    "latency_ms": 1e-3,
    "measured_e2e_ms": 1e-3,
    "fwd_us": 1e-6,
    "time_ms": 1e-3,
    "time_s": 1.0,
    "step_time_ms": 1e-3,
    "measured_iter_s": 1.0,
    "measured_s": 1.0,
    "run_time_s": 1.0,
}


def _stated_s(row: Mapping[str, str]) -> float | None:
    """Return a positive measured time in seconds, None when blank, zero or not a number."""
    column = next((name for name in _TIME_COLUMNS if name in row), "")
    try:
        value = float(row[column]) * _TIME_COLUMNS[column]
    except (KeyError, ValueError):
        return None
    return value if 0.0 < value < float("inf") else None


def not_modelled(table: MeasuredTable) -> list[TimedCase]:
    """Return a skipped case per row of a kind that has no model yet."""
    return [
        TimedCase(index=i, measured_s=_stated_s(row), reason=NOT_MODELLED) for i, row in enumerate(table.rows)
    ]


def kernel_cases(table: MeasuredTable) -> list[TimedCase]:
    """Return one case per row of a table of kernels; layouts without a cost are `not modelled`."""
    if table.layout not in _LAYOUTS:
        return not_modelled(table)
    shared, seconds = _LAYOUTS[table.layout]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(table.rows):
        groups.setdefault(tuple(row[key] for key in shared), []).append(index)
    cases: dict[int, TimedCase] = {}
    for indices in groups.values():
        rows = [table.rows[i] for i in indices]
        measured = [_stated_s(row) for row in rows]
        predicted, reasons = _predicted(rows, seconds)
        for place, (index, row, time_s, value) in enumerate(
            zip(indices, rows, measured, predicted, strict=True)
        ):
            why = reasons.get(place) or _refusal(row, time_s, float(value))
            cases[index] = TimedCase(
                index=index, measured_s=time_s, predicted_s=None if why else float(value), reason=why
            )
    return [cases[i] for i in range(len(table.rows))]


def _predicted(
    rows: Rows, seconds: Callable[[Rows], NDArray[np.float64]]
) -> tuple[NDArray[np.float64], dict[int, str]]:
    """Return seconds of rows that share a call, and why some have none; a bad cell costs its own row only."""
    values = np.full(len(rows), np.nan)
    reasons: dict[int, str] = {}
    left = list(range(len(rows)))
    while left:
        try:
            with np.errstate(all="ignore"):
                values[left] = seconds([rows[i] for i in left])
            break
        except SpecError as error:
            text = reason_of(error)
            key = error.key or ""
            bad = {i for i in left if key in rows[i] and not _is_number(rows[i][key])}
            if not error.what.endswith("is not a number") or not bad:
                bad = set(left)
            reasons |= dict.fromkeys(bad, text)
            left = [i for i in left if i not in bad]
    return values, reasons


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _refusal(row: Mapping[str, str], measured_s: float | None, predicted_s: float) -> str | None:
    """Return why one row of a modelled group is not compared."""
    if row.get("flag"):
        return f"flagged by its source: {row['flag']}"
    if measured_s is None:
        return "no time stated"
    return None if 0.0 < predicted_s < float("inf") else "the prediction is not a positive time"
