"""Traced modules: costs by formulas in the form of measured ones, and the steps that follow."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foreshard.api import load_cluster, plan, plan_trace, predict, predict_traced
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.training import training_constants
from foreshard.cost.elementwise import stream_s
from foreshard.cost.operations import operations_s
from foreshard.errors import SpecError
from foreshard.planner.measured.places import Places
from foreshard.planner.measured.prices import priced
from foreshard.predict.measured import traced_step
from foreshard.predict.measured.engine import predict_measured
from foreshard.predict.measured.traced import BUCKET_BYTES, device_operations_s, traced_costs
from foreshard.predict.tasks.host import LAYER_OPERATIONS, operation_launch_s
from foreshard.predict.traits import sm_cycles_per_s
from foreshard.profile.networks.catalog import network
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.traced_module import Growth, Operation


@pytest.fixture(scope="module")
def resnet():
    return trace_module(*network("resnet50"), precision="fp16", name="resnet50")


def plan_of(module, devices, **degrees):
    return plan_from_degrees(
        len(module.layers) - 2,
        devices,
        seq_len=1,
        precision=module.precision,
        framework="ddp",
        **{"zero": 0, "micro_batch": 64} | degrees,
    )


def step_of(module, cluster, **degrees):
    found = load_cluster(cluster)
    return predict_traced(module, found, plan_of(module, found.num_devices, **degrees))


def issue_of(device):
    wide = kernel_model(device, "fp32")
    return {
        "issued_per_s": 128 * sm_cycles_per_s(device),
        "processors": device.num_sms,
        "outside": wide,
        "cudnn_9": device.arch in ("ampere", "ada", "hopper", "blackwell"),
    }


def test_one_device_takes_the_sum_of_its_operations(resnet):
    device = resolve_device("a100-sxm-40gb")
    kernels = kernel_model(device, "fp16")
    work_s = sum(
        operations_s(operations, 64, kernels, device.peak("fp32"), **issue_of(device)).sum()
        for layer in resnet.layers
        for operations in (layer.forward, layer.backward)
        if operations
    )
    made = step_of(resnet, "1x1xa100-sxm-40gb")
    # what is not an operation of the trace: casting 25.6 million weights to 16 bit
    cast_s = 6 * resnet.num_params / (kernels.stream_eff * kernels.memory_bytes_per_s)
    assert made.time_breakdown_s["compute"] == pytest.approx(work_s + cast_s, rel=0.01)
    assert sum(made.time_breakdown_s.values()) == pytest.approx(made.step_time_s, rel=1e-9)
    assert made.mfu == pytest.approx(resnet.flops(64) / (made.step_time_s * device.peak("fp16")))


@pytest.mark.parametrize("change", [{"memory_bytes_per_s": 2.0}, {"peak_flops_per_s": 2.0}])
def test_a_faster_device_is_never_slower(resnet, change):
    device = resolve_device("a100-sxm-40gb")
    name, factor = next(iter(change.items()))
    value = getattr(device, name)
    faster = (
        {key: rate * factor for key, rate in value.items()}
        if isinstance(value, dict)
        else value * factor
        if not hasattr(value, "items")
        else {key: rate * factor for key, rate in value.items()}
    )
    seconds = [
        sum(
            cost.forward_s[1] + cost.backward_s[1]
            for cost in traced_costs(resnet, [d], micro_batches=[32]).layers
        )
        for d in (device, replace(device, **{name: faster}))
    ]
    assert seconds[1] < seconds[0]


def test_costs_are_exact_at_the_micro_batch_that_is_planned(resnet):
    device = resolve_device("v100-sxm-16gb")
    for size in (1, 7, 128):
        costs = traced_costs(resnet, [device], micro_batches=[size])
        kernels = kernel_model(device, "fp16")
        exact = sum(
            operations_s(layer.backward, size, kernels, device.peak("fp32"), **issue_of(device)).sum()
            for layer in resnet.layers
            if layer.backward
        )
        line = sum(cost.backward_s[0] + cost.backward_s[1] * size for cost in costs.layers)
        assert line == pytest.approx(exact, rel=1e-9)


def test_gradients_hide_behind_the_backward_but_for_the_last_bucket(resnet):
    cluster = load_cluster("2x8xa100-sxm-40gb@10Gb/s")
    plan = plan_of(resnet, 16)
    costs = traced_costs(resnet, [n.device for n in cluster.nodes], micro_batches=[64])
    hidden, after = (
        predict_measured(replace(costs, bucket_bytes=size), cluster, plan) for size in (BUCKET_BYTES, 0.0)
    )
    gradients = resnet.num_params * 2.0  # of weights in 16 bit
    ring_s = float(costs.ring_s(cluster, range(16), gradients))
    (copy_s,) = costs.copied_s.values()
    assert after.time_breakdown_s["data_comm"] == pytest.approx(ring_s + 2 * copy_s * gradients, rel=1e-6)
    assert hidden.step_time_s < after.step_time_s
    assert hidden.time_breakdown_s["data_comm"] > 0


@pytest.mark.parametrize("zero", [0, 3])
def test_transfers_beside_work_slow_it_by_their_share(resnet, zero):
    """A step is longer by the copies, and by at most so much of the lesser of transfers and work."""
    cluster = load_cluster("1x8xa100-sxm-40gb")
    costs = traced_costs(resnet, [nodes.device for nodes in cluster.nodes], micro_batches=[64])
    plan = plan_of(resnet, 8, zero=zero)
    steps = [
        predict_measured(replace(costs, contention=slowed, copied_s=copied), cluster, plan).step_time_s
        for slowed in (0.0, costs.contention)
        for copied in ({}, costs.copied_s)
    ]
    gradients = resnet.num_params * 2.0
    (copy_s,) = costs.copied_s.values()
    copies = (2 if zero == 0 else 3) * gradients * copy_s
    sizes = [costs.moved_share * layer.parameter_bytes for layer in costs.layers]
    gathers_s = sum(costs.gather_s(cluster, range(8), size) for size in sizes if size)
    moved_s = 3 * gathers_s if zero else float(costs.ring_s(cluster, range(8), gradients))
    assert steps[1] - steps[0] == pytest.approx(copies, rel=0.1)
    assert 0.2 * costs.contention * moved_s < steps[2] - steps[0] < costs.contention * moved_s
    assert steps[3] - steps[2] == pytest.approx(steps[1] - steps[0], rel=0.1)


def test_two_layers_by_hand(resnet):
    """Buckets are summed in the order of the backward, one after another, each when its layers are done."""
    cluster = load_cluster("1x2xa100-sxm-40gb")
    short = replace(resnet, layers=(resnet.layers[4], resnet.layers[5], resnet.layers[6]), tied=())
    costs = traced_costs(short, [cluster.nodes[0].device], micro_batches=[64])
    costs = replace(costs, bucket_bytes=1.0, launch_s={}, copied_s={}, contention=0.0)
    made = predict_measured(costs, cluster, plan_of(short, 2))
    line = lambda cost, name: getattr(cost, name)[0] + 64 * getattr(cost, name)[1]  # noqa: E731
    now = sum(line(cost, "forward_s") for cost in costs.layers)
    ring_end = 0.0
    for cost in reversed(costs.layers):
        now += line(cost, "backward_s")
        ring_end = max(ring_end, now) + float(costs.ring_s(cluster, (0, 1), 0.5 * cost.parameter_bytes))
    optimizer_s = sum(cost.optimizer_s for cost in costs.layers)
    assert made.step_time_s == pytest.approx(max(now, ring_end) + optimizer_s, rel=1e-9)


def test_a_short_step_waits_for_the_launches_of_its_operations(resnet):
    device, constants = resolve_device("h100-sxm"), training_constants()
    forward_s, backward_s = operation_launch_s(constants, device)
    launches_s = sum(
        (operation.kind != "layout") * each_s
        for layer in resnet.layers
        for operations, each_s in ((layer.forward, forward_s), (layer.backward, backward_s))
        for operation in operations
    )
    tiny, large = (step_of(resnet, "1x1xh100-sxm", micro_batch=size) for size in (1, 512))
    work_s = tiny.time_breakdown_s["compute"]
    joined_s = (work_s**constants.host_sharpness + launches_s**constants.host_sharpness) ** (
        1 / constants.host_sharpness
    )
    assert work_s < 0.5 * launches_s
    assert work_s + tiny.time_breakdown_s["host"] == pytest.approx(joined_s, rel=1e-9)
    assert large.time_breakdown_s["host"] < 0.01 * large.step_time_s


def test_launches_stay_where_the_device_is_free(resnet):
    """The device's part of what they join to was cut at a time that launches divide by."""
    cluster = load_cluster("1x1xh100-sxm")
    plan = plan_of(resnet, 1, micro_batch=8)
    free, fast = (
        predict_traced(resnet, cluster, plan, speeds={"compute": faster}) for faster in (float("inf"), 1e6)
    )
    assert free.step_time_s == pytest.approx(fast.step_time_s, rel=1e-4)


def test_a_short_last_micro_batch_runs_a_recurrence_as_it_would_alone():
    """12 samples are no single kernel where 16 are: launches and work are those of each micro-batch."""

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = torch.nn.LSTM(1024, 1024, batch_first=True)

        def forward(self, words):
            return self.steps(words)[0]

    with torch.device("meta"):
        layers = torch.nn.Sequential(Recurrent(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 16))
        traced = trace_module(layers, torch.empty(1, 50, 1024), precision="fp16")
    alone, short, both = (
        step_of(traced, "1x1xh100-sxm", micro_batch=size, global_batch=batch).step_time_s
        for size, batch in ((16, 16), (12, 12), (16, 28))
    )
    assert alone < 0.5 * short
    assert both > short


@pytest.mark.parametrize(
    ("stated", "size"),
    [
        ({"global_batch": 256}, 64),
        ({"global_batch": 256, "micro_batch": 8}, 8),
        ({"global_batch": 256, "dp": 2, "pp": 2}, 1),
        ({}, 1),
    ],
)
def test_a_device_takes_its_share_of_a_batch_at_once(resnet, stated, size):
    made = traced_step.plan_of(resnet, load_cluster("1x4xh100-sxm"), stated)
    (group,) = made.groups
    assert group.micro_batch == size * group.stages[0].inner_dp


def test_every_stage_of_a_pipeline_waits_for_its_own_launches(resnet):
    piped = step_of(resnet, "1x4xh100-sxm", pp=4, dp=1, micro_batch=1, global_batch=16)
    alone = step_of(resnet, "1x1xh100-sxm", micro_batch=1, global_batch=16)
    assert piped.time_breakdown_s["host"] < 0.5 * alone.time_breakdown_s["host"]
    again = step_of(resnet, "1x1xh100-sxm", micro_batch=1, recompute="full")
    once = step_of(resnet, "1x1xh100-sxm", micro_batch=1)
    assert again.step_time_s > 1.2 * once.step_time_s  # the launches of the forward run again, too


def test_compiled_steps_and_datasheets_have_no_launches(resnet):
    for device in ("tpu-v4", "trainium-2"):
        narrow = replace(resnet, precision="bf16")
        assert step_of(narrow, f"1x1x{device}", micro_batch=1).time_breakdown_s["host"] == 0.0
    cluster = load_cluster("1x1xh100-sxm")
    made = predict_traced(resnet, cluster, plan_of(resnet, 1, micro_batch=1), fidelity="datasheet")
    assert made.time_breakdown_s["host"] == 0.0


def test_launches_are_counted_in_layers_of_torch():
    """The host's seconds are of a layer: the operations that torch's own runs."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    one, two = (
        trace_module(torch.nn.TransformerEncoder(layer, count), torch.empty(1, 16, 64)) for count in (1, 2)
    )
    counts = [
        tuple(sum(len(getattr(layer, name)) for layer in module.layers) for name in ("forward", "backward"))
        for module in (one, two)
    ]
    assert tuple(b - a for a, b in zip(*counts, strict=True)) == LAYER_OPERATIONS


def test_a_library_launches_the_steps_of_a_recurrence_itself():
    """A step more is two kernels forward and three backward, at 13 us: no operation of torch's."""

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.LSTM(64, 64, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    launched = []
    for steps in (10, 20):
        module = trace_module(First(), torch.empty(1, steps, 64), precision="fp16")
        costs = traced_costs(module, [resolve_device("h100-sxm")], micro_batches=[8])
        launched.append(np.sum(costs.launch_s["h100-sxm"]))
    assert launched[1] - launched[0] == pytest.approx(10 * 5 * 13e-6)


def test_the_planner_counts_launches_as_the_prediction_does(resnet):
    cluster = load_cluster("1x1xh100-sxm")
    costs = traced_costs(resnet, [cluster.nodes[0].device], micro_batches=[2])
    problem = priced(costs, Places(cluster), [2], 2)
    whole = problem.time_s.max()  # the longest interval: all layers
    made = predict_measured(costs, cluster, plan_of(resnet, 1, micro_batch=2))
    busy_s = made.step_time_s - made.time_breakdown_s["optimizer"]
    assert whole == pytest.approx(busy_s, rel=1e-9)


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_of_one_part_share_gradients_and_the_planner_counts_their_sums(zero):
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    module = trace_module(torch.nn.TransformerEncoder(layer, 2), torch.empty(1, 64, 256), degrees=(2,))
    cluster, slow = load_cluster("1x4xh100-sxm"), load_cluster("2x2xh100-sxm@1Gb/s")
    plan = plan_of(module, 4, tp=2, sp=False, zero=zero, micro_batch=8)
    costs = traced_costs(module, [cluster.nodes[0].device], micro_batches=[8, 16])
    part = module.parts[2]
    step, far = (predict_measured(costs, where, plan) for where in (cluster, slow))
    assert step.memory.breakdown_bytes["optimizer"] == sum(8 * own.parameters for own in part.layers) / (
        2 if zero else 1
    )
    assert far.time_breakdown_s["tensor_comm"] == pytest.approx(step.time_breakdown_s["tensor_comm"])
    if not zero:  # each part's gradients are summed by a pair of ranks, both pairs at once
        after = predict_measured(replace(costs, bucket_bytes=0.0), slow, plan).time_breakdown_s["data_comm"]
        each_s = costs.ring_s(slow, (0, 2), sum(2.0 * own.parameters for own in part.layers))
        assert after == pytest.approx(float(each_s), rel=5e-3)
    two = load_cluster("1x2xh100-sxm")
    problem = priced(costs, Places(two), [8], 8, 2, rules=("none", "full"))
    for rule in ("none", "full"):
        alone = plan_of(module, 2, tp=2, sp=False, micro_batch=8, global_batch=8, recompute=rule)
        made = predict_measured(costs, two, alone)
        option = problem.names.index((0, 8, 2, rule))
        whole = problem.time_s[option, problem.types[0, len(costs.layers)]]
        assert whole == pytest.approx(made.step_time_s - made.time_breakdown_s["optimizer"], rel=1e-9)


def test_a_slower_network_never_helps_and_pipelines_are_priced(resnet):
    steps = [step_of(resnet, f"2x4xv100-sxm-16gb@{rate}Gb/s").step_time_s for rate in (5, 10, 50, 100)]
    assert steps == sorted(steps, reverse=True)
    piped = step_of(resnet, "1x4xv100-sxm-16gb", pp=4, dp=1, micro_batch=16, global_batch=128)
    assert piped.time_breakdown_s["bubble"] > 0
    assert len(piped.memory.per_stage_peak_bytes[0]) == 4


@pytest.mark.parametrize(("optimizer", "held"), [("adamw", 5), ("sgd", 3)])
def test_the_step_of_adamw_holds_roots_of_all_second_moments(optimizer, held):
    """Weights, gradients, moments and their roots, 4 bytes each; of SGD one moment and no root."""
    rest = [layer for _ in range(3) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    rows = torch.nn.Sequential(torch.nn.Embedding(4096, 256), *rest)
    traced = trace_module(rows, torch.zeros(1, 4, dtype=torch.long), precision="fp32")
    step = step_of(traced, "1x1xa100-sxm-40gb", micro_batch=1, optimizer=optimizer)
    assert step.memory.peak_bytes == pytest.approx(held * 4 * traced.num_params, rel=0.01)


def test_recomputation_trades_memory_for_time(resnet):
    kept, again = (step_of(resnet, "1x1xv100-sxm-16gb", recompute=rule) for rule in ("none", "full"))
    assert again.memory.peak_bytes < 0.6 * kept.memory.peak_bytes
    assert again.time_breakdown_s["recompute"] > 0 and again.step_time_s > kept.step_time_s


def test_the_planner_gives_faster_devices_more_samples(resnet):
    cluster = load_cluster("1x1xa100-sxm-40gb+1x1xv100-sxm-16gb")
    result = plan_trace(resnet, cluster, {"global_batch": 96, "budget_s": 3})
    best = result.plans[0]
    shares = {group.stages[0].ranks[0]: group.share for group in best.plan.groups}
    assert shares[0] > shares[1] > 0
    assert result.lower_bound_step_time_s <= best.prediction.step_time_s
    # the search is on lines between micro-batches; what it prints is what a prediction of the plan says
    again = [predict_traced(resnet, cluster, found.plan).step_time_s for found in result.plans]
    assert again == pytest.approx([found.prediction.step_time_s for found in result.plans], rel=1e-9)
    assert again == sorted(again)


def test_a_plan_in_another_precision_than_the_trace_is_refused(resnet):
    plan = replace(plan_of(resnet, 1), precision="fp32")
    with pytest.raises(SpecError, match="a plan in fp32 of a module traced in fp16"):
        predict_traced(resnet, load_cluster("1x1xrtx-3090"), plan)


def test_a_precision_that_a_device_lacks_is_refused(resnet):
    bf16 = replace(resnet, precision="bf16")
    with pytest.raises(SpecError, match="has no bf16"):
        traced_costs(bf16, [resolve_device("v100-sxm-16gb")], micro_batches=[8])


@pytest.mark.parametrize(
    ("cluster", "precision"), [("1x4xv100", "fp16"), ("1xa100+1xv100", "fp16"), ("1xa100", "bf16")]
)
def test_an_unstated_precision_is_one_that_all_devices_have(cluster, precision, tmp_path):
    factory = tmp_path / "net.py"
    factory.write_text("import torch\ndef net():\n    return torch.nn.Linear(8, 8), torch.empty(1, 8)\n")
    made = predict(f"{factory}:net", cluster, micro_batch=8)
    assert made.plan.precision == precision
    assert any("not stated (--dtype)" in text for text in made.assumptions) == (precision != "bf16")
    found = plan(f"{factory}:net", cluster, global_batch=64, budget_s=1)
    assert found.plans[0].plan.precision == precision


def test_a_prediction_says_what_it_assumed_of_the_network(resnet):
    cluster = load_cluster("2x4xrtx-3090")
    assert any("NIC 100 Gb/s" in text for text in cluster.assumptions)
    assert {*cluster.assumptions} <= {*step_of(resnet, "2x4xrtx-3090").assumptions}


def test_intervals_come_from_errors_of_networks_that_no_constant_saw(resnet):
    made = step_of(resnet, "1x1xa100-sxm-40gb")
    low, high = made.step_time_interval_s
    assert low < made.step_time_s < high
    assert np.log(high / made.step_time_s) == pytest.approx(np.log(made.step_time_s / low))


def grouped_s(width, *, last=False, samples=8.0, flops=1e12, num_bytes=1e6):
    operation = Operation(
        name="convolution",
        kind="grouped",
        sizes=(Growth(width, 0.0), Growth(float(last), 0.0)),
        bytes=Growth(0.0, num_bytes),
        flops=Growth(0.0, flops),
    )
    device = resolve_device("rtx-3090")
    return float(operations_s([operation], samples, kernel_model(device, "fp16"), device.peak("fp32"))[0])


@pytest.mark.parametrize("last", [False, True])
def test_more_groups_never_take_fewer_seconds_for_a_flop(last):
    seconds = [grouped_s(width, last=last) for width in (2, 3, 8, 24, 64, 168, 1e4)]
    assert seconds == sorted(seconds, reverse=True)
    # nor fewer than what the matrix units need, however few the groups
    assert seconds[-1] > 8e12 / resolve_device("rtx-3090").peak("fp16")


def test_grouped_convolutions_grow_with_samples_and_with_channels_last():
    assert 0 < grouped_s(24, samples=4) < grouped_s(24, samples=5)
    assert grouped_s(24) < grouped_s(24, last=True)
    assert grouped_s(24, flops=1e6, num_bytes=1e9) == pytest.approx(
        float(stream_s(8e9, kernel_model(resolve_device("rtx-3090"), "fp16")))
    )


def test_a_depthwise_convolution_streams_its_image_for_every_row_of_the_filter():
    kernels = kernel_model(resolve_device("rtx-3090"), "fp16")
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 1), torch.nn.Conv2d(64, 64, 5, padding=2, groups=64, bias=False)
    )
    traced = trace_module(module, torch.empty(1, 3, 32, 32), precision="fp16")
    (found,) = [o for layer in traced.layers for o in layer.forward if o.kind == "depthwise"]
    moved = 2 * (2 * 16 * 64 * 32 * 32 + 64 * 25)
    assert operations_s([found], 16, kernels, 1e12)[0] == pytest.approx(float(stream_s(5 * moved, kernels)))


def norm_of(channels, side, *, precision="fp16", layout=torch.contiguous_format):
    network = torch.nn.Sequential(torch.nn.Conv2d(3, channels, 3, padding=1), torch.nn.BatchNorm2d(channels))
    traced = trace_module(
        network.to(memory_format=layout), torch.empty(1, 3, side, side), precision=precision, autocast=True
    )
    operations = [o for layer in traced.layers for o in (*layer.forward, *layer.backward)]
    return [o for o in operations if o.name.startswith("native_batch_norm")]


def norm_s(operations, samples, device):
    return operations_s(operations, samples, kernel_model(device, "fp16"), 1e12, **issue_of(device))


def test_a_batch_norm_of_few_channels_leaves_processors_idle():
    """Channels first, each is a block of threads; kernels of MobileNetV3 on an H100 (16 x 112 x 112)."""
    h100 = resolve_device("h100-sxm")
    few, as_many = norm_of(16, 112), norm_of(64, 112)
    assert norm_s(few, 512, h100) == pytest.approx([18.56e-3 / 4, 35.18e-3 / 4], rel=0.1)
    assert norm_s(few, 512, h100) == pytest.approx(norm_s(as_many, 512, h100))
    assert norm_s(norm_of(512, 112), 64, h100)[0] > 2.0 * norm_s(norm_of(128, 112), 64, h100)[0]
    streamed = operations_s(few, 512, kernel_model(h100, "fp16"), 1e12)
    assert (norm_s(norm_of(16, 112, layout=torch.channels_last), 512, h100) <= 1.01 * streamed).all()
    assert (
        norm_s(norm_of(16, 7), 64, h100) == operations_s(norm_of(16, 7), 64, kernel_model(h100, "fp16"), 1e12)
    ).all()


@pytest.mark.parametrize("channels", [16, 128, 200, 1024])
def test_a_batch_norm_never_gets_faster_with_samples(channels):
    for precision in ("fp16", "bf16"):
        found = norm_of(channels, 28, precision=precision)
        seconds = [norm_s(found, size, resolve_device("h100-sxm")) for size in (1, 16, 60, 64, 100, 256)]
        assert all((more >= less).all() for less, more in pairwise(seconds))


def test_instructions_bind_only_where_memory_is_fast():
    """A row of a norm takes so many instructions; where its bytes take longer, they take no time."""
    norms = {
        width: trace_module(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width)),
            torch.empty(1, 1000, width),
            precision="bf16",
        )
        for width in (96, 8192)
    }

    def norm_s(width, device, issued_per_s):
        (found,) = [
            o for layer in norms[width].layers for o in layer.forward if o.name == "native_layer_norm"
        ]
        kernels = kernel_model(device, "bf16")
        return found, float(operations_s([found], 64, kernels, 1e12, issued_per_s=issued_per_s)[0])

    device = resolve_device("h200-sxm")
    rate = 128 * device.num_sms * device.clock_hz
    narrow, seconds = norm_s(96, device, rate)
    assert seconds == pytest.approx(narrow.issued.at(64) / rate)
    assert seconds > 4 * norm_s(96, device, 0.0)[1]
    assert norm_s(8192, device, rate) == norm_s(8192, device, 0.0)


def sharded(module, cluster, *, share=1.0, **degrees):
    """Return costs and prediction with ZeRO 3; `share` of the bytes of parameters is moved."""
    plan = plan_of(module, cluster.num_devices, **{"zero": 3} | degrees)
    sizes = [degrees.get("micro_batch", 64)]
    costs = traced_costs(module, [nodes.device for nodes in cluster.nodes], micro_batches=sizes)
    costs = replace(costs, moved_share=share, launch_s={}, copied_s={}, contention=0.0)
    return costs, predict_measured(costs, cluster, plan)


def test_zero_3_without_bytes_to_move_is_compute_and_a_part_of_the_optimizer(resnet):
    _, made = sharded(resnet, load_cluster("1x4xa100-sxm-40gb"), share=0.0)
    alone = step_of(resnet, "1x1xa100-sxm-40gb")
    assert made.time_breakdown_s["data_comm"] == 0.0
    assert made.time_breakdown_s["compute"] == pytest.approx(alone.time_breakdown_s["compute"], rel=1e-9)
    assert made.time_breakdown_s["optimizer"] == pytest.approx(alone.time_breakdown_s["optimizer"] / 4)
    assert sum(made.time_breakdown_s.values()) == pytest.approx(made.step_time_s, rel=1e-9)


def test_zero_3_by_hand(resnet):
    """One link and one device, told apart: a gather may be one layer ahead, a gradient leaves when made."""
    cluster = load_cluster("2x1xa100-sxm-40gb@40Gb/s")
    short = replace(resnet, layers=resnet.layers[-6:-1], tied=())
    costs, made = sharded(short, cluster, share=0.5, micro_batch=32, global_batch=128)
    moved_s = [costs.gather_s(cluster, (0, 1), 0.5 * c.parameter_bytes) for c in costs.layers]
    line = lambda cost, name: getattr(cost, name)[0] + 32 * getattr(cost, name)[1]  # noqa: E731
    chain = list(range(len(costs.layers)))
    visits = 2 * ([(i, "forward_s") for i in chain] + [(i, "backward_s") for i in reversed(chain)])
    link = device = 0.0
    there, ends = [], []
    for layer, _ in visits[:2]:
        link += moved_s[layer]
        there.append(link)
    for place, (layer, name) in enumerate(visits):
        device = max(device, there[place]) + line(costs.layers[layer], name)
        ends.append(device)
        if place + 2 < len(visits):
            if ahead_s := moved_s[visits[place + 2][0]]:
                link = max(link, device) + ahead_s
            there.append(link if ahead_s else 0.0)  # a layer without parameters waits for nothing
        if name == "backward_s" and moved_s[layer]:
            link = max(link, device) + moved_s[layer]
    optimizer_s = sum(cost.optimizer_s for cost in costs.layers) / 2
    assert made.step_time_s == pytest.approx(max(link, device) + optimizer_s, rel=1e-9)
    assert made.time_breakdown_s["data_comm"] > 0


def test_zero_3_trades_memory_for_messages(resnet):
    peaks, steps = [], []
    for nodes in (1, 2, 4):
        _, made = sharded(resnet, load_cluster(f"{nodes}x1xv100-sxm-16gb@10Gb/s"))
        peaks.append(made.memory.breakdown_bytes["parameters"] + made.memory.breakdown_bytes["gradients"])
        steps.append(made.step_time_s)
    assert peaks == sorted(peaks, reverse=True)
    slower = sharded(resnet, load_cluster("2x1xv100-sxm-16gb@5Gb/s"))[1]
    assert slower.step_time_s > steps[1] > steps[0]


def test_zero_3_of_a_pipeline_is_refused(resnet):
    with pytest.raises(SpecError, match="beside other stages") as caught:
        step_of(resnet, "1x4xv100-sxm-16gb", zero=3, pp=2, dp=2, micro_batch=16, global_batch=128)
    assert caught.value.fix


def test_products_of_experts_are_priced_as_in_a_transformer():
    from foreshard.cost.grouped import grouped_gemm_s

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Parameter(torch.zeros(4, 256, 512, dtype=torch.bfloat16))
            self.register_buffer("ends", torch.arange(64, 257, 64, dtype=torch.int32))

        def forward(self, x):
            return torch._grouped_mm(x.flatten(0, 1), self.mix, offs=self.ends).relu()

    traced = trace_module(Experts(), torch.empty(1, 256, 256), precision="bf16")
    found = [o for layer in traced.layers for o in (*layer.forward, *layer.backward) if o.kind == "experts"]
    kernels = kernel_model(resolve_device("h100-sxm"), "bf16")
    seconds = operations_s(found, 2, kernels, 1e12)
    # forward: rows of each expert; backward: the gradient of its weights, summed over those rows
    for made, (tokens, n, k) in zip(seconds, ((512, 512, 256), (1024, 512, 128)), strict=True):
        assert made == pytest.approx(float(grouped_gemm_s(tokens, 4, n, k, kernels)), rel=1e-9)


@pytest.fixture(scope="module")
def contrastive():
    """Every sample is compared with every other: rows of similarities go from layer to layer."""

    class Compare(torch.nn.Module):
        def forward(self, x):
            return x @ x.T

    layers = [torch.nn.Linear(256, 256), torch.nn.Linear(256, 256), Compare(), torch.nn.Softmax(-1)]
    return trace_module(torch.nn.Sequential(*layers), torch.empty(1, 256), precision="fp32")


def kept_bytes(module, samples):
    """Return what grows with a micro-batch, by what is traced: the rest is counted beside activations."""
    return sum(layer.saved_bytes.at(samples) - layer.saved_bytes.at(0) for layer in module.layers)


@pytest.mark.parametrize("samples", [64, 32768])
def test_activations_are_those_of_the_micro_batch_with_all_its_pairs(contrastive, samples):
    made = step_of(contrastive, "1x1xa100-sxm-40gb", micro_batch=samples, optimizer="sgd")
    activations = made.memory.breakdown_bytes["activations"]
    assert activations == pytest.approx(kept_bytes(contrastive, samples), rel=1e-9)
    assert activations > 4 * samples**2, "the similarities, in 32 bit"
    assert made.mfu == pytest.approx(
        contrastive.flops(samples) / (made.step_time_s * resolve_device("a100-sxm-40gb").peak("fp32"))
    )
    asked = {"micro_batch": samples, "recompute": "full", "optimizer": "sgd"}
    again = step_of(contrastive, "1x1xa100-sxm-40gb", **asked)
    ends = sum(layer.boundary_bytes.at(samples) for layer in contrastive.layers)
    assert again.memory.breakdown_bytes["activations"] == pytest.approx(ends, rel=1e-9)


def test_pairs_of_samples_are_sent_and_counted_by_the_planner(contrastive):
    """A cut behind the similarities sends all of them; stages have room for what they keep of them."""
    cluster, size = load_cluster("1x2xa100-sxm-40gb"), 32768
    device = cluster.nodes[0].device
    costs = traced_costs(contrastive, [device], micro_batches=[size])
    linear = tuple(replace(c, boundary_bytes_per_pair=0.0) for c in costs.layers)
    plan = plan_of(contrastive, 2, pp=2, dp=1, micro_batch=size, global_batch=size)
    group = plan.groups[0]
    cut = [replace(s, layers=(span,)) for s, span in zip(group.stages, ((0, 3), (3, 5)), strict=True)]
    plan = replace(plan, groups=(replace(group, stages=tuple(cut)),))
    whole, alone = (
        predict_measured(replace(costs, layers=layers, tables={device.name: layers}), cluster, plan)
        for layers in (costs.layers, linear)
    )
    message_s = [float(costs.message_s(cluster, 0, 1, num_bytes)) for num_bytes in (4.0 * size**2, 0.0)]
    # one micro-batch: nothing is beside its two messages
    assert whole.step_time_s - alone.step_time_s == pytest.approx(2 * (message_s[0] - message_s[1]), rel=1e-6)
    problem = priced(costs, Places(cluster), (size,), 2 * size)
    own = [layer.parameter_bytes * 2 + layer.frozen_bytes + layer.state_bytes for layer in costs.layers]
    later, beside = 0.0, 0.0  # what a backward makes on its way
    for layer in reversed(contrastive.layers):
        beside = max(beside, layer.beside_bytes.at(size) - later)
        later += layer.saved_bytes.at(size)
    room = (device.capacity_bytes - sum(own) - beside) // kept_bytes(contrastive, size)
    assert problem.max_in_flight[0, problem.types[0, len(costs.layers)]] == room


@pytest.mark.parametrize(
    ("side", "precision", "kept"),
    [(8, "fp16", (1, 1)), (14, "fp16", (0, 1)), (14, "tf32", (1, 1)), (7, "fp16", (0, 0))],
)
def test_filters_of_one_position_take_channels_first_where_positions_are_aligned(side, precision, kept):
    module = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 1), torch.nn.Conv2d(32, 32, 1))
    traced = trace_module(
        module, torch.empty(1, 16, side, side), precision=precision, autocast=precision == "fp16"
    )
    layouts = [o for layer in traced.layers for o in layer.forward if o.kind == "layout"]
    kernels = kernel_model(resolve_device("a100-sxm-80gb"), precision)
    seconds = [operations_s(layouts, 4, kernels, 1e12, cudnn_9=nine).sum() for nine in (False, True)]
    assert [took == 0.0 for took in seconds] == [bool(k) for k in kept]


def test_groups_run_apart_on_matrix_units_where_the_library_takes_them():
    """RegNetX-064 with channels last runs as fast as with channels first on an RTX 4090 (PyTorch 2.4)."""
    module = torch.nn.Conv2d(168, 168, 3, padding=1, groups=3, bias=False).to(
        memory_format=torch.channels_last
    )
    image = torch.empty(1, 168, 14, 14)
    traced = trace_module(module, image, precision="fp16", autocast=True, training=False)
    for device, faster in (("rtx-4090", True), ("a100-sxm-80gb", True), ("h100-sxm", False), ("t4", False)):
        new, old = (
            traced_costs(replace(traced, cudnn=release), [resolve_device(device)], micro_batches=[256])
            .layers[0]
            .forward_s[1]
            for release in (9, 8)
        )
        assert (2.0 * new < old) if faster else new == old


@pytest.mark.parametrize(("device", "precision"), [("v100-sxm-16gb", "fp32"), ("rtx-3090", "tf32")])
def test_a_convolution_reaches_no_more_of_the_peak_than_a_product(device, precision):
    """Outside the matrix units, or on those of a device where they are no faster (TF32 of an RTX 3090)."""
    found = resolve_device(device)
    spread = torch.nn.Conv2d(512, 512, 3, padding=2, dilation=2, bias=False)  # not by Winograd's algorithm
    traced = trace_module(torch.nn.Sequential(spread), torch.empty(1, 512, 28, 28), precision=precision)
    convolutions = tuple(o for layer in traced.layers for o in layer.forward if o.kind == "convolution")
    products = tuple(replace(one, kind="product", sizes=one.sizes[:4]) for one in convolutions)
    work = convolutions[0].flops.at(64) / found.peak("fp32")
    reached, of_product = (
        work / device_operations_s(kind, 64, device=found, precision=precision)[0]
        for kind in (convolutions, products)
    )
    assert 0.5 < reached <= 1.000001 * max(of_product, kernel_model(found, "fp32").gemm_eff) < 0.98


@pytest.mark.parametrize("last", [False, True])
def test_a_prediction_says_that_the_layout_of_the_module_decides(last):
    module, image = network("resnet18")
    if last:
        module = module.to(memory_format=torch.channels_last)
    traced = trace_module(module, image, precision="fp16", autocast=True)
    said = [text for text in step_of(traced, "1x1xa100-sxm-40gb").assumptions if "channels first" in text]
    assert len(said) == (not last)
    encoder = trace_module(torch.nn.Linear(8, 8), torch.empty(1, 8), precision="fp16")
    costs = traced_costs(encoder, [resolve_device("a100-sxm-40gb")], micro_batches=[8])
    assert not any("channels" in note for note in costs.notes)
