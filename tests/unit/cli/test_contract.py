"""The contract of `predict`, with the real predictor from end to end."""

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from foreshard import api

MODEL = Path(__file__).parents[3] / "examples/llama3-70b.json"
RUN = ("predict", MODEL, "8x8xh100-sxm", "--tp", "8", "--pp", "2", "--global-batch", "64")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The report and the trace of one run, with its prediction."""
    from foreshard.cli.program import run

    folder = tmp_path_factory.mktemp("predict")
    report, trace, out = (folder / name for name in ("r.html", "t.json.gz", "p.json"))
    args = [*map(str, RUN), "--report", str(report), "--trace", str(trace), "-o", str(out), "--json"]
    assert run(args) == 0
    page = report.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    return json.loads(out.read_text()), data, json.loads(gzip.decompress(trace.read_bytes()))


def test_parts_sum_to_the_whole(files):
    prediction, _, _ = files
    step = prediction["step_time_s"]
    assert sum(prediction["time_breakdown_s"].values()) == pytest.approx(step, rel=1e-9)
    memory = prediction["memory"]
    assert sum(memory["breakdown_bytes"].values()) == pytest.approx(memory["peak_bytes"], abs=1)
    low, high = prediction["step_time_interval_s"]
    assert low < step < high


def test_the_report_splits_every_stage_into_what_the_prediction_says(files):
    prediction, data, _ = files
    peaks = prediction["memory"]["per_stage_peak_bytes"][0]
    assert len(data["stages"]) == len(peaks) == 2
    for stage, peak in zip(data["stages"], peaks, strict=True):
        assert sum(stage["parts"].values()) == pytest.approx(peak, rel=1e-9)


def test_the_timeline_ends_with_the_step_and_stays_inside_it(files):
    prediction, data, trace = files
    step_us = prediction["step_time_s"] * 1e6
    ends = [e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(step_us, rel=1e-6)
    assert data["timeline"]["step"] == pytest.approx(prediction["step_time_s"])
    assert {track["stage"] for track in data["timeline"]["tracks"]} == {0, 1}


def test_no_track_of_the_trace_overlaps(files):
    tracks = {}
    for event in files[2]["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in tracks.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-3


def test_each_micro_batch_crosses_the_boundary_twice(files):
    flows = [event for event in files[2]["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == 2 * 64 // 4


def test_one_measured_step_is_met_and_said(shell):
    plain = shell(*RUN, "--json").json
    answer = shell(*RUN, "--observed-step-s", "12.5", "--json").json
    assert answer["step_time_s"] == pytest.approx(12.5) and answer["fidelity"] == "calibrated"
    assert plain["fidelity"] == "zero-shot"
    assert "Learned: one measured step" in shell(*RUN, "--observed-step-s", "12.5").out


def test_the_analytical_engine_has_no_trace_but_a_report(shell, tmp_path):
    answer = shell(*RUN, "--engine", "analytical", "--trace", tmp_path / "t.json", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--trace"
    answer = shell(*RUN, "--engine", "analytical", "--report", tmp_path / "r.html", "--json")
    assert answer.code == 0 and "This engine gives no timeline" in (tmp_path / "r.html").read_text()


def test_compare_shows_every_engine(shell):
    found = shell("compare", *RUN[1:], "--json").json["predictions"]
    assert {one["engine"] for one in found} == {"analytical", "graph", "event"}


def test_the_nearest_change_that_fits_does_fit(shell):
    answer = shell("predict", MODEL, "1x1xh100-sxm", "--json")
    assert answer.code == 3 and answer.json["infeasible"]["over_bytes"] > 0
    changes = dict(part.split("=") for part in answer.json["infeasible"]["nearest_change"].split(","))
    nodes = changes.pop("nodes")
    flags = [word for key, value in changes.items() for word in (f"--{key}", value)]
    assert shell("predict", MODEL, f"{nodes}x1xh100-sxm", *flags, "--json").code == 0


def test_a_whole_run_has_a_duration(shell):
    one = shell(*RUN, "--tokens", "1e12", "--json").json
    assert one["run_time_s"] == pytest.approx(1e12 / one["tokens_per_s"])
    assert shell(*RUN, "--json").json["run_time_s"] is None
    assert " days" in shell(*RUN, "--tokens", "1e12").out


def test_compare_says_equal_when_equal(shell):
    text = shell("compare", "llama3-8b", "1x8xh100-sxm", "--tp", "2").out
    assert re.search(r"^peak GiB +[\d.]+( +equal)+$", text, re.M)


def test_a_switch_hides_what_it_names(shell):
    def exposed(*flags):
        answer = shell(*RUN, *flags, "--json").json
        return answer["time_breakdown_s"]["tensor_comm"]

    assert exposed("--tp-overlap") < exposed("--no-tp-overlap") == exposed()


def test_a_price_that_is_doubted_says_so(shell):
    said = shell(*RUN, "--json").json["assumptions"]
    assert any("price cut" in text and "not reflected" in text for text in said)


def test_adapters_train_less(shell):
    full = shell("predict", "llama3-8b", "1x8xh100-sxm", "--json").json
    adapted = shell("predict", "llama3-8b", "1x8xh100-sxm", "--lora", "16", "--json").json
    assert (
        adapted["memory"]["breakdown_bytes"]["optimizer"]
        < 0.01 * full["memory"]["breakdown_bytes"]["optimizer"]
    )
    assert adapted["step_time_s"] < full["step_time_s"]


def test_frameworks_are_listed_with_their_releases(shell):
    known = shell("schema", "frameworks", "--json").json["keys"]["framework"]
    assert {"megatron-core", "torchtitan", "deepspeed"} <= set(known)
    assert "25.09" in known["megatron-bridge"]["doc"] and known["torchtitan"]["default"] == "zero 3"


def test_the_nearest_change_states_its_cost(shell):
    answer = shell("predict", "llama3-8b", "1x8xh100-sxm", "--seq", "32768", "--json")
    found = answer.json["infeasible"]
    assert answer.code == 3 and found["changes"][0]["change"] == found["nearest_change"]
    assert "activations" in found["largest"] and any("seq=" in one["change"] for one in found["changes"])
    assert all(one["peak_bytes"] <= answer.json["memory"]["capacity_bytes"] for one in found["changes"])
    assert "% slower" in answer.err and "offload" not in answer.err


def test_one_measured_step_holds_for_changes_too(shell):
    run = ("whatif", *RUN[1:], "--change", "tp-overlap=true")
    plain = shell(*run, "--json").json["effects"][0]
    learned = shell(*run, "--observed-step-s", "12.5", "--json").json["effects"][0]
    assert learned["gain"] == pytest.approx(plain["gain"], rel=1e-6) and plain["gain"] > 0
    assert "before the change" in learned["prediction"]["assumptions"][0]
    said = shell(*RUN, "--observed-step-s", "12.5").out
    assert "tp-overlap=true" in said


def test_flags_on_a_mixed_cluster_say_that_they_split_evenly(shell):
    mixed = shell("predict", "llama3-8b", "1x8xh100-sxm+1x8xa100-sxm-80gb", "--seq", "2048").out
    assert "Note: the cluster mixes devices" in mixed
    assert "mixes devices" not in shell("predict", "llama3-8b", "2x8xh100-sxm", "--seq", "2048").out


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--tp", "two"), "Must be a whole number from 1 to 2147483648"),
        (("--tokens", "nan"), "Must be a number above zero"),
        (("--dtype", "fp12"), "Must be one of fp32, tf32"),
        (("--wrap", "none"), "Must be a number of blocks"),
        (("--buckets", "3M"), "It is written as SIZE|AUTO"),
    ],
)
def test_an_error_of_an_options_type_states_the_rule(words, rule, shell):
    error = shell("predict", "llama3-8b", "1x8xh100-sxm", *words, "--json").json["error"]
    assert error["key"] == words[0] and error["value"] == words[1] and error["rule"].startswith(rule)
    assert error["fix"]


@pytest.mark.parametrize(
    "run",
    [
        "llama3.2-1b 2x4xh100-sxm --framework hf --global-batch 32 --seq 1024 --lora 16",
        "mixtral-8x7b 2x8xh100-sxm --tp 2 --ep 4 --pp 2 --schedule zb-h1 --global-batch 60 --seq 1024",
        "gpt2-xl 1x2xh100-sxm+1x2xa100-sxm-80gb --framework deepspeed --zero 3 --offload optimizer",
    ],
)
def test_a_run_is_one_number_in_every_verb(shell, tmp_path, run):
    model, cluster, *flags = run.split()
    asked = {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    whole = shell("predict", model, cluster, *flags, "--json").json
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(whole["plan"]))
    compared = shell("compare", model, cluster, *flags, "--json").json["predictions"]
    same = ("engine", "fidelity", "costs")
    found = {
        "plan file": shell("predict", model, cluster, "--plan", file, "--json").json,
        "Python": json.loads(json.dumps(api.predict(model, cluster, **asked).to_dict())),
        "Python, plan file": json.loads(json.dumps(api.predict(model, cluster, str(file)).to_dict())),
        "whatif": shell("whatif", model, cluster, *flags, "--change", "nic=1Gb/s", "--json").json["base"],
        "compare": next(one for one in compared if all(one[key] == whole[key] for key in same)),
    }
    for one in found.values():
        for key in ("step_time_s", "time_breakdown_s", "memory", "cost", "energy_j_per_step", "mfu"):
            assert one[key] == whole[key]


def test_what_a_plan_leaves_idle_is_not_paid_but_priced_as_dated(shell, tmp_path):
    """predict paid for the whole cluster, plan for the nodes in use."""
    asked = (
        "gpt2-xl",
        "4x8xh100-sxm@100Gb/s",
        "--global-batch",
        "128",
        "--seq",
        "1024",
        "--framework",
        "fms-fsdp",
    )
    file = str(tmp_path / "plan.json")
    best = shell("plan", *asked, "--objective", "energy", "-o", file, "--json").json["plans"][0]
    used, dated = best["prediction"], shell("predict", *asked, "--json").json["cost"]["price_date"]
    assert used["cost"]["price_date"] == dated is not None
    assert any("not paid" in one for one in used["assumptions"])
    assert shell("predict", *asked[:2], "--plan", file, "--json").json["cost"] == used["cost"]
