"""A run that Ctrl-C ends says how it goes on; a prediction of a lab that changes says what it is of."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is in the extra `run`")

from foreshard.cli import run
from foreshard.cli.options.training import how_to_resume
from foreshard.report.run_screen import run_screen
from foreshard.runtime import launch
from foreshard.runtime.records.outcome import RunOutcome

LABS = Path(__file__).parents[3] / "examples" / "labs"
JOB = LABS.parent / "jobs" / "gpt_job.py"
OUTCOME = RunOutcome(
    out="run",
    steps=4,
    first_loss=1.0,
    last_loss=0.5,
    median_step_s=0.5,
    mean_step_s=0.5,
    clock="cpu",
    restarts=0,
    generations=1,
    samples=4,
    lost=0,
    repeated=0,
    misread=0,
    budgets={},
)


def checkpoint_of(folder: Path, step: int) -> None:
    place = folder / "ckpt" / f"step-{step:010}"
    place.mkdir(parents=True)
    (place / "meta.json").write_text("{}")


def test_it_is_said_what_a_run_would_go_on_from(tmp_path):
    assert "starts at the first step" in how_to_resume(str(tmp_path))
    checkpoint_of(tmp_path, 8)
    checkpoint_of(tmp_path, 12)
    assert "--resume goes on from the checkpoint of step 12" in how_to_resume(str(tmp_path))


@pytest.mark.parametrize("words", [["run", "--local", 4, "--lab"], ["lab"]])
def test_ctrl_c_names_resume(shell, tmp_path, monkeypatch, words):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "launch", interrupted)
    told = shell(*words, LABS / "mixed4.toml", "--plan", "p.json", "--out", tmp_path, JOB)
    assert told.code == 130
    assert "--resume starts at the first step" in told.err and "interrupted" in told.err


def test_what_is_predicted_of_a_lab_that_changes_is_said():
    assert run.changes_of(str(LABS / "stragglers.toml")) and not run.changes_of(str(LABS / "mixed4.toml"))
    assert any("without its changes" in note for note in run_screen(OUTCOME, 0.5, changes=True).notes)
    assert not any("without its changes" in note for note in run_screen(OUTCOME, 0.5).notes)
    assert not any("without its changes" in note for note in run_screen(OUTCOME, changes=True).notes)


def test_ranks_that_were_not_there_at_the_end_are_told():
    left_out = [box for box in run_screen(replace(OUTCOME, absent=(1, 3))).boxes if box.alarm]
    assert [(box.title, box.value) for box in left_out] == [("Ranks left out", "1, 3")]
    assert not any(box.alarm for box in run_screen(OUTCOME).boxes)


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        ({"lost": 2}, 1, "2 samples lost"),
        ({"stopped_by": signal.SIGTERM}, 143, "ended after step 3, as asked"),
        ({"stopped_by": signal.SIGINT}, 130, "ended after step 3, as asked"),
    ],
)
@pytest.mark.parametrize("words", [["run", "--local", 4, "--lab"], ["lab"]])
def test_a_run_and_a_lab_end_with_the_same_codes(shell, tmp_path, monkeypatch, words, ended, code, said):
    monkeypatch.setattr(launch, "launch", lambda *given, **more: replace(OUTCOME, **ended))
    told = [*words, LABS / "mixed4.toml", "--plan", "p.json", "--out", tmp_path, JOB]
    if code > 128:
        with pytest.raises(SystemExit) as left:
            shell(*told)
        assert left.value.code == code
        return
    answer = shell(*told)
    assert answer.code == code and said in answer.err
