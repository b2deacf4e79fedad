"""Kernels and collectives in docs/accuracy.md: errors per table and system, in the fit and left out.

python scripts/accuracy_kernels.py      # convolutions and recurrent layers alone
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_rows import ROOT, markdown, pair, percent

from foreshard.errors import SpecError
from foreshard.validation.kernels.deepbench import (
    CONVOLUTIONS,
    RECURRENT,
    device_of,
    precision_of,
    timed_passes,
)
from foreshard.validation.rows import TrainingRow
from foreshard.validation.scoring import RowOutcome, distinct, summarise
from foreshard.validation.tables import COLLECTIVE, MeasuredTable, measured_folder, read_table
from foreshard.validation.validate import table_outcomes

DATA = ROOT / "src/foreshard/catalog/data"
TABLES = (
    "comm_collectives.csv.gz",
    "comm_vtrain_allreduce_a100.csv.gz",
    "comm_sailor_profiles.csv.gz",
    "kernel_aiconfigurator_gemm.csv.gz",
    "kernel_aiconfigurator_attention.csv.gz",
    "kernel_aiconfigurator_moe.csv.gz",
    "kernel_neusight_gemm.csv.gz",
    "kernel_neusight_elementwise.csv.gz",
)
LAYERS_TEXT = (
    "Convolutions and recurrent layers of DeepBench as the operations of a traced module "
    "(`python scripts/accuracy_kernels.py`): median error and bias of a pass in percent, and passes. What is "
    "fitted to them, and what is not: [traced_modules.md](traced_modules.md#against-published-kernels).",
    "",
)
LAYER_PASSES = ("forward", "inputs", "weights", "inputs + weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelScores:
    """What the goals ask of kernels and collectives, medians as fractions; None where a table lacks."""

    collectives: float | None = None
    collectives_left_out: float | None = None
    gemm: float | None = None
    gemm_left_out: float | None = None
    gemm_rows: float | None = None
    attention: float | None = None


def _no_training(row: TrainingRow) -> Any:
    raise SpecError("no training rows here", value=row.id)


def _of_family(table: MeasuredTable, family: str) -> MeasuredTable:
    keep = [i for i, name in enumerate(table.families) if name == family]
    return replace(
        table,
        rows=tuple(table.rows[i] for i in keep),
        ids=tuple(table.ids[i] for i in keep),
        families=(family,) * len(keep),
    )


def _median(outcomes: Sequence[RowOutcome]) -> float | None:
    return summarise(outcomes)["median_ape"]


def _pooled(parts: Sequence[Sequence[RowOutcome]]) -> float | None:
    rows = [row for part in parts for row in distinct(part) if row.measured_s and row.predicted_s]
    return float(np.median([abs(r.predicted_s / r.measured_s - 1.0) for r in rows])) if rows else None


def kernel_part(folder: Path) -> tuple[list[str], KernelScores]:
    """Return the table of errors, and the figures the goals ask for."""
    lines: list[tuple[Any, ...]] = []
    report = json.loads((DATA / "kernel_constants.json").read_text(encoding="utf-8"))["report"]
    found: dict[str, Any] = {
        "gemm": report["gemm_16bit"]["all aiconfigurator"]["median"],
        "gemm_left_out": report["gemm_16bit_left_out"]["all aiconfigurator"]["median"],
        "attention": report["attention"]["all"]["median"],
    }
    for name in TABLES:
        if not (folder / name).exists():
            continue
        table = read_table(folder / name)
        outcomes = table_outcomes(table, _no_training)
        if name.startswith("comm_collectives"):
            found["collectives"], found["collectives_left_out"] = _collectives(table, outcomes, lines)
            continue
        if name.endswith("aiconfigurator_gemm.csv.gz"):
            chosen = [r["dtype"] == "bfloat16" and not r["flag"] for r in table.rows]
            found["gemm_rows"] = _median([o for o, keep in zip(outcomes, chosen, strict=True) if keep])
        left = _left_out(table)
        for family in sorted(set(table.families)):
            mine = [o for o in outcomes if o.family == family]
            lines.append(_line(name, family, mine, left.get(family)))
        lines.append(_line(name, "all", outcomes, None))
    header = ("table", "system", "rows", "skipped", "in the fit", "system left out", "90 % holds (%)")
    return markdown(header, lines), KernelScores(**found)


def _line(
    name: str, family: str, mine: Sequence[RowOutcome], left: Sequence[RowOutcome] | None
) -> tuple[Any, ...]:
    scores = summarise(mine)
    held = summarise(mine if left is None else left)["coverage"]  # by residuals of other systems
    return (
        name.partition(".")[0],
        family,
        scores["rows"],
        scores["skipped"],
        "-" if scores["median_ape"] is None else pair(scores),
        "-" if left is None else pair(summarise(left)),
        "-" if held is None else f"{100 * held:.0f}",
    )


def _left_out(table: MeasuredTable) -> dict[str, list[RowOutcome]]:
    """Return the outcomes of each system by constants of collectives that never saw it."""
    if table.kind != COLLECTIVE:
        return {}
    known = json.loads((DATA / "comm_constants.json").read_text(encoding="utf-8"))["left_out"]
    families = [family for family in sorted(set(table.families)) if family in known]
    return {
        family: table_outcomes(_of_family(table, family), _no_training, exclude=family) for family in families
    }


def _collectives(
    table: MeasuredTable, outcomes: Sequence[RowOutcome], lines: list[tuple[Any, ...]]
) -> tuple[float | None, float | None]:
    """Add the lines of the table of collectives; return medians of fitted systems, in the fit and left."""
    left = _left_out(table)
    for family in sorted(set(table.families)):
        mine = [o for o in outcomes if o.family == family]
        lines.append(_line("comm_collectives", family, mine, left.get(family)))
    fitted = [[o for o in outcomes if o.family == family] for family in left]
    lines.append(_line("comm_collectives", "all", outcomes, None))
    both = _pooled(fitted), _pooled(list(left.values()))
    lines.append(
        (
            "comm_collectives",
            "systems of the fit",
            "",
            "",
            f"{percent(both[0])} median",
            f"{percent(both[1])} median",
            "",
        )
    )
    return both


def kernel_report() -> list[str]:
    """Return errors of kernel fits as `scripts/fit_kernels.py` left them, device by device."""
    report = json.loads((DATA / "kernel_constants.json").read_text(encoding="utf-8"))["report"]
    lines = []
    for section in ("gemm_16bit", "gemm_16bit_left_out", "attention", "attention_left_out", "moe_balanced"):
        for name, figures in report.get(section, {}).items():
            text = f"{percent(figures['median'])} / {percent(figures['p90'])}"
            lines.append((section, name, figures["rows"], text, percent(figures["bias"])))
    return markdown(("fit", "device", "shapes", "median / p90 (%)", "bias (%)"), lines)


def layer_report(folder: Path) -> list[str]:
    """Return errors of convolutions and recurrent layers by device, precision, kind and pass."""
    path = folder / "kernel_deepbench.csv.gz"
    if not path.exists():
        return []
    groups: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for row in read_table(path).rows:
        groups[row["device"], row["section"], row["sheet_precision"]].append(row)
    errors: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (device, section, sheet), rows in groups.items():
        kind = section.removeprefix(RECURRENT) if section.startswith(RECURRENT) else "convolution"
        if kind == "convolution" and section not in CONVOLUTIONS:
            continue
        try:
            name, precision = device_of(device).name, precision_of(sheet, section)
            found = timed_passes(device, section, sheet, rows)
        except SpecError:
            continue
        for each, predicted_s in (one for row in found for one in row):
            error = predicted_s / each.measured_s - 1.0
            for where in (name, "all"):
                errors[kind, rows[0]["mode"], precision, where][each.name].append(error)
    lines = [
        (*key[:3], key[3], *(_passes_cell(values.get(name)) for name in LAYER_PASSES))
        for key, values in sorted(errors.items())
    ]
    return markdown(("kind", "mode", "precision", "device", *LAYER_PASSES), lines)


def _passes_cell(errors: Sequence[float] | None) -> str:
    """Return median and bias in percent, and how many."""
    if not errors:
        return "-"
    return f"{100 * np.median(np.abs(errors)):.1f} ({100 * np.median(errors):+.1f}), {len(errors)}"


if __name__ == "__main__":
    print("\n".join(layer_report(measured_folder())))
