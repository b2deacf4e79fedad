"""Models of transformers train under uneven plans as in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from rehearsal import plan_of
from small_plans import PLANS

from foreshard.runtime.gradient_check import gradient_error, single_rank_plan
from foreshard.runtime.job.job import load_job
from foreshard.runtime.launch import launch
from foreshard.runtime.trainer import Trainer

JOB = Path(__file__).parents[2] / "examples" / "jobs" / "llama_job.py"


@pytest.mark.parametrize(
    "plan",
    [
        "two uneven pipelines",
        "three stages, zb-h1",
        "interleaved",
        "recompute",
        "uneven data in both stages, zero 1",
    ],
)
def test_a_llama_of_eight_layers_with_tied_words_is_exact(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of different length: the loss counts words, and words are what the gradient is divided by."""
    monkeypatch.setenv("LLAMA_DTYPE", "float64")
    monkeypatch.setenv("LLAMA_WIDTH", "32")
    job = load_job(str(JOB))
    assert (job.num_layers, len(job.tied)) == (8, 1)
    assert gradient_error(job, PLANS[plan]) <= 1e-13


@pytest.mark.slow
def test_foreshard_run_trains_it_on_an_uneven_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, cut behind the fifth of six layers, train what one alone does."""
    monkeypatch.setenv("LLAMA_DTYPE", "float64")
    monkeypatch.setenv("LLAMA_WIDTH", "32")
    monkeypatch.setenv("LLAMA_BLOCKS", "4")
    stages = [([0], [[0, 5]]), ([1], [[5, 6]])]
    plan = plan_of([{"share": 4, "micro_batch": 3, "stages": stages}], global_batch=4)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    launch(str(JOB), str(tmp_path / "plan.json"), local=2, steps=3, out=str(tmp_path / "run"))
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    alone = Trainer(load_job(str(JOB)), single_rank_plan(plan, 6))
    losses = [alone.train_step().loss for _ in range(3)]
    assert [line["loss_metrics/global_avg_loss"] for line in told] == pytest.approx(losses, rel=1e-9)
