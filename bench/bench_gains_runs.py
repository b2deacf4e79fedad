"""Real training in labs that change: the controller beside the best fixed plan, LB-BSP and greedy.

    python bench/bench_gains_runs.py --folder gains-runs             # trains
    python bench/bench_gains_runs.py --folder gains-runs --simulate  # the same labs by measured costs

Four local ranks train feed-forward blocks (`gains_job.py`) over gloo with `foreshard run --lab`. The clock is
the lab's `table`: seconds of samples and layers are stated, times the rank's slow factor, messages take their
bytes over the lab's rates; so what else runs on the machine does not matter. A seed draws who is slow when,
and the samples; all policies meet the same lab of a seed, and seeds are pairs. All start from the best plan
that stays: every structure, shares by a linear program, knowing all changes, within the budget; the fastest
few are timed again as the simulator of labs times them. What has run is kept in the folder and does not run
again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_gains import percent
from charts import gain_bars
from fixed_plans import Hindsight
from preloaded import preload
from verbs import foreshard

from foreshard.control import orders
from foreshard.control.slots import Choice
from foreshard.lab.lab import Lab, load_lab
from foreshard.lab.lab_simulator import LabSimulator
from foreshard.lab.simulated_run import simulate_lab
from foreshard.predict.measured.costs import MeasuredCosts, load_costs
from foreshard.predict.measured.engine import rank_times
from foreshard.runtime.adaptive.controller_config import ControllerConfig
from foreshard.runtime.records.outcome import kept_steps
from foreshard.simulate.evaluation import KEPT, half_width
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.plan_file import load_plan

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "bench" / "gains_job.py")
SETTINGS = {"OMP_NUM_THREADS": "1"}
RANKS, LAYERS, BATCH, MICRO, MAX_STAGES = 4, 8, 32, 8, 4
TABLE = {"forward": "0.5 ms", "backward": "1 ms", "optimizer": "1 ms"}
"""Of a sample and layer, and of a layer's update, on a rank of slow factor 1."""
POLICIES = ("lyapunov", "static", "lb-bsp", "greedy")
FINALISTS = 24
"""Fixed plans that are timed again."""
WARM_UP = 1
"""Steps left out: the first finds memory that nobody has touched."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A kind of lab.

    Attributes
    ----------
    slow, usd_per_h : tuple of float
        By rank.
    spread : float
        A seed draws for every rank by what part it is slower than that, up to this.
    factor : float
        One rank at a time is so many times slower.
    hold : float, steps
        That a straggler stays in the mean.
    bandwidth : str
        Of every link.
    fades : str or None
        Rate to which the links of the last two ranks fall at times, for `hold` steps in the mean.
    memory : float or None
        Part of the model's values, gradients and optimizer states that a rank holds.
    budget : float or None
        Dollars per hour.
    """

    name: str
    slow: tuple[float, ...] = (1.0,) * RANKS
    usd_per_h: tuple[float, ...] = (1.0,) * RANKS
    spread: float = 0.0
    factor: float = 1.0
    hold: float = 15.0
    bandwidth: str = "1 Gb/s"
    fades: str | None = None
    memory: float | None = None
    budget: float | None = None

    def text(self, steps: int, seed: int, whole_bytes: float) -> str:
        """Return the lab of a seed as TOML."""
        draws = np.random.default_rng(seed)
        slow = np.array(self.slow) * (1.0 + self.spread * draws.random(RANKS))
        lines = [f'name = "{self.name}"', 'clock = "table"']
        for rank in range(RANKS):
            lines += ["[[ranks]]", f'device = "rank{rank}"', f"slow = {slow[rank]:.3f}"]
            lines.append(f"usd_per_h = {self.usd_per_h[rank]}")
            if self.memory is not None and whole_bytes:
                lines.append(f'memory = "{int(self.memory * whole_bytes)} B"')
        lines += ["[network]", f'bandwidth = "{self.bandwidth}"', 'latency = "50 us"']
        lines += ["[table]", *(f'{action} = "{time}"' for action, time in TABLE.items())]
        return "\n".join([*lines, *self._stragglers(slow, steps, draws), *self._fading(steps, draws), ""])

    def _stragglers(self, slow: np.ndarray, steps: int, draws: np.random.Generator) -> list[str]:
        lines: list[str] = []
        last = -1
        for step in range(steps if self.factor > 1.0 else 0):
            if step and draws.random() >= 1.0 / self.hold:
                continue
            now = int(draws.choice([rank for rank in range(RANKS) if rank != last]))
            for rank, factor in ((last, 1.0), (now, self.factor)):
                if rank >= 0:
                    lines += [
                        "[[change]]",
                        f"at_step = {step}",
                        f"rank = {rank}",
                        f"slow = {slow[rank] * factor:.3f}",
                    ]
            last = now
        return lines

    def _fading(self, steps: int, draws: np.random.Generator) -> list[str]:
        lines: list[str] = []
        is_faded = False
        for step in range(1, steps if self.fades else 0):
            if draws.random() < 1.0 / self.hold:
                is_faded = not is_faded
                for rank in (RANKS - 2, RANKS - 1):
                    rate = self.fades if is_faded else self.bandwidth
                    lines += ["[[change]]", f"at_step = {step}", f"rank = {rank}", f'bandwidth = "{rate}"']
        return lines


PRICED = {"slow": (1.0, 1.0, 2.0, 2.0), "usd_per_h": (4.0, 4.0, 1.0, 1.0)}
REGIMES = (
    Regime(name="budget between two plans", budget=2.5),
    Regime(name="unequal ranks, budget", spread=0.5, budget=2.5),
    Regime(name="straggler that stays, budget", factor=4.0, hold=40.0, budget=2.5),
    Regime(name="unequal ranks, memory, budget", spread=0.5, memory=0.63, budget=2.5),
    Regime(name="unequal ranks, slow links, budget", spread=0.5, bandwidth="30 Mb/s", budget=2.5),
    Regime(name="straggler, budget", factor=4.0, budget=2.5),
    Regime(name="straggler, memory, budget", factor=4.0, memory=0.63, budget=2.5),
    Regime(name="straggler, memory", factor=4.0, memory=0.45),
    Regime(name="dear and cheap, straggler, budget", factor=4.0, budget=6.0, **PRICED),
    Regime(name="alternation, budget", factor=4.0, hold=3.0, budget=2.5),
    Regime(name="straggler", factor=4.0),
    Regime(name="slow links, straggler", factor=4.0, bandwidth="30 Mb/s"),
    Regime(name="slow links, straggler, budget", factor=4.0, bandwidth="30 Mb/s", budget=2.5),
)


def replicas() -> Plan:
    """Return equal replicas, the plan that others are made of."""
    groups = tuple(
        Group(
            share=BATCH // RANKS,
            micro_batch=MICRO,
            stages=(Stage(ranks=(rank,), layers=((0, LAYERS),), zero=0),),
        )
        for rank in range(RANKS)
    )
    return Plan(global_batch=BATCH, seq_len=64, groups=groups, precision="fp32", framework="foreshard")


class Match:
    """A regime and a seed in a folder: the lab, its costs, the best plan that stays, the runs."""

    def __init__(self, regime: Regime, seed: int, steps: int, folder: Path, profile: Path):
        self.regime, self.seed, self.steps = regime, seed, steps
        self.folder = folder / regime.name.replace(", ", "-").replace(" ", "_") / str(seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lab_file, self.costs_file = self._file("lab.toml"), self._file("costs.json")
        self.plan_file = self._file("fixed.json")
        if not Path(self.plan_file).exists():
            self._calibrated(profile, 0.0)
            self._calibrated(profile, whole_bytes(load_costs(self.costs_file)))
            Path(self.plan_file).write_text(json.dumps(self._fixed().to_dict()))

    def _calibrated(self, profile: Path, model_bytes: float) -> None:
        Path(self.lab_file).write_text(self.regime.text(self.steps, self.seed, model_bytes))
        foreshard("calibrate", "--profile", str(profile), "--lab", self.lab_file, "-o", self.costs_file)

    def _file(self, name: str) -> str:
        return str(self.folder / name)

    def _fixed(self) -> Plan:
        """Return the fastest plan that stays within the budget, knowing all changes."""
        world = LabSimulator(load_lab(self.lab_file), load_costs(self.costs_file))
        config = ControllerConfig(
            plan=replicas(),
            cluster=world.cluster,
            steps=self.steps,
            log=self.folder / "none",
            costs=self.costs_file,
        )
        known = config.starting_costs()
        chain = known.chain(MICRO)
        stated, seen = known.state, dict[bytes, int]()
        states, first_step, parts = [], [], []
        for step in range(self.steps):
            state = state_at(world.lab, step, stated)
            if state.key() not in seen:
                seen[state.key()] = len(states)
                states.append(state)
                first_step.append(step)
                parts.append(0.0)
            parts[seen[state.key()]] += 1.0
        asked = {"batch": BATCH, "micro_batch": config.grain, "max_stages": MAX_STAGES}
        hindsight = Hindsight(chain, states, np.array(parts), **asked)
        best, least_s = None, np.inf
        for found in hindsight.fixed_plans(self.regime.budget, FINALISTS):
            choice = Choice(structure=found.structure, shares=found.whole_shares(BATCH), time_s=0.0, costs={})
            plan = config.as_run(orders.plan_of(replicas(), choice, micro_batch=config.grain), known)
            time_s = float(np.dot(parts, [self._step_s(world, step, plan) for step in first_step]))
            if time_s < least_s:
                best, least_s = plan, time_s
        if best is None:
            raise SystemExit(f"{self.regime.name}: no fixed plan keeps the budget")
        return best

    @staticmethod
    def _step_s(world: LabSimulator, step: int, plan: Plan) -> float:
        costs, cluster = world.at(step)
        return max(rank.end_s for rank in rank_times(costs, cluster, plan))

    @property
    def budgets(self) -> tuple[str, ...]:
        """Return the budget as the command takes it."""
        return () if self.regime.budget is None else (f"usd_per_h={self.regime.budget:g}",)

    def holds(self, policy: str) -> bool:
        """Return whether a policy's plans fit the ranks: LB-BSP gives every rank the whole model."""
        return policy != "lb-bsp" or self.regime.memory is None

    def simulated(self, policy: str) -> dict[str, float]:
        """Return what the simulator of labs says of a policy."""
        found = simulate_lab(
            self.lab_file,
            costs=self.costs_file,
            plan=self.plan_file,
            steps=self.steps,
            policies=(policy,),
            budgets=self.budgets,
        )[policy]
        return {
            "step_s": float(found.time_s[WARM_UP:].mean()),
            "over_budget": found.violation,
            "changes": float(found.reconfigurations),
        }

    def ran(self, policy: str) -> dict[str, float]:
        """Return what a real run of a policy took, from the folder if it has run."""
        out = self.folder / policy
        if not (out / "done.json").exists():
            shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
            words = ["run", JOB, "--plan", self.plan_file, "--local", str(RANKS), "--lab", self.lab_file]
            words += [
                "--steps",
                str(self.steps),
                "--seed",
                str(self.seed),
                "--out",
                str(out),
                "--no-save-last",
            ]
            if policy != "static":
                words += ["--policy", policy, "--costs", self.costs_file]
                words += [word for budget in self.budgets for word in ("--budget", budget)]
            foreshard(*words)
            told = self._told(kept_steps(out / "metrics.jsonl"))
            (out / "done.json").write_text(json.dumps(told))
        return dict(json.loads((out / "done.json").read_text()))

    def _told(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the mean step, changes included, and the rent over the budget."""
        took_s = lines[-1]["clock_s"] - lines[WARM_UP - 1]["clock_s"]
        fixed = load_plan(self.plan_file).ranks
        usd = 0.0
        for before, line in pairwise(lines[WARM_UP - 1 :]):
            used = (
                {stage[0] for stages in line["pipelines"] for stage in stages}
                if "pipelines" in line
                else fixed
            )
            usd += sum(self.regime.usd_per_h[rank] for rank in used) * (line["clock_s"] - before["clock_s"])
        budget = self.regime.budget
        return {
            "step_s": took_s / (len(lines) - WARM_UP),
            "over_budget": usd / took_s / budget - 1.0 if budget else 0.0,
            "changes": float(lines[-1].get("controller/reconfigurations", 0)),
            "loss": lines[-1]["loss_metrics/global_avg_loss"],
        }


def state_at(lab: Lab, step: int, stated: Any) -> Any:
    """Return the ranks and links of a step."""
    speed = np.array([stated.speed[r] * lab.slow[r] / lab.slow_at(step, r) for r in range(RANKS)])
    rate = stated.bandwidth_bytes_per_s.copy()
    for u in range(RANKS):
        for v in range(RANKS):
            if u != v:
                rate[u, v] = lab.link_at(step, u, v)[0]
    return replace(stated, speed=speed, bandwidth_bytes_per_s=rate)


def whole_bytes(costs: MeasuredCosts) -> float:
    """Return the bytes of values, gradients and optimizer states of all layers."""
    return sum(2.0 * layer.parameter_bytes + layer.state_bytes for layer in costs.layers)


class Bench:
    """A folder with a profile of the job, and the matches in it."""

    def __init__(self, folder: Path, steps: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.steps, self.profile = folder, steps, folder / "profile.json"
        if not self.profile.exists():
            sizes = ("--samples", "1,4", "--repeats", "3", "--no-links")
            foreshard("profile", JOB, "--local", str(RANKS), *sizes, "-o", str(self.profile))

    def match(self, regime: Regime, seed: int) -> Match:
        """Return a regime with a seed."""
        return Match(regime, seed, self.steps, self.folder, self.profile)


def gain(found: Sequence[Mapping[str, Any]], rival: str) -> tuple[float, float | None] | None:
    """Return by what part the controller's step is shorter, with half the width of its 95 % interval.

    None where the rival does not run everywhere within the budget, or the controller does not.
    """
    pairs = [(one["lyapunov"], one.get(rival)) for one in found]
    if any(other is None or max(ours["over_budget"], other["over_budget"]) > KEPT for ours, other in pairs):
        return None
    parts = np.array([1.0 - ours["step_s"] / other["step_s"] for ours, other in pairs])
    return float(parts.mean()), half_width(parts)


def line(name: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Return the row of a regime."""
    cells = [name, str(len(found))]
    for policy in POLICIES:
        told = [one.get(policy) for one in found]
        if any(one is None for one in told):
            cells.append("does not fit")
            continue
        over = max(one["over_budget"] for one in told)
        mean = f"{1e3 * np.mean([one['step_s'] for one in told]):.1f}"
        cells.append(f"({mean}, {over:+.1%})" if over > KEPT else mean)
    return "| " + " | ".join([*cells, *(percent(gain(found, rival)) for rival in POLICIES[1:])]) + " |"


HEAD = (
    "| regime | seeds | "
    + " | ".join(f"{name}, ms" for name in POLICIES)
    + " | "
    + " | ".join(f"over {name}, %" for name in POLICIES[1:])
    + " |\n|"
    + "---|" * (2 + len(POLICIES) + len(POLICIES) - 1)
)


def main() -> None:
    """Run what has not run; print a row a regime."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="gains-runs")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of regimes, several by |")
    parser.add_argument("--picture", help="file of the gains as SVG")
    parser.add_argument("--preloaded", action="store_true", help="fork processes instead of starting them")
    parser.add_argument("--simulate", action="store_true", help="play the labs by measured costs instead")
    args = parser.parse_args()
    os.environ.update(SETTINGS)
    if args.preloaded:
        preload()
    bench, table = Bench(Path(args.folder), args.steps), dict[str, list[dict[str, Any]]]()
    for seed in range(args.seeds):
        for regime in REGIMES:
            if args.only and regime.name not in args.only.split("|"):
                continue
            match = bench.match(regime, seed)
            play = match.simulated if args.simulate else match.ran
            told = {policy: play(policy) for policy in POLICIES if match.holds(policy)}
            table.setdefault(regime.name, []).append(told)
            print(seed, regime.name, told, file=sys.stderr, flush=True)
    print(HEAD)
    for name, found in table.items():
        print(line(name, found))
    if args.picture:
        rows = [
            (name, [(rival, gain(found, rival)) for rival in POLICIES[1:]]) for name, found in table.items()
        ]
        legend = (
            f"Per cent by which a step of lyapunov is shorter, with 95 % intervals of {args.seeds} pairs."
        )
        Path(args.picture).write_text(gain_bars(rows, legend))


if __name__ == "__main__":
    main()
