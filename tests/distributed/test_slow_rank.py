"""A rank of a lab becomes slow for a while: the log says who, since when, and that it has recovered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rehearsal import plan_of
from small_files import TWO_RANKS

from foreshard.lab.emulation import emulation_of
from foreshard.runtime.launch import launch

JOB = """
import torch
from torch import nn

def model(): return [nn.Linear(2, 2), nn.Linear(2, 1)]
def dataset(): return torch.zeros(8, 2)
def inputs(batch): return batch
def loss(output, batch): return output.square().sum(), len(output)
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
"""
SLOWER = """
[[change]]
at_step = 25
rank = 1
slow = 6
[[change]]
at_step = 50
rank = 1
slow = 2
"""
GROUPS = [{"share": 1, "micro_batch": 1, "stages": [([rank], [[0, 2]])]} for rank in range(2)]


def test_a_slow_rank_is_an_event(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "lab.toml").write_text(TWO_RANKS + SLOWER)
    (tmp_path / "plan.json").write_text(json.dumps(plan_of(GROUPS, global_batch=2).to_dict()))
    out = tmp_path / "run"
    launch(
        str(tmp_path / "job.py"),
        str(tmp_path / "plan.json"),
        local=2,
        steps=75,
        out=str(out),
        emulation=emulation_of(str(tmp_path / "lab.toml"), ranks=2),
    )
    events = [json.loads(text) for text in (out / "events.jsonl").read_text().splitlines()]
    told = [(e["kind"], e["who"], e["since_step"]) for e in events if e["kind"].startswith("rank_")]
    assert told == [("rank_slow", 1, 25), ("rank_recovered", 1, 50)]
    slow = next(e for e in events if e["kind"] == "rank_slow")
    assert slow["factor"] == pytest.approx(3.0, rel=1e-3) and slow["pid"] > 0
    assert slow["text"] == "rank 1 takes 3.00 times as long a sample since step 25"
