"""`foreshard run --dtype`, and what a run warns of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rehearsal import plan_of

from foreshard.runtime.checkpoint import format
from foreshard.runtime.launch import launch

JOB = """
import torch
from torch import nn
seen = []

def model(): return [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
def dataset(): return [(torch.full((4,), float(i)), torch.tensor([float(i % 3)])) for i in range(20)]
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)

def loss(output, batch):
    with open({seen!r}, "a") as file:
        print(output.dtype, file=file)
    return (output.float() - batch[1]).square().sum(), len(output)
"""
PLAN = plan_of([{"share": 4, "micro_batch": 4, "stages": [([0], [[0, 3]])]}], global_batch=4)


@pytest.mark.parametrize(
    ("dtype", "kept", "seen"),
    [
        pytest.param("fp64", "float64", "float64", marks=pytest.mark.slow),
        ("bf16", "float32", "bfloat16"),
        pytest.param(None, "float32", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_in_the_precision_asked_for(dtype, kept, seen, tmp_path: Path) -> None:
    """The plan says fp32. BatchNorm is warned of where an operator looks, once."""
    (tmp_path / "job.py").write_text(JOB.format(seen=str(tmp_path / "seen")))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_dict()))
    out = tmp_path / "run"
    found = launch(
        str(tmp_path / "job.py"),
        str(tmp_path / "plan.json"),
        local=1,
        steps=2,
        out=str(out),
        checkpoint_every=2,
        dtype=dtype,
    )
    assert found is not None and (found.steps, found.lost, found.misread) == (2, 0, 0)
    assert set((tmp_path / "seen").read_text().split()) == {f"torch.{seen}"}
    tensors = format.load(out / "ckpt", 2, lambda key: key.startswith("layers."))
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{kept}"}
    events = [json.loads(text) for text in (out / "events.jsonl").read_text().splitlines()]
    warned = [line["text"] for line in events if line["kind"] == "warning"]
    assert len(warned) == 1 and "BatchNorm" in warned[0] and "depends on the plan" in warned[0]
