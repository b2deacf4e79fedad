"""`--to-target`: whole runs over global batches, against each batch asked for by itself."""

import pytest

RUN = ("llama3.2-1b", "1x2xh100-sxm", "--seq", "1024")
FILE = """
target = "loss 3"
source = "own runs"
samples_of = 1024
points = [{batch = 16, samples = 150_000}, {batch = 64, samples = 210_000}]
"""


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.toml"
    path.write_text(FILE)
    return path


def test_predict_compares_batches_as_if_each_was_asked_for(shell, task):
    answer = shell("predict", *RUN, "--to-target", task, "--json")
    found = answer.json["to_target"]
    assert answer.code == 0 and [run["global_batch"] for run in found["runs"]] == [16, 32, 64]
    for run in found["runs"]:
        one = shell("predict", *RUN, "--global-batch", run["global_batch"], "--json").json
        samples = 130_000 * (1 + run["global_batch"] / 104)
        assert run["samples"] == pytest.approx(samples, rel=1e-9)
        assert run["steps"] - 1 < samples / run["global_batch"] <= run["steps"]
        assert run["time_s"] == pytest.approx(run["steps"] * one["step_time_s"], rel=1e-12)
        assert run["usd"] == pytest.approx(run["steps"] * one["cost"]["usd_per_step"], rel=1e-12)
        assert run["energy_j"] == pytest.approx(run["steps"] * one["energy_j_per_step"], rel=1e-12)
    best = min(found["runs"], key=lambda run: run["time_s"])
    assert found["best_global_batch"] == best["global_batch"]
    assert answer.json["plan"]["global_batch"] == best["global_batch"]
    assert answer.json["cost"]["usd_total"] == pytest.approx(best["usd"], rel=1e-9)


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_plan_chooses_the_batch_whose_own_best_plan_ends_first(shell, task, objective):
    fixed = ("--tp", "1", "--pp", "1", "--cp", "1", "--micro-batch", "1,2", "--recompute", "none")
    asked = (*RUN, *fixed, "--engine", "analytical", "--objective", objective, "--budget-s", "60")
    answer = shell("plan", *asked, "--to-target", task, "--json")
    found = answer.json["to_target"]
    assert answer.code == 0 and found["objective"] == objective
    each = {}
    for run in found["runs"]:
        one = shell("plan", *asked, "--global-batch", run["global_batch"], "--json").json["plans"][0]
        step = one["prediction"]
        each[run["global_batch"]] = {
            "time": run["steps"] * step["step_time_s"],
            "cost": run["steps"] * step["cost"]["usd_per_step"],
        }
        assert run["time_s"] == pytest.approx(each[run["global_batch"]]["time"], rel=1e-9)
    best = min(each, key=lambda batch: each[batch][objective])
    assert found["best_global_batch"] == best == answer.json["plans"][0]["plan"]["global_batch"]


def test_a_stated_batch_is_the_only_one_and_may_be_outside_the_curve(shell, task):
    answer = shell("predict", *RUN, "--global-batch", "256", "--to-target", task)
    assert answer.code == 0 and "outside" in answer.out and "32 " not in answer.out.split("Where")[0]


def test_a_batch_that_no_plan_takes_is_kept_out_and_says_why(shell, task):
    task.write_text(FILE.replace("batch = 16", "batch = 15"))
    found = shell("predict", *RUN, "--dp", "2", "--to-target", task, "--json").json["to_target"]
    odd, *rest = found["runs"]
    assert odd["global_batch"] == 15 and "dp 2" in odd["why"] and odd["time_s"] is None
    assert [run["global_batch"] for run in rest if not run["why"]] == [16, 32, 64]
    assert found["best_global_batch"] in (16, 32, 64)


def test_a_limit_that_no_batch_meets_exits_4(shell, task):
    fixed = ("--tp", "1", "--pp", "1", "--micro-batch", "1", "--engine", "analytical", "--budget-s", "30")
    answer = shell("plan", *RUN, *fixed, "--to-target", task, "--max-usd", "0.01", "--json")
    assert answer.code == 4 and answer.json["to_target"]["best_global_batch"] is None
    assert all(run["why"] for run in answer.json["to_target"]["runs"])


@pytest.mark.parametrize(
    ("verb", "more", "key"),
    [
        ("plan", ("--to-target", "mlperf-resnet"), "--to-target"),
        ("predict", ("--to-target", "kaplan-lm:0.5"), "--to-target"),
        ("plan", ("--to-target", "mlperf-bert", "--tokens", "1e9"), "--tokens"),
        ("predict", ("--to-target", "mlperf-bert", "--tokens", "1e9"), "--tokens"),
        ("plan", (), "--global-batch"),
    ],
)
def test_what_is_wrong_is_named(shell, verb, more, key):
    answer = shell(verb, *RUN, *more, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key


def test_a_file_that_is_wrong_is_named(shell, tmp_path):
    answer = shell("plan", *RUN, "--to-target", tmp_path / "none.toml", "--json")
    assert answer.code == 2 and "none.toml" in answer.json["error"]["file"]


def test_renting_takes_no_target(shell):
    answer = shell("plan", "llama3.2-1b", "--rent", "--tokens", "1e9", "--to-target", "mlperf-bert", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--to-target"


def test_a_classic_network_to_its_published_accuracy(shell):
    pytest.importorskip("torch")
    answer = shell(
        *("predict", "resnet18", "1x4xa100-sxm-80gb", "--micro-batch", "408"),
        *("--global-batch", "1632", "--to-target", "mlperf-resnet50", "--json"),
    )
    run = answer.json["to_target"]["runs"][0]
    assert answer.code == 0 and run["time_s"] == pytest.approx(run["steps"] * answer.json["step_time_s"])
