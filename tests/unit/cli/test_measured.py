"""A user's own model on own machines: profile, calibrate, plan, predict, without a catalog entry."""

from __future__ import annotations

import json

import pytest

JOB = """
import torch
from torch import nn


def model():
    return [lambda: nn.Linear(8, 8)] * 3


def dataset():
    return [torch.ones(8) * i for i in range(8)]


def loss(output, batch):
    return output.square().sum(), output.numel()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""
LAB = """
[[ranks]]
device = "quick"
[[ranks]]
device = "slow"
slow = 3.0
"""


@pytest.fixture
def place(tmp_path, shell):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "lab.toml").write_text(LAB)
    made = shell(
        "profile", tmp_path / "job.py", "--samples", "1,2", "--repeats", "2", "-o", tmp_path / "p.json"
    )
    assert made.code == 0, made.err
    return tmp_path


def test_from_a_job_to_a_plan_and_its_prediction(place, shell):
    made = shell(
        "calibrate",
        "--profile",
        place / "p.json",
        "--lab",
        place / "lab.toml",
        "-o",
        place / "c.json",
        "--json",
    )
    assert made.code == 0 and made.json == json.loads((place / "c.json").read_text())
    assert made.json["devices"] == {"quick": 1.0, "slow": 3.0} and made.json["clock"] == "cpu"
    where = (place / "job.py", place / "lab.toml", "--costs", place / "c.json")
    planned = shell("plan", *where, "--global-batch", "24", "--seq", "1", "--budget-s", "2", "--json")
    assert planned.code == 0, planned.err
    assert "--seq 1 is only noted in the plan" in planned.err and "which count 8 each" in planned.err
    best = planned.json["plans"][0]
    gap = best["prediction"]["step_time_s"] / planned.json["lower_bound_step_time_s"] - 1
    assert planned.json["gap"] == pytest.approx(gap) and gap >= 0
    (place / "plan.json").write_text(json.dumps(best["plan"]))
    told = shell("predict", *where, "--plan", place / "plan.json", "--json").json
    assert told["step_time_s"] == pytest.approx(best["prediction"]["step_time_s"])
    assert sum(told["time_breakdown_s"].values()) == pytest.approx(told["step_time_s"])
    assert sum(told["memory"]["breakdown_bytes"].values()) == pytest.approx(told["memory"]["peak_bytes"])
    assert told["costs"] == str(place / "c.json") and told["fidelity"] == "calibrated"
    assert told["step_time_interval_s"][0] <= told["step_time_s"] <= told["step_time_interval_s"][1]
    refused = shell("predict", *where, "--plan", place / "plan.json", "--bursts", "--json")
    assert refused.code == 2 and refused.json["error"]["key"] == "--bursts"


def test_screens_name_layers_and_files(place, shell):
    shown = shell("calibrate", "--profile", place / "p.json", "--device", "quick", "--device", "slow=2")
    assert "slow (2 times as slow)" in shown.out and "layer" in shown.out
    assert shell("calibrate", "--profile", place / "p.json", "--device", "quick=x").code == 2


def test_a_model_that_was_not_measured_is_refused(place, shell):
    shell("calibrate", "--profile", place / "p.json", "--lab", place / "lab.toml", "-o", place / "c.json")
    (place / "plan.json").write_text(
        json.dumps(
            {
                "schema_version": 1,
                "global_batch": 2,
                "seq_len": 1,
                "groups": [{"share": 2, "micro_batch": 1, "stages": [{"ranks": [0], "layers": [[0, 3]]}]}],
            }
        )
    )
    asked = (place / "lab.toml", "--costs", place / "c.json", "--plan", place / "plan.json")
    assert shell("predict", place / "job.py", *asked).code == 0
    for other in ("llama3-8b", place / "lab.toml"):
        refused = shell("predict", other, *asked)
        assert refused.code == 2 and "job.py" in refused.err
    refused = shell("predict", place / "job.py", "1x1xh100-sxm", *asked[1:])
    assert refused.code == 2 and "h100-sxm" in refused.err


def test_mistakes_are_told(place, shell):
    for more in (("--local", "0"), ("--repeats", "0"), ("--samples", "0"), ("--samples", "a")):
        assert shell("profile", place / "job.py", "-o", place / "q.json", *more).code == 2
    assert shell("profile", place / "absent.py", "-o", place / "q.json").code == 2
    assert shell("calibrate", "--profile", place / "absent.json").code == 2
    assert shell("calibrate").code == 2


def test_options_of_a_job_and_of_kernels_do_not_mix(tmp_path, shell):
    pytest.importorskip("torch")
    out = str(tmp_path / "products.csv")
    alone = shell("profile", "--samples", "1", "-o", out, "--json")
    assert alone.code == 2 and alone.json["error"]["key"] == "--samples"
    job = shell("profile", "job.py", "--sizes", "8", "-o", out, "--json")
    assert job.code == 2 and job.json["error"]["key"] == "--sizes"
    idle = shell("profile", "--kernels", "stream", "--sizes", "8", "-o", out, "--json")
    assert idle.code == 2 and idle.json["error"]["key"] == "--sizes"
    made = shell("profile", "--kernels", "product", "--sizes", "8,16", "--repeats", "1", "-o", out, "--json")
    assert made.code == 0 and made.json["timed"] == 8
