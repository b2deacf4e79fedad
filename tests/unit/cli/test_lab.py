"""`foreshard lab`: a lab shown, and what is refused before anything starts."""

from dataclasses import fields
from pathlib import Path

import pytest

from foreshard.lab import lab, network

LABS = Path(__file__).parents[3] / "examples" / "labs"
JOB = LABS.parent / "jobs" / "gpt_job.py"
PLAN = (
    '{"global_batch": 4, "seq_len": 8, "precision": "fp32", "groups": [{"share": 4, "stages": '
    '[{"ranks": [0], "layers": [[0, 8]]}]}]}'
)


def test_a_lab_is_shown(shell):
    found = shell("lab", LABS / "mixed4.toml", "--json").json
    assert found["missing"] is None
    assert [rank["slow"] for rank in found["lab"]["ranks"]] == [1, 2, 4, 8]
    text = shell("lab", LABS / "links_change.toml").out
    assert "cpu-2x" in text and "6.25 MB/s" in text
    assert "memory" not in text and "per hour" not in text  # not stated
    assert "$4.00" in shell("lab", LABS / "swinging4.toml").out


def test_the_schema_lists_exactly_the_keys_of_the_parser(shell):
    keys = shell("schema", "lab", "--json").json["keys"]
    tables = {"lab": lab.LabFile, "ranks": lab.LabRanks, "change": lab.Change, "network": lab.LabLinks}
    for name, table in tables.items():
        assert set(keys[name]) == {field.name for field in fields(table)}
    assert set(keys["table"]) == {"forward", "backward", "optimizer"}


def test_a_machine_that_cannot_enforce_a_lab_says_why(shell, monkeypatch, tmp_path):
    monkeypatch.setattr(network, "missing", lambda: "only root may")
    assert "cannot enforce it: only root may" in shell("lab", LABS / "mixed4_wall.toml").out
    (tmp_path / "plan.json").write_text(PLAN)
    refused = shell("lab", LABS / "mixed4_wall.toml", "--plan", tmp_path / "plan.json", JOB)
    assert refused.code == 2 and "only root may" in refused.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--plan", "p.json"], "a job and a plan go together"),
        ([JOB], "a job and a plan go together"),
        (["--plan", "p.json", "--steps", "0", JOB], "Must be a whole number from 1 to"),
    ],
)
def test_what_does_not_go_together(shell, more, said):
    refused = shell("lab", LABS / "mixed4.toml", *more)
    assert refused.code == 2 and said in refused.err


def test_run_refuses_a_lab_it_cannot_keep(shell, tmp_path):
    (tmp_path / "plan.json").write_text(PLAN)
    told = ["run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "out", "--lab"]
    wall = shell(*told, LABS / "mixed4_wall.toml", "--local", "1", JOB)
    assert wall.code == 2 and "the wall clock has to be enforced" in wall.err
    five = shell(*told, LABS / "mixed4.toml", "--local", "5", JOB)
    assert five.code == 2 and "the lab has 4 ranks, 5 start" in five.err
    assert not (tmp_path / "out").exists()


def test_a_prediction_needs_the_lab(shell, tmp_path):
    (tmp_path / "plan.json").write_text(PLAN)
    told = shell("run", "--plan", tmp_path / "plan.json", "--costs", "c.json", "--local", "1", JOB)
    assert told.code == 2 and "A prediction needs the cluster" in told.err
