"""Real runs on a lab that changes, every policy in the same one, each beside what `foretell` says of it.

Four local ranks (examples/labs/restless4.toml: speeds and links change nine times, a rank joins late, one is
killed and comes back), in virtual time of measured processor time, in double precision. Without a budget: the
controller, the greedy plan, shares by the last speeds, the planned plan, even shares. Under a budget of rent:
those that can keep one. All losses are compared with a run that nothing disturbs. A step is the mean over the
run, changes included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from foreshard.runtime.foretelling import foretell
from foreshard.runtime.lab import load_lab
from foreshard.runtime.outcome import kept_steps

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "examples" / "jobs" / "gpt_job.py")
LAB = str(ROOT / "examples" / "labs" / "restless4.toml")
SETTINGS = {"GPT_DTYPE": "float64", "GPT_WIDTH": "64", "GPT_BLOCKS": "4", "OMP_NUM_THREADS": "1"}
FREE = (
    ("lyapunov", "plan", "lyapunov"), ("greedy", "plan", "greedy"), ("lb-bsp", "plan", "lb-bsp"),
    ("planned, stays", "plan", "static"), ("even shares", "even", "static"),
)  # fmt: skip
KEPT = tuple(row for row in FREE if row[2] != "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run that has ended."""

    losses: list[float]
    step_s: float
    usd_per_h: float
    reconfigurations: int
    lost: int
    wall_s: float

    def apart(self, other: Ran) -> float:
        """Return the largest relative difference of losses."""
        return max(abs(a - b) / b for a, b in zip(self.losses, other.losses, strict=True))


def foreshard(*words: str) -> dict[str, Any]:
    """Run a verb and return its object."""
    done = subprocess.run(
        [sys.executable, "-m", "foreshard", *words, "--json"], check=False, capture_output=True, text=True,
        env=os.environ | SETTINGS,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


class Bench:
    """A folder with costs and plans of the job on the lab, and the runs in it."""

    def __init__(self, folder: Path, steps: int, batch: int):
        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)
        profile, costs, plan = (self.file(one) for one in ("profile.json", "costs.json", "plan.json"))
        foreshard("profile", JOB, "--local", "4", "--samples", "1,2,4,8", "-o", profile)
        foreshard("calibrate", "--profile", profile, "--lab", LAB, "-o", costs)
        asked = ("--global-batch", str(batch), "--seq", "64", "--dtype", "fp32")
        foreshard("plan", JOB, LAB, "--costs", costs, *asked, "-o", plan)
        words = [sys.executable, str(ROOT / "scripts" / "even_split.py"), plan, "4"]
        told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        Path(self.file("even.json")).write_text(told)
        Path(self.file("calm.toml")).write_text(Path(LAB).read_text().partition("[[change]]")[0])

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    def run(self, name: str, plan: str, policy: str, seed: int, budget: str | None, lab: str = LAB) -> Ran:
        """Train, and read what came of it."""
        out, began_s = self.folder / name.replace(", ", "-"), time.monotonic()
        words = ["run", JOB, "--plan", self.file(f"{plan}.json"), "--local", "4", "--lab", lab]
        words += ["--steps", str(self.steps), "--out", str(out), "--seed", str(seed)]
        if policy != "static":
            words += ["--policy", policy, "--costs", self.file("costs.json")]
        if budget is not None:
            words += ["--budget", budget]
        outcome = foreshard(*words)
        lines = kept_steps(out / "metrics.jsonl")
        took_s = lines[-1]["clock_s"] - lines[0]["clock_s"]
        return Ran(
            losses=[line["loss_metrics/global_avg_loss"] for line in lines],
            step_s=took_s / (len(lines) - 1), usd_per_h=rent(lines) / took_s,
            reconfigurations=lines[-1].get("controller/reconfigurations", 0),
            lost=outcome["lost"] + outcome["repeated"], wall_s=time.monotonic() - began_s,
        )  # fmt: skip

    def foretold_s(self, plan: str, policy: str, budget: str | None) -> float:
        """Return the mean step that the simulator gives, the first left out as in the runs."""
        found = foretell(
            LAB, costs=self.file("costs.json"), plan=self.file(f"{plan}.json"), steps=self.steps,
            policies=(policy,), budgets=() if budget is None else (budget,),
        )  # fmt: skip
        return float(found[policy].time_s[1:].mean())

    def table(
        self, rows: Sequence[tuple[str, str, str]], calm: Ran, seed: int, budget: str | None
    ) -> dict[str, Any]:
        """Run the rows and print a line for each."""
        print(f"\nseed {seed}, {budget or 'no budget'}\n{'':15} mean step  foretold             $/h  changes"
              "  losses apart  wall", flush=True)  # fmt: skip
        found = {}
        for title, plan, policy in rows:
            one = self.run(f"{title}-{seed}-{budget}", plan, policy, seed, budget)
            told_s, apart = self.foretold_s(plan, policy, budget), one.apart(calm)
            print(
                f"{title:15}{1e3 * one.step_s:7.1f} ms{1e3 * told_s:7.1f} ms "
                f"{100 * (one.step_s / told_s - 1):+7.1f} %{one.usd_per_h:7.2f}{one.reconfigurations:9}"
                f"{apart:14.1e}{one.wall_s:5.0f}s",
                flush=True,
            )
            found[title] = {
                "step_s": one.step_s, "foretold_s": told_s, "usd_per_h": one.usd_per_h, "lost": one.lost,
                "reconfigurations": one.reconfigurations, "losses_apart": apart,
            }  # fmt: skip
        return found


def rent(lines: Sequence[dict[str, Any]]) -> float:
    """Return dollars per hour times seconds, of the ranks in use."""
    total, price = 0.0, load_lab(LAB).usd_per_h
    for before, line in pairwise(lines):
        used = {int(rank) for rank, work_s in line["work_s_by_rank"].items() if work_s > 0}
        if "pipelines" in line:
            used = {stage[0] for stages in line["pipelines"] for stage in stages}
        total += sum(price[rank] or 0.0 for rank in used) * (line["clock_s"] - before["clock_s"])
    return total


def main() -> None:
    """Print a table per seed, without and with the budget, and everything as one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--budget", default="usd_per_h=7")
    parser.add_argument("--only", nargs="*", help="policies to run")
    parser.add_argument("--out", help="folder to keep the runs in")
    asked = parser.parse_args()
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(asked.out or name), asked.steps, asked.batch)
        found: dict[str, Any] = {}
        for seed in asked.seeds:
            calm = bench.run(f"calm-{seed}", "even", "static", seed, None, lab=bench.file("calm.toml"))
            for rows, budget in ((FREE, None), (KEPT, asked.budget)):
                chosen = [row for row in rows if not asked.only or row[2] in asked.only]
                found[f"{seed}/{budget}"] = bench.table(chosen, calm, seed, budget)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
