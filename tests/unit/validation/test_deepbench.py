"""Convolutions and recurrent layers of DeepBench: which pass a row times, and how it is predicted."""

import pytest

pytest.importorskip("torch")

from foreshard.profile.tracing.alone import convolution_passes, recurrent_passes
from foreshard.validation.kernels.cases import kernel_cases
from foreshard.validation.kernels.deepbench import StatedPass, device_of, passes_alone_s, timed_passes
from foreshard.validation.tables import read_table

HEADER = "device,mode,sheet_precision,section,params,op_or_pass,time_ms\n"
IMAGE = (
    "W=28;H=14;C=64;N=8;K=32;S (Filter width)=5;R (Filter height)=3;pad_w=2;pad_h=1;Horizontal stride=1;"
    "Vertical stride=2;Forward (msec)=0.2;wrt Inputs (msec)={};wrt Parameters (msec)=0.3;P=1;Q=1"
)


def rows_of(tmp_path, *lines):
    path = tmp_path / "deep.csv"
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return read_table(path)


def seconds(passes, samples, *names, device="NV_V100", precision="fp32"):
    work = tuple(operation for name in names for operation in passes[name])
    stated = StatedPass(row=0, name="", operations=work, samples=samples, measured_s=1.0)
    return passes_alone_s([stated], device_of(device), precision)[0]


def test_a_row_of_a_convolution_is_the_passes_that_it_states(tmp_path):
    """M40, T4 and V100 state no gradient of the input of first layers: it is in no total."""
    sheet = "NV_V100,train,Results FP32,W"
    table = rows_of(
        tmp_path,
        f"{sheet},{IMAGE.format('0.4')},Total Time (msec),0.9",
        f"{sheet},{IMAGE.format('N/A*')},Total Time (msec),0.5",
    )
    whole, without = kernel_cases(table)
    passes = convolution_passes(64, (14, 28), 32, (3, 5), (1, 2), (2, 1), "fp32")
    assert [whole.measured_s, without.measured_s] == pytest.approx([0.9e-3, 0.5e-3])
    assert whole.predicted_s == pytest.approx(seconds(passes, 8.0, "forward", "inputs", "weights"))
    assert without.predicted_s == pytest.approx(seconds(passes, 8.0, "forward", "weights"))
    found = timed_passes("NV_V100", "W", "Results FP32", table.rows)
    assert [[each.name for each, _ in row] for row in found] == [
        ["forward", "inputs", "weights"],
        ["forward", "weights"],
    ]
    assert [each.measured_s for each, _ in found[0]] == pytest.approx([0.2e-3, 0.4e-3, 0.3e-3])


def test_rows_of_a_recurrent_layer_have_the_steps_above_them(tmp_path):
    sheet, size = "NV_V100,train,Results FP32,Recurrent Layers - LSTM", "Source=x;Hidden Units=512;N=16"
    table = rows_of(
        tmp_path,
        f"{sheet},{size},Timesteps,25",
        f"{sheet},{size},Time Forward (msec),1",
        f"{sheet},{size},Timesteps,50",
        f"{sheet},{size},Time Forward (msec),2",
        f"{sheet},{size},Time Backward wrt weights (msec),1",
        f"{sheet},{size},Time Backward (msec),3",
    )
    cases = kernel_cases(table)
    few, many = (recurrent_passes("lstm", 512, steps, "fp32") for steps in (25, 50))
    expected = [
        (few, ("forward",)),
        (many, ("forward",)),
        (many, ("weights",)),
        (many, ("inputs", "weights")),
    ]
    said = [case.predicted_s for case in cases if case.predicted_s]
    assert said == pytest.approx([seconds(passes, 16.0, *names) for passes, names in expected])
    assert [case.reason for case in cases if not case.predicted_s] == ["no time stated"] * 2
    assert all(case.measured_s is None for case in cases if not case.predicted_s)


def test_products_of_inputs_are_no_part_of_a_recurrent_layer():
    """The source counts FLOPs of the states alone: 2 x batch x width x gates, each step and pass."""
    for kind, gates in (("lstm", 4), ("gru", 3), ("vanilla", 1)):
        passes = recurrent_passes(kind, 256, 10, "fp32")
        each = 2 * 8 * 10 * 256 * gates * 256
        flops = {name: sum(operation.flops.at(8) for operation in work) for name, work in passes.items()}
        assert flops == pytest.approx({"forward": each, "inputs": 0.9 * each, "weights": each})


@pytest.mark.parametrize(
    ("sheet", "section", "reason"),
    [
        ("NV_P100,train,Results - Psuedo FP16", "W", "values in 16 bit by 32-bit arithmetic"),
        ("NV_TitanXp,inference,Results - Mixed Precision", "W (input - time)", "values in 8 bit"),
        ("NV_M40,train,Results - FP16 ip, Mixed math", "W", "no fp16"),
        ("NV_M40,train,Results - FP32", "All-Reduce", "an all-reduce whose links are not stated"),
        ("IA_KNL7250,train,Results - FP32", "W", "unknown device"),
    ],
)
def test_what_is_not_modelled_says_so(tmp_path, sheet, section, reason):
    device, mode, precision = sheet.split(",", 2)
    table = rows_of(tmp_path, f'{device},{mode},"{precision}",{section},{IMAGE.format(1)},Total Time,0.9')
    (case,) = kernel_cases(table)
    assert reason in case.reason
