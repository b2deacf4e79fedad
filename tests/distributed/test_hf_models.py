"""Models of transformers train under uneven plans as in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from small_plans import PLANS

from foreshard.runtime.equality import gradient_error
from foreshard.runtime.job import load_job

JOB = Path(__file__).parents[2] / "examples" / "jobs" / "llama_job.py"


@pytest.mark.parametrize("plan", ["two uneven pipelines", "three stages, zb-h1", "interleaved", "recompute",
                                  "uneven data in both stages, zero 1"])  # fmt: skip
def test_a_llama_of_eight_layers_with_tied_words_is_exact(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of different length: the loss counts words, and words are what the gradient is divided by."""
    monkeypatch.setenv("LLAMA_DTYPE", "float64")
    monkeypatch.setenv("LLAMA_WIDTH", "32")
    job = load_job(str(JOB))
    assert (job.num_layers, len(job.tied)) == (8, 1)
    assert gradient_error(job, PLANS[plan]) <= 1e-13
