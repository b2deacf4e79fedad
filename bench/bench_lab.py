"""Uneven shares on a mixed lab against even ones and against the linear bound, for heterogeneity 1 to 8.

Four ranks, one to h times as slow (geometric), 64 micro-batches of 4 a step; virtual time of measured
processor time. The bound is the linear program of continuous shares: all ranks end together (water filling).
Its seconds a sample and of the update are taken three ways:

- of the run: from the work that every rank itself counted in that very step, bound and step side by side, and
  the median of their ratios over the steps: what shares in samples, waiting and votes cost;
- of a profile before the run (by which the shares are chosen) and of one after it: the machine drifts between
  them, so both are told, and the step is compared with the mean of the two.

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

from foreshard.predict.measured import predict_measured
from foreshard.predict.measured_costs import MeasuredCosts, load_costs
from foreshard.runtime.lab import load_lab
from foreshard.runtime.outcome import kept_steps
from foreshard.spec.plan import Plan, parse_plan

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "examples" / "jobs" / "gpt_job.py")
RANKS, BATCH, MICRO = 4, 256, 4


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


def lines(costs: MeasuredCosts, lab) -> list[tuple[float, float]]:
    """Fixed seconds and seconds per sample of each rank with the whole model."""
    cluster = lab.cluster()
    sync = costs.ring_s(cluster, range(RANKS), sum(layer.parameter_bytes for layer in costs.layers))
    found = []
    for slow in lab.slow:
        update = slow * sum(layer.optimizer_s for layer in costs.layers)
        sample = slow * sum(
            (layer.forward_s[0] + layer.backward_s[0]) / MICRO + layer.forward_s[1] + layer.backward_s[1]
            for layer in costs.layers
        )
        found.append((update + sync, sample))
    return found


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


def whole_shares(rows: list[tuple[float, float]]) -> list[int]:
    """Shares in samples: one at a time to the rank that ends first with it."""
    shares = [0] * len(rows)
    for _ in range(BATCH):
        rank = min(range(len(rows)), key=lambda i: rows[i][0] + rows[i][1] * (shares[i] + 1))
        shares[rank] += 1
    return shares


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


def run(folder: Path, shares: list[int], lab: Path, sync_s: float, steps: int) -> Ran:
    """Train on a lab and compare every step with the bound of its own work."""
    file, out, trace = folder / "plan.json", folder / "run", folder / "trace.json.gz"
    file.write_text(json.dumps(plan_of(shares).to_dict()))
    shutil.rmtree(out, ignore_errors=True)
    words = ["run", JOB, "--plan", str(file), "--local", str(RANKS), "--lab", str(lab), "--json"]
    quiet([*words, "--steps", str(steps), "--out", str(out), "--trace", str(trace)])
    updates, slow = update_s(trace), load_lab(str(lab)).slow
    times, bounds = [], []
    for line in kept_steps(out / "metrics.jsonl")[1:]:  # the first warms up
        work = line["work_s_by_rank"]
        rows = [
            # an update ends for all with the slowest rank's
            (sync_s + updates[line["step"]] * slow[rank] / max(slow), work[str(rank)] / shares[rank])
            for rank in range(RANKS)
        ]
        times.append(line["time_metrics/end_to_end(s)"])
        bounds.append(water(rows))
    over = median(time / bound for time, bound in zip(times, bounds, strict=True))
    return Ran(step_s=median(times), bound_s=median(bounds), over=over)


def update_s(trace: Path) -> dict[int, float]:
    """Return the seconds of the update by step, of the rank that waits for no other."""
    found: dict[int, float] = {}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "update":
            step = event["args"]["step"]
            found[step] = max(found.get(step, 0.0), event["dur"] / 1e6)
    return found


def profiled(folder: Path, labs: dict[float, Path]) -> dict[float, MeasuredCosts]:
    """Profile now; return the costs on every lab."""
    profile, found = folder / "profile.json", {}
    quiet(["profile", JOB, "--local", str(RANKS), "--samples", "2,4,8", "--repeats", "9", "-o", str(profile)])
    for h, lab in labs.items():
        file = folder / "costs.json"
        quiet(["calibrate", "--profile", str(profile), "--lab", str(lab), "-o", str(file)])
        found[h] = load_costs(str(file))
    return found


def row(folder: Path, h: float, lab: Path, before: MeasuredCosts, steps: int) -> dict[str, Any]:
    """Run by shares of speed and by even ones."""
    bed = load_lab(str(lab))
    shares = whole_shares(lines(before, bed))
    sync_s = before.ring_s(bed.cluster(), range(RANKS), sum(layer.parameter_bytes for layer in before.layers))
    ours = run(folder, shares, lab, sync_s, steps)
    even = run(folder, [BATCH // RANKS] * RANKS, lab, sync_s, steps)
    told = predict_measured(before, bed.cluster(), plan_of(shares)).step_time_s
    return {
        "h": h, "shares": shares, "measured_s": ours.step_s, "predicted_s": told, "run_bound_s": ours.bound_s,
        "over_run": ours.over - 1, "before_s": water(lines(before, bed)), "even_s": even.step_s,
        "even_over_ours": even.step_s / ours.step_s,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print a line."""
    shares = ":".join(map(str, found["shares"]))
    times = " ".join(
        f"{1e3 * found[name]:8.0f}"
        for name in ("measured_s", "predicted_s", "run_bound_s", "before_s", "after_s", "even_s")
    )
    print(
        f"{found['h']:4g} {shares:>16} {times} {100 * found['over_run']:+8.1f}% "
        f"{100 * found['over_profiles']:+8.1f}% {found['even_over_ours']:6.2f}", flush=True,
    )  # fmt: skip


def main() -> None:
    """Print a line per lab and round, and the medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heterogeneity", type=float, nargs="*", default=[1, 2, 4, 8])
    args = parser.parse_args()
    heads = ("step ms", "predict", "LP run", "LP bef.", "LP after", "even ms", "over run", "ov.prof.")
    print(f"{'h':>4} {'shares':>16} " + " ".join(f"{head:>8}" for head in heads) + "  even/ours")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        labs = {h: lab_of(folder, h) for h in args.heterogeneity}
        for _ in range(args.rounds):
            before = profiled(folder, labs)
            for h, lab in labs.items():
                found = row(folder, h, lab, before[h], args.steps)
                after = profiled(folder, labs)
                found["after_s"] = water(lines(after[h], load_lab(str(lab))))
                found["over_profiles"] = 2 * found["measured_s"] / (found["before_s"] + found["after_s"]) - 1
                show(found)
                rows.append(found)
                before = after
    print("median over the rounds: step over the LP bound of the run, of the profiles; even over ours")
    for h in args.heterogeneity:
        own = [found for found in rows if found["h"] == h]
        over = [100 * median(found[name] for found in own) for name in ("over_run", "over_profiles")]
        ratio = median(found["even_over_ours"] for found in own)
        print(f"{h:4g} {over[0]:+6.1f}% {over[1]:+6.1f}% {ratio:6.2f}")


if __name__ == "__main__":
    main()
