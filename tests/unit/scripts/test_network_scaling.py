"""Published speeds of networks: which rows others contradict, and what N devices do over N times one."""

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from accuracy_networks import scaling


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
