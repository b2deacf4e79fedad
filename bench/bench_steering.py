"""A real run on a lab whose speeds and links change: the controller beside plans that stay.

Four local ranks, two fast and dear, two slow and cheap (examples/labs/swinging4.toml: seven changes), in virtual
time of measured processor time. Even shares, the planned shares, and --policy lyapunov from the planned shares; the
losses must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from foreshard.runtime.outcome import kept_steps

ROOT = Path(__file__).parents[1]
JOB, LAB = str(ROOT / "examples" / "jobs" / "gpt_job.py"), str(ROOT / "examples" / "labs" / "swinging4.toml")
BATCH = 64


def foreshard(*words: str) -> None:
    """Run a verb, quietly."""
    subprocess.run([sys.executable, "-m", "foreshard", *words], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip


def main() -> None:
    """Print a line per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs, plan, even = (str(folder / f"{one}.json") for one in ("costs", "plan", "even"))
        foreshard("profile", JOB, "--local", "4", "-o", str(folder / "profile.json"))
        foreshard("calibrate", "--profile", str(folder / "profile.json"), "--lab", LAB, "-o", costs)
        foreshard("plan", JOB, LAB, "--costs", costs, "--global-batch", str(BATCH), "--seq", "64", "--dtype", "fp32",
                  "-o", plan)  # fmt: skip
        told = subprocess.run([sys.executable, str(ROOT / "scripts" / "even_split.py"), plan, "4"], check=True,
                              capture_output=True, text=True)  # fmt: skip
        Path(even).write_text(told.stdout)
        runs = {"even shares": (even, ()), "planned, stays": (plan, ()),
                "lyapunov": (plan, ("--policy", "lyapunov", "--costs", costs))}  # fmt: skip
        losses, times = {}, {}
        for title, (file, more) in runs.items():
            out = folder / title.replace(" ", "_")
            foreshard("run", JOB, "--plan", file, "--local", "4", "--lab", LAB, "--steps", str(args.steps), "--out",
                      str(out), *more)  # fmt: skip
            lines = kept_steps(out / "metrics.jsonl")
            times[title] = mean(line["time_metrics/end_to_end(s)"] for line in lines[1:])
            losses[title] = [line["loss_metrics/global_avg_loss"] for line in lines]
            print(f"{title:15} mean step {1e3 * times[title]:6.0f} ms, "
                  f"reconfigurations {lines[-1].get('controller/reconfigurations', 0)}", flush=True)  # fmt: skip
        apart = max(abs(a - b) / b for one in losses.values() for a, b in zip(one, losses["even shares"], strict=True))
        print(json.dumps({"largest difference of losses": apart,
                          **{f"{title} / lyapunov": round(t / times["lyapunov"], 3) for title, t in times.items()}}))  # fmt: skip


if __name__ == "__main__":
    main()
