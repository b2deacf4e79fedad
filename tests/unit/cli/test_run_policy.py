"""`foreshard run --policy`: what is refused before any rank starts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
JOB, LAB = ROOT / "examples" / "jobs" / "gpt_job.py", ROOT / "examples" / "labs" / "mixed4.toml"
GROUPS = [
    {"share": 4, "micro_batch": 4, "stages": [{"ranks": [rank], "layers": [[0, 8]]}]} for rank in range(3)
]
PLAN = {"global_batch": 12, "seq_len": 64, "precision": "fp32", "groups": GROUPS}
CLUSTER = ("--cluster", "3x1xrtx-3090@10Gb/s")


@pytest.fixture
def refused(shell, tmp_path):
    """Return what runs with a policy and gives the error."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))

    def run(*words):
        where = ("--plan", tmp_path / "plan.json", "--out", tmp_path / "out", "--local", "3")
        found = shell("run", JOB, *where, "--policy", "lyapunov", *words, "--json")
        assert found.code == 2 and not (tmp_path / "out").exists()
        return found.json["error"]

    return run


def test_a_policy_needs_a_cluster(refused):
    error = refused()
    assert error["key"] == "--policy" and "--cluster CLUSTER" in error["fix"]


def test_a_lab_is_a_cluster_itself(refused):
    error = refused(*CLUSTER, "--lab", LAB)
    assert error["key"] == "--cluster" and "A lab states what its ranks are" in error["rule"]


def test_every_rank_is_a_device_of_the_cluster(refused):
    error = refused("--cluster", "2x1xrtx-3090@10Gb/s")
    assert error["key"] == "--cluster" and "rank 2" in error["what"]


def test_the_model_has_the_layers_of_the_plan(refused):
    error = refused(*CLUSTER, "--model", "gpt2-small")
    assert "the plan splits 8 layers" in error["what"] and "14" in error["what"]


def test_a_budget_needs_what_the_cluster_states(refused):
    error = refused(*CLUSTER, "--budget", "carbon_kg_per_h=1")
    assert error["key"] == "carbon_kg_per_kwh" and "no carbon_kg_per_kwh" in error["what"]
