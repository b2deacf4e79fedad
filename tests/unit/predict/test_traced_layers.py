"""Convolutions in 32 bit and recurrent layers: which algorithm a library takes, and what bounds it."""

import csv
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.recurrences import RecurrentKernels, recurrence_kernels
from foreshard.predict.measured.traced import device_operations_s
from foreshard.profile.tracing.alone import convolution_passes, recurrent_passes
from foreshard.profile.tracing.trace import trace_module

V100 = resolve_device("v100-sxm-16gb")
MEASURED = Path(__file__).parents[3] / "bench/device_recurrent.csv"


def seconds(operations, samples, *, device=V100, precision="fp32"):
    return device_operations_s(operations, samples, device=device, precision=precision, sustained=False).sum()


def passes_s(channels, side, taps, *, padding=0, stride=1, samples=16, precision="fp32"):
    passes = convolution_passes(
        channels, (side, side), channels, (taps, taps), (padding, padding), (stride, stride), precision
    )
    return {name: seconds(work, samples, precision=precision) for name, work in passes.items()}


def share_of_peak(channels, side, taps, **given):
    """Return the multiply-adds of patches over those of the peak, by pass."""
    stride = given.get("stride", 1)
    positions = given.get("samples", 16) * (side // stride) ** 2
    flops = 2.0 * positions * channels**2 * taps**2
    return {
        name: flops / took / V100.peak("fp32")
        for name, took in passes_s(channels, side, taps, **given).items()
    }


def test_wide_filters_of_three_by_three_beat_the_peak_in_every_pass_but_not_fourfold():
    """Winograd's algorithm has 36 products for 144 of patches; DeepBench's V100 is 2.2 times its peak."""
    for channels in (256, 512):
        shares = share_of_peak(channels, 56, 3, padding=1)
        assert all(1.0 < share < 4.0 for share in shares.values()), shares


@pytest.mark.parametrize("given", [{"taps": 3, "padding": 1, "stride": 2}, {"taps": 5, "padding": 2}])
def test_other_filters_do_not(given):
    assert all(share <= 1.0 for share in share_of_peak(256, 56, **given).values())


def test_sixteen_bit_has_no_tiles_to_transform():
    """Matrix units multiply patches: a V100 takes as long for each tap of 3 x 3 as of 1 x 9 in fp16."""
    square, flat = (
        convolution_passes(256, (56, 56), 256, taps, padding, (1, 1), "fp16")["forward"]
        for taps, padding in (((3, 3), (1, 1)), ((1, 9), (0, 4)))
    )
    assert seconds(square, 16, precision="fp16") == pytest.approx(
        seconds(flat, 16, precision="fp16"), rel=1e-6
    )


def test_dilated_and_grouped_filters_are_products_of_patches():
    layers = [nn.Conv2d(64, 64, 3, padding=2, dilation=2), nn.ConvTranspose2d(64, 64, 3)]
    traced = trace_module(nn.Sequential(*layers), torch.empty(1, 64, 32, 32), precision="fp32")
    found = [
        o for layer in traced.layers for o in (*layer.forward, *layer.backward) if o.kind == "convolution"
    ]
    assert len(found) == 5
    assert all(size.at(3) == 0.0 for operation in found for size in operation.sizes[6:])


def test_few_channels_leave_tiles_empty():
    """64 x 64 channels take more than a quarter of the time of 128 x 128, at as many positions."""
    few, many = passes_s(32, 28, 1), passes_s(128, 28, 1)
    assert all(few[name] > many[name] / 16 for name in few)


@pytest.mark.parametrize("kind", ["lstm", "gru", "vanilla"])
def test_steps_cost_alike_and_no_less_than_their_weights_take_to_read(kind):
    gates = {"lstm": 4, "gru": 3, "vanilla": 1}[kind]
    kernels = kernel_model(V100, "fp32", sustained=False)
    read_s = 4.0 * gates * 2048**2 / (kernels.stream_eff * kernels.memory_bytes_per_s)
    for samples in (1, 16, 64, 256):
        few, many = (
            seconds(recurrent_passes(kind, 2048, steps, "fp32")["forward"], samples) for steps in (10, 30)
        )
        assert many == pytest.approx(3 * few)
        assert few > 10 * read_s
    # reads bind a few samples, multiplications many
    one, sixteen, many = (
        seconds(recurrent_passes(kind, 2048, 10, "fp32")["forward"], samples) for samples in (1, 16, 512)
    )
    assert one > 0.9 * sixteen
    assert many > 3 * sixteen


def alone(kind, width, steps, **given):
    """Return the recurrence of a layer by itself, forward."""
    layer = {"lstm": nn.LSTM, "gru": nn.GRU, "vanilla": nn.RNN}[kind](width, width, batch_first=True, **given)

    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, read):
            return self.layer(read)[0]

    traced = trace_module(Picked(), torch.empty(1, steps, width), precision="fp16")
    return next(o for layer in traced.layers for o in layer.forward if o.kind == "recurrence")


@pytest.mark.parametrize(
    ("made", "samples", "volta", "later"),
    [
        (("lstm", 1024, 40), 128, True, True),
        (("lstm", 1024, 39), 128, False, True),
        (("lstm", 1024, 20), 96, True, True),
        (("lstm", 1024, 40), 80, False, True),
        (("lstm", 1024, 40), 136, False, False),
        (("lstm", 1024, 40), 12, False, False),
        (("lstm", 1152, 40), 64, False, False),
        (("lstm", 960, 40), 64, False, False),
        (("gru", 512, 40), 64, True, False),
        (("vanilla", 1024, 40), 64, True, True),
        (("vanilla", 1024, 40), 96, True, False),
    ],
)
def test_one_kernel_keeps_the_weights_where_torch_asks_for_it(made, samples, volta, later):
    """torch 2.11, aten/src/ATen/native/cudnn/RNN.cpp."""
    operation = alone(*made)
    for library, kept in ((RecurrentKernels(volta=True), volta), (RecurrentKernels(later=True), later)):
        assert recurrence_kernels(operation, samples, library) == (1 if kept else 2 * made[2])


def test_two_layers_or_directions_are_no_single_kernel():
    for given in ({"num_layers": 2}, {"bidirectional": True}):
        operation = alone("lstm", 512, 40, **given)
        assert recurrence_kernels(operation, 64, RecurrentKernels(later=True)) == 80


def test_kernels_of_a_step_take_what_they_took_on_an_h200():
    """Of bench/device_recurrent.csv no constant but those of layers in one kernel was read off."""
    device, errors = resolve_device("h200-sxm"), []
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            narrow = row["precision"] in ("fp16", "bf16") and row["kept"] == "0"
            if not narrow:
                continue
            way = "forward" if row["pass"] == "forward" else "inputs"
            work = recurrent_passes(row["kind"], int(row["width"]), int(row["steps"]), row["precision"])[way]
            took_s = float(row["steps_ms"]) / 1e3 / int(row["layers"])
            said_s = seconds(work, int(row["batch"]), device=device, precision=row["precision"])
            errors.append(abs(said_s / took_s - 1.0))
    assert len(errors) == 16
    assert np.median(errors) < 0.2
    assert max(errors) < 0.6


def test_convolutions_of_a_device_without_rates_in_32_bit_take_its_own():
    """Factors and transforms of fp32 kernels are no part of what a TPU or Gaudi takes in bf16."""
    passes = convolution_passes(1024, (14, 14), 1024, (1, 1), (0, 0), (1, 1), "bf16")
    tpu = resolve_device("tpu-v5e")
    layouts = tuple(work for work in passes["weights"] if work.kind == "layout")
    assert layouts and seconds(layouts, 64, device=tpu, precision="bf16") == 0.0  # the compiler chose it
    for name in ("tpu-v5e", "gaudi2"):
        device = resolve_device(name)
        flops = 2.0 * 64 * 14**2 * 1024**2
        product = tuple(work for work in passes["weights"] if work.kind == "convolution")
        took_s = seconds(product, 64, device=device, precision="bf16")
        model = kernel_model(device, "bf16", sustained=False)
        assert took_s < 1.5 * flops / (model.peak_flops_per_s * model.gemm_eff)
