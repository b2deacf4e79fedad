"""Kernels of networks against those of an H100 (bench/device_kernels.csv).

No constant was read off these steps.
"""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from foreshard.catalog.devices import resolve_device
from foreshard.predict.measured.traced import device_operations_s
from foreshard.profile.networks.catalog import network
from foreshard.profile.tracing.trace import trace_module

MEASURED = Path(__file__).parents[2] / "bench/device_kernels.csv"


def measured(step: str) -> dict[str, float]:
    with MEASURED.open() as file:
        return {row["kernels"]: float(row["ms"]) / 1e3 for row in csv.DictReader(file) if row["step"] == step}


def predicted(name: str, batch: int, precision: str) -> dict[str, float]:
    device, (module, image) = resolve_device("h100-sxm"), network(name)
    traced = trace_module(module, image, precision=precision, autocast=True)
    found: dict[str, float] = defaultdict(float)
    for layer in traced.layers:
        for way, operations in (("forward", layer.forward), ("backward", layer.backward)):
            seconds = device_operations_s(operations, batch, device=device, precision=precision)
            for operation, took_s in zip(operations, seconds, strict=True):
                kind = {"batch_norm": "norm", "layout": "layout"}.get(operation.kind, "")
                kind = "pool" if "pool2d" in operation.name and "adaptive" not in operation.name else kind
                found[kind if kind == "layout" else f"{kind} {way}"] += took_s
    return found


@pytest.mark.parametrize(
    ("name", "batch", "precision"),
    [("resnet18", 512, "fp16"), ("mobilenet_v2", 256, "fp16"), ("mnasnet1_0", 256, "fp16")],
)
def test_norms_pools_and_layouts_take_what_the_device_took(name, batch, precision):
    took, said = measured(f"{name}-{batch}-{precision}-first"), predicted(name, batch, precision)
    assert said["norm forward"] == pytest.approx(took["norm forward"], rel=0.1)
    assert said["norm backward"] == pytest.approx(took["norm backward"], rel=0.1)
    for kind in {"pool forward", "pool backward"} & set(took):
        assert said[kind] == pytest.approx(took[kind], rel=0.35)


def test_changes_of_layout_take_what_the_device_took():
    """With filters of one channel there are more: their gradients run channels last, which is not counted."""
    took, said = measured("resnet18-512-fp16-first"), predicted("resnet18", 512, "fp16")
    assert said["layout"] == pytest.approx(took["layout"], rel=0.2)
