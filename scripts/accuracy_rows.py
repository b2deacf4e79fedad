"""Rows of the published runs under one set of constants, and how tables print them: shared by the
scripts behind docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshard.catalog.kernels import Tables
from foreshard.catalog.training import TrainingConstants, training_constants
from foreshard.spec.prediction import Prediction
from foreshard.validation.mixed_rows import training_rows
from foreshard.validation.predictors import left_out_constants, predict_run
from foreshard.validation.rows import Skipped, TrainingRow
from foreshard.validation.scoring import APART, RowOutcome
from foreshard.validation.tables import read_table
from foreshard.validation.validate import training_outcome

ROOT = Path(__file__).resolve().parents[1]
CONSTANTS = ROOT / "src/foreshard/catalog/data/training_constants.json"
SEALED = "llm_torchtitan_2024.csv"
TRIO = ("dgxc", "megatronbridge", "nemo_docs")  # share code and configurations: they leave together
MIXED = ("hetero_sailor_validation.csv", "hetero_amp_trials.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row under one set of constants."""

    row: TrainingRow
    outcome: RowOutcome
    prediction: Prediction | None


def read_all(folder: Path, open_sealed: bool) -> tuple[list[TrainingRow], list[Skipped]]:
    """Return the training rows and those of mixed clusters, and what is not predicted."""
    paths = sorted(p for p in folder.glob("llm_*.csv*") if open_sealed or p.name != SEALED)
    rows, skipped = [], []
    for path in (*paths, *(folder / name for name in MIXED if (folder / name).exists())):
        table = read_table(path)
        more, less = training_rows(table)
        rows, skipped = rows + more, skipped + less
    return rows, skipped


def run_row(
    row: TrainingRow,
    *,
    engine: str,
    constants: TrainingConstants,
    fidelity: str = "zero-shot",
    costs: str | Tables = "auto",
) -> Run:
    """Predict one row."""
    made: list[Prediction] = []

    def predicted(row: TrainingRow) -> Prediction:
        made.append(predict_run(row, constants=constants, engine=engine, costs=costs, fidelity=fidelity))
        return made[0]

    outcome = training_outcome(row, predicted)
    return Run(row=row, outcome=outcome, prediction=made[0] if made else None)


def run_all(
    rows: Sequence[TrainingRow],
    *,
    engine: str,
    fidelity: str = "zero-shot",
    left_out: bool = False,
    costs: str | Tables = "auto",
) -> list[Run]:
    """Predict every row; with `left_out` by constants that never saw its family."""
    whole = training_constants()
    return [
        run_row(
            row,
            engine=engine,
            fidelity=fidelity,
            costs=costs,
            constants=left_out_constants(row.family) if left_out else whole,
        )
        for row in rows
    ]


def is_moe(row: TrainingRow) -> bool:
    """Whether any layer has experts."""
    return any(block.num_experts for block in row.model.blocks)


def is_lora(row: TrainingRow) -> bool:
    """Whether any layer is adapted."""
    return any(block.lora_targets for block in row.model.blocks)


def counted(row: TrainingRow) -> bool:
    """Quality-A rows and the rows of SC21, on devices other than TPUs."""
    return (row.quality == "A" or row.family == "sc21") and not row.raw["gpu"].startswith("TPU")


def dense(row: TrainingRow) -> bool:
    """Counted rows without experts or adapters."""
    return counted(row) and not is_moe(row) and not is_lora(row)


SUBSETS: dict[str, Callable[[TrainingRow], bool]] = {
    "dense pooled, without vTrain": lambda r: dense(r) and r.family != APART,
    "Korthikanti and SC21": lambda r: r.family in ("korthikanti", "sc21"),
    "llm-foundry A100": lambda r: r.family == "llmfoundry" and counted(r) and "A100" in r.raw["gpu"],
    "InternEvo": lambda r: r.family == "internevo" and dense(r),
    "NVIDIA trio, dense": lambda r: r.family in TRIO and dense(r),
    "NVIDIA trio, experts": lambda r: r.family in TRIO and counted(r) and is_moe(r),
    "MLPerf LoRA": lambda r: r.family == "mlperf" and counted(r) and is_lora(r),
    "vTrain": lambda r: r.family == APART and counted(r),
}


def percent(value: float | None, digits: int = 1) -> str:
    """Return a fraction as percent."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def pair(scores: dict[str, Any] | None) -> str:
    """Return median / 90th percentile of the error in percent."""
    return "-" if scores is None else f"{percent(scores['median_ape'])} / {percent(scores['p90_ape'])}"


def number(value: float | None) -> str:
    """Return a number with two digits."""
    return "-" if value is None else f"{value:.2f}"


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    """Return a table."""
    out = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    out += ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return [*out, ""]
