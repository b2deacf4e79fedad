"""What came of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from foreshard.errors import ForeshardError
from foreshard.runtime.membership.supervisor_state import recalled
from foreshard.runtime.records.durable_jsonl import whole_lines
from foreshard.runtime.records.ledger import Audit, audit, merge
from foreshard.spec.plan_file import load_plan


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
        On the clock, the first step of the run and of each generation left out (they warm up) where more
        are there.
    clock : str
    restarts : int
        Ranks started again.
    generations : int
        Times the ranks came together anew.
    budgets : dict of str to dict
        Of a run that was steered: `limit` and `mean` of each budget.
    absent : tuple of int
        Ranks of the run's plan that the last generation was without.
    samples, lost, repeated, misread : int
        By the ledgers; misread are positions at which ranks read different samples of the dataset.
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

    def to_dict(self) -> dict[str, Any]:
        """Return it as `run --json` prints it."""
        return {"schema_version": 1, **asdict(self)}


def outcome_of(out: Path, *, global_batch: int, steps: int, restarts: int) -> RunOutcome:
    """Read a run's files, join its ledgers into samples.jsonl, and check them.

    Raises
    ------
    ForeshardError
        When the disk does not take samples.jsonl.
    """
    ledgers = sorted((out / "ledger").glob("rank-*.jsonl"))
    try:
        merge(ledgers, out / "samples.jsonl")
    except OSError as error:
        raise ForeshardError(
            f"not written: {error.strerror or error}",
            file=str(out / "samples.jsonl"),
            rule="It is the ledgers of all ranks put together, they are whole",
            fix=f"See {out / 'ledger'}",
        ) from None
    checked = audit(ledgers, global_batch=global_batch, steps=steps)
    lines = kept_steps(out / "metrics.jsonl")
    return _outcome(out, lines, checked, restarts)


def kept_steps(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps that count: of a step trained twice the last."""
    found: dict[int, dict[str, Any]] = {}
    for line in whole_lines(path):
        if (
            line["generation"] >= found.get(line["step"], line)["generation"]
        ):  # lines may have waited for a disk
            found[line["step"]] = line
    return [found[step] for step in sorted(found)]


def _outcome(out: Path, lines: list[dict[str, Any]], checked: Audit, restarts: int) -> RunOutcome:
    times = settled_times(lines)
    return RunOutcome(
        out=str(out),
        steps=checked.steps,
        first_loss=lines[0]["loss_metrics/global_avg_loss"] if lines else None,
        last_loss=lines[-1]["loss_metrics/global_avg_loss"] if lines else None,
        median_step_s=median(times) if times else None,
        mean_step_s=sum(times) / len(times) if times else None,
        clock=lines[-1]["clock"] if lines else "",
        restarts=restarts,
        generations=len({line["generation"] for line in lines}),
        samples=checked.samples,
        lost=len(checked.lost),
        repeated=len(checked.repeated),
        misread=len(checked.misread),
        budgets=_budgets(lines[-1]) if lines else {},
        absent=_absent(out),
    )


def _absent(out: Path) -> tuple[int, ...]:
    decided = recalled(out)
    if decided is None or not decided.ranks:
        return ()  # its disk was full: nobody knows
    return tuple(sorted(set(load_plan(str(out / "plan.json")).ranks) - set(decided.ranks)))


def _budgets(line: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return limit and mean of each budget of a line, `budget/NAME/limit` and `budget/NAME/mean`."""
    names = [key.split("/")[1] for key in line if key.startswith("budget/") and key.endswith("/limit")]
    return {name: {what: line[f"budget/{name}/{what}"] for what in ("limit", "mean")} for name in names}


def settled_times(lines: list[dict[str, Any]]) -> list[float]:
    """Return step times without the first step of each generation, unless nothing else is there."""
    timed = [line for line in lines if line["time_metrics/end_to_end(s)"] is not None]
    seen: set[int] = set()
    settled = []
    for line in timed:
        if line["generation"] in seen:
            settled.append(line["time_metrics/end_to_end(s)"])
        seen.add(line["generation"])
    return settled or [line["time_metrics/end_to_end(s)"] for line in timed]
