"""Real runs on a lab that changes, every policy in the same one, each beside what `simulate_lab` says of it.

Four local ranks (examples/labs/restless4.toml, its changes moved to fit the steps: speeds and links change
nine times, a rank joins late, one is killed and comes back), in virtual time of measured processor time, in
double precision. Without a budget: the controller, the greedy plan, shares by the last speeds, the planned
plan, even shares. Under a budget of rent: those that can keep one. All losses are compared with a run that
nothing disturbs. A step is the mean over the run, changes included.

The machine drifts, so a run is simulated several ways:

- by a profile before it, one after it, and the mean of both: drift shows as the two's difference;
- by the profile before, its seconds times what every rank's own work took in that run over what the profile
  makes of the same work: nothing but this machine's speed is of the run, all else is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from verbs import foreshard

from foreshard.lab.lab import Lab, load_lab
from foreshard.lab.simulated_run import simulate_lab
from foreshard.predict.measured.costs import load_costs
from foreshard.runtime.adaptive.pass_times import PassTimes
from foreshard.runtime.records.outcome import kept_steps
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import load_plan

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "examples" / "jobs" / "gpt_job.py")
LAB, LAB_STEPS = ROOT / "examples" / "labs" / "restless4.toml", 300
SETTINGS = {"GPT_DTYPE": "float64", "GPT_WIDTH": "64", "GPT_BLOCKS": "4", "OMP_NUM_THREADS": "1"}
FREE = (
    ("lyapunov", "plan", "lyapunov"),
    ("greedy", "plan", "greedy"),
    ("lb-bsp", "plan", "lb-bsp"),
    ("planned, stays", "plan", "static"),
    ("even shares", "even", "static"),
)
KEPT = tuple(row for row in FREE if row[2] != "static")
LEAST_CHANGES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run that has ended."""

    lines: list[dict[str, Any]]
    lost: int
    wall_s: float

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [line["loss_metrics/global_avg_loss"] for line in self.lines]

    @property
    def took_s(self) -> float:
        """Time of all steps but the first."""
        return float(self.lines[-1]["clock_s"] - self.lines[0]["clock_s"])

    def apart(self, other: Ran) -> float:
        """Return the largest relative difference of losses."""
        return max(abs(a - b) / b for a, b in zip(self.losses, other.losses, strict=True))


class Bench:
    """A folder with the lab, costs and plans of the job on it, and the runs in it."""

    def __init__(self, folder: Path, steps: int, batch: int):
        self.folder, self.steps, self._profiles = folder, steps, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.lab_file, self.calm_file = self.file("lab.toml"), self.file("calm.toml")
        moved = re.sub(
            r"at_step = (\d+)", lambda told: f"at_step = {int(told[1]) * steps // LAB_STEPS}", LAB.read_text()
        )
        Path(self.lab_file).write_text(moved)
        Path(self.calm_file).write_text(moved.partition("[[change]]")[0])
        self.lab: Lab = load_lab(self.lab_file)
        self.costs = self.profiled()
        plan = self.file("plan.json")
        asked = ("--global-batch", str(batch), "--seq", "64", "--dtype", "fp32")
        foreshard("plan", JOB, self.lab_file, "--costs", self.costs, *asked, "-o", plan)
        words = [sys.executable, str(ROOT / "scripts" / "even_split.py"), plan, "4"]
        told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        Path(self.file("even.json")).write_text(told)

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    def profiled(self) -> str:
        """Profile now; return the file of the costs, which is the latest from now on."""
        self._profiles += 1
        profile, costs = self.file("profile.json"), self.file(f"costs-{self._profiles}.json")
        sizes = ("--samples", "1,4,16", "--repeats", "9", "--no-links")
        foreshard("profile", JOB, "--local", "4", *sizes, "-o", profile)
        foreshard("calibrate", "--profile", profile, "--lab", self.lab_file, "-o", costs)
        self.costs = costs
        return costs

    def run(self, name: str, plan: str, policy: str, seed: int, budget: str | None, lab: str) -> Ran:
        """Train, and read what came of it."""
        out, began_s = self.folder / name.replace(", ", "-"), time.monotonic()
        words = ["run", JOB, "--plan", self.file(f"{plan}.json"), "--local", "4", "--lab", lab]
        words += ["--steps", str(self.steps), "--out", str(out), "--seed", str(seed)]
        if policy != "static":
            words += ["--policy", policy, "--costs", self.costs]
        if budget is not None:
            words += ["--budget", budget]
        outcome = foreshard(*words)
        return Ran(
            lines=kept_steps(out / "metrics.jsonl"),
            lost=outcome["lost"] + outcome["repeated"],
            wall_s=time.monotonic() - began_s,
        )

    def told(self, costs: str, plan: str, policy: str, budget: str | None) -> tuple[float, list[Any]]:
        """Return the mean step that the simulator gives, the first left out as in the runs, and its plans."""
        found = simulate_lab(
            self.lab_file,
            costs=costs,
            plan=self.file(f"{plan}.json"),
            steps=self.steps,
            policies=(policy,),
            budgets=() if budget is None else (budget,),
        )[policy]
        return float(found.time_s[1:].mean()), list(found.plans)

    def rent(self, lines: Sequence[dict[str, Any]]) -> float:
        """Return dollars per hour times seconds, of the ranks in use."""
        total = 0.0
        for before, line in pairwise(lines):
            used = {int(rank) for rank, work_s in line["work_s_by_rank"].items() if work_s > 0}
            if "pipelines" in line:
                used = {stage[0] for stages in line["pipelines"] for stage in stages}
            price = sum(self.lab.usd_per_h[rank] or 0.0 for rank in used)
            total += price * (line["clock_s"] - before["clock_s"])
        return total

    def own_speed(self, ran: Ran, costs: str, plan: str, plans: Sequence[tuple[int, Plan]]) -> float:
        """Return what all work of a run took over what costs make of it, as the lab slowed it."""
        passes = PassTimes.measured(load_costs(costs), self.lab.cluster())
        measured_s = costs_s = 0.0
        most = max(group.micro_batch for group in load_plan(self.file(f"{plan}.json")).groups)
        for line in ran.lines[1:]:
            for share, stages in _pipelines(line, plans):
                size = passes.best_size(stages, share, most)
                for rank, span in stages:
                    if own_s := line["work_s_by_rank"].get(str(rank), 0.0):
                        nominal_s = share * passes.sample_s(rank, span, share, size)
                        costs_s += nominal_s * self.lab.slow_at(line["step"], rank)
                        measured_s += own_s
        return measured_s / costs_s

    def scaled(self, costs: str, factor: float) -> str:
        """Return the file of costs whose work takes so many times as long."""
        told = json.loads(Path(costs).read_text())
        for layer in told["layers"]:
            layer["optimizer_s"] *= factor
            for name in ("forward_s", "backward_s", "backward_input_s"):
                layer[name] = [factor * seconds for seconds in layer[name]]
        self._profiles += 1
        path = self.file(f"costs-{self._profiles}.json")
        Path(path).write_text(json.dumps(told))
        return path


def _pipelines(
    line: dict[str, Any], plans: Sequence[tuple[int, Plan]]
) -> Iterator[tuple[int, list[tuple[int, tuple[int, int]]]]]:
    """Yield share and stages of the pipelines that ran a step: as measured, else as simulated."""
    if "pipelines" in line:
        for share, stages in zip(line["shares"], line["pipelines"], strict=True):
            yield share, [(rank, (first, stop)) for rank, first, stop in stages]
        return
    plan = [plan for step, plan in plans if step <= line["step"]][-1]
    for group in plan.groups:
        yield group.share, [(stage.ranks[0], stage.layers[0]) for stage in group.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A run whose profile afterwards is still to come."""

    title: str
    plan: str
    policy: str
    budget: str | None
    before: str
    ran: Ran

    def compared(self, bench: Bench, after: str, calm: Ran) -> dict[str, Any]:
        """Return the run beside what is simulated of it."""
        asked, ran = (self.plan, self.policy, self.budget), self.ran
        before_s, plans = bench.told(self.before, *asked)
        after_s, _ = bench.told(after, *asked)
        speed = bench.own_speed(ran, self.before, self.plan, plans)
        own_s, _ = bench.told(bench.scaled(self.before, speed), *asked)
        return {
            "step_s": ran.took_s / (len(ran.lines) - 1),
            "foretold_before_s": before_s,
            "foretold_after_s": after_s,
            "foretold_s": (before_s + after_s) / 2,
            "own_speed": speed,
            "foretold_own_s": own_s,
            "usd_per_h": bench.rent(ran.lines) / ran.took_s,
            "lost": ran.lost,
            "reconfigurations": ran.lines[-1].get("controller/reconfigurations", 0),
            "losses_apart": ran.apart(calm),
            "wall_s": ran.wall_s,
        }


def table(
    bench: Bench, rows: Sequence[tuple[str, str, str]], calm: Ran, seed: int, budget: str | None
) -> dict[str, Any]:
    """Run the rows and print a line for each; profiles before and after the first, and after all."""
    print(f"\nseed {seed}, {budget or 'no budget'}\n{HEAD}", flush=True)
    found: dict[str, Any] = {}
    waiting: list[Waiting] = []
    for number, (title, plan, policy) in enumerate(rows):
        ran = bench.run(f"{title}-{seed}-{budget}", plan, policy, seed, budget, bench.lab_file)
        waiting.append(
            Waiting(title=title, plan=plan, policy=policy, budget=budget, before=bench.costs, ran=ran)
        )
        if number not in (0, len(rows) - 1):
            continue
        after = bench.profiled()
        for one in waiting:
            found[one.title] = one.compared(bench, after, calm)
            print(row(one.title, found[one.title]), flush=True)
        waiting.clear()
    return found


HEAD = (
    f"{'':15}     step |  foretold before  after   over both | own speed  foretold   over |"
    "   $/h  changes  losses apart  lost  wall"
)


def row(title: str, told: dict[str, Any]) -> str:
    """Return a line of the table."""
    ms = {name: 1e3 * told[name] for name in told if name.endswith("_s") and name != "wall_s"}
    over = {name: 100 * (told["step_s"] / told[name] - 1) for name in ("foretold_s", "foretold_own_s")}
    return (
        f"{title:15}{ms['step_s']:6.1f} ms |  {ms['foretold_before_s']:12.1f} {ms['foretold_after_s']:9.1f}"
        f"    {over['foretold_s']:+6.1f} % | {told['own_speed']:8.3f} {ms['foretold_own_s']:8.1f}  "
        f"{over['foretold_own_s']:+6.1f} % | {told['usd_per_h']:5.2f} {told['reconfigurations']:8} "
        f"{told['losses_apart']:13.1e} {told['lost']:5} {told['wall_s']:4.0f}s"
    )


def verdict(found: dict[str, dict[str, Any]]) -> None:
    """Print, table by table, how far off the controller's runs were foretold and whether they were ahead."""
    print(f"\n{'':26} over foretold (both profiles, own speed)   least of the others / lyapunov")
    for name, rows in found.items():
        ours = rows.get("lyapunov")
        others = [one["step_s"] for title, one in rows.items() if title != "lyapunov"]
        if ours is None or not others:
            continue
        over = [100 * (ours["step_s"] / ours[key] - 1) for key in ("foretold_s", "foretold_own_s")]
        print(f"{name:26} {over[0]:+10.1f} % {over[1]:+10.1f} % {min(others) / ours['step_s']:30.2f}")


def absences(lab: Lab) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return who is lost and who joins when, as (rank, step); one away from step 0 only joins."""
    lost, joins = [], []
    away = {rank for rank in range(len(lab.slow)) if not lab.there_at(0, rank)}
    for change in lab.changes:
        if change.there is None or change.rank is None or change.at_step == 0:
            continue
        if change.there and change.rank in away:
            joins.append((change.rank, change.at_step))
            away.discard(change.rank)
        elif not change.there and change.rank not in away:
            lost.append((change.rank, change.at_step))
            away.add(change.rank)
    return tuple(lost), tuple(joins)


def changes_of(lab: Lab) -> str:
    """Return what changes in words; raise where it is too little to be a test."""
    steps = {one.at_step for one in lab.changes if one.there is None}
    lost, joins = absences(lab)
    if len(steps) < LEAST_CHANGES or not lost or not joins:
        raise SystemExit(
            f"the lab changes {len(steps)} times, loses {len(lost)} ranks and gains {len(joins)}"
        )
    return f"speeds or links change {len(steps)} times; (rank, step) killed {lost}, joining {joins}"


def main() -> None:
    """Print a table per seed, without and with the budget, and everything as one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--budget", default="usd_per_h=7")
    parser.add_argument("--only", nargs="*", help="policies to run")
    parser.add_argument("--out", help="folder to keep the runs in")
    asked = parser.parse_args()
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(asked.out or name), asked.steps, asked.batch)
        print(f"{asked.steps} steps; {changes_of(bench.lab)}")
        found: dict[str, Any] = {}
        for seed in asked.seeds:
            calm = bench.run(f"calm-{seed}", "even", "static", seed, None, bench.calm_file)
            for rows, budget in ((FREE, None), (KEPT, asked.budget)):
                chosen = [one for one in rows if not asked.only or one[2] in asked.only]
                found[f"seed {seed}, {budget or 'no budget'}"] = table(bench, chosen, calm, seed, budget)
        verdict(found)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
