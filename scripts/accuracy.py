"""Generate docs/accuracy.md from the published measurements, and the residual classes behind intervals.

    python scripts/accuracy.py                       docs/accuracy.md
    python scripts/accuracy.py --residuals           also catalog/data/residuals.json (left-out constants)
    python scripts/accuracy.py --open-sealed         include the family that was sealed before the first fit

Needs the folder of measurements (FORESHARD_MEASURED). Protocol: docs/design.md, section on validation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foreshard.catalog.training import term_metadata, training_constants
from foreshard.errors import InfeasibleError, SpecError
from foreshard.predict import predict
from foreshard.predict.interval import class_of, features_of
from foreshard.profile.conformal import LeftOut, build_classes, family_coverage
from foreshard.profile.families import TRIO
from foreshard.profile.mixed_rows import mixed_rows
from foreshard.profile.rows import Row, Skipped, read_training_rows
from foreshard.profile.scoring import APART, Outcome, summarise
from foreshard.profile.tables import measured_folder, read_table
from foreshard.profile.validation import validate
from foreshard.spec.prediction import Prediction

ROOT = Path(__file__).resolve().parents[1]
SEALED = "llm_torchtitan_2024.csv"
MIXED = ("hetero_sailor_validation.csv", "hetero_amp_trials.csv")
TABLES = (
    "comm_collectives.csv.gz", "comm_vtrain_allreduce_a100.csv.gz", "comm_sailor_profiles.csv.gz",
    "kernel_aiconfigurator_gemm.csv.gz", "kernel_aiconfigurator_attention.csv.gz",
    "kernel_aiconfigurator_moe.csv.gz", "kernel_neusight_gemm.csv.gz", "kernel_neusight_elementwise.csv.gz",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row under one set of constants."""

    row: Row
    outcome: Outcome
    prediction: Prediction | None


def outcome_of(row: Row, made: Prediction | None, reason: str | None) -> Outcome:
    peak = None
    if made is not None:
        peak = made.memory.peak_bytes if row.memory_kind == "reserved" else made.memory.peak_allocated_bytes
    return Outcome(
        id=row.id, family=row.family, status="ok" if made else "skipped", reason=reason,
        measured_s=row.measured_s, predicted_s=made.step_time_s if made else None,
        interval_s=tuple(made.step_time_interval_s) if made else None,
        measured_peak_bytes=row.measured_peak_bytes, predicted_peak_bytes=peak,
        config_key=row.config_key, rank_key=row.rank_key, oom=row.oom,
        fits=made.memory.fits if made else None,
    )  # fmt: skip


def run_all(
    rows: Sequence[Row], *, engine: str, fidelity: str = "zero-shot", left_out: bool = False
) -> list[Run]:
    """Predict every row; with `left_out` by constants that never saw its family."""
    runs = []
    for row in rows:
        made, reason = None, None
        try:
            constants = training_constants(row.family if left_out else None)
            made = predict(
                row.model, row.cluster, row.plan, framework=row.framework, engine=engine, fidelity=fidelity,
                constants=constants, timeline=False, checked=False,
            )  # fmt: skip
        except (SpecError, InfeasibleError) as error:
            reason = str(error)
        runs.append(Run(row=row, outcome=outcome_of(row, made, reason), prediction=made))
    return runs


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def pair(scores: dict[str, Any] | None) -> str:
    return "-" if scores is None else f"{percent(scores['median_ape'])} / {percent(scores['p90_ape'])}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    out = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    out += ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return [*out, ""]


def is_moe(row: Row) -> bool:
    return any(block.num_experts for block in row.model.blocks)


def is_lora(row: Row) -> bool:
    return any(block.lora_targets for block in row.model.blocks)


def counted(row: Row) -> bool:
    """Quality-A rows and the rows of SC21, on devices other than TPUs."""
    return (row.quality == "A" or row.family == "sc21") and not row.raw["gpu"].startswith("TPU")


def dense(row: Row) -> bool:
    return counted(row) and not is_moe(row) and not is_lora(row)


SUBSETS: tuple[tuple[str, Callable[[Row], bool], str], ...] = (
    ("dense pooled, without vTrain", lambda r: dense(r) and r.family != APART, "6 / 18 left out"),
    ("Korthikanti and SC21", lambda r: r.family in ("korthikanti", "sc21"), "5 left out"),
    ("llm-foundry A100", lambda r: r.family == "llmfoundry" and "A100" in r.raw["gpu"], "5 left out"),
    ("InternEvo", lambda r: r.family == "internevo" and dense(r), "5 left out"),
    ("NVIDIA trio, dense", lambda r: r.family in TRIO and dense(r), "8 left out, 5 / 13 cross-validated"),
    (
        "NVIDIA trio, experts",
        lambda r: r.family in TRIO and counted(r) and is_moe(r),
        "12 / 30 cross-validated",
    ),
    ("MLPerf LoRA", lambda r: r.family == "mlperf" and counted(r) and is_lora(r), "9 left out"),
    ("vTrain", lambda r: r.family == APART and counted(r), "6 / 17 cross-validated"),
)


def family_table(sets: dict[str, list[Run]]) -> list[str]:
    """Per family: rows, errors by kind of constants, order, coverage, memory."""
    header = ("family", "rows", "skipped", "datasheet", "left out", "in the fit", "bias", "tau", "regret",
              "coverage", "half width", "memory")  # fmt: skip
    lines = []
    for family in dict.fromkeys(run.row.family for run in sets["fit"]):
        made = {
            name: summarise([run.outcome for run in runs if run.row.family == family])
            for name, runs in sets.items()
        }
        fit, out = made["fit"], made["out"]
        shown = out if out["median_ape"] is not None else fit
        width = shown["relative_width_median"]
        lines.append(
            (family, fit["rows"], fit["skipped"], pair(made["datasheet"]), pair(out), pair(fit),
             percent(fit["bias"]), number(fit["kendall_tau"]), percent(fit["regret_mean"]),
             percent(shown["coverage"], 0), percent(None if width is None else width / 2),
             percent(fit["memory_median_ape"]))
        )  # fmt: skip
    return markdown(header, lines)


def subset_table(sets: dict[str, list[Run]]) -> list[str]:
    lines = []
    for title, chosen, goal in SUBSETS:
        made = {name: summarise([r.outcome for r in runs if chosen(r.row)]) for name, runs in sets.items()}
        lines.append((title, made["fit"]["rows"], pair(made["out"]), pair(made["fit"]), goal))
    return markdown(("rows of quality A and SC21", "rows", "left out", "in the fit", "goal (%)"), lines)


def blank_table(rows: Sequence[Row]) -> list[str]:
    found = Counter((row.family, line) for row in rows for line in row.assumptions)
    return markdown(("family", "assumed", "rows"), [(f, line, n) for (f, line), n in sorted(found.items())])


def skip_table(skipped: Sequence[Skipped], runs: Sequence[Run]) -> list[str]:
    found = Counter((row.family, row.reason) for row in skipped)
    found.update((r.row.family, r.outcome.reason) for r in runs if r.outcome.status != "ok")
    return markdown(("family", "reason", "rows"), [(f, why, n) for (f, why), n in sorted(found.items())])


def constants_table() -> list[str]:
    fitted = training_constants()
    lines = [
        (f"`{name}`", f"{getattr(fitted, name):.4g}", f"{meta['low']:g} to {meta['high']:g}", meta["meaning"])
        for name, meta in term_metadata().items()
    ]
    return markdown(("constant", "value", "range", "meaning"), lines)


def kernel_tables(folder: Path) -> list[str]:
    """Errors of kernels and collectives, per table and system."""
    lines = []

    def none(row: Row) -> Any:
        raise SpecError("no training rows here")

    for name in TABLES:
        if not (folder / name).exists():
            continue
        summary = validate([folder / name], predictor=none)["summary"]
        for family, scores in (*summary["by_family"].items(), ("all", summary["overall"])):
            if scores["median_ape"] is not None:
                lines.append(
                    (name.partition(".")[0], family, scores["rows"], scores["skipped"], pair(scores))
                )
    return markdown(("table", "system", "rows", "skipped", "median / p90 (%)"), lines)


def left_out_rows(runs: Sequence[Run]) -> list[LeftOut]:
    """Rows behind the residual classes: repeats once, no OOM labels, no TPUs."""
    seen: set[Any] = set()
    out = []
    for run in runs:
        made, row = run.prediction, run.row
        if (
            made is None
            or not row.measured_s
            or row.config_key in seen
            or row.raw.get("gpu", "").startswith("TPU")
        ):
            continue
        seen.add(row.config_key)
        names = class_of(row.model, row.plan, made.time_breakdown_s, evidence=made.evidence)
        out.append(
            LeftOut(family=row.family, measured_s=row.measured_s, predicted_s=made.step_time_s,
                    classes=names, features=features_of(row.model, row.plan))
        )  # fmt: skip
    return out


def write_residuals(rows: Sequence[LeftOut], datasheet: Sequence[LeftOut]) -> None:
    """Write the classes; those of other fidelities keep their stated bounds unless they can be built."""
    path = ROOT / "src/foreshard/catalog/data/residuals.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: entry for name, entry in data["classes"].items() if name.startswith("calibrated")}
    plain = [replace(row, classes=("datasheet",)) for row in datasheet]
    data["classes"] = build_classes(rows) | build_classes(plain) | kept
    path.write_text(json.dumps(data, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def coverage_table(rows: Sequence[LeftOut]) -> list[str]:
    covered = family_coverage(rows, together=[TRIO])
    counts = Counter(row.family for row in rows)
    return markdown(
        ("family judged by all others", "runs", "inside 90 % intervals (%)"),
        [(name, counts[name], percent(value, 0)) for name, value in covered.items()],
    )


def read_all(folder: Path, open_sealed: bool) -> tuple[list[Row], list[Skipped]]:
    paths = sorted(p for p in folder.glob("llm_*.csv*") if open_sealed or p.name != SEALED)
    rows, skipped = read_training_rows(paths)
    for name in MIXED:
        if (folder / name).exists():
            more, less = mixed_rows(read_table(folder / name))
            rows, skipped = rows + more, skipped + less
    return rows, skipped


def page(
    rows: list[Row],
    skipped: list[Skipped],
    sets: dict[str, list[Run]],
    folder: Path,
    args: argparse.Namespace,
) -> str:
    residuals = left_out_rows(sets["out"])
    sealed = "opened" if args.open_sealed else "sealed: not read, not fitted"
    text = [
        "# Accuracy", "",
        "Generated by `scripts/accuracy.py`; do not edit. Errors are in percent of the measured step time, "
        "median / 90th percentile; rows with identical inputs count once. *Datasheet*: no fitted constant. "
        f"*Left out*: constants fitted without the family ({', '.join(TRIO)} leave together). "
        "*In the fit*: the shipped "
        f"constants. Engine: {args.engine}. The family `torchtitan` is {sealed}.", "",
        "## Against the goals", "", *subset_table(sets),
        "## By family", "", *family_table(sets),
        "## Intervals", "",
        "Split-conformal on log residuals of left-out families; each family judged by intervals built from "
        "the others.", "", *coverage_table(residuals),
        "## Constants", "", *constants_table(),
    ]  # fmt: skip
    extra = ROOT / "docs/accuracy_terms.md"
    if extra.exists():
        text += ["## Terms as they were added", "", extra.read_text(encoding="utf-8").strip(), ""]
    if not args.skip_kernels:
        text += ["## Kernels and collectives", "", *kernel_tables(folder)]
    text += ["## Rows that are not predicted", "", *skip_table(skipped, sets["fit"])]
    text += ["## Blank cells and what they are read as", "", *blank_table(rows)]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="graph", choices=("graph", "analytical"))
    parser.add_argument("--residuals", action="store_true")
    parser.add_argument("--open-sealed", action="store_true")
    parser.add_argument("--skip-kernels", action="store_true")
    parser.add_argument("-o", "--output", default=str(ROOT / "docs/accuracy.md"))
    args = parser.parse_args()
    folder = measured_folder()
    if not folder.is_dir():
        print(f"no measurements in {folder}; set FORESHARD_MEASURED", file=sys.stderr)
        return 2
    rows, skipped = read_all(folder, args.open_sealed)
    sets = {
        "fit": run_all(rows, engine=args.engine),
        "out": run_all(rows, engine=args.engine, left_out=True),
        "datasheet": run_all(rows, engine=args.engine, fidelity="datasheet"),
    }
    if args.residuals:
        write_residuals(left_out_rows(sets["out"]), left_out_rows(sets["datasheet"]))
    Path(args.output).write_text(page(rows, skipped, sets, folder, args) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
