"""Intervals of rows of kernels: of other devices, nested, and counted by validate."""

import json

import numpy as np
import pytest

from foreshard.catalog.shipped import shipped
from foreshard.cli.program import run
from foreshard.validation.kernels.intervals import LEVELS, kernel_group, kernel_half_widths


def test_a_device_is_judged_by_the_others_alone():
    groups = shipped("kernel_residuals.json")["groups"]
    group = kernel_group("gemm", {"device": "x", "dtype": "BFloat16"})
    halves = kernel_half_widths(group, "h100-sxm")
    others = [value for name, values in groups[group].items() if name != "h100-sxm" for value in values]
    assert list(halves) == list(LEVELS) and list(halves.values()) == sorted(halves.values())
    assert halves[0.9] == pytest.approx(np.quantile(others, 0.9))
    assert len({len(values) for values in groups[group].values()}) == 1, "every device counts alike"


def test_where_nothing_was_fitted_there_is_no_interval():
    assert not kernel_half_widths("gemm bfloat16", "tpu-v4")  # no kernel of it
    assert not kernel_half_widths("gemm int4", "h100-sxm")  # nor of this kind


def test_validate_counts_how_often_they_hold(tmp_path, capsys):
    from foreshard.catalog.devices import resolve_device
    from foreshard.catalog.kernels import kernel_model
    from foreshard.cost.gemm import gemm_s

    kernels = kernel_model(resolve_device("h100-sxm"), "bf16", sustained=False)
    lines = ["system,device,dtype,m,n,k,latency_ms,flag"]
    for size, factor in ((1024, 1.0), (2048, 1.03), (4096, 0.99), (8192, 30.0)):
        ms = 1e3 * factor * float(gemm_s(size, size, size, kernels))
        lines.append(f"mine,NVIDIA H100 80GB HBM3,bfloat16,{size},{size},{size},{ms!r},")
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert run(["validate", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["summary"]
    assert found["intervals"]["by_level"]["0.9"] == pytest.approx(3 / 4)
