"""What a run says of itself as it goes."""

import json
import sys
from contextlib import suppress

import pytest

from foreshard.report.run_progress import RunFollower, progress, step_words

LINE = {"step": 4, "loss_metrics/global_avg_loss": 2.5, "time_metrics/end_to_end(s)": 0.5, "n_tokens": 1000.0}


def test_a_step_against_what_was_predicted():
    assert step_words(LINE, 0.48) == "loss 2.5, 500 ms a step (480 ms predicted), 2.00 k tokens/s"
    assert step_words(LINE) == "loss 2.5, 500 ms a step, 2.00 k tokens/s"


def test_a_step_cut_in_two_has_no_time():
    assert step_words(LINE | {"time_metrics/end_to_end(s)": None}, 0.48) == "loss 2.5"


def test_whole_lines_only_and_each_once(tmp_path):
    path, follow = tmp_path / "metrics.jsonl", RunFollower()
    assert follow.lines(path) == []
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"step": 5}) + '\n{"step"')
    assert follow.lines(path) == [LINE, LINE | {"step": 5}]
    assert follow.lines(path) == []
    with path.open("a") as file:
        file.write(": 6}\n")
    assert follow.lines(path) == [{"step": 6}]


def test_a_pipe_gets_no_bar():
    with progress(5) as look:
        assert look is None


HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize("ended_by", [None, KeyboardInterrupt])
def test_a_bar_gives_the_terminal_back_however_the_run_ends(monkeypatch, tmp_path, capsys, ended_by):
    pytest.importorskip("rich")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    with suppress(KeyboardInterrupt), progress(50, 0.48) as look:
        look(tmp_path / "metrics.jsonl")
        if ended_by:
            raise ended_by
    drawn = capsys.readouterr().err
    assert "480 ms predicted" in drawn
    assert drawn.count(HIDE_CURSOR) == 1 and drawn.rindex(SHOW_CURSOR) > drawn.rindex(HIDE_CURSOR)


def test_steps_after_the_last_look_are_drawn_in_the_end(monkeypatch, tmp_path, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(LINE | {"step": 48}) + "\n")
    with progress(50) as look:
        look(path)
        path.write_text(path.read_text() + json.dumps(LINE | {"step": 49}) + "\n")
    assert "step 50/50" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_said_on_the_way_and_at_the_end():
    from foreshard.report.plain import render
    from foreshard.report.run_screen import run_screen
    from foreshard.runtime.records.outcome import RunOutcome

    assert step_words({**LINE, "loss_metrics/global_avg_loss": None}).startswith("loss not finite")
    told_of = {
        "out": "run",
        "steps": 5,
        "first_loss": 2.5,
        "last_loss": None,
        "median_step_s": 0.1,
        "mean_step_s": 0.1,
        "clock": "wall",
        "restarts": 0,
        "generations": 1,
        "samples": 10,
        "lost": 0,
        "repeated": 0,
    }
    shown = render(run_screen(RunOutcome(**told_of)))
    assert "not finite" in shown and "--clip-norm" in shown
    fine = render(run_screen(RunOutcome(**{**told_of, "last_loss": 2.0})))
    assert "--clip-norm" not in fine and "2.0000  (from 2.5000)" in fine
    steered = {**told_of, "last_loss": 2.0, "budgets": {"usd_per_h": {"limit": 8.0, "mean": 7.4952}}}
    assert (
        "usd_per_h, mean" in (kept := render(run_screen(RunOutcome(**steered)))) and "budget 8, kept" in kept
    )
    steered["budgets"] = {"usd_per_h": {"limit": 8.0, "mean": 10.0}}
    assert "exceeded by 25.0 %" in render(run_screen(RunOutcome(**steered)))


def test_budgets_of_a_run_are_read_from_its_last_line():
    from foreshard.runtime.records.outcome import _budgets

    line = {"budget/duty:0/limit": 0.7, "budget/duty:0/mean": 0.5, "budget/duty:0/backlog": 3.0, "step": 4}
    assert _budgets(line) == {"duty:0": {"limit": 0.7, "mean": 0.5}} and _budgets({"step": 4}) == {}
