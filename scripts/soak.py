"""Soak test of fault tolerance: ranks are killed, stopped, slowed, starved of disk and given other plans.

    python scripts/soak.py --out soak [--minutes 10] [--faults 200] [--seed 0]
    python scripts/soak.py --out soak --search --faults 200 [--seed 0]

Four ranks train a small GPT in float64 under seeded faults. Afterwards every sample must have counted once,
and the final parameters must equal those of the same run without faults. Exit code 0 if all holds, else 1.
With --search many short runs draw plan, readers, evaluations, saves and faults from seeds that are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from foreshard.runtime.checkpoint import format
from foreshard.runtime.membership.agent import Agent
from foreshard.runtime.membership.operator_requests import Requests, request_plan
from foreshard.runtime.membership.secret import make_secret
from foreshard.runtime.membership.supervisor_state import write_json
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.records.outcome import RunOutcome, kept_steps, outcome_of
from foreshard.runtime.run_settings import RunSettings
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan

ROOT = Path(__file__).resolve().parent.parent
PHASES = (
    "forward",
    "backward",
    "all-reduce",
    "vote",
    "update",
    "migration",
    "checkpoint",
    "rebuild",
    "evaluation",
)
OFTEN = ("forward", "backward", "all-reduce", "vote", "update")
KINDS = (
    "kill",
    "two kills",
    "phase",
    "phase",
    "phase",
    "stop",
    "slow",
    "supervisor",
    "disk",
    "hang",
    "hang in evaluation",
    "reader",
    "pause at start",
    "pause while rebuilding",
    "supervisor pauses",
    "slow disk",
    "replan",
    "replan and kill",
)
PROGRESS_S = 4.0
DETECT_S = 4.0
MOST_PAUSE_S = 3.0  # less than a rank may be silent
SAVE_EVERY = 10
SEARCH_STEPS = 80
EVAL_EVERY = 5
STEPS_PER_MINUTE = 45  # more than are trained in a minute under faults (240 took 433 s with one each 3.2 s)
CALM_STEPS = 40  # without faults at the end, so that the last checkpoint is complete
FILE_BYTES = 400_000
"""Bound of files on the emulated full disk: above a ledger, below a rank's part of a checkpoint."""
CHECKS = ("samples", "parameters", "loss", "evaluation", "reports", "requests")
LIMIT = 1e-9
"""Of relative differences of float64 parameters and losses; sums in another order differ by 1e-13."""

JOB = '''
"""The example's GPT in float64, small, each sample as slow as SOAK_PACE_S says; it can be evaluated."""
import os, sys, time
os.environ["GPT_DTYPE"], os.environ["GPT_WIDTH"] = "float64", "32"
sys.path.insert(0, {examples!r})
from gpt_job import *
import gpt_job
PACE_S = float(os.environ.get("SOAK_PACE_S", "0"))
sync = os.fsync

def slow_sync(file):
    if os.path.exists(os.path.join(os.path.dirname(__file__), "slow-disk")):
        time.sleep(1.0)
    sync(file)

os.fsync = slow_sync

class Paced(gpt_job.Text):
    def __getitem__(self, index):
        time.sleep(PACE_S)
        hang_if_asked("hang-")
        return super().__getitem__(index)

def hang_if_asked(mark):
    mark = os.path.join(os.path.dirname(__file__), mark + os.environ.get("FORESHARD_RANK", ""))
    if os.path.exists(mark):
        os.unlink(mark)
        while True: time.sleep(0.001)

def dataset():
    return Paced()

def evaluate(model, step):
    hang_if_asked("hang-evaluation-")
    batch = torch.stack([gpt_job.Text()[index] for index in range(step, step + 3)])
    total, count = loss(model(inputs(batch)), batch)
    return {{"loss": total / count, "drawn": torch.rand(())}}

def on_step(step, metrics):
    with open(os.path.join(os.path.dirname(__file__), "hooked.txt"), "a") as file:
        print(step, file=file)
'''


@dataclass(frozen=True)
class Extras:
    """What a run does besides training."""

    eval_every: int = 0
    readers: int = 0
    save_async: bool = False


def stage(ranks: list[int], lo: int, hi: int, zero: int = 0) -> dict[str, Any]:
    """Return a stage as a plan file has it."""
    return {"ranks": ranks, "layers": [[lo, hi]], "zero": zero}


def soak_plan() -> Plan:
    """Return two pipelines of uneven cuts and shares, on four ranks."""
    return plan_of(
        [
            {"share": 5, "stages": [stage([0], 0, 3), stage([1], 3, 8)]},
            {"share": 3, "stages": [stage([2], 0, 6), stage([3], 6, 8)]},
        ]
    )


def drawn_extras(draw: random.Random) -> Extras:
    """Return what a run does besides; evaluations are among those of the run without faults."""
    every = draw.choice([0, EVAL_EVERY, 2 * EVAL_EVERY])
    return Extras(eval_every=every, readers=draw.choice([0, 0, 2, 3]), save_async=draw.random() < 0.5)


def plan_of(groups: list[dict[str, Any]]) -> Plan:
    """Return a plan of eight samples a step."""
    return parse_plan({"global_batch": 8, "seq_len": 64, "precision": "fp32", "groups": groups})


def drawn_plan(draw: random.Random) -> Plan:
    """Return a plan of four ranks: replicas, pipelines or sharded stages, with uneven cuts and shares."""
    cut, share, zero = draw.randint(1, 7), draw.randint(1, 7), draw.choice([0, 1, 2, 3])
    kind = draw.choice(["replicas", "two pipelines", "one pipeline", "wide stages"])
    if kind == "replicas":
        shares = [share, *[n for n in (1, 1, 6 - share) if n > 0]] if share < 6 else [2, 2, 2, 2]
        return plan_of([{"share": n, "stages": [stage([r], 0, 8)]} for r, n in enumerate(shares)])
    if kind == "two pipelines":
        other = draw.randint(1, 7)
        first = {"share": share, "stages": [stage([0], 0, cut), stage([1], cut, 8)]}
        return plan_of([first, {"share": 8 - share, "stages": [stage([2], 0, other), stage([3], other, 8)]}])
    if kind == "one pipeline":
        a, b, c = sorted(draw.sample(range(1, 8), 3))
        bounds = [(0, a), (a, b), (b, c), (c, 8)]
        stages = [stage([rank], lo, hi) for rank, (lo, hi) in enumerate(bounds)]
        return plan_of([{"share": 8, "micro_batch": draw.choice([1, 2, 4]), "stages": stages}])
    stages = [stage([0, 1], 0, cut, zero), stage([2, 3], cut, 8, draw.choice([0, 1]))]
    return plan_of([{"share": 8, "micro_batch": 4, "stages": stages}])


@dataclass
class Armed:
    """A rank that kills itself in its next process (`pid`, once started) when it reaches a phase."""

    phase: str
    nth: int
    before: int
    pid: int | None = None


@dataclass
class Chaos:
    """Injects seeded faults into a run; the agent calls `watch` all the time.

    Attributes
    ----------
    agent : Agent
    seed : int
    most : int
        Number of faults.
    gap_s : (float, float)
        Bounds of the time between faults.
    last_step : int
        No faults from there on: a run must be able to end.
    """

    agent: Agent
    seed: int
    most: int
    gap_s: tuple[float, float]
    last_step: int
    counts: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str, int]] = field(default_factory=list)
    _due_s: float = 0.0
    _seen: int = 0
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _armed: dict[int, Armed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.began_s = time.monotonic()
        self.fault_file = self.agent.out / "faults.json"
        self._write_armed()
        os.environ["FORESHARD_FAULT"] = str(self.fault_file)

    @property
    def total(self) -> int:
        """Faults so far."""
        return sum(self.counts.values())

    def watch(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for due_s, what in [each for each in self._later if each[0] <= now]:
            self._later.remove((due_s, what))
            what()
        self._disarm()
        if not self._due_s:
            self._due_s = now + 1.0 if self._step() > 0 else 0.0
        elif now >= self._due_s and self.total < self.most and self._progress() > self._seen:
            if self._step() < self.last_step:
                self._hurt(self.random.choice(KINDS))
            self._due_s, self._seen = now + self.random.uniform(*self.gap_s), self._progress()

    def _progress(self) -> int:
        """Return the bytes of metrics: the next fault waits until a step was trained."""
        with suppress(OSError):
            return (self.agent.out / "metrics.jsonl").stat().st_size
        return 0

    def _step(self) -> int:
        """Return the last step in the metrics, without reading the whole file."""
        with suppress(OSError, ValueError, IndexError), (self.agent.out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            return int(json.loads(file.read().splitlines()[-1])["step"])
        return 0

    def _hurt(self, kind: str) -> None:
        rank = self.random.choice(list(self.agent.ranks))
        if kind == "supervisor":
            self._signal(self.agent.supervisor_pid(), signal.SIGKILL)
        elif kind == "phase":
            if rank in self._armed or len(self._armed) >= len(self.agent.ranks) - 1:
                return
            self._arm(rank)
        elif kind == "two kills":
            other = self.random.choice([r for r in self.agent.ranks if r != rank])
            self._kill(rank)
            self._soon(self.random.uniform(0.0, 0.5), lambda: self._kill(other))
            self._note("kill while rebuilding", other)
        elif kind == "kill":
            self._kill(rank)
        elif kind == "stop":
            self._signal(self.agent.pid_of(rank), signal.SIGSTOP)  # for good: heartbeats must detect it
        elif kind == "slow":
            self._slow(self.agent.pid_of(rank))
        elif kind in ("hang", "hang in evaluation"):
            # one at a time: three hangs without a step between end a run, as they should
            in_evaluation = kind != "hang"
            if (in_evaluation and not self.agent.work.eval_every) or any(self.agent.out.glob("hang-*")):
                return
            (self.agent.out / f"hang-{'evaluation-' * in_evaluation}{rank}").touch()
        elif kind == "reader":
            readers = children_of(self.agent.pid_of(rank))
            if not readers:
                return
            self._signal(self.random.choice(readers), signal.SIGKILL)
        elif kind == "pause at start":
            self._kill(rank)
            before, for_s = self.agent.pid_of(rank), self.random.uniform(0.5, MOST_PAUSE_S)
            self._soon(self.random.uniform(0.4, 2.5), lambda: self._pause_next(rank, before, for_s))
        elif kind == "pause while rebuilding":
            self._kill(rank)
            for other in self.agent.ranks:
                if other != rank and self.random.random() < 0.6:
                    begin_s, for_s = self.random.uniform(0.0, 1.5), self.random.uniform(0.2, MOST_PAUSE_S)
                    self._soon(begin_s, partial(self._pause, self.agent.pid_of(other), for_s))
        elif kind == "supervisor pauses":
            # for longer than ranks may be silent, but not so long that its agent starts it again
            self._pause(self.agent.supervisor_pid(), self.random.uniform(1.0, 2 * DETECT_S))
        elif kind == "slow disk":
            mark = self.agent.out / "slow-disk"
            mark.touch()
            self._soon(self.random.uniform(1.0, 5.0), lambda: mark.unlink(missing_ok=True))
        elif kind in ("replan", "replan and kill"):
            asked = self.agent.out / "asked.json"
            write_json(asked, drawn_plan(self.random).to_dict())
            request_plan(self.agent.out, str(asked))
            if kind != "replan":
                self._soon(self.random.uniform(0.0, 1.0), lambda: self._kill(rank))
        elif kind == "disk":
            self._fill_disk(self.agent.pid_of(rank))
        self._note(kind, rank)

    def _note(self, kind: str, rank: int) -> None:
        self.counts[kind] += 1
        self.log.append((round(time.monotonic() - self.began_s, 2), kind, rank))

    def _soon(self, in_s: float, what: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + in_s, what))

    def _kill(self, rank: int) -> None:
        self._signal(self.agent.pid_of(rank), signal.SIGKILL)

    def _signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def _pause(self, pid: int, for_s: float) -> None:
        """Stop a process for a while."""
        self._signal(pid, signal.SIGSTOP)
        self._soon(for_s, lambda: self._signal(pid, signal.SIGCONT))

    def _pause_next(self, rank: int, before: int, for_s: float) -> None:
        """Stop the process that was started for a rank since, somewhere on its way into the run."""
        if self.agent.pid_of(rank) != before:
            self._pause(self.agent.pid_of(rank), for_s)

    def _slow(self, pid: int) -> None:
        """Stop a rank for four fifths of the next three seconds."""
        for n in range(12):
            self._soon(n * 0.25, lambda: self._signal(pid, signal.SIGSTOP))
            self._soon(n * 0.25 + 0.2, lambda: self._signal(pid, signal.SIGCONT))

    def _fill_disk(self, pid: int) -> None:
        """Bound the size of a rank's files for a while: checkpoints do not fit, as on a full disk."""
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))

        def free() -> None:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        self._soon(8.0, free)

    def _arm(self, rank: int) -> None:
        """Kill a rank, and its next process when it reaches the phase that was hit least."""
        under_way = Counter(armed.phase for armed in self._armed.values())
        phases = [name for name in PHASES if name != "evaluation" or self.agent.work.eval_every]
        phase = min(phases, key=lambda name: (self.phases[name] + under_way[name], self.random.random()))
        nth = self.random.randint(1, 8) if phase in OFTEN else 1
        self._armed[rank] = Armed(phase, nth, self.agent.pid_of(rank))
        self._write_armed()
        self._kill(rank)

    def _disarm(self) -> None:
        """Remove faults that have struck, before the next process of the rank reads them."""
        for rank, armed in list(self._armed.items()):
            now = self.agent.pid_of(rank)
            if armed.pid is None and now != armed.before:
                armed.pid = now
            elif armed.pid is not None and now != armed.pid:
                del self._armed[rank]
                self._write_armed()
                self.phases[armed.phase] += 1
                self._note(f"in {armed.phase}", rank)

    def _write_armed(self) -> None:
        faults = {str(rank): {"phase": armed.phase, "nth": armed.nth} for rank, armed in self._armed.items()}
        write_json(self.fault_file, faults)  # at once: a rank may read it now


def children_of(pid: int) -> list[int]:
    """Return the processes that a rank has started: its readers."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def trained(
    out: Path,
    *,
    steps: int,
    extras: Extras = Extras(),
    pace_s: float = 0.0,
    chaos: Callable[[Agent], Chaos] | None = None,
    plan: Plan | None = None,
) -> tuple[RunOutcome, Chaos | None]:
    """Train to the end, with or without faults."""
    out.mkdir(parents=True)
    job = out / "job.py"
    job.write_text(JOB.format(examples=str(ROOT / "examples" / "jobs")))
    os.environ["SOAK_PACE_S"] = str(pace_s)
    os.environ.pop("FORESHARD_FAULT", None)
    plan = plan or soak_plan()
    work = RunSettings(
        job=str(job),
        out=str(out),
        steps=steps,
        checkpoint_every=SAVE_EVERY,
        detect_s=DETECT_S,
        progress_s=PROGRESS_S,
        interface="127.0.0.1",
        **asdict(extras),
    )
    ranks = range(max(plan.ranks) + 1)
    agent = Agent(
        out=out,
        plan=plan,
        work=work,
        ranks=ranks,
        expected=ranks,
        secret_file=make_secret(out / "secret"),
        max_starts=10**6,
        restart_s=0.3,
    )
    hurting = chaos(agent) if chaos is not None else None
    restarts = agent.run(hurting.watch if hurting is not None else lambda: None)
    return outcome_of(out, global_batch=plan.global_batch, steps=steps, restarts=restarts), hurting


def worst_difference(one: Path, other: Path, step: int) -> float:
    """Return the largest difference of any tensor of two checkpoints, in norms of the tensor."""
    mine, theirs = (format.load(place / "ckpt", step) for place in (one, other))
    if mine.keys() != theirs.keys():
        raise SystemExit(f"checkpoints hold different tensors: {sorted(mine.keys() ^ theirs.keys())[:5]}")
    return max(float((mine[key] - theirs[key]).norm() / theirs[key].norm().clamp_min(1e-30)) for key in mine)


def worst_loss(one: Path, other: Path) -> float:
    """Return the largest relative difference of the loss of any step."""
    name = "loss_metrics/global_avg_loss"
    mine, theirs = (
        {line["step"]: line[name] for line in kept_steps(p / "metrics.jsonl")} for p in (one, other)
    )
    return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in mine)


def unreported(out: Path, steps: int) -> list[int]:
    """Return the steps that metrics, or the job's own hook, lack."""
    lines = {line["step"] for line in kept_steps(out / "metrics.jsonl")}
    hooked = set(map(int, (out / "hooked.txt").read_text().split()))
    return [step for step in range(steps) if step not in lines & hooked]


def worst_evaluation(one: Path, other: Path, every: int, steps: int) -> float:
    """Return the largest relative difference of what evaluations gave; infinite where one is missing."""
    mine, theirs = (
        {line["step"]: line for line in whole_lines(place / "evaluations.jsonl")} for place in (one, other)
    )
    worst = 0.0
    for step in range(every, steps + 1, every) if every else ():
        for name in ("eval/loss", "eval/drawn"):
            wanted = theirs[step][name]
            worst = max(worst, abs(mine.get(step, {}).get(name, math.inf) - wanted) / abs(wanted))
    return worst


def compared(
    out: Path,
    *,
    steps: int,
    seed: int,
    faults: int,
    gap_s: tuple[float, float],
    pace_s: float,
    calm: int = CALM_STEPS,
    plan: Plan | None = None,
    peace: tuple[Path, RunOutcome] | None = None,
    extras: Extras = Extras(eval_every=2 * EVAL_EVERY),
) -> dict[str, Any]:
    """Run with faults, and without if no such run is given; return what both gave."""
    calmly, expected = peace or (
        out / "peace",
        trained(out / "peace", steps=steps, plan=plan, extras=Extras(eval_every=extras.eval_every))[0],
    )
    began_s = time.monotonic()
    hurt, chaos = trained(
        out / "chaos",
        steps=steps,
        pace_s=pace_s,
        plan=plan,
        extras=extras,
        chaos=lambda agent: Chaos(agent, seed, faults, gap_s, steps - calm),
    )
    assert chaos is not None
    counts = dict(sorted(chaos.counts.items()))
    return {
        "seed": seed,
        "wall_s": time.monotonic() - began_s,
        "faults": chaos.total,
        "kinds": counts,
        "restarts": hurt.restarts,
        "generations": hurt.generations,
        "steps": hurt.steps,
        "samples": hurt.samples,
        "lost": hurt.lost,
        "repeated": hurt.repeated,
        "peace_samples": expected.samples,
        "parameters_max_rel_difference": worst_difference(out / "chaos", calmly, steps),
        "loss_max_rel_difference": worst_loss(out / "chaos", calmly),
        "evaluation_max_rel_difference": worst_evaluation(out / "chaos", calmly, extras.eval_every, steps),
        "unreported": unreported(out / "chaos", steps),
        "unanswered": Requests(out / "chaos").open() is not None,
    }


def violations(found: dict[str, Any]) -> list[str]:
    """Return what a run under faults has wrong."""
    wrong = {
        "samples": found["lost"] or found["repeated"] or found["samples"] != found["peace_samples"],
        "parameters": found["parameters_max_rel_difference"] > LIMIT,
        "loss": found["loss_max_rel_difference"] > LIMIT,
        "evaluation": found["evaluation_max_rel_difference"] > LIMIT,
        "reports": found["unreported"],
        "requests": found["unanswered"],
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]


def search_faults(out: Path, *, seed: int, faults: int) -> int:
    """Draw plans and faults until there were so many; print seeds and counts, and return the violations.

    One run without faults, on one rank, serves all: the plan does not change what is trained.
    """
    total, runs, wrong, kinds, began_s = 0, 0, 0, Counter[str](), time.monotonic()
    alone = plan_of([{"share": 8, "stages": [stage([0], 0, 8)]}])
    peace = (
        out / "peace",
        trained(out / "peace", steps=SEARCH_STEPS, plan=alone, extras=Extras(eval_every=EVAL_EVERY))[0],
    )
    while total < faults:
        number = seed + runs
        draw = random.Random(number)
        plan, pace_s = drawn_plan(draw), draw.uniform(0.02, 0.1)
        gap_s, extras = draw.uniform(0.2, 1.0), drawn_extras(draw)
        run = out / f"seed-{number}"
        try:
            found = compared(
                run,
                steps=SEARCH_STEPS,
                seed=number,
                faults=40,
                gap_s=(0.3 * gap_s, 2.0 * gap_s),
                pace_s=pace_s,
                calm=15,
                plan=plan,
                peace=peace,
                extras=extras,
            )
            broken, caused = violations(found), found["kinds"]
        except Exception as error:
            broken, caused = [f"{type(error).__name__}: {error}"], {"run": 1}
        kinds.update(caused)
        total, runs, wrong = sum(kinds.values()), runs + 1, wrong + bool(broken)
        stages = [[list(s.ranks) for s in group.stages] for group in plan.groups]
        at_s = time.monotonic() - began_s
        also = ", ".join(f"{name} {value}" for name, value in asdict(extras).items() if value) or "no extras"
        text = f"seed {number}: {stages}, {also}, faults {caused}: {', '.join(broken) or 'holds'}"
        print(f"{text} ({total} faults after {at_s:.0f} s)", flush=True)
        if not broken:
            shutil.rmtree(run)
    print(f"runtime: seeds {seed} to {seed + runs - 1}, {total} faults {dict(kinds)}, {wrong} violations")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help=f"{STEPS_PER_MINUTE} for each minute if not given")
    parser.add_argument("--pace-s", type=float, default=0.2, help="seconds per sample in the run with faults")
    parser.add_argument("--search", action="store_true", help="many short runs of drawn plans and faults")
    asked = parser.parse_args()
    if asked.search:
        return int(search_faults(asked.out.resolve(), seed=asked.seed, faults=asked.faults) > 0)
    gap_s = asked.minutes * 60 / asked.faults
    found = compared(
        asked.out.resolve(),
        steps=asked.steps or round(STEPS_PER_MINUTE * asked.minutes),
        seed=asked.seed,
        faults=10**6,
        gap_s=(0.5 * gap_s, 1.3 * gap_s),
        pace_s=asked.pace_s,
    )
    wanted = {
        "faults": found["faults"] >= asked.faults,
        "minutes": found["wall_s"] >= asked.minutes * 60,
        **{name: name not in violations(found) for name in CHECKS},
    }
    print(json.dumps({"schema_version": 1, **found, "holds": wanted}, indent=2))
    return 0 if all(wanted.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
