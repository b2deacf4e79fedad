"""A run to a target: steps of a global batch times the step that the batch takes, for several batches.

A larger batch takes fewer steps and longer ones; which is best depends on both, so each batch is predicted
(or planned) by itself and the whole runs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from foreshard.catalog.targets import TargetCurve
from foreshard.errors import ForeshardError
from foreshard.spec.codec import plain
from foreshard.spec.prediction import Prediction

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """The whole run at one global batch; without a prediction `why` says so, and with one what keeps it out.

    ``usd`` and ``energy_j`` are None where no price or power is known. Goodput, where it is predicted, makes
    the run longer than its steps.
    """

    global_batch: int
    steps: int
    samples: float
    step_time_s: float | None = None
    time_s: float | None = None
    usd: float | None = None
    energy_j: float | None = None
    why: str = ""
    known: bool = True  # the curve covers the batch

    def value(self, objective: str) -> float:
        """Return what the objective makes small; infinite for a run that is not allowed or not known."""
        found = {"time": self.time_s, "cost": self.usd, "energy": self.energy_j}[objective]
        return math.inf if found is None or self.why else found


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRuns(Generic[Answer]):
    """Runs at several batches, in order of batch, and the answer of the best one.

    `best` is the first where no run is allowed: its answer says why.
    """

    curve: TargetCurve
    objective: str
    runs: tuple[BatchRun, ...]
    best: int
    answer: Answer

    @property
    def chosen(self) -> BatchRun:
        """The best run."""
        return self.runs[self.best]

    def notes(self) -> tuple[str, ...]:
        """Return what the figures rest on, in sentences."""
        curve, (low, high) = self.curve, self.curve.batches
        unit = "tokens" if curve.samples_of == 1 else "samples"
        fit = "" if curve.worst_error is None else f", within {curve.worst_error:.1%} of its points"
        made = [
            f"To {curve.target}: {curve.min_samples:.4g} {unit} x (1 + batch / {curve.critical_batch:.4g})"
            f"{fit} ({curve.source}).",
            *(f"{note[0].upper()}{note[1:]}." for note in curve.notes),
        ]
        outside = [str(run.global_batch) for run in self.runs if not run.known]
        if outside:
            made.append(
                f"Batches {', '.join(outside)} are outside {low:.4g} to {high:.4g}, where the curve is known."
            )
        if len(self.runs) > 1 and self.best in (0, len(self.runs) - 1) and not self.chosen.why:
            end = "smallest" if self.best == 0 else "largest"
            made.append(f"The best batch is the {end} searched; one beyond it may be better.")
        return tuple(made)

    def to_dict(self) -> dict[str, Any]:
        """Return the object ``to_target`` of ``plan --json`` and ``predict --json``."""
        return {
            **plain(self.curve),
            "objective": self.objective,
            "best_global_batch": None if self.chosen.why else self.chosen.global_batch,
            "runs": [asdict(run) for run in self.runs],
        }


def run_of(curve: TargetCurve, batch: int, prediction: Prediction | None, why: str = "") -> BatchRun:
    """Return the run of a global batch under the prediction of its step."""
    steps, known = curve.steps(batch), curve.knows(batch)
    if prediction is None:
        return BatchRun(global_batch=batch, steps=steps, samples=curve.samples(batch), why=why, known=known)
    done = steps / (prediction.goodput or 1.0)
    price, energy = prediction.cost.usd_per_step, prediction.energy_j_per_step
    return BatchRun(
        global_batch=batch,
        steps=steps,
        samples=curve.samples(batch),
        step_time_s=prediction.step_time_s,
        time_s=done * prediction.step_time_s,
        usd=None if price is None else done * price,
        energy_j=None if energy is None else done * energy,
        why=why if prediction.memory.fits else why or "does not fit memory",
        known=known,
    )


def over_batches(
    curve: TargetCurve,
    batches: Sequence[int],
    ask: Callable[[int], tuple[Prediction | None, str, Answer]],
    *,
    objective: str = "time",
    stop: Callable[[], bool] = lambda: False,
) -> TargetRuns[Answer]:
    """Return the runs at each batch; `ask` gives the prediction of a batch, why it is kept out, its answer.

    An error of one batch keeps it out; where all have one, the first is raised. `stop` ends the search early.
    """
    found: list[tuple[BatchRun, Answer | None]] = []
    errors: list[ForeshardError] = []
    for batch in batches:
        try:
            prediction, why, answer = ask(batch)
            found.append((run_of(curve, batch, prediction, why), answer))
        except ForeshardError as error:
            errors.append(error)
            found.append((run_of(curve, batch, None, str(error)), None))
        if stop():
            break
    answers = [(i, answer) for i, (_, answer) in enumerate(found) if answer is not None]
    if not answers:
        raise errors[0]
    best, answer = min(answers, key=lambda pair: (found[pair[0]][0].value(objective), pair[0]))
    runs = tuple(run for run, _ in found)
    return TargetRuns(curve=curve, objective=objective, runs=runs, best=best, answer=answer)
