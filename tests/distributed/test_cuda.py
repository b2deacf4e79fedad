"""Training on CUDA: the gradients of every plan are those of one process on the processor.

Ranks share the one device that is at hand, over gloo: NCCL connects no two ranks of a device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rehearsal import gradients, plan_of, rehearse, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS

from foreshard.runtime.engine.cuda_clock import CudaClock

EXAMPLE = Path(__file__).parents[2] / "examples/jobs/gpt_job.py"
COMMAND_PLANS = {
    "one rank": plan_of([{"share": 8, "micro_batch": 2, "stages": [([0], [[0, 8]])]}], global_batch=8),
    "two replicas": plan_of(
        [{"share": s, "micro_batch": 2, "stages": [([r], [[0, 8]])]} for r, s in enumerate((6, 2))],
        global_batch=8,
    ),
    "interleaved": plan_of(
        [
            {
                "share": 8,
                "micro_batch": 2,
                "schedule": "interleaved",
                "stages": [([0], [[0, 1], [3, 5]]), ([1], [[1, 3], [5, 8]])],
            }
        ],
        global_batch=8,
    ),
    "tp": plan_of(
        [{"share": 8, "micro_batch": 4, "stages": [([0, 1], [[0, 8]], {"tp": 2})]}], global_batch=8
    ),
    "zero 3": plan_of(
        [{"share": 8, "micro_batch": 4, "stages": [([0, 1], [[0, 8]])]}], global_batch=8, zero=3
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("job", JOBS)
def test_gradients_are_those_of_the_processor(job: str, plan: str) -> None:
    expected = rehearse(JOBS[job](torch.float64), ALONE, steps=1, after=gradients)[0][1]

    def on_host(trainer: Any) -> dict:
        return {key: part.cpu() for key, part in gradients(trainer).items()}

    found = rehearse(
        JOBS[job](torch.float64),
        PLANS[plan],
        steps=1,
        after=on_host,
        ranks=range(4),
        device=torch.device("cuda", 0),
        clock=CudaClock,
    )
    assert worst_error(found, expected) <= 1e-12


def trained(
    tmp_path: Path, plan: Any, device: str, *more: str, job: Path = EXAMPLE
) -> tuple[list[float], list[dict]]:
    file, out = tmp_path / "plan.json", tmp_path / f"run-{device}"
    file.write_text(json.dumps(plan.to_dict()))
    words = [sys.executable, "-m", "foreshard", "run", str(job), "--plan", str(file), "--steps", "4"]
    words += [
        "--local",
        str(len(plan.ranks)),
        "--device",
        device,
        "--dtype",
        "fp64",
        "--out",
        str(out),
        *more,
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss_metrics/global_avg_loss"] for row in rows], rows


@pytest.mark.parametrize("plan", COMMAND_PLANS)
def test_the_command_trains_on_cuda_as_on_the_processor(tmp_path: Path, plan: str) -> None:
    expected, _ = trained(tmp_path, COMMAND_PLANS[plan], "cpu")
    found, rows = trained(tmp_path, COMMAND_PLANS[plan], "cuda")
    assert found == pytest.approx(expected, rel=1e-9)
    assert all(work_s > 0 for row in rows for work_s in row["work_s_by_rank"].values())


DEADLY = """
import signal
class Deadly(Text):
    reads = 0
    def __getitem__(self, index):
        self.reads += 1
        mark = os.environ["DEADLY"]
        if os.environ.get("FORESHARD_RANK") == "1" and self.reads == 5 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
def dataset(): return Deadly()
"""


def test_a_killed_rank_on_cuda_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, mark, job = COMMAND_PLANS["two replicas"], tmp_path / "killed", tmp_path / "deadly_job.py"
    job.write_text(EXAMPLE.read_text() + DEADLY)
    expected, _ = trained(tmp_path, plan, "cpu")
    monkeypatch.setenv("DEADLY", str(mark))
    found, _ = trained(tmp_path, plan, "cuda", "--detect-s", "5", job=job)
    assert mark.exists()
    assert found == pytest.approx(expected, rel=1e-9)
