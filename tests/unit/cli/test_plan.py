"""What a user of `foreshard plan` gets: the object, the file, the exit codes, the words."""

import html
import json
import os
import re
import signal
import time

import pytest

RUN = ("plan", "llama3-8b", "1x8xh100-sxm", "--global-batch", "32", "--seq", "2048", "--budget-s", "5")
MIXED = ("plan", "llama3-8b", "1x4xa100-sxm-80gb+1x4xh100-sxm", "--global-batch", "64", "--seq", "1024")


def test_the_object_of_the_contract(shell):
    answer = shell(*RUN, "--json")
    data = answer.json
    assert answer.code == 0 and data["schema_version"] == 1
    best = data["plans"][0]["prediction"]["step_time_s"]
    bound = data["lower_bound_step_time_s"]
    assert bound <= best * (1 + 1e-12) and data["gap"] == pytest.approx(best / bound - 1, abs=1e-12)
    assert data["binding"] and data["evaluated"] > 0 and data["pruned"] > 0 and data["wall_s"] > 0
    assert all(one["why"] and one["plan"]["groups"] for one in data["plans"])
    steps = [one["prediction"]["step_time_s"] for one in data["plans"]]
    assert steps == sorted(steps)


@pytest.mark.parametrize("run", [RUN, (*MIXED, "--budget-s", "2")])
def test_the_plan_file_predicts_the_step_that_was_promised(shell, tmp_path, run):
    path = tmp_path / "plan.json"
    promised = shell(*run, "--json", "-o", path).json["plans"][0]
    again = shell("predict", *run[1:3], "--plan", path, "--json")
    assert json.loads(path.read_text()) == promised["plan"]
    assert again.json["step_time_s"] == pytest.approx(promised["prediction"]["step_time_s"], rel=1e-9)


def test_top_limits_the_plans(shell):
    assert len(shell(*RUN, "--top", 2, "--json").json["plans"]) == 2


@pytest.mark.parametrize("flag", ["--max-usd", "--max-hours"])
def test_a_limit_without_tokens_exits_2(shell, flag):
    answer = shell(*RUN, flag, "10", "--json")
    assert (
        answer.code == 2 and answer.json["error"]["key"] == flag and "--tokens" in answer.json["error"]["fix"]
    )


def test_a_limit_nothing_meets_exits_4_with_the_plans(shell):
    answer = shell(*RUN, "--tokens", "1e12", "--max-hours", "1", "--json")
    assert answer.code == 4 and answer.json["plans"] and answer.json["error"]["key"] == "--max-hours"


def test_nothing_fits_exits_3_with_the_object(shell):
    big = ("plan", "llama3.1-405b", "1x8xa100-sxm-40gb", "--global-batch", "8", "--seq", "8192", "--json")
    answer = shell(*big)
    assert answer.code == 3 and answer.json["plans"] == []
    assert answer.json["lower_bound_step_time_s"] is None and answer.json["error"]["code"] == 3


@pytest.mark.parametrize(
    "wrong",
    [
        ("--objective", "beauty"),
        ("--objective", "time,time"),
        ("--top", "0"),
        ("--budget-s", "0"),
        ("--budget-s", "-1"),
        ("--budget-s", "nan"),
        ("--executor", "dask"),
        ("--dtype", "bf61"),
        ("--global-batch", "0"),
        ("--global-batch", "9" * 30),
        ("--seq", "0"),
        ("--max-devices", "0"),
        ("--framework", "pytorch-ddp-2"),
        ("--engine", "packets"),
        ("--tokens", "-1"),
    ],
)
def test_wrong_words_exit_2_and_name_the_flag(shell, wrong):
    answer = shell(*RUN, *wrong, "--json")
    assert answer.code == 2 and answer.json["error"]["code"] == 2
    assert "Traceback" not in answer.err and answer.err.startswith("foreshard: ")


def test_a_folder_that_is_not_there_exits_2(shell, tmp_path):
    answer = shell(*RUN, "-o", tmp_path / "no" / "plan.json")
    assert answer.code == 2 and "cannot write" in answer.err


@pytest.mark.parametrize("flag", ["-o", "--report"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(shell, tmp_path, monkeypatch, flag):
    from foreshard import api

    monkeypatch.setattr(api, "plan", lambda *_, **__: pytest.fail("searched"))
    for place in (tmp_path / "no" / "plan.json", tmp_path):
        answer = shell(*RUN, flag, place)
        assert answer.code == 2 and "cannot write" in answer.err


def test_the_words_name_plan_bound_and_devices(shell):
    out = shell(*MIXED, "--budget-s", "2").out
    for words in (
        "No plan is faster than",
        "gap",
        "yes ->",
        "a100-sxm-80gb",
        "What binds",
        "The chosen plan",
    ):
        assert words in out
    assert "\x1b" not in out


def test_a_report_is_one_page_without_anything_from_elsewhere(shell, tmp_path):
    path = tmp_path / "plan.html"
    answer = shell(*MIXED, "--budget-s", "2", "--report", path)
    text = path.read_text(encoding="utf-8")
    assert answer.code == 0 and str(path) in answer.err
    assert "<svg" in text and "stage 0" in text and "h100-sxm" in text
    assert "http" not in text.replace("http-equiv", "") and "src=" not in text
    listed = text.split("The space that the bound speaks of")[1].split("</ul>")[0]
    terms = [html.unescape(term) for term in re.findall(r"<li>([^<]*)</li>", listed)]
    assert len(terms) > 3 and "The bound covers:\n- " in answer.out
    covered = answer.out.split("The bound covers:\n")[1].splitlines()
    assert " ".join(line.strip() for line in covered) == " ".join(f"- {term}" for term in terms)
    assert max(map(len, covered)) <= 100


@pytest.mark.slow
def test_explain_ranks_other_hardware(shell):
    answer = shell(*RUN, "--explain", "--json")
    gains = {one["change"]: one["gain"] for one in answer.json["explain"]}
    assert gains["one node more of 8 h100-sxm"] > 0.5
    assert 0 <= gains["20 % more device memory"] < 0.5
    assert list(gains.values()) == sorted(gains.values(), reverse=True)


def test_a_budget_that_ends_is_not_an_interruption(shell, monkeypatch):
    """On a machine so busy that a second of the processor takes eight: there is a plan all the same."""
    monkeypatch.setattr(time, "perf_counter", lambda: 8.0 * time.process_time())
    big = ("plan", "llama3-70b", "4x8xa100-sxm-80gb+4x8xh100-sxm", "--global-batch", "256", "--seq", "2048")
    answer = shell(*big, "--budget-s", "0.5", "--json")
    assert answer.code == 0 and answer.json["plans"]


def test_ctrl_c_prints_the_best_so_far_and_its_bound(shell, monkeypatch):
    from foreshard.planner.mixed.search import MixedSearch

    after, before = MixedSearch._make_room, signal.getsignal(signal.SIGINT)

    def pressed(search, *values, **options):
        if search.found.timed:
            os.kill(os.getpid(), signal.SIGINT)
        return after(search, *values, **options)

    monkeypatch.setattr(MixedSearch, "_make_room", pressed)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    run = ("plan", "llama3-70b", "4x8xa100-sxm-80gb+4x8xh100-sxm", "--global-batch", "256", "--seq", "2048")
    # What is compiled or loaded first takes of the budget: the key ends the search long before it.
    answer = shell(*run, "--budget-s", "60", "--json")
    assert answer.code == 130 and answer.json["interrupted"]
    best = answer.json["plans"][0]["prediction"]["step_time_s"]
    assert 0 < answer.json["lower_bound_step_time_s"] <= best
    assert signal.getsignal(signal.SIGINT) is before


def test_other_planners_under_one_judge(shell):
    answer = shell(*MIXED, "--budget-s", "1", "--compare-with", "all", "--json")
    rivals = {one["name"]: one for one in answer.json["against"]}
    assert answer.code == 0 and {"even", "lb-bsp", "pipedream", "amp", "metis", "sailor"} <= set(rivals)
    ours = answer.json["plans"][0]["prediction"]["step_time_s"]
    for one in rivals.values():
        if one["step_time_s"] is None:
            assert one["note"] and one["ratio"] is None
        else:
            assert one["ratio"] == pytest.approx(one["step_time_s"] / ours)
            assert one["step_time_s"] >= answer.json["lower_bound_step_time_s"]


def test_named_planners_only(shell):
    answer = shell(*MIXED, "--budget-s", "2", "--compare-with", "even,metis")
    assert "metis" in answer.out and "pipedream" not in answer.out


def test_an_unknown_planner_exits_2_before_the_search(shell):
    answer = shell(*RUN, "--compare-with", "evne", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--compare-with"


RENT = ("plan", "llama3-8b", "--rent", "--global-batch", "64", "--seq", "2048", "--max-devices", "8")


@pytest.mark.slow
def test_what_to_rent(shell, tmp_path):
    path = tmp_path / "plan.json"
    answer = shell(*RENT, "--tokens", "1e10", "--json", "-o", path)
    offers = answer.json["offers"]
    prices = [one["prediction"]["cost"]["usd_total"] for one in offers]
    assert answer.code == 0 and prices == sorted(prices) and offers[0]["usd_per_h"] > 0
    again = shell(
        "predict", "llama3-8b", offers[0]["cluster"], "--plan", path, "--engine", "analytical", "--json"
    )
    assert again.json["step_time_s"] == pytest.approx(offers[0]["prediction"]["step_time_s"], rel=1e-9)


def test_renting_needs_the_length_of_the_run(shell):
    answer = shell(*RENT, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--tokens"


def test_renting_of_one_vendor(shell):
    answer = shell(
        *(word if word != "--rent" else "--rent=lambda" for word in RENT), "--tokens", "1e10", "--json"
    )
    assert answer.code == 0 and answer.json["offers"]
    assert all(one["instance"].startswith("lambda-") for one in answer.json["offers"])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--rent=lamda",), "--rent"),
        (("--rent=nvidia",), "--rent"),  # of which no price is known
        (("1x8xh100-sxm", "--rent"), "CLUSTER"),
        (("--rent", "--costs", "costs.json"), "--costs"),
        ((), "CLUSTER"),
    ],
)
def test_a_plan_is_for_a_cluster_or_for_rented_nodes(shell, words, key):
    answer = shell("plan", "llama3-8b", *words, "--global-batch", "64", "--tokens", "1e10", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key


@pytest.mark.parametrize("flag", [("--report", "x.html"), ("--explain",), ("--compare-with", "all")])
def test_renting_compares_clusters(shell, flag):
    answer = shell(*RENT, "--tokens", "1e10", *flag, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == flag[0]


@pytest.mark.slow
def test_of_several_precisions_and_switches_the_search_chooses(shell):
    words = (
        "plan",
        "llama3-8b",
        "1x8xh100-sxm",
        "--global-batch",
        "64",
        "--seq",
        "4096",
        "--dtype",
        "bf16,fp8",
    )
    result = shell(*words, "--comm", "grad_overlap,tp_overlap")
    assert result.code == 0
    assert "with grad_overlap" in result.out and "in fp8 and bf16" in result.out


@pytest.mark.parametrize(
    "words",
    [
        ("--dtype", "bf16,bf61"),
        ("--dtype", "bf16,bf16"),
        ("--dtype", "bf16,"),
        ("--comm", "all,tp_overlap"),
        ("--comm", "overlap"),
    ],
)
def test_words_that_are_no_choice_are_refused(shell, words):
    result = shell("plan", "llama3-8b", "1x8xh100-sxm", "--global-batch", "64", *words)
    assert result.code == 2 and words[0] in result.err
