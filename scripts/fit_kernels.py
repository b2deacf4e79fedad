"""Fit the kernel constants on published kernel measurements and write catalog/data/kernel_constants.json.

    python scripts/fit_kernels.py            # refit and write
    python scripts/fit_kernels.py --check    # refit and fail if a shipped constant differs by > 1e-6

Deterministic: L1 on log time, Nelder-Mead from one fixed start. docs/derivations/kernels.md explains the
terms, the filters and every number that is not fitted here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from columns import Table, read_columns
from kernel_tables import (
    DATA,
    anchors,
    attention_rows,
    cache_writes_s,
    deepbench_rows,
    fp32_rows,
    ideal,
    read,
    sixteen_bit_rows,
)
from refit import differences
from scipy.optimize import minimize

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, at_half_rate
from foreshard.cost.attention import flash_attention_backward_s, flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.validation.kernels.cases import STREAMS

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "src/foreshard/catalog/data/kernel_constants.json"

GEMM_EXPOSED = 0.3  # one value for all devices: 0.15 and 0.5 fit worse (docs/derivations/kernels.md)
GEMM_BOUNDS = {
    "eff": (0.2, 1.25),
    "k0": (0.0, 800.0),
    "split_k": (64.0, 20000.0),
    "tile_penalty": (0.0, 0.6),
    "sag": (0.0, 1.0),
    "memory_eff": (0.3, 1.0),
    "launch_s": (1e-7, 1e-4),
}
GEMM_START = {
    "eff": 0.75,
    "k0": 90.0,
    "split_k": 2000.0,
    "tile_penalty": 0.1,
    "sag": 0.05,
    "memory_eff": 0.8,
    "launch_s": 3e-6,
}
ATTENTION_BOUNDS = {
    "fwd_eff": (0.1, 1.0),
    "s0": (0.0, 3000.0),
    "tail": (0.0, 3.0),
    "launch_s": (0.0, 5e-5),
    "d0": (0.0, 200.0),
}
ATTENTION_START = {"fwd_eff": 0.6, "s0": 500.0, "tail": 0.5, "launch_s": 5e-6, "d0": 40.0}
BACKWARD_RATIO = 0.55  # not identified by forward kernels: long-sequence training rows, see the derivation
# Shah et al. 2024 (arXiv 2407.08608), figures 5 and 6: head 128, 16k tokens on H100, backward over forward.
FA3_BACKWARD_RATIO = 561.0 / 648.0
D0_UNMEASURED = 8.0  # Ampere has no 64-wide kernel rows: training rows of llm-foundry want .95 there
LAUNCHED_MS = 0.05  # the H200's host launched a kernel in some 0.02: longer ones hide it
FA1_OVER_FA2 = 0.5  # Dao 2023 (arXiv 2307.08691), abstract: FlashAttention-2 is about 2x its predecessor
FA2_HOPPER = 327.9e12  # Azure AI-benchmarking-guide ND H100 v5 L52: FA2, head_dim 128, batch 2, seq 8192
SMALL_TABLE_ARCHES = ("volta", "turing")  # DeepBench: 160 products a device
# Same chip and power limit, other memory or links; the MAMF table says "H200 is the same".
SAME_SILICON = {
    "h200-sxm": "h100-sxm",
    "h800-sxm": "h100-sxm",
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a800-sxm-80gb": "a100-sxm-80gb",
    "a800-pcie-80gb": "a100-pcie-80gb",
}
CONSUMER_BLACKWELL = ("rtx-5090", "rtx-pro-6000-max-q", "rtx-pro-6000-server", "rtx-pro-6000-workstation")

Fit = tuple[dict[str, float], np.ndarray]


def fit(
    predict: Callable[[dict[str, float]], np.ndarray],
    measured_s: np.ndarray,
    bounds: dict[str, tuple[float, float]],
    start: dict[str, float],
) -> Fit:
    """Return the parameters of least mean |log ratio|, and the log ratios."""
    names = list(bounds)
    low, high = (np.array([bounds[n][i] for n in names]) for i in (0, 1))
    log_measured = np.log(measured_s)

    def values(x: np.ndarray) -> dict[str, float]:
        return dict(zip(names, low + (high - low) * np.clip(x, 0.0, 1.0), strict=True))

    def loss(x: np.ndarray) -> float:
        outside = np.sum(np.clip(-x, 0, 9) + np.clip(x - 1, 0, 9))
        return float(np.mean(np.abs(np.log(predict(values(x))) - log_measured)) + 10.0 * outside)

    x = (np.array([start[n] for n in names]) - low) / np.maximum(high - low, 1e-30)
    x = np.where(high > low, x, 0.0)
    for _ in range(4):
        x = minimize(loss, x, method="Nelder-Mead", options={"maxfev": 800, "xatol": 1e-5, "fatol": 1e-7}).x
    found = {n: float(f"{v:.6g}") for n, v in values(x).items()}
    return found, np.log(predict(found)) - log_measured


def figures(log_ratio: np.ndarray) -> dict[str, float]:
    error = np.abs(np.expm1(log_ratio))
    return {
        "rows": len(error),
        "median": round(float(np.median(error)), 4),
        "p90": round(float(np.quantile(error, 0.9)), 4),
        "bias": round(float(np.expm1(np.median(log_ratio))), 4),
    }


def middle(entries: list[dict[str, float]]) -> dict[str, float]:
    return {n: float(f"{np.median([e[n] for e in entries]):.6g}") for n in entries[0]}


def section(devices: dict[str, dict[str, float]], **extra: dict[str, float]) -> dict:
    """Return the entries by device, their medians by architecture, and the median of the architectures."""
    arches: dict[str, list[dict[str, float]]] = {}
    for name, entry in devices.items():
        arches.setdefault(resolve_device(name).arch, []).append(entry)
    by_arch = {arch: middle(entries) for arch, entries in sorted(arches.items())} | extra
    return {
        "devices": dict(sorted(devices.items())),
        "architectures": by_arch,
        "generic": middle(list(by_arch.values())),
    }


# ---- matrix products ---------------------------------------------------------------------------------------


def gemm_predictor(device: str, precision: str, shapes: Table) -> Callable[[dict[str, float]], np.ndarray]:
    base = replace(ideal(device, precision), gemm_exposed=GEMM_EXPOSED)
    m, n, k = (shapes[c] for c in "mnk")
    batch = shapes.columns.get("b", 1.0)
    width = 4 if precision == "fp32" else 2

    def predict(values: dict[str, float]) -> np.ndarray:
        kernels = replace(base, **{f"gemm_{name}": value for name, value in values.items()})
        return gemm_s(m, n, k, kernels, bytes_per_element=width, batch=batch)

    return predict


def best_product_eff(
    source: str, device: str, precision: str, shape: dict[str, float], anchor: Table
) -> float:
    """Return the efficiency at which the best measured product of a device comes out right.

    The averaged source runs a long search back to back, at the power-limited clock; the crowd one keeps
    the maximum of short runs.
    """
    predict, target = gemm_predictor(device, precision, anchor), float(anchor["s"][0])
    clock = 1.0 + shape["sag"] if source == "averaged" else 1.0
    flat = shape | {"sag": 0.0} if source == "averaged" else shape
    low, high = 0.05, 3.0
    for _ in range(60):
        eff = 0.5 * (low + high)
        slow = float(predict(flat | {"eff": eff})[0]) > target
        low, high = (eff, high) if slow else (low, eff)
    return 0.5 * (low + high) * clock


def typical_over_best(fitted: dict[str, dict[str, float]], best: dict) -> dict[str, dict[str, float]]:
    """Return per source and fitted device its efficiency over that of its best product alone."""
    return {
        source: {
            name: entry["eff"] / best_product_eff(source, name, matrix(name), entry, found[name])
            for name, entry in fitted.items()
            if name in found
        }
        for source, found in best.items()
    }


def matrix(device: str) -> str:
    return "bf16" if resolve_device(device).supports("bf16") else "fp16"


def donors(device: str, fitted: dict[str, dict[str, float]]) -> list[str]:
    """Return the other fitted devices of the architecture, or all others that have a whole table."""
    others = [name for name in fitted if name != device]
    same = [n for n in others if resolve_device(n).arch == resolve_device(device).arch]
    return same or [n for n in others if resolve_device(n).arch not in SMALL_TABLE_ARCHES]


def transferred(
    device: str, fitted: dict[str, dict[str, float]], best: dict, ratio: dict
) -> dict[str, float]:
    """Return constants of a device from its donors and, where there is one, its best measured product."""
    shape = middle([fitted[name] for name in donors(device, fitted)])
    if resolve_device(device).sums_at_half_rate:
        shape = at_half_rate(shape)
    for source in ("averaged", "crowd"):
        if device in best[source]:
            known = {name: value for name, value in ratio[source].items() if name != device}
            scale = np.median([known[name] for name in donors(device, known)])
            eff = scale * best_product_eff(source, device, matrix(device), shape, best[source][device])
            return shape | {"eff": float(f"{eff:.6g}")}
    return shape


def gemm_sixteen_bit(report: dict) -> tuple[dict, dict]:
    rows = sixteen_bit_rows()
    many = list(rows)
    rows |= {
        "v100-sxm-16gb": deepbench_rows("Results - FP16 ip, Mixed math", "NV_V100"),
        "t4": deepbench_rows("Results - FP16 ip, Mixed math", "NV_T4"),
    }
    fitted, logs = {}, {}
    for device, group in rows.items():
        predict = gemm_predictor(device, matrix(device), group)
        fitted[device], logs[device] = fit(predict, group["s"], GEMM_BOUNDS, GEMM_START)
        report["gemm_16bit"][device] = figures(logs[device])
        large = (group["m"] >= 1024) & (group["n"] >= 1024) & (group["k"] >= 1024)
        report["gemm_16bit_large"][device] = figures(logs[device][large])
    report["gemm_16bit"]["all aiconfigurator"] = figures(np.concatenate([logs[name] for name in many]))
    best = anchors("bf16")
    ratio = typical_over_best(fitted, best)
    leave_out_gemm({name: rows[name] for name in many}, fitted, best, ratio, report)
    entries = {name: entry | {"exposed": GEMM_EXPOSED} for name, entry in fitted.items()}
    whole = section(entries)  # architectures and generic from full tables only
    for device in sorted({name for found in best.values() for name in found} - set(fitted)):
        entries[device] = transferred(device, fitted, best, ratio) | {"exposed": GEMM_EXPOSED}
    entries |= {twin: entries[name] for twin, name in SAME_SILICON.items()}
    anchored = section(entries)
    whole["architectures"] = anchored["architectures"] | whole["architectures"]
    return whole | {"devices": anchored["devices"]}, ratio


def leave_out_gemm(rows: dict[str, Table], fitted: dict, best: dict, ratio: dict, report: dict) -> None:
    """Score every device with constants of the others and its best measured product."""
    logs = []
    for device, group in rows.items():
        rest = {name: entry for name, entry in fitted.items() if name != device}
        predicted = gemm_predictor(device, matrix(device), group)(transferred(device, rest, best, ratio))
        logs.append(np.log(predicted) - np.log(group["s"]))
        report["gemm_16bit_left_out"][device] = figures(logs[-1])
    report["gemm_16bit_left_out"]["all aiconfigurator"] = figures(np.concatenate(logs))


def narrower(entry: dict[str, float], factor: float, eff: float) -> dict[str, float]:
    """Return the curve of a type `factor` times narrower: prologue and splitting count bytes."""
    return entry | {
        "eff": float(f"{eff:.6g}"),
        "k0": entry["k0"] * factor,
        "split_k": entry["split_k"] * factor,
    }


def gemm_fp8(sixteen: dict, ratio: dict) -> dict:
    """Efficiency from the best measured fp8 product, the rest of the curve from 16 bit.

    A device without such a product keeps the share of its own 16-bit efficiency that devices like it keep.
    """
    devices: dict[str, dict[str, float]] = {}
    share: dict[str, float] = {}
    for device, anchor in anchors("fp8")["averaged"].items():
        base = sixteen["devices"].get(device) or sixteen["architectures"][resolve_device(device).arch]
        known = ratio["averaged"]
        name = SAME_SILICON.get(device, device)
        scale = known[name] if name in known else np.median([known[n] for n in donors(name, known)])
        curve = narrower(base, 2.0, base["eff"])
        eff = scale * best_product_eff("averaged", device, "fp8", curve, anchor)
        devices[device] = narrower(base, 2.0, eff)
        share[device] = eff / base["eff"]
    share_of_16bit = float(np.median(list(share.values())))
    for device, base in sixteen["devices"].items():
        if device not in devices and resolve_device(device).supports("fp8"):
            alike = [share[name] for name in donors(device, share)]
            devices[device] = narrower(base, 2.0, base["eff"] * float(np.median(alike)))
    untried = {
        arch: narrower(entry, 2.0, entry["eff"] * share_of_16bit)
        for arch, entry in sixteen["architectures"].items()
        if arch in ("ada", "cdna3", "cdna4")
    }
    return section(devices, **untried)


def gemm_fp4(sixteen: dict, report: dict) -> dict:
    """Efficiency from nvfp4 rows whose weights outweigh the quantisation of the activations they include."""
    rows = read("kernel_aiconfigurator_gemm.csv.gz")
    usable = (rows["dtype"] == "nvfp4") & (rows["flag"] == "")
    rows = rows.take(usable & (rows["m"] >= 4096) & (rows["n"] >= 8192) & (rows["k"] >= 4096))
    devices = {}
    for (table_name,), group in rows.groups("device"):
        device = resolve_device(table_name).name
        base = narrower(sixteen["devices"][device], 4.0, 0.5)
        product = gemm_predictor(device, "nvfp4", group)
        cast_s = 2.5 * group["m"] * group["k"] / (0.8 * ideal(device, "nvfp4").memory_bytes_per_s)

        def predict(values: dict[str, float], base=base, product=product, cast_s=cast_s) -> np.ndarray:
            curve = {name: value for name, value in base.items() if name != "exposed"} | values
            return product(curve) + cast_s

        bounds = {"eff": (0.1, 1.2)}
        entry, log_ratio = fit(predict, group["latency_ms"] * 1e-3, bounds, {"eff": 0.5})
        devices[device] = base | entry
        report["gemm_fp4_large"][device] = figures(log_ratio)
    return section(devices)


def gemm_fp32(sixteen: dict, report: dict) -> tuple[dict, dict[str, float]]:
    """Return the fp32 section, launches being those of 16 bit, and the host overhead the tables include."""
    devices, overhead_s = {}, {}
    for device, group in fp32_rows().items():
        predict, seconds = gemm_predictor(device, "fp32", group), group["s"]
        entry, log_ratio = fit(predict, seconds, GEMM_BOUNDS, GEMM_START)
        report["gemm_fp32"][device] = figures(log_ratio)
        report["gemm_fp32_above_1_ms"][device] = figures(log_ratio[seconds > 1e-3])
        overhead_s[device] = entry["launch_s"]
        devices[device] = entry | {"exposed": GEMM_EXPOSED, "launch_s": sixteen["generic"]["launch_s"]}
    return section(devices), overhead_s


# ---- attention -----------------------------------------------------------------------------------------


def attention_predictor(device: str, rows: Table) -> Callable[[dict[str, float]], np.ndarray]:
    base = replace(ideal(device, "bf16"), stream_eff=0.85)
    columns = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim")
    batch, heads, kv_heads, seq, dim = (rows[c] for c in columns)
    cache_s = cache_writes_s(rows, base)

    def predict(values: dict[str, float]) -> np.ndarray:
        kernels = replace(base, **{f"attn_{name}": value for name, value in values.items()})
        return cache_s + flash_attention_forward_s(
            batch, heads, kv_heads, seq, seq, dim, dim, kernels, causal=True, window=0
        )

    return predict


def attention(report: dict) -> dict:
    rows = attention_rows()
    fits: dict[str, dict[str, dict[str, float]]] = {}
    logs = []
    for (kernel, device), group in rows.groups("kernel", "name"):
        wide = group["head_dim"] == 128
        bounds = dict(ATTENTION_BOUNDS)
        if wide.all():
            bounds["d0"] = (D0_UNMEASURED, D0_UNMEASURED)
        predict = attention_predictor(device, group)
        entry, log_ratio = fit(predict, group["s"], bounds, ATTENTION_START)
        report["attention"][f"{kernel} {device}"] = figures(log_ratio[wide])
        if not wide.all():
            report["attention_head_dim_64"][f"{kernel} {device}"] = figures(log_ratio[~wide])
        logs.append(log_ratio[wide])
        fits.setdefault(kernel, {})[device] = entry | {"bwd_ratio": BACKWARD_RATIO}
    report["attention"]["all"] = figures(np.concatenate(logs))
    left_out_attention(rows, fits, report)
    return attention_sections(fits, report)


def left_out_attention(rows: Table, fits: dict, report: dict) -> None:
    logs = []
    for (kernel, device), group in rows.take(rows["head_dim"] == 128).groups("kernel", "name"):
        others = {n: e for n, e in fits[kernel].items() if n != device}
        if not others:
            continue
        entry = middle([others[n] for n in donors(device, others)])
        entry = {n: v for n, v in entry.items() if n != "bwd_ratio"}
        log_ratio = np.log(attention_predictor(device, group)(entry)) - np.log(group["s"])
        report["attention_left_out"][f"{kernel} {device}"] = figures(log_ratio)
        logs.append(log_ratio)
    report["attention_left_out"]["all"] = figures(np.concatenate(logs))


def attention_sections(fits: dict[str, dict[str, dict[str, float]]], report: dict) -> dict:
    """Return one section per kernel family; who lacks the kernel takes what libraries run instead."""
    fa2, fa3, cudnn = section(fits["fa2"]), section(fits["fa3"]), section(fits["cudnn"])
    hopper, blackwell = fa3["architectures"]["hopper"], cudnn["architectures"]["blackwell"]
    peak = ideal("h100-sxm", "bf16").peak_flops_per_s
    old_eff = FA2_HOPPER / peak * (1.0 + hopper["s0"] / 8192.0)
    same_rate = peak / 132 / (ideal("b200-sxm", "bf16").peak_flops_per_s / 148)
    old = {
        "hopper": hopper | {"fwd_eff": float(f"{old_eff:.6g}")},
        "blackwell": blackwell | {"fwd_eff": float(f"{old_eff * same_rate:.6g}")},
    }
    new = {"devices": fits["fa2"] | fits["fa3"] | fits["cudnn"]}
    new["architectures"] = fa2["architectures"] | {"hopper": hopper, "blackwell": blackwell}
    fa2["architectures"] |= old
    new["generic"] = fa2["generic"]
    halved = {
        "devices": {n: e | {"fwd_eff": e["fwd_eff"] * FA1_OVER_FA2} for n, e in fa2["devices"].items()},
        "architectures": {
            n: e | {"fwd_eff": e["fwd_eff"] * FA1_OVER_FA2} for n, e in fa2["architectures"].items()
        },
        "generic": fa2["generic"] | {"fwd_eff": fa2["generic"]["fwd_eff"] * FA1_OVER_FA2},
    }

    def on_hopper(**backward: float) -> dict:
        return {
            "devices": {n: e | backward if n in fits["fa3"] else e for n, e in new["devices"].items()},
            "architectures": new["architectures"] | {"hopper": hopper | backward},
            "generic": new["generic"],
        }

    return {
        "fa1": halved,
        "fa2": fa2,
        "fa3": on_hopper(bwd_ratio=float(f"{FA3_BACKWARD_RATIO:.6g}")),
        "cudnn": new,
        "sdpa": on_hopper(**backward_of_torch(hopper, report)),
        "trtllm": section(fits["trtllm"]),
    }


def backward_of_torch(forward: dict[str, float], report: dict) -> dict[str, float]:
    """Return the constants of the backward of torch's attention on Hopper, timed on an H200."""
    rows = read_columns(ROOT / "bench" / "device_attention.csv")
    sizes = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim")

    def predictor(group: Table, is_backward: bool) -> Callable[[dict[str, float]], np.ndarray]:
        batch, heads, kv_heads, length, dim = (group[name] for name in sizes)
        known = {f"attn_{name}": value for name, value in forward.items()}

        def predict(values: dict[str, float]) -> np.ndarray:
            fitted = {f"attn_{name}": value for name, value in values.items()}
            kernels = replace(ideal("h200-sxm", "bf16"), **known | fitted)
            whole = (batch, heads, kv_heads, length, length, dim, dim)
            took_s = flash_attention_forward_s(*whole, kernels, causal=True)
            return flash_attention_backward_s(took_s, whole, kernels, causal=True) if is_backward else took_s

        return predict

    def longer(op: str, least_ms: float) -> Table:
        return rows.take((rows["op"] == op) & (rows["latency_ms"] > least_ms))

    group = longer("attention", LAUNCHED_MS)
    log_ratio = np.log(predictor(group, False)({})) - np.log(group["latency_ms"] * 1e-3)
    report["attention_of_torch"]["forward, not fitted"] = figures(log_ratio)
    group = longer("attention_backward", 5 * LAUNCHED_MS)  # autograd launches several kernels
    bounds, start = {"bwd_ratio": (0.3, 1.2), "bwd_fixed": (0.5, 4.0)}, {"bwd_ratio": 0.8, "bwd_fixed": 1.0}
    entry, log_ratio = fit(predictor(group, True), group["latency_ms"] * 1e-3, bounds, start)
    report["attention_of_torch"]["backward"] = figures(log_ratio)
    for (length,), part in group.groups("seq_len"):
        error = np.log(predictor(part, True)(entry)) - np.log(part["latency_ms"] * 1e-3)
        report["attention_of_torch"][f"backward of {length:.0f}"] = figures(error)
    return entry


def tf32_over_16bit() -> dict[str, float]:
    """Return the share of its peak that TF32 reaches in a layer's three products over that of 16 bit (H200).

    Hopper's matrix units read operands in TF32 along the inner dimension only. Those of the gradient of a
    weight do not lie so, and libraries run what older devices have.
    """
    rows = read_columns(ROOT / "bench" / "device_products.csv")
    ratios = []
    for _, same in rows.take(rows["dtype"] != "fp32").groups("m", "n", "k"):
        narrow, tf32 = (same["ms"][same["dtype"] == name] for name in ("bf16", "tf32"))
        if narrow.min() > LAUNCHED_MS:
            ratios.append(
                2.0 * narrow.sum() / tf32.sum()
            )  # a multiply-add of TF32 takes twice as long at the peak
    return {"hopper": float(f"{np.median(ratios):.6g}")}


# ---- elementwise and grouped products ------------------------------------------------------------------


def streaming(sixteen: dict, report: dict) -> tuple[dict, dict[str, float]]:
    """Return the streaming section and the host overhead the table includes."""
    rows = read("kernel_neusight_elementwise.csv.gz")
    rows = rows.take(~np.isin(rows["op"], ("pow", "powu")))  # computing bound on some devices
    passes = np.array([STREAMS.get(op, 2) for op in rows["op"]])
    rows = rows.plus(bytes=4.0 * rows["b"] * rows["h"] * passes)
    fitted = ~np.isin(rows["op"], ("ln", "softmax"))
    launch_s = sixteen["generic"]["launch_s"]
    devices, overhead_s, logs = {}, {}, []
    for (table_name,), group in rows.take(fitted).groups("device"):
        device = resolve_device(table_name).name
        base, moved = ideal(device, "fp32"), group["bytes"]

        def predict(values: dict[str, float], base=base, moved=moved) -> np.ndarray:
            return stream_s(moved, replace(base, **{f"stream_{n}": v for n, v in values.items()}))

        bounds = {"eff": (0.3, 1.1), "launch_s": (0.0, 5e-5)}
        entry, log_ratio = fit(predict, group["latency_ms"] * 1e-3, bounds, {"eff": 0.8, "launch_s": 3e-6})
        devices[device], overhead_s[device] = entry | {"launch_s": launch_s}, entry["launch_s"]
        report["stream"][device] = figures(log_ratio)
        logs.append(log_ratio)
        for (op,), part in rows.take(~fitted & (rows["device"] == table_name)).groups("op"):
            kernels = replace(base, stream_eff=entry["eff"], stream_launch_s=entry["launch_s"])
            log_ratio = np.log(stream_s(part["bytes"], kernels)) - np.log(part["latency_ms"] * 1e-3)
            report[f"stream_{op}_not_fitted"][device] = figures(log_ratio)
    report["stream"]["all"] = figures(np.concatenate(logs))
    triad = read("kernel_misc.csv")
    triad = triad.take(triad["kind"] == "babelstream_triad")
    for table_name, rate in zip(triad["device"], triad["value"], strict=True):
        device = resolve_device(str(table_name)).name
        eff = rate * 1e12 / resolve_device(device).memory_bytes_per_s
        devices.setdefault(device, {"eff": float(f"{eff:.6g}"), "launch_s": launch_s})
    return section(devices), overhead_s


def grouped(sixteen: dict, report: dict) -> dict:
    """Fused expert layers, balanced routing, 64 tokens or more per expert, TensorRT-LLM (CUTLASS)."""
    rows = read("kernel_aiconfigurator_moe.csv.gz")
    full = rows["num_tokens"] * rows["topk"] >= 64 * rows["experts"]
    rows = rows.take((rows["distribution"] == "balanced") & full)
    devices, logs = {}, []
    for (table_name, framework), group in rows.groups("device", "framework"):
        device = resolve_device(table_name).name
        curve = {f"gemm_{n}": v for n, v in sixteen["devices"][device].items()}
        base = replace(ideal(device, "bf16"), stream_eff=0.85, **curve)
        predict = moe_predictor(base, group)
        # Grouping cannot beat one batched product; what is faster is a newer library than the dense rows.
        bounds = {"eff": (0.05, 1.0), "launch_s": (0.0, 4e-4), "traffic": (0.5, 8.0)}
        start = {"eff": 0.8, "launch_s": 5e-5, "traffic": 1.0}
        entry, log_ratio = fit(predict, group["latency_ms"] * 1e-3, bounds, start)
        report["moe_balanced"][f"{framework} {device}"] = figures(log_ratio) | entry
        if framework == "trtllm":
            devices[device] = {"eff": entry["eff"]}
            logs.append(log_ratio)
    report["moe_balanced"]["all trtllm"] = figures(np.concatenate(logs))
    return section(devices)


def moe_predictor(base: KernelModel, rows: Table) -> Callable[[dict[str, float]], np.ndarray]:
    tokens = rows["num_tokens"] * rows["topk"] / rows["moe_ep"]
    experts, hidden = rows["experts"] / rows["moe_ep"], rows["hidden"]
    inner = rows["inter"] / rows["moe_tp"]
    # Gather, gated activation and weighted sum of the expert outputs, 16 bit.
    moved = tokens * (2.0 * 2.0 * hidden + 3.0 * 2.0 * inner + 2.0 * 2.0 * hidden)

    def predict(values: dict[str, float]) -> np.ndarray:
        kernels = replace(base, grouped_eff=values["eff"])
        first = grouped_gemm_s(tokens, experts, 2.0 * inner, hidden, kernels)
        second = grouped_gemm_s(tokens, experts, hidden, inner, kernels)
        return first + second + values["traffic"] * stream_s(moved, kernels) + values["launch_s"]

    return predict


# ---- whole ---------------------------------------------------------------------------------------------


def constants() -> dict:
    report: dict[str, dict] = defaultdict(dict)
    sixteen, ratio = gemm_sixteen_bit(report)
    fp32, fp32_overhead_s = gemm_fp32(sixteen, report)
    stream, stream_overhead_s = streaming(sixteen, report)
    gemm = {"16bit": sixteen, "fp32": fp32, "fp8": gemm_fp8(sixteen, ratio), "fp4": gemm_fp4(sixteen, report)}
    return {
        "schema_version": 1,
        "fitted_by": "scripts/fit_kernels.py",
        "sources": {
            "gemm 16bit, attention, grouped": "ai-dynamo/aiconfigurator systems data (Apache-2.0)",
            "gemm 16bit and fp8 anchors": "stas00/ml-engineering MAMF; mag-/gpu_benchmark",
            "gemm 16bit volta, turing; fp32 maxwell, vega": "baidu-research/DeepBench (Apache-2.0)",
            "gemm fp32, stream": "NeuSight, ASPLOS 2025 (MIT)",
            "stream hopper, fa2 hopper": "Azure/AI-benchmarking-guide (MIT)",
            "tf32 hopper, backward of sdpa hopper": "bench/device_products.csv, bench/device_attention.csv",
        },
        "curve_of": {name: "ada" for name in CONSUMER_BLACKWELL},
        "gemm": gemm,
        "tf32_over_16bit": tf32_over_16bit(),
        "attention": attention(report),
        "stream": stream,
        "grouped": grouped(sixteen, report),
        "table_overhead_s": {"gemm_fp32": fp32_overhead_s, "elementwise": stream_overhead_s},
        "report": dict(report),
    }


_REFIT_ERROR = 1e-6
"""Part by which a refit may differ: rounding on another processor."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if not DATA.is_dir():
        print(f"no measured tables at {DATA}; set FORESHARD_MEASURED", file=sys.stderr)
        return 2
    text = json.dumps(constants(), indent=1) + "\n"
    if check:
        changed = differences(json.loads(OUT.read_text(encoding="utf-8")), json.loads(text), _REFIT_ERROR)
        print("\n".join(changed) or "constants unchanged")
        return 1 if changed else 0
    OUT.write_text(text, encoding="utf-8")
    print(json.dumps(json.loads(text)["report"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
