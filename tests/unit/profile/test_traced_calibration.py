"""Terms of traced modules fitted to measured steps: a device that differs is found, and predicted better."""

import gzip
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn

from foreshard import api
from foreshard.advise.traced_request import plan_of
from foreshard.catalog.training import load_calibration
from foreshard.errors import SpecError
from foreshard.profile.step_table import is_step_table
from foreshard.profile.traced_calibration import TRACED_TERMS, TimedModule, TracedSteps, calibrate_modules
from foreshard.profile.tracing.trace import trace_module

NAMES = [term.name for term in TRACED_TERMS]


def images(channels, depth):
    """Convolutions and norms over images of 56 x 56."""
    layers = [nn.Conv2d(3, channels, 7, 4, 3)]
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers, *head), torch.empty(1, 3, 224, 224, device="meta")


def products(width, depth):
    """Products, which streams follow."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), torch.empty(1, 128, width, device="meta")


def streams(width, depth):
    """Little but what streams memory."""
    return nn.Sequential(*(nn.SiLU() for _ in range(depth)), nn.Linear(width, 8)), torch.empty(
        1, 128, width, device="meta"
    )


@pytest.fixture(scope="module")
def runs():
    """Runs of five modules on one and on two devices, large and small batches."""
    made = []
    kinds = ((images, 64, 2), (streams, 2048, 6), (products, 1024, 2), (products, 4096, 2), (streams, 512, 4))
    for make, width, depth in kinds:
        module, inputs = make(width, depth)
        traced = trace_module(module.to("meta"), inputs, precision="fp16")
        for batch, devices in ((4, 1), (256, 1), (16, 2)):
            cluster = api.load_cluster(f"1x{devices}xrtx-3090")
            asked = {"micro_batch": batch, "global_batch": batch * devices, "optimizer": "sgd"}
            plan = plan_of(traced, cluster, asked)
            made.append({"module": traced, "cluster": cluster, "plan": plan})
    return made


def timed(runs, log_factors, noise, seed=0):
    """Return the runs as measured where terms take so many times as long, with errors of a steady size."""
    steps = [TimedModule(name=f"run-{i}", measured_s=1.0, **run) for i, run in enumerate(runs)]
    off = np.random.default_rng(seed).normal(0.0, noise, len(runs))
    seconds = np.exp(TracedSteps(steps).log_predicted(np.asarray(log_factors)) + off)
    return [
        TimedModule(name=step.name, measured_s=float(s), **run)
        for step, s, run in zip(steps, seconds, runs, strict=True)
    ]


def factors(**moved):
    return np.array([np.log(moved.get(name, 1.0)) for name in NAMES])


TRUTH = factors(kernels=1.2, streams=0.9, convolutions=1.15, host=1.8, data_comm=1.3)


@pytest.fixture(scope="module")
def made(runs):
    """The costs of a device whose terms are `TRUTH`."""
    return calibrate_modules(timed(runs, TRUTH, 0.01), seeds=6)


def test_a_device_that_differs_is_found_within_error_bars(made):
    at = {term["name"]: np.log(term["factor"]) for term in made["terms"]}
    sds = [np.diff(np.log(term["interval"]))[0] / (2 * 1.645) for term in made["terms"]]
    off = np.array([at[name] for name in NAMES]) - TRUTH
    assert np.abs(off / sds).max() < 3.0
    assert at["host"] == pytest.approx(np.log(1.8), abs=0.1)
    for name, truth in (("streams", 1.2 * 0.9), ("products", 1.2)):
        assert at["kernels"] + at[name] == pytest.approx(np.log(truth), abs=0.05)
    assert made["slower"]["host"] == pytest.approx(np.exp(at["host"]), rel=1e-6)


def test_the_error_falls_with_every_step_in_the_median_over_orders(made):
    medians = [shot["median_ape"] for shot in made["curve"]]
    assert [shot["steps"] for shot in made["curve"]] == [0, 1, 2, 4]
    assert medians == sorted(medians, reverse=True) and medians[-1] < 0.5 * medians[0]
    assert made["error"]["left_out"]["median_ape"] < 0.3 * made["error"]["before"]["median_ape"]


def test_terms_of_no_step_stay_and_say_so(made):
    terms = {term["name"]: term for term in made["terms"]}
    for name in ("recurrences", "attention", "pipeline_comm"):
        assert terms[name]["factor"] == pytest.approx(1.0) and not terms[name]["identified"]
        assert terms[name]["by"] == []
    assert terms["host"]["identified"]


NET = """
import torch
from torch import nn

def net():
    layers = [nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), torch.empty(1, 3, 64, 64)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A module of one's own, three steps of it that take half as long again as predicted, and their costs."""
    folder = tmp_path_factory.mktemp("traced")
    module = folder / "net.py"
    module.write_text(NET, encoding="utf-8")
    lines = ["model,cluster,micro_batch,dtype,optimizer,step_time_s"]
    for batch in (2048, 4096, 8192):
        asked = {"micro_batch": batch, "dtype": "fp16", "optimizer": "sgd"}
        predicted = api.predict(f"{module}:net", "1xrtx-3090", **asked)
        lines.append(f"{module}:net,1xrtx-3090,{batch},fp16,sgd,{1.5 * predicted.step_time_s}")
    table, costs = folder / "steps.csv", folder / "costs.json"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    costs.write_text(json.dumps(api.calibrate_steps([str(table)], seeds=1)), encoding="utf-8")
    return f"{module}:net", str(costs), table


def test_predict_and_plan_price_a_module_by_the_file(written):
    model, costs, _ = written
    asked = {"micro_batch": 1024, "dtype": "fp16", "optimizer": "sgd"}
    plain, own = (api.predict(model, "1xrtx-3090", costs=file, **asked) for file in (None, costs))
    assert 1.1 * plain.step_time_s < own.step_time_s < 1.5 * plain.step_time_s
    assert own.fidelity == "calibrated" and "kernels x1." in own.assumptions[0]
    low, high = own.step_time_interval_s
    assert low < own.step_time_s < high
    far = api.predict(model, "1xrtx-3090", costs=costs, **asked | {"micro_batch": 1})
    assert far.step_time_interval_s[1] / far.step_time_s > high / own.step_time_s
    found = api.plan(
        model, "1x2xrtx-3090", global_batch=2048, precision="fp16", optimizer="sgd", costs=costs, budget_s=1
    )
    first = found.plans[0]
    again = api.predict(model, "1x2xrtx-3090", first.plan, costs=costs)
    assert first.prediction.step_time_s == pytest.approx(again.step_time_s, rel=1e-9)
    changed = api.whatif(model, "1xrtx-3090", ["micro_batch=2048"], costs=costs, **asked)[1][0]
    stated = api.predict(model, "1xrtx-3090", costs=costs, **asked | {"micro_batch": 2048})
    assert changed.prediction.step_time_s == pytest.approx(stated.step_time_s, rel=1e-9)


def test_files_of_other_models_and_devices_are_refused(written):
    model, costs, _ = written
    with pytest.raises(SpecError, match="no step on a100-sxm-80gb was measured"):
        api.predict(model, "1xa100-sxm-80gb", costs=costs, dtype="fp16")
    with pytest.raises(SpecError, match="steps of traced modules"):
        api.predict("gpt2-medium", "1xrtx-3090", costs=costs, seq=1024)
    with pytest.raises(SpecError, match="steps of traced modules"):
        api.plan("gpt2-medium", "1xrtx-3090", global_batch=8, seq_len=1024, costs=costs)
    assert load_calibration(costs).of_operations["kernels"] > 1.0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("micro_batch", "microbatch", "a column that is not known"),
        ("2048,fp16", "many,fp16", "'many' is no whole number"),
        ("2048,fp16", "2048", "a row of another length"),
        ("1xrtx-3090,2048", ",2048", "no cluster"),
        ("1xrtx-3090,2048", "1xrtx-3091,2048", "rtx-3091"),
        ("2048,fp16", "0,fp16", "0 is not"),
    ],
)
def test_tables_that_say_no_step_are_refused_by_line(written, tmp_path, old, new, said):
    _, _, table = written
    broken = tmp_path / "broken.csv"
    broken.write_text(table.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SpecError, match=said) as caught:
        api.calibrate_steps([str(broken)])
    assert str(broken) in caught.value.file


def test_compressed_and_missing_tables_are_left_to_the_reader_of_other_tables(written, tmp_path):
    _, _, table = written
    compressed = tmp_path / "steps.csv.gz"
    compressed.write_bytes(gzip.compress(table.read_bytes()))
    assert is_step_table(str(table))
    assert not is_step_table(str(compressed)) and not is_step_table(str(tmp_path / "none.csv"))
    with pytest.raises(SpecError, match="cannot read the table"):
        api.calibrate_steps([str(tmp_path / "none.csv")])


def test_language_models_and_both_kinds_of_tables_are_refused(written, tmp_path):
    _, _, table = written
    layers = tmp_path / "layers.csv"
    layers.write_text("model,cluster,step_time_s\nllama3-8b,1xrtx-3090,1.0\n", encoding="utf-8")
    with pytest.raises(SpecError, match="not traced"):
        api.calibrate_steps([str(layers)])
    with pytest.raises(SpecError, match="tables of both kinds"):
        api.calibrate_steps([str(table), str(tmp_path / "other.csv")])
    with pytest.raises(SpecError, match="--family is not taken"):
        api.calibrate_steps([str(table)], family="timm")
