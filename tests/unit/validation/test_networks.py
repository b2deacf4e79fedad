"""Published speeds of networks: what a row says, which rows others contradict, and what is predicted."""

from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from foreshard.errors import SpecError
from foreshard.profile.networks.language.hugging_face import DEPTHS
from foreshard.validation.collective_cases import TimedCase
from foreshard.validation.networks import predicted
from foreshard.validation.networks.cases import _case, _of_networks
from foreshard.validation.networks.plausible import contradicted, superlinear
from foreshard.validation.networks.recipes import dle_batch
from foreshard.validation.networks.run import NetworkRun
from foreshard.validation.networks.tables import examples, lambda_bench, run_of
from foreshard.validation.tables import read_table
from foreshard.validation.validate import table_outcomes


def run(speed, *, precision="fp16", devices=1, network="ssd300", batch=8):
    return NetworkRun(
        source="Lambda",
        network=network,
        device="v100-sxm-16gb",
        precision=precision,
        layout="nchw",
        num_devices=devices,
        batch=batch,
        samples_per_s=speed,
    )


def test_rows_that_others_contradict_are_left_out():
    fine = [run(200.0), run(390.0, devices=2), run(100.0, precision="fp32")]
    same = run(101.0, network="mask_rcnn")  # as fast as in 32 bit: it was none
    beside = run(100.0, network="mask_rcnn", precision="fp32")
    slow = [run(36.0, network="efficientnet_b4"), run(641.0, network="efficientnet_b4", devices=8)]
    odd = contradicted([*fine, same, beside, *slow])
    assert set(odd) == {same, *slow}
    assert odd[same] == "mask_rcnn on v100-sxm-16gb no faster in 16 bit than in 32"
    # a node more is no other speed of one, and no framework is another
    apart = replace(same, nodes=2, num_devices=2), replace(same, framework="TensorFlow2")
    assert set(contradicted([beside, *apart])) == set()
    # the fastest of several hosts is what others are compared with
    assert contradicted([run(100.0), run(120.0), run(235.0, devices=2)]) == {}


def test_speech_of_lambda_ran_in_32_bit_whatever_its_label_says():
    told = {"model": "waveglow", "gpu": "V100 16GB", "num_gpus": "2", "precision": "amp/fp16"}
    found = lambda_bench(told | {"global_batch": "16", "throughput": "80000"})
    assert (found.precision, found.batch, found.samples_per_s) == ("fp32", 8, 10.0)
    assert (found.network, found.optimizer) == ("waveglow", "adam")
    found = lambda_bench(told | {"model": "ssd", "global_batch": "192", "throughput": "440"})
    assert (found.network, found.precision, found.optimizer) == ("ssd300", "fp16", "sgd")


@pytest.mark.parametrize(
    ("model", "gpu", "expected"),
    [
        # no --multi_gpu, so that nothing is summed; NCCL_P2P_DISABLE=1 until H100-SXM
        ("transformerxlbase", "A100 80GB SXM4", ("fp16", False, True, 1 / 192)),
        ("gnmt", "H100 80GB SXM5", ("fp16", True, False, None)),
        ("ssd", "RTX 3090", ("fp16", True, True, 1.0)),
        # its commands for 80 GB and more leave --amp out
        ("ncf", "A100 80GB SXM4", ("tf32", True, True, 1.0)),
        ("ncf", "RTX A6000", ("fp16", True, True, 1.0)),
        # 101 steps in the seconds that 100 are counted over
        ("bert_large_squad", "V100 16GB", ("fp16", True, True, 1.01)),
    ],
)
def test_runs_of_lambda_are_as_its_script_made_them(model, gpu, expected):
    told = {"model": model, "gpu": gpu, "num_gpus": "8", "precision": "amp/fp16"}
    found = lambda_bench(told | {"global_batch": "128", "throughput": "1"})
    precision, sums, through_host, speed = expected
    assert (found.precision, found.sums, found.through_host) == (precision, sums, through_host)
    assert speed is None or found.samples_per_s == pytest.approx(speed)


def test_a_run_of_squad_may_end_before_the_steps_its_speed_is_counted_by():
    told = {"model": "bert_base_squad", "gpu": "A100 80GB SXM4", "num_gpus": "8", "precision": "amp/fp16"}
    found = lambda_bench(told | {"global_batch": "2560", "throughput": "100"})
    assert found.samples_per_s == pytest.approx(100 * 2 * 87_599 / 256_000, rel=1e-4)  # two epochs


def test_devices_that_sum_nothing_take_the_step_of_one_and_those_through_the_host_a_longer_one():
    steps = {
        (sums, host): predicted.predicted(
            replace(run(1.0, network="resnet50", devices=count), side=224, sums=sums, through_host=host)
        ).step_time_s
        for count, sums, host in ((4, True, False), (4, True, True), (4, False, True), (1, True, None))
    }
    assert steps[False, True] == steps[True, None] < steps[True, False] < steps[True, True]


def test_batches_that_lambda_leaves_out_are_those_of_its_commands():
    told = {"model": "resnet50", "num_gpus": "8", "global_batch": "", "throughput": "1"}
    narrow, wide = (
        lambda_bench(told | {"gpu": "H100 80GB SXM5", "precision": precision})
        for precision in ("amp/fp16", "fp32 code path (TF32)")
    )
    assert (narrow.batch, narrow.global_batch, wide.batch) == (1280, 8 * 1280, 640)
    assert lambda_bench(told | {"gpu": "H200 140GB SXM", "precision": "amp/fp16"}).batch == 2560
    with pytest.raises(SpecError, match="no batch size stated"):
        lambda_bench(told | {"gpu": "L40S", "precision": "amp/fp16"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("efficientnet,A100,,Model=efficientnet-b4,mixed", ("efficientnet_b4", "fp16", 128, "nhwc")),
        ("efficientnet,A100,,Model=efficientnet-b4,tf32", ("efficientnet_b4", "tf32", 64, "nchw")),
        ("efficientnet,V100 16GB,,Model=efficientnet-b4,fp32", ("efficientnet_b4", "fp32", 16, "nchw")),
        ("efficientnet,V100 32GB,,Model=efficientnet-b4,fp32", ("efficientnet_b4", "fp32", 32, "nchw")),
        (
            "efficientnet,A100,,Model=efficientnet-widese-b0,mixed",
            ("efficientnet_widese_b0", "fp16", 256, "nhwc"),
        ),
        ("resnet50v1.5,V100 32GB,,,fp32", ("resnet50", "fp32", 112, "nchw")),
        ("Efficientdet,A100,,,mixed", ("efficientdet_d0", "fp16", 150, "nchw")),
        ("Efficientdet,V100 32GB,,,fp32", ("efficientdet_d0", "fp32", 30, "nchw")),
        ("GPUNet,A100,192,Model=GPUNet-2,fp32", ("gpunet_2", "tf32", 192, "nchw")),
        ("GPUNet,V100,192,Model=GPUNet-0,mixed", ("gpunet_0", "fp16", 192, "nchw")),
        ("GPUNet,V100,192,Model=GPUNet-0,fp32", ("gpunet_0", "fp32", 192, "nchw")),
        ("maskrcnn_resnet50_fpn,V100 16GB,4,,mixed", ("mask_rcnn", "fp16", 4, "nhwc")),
    ],
)
def test_batches_of_deep_learning_examples_are_those_of_its_commands(line, expected):
    columns = ("model", "gpu_model", "batch_per_gpu", "seq_or_variant", "precision")
    told = {
        "framework": "PyTorch",
        "num_gpus": "8",
        "num_nodes": "",
        "throughput": "1",
        "unit": "imgs/second",
    }
    told |= {"section": "NVIDIA DGX (8x V100 32GB)"}
    found = examples(told | dict(zip(columns, line.split(","), strict=True)))
    assert (found.network, found.precision, found.batch, found.layout) == expected
    assert found.side is None  # that of the network


def test_more_speed_than_devices_is_suspect_at_the_same_batch():
    runs = [
        run(100.0),
        run(110.0),  # one of two: the median is 105
        run(8 * 105.0 * 1.04, devices=8),
        run(8 * 105.0 * 1.06, devices=8),
        run(8 * 105.0 * 1.5, devices=8, batch=64),  # another batch of a device
        run(1e9, devices=8, network="gnmt"),  # nothing to compare with
    ]
    assert set(superlinear(runs)) == {runs[3]}


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
    return run_of("mlperf", row | changed)


def test_images_of_retinanet_are_logged_of_one_device():
    """A run of 8 took 2,180 s, 4.3 passes over the 1,170,301 images: 2,287 a second, not 286."""
    found = of_mlperf()
    assert (found.network, found.device, found.batch) == ("retinanet", "h100-sxm", 32)
    assert found.samples_per_s == 8 * 285.9
    assert of_mlperf(benchmark="unet3d", global_batch="56").samples_per_s == 285.9


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"round": "v1.0"}, "SSD of the first rounds, of a size that is not in the catalog"),
        ({"nodes": "3"}, "devices that the nodes do not share evenly"),
        ({"num_accelerators": "16"}, "more than 8 devices on a node, what joins them not stated"),
        (
            {"nodes": "2", "num_accelerators": "16", "global_batch": "8"},
            "no whole number of samples on each device",
        ),
        ({"tracked_throughput_median": ""}, "no throughput logged"),
        ({"benchmark": "minigo"}, "minigo: no such network in the catalog"),
    ],
)
def test_runs_of_mlperf_that_are_not_predicted_say_why(changed, reason):
    """The first round's `ssd` is another network."""
    with pytest.raises(SpecError) as error:
        of_mlperf(**changed)
    assert error.value.what == reason


def test_devices_of_nodes_are_counted_as_a_table_counts_them():
    """DeepLearningExamples counts nodes, or all devices; a node of DGX-2 has 16."""
    told = {
        "framework": "PyTorch",
        "model": "BERT",
        "gpu_model": "V100",
        "precision": "fp32",
        "throughput": "1",
    }
    told |= {"batch_per_gpu": "64", "seq_or_variant": "Sequence length=128"}
    told |= {"other_columns": "Accumulation steps (FP32 and FP16)=2 and 1", "section": "DGX-1 (8x V100 32GB)"}
    counted = [
        examples(told | {"num_nodes": nodes, "num_gpus": gpus} | more)
        for nodes, gpus, more in (
            ("4", "8", {}),
            ("", "32", {}),
            ("2", "", {"section": "DGX-2 (16x V100 32GB)"}),
            ("", "16", {"section": "DGX-2 (16x V100 32GB)"}),
        )
    ]
    assert [(run.nodes, run.num_devices) for run in counted] == [(4, 32), (4, 32), (2, 32), (1, 16)]
    assert {(run.batch, run.accumulated, run.network) for run in counted} == {(32, 2, "bert_large_phase1")}
    assert of_mlperf(nodes="2", num_accelerators="16").nodes == 2


def test_another_framework_has_wide_intervals_that_say_so():
    ours = NetworkRun(
        source="timm",
        network="resnet18",
        device="rtx-3090",
        precision="fp16",
        layout="nchw",
        num_devices=1,
        batch=512,
        side=224,
        samples_per_s=1800.0,
    )
    here, there = (_case(run, None) for run in (ours, replace(ours, framework="TensorFlow2")))
    assert there.predicted_s == here.predicted_s
    assert (there.evidence, here.evidence) == ("framework not measured", "fitted")
    for level, (low, high) in here.intervals_s.items():
        assert there.intervals_s[level][0] < low and high < there.intervals_s[level][1]


def test_attention_of_timm_was_products_before_pytorch_2():
    row = {"model": "deit_tiny_patch16_224", "device": "RTX 3090", "precision": "amp", "layout": "nchw"}
    row |= {"mode": "eager", "batch_size": "256.0", "img_size": "224", "samples_per_sec": "100"}
    old, new = (run_of("timm-inference", row | {"framework": f"pytorch {one}"}) for one in ("1.13", "2.10"))
    assert (old.changed, new.changed) == ((("fused_attention", False),), ())
    assert (old.batch, old.training) == (256, False)


TIMM = "model,gpu,num_gpus,precision,layout,framework,batch_size,img_size,step_time_ms\n"
DLE = (
    "model,framework,gpu_model,section,num_gpus,num_nodes,batch_per_gpu,seq_or_variant,precision,throughput,"
    "unit,other_columns\n"
)
LAMBDA = "model,system,gpu,num_gpus,precision,framework,global_batch,throughput,unit\n"
MLPERF = (
    "round,submitter,system,benchmark,num_accelerators,accelerator,nodes,global_batch,run_time_s,"
    "tracked_throughput_median\n"
)


def outcomes(tmp_path, header, *lines):
    path = tmp_path / "networks.csv"
    path.write_text(header + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return table_outcomes(read_table(path), predictor=None)


@pytest.mark.parametrize(
    ("header", "line", "measured_s", "family"),
    [
        (TIMM, "resnet18,RTX 3090,1,amp,nchw,t,512,224,282.0", 0.282, "timm RTX 3090"),
        (
            DLE,
            "resnet50v1.5,PyTorch,V100 16GB,,8,,,,mixed,8322.0,img/s,",
            8 * 256 / 8322.0,
            "DeepLearningExamples V100 16GB",
        ),
        (
            LAMBDA,
            "resnet50,host,A100 80GB SXM4,2,amp/fp16,t,2560,2500.0,images/s",
            2560 / 2500.0,
            "Lambda A100 80GB SXM4",
        ),
        (
            MLPERF,
            "v3.1,X,host,resnet,8,NVIDIA H100-SXM5-80GB,1,3264,900,26000",
            3264 / 26000.0,
            "MLPerf resnet",
        ),
    ],
)
def test_a_row_of_each_table_is_predicted(tmp_path, header, line, measured_s, family):
    (row,) = outcomes(tmp_path, header, line)
    assert (row.status, row.reason, row.family) == ("ok", None, family)
    assert row.measured_s == pytest.approx(measured_s)
    assert measured_s / 2 < row.predicted_s < 2 * measured_s
    low, high = row.interval_s
    assert low < row.predicted_s < high
    assert (row.evidence == "kernels fused by submitters") is (header == MLPERF)
    if header == MLPERF:  # ResNet-50 computes 3 x 8.2 GFLOP an image, an H100 989 TFLOP/s in 16 bit
        assert low == pytest.approx(408 * 3 * 8.2e9 / 989e12, rel=0.05)


def test_rows_that_are_not_predicted_say_why(tmp_path):
    found = outcomes(
        tmp_path,
        DLE,
        "SIM,TensorFlow2,A100,,1,,,,tf32,1.0,samples/s,",
        "MoFlow,PyTorch,A100,,1,,512,,tf32,3499.35,see README,",
        "GPUNet,PyTorch,A100,,8,,192,Model=GPUNet-9,tf32,1.0,imgs/second,",
        "GPUNet,PyTorch,A100,,8,,128,Model=GPUNet-D1,fp32,755.0,imgs/second,",
        "resnet50v1.5,PyTorch,A100,,eight,,,,tf32,1.0,img/s,",
    )
    assert [row.status for row in found] == ["skipped"] * 5
    assert [row.reason for row in found] == [
        "TensorFlow2 runs other kernels, none of which were measured",
        "MoFlow: no such network in the catalog",
        "GPUNet-9: no such network in the catalog",
        "GPUNet-D1: a teacher's forward is timed with it",
        "a cell is not what its column says: invalid literal for int() with base 10: 'eight'",
    ]


def test_a_long_table_may_be_sampled_by_networks():
    read = [run(100.0, network=name) for name in ("d", "a", "c", "b", "a")] + [TimedCase(measured_s=None)]
    assert _of_networks(read, 4) == _of_networks(read, 9) == read
    two = _of_networks(read, 2)
    assert [one.network for one in two if isinstance(one, NetworkRun)] == ["a", "c", "a"]
    assert two[0] == TimedCase(
        measured_s=read[0].step_s, reason="not among the 2 networks that were asked for, of 4"
    )


def test_an_inference_is_a_forward_alone_unless_it_is_compiled(tmp_path):
    header = "model,device,precision,layout,framework,mode,batch_size,img_size,step_time_ms,samples_per_sec\n"
    row, fused, host = outcomes(
        tmp_path,
        header,
        "resnet18,RTX 4090,amp,nchw,t,eager,256,224,20.0,12800",
        "resnet18,RTX 4090,amp,nchw,t,dynamo,256,224,10.0,25600",
        "resnet18,CPU i9,fp32,nchw,t,dynamo,1,224,10.0,100",
    )
    assert (row.status, row.family, row.measured_s) == ("ok", "timm inference RTX 4090", 0.02)
    training = NetworkRun(
        source="timm",
        network="resnet18",
        device="rtx-4090",
        precision="fp16",
        layout="nchw",
        num_devices=1,
        batch=256,
        side=224,
        samples_per_s=1.0,
    )
    assert 2.5 < predicted.predicted(training).step_time_s / row.predicted_s < 5.0
    assert fused.reason.startswith("compiled: ") and host.reason.startswith("run on processors of a host")
    (row,) = outcomes(tmp_path, TIMM.replace("gpu,", ""), "resnet18,1,amp,nchw,t,256,224,10.0")
    assert (row.status, row.reason) == ("skipped", "no column gpu")


@pytest.mark.parametrize(
    ("header", "line", "reason"),
    [
        (TIMM, "resnet18,RTX 3090,1,amp,nchw,t,512,inf,282.0", "a cell is not what its column says"),
        (TIMM, "resnet18,RTX 3090,1,amp,nchw,t,512,224,0", "a cell is not what its column says"),
        (TIMM, "resnet18,RTX 3090,1,amp,nchw,t,512,99999999999999999999,282.0", "side: an image of"),
        (
            TIMM,
            "hf-hub:timm/resnet18,RTX 3090,1,amp,nchw,t,512,224,282.0",
            "'hf-hub:timm/resnet18' is no name",
        ),
        (DLE, "resnet50v1.5,PyTorch,H100,,8,,,,mixed,8322.0,img/s,", "no commands for 'H100', but for A100"),
        (DLE, "resnet50v1.5,PyTorch,A100,,8,,,,fp8,8322.0,img/s,", "no commands for 'fp8', but for mixed"),
        (DLE, "resnet50v1.5,PyTorch,A100,,8,0,,,mixed,8322.0,img/s,", "no whole number of samples"),
        (LAMBDA, "resnet50,host,A100 80GB SXM4,0,amp/fp16,t,2560,2500.0,images/s", "a cell is not what"),
        (LAMBDA, "resnet50,host,A100 80GB SXM4,2,amp/fp16,t,inf,2500.0,images/s", "a cell is not what"),
        (MLPERF, "v3.1,X,host,resnet,0,NVIDIA H100-SXM5-80GB,1,3264,900,26000", "a cell is not what"),
    ],
)
def test_cells_that_no_run_has_say_so(tmp_path, header, line, reason):
    (row,) = outcomes(tmp_path, header, line)
    assert row.status == "skipped" and row.reason.startswith(reason)


def test_a_row_that_no_device_runs_leaves_the_others(tmp_path):
    """V100s have no TF32: how fast they are in it is compared with nothing."""
    odd, fine = outcomes(
        tmp_path,
        DLE,
        "NCF,PyTorch,V100 32GB,DGX-1 (8x V100 32GB),8,,1048576,,tf32,1.0e8,samples/s,",
        "resnet50v1.5,PyTorch,V100 16GB,,8,,,,mixed,8322.0,img/s,",
    )
    assert (odd.status, fine.status) == ("skipped", "ok")
    assert "tf32" in odd.reason


def test_a_worker_that_ends_early_leaves_the_rest_to_one_process(monkeypatch):
    class Broken(nullcontext):
        def __init__(self, *_):
            super().__init__(self)

        def map(self, *_):
            raise BrokenProcessPool

    said = []
    monkeypatch.setattr(predicted, "ProcessPoolExecutor", Broken)
    monkeypatch.setattr(predicted, "_WORTH_WORKERS", 1)
    predicted.predict_ahead([run(77.0, batch=3)], predicted.Tracing(workers=2, told=said.append))
    assert said == ["a worker ended early: what is left is predicted by one process"]


LATENCY = "model,seq_len,batch,device,num_gpus,mode,option,measured_e2e_ms\n"


def test_a_forward_and_a_training_of_a_network_of_words_are_predicted(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(DEPTHS, "bert_large", 3)
    found = outcomes(
        tmp_path,
        LATENCY,
        "bert_large,96,64,Tesla_V100-PCIE-32GB,1,inf,,50.0",
        "bert_large,96,64,Tesla_V100-PCIE-32GB,1,train,,750.0",
        "bert_large,96,64,Tesla_V100-PCIE-32GB,1,inf,fusion,220.0",
        "switchxl4,64,64,Tesla_V100-PCIE-32GB,1,inf,,250.0",
        "bert_large,96,64,Tesla_V100-PCIE-32GB,4,train,xy4,250.0",
        "bert_large,99999999999999999999,64,Tesla_V100-PCIE-32GB,1,inf,,250.0",
        "bert_large,96,0,Tesla_V100-PCIE-32GB,1,inf,,250.0",
        "bert_large,96,64,Tesla_V100-PCIE-32GB,1,inf,,nan",
    )
    forward, training, *skipped = found
    assert (forward.status, training.status, forward.family) == ("ok", "ok", "NeuSight Tesla_V100-PCIE-32GB")
    assert forward.measured_s == pytest.approx(0.05)
    # 64 texts of 96 words by 3 layers of 12.6 million parameters: 0.46 TFLOP at 14.1 TFLOP/s
    assert 0.033 < forward.predicted_s < 0.08
    # training has a head of 30,522 words, 0.38 TFLOP more of each of the three products
    assert 3 * forward.predicted_s < training.predicted_s < 8 * forward.predicted_s
    assert [row.reason for row in skipped] == [
        "compiled: fused kernels are not those of the operations",
        "switchxl4: its definition is not published with the times",
        "option 'xy4' on 4 devices is none that NeuSight describes",
        "seq_len: a text of 99999999999999999999 words. A text has 1 to 1,000,000 words.",
        "no whole number of samples on each device",
        "no time stated",
    ]
