"""Interpolated tables of kernels judged on sizes left out: python scripts/accuracy_kernel_tables.py.

Every second value of one size is left out of a device's table and interpolated from the rest, twice as far
apart: rows, columns or inner sizes of 16-bit products (aiconfigurator), heads or lengths of causal attention
(the same), bytes of a streaming kernel (NeuSight). Prints the error of the table and of the formula fitted to
the device on the same kernels, in markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from accuracy_rows import markdown
from fit_kernels import figures
from kernel_tables import attention_rows, read, sixteen_bit_rows

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.attention import flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.tables import SIZES, attention_table, size_table

Columns = list[np.ndarray]
Judged = tuple[str, str, Columns, np.ndarray, np.ndarray, Callable[..., np.ndarray], Callable[..., Any]]
"""Device, size left out, sizes, the values of that size, seconds, the formula, and what makes a table."""


def products() -> Iterator[Judged]:
    """Yield the products of each device, for each size."""
    for device, rows in sixteen_bit_rows().items():
        sizes = [rows[name].astype(float) for name in SIZES]
        kernels = kernel_model(resolve_device(device), "bf16", sustained=False)

        def formula(*size: np.ndarray, kernels: Any = kernels) -> np.ndarray:
            return gemm_s(*size, kernels, bytes_per_element=2)

        for axis, name in enumerate(SIZES):
            yield device, name, sizes, sizes[axis], rows["s"], formula, size_table


def attention() -> Iterator[Judged]:
    """Yield the attention of each device, for heads and for lengths, where its curve is of the library."""
    rows = attention_rows()
    has_curve = np.isin(rows["name"], ("a100-sxm-80gb", "l40s", "arc-pro-b60"))  # of FlashAttention 2
    rows = rows.take((rows["framework"] == "trtllm") | (has_curve & (rows["framework"] == "vllm")))
    for (device, framework), group in rows.groups("name", "framework"):
        heads, kv_heads = group["num_heads"].astype(float), group["num_kv_heads"].astype(float)
        kv_heads = np.where(kv_heads > 0, kv_heads, heads)
        columns = (group["batch"], heads, kv_heads, group["seq_len"], group["head_dim"])
        sizes = [column.astype(float) for column in columns]
        kernels = kernel_model(
            resolve_device(str(device)),
            "bf16",
            attention="trtllm" if framework == "trtllm" else "fa2",
            sustained=False,
        )

        def formula(*size: np.ndarray, kernels: Any = kernels) -> np.ndarray:
            batch, heads, kv_heads, length, dim = size
            return flash_attention_forward_s(
                batch, heads, kv_heads, length, length, dim, dim, kernels, causal=True
            )

        label = f"{device} {framework}"
        for name, values in (("heads", sizes[0] * heads), ("length", sizes[3])):
            yield label, name, sizes, values, group["s"], formula, attention_table


def streams() -> Iterator[Judged]:
    """Yield the sums of two tensors of each device in fp32: two are read, one is written."""
    rows = read("kernel_neusight_elementwise.csv.gz")
    rows = rows.take(rows["op"] == "add")
    for (name,), group in rows.groups("device"):
        device = resolve_device(str(name))
        kernels = kernel_model(device, "fp32", sustained=False)
        moved = 12.0 * group["b"].astype(float) * group["h"].astype(float)
        # In octaves: sizes are drawn at random, each nearly once.
        octave = np.floor(np.log2(moved))
        yield (
            device.name,
            "bytes",
            [moved],
            octave,
            group["latency_ms"] * 1e-3,
            lambda size, kernels=kernels: stream_s(size, kernels),
            size_table,
        )


KINDS = {"products": products, "attention": attention, "streams": streams}


def main() -> None:
    """Print one line for each device and size."""
    header = ("device", "size left out", "kernels", "covered (%)", "table", "formula of the device")
    for kind, judged in KINDS.items():
        lines: list[tuple[Any, ...]] = []
        pooled: dict[str, list[np.ndarray]] = {"table": [], "formula": []}
        for device, name, sizes, values, seconds, formula, table in judged():
            out = np.isin(values, np.unique(values)[1:-1:2])
            if not out.any():
                continue
            kept = table(np.stack(sizes, axis=1)[~out], seconds[~out])
            asked = [size[out] for size in sizes]
            found = kept.seconds(*asked)
            covered = np.isfinite(found)
            if not covered.any():
                lines.append((device, name, int(out.sum()), "0", "-", "-"))
                continue
            cells = []
            inside = [size[covered] for size in asked]
            for source, own in (("table", found[covered]), ("formula", formula(*inside))):
                off = np.log(own / seconds[out][covered])
                pooled[source].append(off)
                cells.append(_text(off))
            lines.append((device, name, int(out.sum()), f"{100 * covered.mean():.0f}", *cells))
        whole = [_text(np.concatenate(parts)) for parts in pooled.values()]
        lines.append(("all", "", sum(map(len, pooled["table"])), "", *whole))
        print(f"{kind}\n\n" + "\n".join(markdown(header, lines)) + "\n")


def _text(log_ratios: np.ndarray) -> str:
    s = figures(log_ratios)
    return f"{100 * s['median']:.1f} / {100 * s['p90']:.1f} ({100 * s['bias']:+.1f})"


if __name__ == "__main__":
    main()
