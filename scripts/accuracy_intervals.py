"""Residual classes behind prediction intervals, and how often intervals hold: parts of docs/accuracy.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_rows import TRIO, Run, fitted_families, markdown, percent

from foreshard.predict.interval import class_of, features_of
from foreshard.profile.conformal import (
    LeftOut,
    build_classes,
    coverage,
    cross_fitted,
    inside,
    interval_of,
    judged_by_others,
)

RESIDUALS = Path(__file__).resolve().parents[1] / "src/foreshard/catalog/data/residuals.json"
LARGE = 40  # rows from which a class is held to the goal


def left_out_rows(runs: Sequence[Run]) -> list[LeftOut]:
    """Return the runs behind the classes: families that the fit leaves out in turn, repeats once, no OOM."""
    seen: set[Any] = set()
    out = []
    for run in runs:
        made, row = run.prediction, run.row
        known = made is not None and row.measured_s and row.config_key not in seen
        if not known or row.family not in fitted_families():
            continue
        seen.add(row.config_key)
        names = class_of(row.model, row.plan, row.framework, made.time_breakdown_s, evidence=made.evidence)
        out.append(
            LeftOut(family=row.family, measured_s=row.measured_s, predicted_s=made.step_time_s,
                    classes=names, features=features_of(row.model, row.plan))
        )  # fmt: skip
    return out


def document(rows: Sequence[LeftOut], datasheet: Sequence[LeftOut], kept: Mapping[str, Any]) -> str:
    """Return residuals.json: bounds of every class, and each point once under its narrowest class."""
    plain = [replace(row, classes=("datasheet",)) for row in datasheet]
    classes = build_classes(rows) | build_classes(plain, signed=True) | dict(kept)
    points: dict[str, list[list[float]]] = {}
    for narrowest in sorted({row.classes[0] for row in (*rows, *plain)}):
        own = [row.features for row in (*rows, *plain) if row.classes[0] == narrowest]
        points[narrowest] = np.unique(np.array(own, float).round(3), axis=0).tolist()
    for entry in classes.values():
        entry.pop("points", None)
    data = {
        "schema_version": 2,
        "written_by": "scripts/accuracy.py --residuals",
        "classes": classes,
        "points": points,
    }
    return json.dumps(data, separators=(",", ":")) + "\n"


def write_residuals(rows: Sequence[LeftOut], datasheet: Sequence[LeftOut]) -> None:
    """Write the classes; those of calibrated predictions keep their stated bounds."""
    old = json.loads(RESIDUALS.read_text(encoding="utf-8"))["classes"]
    kept = {name: entry for name, entry in old.items() if name.startswith("calibrated")}
    RESIDUALS.write_text(document(rows, datasheet, kept), encoding="utf-8")


def class_scores(rows: Sequence[LeftOut]) -> dict[str, dict[str, Any]]:
    """Return per class its rows, coverage three ways and median half width; `all` joins every row."""
    shipped = build_classes(rows)
    ways = {
        "shipped": inside(rows, shipped),
        "folds": cross_fitted(rows),
        "others": judged_by_others(rows, [TRIO]),
    }
    out: dict[str, dict[str, Any]] = {}
    for name in sorted({name for row in rows for name in row.classes}):
        mine = [i for i, row in enumerate(rows) if name in row.classes]
        out[name] = {"rows": len(mine), "half": _half_width([rows[i] for i in mine], shipped)}
        out[name] |= {way: coverage(hits[i] for i in mine) for way, hits in ways.items()}
        out[name]["families"] = sorted({rows[i].family for i in mine})
    return out


def _half_width(rows: Iterable[LeftOut], classes: Mapping[str, Any]) -> float | None:
    made = [(interval_of(row, classes), row.predicted_s) for row in rows]
    widths = [(ends[1] - ends[0]) / 2.0 / predicted for ends, predicted in made if ends]
    return float(np.median(widths)) if widths else None


def class_table(rows: Sequence[LeftOut]) -> list[str]:
    """Return the table of classes."""
    header = ("class", "runs", "cross-fitted (%)", "judged by other families (%)", "median half width (%)")
    lines = [
        (f"`{name}`", s["rows"], percent(s["folds"], 0), percent(s["others"], 0), percent(s["half"]))
        for name, s in class_scores(rows).items()
    ]
    return markdown(header, lines)


def coverage_table(rows: Sequence[LeftOut]) -> list[str]:
    """Return the table of families, each judged by intervals built from the others."""
    hits = judged_by_others(rows, [TRIO])
    families = dict.fromkeys(row.family for row in rows)
    lines = []
    for name in families:
        mine = [hit for row, hit in zip(rows, hits, strict=True) if row.family == name]
        lines.append((name, len(mine), percent(coverage(mine), 0)))
    return markdown(("family judged by all others", "runs", "inside 90 % intervals (%)"), lines)
