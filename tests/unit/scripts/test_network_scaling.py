"""Published speeds of networks: which rows others contradict, and what N devices do over N times one."""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from accuracy_networks import Measured, examples, lambda_bench, mlperf, plausible, scaling
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


def row(speed, *, precision="fp16", devices=1, network="ssd300", device="v100-sxm-16gb"):
    return Measured(
        source="Lambda",
        network=network,
        device=device,
        precision=precision,
        layout="nchw",
        num_devices=devices,
        batch=8,
        side=None,
        samples_per_s=speed,
    )


def test_rows_that_others_contradict_are_left_out():
    fine = [row(200.0), row(390.0, devices=2), row(100.0, precision="fp32")]
    same = row(101.0, network="mask_rcnn")  # as fast as in 32 bit: it was none
    beside = row(100.0, network="mask_rcnn", precision="fp32")
    slow = [row(36.0, network="efficientnet_b4"), row(641.0, network="efficientnet_b4", devices=8)]
    apart = row(900.0, devices=16)
    skipped = Counter()
    assert list(plausible([*fine, same, beside, *slow, apart], skipped)) == [*fine, beside]
    assert sorted(skipped.values()) == [1, 1, 2]
    # the fastest of several hosts is what others are compared with
    hosts = [row(100.0), row(120.0), row(235.0, devices=2)]
    assert list(plausible(hosts, Counter())) == hosts


def test_speech_of_lambda_ran_in_32_bit_whatever_its_label_says():
    told = {"model": "waveglow", "gpu": "V100 16GB", "num_gpus": "2", "precision": "amp/fp16"}
    found = lambda_bench(told | {"global_batch": "16", "throughput": "80000"})
    assert (found.precision, found.batch, found.samples_per_s) == ("fp32", 8, 10.0)
    assert (found.network, found.optimizer) == ("waveglow", "adam")
    found = lambda_bench(told | {"model": "ssd", "global_batch": "192", "throughput": "440"})
    assert (found.network, found.precision, found.optimizer) == ("ssd300", "fp16", "sgd")


def test_batches_of_deep_learning_examples_are_those_of_its_commands():
    told = {"framework": "PyTorch", "unit": "img/s", "model": "efficientnet", "num_gpus": "8"}
    told |= {
        "num_nodes": "",
        "seq_or_variant": "Model=efficientnet-b4",
        "throughput": "1",
        "batch_per_gpu": "",
    }
    found = [
        examples(told | {"gpu_model": model, "precision": precision})
        for model, precision in (("A100", "mixed"), ("A100", "tf32"), ("V100 16GB", "fp32"))
    ]
    assert [(one.batch, one.side, one.layout) for one in found] == [
        (128, 380, "nhwc"),
        (64, 380, "nchw"),
        (16, 380, "nchw"),
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


def of_mlperf(**changed):
    row = {
        "round": "v3.1",
        "benchmark": "ssd",
        "num_accelerators": "8",
        "accelerator": "NVIDIA H100-SXM5-80GB (700W)",
        "nodes": "1",
        "global_batch": "256",
        "tracked_throughput_median": "285.9",
    }
    return mlperf(row | changed)


def test_images_of_retinanet_are_logged_of_one_device():
    """A run of 8 took 2,180 s, 4.3 passes over the 1,170,301 images: 2,287 a second, not 286."""
    found = of_mlperf()
    assert (found.network, found.device, found.batch) == ("retinanet", "h100-sxm", 32)
    assert found.samples_per_s == 8 * 285.9
    assert of_mlperf(benchmark="unet3d", global_batch="56").samples_per_s == 285.9


@pytest.mark.parametrize(
    "changed",
    [{"round": "v1.0"}, {"nodes": "2"}, {"tracked_throughput_median": ""}, {"benchmark": "rnnt"}],
)
def test_runs_of_mlperf_are_of_networks_that_are_known_on_one_node(changed):
    """The first round's `ssd` is another network."""
    assert of_mlperf(**changed) is None
