"""The published kernel tables as the fit reads them: usable rows, seconds, device names of the catalog.

Every filter is explained in docs/derivations/kernels.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from columns import Table, read_columns

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_model
from foreshard.cost.elementwise import stream_s
from foreshard.validation.kernels.cases import attention_kernel

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORESHARD_MEASURED", ROOT.parent / "shared/measured/dev"))


def read(name: str) -> Table:
    return read_columns(DATA / name)


def ideal(device: str, precision: str) -> KernelModel:
    return kernel_model(resolve_device(device), precision, fidelity="datasheet")


def sixteen_bit_rows() -> dict[str, Table]:
    """Return per device the median over frameworks of every unflagged bf16 shape, in seconds."""
    rows = read("kernel_aiconfigurator_gemm.csv.gz")
    rows = rows.take((rows["dtype"] == "bfloat16") & (rows["flag"] == ""))
    found = {}
    for (device,), group in rows.groups("device"):
        shapes = [(*shape, np.median(same["latency_ms"])) for shape, same in group.groups("m", "n", "k")]
        m, n, k, latency_ms = np.array(shapes).T
        found[resolve_device(device).name] = Table({"m": m, "n": n, "k": k, "s": latency_ms * 1e-3})
    return found


def deepbench_rows(sheet: str, device: str) -> Table:
    rows = read("kernel_deepbench.csv.gz")
    rows = rows.take(
        (rows["section"] == "Dense Matrix Multiplication")
        & (rows["mode"] == "train")
        & (rows["device"] == device)
        & (rows["sheet_precision"] == sheet)
        & ~np.isnan(rows["time_ms"])
    )
    shapes = [re.search(r"M=(\d+);N=(\d+);K=(\d+)", text) for text in rows["params"]]
    named = np.array([shape is not None for shape in shapes])
    m, n, k = np.array([shape.groups() for shape in shapes if shape], dtype=float).T
    return Table({"m": m, "n": n, "k": k, "s": rows["time_ms"][named] * 1e-3})


def fp32_rows() -> dict[str, Table]:
    """Return per device at most 2,500 evenly taken NeuSight products and the DeepBench ones."""
    rows = read("kernel_neusight_gemm.csv.gz")
    rows = rows.plus(s=rows["latency_ms"] * 1e-3).take(rows.order("device", "op", "b", "m", "n", "k"))
    taken = {}
    for (device,), group in rows.groups("device"):
        taken[resolve_device(device).name] = group.take(slice(None, None, max(1, len(group) // 2500)))
    for device, sheet in (
        ("NV_1080Ti", "Results - FP32"),
        ("NV_M40", "Results - FP32"),
        ("AMD_MI25", "Results FP32"),
    ):
        taken[resolve_device(device.replace("_", " ").replace("NV ", "")).name] = deepbench_rows(
            sheet, device
        )
    return taken


def anchors(dtype: str) -> dict[str, dict[str, Table]]:
    """Return per source and device the best measured product (MAMF) of a type: one shape and its seconds."""
    best = read("kernel_mamf.csv")
    best = best.take(best["dtype"] == dtype)
    sizes = np.array([text.split("x") for text in best["best_shape_mxnxk"]], dtype=float)
    tables = {"averaged": _best_products(best["accelerator"], sizes, best["mamf_tflops"])}
    if dtype == "bf16":
        crowd = read("kernel_misc.csv")
        crowd = crowd.take((crowd["kind"] == "gemm_mamf") & ~np.char.startswith(crowd["device"], "DCU"))
        sizes = np.stack([crowd[name] for name in "mnk"], axis=1)
        tables["crowd"] = _best_products(crowd["device"], sizes, crowd["value"])
    return tables


def _best_products(devices: np.ndarray, sizes: np.ndarray, tflops: np.ndarray) -> dict[str, Table]:
    """Return one product per device, sizes being rows of m, n and k."""
    found = {}
    for device, (m, n, k), rate in zip(devices, sizes, tflops, strict=True):
        values = {"m": m, "n": n, "k": k, "s": 2.0 * m * n * k / (rate * 1e12)}
        found[resolve_device(str(device)).name] = Table({c: np.array([v]) for c, v in values.items()})
    return found


def attention_rows() -> Table:
    """Return the usable prefill rows: slowest duplicate, no hidden sliding window, share of peak < 0.9."""
    rows = read("kernel_aiconfigurator_attention.csv.gz")
    key = ("system", "framework", "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim")
    rows = rows.plus(row=np.arange(len(rows)))
    rows = rows.take([same["row"][np.argmax(same["latency_ms"])] for _, same in rows.groups(*key)])
    names = {device: resolve_device(str(device)).name for device in np.unique(rows["device"])}
    name = np.array([names[device] for device in rows["device"]])
    peaks = {device: ideal(device, "bf16").peak_flops_per_s for device in np.unique(name)}
    rows = rows.plus(name=name, s=rows["latency_ms"] * 1e-3)
    # Batch, heads, sequence twice, width: half the multiply-adds of one causal forward.
    size = rows["batch"] * rows["num_heads"] * rows["seq_len"] ** 2 * rows["head_dim"]
    share = 2.0 * size / rows["s"] / np.array([peaks[device] for device in name])
    plain = np.isin(rows["framework"], ("vllm", "trtllm")) | np.isin(
        rows["system"], ("a100_sxm", "h100_sxm", "gb200", "gb300")
    )
    wide = rows["head_dim"] == 128
    # Narrow heads only where products dominate: they are there to tell what the exponential costs.
    narrow = ~wide & (rows["seq_len"] < 8192) & (rows["framework"] != "sglang") & (size > 5e10)
    kernels = [attention_kernel(str(d), f) for d, f in zip(name, rows["framework"], strict=True)]
    rows = rows.plus(kernel=np.array(kernels))
    return rows.take((share < 0.9) & ((wide & plain) | narrow))


def cache_writes_s(rows: Table, kernels: KernelModel) -> np.ndarray:
    """Return the seconds in which serving kernels also write keys and values to the cache.

    Two of them show no such cost.
    """
    none = (rows["kernel_source"] == "vllm_flashinfer") | (
        (rows["framework"] == "vllm") & (rows["system"] == "l40s")
    )
    batch, kv_heads, seq, dim = (rows[c] for c in ("batch", "num_kv_heads", "seq_len", "head_dim"))
    return stream_s(8.0 * batch * kv_heads * seq * dim * ~none, kernels)
