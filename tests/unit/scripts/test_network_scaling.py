"""Scaling efficiency of classic networks: what N devices do over N times one, whatever one does."""

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from accuracy_networks import scaling
from network_runs import dle_batch, suspects


def test_scaling_is_compared_with_one_device_of_the_same_case():
    bias = math.log(1.3)  # of the case as a whole: no error of scaling
    found = {
        ("Lambda", "resnet50", "a", "fp16", "nchw", 1): [bias, bias - 0.1, bias + 0.1],
        ("Lambda", "resnet50", "a", "fp16", "nchw", 8): [bias + math.log(1.05)],
        ("DLE", "resnet50", "b", "fp16", "nchw", 1): [0.0],
        ("DLE", "resnet50", "b", "fp16", "nchw", 2): [math.log(0.9)],
        ("DLE", "resnet50", "alone", "fp16", "nchw", 8): [0.5],  # nothing to compare with
    }
    lines = scaling(found).splitlines()[2:]
    assert lines == [
        "| DLE | 1 | 10.0% | -10.0% |",
        "| Lambda | 1 | 5.0% | +5.0% |",
        "| all | 2 | 7.5% | -2.5% |",
    ]


def test_more_speed_than_devices_is_suspect_at_the_same_batch():
    rows = [
        ("a", 1, 32, 100.0),
        ("a", 1, 32, 110.0),  # one of two: the median is 105
        ("a", 8, 32, 8 * 105.0 * 1.04),
        ("a", 8, 32, 8 * 105.0 * 1.06),
        ("a", 8, 64, 8 * 105.0 * 1.5),  # another batch of a device
        ("b", 8, 32, 1e9),  # nothing to compare with
    ]
    assert suspects(rows) == {rows[3]}


@pytest.mark.parametrize(
    ("precision", "batch", "columns", "expected"),
    [
        ("tf32", "128 and 256;8192 and 4096", "Accumulation steps (TF32 and FP16)=64 and 16;x=1", (128, 64)),
        ("mixed", "128 and 256;8192 and 4096", "Accumulation steps (TF32 and FP16)=64 and 16;x=1", (256, 16)),
        ("mixed", "8 and 16", "Throughput speedup=1.79", (16, 1)),
        ("fp32", "32", "", (32, 1)),
    ],
)
def test_a_row_takes_the_batch_of_its_own_precision(precision, batch, columns, expected):
    row = {"model": "BERT", "precision": precision, "batch_per_gpu": batch, "other_columns": columns}
    assert dle_batch(row) == expected
