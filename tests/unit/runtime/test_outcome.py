"""What is said of a run when it ends, by the files in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreshard.catalog.models import load_model
from foreshard.report.plain import render
from foreshard.report.run_screen import run_screen
from foreshard.runtime.membership.supervisor_state import SupervisorState, save_state
from foreshard.runtime.records.outcome import kept_steps, outcome_of, steps_done
from foreshard.spec.degrees import plan_from_degrees


def test_ranks_that_stayed_away_are_named_though_the_plan_file_is_gone(tmp_path: Path) -> None:
    """Somebody may have removed the folder while the run trained: its end is said all the same."""
    plan = plan_from_degrees(
        load_model("gpt2").num_layers, 2, dp=2, micro_batch=1, global_batch=4, seq_len=16
    )
    save_state(tmp_path, SupervisorState(plan=plan.to_dict(), expected=[0, 1], ranks=[0], over=True))
    found = outcome_of(tmp_path, global_batch=4, steps=0, restarts=0)
    assert found.absent == (1,)


LINE = {"step": 0, "generation": 0, "loss_metrics/global_avg_loss": 2.0, "clock": "wall", "n_tokens": 4.0}
LINE |= {"time_metrics/end_to_end(s)": 0.5}


@pytest.mark.parametrize(
    "damaged",
    [
        *({key: value for key, value in LINE.items() if key != gone} for gone in LINE),
        *(LINE | {key: bad} for key in LINE for bad in ([], {}, True)),
        {},
    ],
)
def test_a_damaged_line_of_the_metrics_counts_nowhere_and_is_named(
    tmp_path: Path, damaged: dict[str, Any]
) -> None:
    lines = [LINE, damaged, LINE | {"step": 1, "time_metrics/end_to_end(s)": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["step"] for line in kept_steps(tmp_path / "metrics.jsonl")] == [0, 1]
    assert steps_done(tmp_path) == 2
    found = outcome_of(tmp_path, global_batch=4, steps=2, restarts=0)
    assert (found.damaged_lines, found.last_loss, found.median_step_s) == (1, 2.0, 0.5)
    assert "1 line of" in render(run_screen(found)) and "damaged" in render(run_screen(found))


@pytest.mark.parametrize("key", ["step", "generation", "positions", "samples"])
@pytest.mark.parametrize("bad", [None, "x", [["x"]], 0.5])
def test_samples_of_a_damaged_line_of_the_ledger_are_lost(tmp_path: Path, key: str, bad: Any) -> None:
    line = {"step": 0, "generation": 0, "rank": 0, "positions": [[0, 4]], "samples": [3, 1, 2, 0]}
    lines = [line | {key: bad}, {"commit": 0, "generation": 0}]
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcome_of(tmp_path, global_batch=4, steps=1, restarts=0).lost == 4
