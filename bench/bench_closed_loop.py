"""The closed loop on this machine: profile, predict, train, compare, for a small GPT and a small CNN.

Two ranks over gloo train each job as two replicas and as a pipeline of two stages, with three sizes of
micro-batch: twelve configurations. Costs are of one profile of the job; nothing is fitted to the runs. Times
are of the processor's clock (`clock = "cpu"` of the lab, links as its file states them): the wall is too
noisy on a machine that others use. Prints one line each, in markdown, and the median error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foreshard.lab.lab import load_lab
from foreshard.predict.measured.costs import MeasuredCosts, load_costs
from foreshard.predict.measured.engine import predict_measured
from foreshard.runtime.records.outcome import kept_steps
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan

ROOT = Path(__file__).parents[1]
JOBS = {"gpt": "gpt_job.py", "cnn": "cnn_job.py"}
BATCH = 64
MICRO_BATCHES = (4, 8, 16)
WARM_UP = 2
LAB = """name = "two ranks"
clock = "cpu"
[[ranks]]
count = 2
device = "cpu"
slow = 1.0
[network]
bandwidth = "10 Gb/s"
latency = "50 us"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A job, how its two ranks train it, and the samples that pass together."""

    job: str
    layout: str
    micro_batch: int

    def plan(self, layers: int, seq_len: int) -> Plan:
        """Return the plan: two replicas, or a pipeline cut in the middle."""
        shared = {"micro_batch": self.micro_batch, "zero": 0}
        if self.layout == "replicas":
            groups = [
                shared | {"share": BATCH // 2, "stages": [{"ranks": [rank], "layers": [[0, layers]]}]}
                for rank in range(2)
            ]
        else:
            cuts = ((0, layers // 2), (layers // 2, layers))
            stages = [{"ranks": [rank], "layers": [list(cut)]} for rank, cut in enumerate(cuts)]
            groups = [shared | {"share": BATCH, "stages": stages}]
        return parse_plan(
            {
                "global_batch": BATCH,
                "seq_len": seq_len,
                "precision": "fp32",
                "framework": "foreshard",
                "groups": groups,
            }
        )


def configurations(job: str) -> Iterator[Configuration]:
    """Yield those of a job."""
    for layout in ("replicas", "pipeline"):
        for micro_batch in MICRO_BATCHES:
            yield Configuration(job=job, layout=layout, micro_batch=micro_batch)


def quiet(words: list[str]) -> None:
    """Run a verb without its words, unless it fails."""
    made = subprocess.run(
        [sys.executable, "-m", "foreshard", *words], capture_output=True, text=True, env={**os.environ}
    )
    if made.returncode:
        sys.exit(made.stderr)


def profiled(folder: Path, job: str, lab: Path, repeats: int) -> MeasuredCosts:
    """Profile a job, and return its costs on the lab."""
    profile, costs = folder / f"{job}-profile.json", folder / f"{job}-costs.json"
    sizes = ",".join(map(str, (1, *MICRO_BATCHES)))
    asked = ["--local", "2", "--no-links", "--samples", sizes, "--repeats", str(repeats), "-o", str(profile)]
    quiet(["profile", str(ROOT / "examples/jobs" / JOBS[job]), *asked])
    quiet(["calibrate", "--profile", str(profile), "--lab", str(lab), "-o", str(costs)])
    return load_costs(str(costs))


def measured_s(folder: Path, configuration: Configuration, plan: Plan, lab: Path, steps: int) -> float:
    """Train, and return the median seconds of a step."""
    file, out = folder / "plan.json", folder / "run"
    file.write_text(json.dumps(plan.to_dict()))
    shutil.rmtree(out, ignore_errors=True)
    job = str(ROOT / "examples/jobs" / JOBS[configuration.job])
    asked = ["--plan", str(file), "--local", "2", "--lab", str(lab), "--steps", str(WARM_UP + steps)]
    quiet(["run", job, *asked, "--out", str(out), "--json"])
    times = [line["time_metrics/end_to_end(s)"] for line in kept_steps(out / "metrics.jsonl")[WARM_UP:]]
    return median(times)


def main() -> None:
    """Print a line for each configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    print(
        "| job | layout | micro-batch | predicted (ms) | measured (ms) | error |\n|---|---|---|---|---|---|"
    )
    errors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = folder / "lab.toml"
        lab.write_text(LAB)
        cluster = load_lab(str(lab)).cluster()
        for job in JOBS:
            costs = profiled(folder, job, lab, asked.repeats)
            for one in configurations(job):
                plan = one.plan(len(costs.layers), max(1, round(costs.tokens_per_sample)))
                told = predict_measured(costs, cluster, plan).step_time_s
                took = measured_s(folder, one, plan, lab, asked.steps)
                errors.append(told / took - 1.0)
                cells = (job, one.layout, one.micro_batch, f"{1e3 * told:.1f}", f"{1e3 * took:.1f}")
                print(f"| {' | '.join(map(str, cells))} | {100 * errors[-1]:+.1f}% |", flush=True)
    worst = max(errors, key=abs)
    print(f"\nmedian error {100 * median(map(abs, errors)):.1f} %, largest {100 * worst:+.1f} %")


if __name__ == "__main__":
    main()
