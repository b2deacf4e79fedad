"""Fit the constants of training steps on the measured runs, on all families and without each.

    python scripts/fit_training.py              write src/foreshard/catalog/data/training_constants.json
    python scripts/fit_training.py --check      refit and fail when a shipped constant differs
                                                by more than a thousandth of its range

Needs the folder of measurements (FORESHARD_MEASURED) and scipy. Deterministic: no random draw, a fixed
start. Each family counts with the square root of its distinct configurations, at most 12; a constant that
no run identifies stays at its start, which comes from kernels, collectives or code, not from these runs.
Rows whose tensor-parallel collectives run over PCIe count nothing: how fast they are is a matter of one
server's bus (docs/derivations/collectives.md), so they do not tell what a collective loses inside a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from foreshard.catalog.training import TrainingConstants, term_metadata
from foreshard.errors import ForeshardError
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import Batch, PlannedRun, build_batch, with_constants
from foreshard.validation.rows import TrainingRow, table_rows
from foreshard.validation.tables import measured_folder, read_table

OUT = Path(__file__).resolve().parents[1] / "src/foreshard/catalog/data/training_constants.json"
SEALED = "llm_torchtitan_2024.csv"
TOGETHER = ("dgxc", "megatronbridge", "nemo_docs")  # one recipe code base: they leave together
NOT_FITTED = (
    "maxtext_tpu",  # no kernel of a TPU is measured
    "stas_h200_b200",  # offloads to the host, whose bandwidth is not in the data
    "megatronbridge_memory",  # measures memory; its times come from a few steps
    "misc_fsdp",  # two rows
)
SPREAD = 0.06  # log error at which a row starts to count less than its square
HOLD = 2.5  # how strongly a constant is held to its start, per range (docs/derivations/training.md)
ROUNDS = 25
TOLERANCE = 1e-3  # of a constant's range: what `--check` lets pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Distinct configurations with their median measured step."""

    rows: tuple[TrainingRow, ...]
    measured_s: np.ndarray
    batch: Batch

    @property
    def families(self) -> np.ndarray:
        """Family of each row."""
        return np.array([row.family for row in self.rows])

    @property
    def experts(self) -> np.ndarray:
        """Whether each row has experts."""
        return np.array([any(b.num_experts for b, _ in row.model.block_kinds()) for row in self.rows])

    @property
    def over_pcie(self) -> np.ndarray:
        """Whether tensor-parallel collectives of each row run over PCIe."""
        return np.array([_shares_a_bus(row) for row in self.rows])

    def take(self, keep: np.ndarray) -> Runs:
        """Return the rows where `keep` is true."""
        rows = tuple(row for row, wanted in zip(self.rows, keep, strict=True) if wanted)
        return Runs(rows=rows, measured_s=self.measured_s[keep], batch=batch_of(rows))

    def log_error(self, constants: TrainingConstants) -> np.ndarray:
        """Return log(predicted / measured) of each row."""
        return np.log(step_times(with_constants(self.batch, constants)).total / self.measured_s)


def _shares_a_bus(row: TrainingRow) -> bool:
    wide = any(stage.tp > 1 for group in row.plan.groups for stage in group.stages)
    return wide and any(nodes.nvlink_domain <= 1 for nodes in row.cluster.nodes)


def batch_of(rows: Iterable[TrainingRow]) -> Batch:
    """Return the rows as one batch."""
    cases = [formula_run(row) for row in rows]
    return build_batch(cases, TrainingConstants())


def formula_run(row: TrainingRow) -> PlannedRun:
    """Return a row as a run that formulas price, also on devices that learned costs are for."""
    return PlannedRun(
        model=row.model, cluster=row.cluster, plan=row.plan, framework=row.framework, costs="formula"
    )


def takes_part(row: TrainingRow) -> bool:
    """Whether a row takes part: it is timed, and neither its degrees nor its cost are an estimate of ours."""
    guessed = not (row.raw.get("tp") and row.raw.get("pp")) or "int8" in row.raw.get("dtype", "").lower()
    guessed = guessed or any(block.scan_state for block, _ in row.model.block_kinds())
    return bool(row.measured_s) and not row.oom and not guessed and row.family not in NOT_FITTED


def load_runs(paths: Sequence[Path]) -> Runs:
    """Return every timed run once; equal inputs are one row with the median time."""
    groups: dict[tuple, list[TrainingRow]] = {}
    for row in (row for path in paths for row in table_rows(read_table(path))[0]):
        if takes_part(row):
            groups.setdefault((row.family, *row.config_key), []).append(row)
    firsts = tuple(rows[0] for rows in groups.values())
    measured = np.array([np.median([row.measured_s for row in rows]) for rows in groups.values()])
    return Runs(rows=firsts, measured_s=measured, batch=batch_of(firsts))


def training_tables(folder: Path) -> list[Path]:
    """Return the training tables but the sealed one."""
    return [path for path in sorted(folder.glob("llm_*.csv")) if path.name != SEALED]


def weights(runs: Runs) -> np.ndarray:
    """Return the weight of each row: a family counts as the root of its size, experts half."""
    out = np.zeros(len(runs.rows))
    families, experts, counted = runs.families, runs.experts, ~runs.over_pcie
    for family in sorted(set(families)):
        for moe in (False, True):
            rows = (families == family) & (experts == moe) & counted
            if rows.any():
                out[rows] = min(np.sqrt(rows.sum()), 12.0) / rows.sum() * (0.5 if moe else 1.0)
    return out


def robust_residuals(log_error: np.ndarray, row_weights: np.ndarray) -> np.ndarray:
    """Return what a least-squares solver has to square: half the squares sum to the weighted soft-L1 loss.

    The loss of a row, ``weight * (sqrt(1 + (error / SPREAD)^2) - 1)``, is bent where its error passes
    `SPREAD`, whatever its weight. Bending the weighted residual instead, as the solver's own `loss` does,
    leaves a row of a large family square up to several times `SPREAD`.
    """
    far = log_error / SPREAD
    return np.sqrt(row_weights) * far / np.sqrt(0.5 + 0.5 * np.sqrt(1.0 + far**2))


def fit(runs: Runs, *, start: TrainingConstants | None = None, rounds: int = ROUNDS) -> TrainingConstants:
    """Return the constants with the least robust log error, inside their ranges."""
    terms = term_metadata()
    names = list(terms)
    low = np.array([terms[name]["low"] for name in names])
    span = np.array([terms[name]["high"] for name in names]) - low
    held = (np.array([getattr(TrainingConstants(), name) for name in names]) - low) / span
    first = TrainingConstants() if start is None else start
    begin = np.clip((np.array([getattr(first, name) for name in names]) - low) / span, 1e-3, 1 - 1e-3)
    row_weights = weights(runs)

    def constants(point: np.ndarray) -> TrainingConstants:
        return TrainingConstants(**dict(zip(names, (low + point * span).tolist(), strict=True)))

    def residuals(point: np.ndarray) -> np.ndarray:
        data = robust_residuals(runs.log_error(constants(point)), row_weights)
        return np.concatenate([data, HOLD * (point - held)])

    found = least_squares(residuals, begin, bounds=(0.0, 1.0), max_nfev=rounds, diff_step=1e-3)
    return constants(found.x)


def left_out(families: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each family, the families that leave with it."""
    return {name: TOGETHER if name in TOGETHER else (name,) for name in sorted(set(families))}


def rounded(constants: TrainingConstants) -> dict[str, float]:
    """Return the constants with five significant digits."""
    return {name: float(f"{value:.5g}") for name, value in asdict(constants).items()}


def _fit_without(runs: Runs, leaving: tuple[str, ...]) -> TrainingConstants:
    """Return the constants fitted on all families but some; what one worker does."""
    return fit(runs.take(~np.isin(runs.families, leaving)) if leaving else runs)


def fit_all(runs: Runs, say: bool = True) -> dict[str, object]:
    """Return the document that is shipped."""
    leavings = dict.fromkeys(left_out(runs.families).values())
    with ProcessPoolExecutor() as pool:
        fits = {leaving: pool.submit(_fit_without, runs, leaving) for leaving in [(), *leavings]}
        found = {leaving: made.result() for leaving, made in fits.items()}
    whole = found[()]
    without: dict[str, dict[str, float]] = {}
    done: dict[tuple[str, ...], dict[str, float]] = {}
    for family, leaving in left_out(runs.families).items():
        if leaving not in done:
            keep = ~np.isin(runs.families, leaving)
            done[leaving] = rounded(found[leaving])
            if say:
                error = runs.log_error(TrainingConstants(**done[leaving]))[~keep]
                print(f"without {'+'.join(leaving)}: {_figures(error)}", file=sys.stderr)
        without[family] = done[leaving]
    counted = runs.families[weights(runs) > 0]
    counts = {name: int((counted == name).sum()) for name in sorted(set(runs.families))}
    if say:
        print(f"all: {_figures(runs.log_error(whole))}", file=sys.stderr)
    return {
        "fitted_by": "scripts/fit_training.py",
        "configurations": counts,
        "sealed": "torchtitan",
        "all": rounded(whole),
        "without": without,
    }


def _figures(log_error: np.ndarray) -> str:
    off = np.abs(np.expm1(log_error))
    return f"median {np.median(off):.3f}, p90 {np.quantile(off, 0.9):.3f}, rows {len(off)}"


def differences(shipped: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return constants that differ by more than `TOLERANCE` of their range, and what only one side has."""
    terms = term_metadata()
    old_fits, new_fits = ({"all": made["all"], **made["without"]} for made in (shipped, found))
    out = [f"{where}: only in one of both" for where in sorted(old_fits.keys() ^ new_fits.keys())]
    for where in sorted(old_fits.keys() & new_fits.keys()):
        old, new = old_fits[where], new_fits[where]
        out += [f"{where}: {name} only in one of both" for name in sorted(old.keys() ^ new.keys())]
        for name in sorted(old.keys() & new.keys()):
            span = terms[name]["high"] - terms[name]["low"]
            if abs(old[name] - new[name]) > TOLERANCE * span:
                out.append(f"{where}: {name} shipped {old[name]}, refitted {new[name]}")
    rest = (shipped.keys() | found.keys()) - {"all", "without"}
    return out + [f"{name} differs" for name in sorted(rest) if shipped.get(name) != found.get(name)]


def main() -> int:
    """Fit and write, or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        runs = load_runs(training_tables(measured_folder()))
    except ForeshardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    document = fit_all(runs)
    if not arguments.check:
        OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0
    found = differences(json.loads(OUT.read_text(encoding="utf-8")), document)
    print("\n".join(found) or f"training constants: refitted within {TOLERANCE:g} of their ranges")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
