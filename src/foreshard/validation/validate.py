"""Predict every row of tables of measurements and score the predictions (docs/design.md, validation)."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foreshard.errors import AccuracyError, InfeasibleError, SpecError, unknown
from foreshard.predict.interval import LEVEL
from foreshard.profile.step_table import StepRow, is_step_table, read_step_table
from foreshard.spec.prediction import Memory
from foreshard.validation.collective_cases import TimedCase, collective_cases
from foreshard.validation.kernels.cases import kernel_cases
from foreshard.validation.mixed_rows import training_rows
from foreshard.validation.networks.cases import network_cases
from foreshard.validation.networks.predicted import Tracing
from foreshard.validation.rows import TrainingRow
from foreshard.validation.scoring import RowOutcome, score
from foreshard.validation.tables import (
    CLASSIC,
    COLLECTIVE,
    MIXED,
    TRAINING,
    MeasuredTable,
    read_table,
    table_rules,
)


class Predicted(Protocol):
    """What validation reads of a prediction."""

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    step_time_intervals_s: Mapping[float, tuple[float, float]]
    evidence: str
    memory: Memory


Predictor = Callable[[TrainingRow], Predicted]
StepPredictor = Callable[[StepRow], Predicted]


def training_outcome(row: TrainingRow, predictor: Predictor) -> RowOutcome:
    """Return what was measured and predicted for one training run; an OOM row is a label only."""
    start = time.perf_counter()
    try:
        made = predictor(row)
    except (InfeasibleError, SpecError) as error:
        if row.oom and isinstance(error, InfeasibleError):
            return replace(row.measured(), fits=False, predict_s=time.perf_counter() - start)
        return replace(row.measured(), status="skipped", reason=str(error))
    took = time.perf_counter() - start
    peak = made.memory.counted(row.memory_kind)
    return _predicted_outcome(row.measured(), made, peak_bytes=peak, predict_s=took)


def _step_outcome(row: StepRow, family: str, predictor: StepPredictor) -> RowOutcome:
    """Return what was measured and predicted for a `predict` command and its seconds."""
    stated = RowOutcome(
        id=row.place,
        family=family,
        measured_s=row.step_time_s,
        config_key=(row.model, row.cluster, *sorted(row.options.items())),
    )
    start = time.perf_counter()
    try:
        made = predictor(row)
    except (InfeasibleError, SpecError) as error:
        return replace(stated, status="skipped", reason=str(error))
    took = time.perf_counter() - start
    return _predicted_outcome(stated, made, peak_bytes=made.memory.peak_bytes, predict_s=took)


def _predicted_outcome(
    stated: RowOutcome, made: Predicted, *, peak_bytes: float | None, predict_s: float
) -> RowOutcome:
    return replace(
        stated,
        predicted_s=made.step_time_s,
        interval_s=made.step_time_interval_s,
        intervals_s=made.step_time_intervals_s,
        evidence=made.evidence,
        predicted_peak_bytes=peak_bytes,
        predict_s=predict_s,
        fits=made.memory.fits,
    )


def _inputs(row: Mapping[str, str]) -> Hashable:
    """Return all cells of a row but provenance and results: rows equal in them are repeats."""
    other = table_rules()["not_inputs"]
    return tuple(
        value
        for key, value in row.items()
        if key not in other["provenance"] and not any(word in key for word in other["results"])
    )


def case_outcomes(table: MeasuredTable, cases: Sequence[TimedCase], predict_s: float) -> list[RowOutcome]:
    """Return one outcome per row of a table from its cases, which took `predict_s` together."""
    each = predict_s / max(1, len(table.rows))
    return [
        RowOutcome(
            id=row_id,
            family=family,
            status="skipped" if case.reason else "ok",
            reason=case.reason,
            measured_s=case.measured_s,
            predicted_s=case.predicted_s,
            interval_s=case.intervals_s.get(LEVEL),
            intervals_s=case.intervals_s,
            evidence=case.evidence,
            predict_s=None if case.reason else each,
            config_key=_inputs(row),
        )
        for row_id, family, row, case in zip(table.ids, table.families, table.rows, cases, strict=True)
    ]


def table_outcomes(
    table: MeasuredTable, predictor: Predictor, *, exclude: str = "", tracing: Tracing | None = None
) -> list[RowOutcome]:
    """Return one outcome per row of a table, in its order; `exclude` as in `collective_cases`."""
    if table.kind in (TRAINING, MIXED):
        rows, skipped = training_rows(table)
        made = {row.id: training_outcome(row, predictor) for row in rows}
        for row in skipped:
            told: dict[str, Any] = {name: getattr(row, name) for name in row.__slots__}
            made[row.id] = RowOutcome(**told, status="skipped")
        return [made[row_id] for row_id in table.ids]
    start = time.perf_counter()
    if table.kind == COLLECTIVE:
        cases = collective_cases(table, exclude=exclude)
    elif table.kind == CLASSIC:
        cases = network_cases(table, tracing)
    else:
        cases = kernel_cases(table)
    return case_outcomes(table, cases, time.perf_counter() - start)


def timed_rows(files: Iterable[str | Path], family: str | None = None) -> list[TrainingRow]:
    """Return the timed training rows of tables, repeats of a configuration once with the median time.

    Raises
    ------
    SpecError
        When rows are of several families and none is named, or of none.
    """
    groups: dict[Hashable, list[TrainingRow]] = {}
    for path in files:
        table = read_table(path)
        if table.kind not in (TRAINING, MIXED):
            rule, fix = "Constants are fitted to steps of training runs", "Give a table of them"
            raise SpecError(f"a table of kind {table.kind}", file=str(path), rule=rule, fix=fix)
        for row in training_rows(table)[0]:
            if row.measured_s and not row.oom:
                groups.setdefault((row.family, *row.config_key), []).append(row)
    families = sorted({rows[0].family for rows in groups.values()})
    if family is not None and family not in families:
        rule, fix = "The tables have steps of", "Leave out --family for all of them"
        raise unknown("family", family, families, key="--family", rule=rule, otherwise=fix)
    if family is None and len(families) > 1:
        what, rule = f"steps of {', '.join(families)}", "Steps of one family are fitted together"
        raise SpecError(what, key="--family", rule=rule, fix="Name one of them")
    return [
        replace(rows[0], measured_s=float(np.median([row.measured_s for row in rows])))
        for rows in groups.values()
        if family in (None, rows[0].family)
    ]


def validate(
    files: Iterable[str | Path],
    *,
    exclude_calibration: str | None = None,
    predictor: Predictor,
    step_predictor: StepPredictor | None = None,
    tracing: Tracing | None = None,
) -> dict[str, Any]:
    """Return the validation object of `api.validate`: one entry per row, and scores overall and by family.

    `exclude_calibration` is what the predictor was built with; `tracing` is of networks, `step_predictor` of
    tables of steps (`profile.step_table`), of which each is a family.
    """
    outcomes: list[RowOutcome] = []
    for path in files:
        if step_predictor is not None and is_step_table(str(path)):
            steps = read_step_table(str(path))
            outcomes += [_step_outcome(row, Path(path).stem, step_predictor) for row in steps]
            continue
        table = read_table(path)
        outcomes += table_outcomes(table, predictor, exclude=exclude_calibration or "", tracing=tracing)
    if not outcomes:
        raise SpecError("no table was given", rule="Validation needs at least one file")
    return score(outcomes)


def check_mape(report: dict[str, Any], limit: float) -> None:
    """Raise when the mean error over all rows, skipped ones as 1.0, is above the limit."""
    found = report["summary"]["overall"]["mape_all"]
    if found is not None and not found <= limit:
        what = f"mean error {found:.3f} over all rows is above {limit:g}"
        raise AccuracyError(what, key="--max-mape", value=limit, rule="A skipped row counts 1.0")
