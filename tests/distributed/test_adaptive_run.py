"""`foreshard run --policy` as a user starts it: no lab, the wall clock, a rank that really becomes slow.

Every rank's layers sleep for a stated time a sample, so that the two cores of a test machine are not what is
measured; from a step on one rank sleeps four times as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from foreshard.runtime.job.job import load_job
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan_file import parse_plan

STEPS, SLOW_FROM, BATCH, SLOW_RANK = 30, 12, 24, 2
JOB = """
import json, os, pathlib, time
import torch
from torch import nn

SLOW_RANK = 2
RANK = int(os.environ.get("FORESHARD_RANK", -1))
METRICS = pathlib.Path("run/metrics.jsonl")

def is_slow():
    lines = METRICS.read_text().count("\\n") if METRICS.exists() else 0
    return RANK == SLOW_RANK and lines >= int(os.environ["SLOW_FROM"])

class Pausing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(len(x) * float(os.environ["PAUSE_S"]) * (4.0 if is_slow() else 1.0))
        return torch.tanh(self.inner(x))

def model(): return [lambda: Pausing().double() for _ in range(2)]
def dataset(): return torch.randn(512, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
def inputs(batch): return batch
def loss(output, batch): return (output - batch).square().sum(), len(output)
def optimizer(params): return torch.optim.AdamW(params, lr=1e-2)
"""
CLUSTER = """
name = "three hosts"
[[devices]]
name = "box"
base = "rtx-3090"
[[nodes]]
count = 3
device = "box"
per_node = 1
nic = "10 Gb/s"
usd_per_h = 1.0
"""
PAUSE_S = 2e-3
"""Seconds per sample and layer."""
LAYER = {
    "forward_s": [2e-4, PAUSE_S],
    "backward_s": [2e-4, 0.0],
    "backward_input_s": [1e-4, 0.0],
    "optimizer_s": 1e-4,
    "parameter_bytes": 576.0,
    "state_bytes": 1152.0,
    "saved_bytes_per_sample": 64.0,
    "boundary_bytes_per_sample": 64.0,
    "frozen_bytes": 0.0,
}
COSTS = {
    "schema_version": 1,
    "kind": "measured costs",
    "clock": "wall",
    "layers": [LAYER] * 2,
    "devices": {"box": 1.0},
    "spread": [0.95, 1.05],
    "tokens_per_sample": 1,
    "samples": [1, 4],
}


def plan_of(shares):
    groups = [
        {"share": share, "micro_batch": 4, "zero": 0, "stages": [{"ranks": [rank], "layers": [[0, 2]]}]}
        for rank, share in enumerate(shares)
    ]
    return {"global_batch": BATCH, "seq_len": 1, "precision": "fp32", "groups": groups}


def run(folder: Path, *words):
    """Run foreshard in a folder; return its answer and the lines of its metrics."""
    folder.mkdir()
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "costs.json").write_text(json.dumps(COSTS))
    (folder / "plan.json").write_text(json.dumps(plan_of((8, 8, 8))))
    (folder / "job.py").write_text(JOB)
    command = ["run", "job.py", "--plan", "plan.json", "--local", "3", "--steps", str(STEPS)]
    done = subprocess.run(
        [sys.executable, "-m", "foreshard", *command, *words, "--json"],
        cwd=folder,
        env=os.environ | {"PAUSE_S": str(PAUSE_S), "SLOW_FROM": str(SLOW_FROM)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(done.stdout), [json.loads(line) for line in lines]


def share_of(line, rank):
    pairs = zip(line["shares"], line["pipelines"], strict=True)
    return sum(share for share, stages in pairs if stages[0][0] == rank)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Losses of one process."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "job.py").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAUSE_S", "0")
        trainer = Trainer(load_job(str(folder / "job.py")), parse_plan(plan_of((BATCH,))))
        return [trainer.train_step().loss for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("policy", "costs"),
    [
        ("lyapunov", True),
        pytest.param("lyapunov", False, marks=pytest.mark.slow),
        pytest.param("lb-bsp", False, marks=pytest.mark.slow),
    ],
)
def test_shares_move_away_from_a_rank_that_becomes_slow(tmp_path, single, policy, costs):
    words = ("--cluster", "cluster.toml", "--policy", policy, "--budget", "usd_per_h=4")
    answer, lines = run(tmp_path / "here", *words, *(("--costs", "costs.json") if costs else ()))
    assert (answer["clock"], answer["lost"], answer["repeated"], answer["misread"]) == ("wall", 0, 0, 0)
    assert ("predicted_step_s" in answer) == costs
    assert [line["loss_metrics/global_avg_loss"] for line in lines] == pytest.approx(single, rel=1e-9)
    before, after = (share_of(lines[step], SLOW_RANK) for step in (SLOW_FROM, STEPS - 1))
    assert before >= 6, "equal ranks have about equal shares"
    assert after <= 4, "a rank four times as slow has 24/9 of 24 samples when all end together"
    assert lines[-1]["controller/policy"] == policy and lines[-1]["controller/orders"] >= 1
    events = [json.loads(line) for line in (tmp_path / "here/run/controller.jsonl").read_text().splitlines()]
    assert ("learned" in events[0]) == (not costs)
    measured = [event for event in events if event.get("event") == "StepMeasured"]
    assert len(measured) == STEPS, "steps that teach speeds count in budgets too"
    assert measured[-1]["costs"]["usd_per_h"] > 0.0
