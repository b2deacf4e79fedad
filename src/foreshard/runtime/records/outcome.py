"""The outcome of a run, read back from its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from foreshard.errors import ForeshardError
from foreshard.runtime.checkpoint.folders import latest
from foreshard.runtime.membership.supervisor_state import load_state
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.records.ledger import audit, merge
from foreshard.runtime.records.metrics import STEP_LINE
from foreshard.spec.plan_file import parse_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A run that has ended.

    Attributes
    ----------
    out : str
    steps : int
    first_loss, last_loss : float or None
        None also where it was not finite.
    median_step_s, mean_step_s : float or None
        On the run's clock, without the first step of each generation (warm-up) if there are others.
    clock : str
    restarts : int
        Ranks started again.
    generations : int
        Sets of ranks that trained.
    samples, lost, repeated, misread : int
        By the ledgers, see `Audit`.
    budgets : dict of str to dict
        Of an adaptive run: `limit` and `mean` of each budget.
    absent : tuple of int
        Ranks of the run's plan that were missing in the last generation.
    stopped_by : int
        The signal that ended it before its last step, 0 for none.
    damaged_lines : int
        Lines of metrics.jsonl that are no whole line of a step: nothing counts them.
    """

    out: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    median_step_s: float | None
    mean_step_s: float | None
    clock: str
    restarts: int
    generations: int
    samples: int
    lost: int
    repeated: int
    misread: int = 0
    budgets: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    stopped_by: int = 0
    damaged_lines: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return it as `run --json` prints it."""
        return {"schema_version": 1, **asdict(self)}


def outcome_of(out: Path, *, global_batch: int, steps: int, restarts: int) -> RunOutcome:
    """Read a run's files, join its ledgers into samples.jsonl, and check them."""
    ledgers = sorted((out / "ledger").glob("rank-*.jsonl"))
    try:
        merge(ledgers, out / "samples.jsonl")
    except OSError as error:
        raise ForeshardError(
            f"not written: {error.strerror or error}",
            file=str(out / "samples.jsonl"),
            rule="It joins the ledgers of all ranks, which are complete",
            fix=f"See {out / 'ledger'}",
        ) from None
    checked = audit(ledgers, global_batch=global_batch, steps=steps)
    lines = kept_steps(out / "metrics.jsonl")
    first, last = (lines[0], lines[-1]) if lines else ({}, {})
    times = settled_times(lines)
    return RunOutcome(
        out=str(out),
        steps=checked.steps,
        first_loss=first.get("loss_metrics/global_avg_loss"),
        last_loss=last.get("loss_metrics/global_avg_loss"),
        median_step_s=median(times) if times else None,
        mean_step_s=sum(times) / len(times) if times else None,
        clock=last.get("clock", ""),
        restarts=restarts,
        generations=len({line["generation"] for line in lines}),
        samples=checked.samples,
        lost=len(checked.lost),
        repeated=len(checked.repeated),
        misread=len(checked.misread),
        budgets=_budgets(last),
        absent=_absent(out),
        damaged_lines=_damaged_lines(out / "metrics.jsonl"),
    )


def steps_done(out: Path) -> int:
    """Return how many steps a run has trained, by its metrics."""
    return max((line["step"] + 1 for line in kept_steps(out / "metrics.jsonl")), default=0)


def is_finished(out: Path, steps: int) -> bool:
    """Return whether a run has trained so many steps, and nothing is left to do."""
    state, saved = load_state(out), latest(out / "ckpt")
    ended = state is not None and state.over and steps_done(out) >= steps
    return ended or (saved is not None and saved >= steps)


def kept_steps(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps that count: the last line of a step trained twice."""
    found: dict[int, dict[str, Any]] = {}
    for line in whole_lines(path, STEP_LINE):
        before = found.get(line["step"], line)
        if line["generation"] >= before["generation"]:  # lines that waited for a disk may come late
            found[line["step"]] = line
    return [found[step] for step in sorted(found)]


def _damaged_lines(path: Path) -> int:
    if not path.exists():
        return 0
    written = sum(1 for line in path.read_text(errors="replace").split("\n") if line.strip())
    return written - len(whole_lines(path, STEP_LINE))


def _absent(out: Path) -> tuple[int, ...]:
    state = load_state(out)
    if state is None or not state.ranks:
        return ()  # the supervisor could not write it: the disk was full
    return tuple(sorted(set(parse_plan(state.plan).ranks) - set(state.ranks)))


def _budgets(line: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return limit and mean of each budget of a line, from `budget/NAME/limit` and `budget/NAME/mean`."""
    names = [key.split("/")[1] for key in line if key.startswith("budget/") and key.endswith("/limit")]
    both = [name for name in names if f"budget/{name}/mean" in line]
    return {name: {key: line[f"budget/{name}/{key}"] for key in ("limit", "mean")} for name in both}


def settled_times(lines: list[dict[str, Any]]) -> list[float]:
    """Return step times without the first step of each generation, unless there are no others."""
    timed = [line for line in lines if line["time_metrics/end_to_end(s)"] is not None]
    first: dict[int, dict[str, Any]] = {}
    settled = [line for line in timed if first.setdefault(line["generation"], line) is not line]
    return [line["time_metrics/end_to_end(s)"] for line in settled or timed]
