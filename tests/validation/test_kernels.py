"""Shipped kernel constants against the published kernel tables, row by row.

Recipes and filters are those of docs/derivations/kernels.md.
"""

import csv
import gzip
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_constants, kernel_model
from foreshard.cost.attention import flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("FORESHARD_MEASURED", ROOT.parent / "shared/measured/dev"))


@cache
def rows(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no published measurements at {DATA}")
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "rt", newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def column(table, name):
    return np.array([float(row[name]) for row in table])


def median_error(predicted_s, measured_s):
    return float(np.median(np.abs(predicted_s / measured_s - 1)))


def by_device(table, key="device"):
    groups = {}
    for row in table:
        groups.setdefault(row[key], []).append(row)
    return {resolve_device(name): group for name, group in groups.items()}


def test_sixteen_bit_products():
    table = [
        r for r in rows("kernel_aiconfigurator_gemm.csv.gz") if r["dtype"] == "bfloat16" and not r["flag"]
    ]
    errors, large_errors = [], []
    for device, group in by_device(table).items():
        kernels = kernel_model(device, "bf16", sustained=False)
        m, n, k = (column(group, c) for c in "mnk")
        error = np.abs(gemm_s(m, n, k, kernels) / (column(group, "latency_ms") * 1e-3) - 1)
        errors.append(error)
        large_errors.append(error[np.minimum(np.minimum(m, n), k) >= 1024])
        assert np.median(error) < 0.11, device.name
    assert np.median(np.concatenate(errors)) < 0.08
    assert np.median(np.concatenate(large_errors)) < 0.06


def test_left_out_devices_stay_within_fifteen_percent():
    report = kernel_constants()["report"]
    assert report["gemm_16bit_left_out"]["all aiconfigurator"]["median"] < 0.15
    assert report["attention_left_out"]["all"]["median"] < 0.15


def test_products_never_fitted():
    # cuBLASLt on Azure, 10,000 warm-up products: back to back, so at the sustained clock.
    table = [r for r in rows("kernel_misc.csv") if r["kind"] == "gemm_cublasLt" and float(r["m"]) >= 2048]
    errors = []
    for row in table:
        kernels = kernel_model(resolve_device(row["device"]), row["dtype"])
        m, n, k = (float(row[c]) for c in "mnk")
        width = 1 if row["dtype"] == "fp8" else 2
        measured_s = 2 * m * n * k / (float(row["value"]) * 1e12)
        errors.append(abs(float(gemm_s(m, n, k, kernels, bytes_per_element=width)) / measured_s - 1))
    assert len(errors) == 20
    assert np.median(errors) < 0.10


def test_flash_attention_forward():
    table = [
        r
        for r in rows("kernel_aiconfigurator_attention.csv.gz")
        if r["head_dim"] == "128"
        and (
            r["framework"] in ("vllm", "trtllm") or r["system"] in ("a100_sxm", "h100_sxm", "gb200", "gb300")
        )
    ]
    errors = []
    for device, group in by_device(table).items():
        library = {"hopper": "fa3", "blackwell": "cudnn"}.get(device.arch, "fa2")
        for kernel, wanted in (("trtllm", True), (library, False)):
            part = [r for r in group if (r["framework"] == "trtllm") == wanted]
            if part:
                errors.append(_attention_errors(part, kernel_model(device, "bf16", attention=kernel)))
    assert np.median(np.concatenate(errors)) < 0.12


def _attention_errors(group, kernels):
    names = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim")
    batch, heads, kv_heads, s, d = (column(group, c) for c in names)
    no_cache = [
        r["kernel_source"] == "vllm_flashinfer" or (r["framework"], r["system"]) == ("vllm", "l40s")
        for r in group
    ]
    cache_bytes = np.where(no_cache, 0.0, 8.0 * batch * kv_heads * s * d)
    predicted_s = flash_attention_forward_s(
        batch, heads, kv_heads, s, s, d, d, kernels, causal=True, window=0
    ) + stream_s(cache_bytes, kernels, num_kernels=0)
    measured_s = column(group, "latency_ms") * 1e-3
    share = 2 * batch * heads * s * s * d / measured_s / kernels.bf16_peak_flops_per_s
    return np.abs(predicted_s / measured_s - 1)[share < 0.9]


def test_streaming_kernels():
    table = [
        r
        for r in rows("kernel_neusight_elementwise.csv.gz")
        if r["op"] in ("add", "mul", "relu", "gelu", "ln")
    ]
    overhead_s = kernel_constants()["table_overhead_s"]["elementwise"]
    simple, norms = [], []
    for device, group in by_device(table).items():
        kernels = kernel_model(device, "fp32")
        elements = column(group, "b") * column(group, "h")
        # Additions have two operands; the norms of eager torch read theirs twice.
        passes = np.array([3.0 if r["op"] in ("add", "mul", "ln") else 2.0 for r in group])
        is_norm = np.array([r["op"] == "ln" for r in group])
        predicted_s = stream_s(4 * elements * passes, kernels, num_kernels=0) + overhead_s[device.name]
        error = np.abs(predicted_s / (column(group, "latency_ms") * 1e-3) - 1)
        simple.append(error[~is_norm])
        norms.append(error[is_norm])
    assert np.median(np.concatenate(simple)) < 0.02
    assert np.median(np.concatenate(norms)) < 0.12


def test_fp32_products():
    table = rows("kernel_neusight_gemm.csv.gz")
    overhead_s = kernel_constants()["table_overhead_s"]["gemm_fp32"]
    errors = []
    for device, group in by_device(table).items():
        kernels = kernel_model(device, "fp32", sustained=False)
        b, m, n, k = (column(group, c) for c in "bmnk")
        predicted_s = gemm_s(m, n, k, kernels, bytes_per_element=4, batch=b)
        predicted_s += overhead_s[device.name] - kernels.gemm_launch_s
        errors.append(np.abs(predicted_s / (column(group, "latency_ms") * 1e-3) - 1))
    assert np.median(np.concatenate(errors)) < 0.20


@pytest.mark.slow
def test_shipped_constants_are_those_of_the_fit():
    pytest.importorskip("scipy")
    rows("kernel_mamf.csv")
    script = ROOT / "scripts" / "fit_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
