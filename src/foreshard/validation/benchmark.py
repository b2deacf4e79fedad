"""The benchmark: every predictor on every measured training step, its errors and the time that it takes.

A row that a predictor refuses or fails on is no error of zero: it is counted, and the rows that all
predictors answer are scored apart.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreshard.errors import ForeshardError, SpecError
from foreshard.validation.mixed_rows import training_rows
from foreshard.validation.predictors import RunInputs, StepPredictor
from foreshard.validation.rows import TrainingRow
from foreshard.validation.scoring import APART, RowOutcome, summarise
from foreshard.validation.tables import MIXED, TRAINING, MeasuredTable

REFUSED, FAILED = "refused", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorScore:
    """A predictor on all rows: what it answers, how well, and in what time.

    Attributes
    ----------
    own, common : dict
        Scores as `validate` gives them, over the rows that it answers and over those that all answer.
    by_family : dict of str to (rows, median error)
    cpu_s : float, optional
        Median processor seconds of an answer.
    reasons : dict of str to int
        Why rows have no answer, most first.
    """

    name: str
    note: str
    answered: int
    refused: int
    failed: int
    own: dict[str, Any]
    common: dict[str, Any]
    by_family: dict[str, tuple[int, float | None]]
    cpu_s: float | None
    reasons: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``compare --tables --json``."""
        made = {name: getattr(self, name) for name in self.__slots__}
        return made | {"by_family": {name: list(pair) for name, pair in self.by_family.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """All predictors on the rows of some tables; `left` are rows no case could be read from, by reason."""

    tables: tuple[str, ...]
    rows: int
    common: int
    predictors: tuple[PredictorScore, ...]
    left: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``compare --tables --json``."""
        return {
            "schema_version": 1,
            "tables": list(self.tables),
            "rows": self.rows,
            "common_rows": self.common,
            "predictors": [score.to_dict() for score in self.predictors],
            "not_read": self.left,
        }


def benchmark(
    tables: Iterable[MeasuredTable],
    predictors: Sequence[StepPredictor],
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """Return the scores of predictors on the training steps of tables; other kinds of tables have none."""
    named = [predictor.name for predictor in predictors]
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        rule, fix = "Every predictor has a name of its own", "Change NAME in the file"
        raise SpecError(f"two predictors are named {twice[0]!r}", key="--predictor", rule=rule, fix=fix)
    rows: list[TrainingRow] = []
    left: Counter[str] = Counter()
    used = []
    for table in tables:
        if table.kind not in (TRAINING, MIXED):
            continue
        found, skipped = training_rows(table)
        rows += [row for row in found if row.measured_s and not row.oom]
        left.update(row.reason for row in skipped)
        used.append(table.stem)
    if not rows:
        rule, fix = "The benchmark scores measured training steps", "Give tables that have some"
        raise SpecError("no measured training step", key="--tables", rule=rule, fix=fix)
    outcomes = []
    for predictor in predictors:
        tell(f"{predictor.name}: {len(rows)} rows")
        outcomes.append([_outcome(row, predictor) for row in rows])
    answered = [{i for i, row in enumerate(found) if row.status == "ok"} for found in outcomes]
    common = set.intersection(*answered)
    scores = tuple(
        _score(predictor, found, common) for predictor, found in zip(predictors, outcomes, strict=True)
    )
    return Benchmark(
        tables=tuple(used),
        rows=len(rows),
        common=len(common),
        predictors=scores,
        left=dict(left.most_common()),
    )


def _outcome(row: TrainingRow, predictor: StepPredictor) -> RowOutcome:
    """Return what one predictor says of one row; its own errors are its refusals, others its failures."""
    stated = row.measured()
    run = RunInputs(
        model=row.model, cluster=row.cluster, plan=row.plan, framework=row.framework, family=row.family
    )
    start = time.process_time()
    try:
        answer = predictor(run)
    except ForeshardError as error:
        return replace(stated, status=REFUSED, reason=error.what)
    except Exception as error:
        return replace(stated, status=FAILED, reason=f"{type(error).__name__}: {error}"[:120])
    took = time.process_time() - start
    if not (math.isfinite(answer.step_time_s) and answer.step_time_s > 0):
        return replace(stated, status=FAILED, reason=f"a step of {answer.step_time_s:g} s")
    counts = {"reserved": answer.reserved_bytes, "device": answer.device_bytes}
    peak = counts.get(row.memory_kind, answer.allocated_bytes)
    return replace(
        stated,
        predicted_s=answer.step_time_s,
        interval_s=answer.interval_s,
        predicted_peak_bytes=peak,
        predict_s=took,
    )


def _score(predictor: StepPredictor, outcomes: Sequence[RowOutcome], common: set[int]) -> PredictorScore:
    known = [row for row in outcomes if row.status == "ok"]
    others = [row for row in known if row.family != APART]  # its pairs would swamp the order of the others
    families: dict[str, list[RowOutcome]] = {}
    for row in known:
        families.setdefault(row.family, []).append(row)
    reasons = Counter(row.reason or "" for row in outcomes if row.status != "ok")
    took = [row.predict_s for row in known if row.predict_s is not None]
    return PredictorScore(
        name=predictor.name,
        note=predictor.note,
        answered=len(known),
        refused=sum(row.status == REFUSED for row in outcomes),
        failed=sum(row.status == FAILED for row in outcomes),
        own=summarise(known, order=others or None),
        common=summarise([row for i, row in enumerate(outcomes) if i in common]),
        by_family={
            name: (len(rows), summarise(rows)["median_ape"]) for name, rows in sorted(families.items())
        },
        cpu_s=float(np.median(took)) if took else None,
        reasons=dict(reasons.most_common()),
    )
