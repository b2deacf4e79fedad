"""Residual classes behind prediction intervals, and how often intervals hold: parts of docs/accuracy.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_rows import TRIO, Run, TrainingRow, markdown, percent, run_all
from fit_training import takes_part
from residual_classes import (
    LeftOut,
    build_classes,
    coverage,
    cross_fitted,
    inside,
    interval_of,
    judged_by_others,
)

from foreshard.predict.interval import MIN_CLASS, class_of, features_of
from foreshard.validation.predictors import fitted_families

RESIDUALS = Path(__file__).resolve().parents[1] / "src/foreshard/catalog/data/residuals.json"
TOLERANCE = 1e-3  # of a log residual or a feature: what `--check` lets pass
LARGE = 40  # rows from which a class is held to the goal


def left_out_rows(runs: Sequence[Run]) -> list[LeftOut]:
    """Return the runs behind the classes: families that the fit leaves out in turn, repeats once, no OOM."""
    return list(_by_configuration(runs).values())


def _by_configuration(runs: Sequence[Run]) -> dict[Any, LeftOut]:
    out: dict[Any, LeftOut] = {}
    for run in runs:
        made, row = run.prediction, run.row
        known = made is not None and row.measured_s and row.config_key not in out
        if not known or row.family not in fitted_families() or not takes_part(row):
            continue
        names = class_of(row.model, row.plan, row.framework, made.time_breakdown_s, evidence=made.evidence)
        out[row.config_key] = LeftOut(
            family=row.family,
            measured_s=row.measured_s,
            predicted_s=made.step_time_s,
            classes=names,
            features=features_of(row.model, row.plan),
        )
    return out


def calibrated_rows(runs: Sequence[Run], seed: int = 0) -> list[LeftOut]:
    """Return the runs as predicted after one measured step of the same model on the same devices.

    The step is that of another configuration of the family, drawn at random among those of equal model,
    device and precision; a run without such a neighbour does not count.
    """
    alike: dict[Any, list[LeftOut]] = {}
    rows = {run.row.config_key: run.row for run in runs}
    for key, made in _by_configuration(runs).items():
        row = rows[key]
        device = row.cluster.nodes[0].device.name
        group = (row.family, row.model.num_layers, row.model.hidden, device, row.plan.precision)
        alike.setdefault(group, []).append(made)
    rng = np.random.default_rng(seed)
    out = []
    for group in alike.values():
        for i, left_out in enumerate(group if len(group) > 1 else ()):
            other = group[(i + int(rng.integers(1, len(group)))) % len(group)]
            kind = left_out.classes[-2]
            out.append(
                replace(
                    left_out,
                    predicted_s=left_out.predicted_s * float(np.exp(other.residual)),
                    classes=(f"calibrated:{kind}", "calibrated"),
                )
            )
    return out


def unmeasured(row: TrainingRow) -> TrainingRow:
    """Return the row on devices of an architecture that nobody has measured: only the datasheet is known.

    Curves of kernels are the generic ones then, and no constant of one generation applies.
    """
    nodes = tuple(
        replace(node, device=replace(node.device, name=f"{node.device.name}-unmeasured", arch="unmeasured"))
        for node in row.cluster.nodes
    )
    return replace(row, cluster=replace(row.cluster, nodes=nodes))


def unmeasured_rows(rows: Sequence[TrainingRow], engine: str) -> list[LeftOut]:
    """Return the runs as predicted for devices of an architecture that nobody has measured.

    They serve only the narrowest classes, which end in what the kernel times rest on: `datasheet`.
    """
    known = [unmeasured(row) for row in rows if row.family in fitted_families() and takes_part(row)]
    made = left_out_rows(run_all(known, engine=engine, left_out=True))
    return [replace(left_out, classes=left_out.classes[:1]) for left_out in made]


def document(
    rows: Sequence[LeftOut],
    datasheet: Sequence[LeftOut],
    calibrated: Sequence[LeftOut],
    blind: Sequence[LeftOut],
) -> str:
    """Return residuals.json: bounds of every class, and each point once under its narrowest class.

    Calibrated classes keep no points: what a measured step corrects is not far from the data. Nor do those
    of unmeasured architectures: their points are those of the other classes.
    """
    plain = [replace(row, classes=("datasheet",)) for row in datasheet]
    classes = build_classes(rows) | build_classes(plain, signed=True) | build_classes(calibrated)
    classes |= {name: _not_surer(entry, classes, name) for name, entry in build_classes(blind).items()}
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


def _not_surer(entry: dict[str, Any], classes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a class of unmeasured architectures, no narrower than that of fitted ones."""
    known = classes.get(f"{name.rpartition(':')[0]}:fitted")
    if known is None:
        return entry
    (low, high), (least, most) = entry["bounds"], known["bounds"]
    return entry | {"bounds": [min(low, least), max(high, most)]}


def residuals_text(left_out: Sequence[Run], datasheet: Sequence[Run], blind: Sequence[LeftOut]) -> str:
    """Return the classes of left-out, datasheet, calibrated and unmeasured predictions, as shipped."""
    return document(left_out_rows(left_out), left_out_rows(datasheet), calibrated_rows(left_out), blind)


def differences(shipped: Any, made: Any, path: str = "") -> list[str]:
    """Return the places at which two residual documents differ by more than `TOLERANCE`."""
    if isinstance(shipped, dict) and isinstance(made, dict):
        out = [f"{path}/{name}: only in one of both" for name in sorted(shipped.keys() ^ made.keys())]
        for name in sorted(shipped.keys() & made.keys()):
            out += differences(shipped[name], made[name], f"{path}/{name}")
        return out
    if isinstance(shipped, list) and isinstance(made, list) and len(shipped) == len(made):
        pairs = enumerate(zip(shipped, made, strict=True))
        return [d for i, (old, new) in pairs for d in differences(old, new, f"{path}/{i}")]
    if isinstance(shipped, float) and isinstance(made, float) and abs(shipped - made) <= TOLERANCE:
        return []
    if shipped == made:
        return []
    if isinstance(shipped, list) and isinstance(made, list):
        return [f"{path}: {len(shipped)} shipped, {len(made)} made"]
    return [f"{path}: shipped {shipped}, made {made}"]


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
        if s["rows"] >= MIN_CLASS
    ]
    return markdown(header, lines)


def bounds_table(rows: Sequence[LeftOut]) -> list[str]:
    """Return the table of classes of one kind of prediction: coverage and upper end."""
    hits = cross_fitted(rows)
    lines = []
    for name, entry in build_classes(rows).items():
        if name == "all":
            continue
        mine = [hit for row, hit in zip(rows, hits, strict=True) if name in row.classes]
        lines.append(
            (f"`{name}`", entry["rows"], percent(coverage(mine), 0), percent(np.expm1(entry["bounds"][1])))
        )
    return markdown(("class", "runs", "cross-fitted (%)", "upper end (%)"), lines)


def coverage_table(rows: Sequence[LeftOut]) -> list[str]:
    """Return the table of families, each judged by intervals built from the others."""
    hits = judged_by_others(rows, [TRIO])
    families = dict.fromkeys(row.family for row in rows)
    lines = []
    for name in families:
        mine = [hit for row, hit in zip(rows, hits, strict=True) if row.family == name]
        lines.append((name, len(mine), percent(coverage(mine), 0)))
    return markdown(("family judged by all others", "runs", "inside 90 % intervals (%)"), lines)
