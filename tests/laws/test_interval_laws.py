"""Laws of intervals: nested by level, around the prediction, wider with distance and with weaker evidence."""

import math

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.shipped import shipped
from foreshard.predict.interval import (
    EVIDENCE,
    LEVELS,
    SURER,
    class_intervals,
    class_of,
    conformal_quantile,
    features_of,
    residual_classes,
    traced_intervals,
)
from foreshard.spec.degrees import plan_from_degrees

SHIPPED = residual_classes()
KINDS = {
    "dense": ("llama3-8b", "megatron-core", "bf16", {"compute": 1.0}),
    "narrow": ("llama3-8b", "megatron-core", "fp8", {"compute": 1.0}),
    "unfused": ("llama3-8b", "megatron-lm@2021", "bf16", {"compute": 1.0}),
    "host": ("llama3-8b", "megatron-core", "bf16", {"compute": 1.0, "host": 1.0}),
    "moe": ("mixtral-8x7b", "megatron-core", "bf16", {"compute": 1.0}),
}


def made(kind, evidence):
    name, framework, precision, parts = KINDS[kind]
    model = load_model(name)
    plan = plan_from_degrees(model.num_layers, 8, tp=8, seq_len=4096, precision=precision)
    names = class_of(model, plan, load_framework(framework), parts, evidence=evidence)
    return class_intervals(names, features_of(model, plan), 1.0, SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_levels_are_nested_around_the_prediction_near_and_far(name):
    near = SHIPPED["all"]["points"][0]
    for features in (near, tuple(value + 9.0 for value in near)):
        found = class_intervals([name], features, 3.0, SHIPPED)
        assert tuple(found) == LEVELS
        lows, highs = zip(*found.values(), strict=True)
        assert list(lows) == sorted(lows, reverse=True)
        assert list(highs) == sorted(highs)
        assert lows[0] <= 3.0 <= highs[0]


@pytest.mark.parametrize("name", [name for name, entry in SHIPPED.items() if entry["points"]])
@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_an_interval_widens_as_a_query_leaves_the_data(name, side):
    """In every feature, beyond the least and the largest that was measured: sizes, degrees and scale."""
    points = np.array(SHIPPED[name]["points"])
    at_data = class_intervals([name], points[0], 1.0, SHIPPED)[0.9]
    assert at_data[1] == pytest.approx(np.exp(SHIPPED[name]["bounds"]["0.9"][1]))
    for feature in range(points.shape[1]):
        edge = points[np.argmax(side * points[:, feature])]
        widths = []
        for beyond in (0.0, 1.0, 2.0, 4.0, 8.0):
            query = edge.copy()
            query[feature] += side * beyond
            widths.append(class_intervals([name], query, 1.0, SHIPPED)[0.9][1])
        assert widths == sorted(widths)
        assert widths[-1] > widths[0]


@pytest.mark.parametrize("kind", KINDS)
def test_weaker_evidence_never_narrows_an_interval(kind):
    for evidence, surer in SURER.items():
        for better in surer:
            outer, inner = made(kind, evidence), made(kind, better)
            for level in LEVELS:
                assert outer[level][0] <= inner[level][0] <= inner[level][1] <= outer[level][1]
    assert made(kind, "datasheet")[0.9][1] > made(kind, "fitted")[0.9][1]


def test_a_class_without_evidence_of_its_own_takes_that_of_a_datasheet():
    for evidence in EVIDENCE[1:]:
        model = load_model("mixtral-8x7b")
        plan = plan_from_degrees(model.num_layers, 8, tp=8, seq_len=4096)
        names = class_of(model, plan, load_framework("megatron-core"), {"compute": 1.0}, evidence=evidence)
        assert all(name.endswith((f":{evidence}", ":datasheet")) for name in names)
        assert names[-1] == "all:datasheet"
    assert "all:datasheet" in SHIPPED


def test_intervals_of_traced_modules_widen_with_devices_and_weaker_evidence():
    def width(devices, evidence, **read):
        read = {"reads_images": True} | read
        found = traced_intervals(2.0, evidence=evidence, num_devices=devices, **read)
        lows, highs = zip(*found.values(), strict=True)
        assert list(lows) == sorted(lows, reverse=True) and list(highs) == sorted(highs)
        assert lows[0] < 2.0 < highs[0]
        return found[0.9][1] / found[0.9][0]

    assert width(1, "fitted") == width(8, "fitted") < width(16, "fitted") < width(4096, "fitted")
    assert width(8, "fitted") < width(8, "architecture") <= width(8, "datasheet")
    assert width(8, "fitted") < width(8, "fitted", reads_images=False)
    # a forward alone was further off than training, on devices that no residual is of
    assert width(1, "fitted") < width(1, "fitted", trained=False)


def trained_here(model, cluster, framework):
    prediction = api.predict(model, cluster, framework=framework, seq=2048)
    low, high = prediction.step_time_interval_s
    return low / prediction.step_time_s, high / prediction.step_time_s


def test_frameworks_that_no_fit_has_seen_are_judged_by_steps_trained_on_their_devices():
    """Half width by hand; it grows with the devices; experts that DDP runs in 32 bit are no such step."""
    steps = shipped("step_residuals.json")["cases"]
    sizes = sorted(abs(step["residual"]) for step in steps)
    half = max(sizes[math.ceil((len(sizes) + 1) * 0.9) - 1], max_of(steps, "moe"))
    low, high = trained_here("qwen3-30b-a3b", "1xh100-sxm", "hf")
    assert low == pytest.approx(1 / high, rel=1e-9)
    assert high >= math.exp(half) * (1 - 1e-9)
    wider = trained_here("qwen3-30b-a3b", "2x8xh100-sxm", "hf")
    assert wider[0] < low < 1 < high < wider[1] < 2
    assert trained_here("qwen3-30b-a3b", "2x8xh100-sxm", "ddp")[1] > 2 > high


def max_of(steps, kind):
    return max(abs(step["residual"]) for step in steps if step["kind"] == kind)


@pytest.mark.parametrize("left_out", ["h100-sxm", "h200-sxm"])
def test_steps_of_one_device_cover_those_of_another(left_out):
    steps = shipped("step_residuals.json")["cases"]
    others, own = [], []
    for step in steps:
        (own if step["name"].endswith(left_out) else others).append(abs(step["residual"]))
    half = conformal_quantile(others, 0.9)
    assert np.mean(np.array(own) <= half) >= 0.85
