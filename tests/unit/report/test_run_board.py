"""The board of a steered run: what it says of plan, budgets, time and orders."""

import io
import json
import sys

import pytest

from foreshard.report.run_board import Board, sparks
from foreshard.report.run_progress import progress


def line_of(step, **more):
    return {
        "step": step,
        "loss_metrics/global_avg_loss": 5.25,
        "time_metrics/end_to_end(s)": 0.2,
        "n_tokens": 640.0,
        "generation": 1,
        "shares": [48, 16],
        "pipelines": [[[0, 0, 5], [2, 5, 8]], [[1, 0, 8]]],
        "controller/policy": "lyapunov",
        "controller/weight": 2.0,
        "controller/bound_s": 0.16,
        "controller/reconfigurations": 1,
        "controller/order": "",
        "controller/orders": 0,
        "budget/usd_per_h/backlog": 4.0,
        "budget/usd_per_h/over": 0.05,
        "budget/usd_per_h/limit": 6.0,
        "budget/usd_per_h/mean": 6.3,
        **more,
    }


def drawn(board, width=100):
    pytest.importorskip("rich")
    from rich.console import Console

    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    console.print(board.render())
    return console.export_text()


def test_it_says_where_the_run_is_and_what_it_runs():
    board = Board(50)
    board.take(line_of(9))
    assert board.head() == "step 10/50  loss 5.25  200 ms a step  bound 160 ms (+25 %)  3.20 k tokens/s"
    assert board.pipelines() == [("48 (75 %)", "0: 0-4  >  2: 5-7"), ("16 (25 %)", "1: 0-7")]
    text = drawn(board)
    assert "0: 0-4  >  2: 5-7" in text and "reconfigurations 1" in text and "generation 1" in text


def test_budgets_are_beside_what_they_allow_and_queues_have_length():
    board = Board(50)
    board.take(line_of(0))
    board.take(line_of(1, **{"budget/usd_per_h/backlog": 1.0, "budget/usd_per_h/over": -0.01}))
    ((name, limit, mean, over, queue),) = board.budgets()
    assert (name, limit, mean, over) == ("usd_per_h", "6", "6.3", "-1.0 %")
    assert queue.count("█") == 5, "a quarter of the longest it was"


def test_a_step_that_was_finished_after_a_loss_says_nothing_of_the_controller():
    board = Board(50)
    board.take(line_of(0))
    bare = {
        key: value
        for key, value in line_of(0).items()
        if "/" not in key and key not in ("shares", "pipelines")
    }
    board.take(
        bare | {"loss_metrics/global_avg_loss": 5.0, "time_metrics/end_to_end(s)": None, "generation": 2}
    )
    text = drawn(board)
    assert "loss 5" in text and "0: 0-4  >  2: 5-7" in text and "generation 2" in text and "6.3" in text


def test_the_last_orders_stay_and_each_is_told_once():
    board = Board(50)
    for step in range(8):
        board.take(
            line_of(step, **{"controller/order": "re-share: shares follow", "controller/orders": step // 2})
        )
    text = drawn(board)
    assert [f"step {step}  re-share" in text for step in range(8)] == [True, False] * 4


def test_a_step_cut_in_two_has_no_time():
    board = Board(50)
    board.take(line_of(3, **{"time_metrics/end_to_end(s)": None}))
    assert board.head() == "step 4/50  loss 5.25"
    assert "step 4/50" in drawn(board)


def test_times_are_bars_from_nothing():
    assert sparks([1.0, 0.5, 0.0]) == "█▅▁" and sparks([]) == "" and sparks([0.0]) == ""


def test_a_steered_run_gets_a_board_on_a_terminal(monkeypatch, tmp_path, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    lines = [json.dumps(line_of(step)) for step in range(2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with progress(2) as look:
        look(tmp_path / "metrics.jsonl")
    assert "usd_per_h" in capsys.readouterr().err
