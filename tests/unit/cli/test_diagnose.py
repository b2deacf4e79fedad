"""`whatif --change speed-PART=F` and `--diagnose`: edits of the tasks, the critical path, what helps."""

import pytest

RUN = (
    "whatif",
    "llama3-8b",
    "2x8xh100-sxm",
    "--tp",
    "2",
    "--pp",
    "4",
    "--global-batch",
    "16",
    "--seq",
    "2048",
)


def test_a_faster_part_is_an_effect_like_any_other(shell):
    changes = ("speed-tensor-comm=2", "speed-tensor-comm=inf", "speed-optimizer=0.5", "tp=4,speed-host=2")
    answer = shell(*RUN, *(part for text in changes for part in ("--change", text)), "--json")
    by_change = {one["change"]: one for one in answer.json["effects"]}
    base = answer.json["base"]
    free = by_change["speed-tensor-comm=inf"]["prediction"]
    assert answer.code == 0 and free["time_breakdown_s"]["tensor_comm"] == 0.0
    assert 0 < by_change["speed-tensor-comm=2"]["gain"] < by_change["speed-tensor-comm=inf"]["gain"]
    assert by_change["speed-optimizer=0.5"]["gain"] < 0
    assert by_change["speed-optimizer=0.5"]["prediction"]["time_breakdown_s"]["optimizer"] == pytest.approx(
        2 * base["time_breakdown_s"]["optimizer"]
    )
    assert free["memory"] == base["memory"] and "what if" in free["assumptions"][0]
    assert by_change["tp=4,speed-host=2"]["prediction"]["plan"]["groups"][0]["stages"][0]["tp"] == 4


@pytest.mark.parametrize(
    "change", ["speed-attn=2", "speed-compute=0", "speed-compute=-1", "speed-compute=x", "speed-bubble=2"]
)
def test_a_speed_that_makes_no_sense_exits_2(shell, change):
    answer = shell(*RUN, "--change", change, "--json")
    assert answer.code == 2 and answer.json["error"]["rule"]


def test_links_and_memory_have_rates(shell):
    rates = ("link=900 GB/s", "link=100 GB/s", "memory-bandwidth=6 TB/s", "nic=100 Gb/s")
    answer = shell(*RUN, *(part for text in rates for part in ("--change", text)), "--json")
    gains = {one["change"]: one["gain"] for one in answer.json["effects"]}
    assert gains["link=900 GB/s"] > 0 > gains["link=100 GB/s"]
    assert gains["memory-bandwidth=6 TB/s"] > 0 > gains["nic=100 Gb/s"]


@pytest.mark.parametrize(
    ("cluster", "change"),
    [("1x2xh100-sxm", "link=9"), ("1x2xt4", "link=9 GB/s"), ("1x2xh100-sxm", "link=9 GB")],
)
def test_a_rate_that_makes_no_sense_exits_2(shell, cluster, change):
    answer = shell("whatif", "llama3.2-1b", cluster, "--change", change, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--change link"


def test_speeds_are_of_the_engine_graph(shell):
    answer = shell(*RUN, "--engine", "analytical", "--change", "speed-host=2", "--json")
    (only,) = answer.json["effects"]
    assert only["prediction"] is None and "--engine graph" in only["error"]
    diagnosed = shell(*RUN, "--engine", "analytical", "--diagnose", "--json")
    assert diagnosed.code == 2 and diagnosed.json["error"]["key"] == "--engine"


def test_a_diagnosis_names_what_the_step_waits_for_and_what_helps(shell):
    answer = shell(*RUN, "--diagnose", "--json")
    found = answer.json["diagnosis"]
    path, helps = found["critical_path"], found["helps"]
    assert answer.code == 0 and answer.json["effects"] == []
    assert sum(place["seconds"] for place in path) == pytest.approx(found["critical_path_s"], rel=1e-9)
    assert found["critical_path_s"] <= answer.json["base"]["step_time_s"]
    assert {"forward", "backward", "optimizer"} <= {place["kind"] for place in path}
    gains = [one["gain"] for one in helps]
    assert gains == sorted(gains, reverse=True) and min(gains) >= 0.01
    assert len({one["change"] for one in helps}) == len(helps)


def test_what_a_diagnosis_promises_is_what_the_change_gives(shell):
    helps = shell(*RUN, "--diagnose", "--json").json["diagnosis"]["helps"]
    changes = [part for one in helps for part in ("--change", one["change"])]
    effects = {one["change"]: one for one in shell(*RUN, *changes, "--json").json["effects"]}
    for one in helps:
        effect = effects[one["change"]]
        assert effect["gain"] == pytest.approx(one["gain"], rel=1e-9), one
        assert effect["prediction"]["step_time_s"] == pytest.approx(one["step_time_s"], rel=1e-9)
        assert effect["prediction"]["memory"]["fits"] or one["by"] == "graph edit"
        assert one["most"] is None or one["most"] >= one["gain"]


def test_the_tables_use_words(shell):
    text = shell(*RUN, "--diagnose").out
    assert "The critical path" in text and "backward of stage" in text and "What would help" in text


def test_a_measured_step_scales_the_steps_and_not_the_gains(shell):
    plain = shell(*RUN, "--diagnose", "--json").json
    observed = 2 * plain["base"]["step_time_s"]
    scaled = shell(*RUN, "--observed-step-s", str(observed), "--diagnose", "--json").json
    first = {one["change"]: one for one in plain["diagnosis"]["helps"]}
    for one in scaled["diagnosis"]["helps"]:
        if one["change"] in first:
            assert one["gain"] == pytest.approx(first[one["change"]]["gain"], rel=1e-9)
            assert one["step_time_s"] == pytest.approx(2 * first[one["change"]]["step_time_s"], rel=1e-9)


def test_without_a_change_it_diagnoses(shell):
    asked, plain = shell(*RUN, "--diagnose", "--json"), shell(*RUN, "--json")
    assert plain.code == 0 and plain.json["diagnosis"]["helps"]
    assert plain.json["diagnosis"] == asked.json["diagnosis"] and plain.json["effects"] == []
