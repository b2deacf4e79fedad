"""Residual classes behind prediction intervals, and how often intervals hold: parts of docs/accuracy.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from accuracy_rows import ROOT, TRIO, Run, TrainingRow, markdown, percent, run_all
from fit_kernels import middle
from fit_training import takes_part
from residual_classes import (
    LeftOut,
    build_classes,
    coverage,
    cross_fitted,
    inside,
    interval_of,
    judged_by_others,
    no_surer,
)

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_constants
from foreshard.catalog.stacks import running
from foreshard.cost.tables import load_tables
from foreshard.predict.interval import (
    EVIDENCE,
    LEVEL,
    LEVELS,
    MIN_CLASS,
    SURER,
    class_of,
    features_of,
    interval_evidence,
)
from foreshard.predict.run_setup import _kernel_model
from foreshard.spec.device import Device
from foreshard.spec.plan import ATTENTIONS
from foreshard.validation.predictors import fitted_families
from foreshard.validation.tables import measured_folder

RESIDUALS = ROOT / "src/foreshard/catalog/data/residuals.json"
PRODUCTS = "kernel_aiconfigurator_gemm.csv.gz"
LEARNED = ROOT / "docs/data/learned_steps.json"
TOLERANCE = 1e-3  # of a log residual or a feature: what `--check` lets pass
LARGE = 40  # rows from which a class is held to the goal


def left_out_rows(runs: Sequence[Run]) -> list[LeftOut]:
    """Return the runs behind the classes: families that the fit leaves out in turn, repeats once, no OOM."""
    return list(_by_configuration(runs).values())


def in_fit(row: TrainingRow) -> bool:
    """Whether a row takes part in the fit."""
    return row.family in fitted_families() and takes_part(row)


def outside_fit(row: TrainingRow) -> bool:
    """Whether a row is timed, its degrees are stated, and no fit has seen its family."""
    stated = row.family.startswith("hetero_") or bool(row.raw.get("tp") and row.raw.get("pp"))
    return bool(row.measured_s) and not row.oom and stated and row.family not in fitted_families()


def _by_configuration(
    runs: Sequence[Run], counts: Callable[[TrainingRow], bool] = in_fit
) -> dict[Any, LeftOut]:
    out: dict[Any, LeftOut] = {}
    for run in runs:
        made, row = run.prediction, run.row
        if made is None or not row.measured_s or row.config_key in out or not counts(row):
            continue
        evidence = interval_evidence(made.evidence, {device.arch for device in row.cluster.devices})
        framework = running(row.framework, row.cluster.devices)
        names = class_of(row.model, row.plan, framework, made.time_breakdown_s, evidence=evidence)
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
            kind = left_out.classes[0].partition(":")[0]
            out.append(
                replace(
                    left_out,
                    predicted_s=left_out.predicted_s * float(np.exp(other.residual)),
                    classes=(f"calibrated:{kind}", "calibrated"),
                )
            )
    return out


def constants_without(device: Device, *, whole_architecture: bool) -> dict[str, Any]:
    """Return the kernel constants as fitted without a device, or without its whole architecture.

    Relatives are devices with whole kernel tables: the curves of all others were derived from these.
    """
    table = kernel_constants()
    tabled = table["attention"]["trtllm"]["devices"]

    def less(section: Mapping[str, Any]) -> dict[str, Any]:
        by_arch = {arch: entry for arch, entry in section["architectures"].items() if arch != device.arch}
        relatives = [
            entry
            for name, entry in section["devices"].items()
            if name in tabled and name != device.name and resolve_device(name).arch == device.arch
        ]
        if relatives and not whole_architecture:
            by_arch[device.arch] = middle(relatives)
        generic = middle(list(by_arch.values())) if by_arch else section["generic"]
        devices = {name: entry for name, entry in section["devices"].items() if name != device.name}
        return {"devices": devices, "architectures": by_arch, "generic": generic}

    return table | {
        "gemm": {name: less(section) for name, section in table["gemm"].items()},
        "attention": {name: less(section) for name, section in table["attention"].items()},
        "stream": less(table["stream"]),
        "grouped": less(table["grouped"]),
    }


def as_unmeasured(row: TrainingRow, *, whole_architecture: bool) -> TrainingRow:
    """Return the row on a device that nobody has measured; the software that exists for it stays.

    Without its architecture no constant of one generation applies either.
    """
    nodes = tuple(
        replace(
            node,
            device=replace(
                node.device,
                name=f"{node.device.name}-unmeasured",
                arch="unmeasured" if whole_architecture else node.device.arch,
            ),
        )
        for node in row.cluster.nodes
    )
    framework = running(row.framework, row.cluster.devices)
    return replace(row, cluster=replace(row.cluster, nodes=nodes), framework=framework)


def unmeasured_rows(
    rows: Sequence[TrainingRow], engine: str, *, whole_architecture: bool = True
) -> list[LeftOut]:
    """Return the runs as predicted for devices that nobody has measured, by constants of other families.

    With `whole_architecture` only the datasheet is known; without, kernels of relatives are, and runs on
    devices that have none do not count.
    """
    alone = [
        row for row in rows if in_fit(row) and len({node.device.name for node in row.cluster.nodes}) == 1
    ]
    by_device: dict[str, list[TrainingRow]] = {}
    for row in alone:
        by_device.setdefault(row.cluster.nodes[0].device.name, []).append(row)
    found: list[LeftOut] = []
    for mine in by_device.values():
        device = mine[0].cluster.nodes[0].device
        less = constants_without(device, whole_architecture=whole_architecture)
        blind = [as_unmeasured(row, whole_architecture=whole_architecture) for row in mine]
        with (
            patch("foreshard.catalog.kernels.kernel_constants", lambda less=less: less),
            patch("foreshard.catalog.stacks.kernels_on", lambda device: ATTENTIONS),
        ):
            _kernel_model.cache_clear()
            runs = run_all(blind, engine=engine, left_out=True, costs="formula")
        _kernel_model.cache_clear()
        if not whole_architecture:
            runs = [run for run in runs if run.prediction and run.prediction.evidence == "architecture"]
        found += left_out_rows(runs)
    return found


def tabled_rows(rows: Sequence[TrainingRow], engine: str) -> list[LeftOut]:
    """Return the runs as predicted with products from a measured table, by constants of other families."""
    tables = load_tables(str(measured_folder() / PRODUCTS))
    known = {name for name, _ in tables.devices}
    mine = [row for row in rows if in_fit(row) and {device.name for device in row.cluster.devices} <= known]
    made = left_out_rows(run_all(mine, engine=engine, left_out=True, costs=tables))
    return [run for run in made if run.classes[0].endswith(":table")]


def never_fitted_rows(rows: Sequence[TrainingRow], engine: str) -> list[LeftOut]:
    """Return the runs of a framework, or on an architecture, of which no run was in a fit."""
    runs = run_all([row for row in rows if outside_fit(row)], engine=engine)
    made = _by_configuration(runs, outside_fit).values()
    return [run for run in made if run.classes[0].endswith(":unseen")]


def learned_rows() -> list[LeftOut]:
    """Return the runs as predicted by learned costs that never saw their device.

    They are written by `scripts/accuracy_learned_steps.py --residuals`.
    """
    rows = json.loads(LEARNED.read_text(encoding="utf-8"))["rows"]
    return [
        LeftOut(**row | {"classes": tuple(row["classes"]), "features": tuple(row["features"])})
        for row in rows
    ]


def document(
    rows: Sequence[LeftOut],
    datasheet: Sequence[LeftOut],
    calibrated: Sequence[LeftOut],
    unseen: Mapping[str, Sequence[LeftOut]],
) -> str:
    """Return residuals.json: bounds of every class, and each point once under its narrowest class.

    `unseen` are runs by what kernel times rest on: `EVIDENCE` but fitted. Calibrated classes keep no points:
    what a measured step corrects is not far from the data. Nor do those of `unseen`, whose runs are among
    the others: distances are those to the class without evidence.
    """
    plain = [replace(row, classes=("datasheet",)) for row in datasheet]
    classes = build_classes(rows) | build_classes(plain, signed=True) | build_classes(calibrated)
    classes = with_unseen(classes, unseen)
    points: dict[str, list[list[float]]] = {}
    for narrowest in sorted({row.classes[0] for row in (*rows, *plain)}):
        own = [row.features for row in (*rows, *plain) if row.classes[0] == narrowest]
        points[narrowest] = np.unique(np.array(own, float).round(3), axis=0).tolist()
    for entry in classes.values():
        entry.pop("points", None)
    data = {
        "schema_version": 3,
        "written_by": "scripts/accuracy.py --residuals",
        "classes": classes,
        "points": points,
    }
    return json.dumps(data, separators=(",", ":")) + "\n"


def with_unseen(
    classes: Mapping[str, Mapping[str, Any]], unseen: Mapping[str, Sequence[LeftOut]]
) -> dict[str, dict[str, Any]]:
    """Return classes with those of weaker evidence, each no surer than any of surer evidence inside it."""
    out = {name: dict(entry) for name, entry in classes.items() if not name.endswith(_WEAKER)}
    for evidence in (name for name in EVIDENCE if name in SURER):
        made = build_classes(row_as(evidence, row) for row in unseen.get(evidence, ()))
        for name, entry in made.items():
            if not name.endswith(f":{evidence}"):
                continue
            base = name.rpartition(":")[0]
            inside_it = [
                other
                for known, other in out.items()
                if _kind_path(known, base) and not known.endswith(f":{evidence}") and _surer(known, evidence)
            ]
            far = {
                key: out[base][key]
                for key in ("scale", "typical", "points")
                if base in out and key in out[base]
            }
            out[name] = no_surer(entry, inside_it) | far
    return out


_WEAKER = tuple(f":{evidence}" for evidence in SURER)
_OTHER = ("calibrated", "datasheet")
"""First words of classes of other fidelities."""


def _kind_path(name: str, base: str) -> bool:
    if name.split(":")[0] in _OTHER:
        return False
    return base == "all" or name == base or name.startswith(f"{base}:")


def _surer(name: str, evidence: str) -> bool:
    last = name.rpartition(":")[2]
    return last not in SURER or last in SURER[evidence]


def row_as(evidence: str, row: LeftOut) -> LeftOut:
    """Return a run whose classes are those of an evidence alone, from the narrowest to that of all."""
    names = [name for name in row.classes if name.endswith(f":{evidence}")]
    return replace(row, classes=tuple(names))


def unseen_rows(rows: Sequence[TrainingRow], engine: str) -> dict[str, list[LeftOut]]:
    """Return the runs on devices taken for unknown, by what their kernel times rest on then."""
    return {
        "table": tabled_rows(rows, engine),
        "architecture": unmeasured_rows(rows, engine, whole_architecture=False),
        "learned": learned_rows(),
        "datasheet": unmeasured_rows(rows, engine),
        "unseen": never_fitted_rows(rows, engine),
    }


def residuals_text(
    left_out: Sequence[Run], datasheet: Sequence[Run], unseen: Mapping[str, Sequence[LeftOut]]
) -> str:
    """Return the classes of left-out, datasheet, calibrated and unmeasured predictions, as shipped."""
    return document(left_out_rows(left_out), left_out_rows(datasheet), calibrated_rows(left_out), unseen)


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


def level_table(rows: Sequence[LeftOut]) -> list[str]:
    """Return the coverage of every level over all runs, each judged by the other folds."""
    hits = {level: coverage(cross_fitted(rows, level=level)) for level in LEVELS}
    return markdown(
        ("level (%)", "inside (%)"), [(f"{100 * level:g}", percent(hit)) for level, hit in hits.items()]
    )


def bounds_table(rows: Sequence[LeftOut], ends: str = "") -> list[str]:
    """Return the table of classes with an ending: coverage and upper end."""
    folds, others = cross_fitted(rows), judged_by_others(rows, [TRIO])
    lines = []
    for name, entry in build_classes(rows).items():
        if name.startswith("all") or not name.endswith(ends):
            continue
        mine = [i for i, row in enumerate(rows) if name in row.classes]
        shares = (percent(coverage(hits[i] for i in mine), 0) for hits in (folds, others))
        lines.append((f"`{name}`", entry["rows"], *shares, percent(np.expm1(entry["bounds"][str(LEVEL)][1]))))
    header = ("class", "runs", "cross-fitted (%)", "judged by other families (%)", "upper end (%)")
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
