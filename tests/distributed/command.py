"""`foreshard run` as a user starts it, on a job given as text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rehearsal import plan_of

from foreshard.runtime.records.durable_jsonl import whole_lines

JOB = {
    "model": "def model(): return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]",
    "dataset": "def dataset(): return torch.arange(400.0).view(100, 4) / 400",
    "inputs": "def inputs(batch): return batch",
    "loss": "def loss(output, batch): return output.square().sum(), len(output)",
    "optimizer": "def optimizer(params): return torch.optim.SGD(params, lr=1e-2)",
}
"""A job of four layers; tests replace parts of it."""
HEAD = "import os, sys, time\nfrom pathlib import Path\nimport torch\nfrom torch import nn\n"
RANK = "int(os.environ['FORESHARD_RANK'])"


def replicas(ranks: int, *, layers: int = 4, batch: int = 4) -> Any:
    """Return a plan of pipelines of one rank each."""
    share = batch // ranks
    return plan_of(
        [{"share": share, "micro_batch": share, "stages": [([r], [[0, layers]])]} for r in range(ranks)],
        global_batch=batch,
    )


def pipeline(ranks: int = 2, *, layers: int = 4, batch: int = 4) -> Any:
    """Return a plan of one pipeline of even stages."""
    each = layers // ranks
    stages = [([r], [[r * each, (r + 1) * each]]) for r in range(ranks)]
    return plan_of([{"share": batch, "micro_batch": 1, "stages": stages}], global_batch=batch)


@dataclass
class Run:
    """A run that has ended."""

    out: Path
    code: int
    stdout: str
    stderr: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        return whole_lines(self.out / name)

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss_metrics/global_avg_loss"] for line in self.lines("metrics.jsonl")}


class Command:
    """`foreshard run` under way."""

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, str],
        plan: Any,
        *flags: str,
        local: int = 2,
        out: str = "run",
        environment: Mapping[str, str] | None = None,
    ):
        self.out = folder / out
        (folder / "job.py").write_text(HEAD + "\n".join({**JOB, **parts}.values()) + "\n")
        (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
        words = [sys.executable, "-m", "foreshard", "run", "job.py", "--plan", "plan.json"]
        self.process = subprocess.Popen(
            [*words, "--local", str(local), "--out", out, *map(str, flags)],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, within_s: float = 240.0) -> Run:
        """Wait for it."""
        try:
            stdout, stderr = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"not done after {within_s} s: {stdout[-500:]} {stderr[-2000:]}") from None
        return Run(self.out, self.process.returncode, stdout, stderr)


def run(folder: Path, parts: Mapping[str, str], plan: Any, *flags: str, **more: Any) -> Run:
    """Return the outcome of `foreshard run`."""
    within_s = more.pop("within_s", 240.0)
    return Command(folder, parts, plan, *flags, **more).end(within_s)


def events(found: Run, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of these kinds in both logs."""
    lines = [*found.lines("events.jsonl"), *found.lines("supervisor.jsonl")]
    return [line for line in lines if line["kind"] in kinds]
