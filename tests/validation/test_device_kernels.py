"""Attention as torch runs it, and products in TF32, against those of an H200 (bench/device_*.csv)."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.stacks import attention_constants
from foreshard.cost.attention import flash_attention_backward_s, flash_attention_forward_s
from foreshard.cost.gemm import gemm_s

BENCH = Path(__file__).parents[2] / "bench"
H200 = resolve_device("h200-sxm")


def rows(name: str) -> list[dict[str, str]]:
    with (BENCH / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("op", "least_ms", "most"), [("attention", 0.05, 0.1), ("attention_backward", 0.25, 0.05)]
)
def test_attention_of_torch_takes_what_the_device_took(op, least_ms, most):
    """No constant of the forward was fitted on these; both of the backward were."""
    kernels = kernel_model(
        H200, "bf16", attention=attention_constants(load_framework("ddp"), H200), sustained=False
    )
    errors = []
    for row in rows("device_attention.csv"):
        if row["op"] == op and float(row["latency_ms"]) > least_ms:
            names = ("batch", "num_heads", "num_kv_heads", "seq_len", "seq_len", "head_dim", "head_dim")
            sizes = tuple(int(row[name]) for name in names)
            took_s = flash_attention_forward_s(*sizes, kernels, causal=True)
            if op == "attention_backward":
                took_s = flash_attention_backward_s(took_s, sizes, kernels, causal=True)
            errors.append(abs(1e3 * float(took_s) / float(row["latency_ms"]) - 1.0))
    assert len(errors) > 30 and median(errors) < most


def test_published_runs_of_megatron_keep_the_backward_that_they_state():
    """Their cuDNN is older than torch's (docs/derivations/kernels.md)."""
    h100 = resolve_device("h100-sxm")
    assert attention_constants(load_framework("megatron-core"), h100) == "cudnn"
    assert {attention_constants(load_framework(name), h100) for name in ("hf", "ddp", "torchtitan@0.3")} == {
        "sdpa"
    }
    old, new = (kernel_model(h100, "bf16", attention=name) for name in ("cudnn", "sdpa"))
    assert old.attn_bwd_ratio < new.attn_bwd_ratio


def test_products_in_tf32_take_what_the_device_took():
    """Over the three products of a layer: the gradient of a weight runs at half the rate of the others."""
    took_ms: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for row in rows("device_products.csv"):
        if row["dtype"] == "tf32":
            took_ms[tuple(int(row[name]) for name in "mnk")].append(float(row["ms"]))
    kernels = kernel_model(H200, "tf32")
    ratios = []
    for (m, n, k), each_ms in took_ms.items():
        if min(each_ms) > 0.1:  # a launch of that host took .02 ms
            said_s = np.sum(gemm_s(np.array([m, m, n]), np.array([n, k, k]), np.array([k, n, m]), kernels))
            ratios.append(1e3 * said_s / sum(each_ms))
    assert len(ratios) > 8 and median(ratios) == pytest.approx(1.0, abs=0.08)
    assert median(abs(ratio - 1.0) for ratio in ratios) < 0.1
