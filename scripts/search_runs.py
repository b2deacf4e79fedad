"""Searches for options of `foreshard run` under which a job does not train what one process does.

    python scripts/search_runs.py --out found [--runs 40] [--seed 0]

Each seed draws a plan (pipelines, shares, schedules, ZeRO, tensor and sequence parallelism), options of the
command, and what happens on the way: a signal to end and `--resume`, the death of a rank, another plan by
`foreshard replan` or with `--resume`. The example's small GPT trains by the command as a user starts it.
Losses of all steps and, in float64, the last parameters must be those of a single process; with sums that are
approximate by request losses must stay near. Exit code 1 if a run differs or does not end well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from foreshard.errors import ForeshardError
from foreshard.runtime.checkpoint import format
from foreshard.runtime.gradient_check import single_rank_plan
from foreshard.runtime.job.job import load_job
from foreshard.runtime.launch import launch
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.records.outcome import kept_steps
from foreshard.spec.plan_file import parse_plan

ROOT = Path(__file__).resolve().parent.parent
LAYERS, STEPS, BATCH = 8, 14, 8
LIMITS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Relative differences of a loss that the precision explains."""
APPROXIMATE = 0.1
WITHIN_S = 300.0
JOB = f"""
import os, sys, time
os.environ["GPT_WIDTH"], os.environ["GPT_DTYPE"] = "16", os.environ.get("SEARCH_DTYPE", "float64")
sys.path.insert(0, {str(ROOT / "examples" / "jobs")!r})
from gpt_job import *
import gpt_job

class Paced(gpt_job.Text):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)

def dataset():
    return Paced()

def evaluate(model, step):
    batch = torch.stack([gpt_job.Text()[index] for index in range(step, step + 3)])
    total, count = loss(model(inputs(batch)), batch)
    return {{"loss": total / count}}
"""


@dataclass
class Drawn:
    """What a seed says of a run."""

    ranks: int
    groups: list[dict[str, Any]]
    dtype: str
    clip: float | None
    flags: list[str] = field(default_factory=list)
    event: str = "none"
    at_step: int = 0
    later: list[dict[str, Any]] | None = None
    approximate: bool = False


def drawn_groups(draw: random.Random, ranks: int, *, tp: bool = True) -> list[dict[str, Any]]:
    """Return the groups of a plan for some of the ranks."""
    free = list(range(ranks))
    draw.shuffle(free)
    shapes: list[list[list[int]]] = []
    while free:
        stages, wanted = [], draw.randint(1, len(free))
        while wanted:
            width = draw.choice([w for w in (1, 1, 2, 2, 4) if w <= wanted])
            stages.append([free.pop() for _ in range(width)])
            wanted -= width
        shapes.append(stages)
    shares = [1] * len(shapes)
    for _ in range(BATCH - len(shapes)):
        shares[draw.randrange(len(shapes))] += 1
    return [drawn_group(draw, stages, share, tp) for stages, share in zip(shapes, shares, strict=True)]


def drawn_group(draw: random.Random, stages: list[list[int]], share: int, tp: bool) -> dict[str, Any]:
    kind = draw.choice(["1f1b", "1f1b", "gpipe", "zb-h1", "interleaved"]) if len(stages) > 1 else "1f1b"
    parts = len(stages) * (2 if kind == "interleaved" and 2 * len(stages) <= LAYERS else 1)
    if kind == "interleaved" and (parts == len(stages) or share % len(stages)):
        kind, parts = "1f1b", len(stages)
    bounds = [0, *sorted(draw.sample(range(1, LAYERS), parts - 1)), LAYERS]
    spans = [list(pair) for pair in pairwise(bounds)]
    made = []
    for at, ranks in enumerate(stages):
        one: dict[str, Any] = {"ranks": ranks, "layers": spans[at :: len(stages)]}
        if tp and len(ranks) > 1 and draw.random() < 0.5:
            one["tp"] = draw.choice([d for d in (2, 4) if len(ranks) % d == 0])
        one["zero"] = draw.choice([0, 0, 1, 2, 3])
        one["recompute"] = draw.choice(["none", "none", "full"])
        made.append(one)
    return {
        "share": share,
        "micro_batch": 1 if kind == "interleaved" else draw.randint(1, share),
        "schedule": kind,
        "stages": made,
    }


def drawn(seed: int) -> Drawn:
    """Return what a seed says."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 4])
    dtype = draw.choice(["fp64", "fp64", "fp64", "fp32", "bf16", "fp16"])
    one = Drawn(
        ranks=ranks,
        groups=drawn_groups(draw, ranks),
        dtype=dtype,
        clip=draw.choice([None, None, 0.5]),
        event=draw.choice(["none", "sigterm", "kill", "kill", "replan", "resume another"]),
        at_step=draw.randint(2, STEPS - 4),
    )
    one.later = drawn_groups(draw, ranks)
    options = {
        "--checkpoint-every": ["0", "3", "5"],
        "--keep": ["1", "3"],
        "--readers": ["0", "0", "2"],
        "--eval-every": ["0", "0", "4"],
        "--buckets": ["", "", "4KiB", "1MiB"],
        "--collectives": ["", "", "", "ring", "double-tree", "halving-doubling"],
        "--bucket-order": ["", "", "forward"],
        "--compress": ["", "", "", "", "int8", "powersgd:2", "topk:0.5"],
        "--policy": ["", "", "", "lyapunov", "lb-bsp", "greedy"],
        "--max-starts": ["", "3", "6"],
        "--stage-messages": ["", "", "", "ring", "binomial"],
    }
    chosen = {name: draw.choice(values) for name, values in options.items()}
    if chosen["--compress"] == "int8" or chosen["--compress"].startswith("topk"):
        chosen["--collectives"] = ""
    stages = [stage for group in [*one.groups, *one.later] for stage in group["stages"]]
    if one.event in ("sigterm", "resume another") or any(stage["zero"] > 1 for stage in stages):
        chosen["--compress"] = ""  # refused: state that a checkpoint lacks, gradients that have one keeper
    if any(stage["zero"] > 1 for stage in stages):
        chosen["--collectives"] = ""
    if any(len(group["stages"]) == 1 for group in [*one.groups, *one.later]):
        chosen["--stage-messages"] = ""
    if any(len(stage["layers"]) > 1 for stage in stages):
        chosen["--policy"] = ""
    if any(len(stage["ranks"]) > 1 for stage in stages) and chosen["--policy"]:
        plain = not any(stage.get("tp") for stage in stages) and max(len(one.groups), len(one.later)) == 1
        chosen["--policy"] = "lyapunov" if plain else ""  # others have no stages of several ranks
    if chosen["--policy"]:
        chosen["--cluster"] = f"1x{ranks}xrtx-4090"
    alone = min(len(one.groups), len(one.later)) == 1  # no layer that several pipelines hold
    if alone or not (chosen["--collectives"] or chosen["--compress"]):
        chosen["--bucket-order"] = ""
    if dtype == "fp64" and chosen["--compress"] and draw.random() < 0.5:
        chosen["--compress"] = ""
    one.approximate = bool(chosen["--compress"])
    one.flags = [word for name, value in chosen.items() if value for word in (name, value)]
    one.flags += [flag for flag in ("--save-async",) if draw.random() < 0.3]
    if one.clip is not None:
        one.flags += ["--clip-norm", str(one.clip)]
    if dtype != "fp64":
        one.flags += ["--dtype", dtype]
    return one


def plan_text(groups: list[dict[str, Any]]) -> str:
    return json.dumps({"global_batch": BATCH, "seq_len": 64, "precision": "fp32", "groups": groups})


class Search:
    """Runs seeds, each in a folder, beside runs on one rank that serve many."""

    def __init__(self, out: Path):
        self.out = out
        self._alone: dict[tuple[str, float | None], tuple[list[float], Any]] = {}
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.py").write_text(JOB)

    def alone(self, dtype: str, clip: float | None) -> tuple[list[float], Any]:
        """Return the losses and last parameters of a single rank."""
        if (dtype, clip) not in self._alone:
            place = self.out / f"alone-{dtype}-{clip}"
            os.environ["SEARCH_DTYPE"] = "float64" if dtype == "fp64" else "float32"
            base = parse_plan(
                json.loads(plan_text([{"share": BATCH, "stages": [{"ranks": [0], "layers": [[0, 8]]}]}]))
            )
            plan = self.out / f"{place.name}.json"
            plan.write_text(
                json.dumps(single_rank_plan(base, load_job(str(self.out / "job.py")).num_layers).to_dict())
            )
            more = {} if dtype == "fp64" else {"dtype": dtype}
            launch(
                str(self.out / "job.py"),
                str(plan),
                local=1,
                steps=STEPS,
                out=str(place),
                clip_norm=clip,
                **more,
            )
            self._alone[dtype, clip] = self.results(place)
        return self._alone[dtype, clip]

    def results(self, place: Path) -> tuple[list[float], Any]:
        lines = {
            line["step"]: line["loss_metrics/global_avg_loss"] for line in kept_steps(place / "metrics.jsonl")
        }
        return [lines.get(step, math.nan) for step in range(STEPS)], format.load(place / "ckpt", STEPS)

    def command(
        self, one: Drawn, place: Path, groups: list[dict[str, Any]], *more: str
    ) -> subprocess.Popen[str]:
        plan = place / "plan-given.json"
        plan.write_text(plan_text(groups))
        words = [sys.executable, "-m", "foreshard", "run", str(self.out / "job.py"), "--plan", str(plan)]
        words += [
            "--local",
            str(one.ranks),
            "--steps",
            str(STEPS),
            "--out",
            str(place / "run"),
            *one.flags,
            *more,
        ]
        (place / "command.txt").write_text(" ".join(words))
        told = {"SEARCH_DTYPE": "float64" if one.dtype == "fp64" else "float32"}
        return subprocess.Popen(
            words, env={**os.environ, **told}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, seed: int) -> tuple[str, str]:
        """Return what a seed gave, '' if all is well, and what it was."""
        one = drawn(seed)
        place = self.out / f"seed-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        said = f"{one.ranks} ranks, {one.dtype}, {one.event} at {one.at_step}, {' '.join(one.flags)}"
        process = self.command(one, place, one.groups)
        ended = self.happens(one, place, process)
        code, text = self.end(process)
        (place / "output.txt").write_text(text)
        if code == 2 or (code == 3 and not whole_lines(place / "run" / "metrics.jsonl")):
            return "", f"refused: {text.strip().splitlines()[-1][:160]}"
        if one.event in ("sigterm", "resume another") and ended:
            groups = one.later if one.event == "resume another" and one.later else one.groups
            code, more = self.end(self.command(one, place, groups, "--resume"))
            (place / "output.txt").write_text(text + more)
            if code == 2:
                return "", f"refused on --resume: {more.strip().splitlines()[-1][:160]}"
            text = more
        if code != 0:
            return f"exit code {code}: {' '.join(text.strip().splitlines()[-3:])[:300]}", said
        return self.compared(one, place), said

    def compared(self, one: Drawn, place: Path) -> str:
        wanted, parameters = self.alone(one.dtype, one.clip)
        found, own = self.results(place / "run")
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
        limit = APPROXIMATE if one.approximate else LIMITS[one.dtype]
        if not worst <= limit:
            return f"losses differ by {worst:.1e}: {found} {wanted}"
        if one.dtype == "fp64" and not one.approximate:
            if own.keys() != parameters.keys():
                return f"checkpoints hold other tensors: {sorted(own.keys() ^ parameters.keys())[:5]}"
            scale = {key: value.double().norm().clamp_min(1e-30) for key, value in parameters.items()}
            far = max(float((own[key] - parameters[key]).double().norm() / scale[key]) for key in parameters)
            if not far <= 1e-9:
                return f"parameters differ by {far:.1e}"
        return ""

    def happens(self, one: Drawn, place: Path, process: subprocess.Popen[str]) -> bool:
        """Do what is to happen once the step is reached; return whether it did."""
        metrics, until = place / "run" / "metrics.jsonl", time.monotonic() + WITHIN_S
        while one.event != "none" and process.poll() is None and time.monotonic() < until:
            steps = [line["step"] for line in whole_lines(metrics)] if metrics.exists() else []
            if steps and steps[-1] >= one.at_step:
                return self.strike(one, place, process)
            time.sleep(0.05)
        return False

    def strike(self, one: Drawn, place: Path, process: subprocess.Popen[str]) -> bool:
        if one.event in ("sigterm", "resume another"):
            process.send_signal(signal.SIGTERM)
        elif one.event == "kill":
            ranks = [pid for pid in children(process.pid) if b"runtime.worker" in command_of(pid)]
            with suppress(ProcessLookupError):
                os.kill(random.Random(one.at_step).choice(ranks), signal.SIGKILL)
        elif one.event == "replan" and one.later is not None:
            plan = place / "plan-later.json"
            plan.write_text(plan_text(one.later))
            words = [
                sys.executable,
                "-m",
                "foreshard",
                "replan",
                str(place / "run"),
                str(plan),
                "--wait-s",
                "60",
            ]
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(words, capture_output=True, timeout=90, check=False)
        return True

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            text, _ = process.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            return -1, text + "\nit did not end"
        return process.returncode, text


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def main() -> int:
    """Search, print seeds and what they gave, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    search, wrong, refused = Search(given.out), 0, 0
    for seed in range(given.seed, given.seed + given.runs):
        try:
            fault, said = search.run(seed)
        except (ForeshardError, OSError, ValueError, RuntimeError) as error:
            fault, said = f"{type(error).__name__}: {error}", ""
        wrong, refused = wrong + bool(fault), refused + said.startswith("refused")
        print(f"seed {seed}: {f'WRONG {fault} ' if fault else ''}{said}", flush=True)
        if not fault:
            shutil.rmtree(given.out / f"seed-{seed}", ignore_errors=True)
    print(f"{given.runs} runs, {refused} refused, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
