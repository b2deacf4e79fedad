"""Kernel constants: who gets which curve, and that every device gets a usable one."""

from dataclasses import fields, replace

import numpy as np
import pytest

from foreshard.catalog.devices import devices, resolve_device
from foreshard.catalog.kernels import (
    ATTENTION_KERNELS,
    KernelModel,
    kernel_constants,
    kernel_evidence,
    kernel_model,
)
from foreshard.cost.gemm import gemm_s
from foreshard.errors import SpecError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")


@pytest.mark.parametrize("name", sorted(devices()))
def test_every_device_has_a_usable_curve_for_every_precision_it_supports(name):
    device = devices()[name]
    for precision in filter(device.supports, PRECISIONS):
        for fidelity in ("datasheet", "zero-shot"):
            model = kernel_model(device, precision, fidelity=fidelity)
            values = {f.name: getattr(model, f.name) for f in fields(model)}
            assert all(np.isfinite(v) and v >= 0 for v in values.values()), values
            assert 0.1 < model.gemm_eff < 1.3 and 0.1 < model.gemm16_eff < 1.3
            assert 0 < model.stream_eff <= 1.0 and 0 < model.attn_bwd_ratio <= 1
            assert 0 <= model.gemm_tile_penalty < 1 and 0 <= model.gemm_exposed <= 1


def test_evidence_falls_from_device_to_architecture_to_datasheet():
    assert kernel_evidence(resolve_device("h100-sxm"), "bf16") == "fitted"
    assert kernel_evidence(resolve_device("h20-sxm"), "bf16") == "architecture"
    assert kernel_evidence(resolve_device("tpu-v4"), "bf16") == "datasheet"


def test_a_device_without_measurements_takes_its_architecture():
    h20, h100 = (kernel_model(resolve_device(n), "bf16") for n in ("h20-sxm", "h100-sxm"))
    assert h20.gemm_eff == h100.gemm_eff
    assert h20.peak_flops_per_s == 148e12


def test_consumer_blackwell_takes_the_curve_of_its_tensor_cores():
    ada = kernel_constants()["gemm"]["16bit"]["architectures"]["ada"]
    assert kernel_model(resolve_device("rtx-pro-6000-server"), "bf16").gemm_k0 == ada["k0"]


def test_datasheet_has_no_fitted_constant():
    one = kernel_model(resolve_device("h100-sxm"), "bf16", fidelity="datasheet")
    other = kernel_model(resolve_device("v100-sxm-16gb"), "fp16", fidelity="datasheet")
    for field in fields(KernelModel)[4:]:
        assert getattr(one, field.name) == getattr(other, field.name)


def test_a_card_that_boosts_keeps_the_clock_of_its_datasheet():
    """A product timed alone runs above the boost clock that the peak is stated for, a busy card does not."""
    card = resolve_device("rtx-3090")
    assert card.peak("bf16") == 71e12, "GA102 of GeForce at half rate: sums in fp32"
    assert kernel_model(card, "bf16", sustained=False).gemm_eff > 1.0 == kernel_model(card, "bf16").gemm_eff


@pytest.mark.parametrize("name", ["rtx-2080-ti", "rtx-3090", "rtx-4080", "rtx-4090", "rtx-5090"])
def test_units_at_half_their_rate_are_fed_and_hold_their_clock(name):
    """A long product reaches the peak, and takes no longer than twice that of a twin at the whole rate."""
    card = resolve_device(name)
    rates = card.peak_flops_per_s
    twin = replace(card, peak_flops_per_s={**rates, "fp16": 2.0 * rates["fp16"]})
    assert card.sums_at_half_rate and not twin.sums_at_half_rate
    half, whole = (kernel_model(one, "fp16", sustained=False) for one in (card, twin))
    long_s = float(gemm_s(8192, 8192, 16384, kernel_model(card, "fp16")))
    assert 1.0 < long_s * card.peak("fp16") / (2.0 * 8192 * 8192 * 16384) < 1.1
    if kernel_evidence(card, "fp16") != "fitted":  # else both have the share of the card's best product
        for sizes in ((8192, 8192, 16384), (4096, 256, 64), (128, 128, 32)):
            assert gemm_s(*sizes, whole) <= gemm_s(*sizes, half) <= 2.0 * gemm_s(*sizes, whole)


def test_sustained_runs_at_the_sagged_clock_throughout():
    device = resolve_device("h100-sxm")
    alone, busy = kernel_model(device, "bf16", sustained=False), kernel_model(device, "bf16")
    assert alone.gemm_sag > 0.1 and busy.gemm_sag == 0
    assert busy.gemm_eff == pytest.approx(alone.gemm_eff / (1 + alone.gemm_sag))


def test_old_flash_attention_is_slower_on_hopper():
    device = resolve_device("h100-sxm")
    eff = {
        kernel: kernel_model(device, "bf16", attention=kernel).attn_fwd_eff for kernel in ATTENTION_KERNELS
    }
    assert eff["fa1"] < eff["fa2"] < 0.7 * eff["fa3"]


def test_devices_without_bf16_take_fp16():
    v100 = kernel_model(resolve_device("v100-sxm-16gb"), "fp16")
    assert v100.bf16_peak_flops_per_s == 125e12 == v100.peak_flops_per_s


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_attention_runs_in_the_precision_of_the_matrices_unless_narrower(precision):
    model = kernel_model(resolve_device("a100-sxm-80gb"), precision)
    assert model.bf16_peak_flops_per_s == model.peak_flops_per_s
    assert (model.gemm16_eff, model.gemm16_k0) == (model.gemm_eff, model.gemm_k0)
    fp8 = kernel_model(resolve_device("h100-sxm"), "fp8")
    assert fp8.bf16_peak_flops_per_s == 989e12 and fp8.peak_flops_per_s == 1979e12


@pytest.mark.parametrize(
    "wrong", [{"precision": "bf17"}, {"attention": "fa9"}, {"fidelity": "hunch"}, {"precision": "nvfp4"}]
)
def test_unknown_names_are_errors(wrong):
    arguments = {"precision": "bf16"} | wrong
    with pytest.raises(SpecError):
        kernel_model(resolve_device("a100-sxm-80gb"), arguments.pop("precision"), **arguments)


def test_every_constant_reaches_a_field():
    constants = kernel_constants()
    names = {f.name for f in fields(KernelModel)}
    for prefix, entries in (
        ("gemm_", constants["gemm"]["16bit"]),
        ("attn_", constants["attention"]["fa2"]),
        ("stream_", constants["stream"]),
        ("grouped_", constants["grouped"]),
    ):
        for entry in [*entries["devices"].values(), *entries["architectures"].values(), entries["generic"]]:
            assert {prefix + name for name in entry} <= names


def test_every_named_device_and_architecture_exists():
    known = {d.arch for d in devices().values()}
    constants = kernel_constants()
    sections = [
        *constants["gemm"].values(),
        *constants["attention"].values(),
        constants["stream"],
        constants["grouped"],
    ]
    for section in sections:
        assert set(section["devices"]) <= set(devices())
        assert set(section["architectures"]) <= known
    assert set(constants["curve_of"]) <= set(devices())
