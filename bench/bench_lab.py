"""Uneven shares on a mixed lab against even ones and against the linear bound, for heterogeneity 1 to 8.

Four ranks, one to h times as slow (geometric), 256 micro-batches of 2 a step; virtual time of measured
processor time. Three runs a lab: shares that the profile suggests and that stay, shares that follow the last
speeds (`--policy lb-bsp`), even shares. The bound is the linear program of continuous shares: all ranks end
together (water filling). Its seconds a sample and of the update are taken three ways:

- of the run: from the work that every rank itself counted in that very step, bound and step side by side, and
  the median of their ratios over the steps: what shares in samples, waiting and votes cost;
- of a profile before the runs (by which the shares are chosen) and of one after them: the machine drifts
  between them, so both are told, and the step of shares that follow is compared with the mean of the two.

Sums of gradients are priced by the lab's links in all of them. Rounds go through all labs in turn.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from foreshard.lab.lab import load_lab
from foreshard.predict.measured.costs import MeasuredCosts, load_costs
from foreshard.predict.measured.engine import predict_measured
from foreshard.runtime.records.outcome import kept_steps
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "examples" / "jobs" / "gpt_job.py")
RANKS, BATCH, MICRO = 4, 512, 2
FOLLOWING = 6
"""Steps that shares get to follow before they count."""


def lab_of(folder: Path, h: float) -> Path:
    """Write the lab of heterogeneity h."""
    slow = [h ** (rank / (RANKS - 1)) for rank in range(RANKS)]
    text = 'name = "h"\nclock = "cpu"\n' + "".join(
        f'[[ranks]]\ndevice = "x{rank}"\nslow = {factor}\n' for rank, factor in enumerate(slow)
    )
    path = folder / f"lab-{h:g}.toml"
    path.write_text(text + '[network]\nbandwidth = "10 Gb/s"\nlatency = "50 us"\n')
    return path


def plan_of(shares: list[int]) -> Plan:
    """Replicas with these shares."""
    groups = [
        {
            "share": share,
            "micro_batch": min(MICRO, share),
            "zero": 0,
            "stages": [{"ranks": [rank], "layers": [[0, 8]]}],
        }
        for rank, share in enumerate(shares)
    ]
    return parse_plan(
        {
            "global_batch": BATCH,
            "seq_len": 64,
            "precision": "fp32",
            "framework": "foreshard",
            "groups": groups,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds of a rank with the whole model: of a step, of each micro-batch, of each sample."""

    step_s: float
    micro_s: float
    sample_s: float

    @property
    def straight(self) -> tuple[float, float]:
        """Seconds of a step and of a sample, all micro-batches full."""
        return self.step_s, self.sample_s + self.micro_s / MICRO

    def time_s(self, share: int) -> float:
        """Seconds with a share; the last micro-batch may be short."""
        return self.step_s + self.micro_s * -(-share // MICRO) + self.sample_s * share


def lines(costs: MeasuredCosts, lab) -> list[Line]:
    """Return the line of every rank."""
    sync_s = costs.ring_s(lab.cluster(), range(RANKS), sum(layer.parameter_bytes for layer in costs.layers))
    micro_s, sample_s = (
        sum(layer.forward_s[part] + layer.backward_s[part] for layer in costs.layers) for part in (0, 1)
    )
    update_s = sum(layer.optimizer_s for layer in costs.layers)
    return [
        Line(step_s=sync_s + slow * update_s, micro_s=slow * micro_s, sample_s=slow * sample_s)
        for slow in lab.slow
    ]


def water(rows: list[tuple[float, float]]) -> float:
    """Least time in which continuous shares sum to the batch."""
    best = float("inf")
    order = sorted(rows)
    for used in range(1, len(order) + 1):
        part = order[:used]
        time = (BATCH + sum(a / r for a, r in part)) / sum(1 / r for _, r in part)
        if time >= part[-1][0]:
            best = min(best, time)
    return best


def bound_s(costs: MeasuredCosts, lab) -> float:
    """Return the linear bound by these costs."""
    return water([line.straight for line in lines(costs, lab)])


def whole_shares(rows: list[Line]) -> list[int]:
    """Shares in samples that end soonest: what all can do in a time, for the least such time."""
    for end_s in sorted(row.time_s(share) for row in rows for share in range(1, BATCH)):
        shares = [max((s for s in range(BATCH) if row.time_s(s) <= end_s), default=0) for row in rows]
        if sum(shares) >= BATCH:
            shares[shares.index(max(shares))] -= sum(shares) - BATCH
            return shares
    raise SystemExit("no shares")


def quiet(words: list[str]) -> None:
    """Run a verb without its words, unless it fails."""
    made = subprocess.run([sys.executable, "-m", "foreshard", *words], capture_output=True, text=True)
    if made.returncode:
        sys.exit(made.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run took: the median step, and the median of steps over their own bounds."""

    step_s: float
    bound_s: float
    over: float
    shares: list[int]


def run(
    folder: Path, shares: list[int], lab: Path, sync_s: float, steps: int, costs: Path | None = None
) -> Ran:
    """Train on a lab, with costs by shares that follow; compare the last `steps` with their own bounds."""
    file, out, trace = folder / "plan.json", folder / "run", folder / "trace.json.gz"
    file.write_text(json.dumps(plan_of(shares).to_dict()))
    shutil.rmtree(out, ignore_errors=True)
    words = ["run", JOB, "--plan", str(file), "--local", str(RANKS), "--lab", str(lab), "--json"]
    words += ["--policy", "lb-bsp", "--costs", str(costs)] if costs else []
    first = 1 if costs is None else FOLLOWING  # the first warms up
    quiet([*words, "--steps", str(first + steps), "--out", str(out), "--trace", str(trace)])
    updates, slow = update_s(trace), load_lab(str(lab)).slow
    times, bounds = [], []
    for line in kept_steps(out / "metrics.jsonl")[first:]:
        work, shares = line["work_s_by_rank"], line.get("shares", shares)
        rows = [
            # an update ends for all with the slowest rank's
            (sync_s + updates[line["step"]] * slow[rank] / max(slow), work[str(rank)] / shares[rank])
            for rank in range(RANKS)
        ]
        times.append(line["time_metrics/end_to_end(s)"])
        bounds.append(water(rows))
    over = median(time / bound for time, bound in zip(times, bounds, strict=True))
    return Ran(step_s=median(times), bound_s=median(bounds), over=over - 1, shares=shares)


def update_s(trace: Path) -> dict[int, float]:
    """Return the seconds of the update by step, of the rank that waits for no other."""
    found: dict[int, float] = {}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "update":
            step = event["args"]["step"]
            found[step] = max(found.get(step, 0.0), event["dur"] / 1e6)
    return found


def costs_file(folder: Path, h: float) -> Path:
    """Return where the latest costs on the lab of heterogeneity h lie."""
    return folder / f"costs-{h:g}.json"


def profiled(folder: Path, labs: dict[float, Path]) -> dict[float, MeasuredCosts]:
    """Profile now; return the costs on every lab."""
    profile, found = folder / "profile.json", {}
    quiet(["profile", JOB, "--local", str(RANKS), "--samples", "1,2,4", "--repeats", "9", "-o", str(profile)])
    for h, lab in labs.items():
        file = costs_file(folder, h)
        quiet(["calibrate", "--profile", str(profile), "--lab", str(lab), "-o", str(file)])
        found[h] = load_costs(str(file))
    return found


def row(folder: Path, h: float, lab: Path, before: MeasuredCosts, steps: int) -> dict[str, Any]:
    """Run by shares of the profile, by shares that follow and by even ones."""
    bed, costs = load_lab(str(lab)), costs_file(folder, h)
    shares = whole_shares(lines(before, bed))
    sync_s = before.ring_s(bed.cluster(), range(RANKS), sum(layer.parameter_bytes for layer in before.layers))
    stay = run(folder, shares, lab, sync_s, steps)
    ours = run(folder, shares, lab, sync_s, steps, costs)
    even = run(folder, [BATCH // RANKS] * RANKS, lab, sync_s, steps)
    told = predict_measured(before, bed.cluster(), plan_of(shares)).step_time_s
    return {
        "h": h,
        "shares": ours.shares,
        "measured_s": ours.step_s,
        "predicted_s": told,
        "over_run": ours.over,
        "run_bound_s": ours.bound_s,
        "before_s": bound_s(before, bed),
        "stay_s": stay.step_s,
        "stay_over": stay.over,
        "even_s": even.step_s,
        "even_over_ours": even.step_s / ours.step_s,
    }


COLUMNS = {
    "measured_s": "step ms",
    "predicted_s": "predict",
    "run_bound_s": "LP run",
    "before_s": "LP bef.",
    "after_s": "LP after",
    "stay_s": "stay ms",
    "even_s": "even ms",
}
RATIOS = {"over_run": "over run", "stay_over": "stay", "over_profiles": "ov.prof."}


def show(found: dict[str, Any]) -> None:
    """Print a line."""
    shares = ":".join(map(str, found["shares"]))
    times = " ".join(f"{1e3 * found[name]:8.0f}" for name in COLUMNS)
    ratios = " ".join(f"{100 * found[name]:+8.1f}%" for name in RATIOS)
    print(f"{found['h']:4g} {shares:>16} {times} {ratios} {found['even_over_ours']:6.2f}", flush=True)


def main() -> None:
    """Print a line per lab and round, and the medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heterogeneity", type=float, nargs="*", default=[1, 2, 4, 8])
    args = parser.parse_args()
    heads = [f"{head:>8}" for head in COLUMNS.values()] + [f"{head:>9}" for head in RATIOS.values()]
    print(f"{'h':>4} {'shares':>16} " + " ".join(heads) + "  even/ours")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        labs = {h: lab_of(folder, h) for h in args.heterogeneity}
        for _ in range(args.rounds):
            before = profiled(folder, labs)
            for h, lab in labs.items():
                found = row(folder, h, lab, before[h], args.steps)
                after = profiled(folder, labs)
                found["after_s"] = bound_s(after[h], load_lab(str(lab)))
                found["over_profiles"] = 2 * found["measured_s"] / (found["before_s"] + found["after_s"]) - 1
                show(found)
                rows.append(found)
                before = after
    print("medians of the rounds: step over the LP bound of the run, the same of shares that stay,")
    print("step over the LP bound of the profiles, even shares over these")
    for h in args.heterogeneity:
        own = [found for found in rows if found["h"] == h]
        over = " ".join(f"{100 * median(found[name] for found in own):+6.1f}%" for name in RATIOS)
        print(f"{h:4g} {over} {median(found['even_over_ours'] for found in own):6.2f}")


if __name__ == "__main__":
    main()
