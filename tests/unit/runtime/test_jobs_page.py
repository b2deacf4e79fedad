"""The page on jobs shows a job of ten lines that trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from foreshard.runtime.job.job import OPTIONAL, REQUIRED, load_job
from foreshard.runtime.trainer import Trainer
from foreshard.spec.plan_file import parse_plan

PAGE = (Path(__file__).parents[3] / "docs" / "runtime_jobs.md").read_text()
JOB = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)  # type: ignore[union-attr]


def test_the_job_of_the_page_has_ten_lines_and_trains(tmp_path: Path) -> None:
    assert len(JOB.splitlines()) <= 10
    (tmp_path / "job.py").write_text(JOB)
    job = load_job(str(tmp_path / "job.py"))
    group = {"share": 4, "micro_batch": 2, "stages": [{"ranks": [0], "layers": [[0, job.num_layers]]}]}
    plan = parse_plan({"global_batch": 4, "seq_len": 32, "precision": "fp32", "groups": [group]})
    trainer = Trainer(job, plan)
    losses = [trainer.train_step().loss for _ in range(8)]
    assert losses[0] == pytest.approx(5.5, abs=0.6)
    assert losses[-1] < losses[0]


def test_the_page_names_what_there_is() -> None:
    for name in (*REQUIRED, *OPTIONAL):
        assert f"| `{name}" in PAGE
