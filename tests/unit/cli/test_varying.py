"""Options of what varies in a run: what they make of a prediction, and what they refuse."""

from __future__ import annotations

import json

import pytest

from foreshard.cli.program import run

RUN = ["predict", "llama3-8b", "2x8xh100-sxm", "--tp", "2", "--pp", "2", "--seq", "2048", "--json"]


def answer(capsys, *more):
    code = run([*RUN, *more])
    return code, json.loads(capsys.readouterr().out)


def test_noise_and_failures_are_in_the_answer(capsys):
    noise = ("--engine", "event", "--jitter", "3%", "--slow", "3=1.5", "--slow-link", "0=2", "--seeds", "4")
    fails = ("--mtbf-h", "2000 h", "--restart-s", "5 min", "--checkpoint-bandwidth", "100 GB/s")
    code, found = answer(capsys, *noise, *fails, "--checkpoint-every", "auto", "--tokens", "1T")
    varied = found["step_time_distribution"]
    assert code == 0 and found["step_time_s"] == pytest.approx(varied["mean_s"]) and varied["steps"] == 4
    parts = ("alike_s", "jitter_s", "slow_ranks_s", "slow_links_s")
    assert sum(varied[name] for name in parts) == pytest.approx(varied["mean_s"])
    assert sum(found["time_breakdown_s"].values()) == pytest.approx(found["step_time_s"])
    assert found["run"]["goodput"] == found["goodput"] and 0.9 < found["goodput"] < 1.0
    assert found["network"] == "flow" and varied["contention"] == "every step"


@pytest.mark.parametrize(
    ("flag", "more"),
    [
        ("--engine", ["--jitter", "3%"]),
        ("--jitter", ["--engine", "event", "--jitter", "300%"]),
        ("--slow", ["--engine", "event", "--slow", "99=2"]),
        ("--slow", ["--engine", "event", "--slow", "1=0.5"]),
        ("--slow", ["--engine", "event", "--slow", "fast"]),
        ("--seeds", ["--engine", "event", "--slow", "1=2", "--seeds", "8"]),
        ("--jitter-tail", ["--engine", "event", "--jitter-tail", "pareto"]),
        ("--slow-link", ["--engine", "event", "--network", "closed-form", "--slow-link", "1=2"]),
        ("--restart-s", ["--mtbf-h", "1000", "--checkpoint-s", "5"]),
        ("--checkpoint-bandwidth", ["--mtbf-h", "1000", "--restart-s", "60"]),
        ("--mtbf-h", ["--restart-s", "60"]),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, flag, more):
    code, found = answer(capsys, *more)
    assert code == 2 and found["error"]["key"] == flag and found["error"]["fix"]
