"""The published kernel tables as the fit reads them: usable rows, seconds, device names of the catalog.

Every filter is explained in docs/derivations/kernels.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_model

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORESHARD_MEASURED", ROOT.parent / "shared/measured/dev"))


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / name)


def ideal(device: str, precision: str) -> KernelModel:
    return kernel_model(resolve_device(device), precision, fidelity="datasheet")


def sixteen_bit_rows() -> dict[str, pd.DataFrame]:
    """Return per device the median over frameworks of every unflagged bf16 shape, in seconds."""
    rows = read("kernel_aiconfigurator_gemm.csv.gz")
    rows = rows[(rows.dtype == "bfloat16") & rows.flag.isna()]
    by_shape = rows.groupby(["device", "m", "n", "k"], sort=True).latency_ms.median().reset_index()
    by_shape["s"] = by_shape.latency_ms * 1e-3
    return {resolve_device(str(device)).name: group for device, group in by_shape.groupby("device")}


def deepbench_rows(sheet: str, device: str) -> pd.DataFrame:
    rows = read("kernel_deepbench.csv.gz")
    rows = rows[
        (rows.section == "Dense Matrix Multiplication") & (rows["mode"] == "train") & (rows.device == device)
    ]
    rows = rows[rows.sheet_precision == sheet]
    sizes = rows.params.str.extract(r"M=(?P<m>\d+);N=(?P<n>\d+);K=(?P<k>\d+)").astype(float)
    return sizes.assign(s=rows.time_ms * 1e-3).dropna()


def fp32_rows() -> dict[str, pd.DataFrame]:
    """Return per device at most 2,500 evenly taken NeuSight products and the DeepBench ones."""
    rows = read("kernel_neusight_gemm.csv.gz").sort_values(["device", "op", "b", "m", "n", "k"])
    rows["s"] = rows.latency_ms * 1e-3
    taken = {}
    for device, group in rows.groupby("device"):
        taken[resolve_device(str(device)).name] = group.iloc[:: max(1, len(group) // 2500)]
    for device, sheet in (
        ("NV_1080Ti", "Results - FP32"),
        ("NV_M40", "Results - FP32"),
        ("AMD_MI25", "Results FP32"),
    ):
        taken[resolve_device(device.replace("_", " ").replace("NV ", "")).name] = deepbench_rows(
            sheet, device
        )
    return taken


def anchors(dtype: str) -> dict[str, dict[str, pd.DataFrame]]:
    """Return per source and device the best measured product (MAMF) of a type: one shape and its seconds."""
    best = read("kernel_mamf.csv")
    best = best[best.dtype == dtype]
    sizes = best.best_shape_mxnxk.str.split("x", expand=True).astype(float)
    tables = {
        "averaged": sizes.set_axis(["m", "n", "k"], axis=1).assign(
            device=best.accelerator, tflops=best.mamf_tflops
        )
    }
    if dtype == "bf16":
        crowd = read("kernel_misc.csv")
        crowd = crowd[(crowd.kind == "gemm_mamf") & ~crowd.device.str.startswith("DCU")]
        tables["crowd"] = crowd[["m", "n", "k", "device", "value"]].rename(columns={"value": "tflops"})
    return {
        source: {
            resolve_device(str(row["device"])).name: pd.DataFrame([row]).assign(
                s=2.0 * row["m"] * row["n"] * row["k"] / (row["tflops"] * 1e12)
            )
            for _, row in table.iterrows()
        }
        for source, table in tables.items()
    }


def attention_rows() -> pd.DataFrame:
    """Return the usable prefill rows: slowest duplicate, no hidden sliding window, share of peak < 0.9."""
    rows = read("kernel_aiconfigurator_attention.csv.gz")
    key = ["system", "framework", "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim"]
    rows = rows.loc[rows.groupby(key).latency_ms.idxmax()].copy()
    rows["name"] = rows.device.map({d: resolve_device(d).name for d in rows.device.unique()})
    peak = rows.name.map({d: ideal(d, "bf16").peak_flops_per_s for d in rows.name.unique()})
    rows["s"] = rows.latency_ms * 1e-3
    share = 2.0 * rows.batch * rows.num_heads * rows.seq_len**2 * rows.head_dim / rows.s / peak
    plain = rows.framework.isin(["vllm", "trtllm"]) | rows.system.isin(
        ["a100_sxm", "h100_sxm", "gb200", "gb300"]
    )
    wide = rows.head_dim == 128
    # Narrow heads only where products dominate: they are there to tell what the exponential costs.
    long = rows.batch * rows.num_heads * rows.seq_len**2 * rows.head_dim > 5e10
    narrow = ~wide & (rows.seq_len < 8192) & (rows.framework != "sglang") & long
    return rows[(share < 0.9) & ((wide & plain) | narrow)]
