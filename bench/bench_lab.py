"""Uneven shares on a mixed lab against even ones and against the linear bound, for heterogeneity 1 to 8.

Four ranks, one to h times as slow (geometric), 512 samples a step in micro-batches of 4; virtual time of
measured processor time. The bound is the linear program of continuous shares: all ranks end together (water
filling), by the same measured costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from foreshard.predict.measured import predict_measured
from foreshard.predict.measured_costs import MeasuredCosts, load_costs
from foreshard.runtime.lab import load_lab
from foreshard.runtime.outcome import kept_steps, settled_times
from foreshard.spec.plan import Plan, parse_plan

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "examples" / "jobs" / "gpt_job.py")
RANKS, BATCH, MICRO = 4, 512, 4


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
    """Run a verb without its words."""
    command = [sys.executable, "-m", "foreshard", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(folder: Path, plan: Plan, lab: Path, name: str, steps: int) -> float:
    """Median step of a run."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(plan.to_dict()))
    words = ["run", JOB, "--plan", str(file), "--local", str(RANKS), "--lab", str(lab)]
    quiet([*words, "--steps", str(steps), "--out", str(folder / name), "--json"])
    return median(settled_times(kept_steps(folder / name / "metrics.jsonl")))


def main() -> None:
    """Print a line per heterogeneity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--heterogeneity", type=float, nargs="*", default=[1, 2, 4, 8])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        quiet(["profile", JOB, "--local", str(RANKS), "--samples", "1,2,4,8", "-o", str(profile)])
        columns = ("measured", "predicted", "LP bound", "over", "even", "ratio")
        widths = (9, 9, 9, 7, 8, 6)
        heads = " ".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
        print(f"{'h':>4} {'shares':>18} {heads}")
        for h in args.heterogeneity:
            lab = lab_of(folder, h)
            file = folder / f"costs-{h:g}.json"
            quiet(["calibrate", "--profile", str(profile), "--lab", str(lab), "-o", str(file)])
            costs, bed = load_costs(str(file)), load_lab(str(lab))
            rows = lines(costs, bed)
            shares = whole_shares(rows)
            plan = plan_of(shares)
            ours = run(folder, plan, lab, f"ours-{h:g}", args.steps)
            even = run(folder, plan_of([BATCH // RANKS] * RANKS), lab, f"even-{h:g}", args.steps)
            told = predict_measured(costs, bed.cluster(), plan).step_time_s
            bound = water(rows)
            print(
                f"{h:4g} {':'.join(map(str, shares)):>18} "
                f"{1e3 * ours:6.0f} ms {1e3 * told:6.0f} ms {1e3 * bound:6.0f} ms "
                f"{100 * (ours / bound - 1):+6.1f}% {1e3 * even:5.0f} ms {even / ours:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
