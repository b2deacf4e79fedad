"""What each term of the step model is worth: added one after the other, and removed one at a time.

    python scripts/ablate_terms.py              write docs/accuracy_terms.md

Every stage refits the constants that are switched on; the others stand at the value that makes their term
vanish. Distinct configurations, analytical engine. Needs FORESHARD_MEASURED and scipy; nothing is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import numpy as np
from accuracy_rows import APART, ROOT, TRIO, dense, markdown
from fit_part import all_names, fit_part
from fit_training import Runs, formula_run, load_runs, training_tables

from foreshard.catalog.training import TrainingConstants
from foreshard.errors import ForeshardError
from foreshard.predict.batch import Batch, build_batch
from foreshard.validation.tables import measured_folder

OUT = ROOT / "docs/accuracy_terms.md"
ROUNDS = 10
THIN = 5  # every fifth vTrain run: its weight does not depend on their number
OVERLAPS = (
    "tp_overlap",
    "grad_overlap",
    "param_gather_overlap",
    "p2p_overlap",
    "expert_overlap",
    "tensor_async",
)
FOLDS = (TRIO, ("llmfoundry",), ("internevo", "bigscience"), ("korthikanti", "sc21", "simumax_b200"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One group of constants.

    patterns : names it owns
    off : value of each pattern at which the term does nothing
    """

    title: str
    patterns: tuple[str, ...] = ()
    off: tuple[float, ...] = ()

    def names(self) -> list[str]:
        """Return the constants of the term."""
        return [name for name in all_names() if owner(name) is self]

    def neutral(self) -> dict[str, float]:
        """Return the constants at which the term does nothing."""
        return {name: self.off[_match(name, self.patterns)] for name in self.names()}


KERNELS = Term(title="kernel curves (instead of datasheet rates)")
OVERLAP = Term(title="overlap of collectives", patterns=("*_hidden", "fsdp_contention"), off=(0.0, 0.0))
TERMS = (
    KERNELS,
    Term(title="matrix-product derates", patterns=("gemm_power", "gemm_*"), off=(0.0, 1.0)),
    Term(title="attention derates", patterns=("flash_*", "unfused"), off=(1.0, 1.0)),
    Term(title="elementwise, cast and loss traffic", patterns=("*_traffic", "cast_blocks"), off=(0.0, 0.0)),
    Term(title="gradient accumulation", patterns=("grad_accumulate", "grad_product"), off=(0.0, 1.0)),
    Term(title="collectives", patterns=("expert_fast", "*_comm"), off=(1.0, 0.0)),
    OVERLAP,
    Term(
        title="experts: imbalance, grouped products, host",
        patterns=("expert_imbalance", "expert_products", "host_expert", "host_moe"),
        off=(1.0, 1.0, 0.0, 0.0),
    ),
    Term(
        title="host floor",
        patterns=("host_arm", "host_backward", "host_sharpness", "graph_share", "host_*"),
        off=(1.0, 1.0, 6.0, 0.0, 0.0),
    ),
    Term(title="fixed time of a step, jitter", patterns=("step_*", "jitter"), off=(0.0, 0.0)),
)


def _match(name: str, patterns: Sequence[str]) -> int:
    return next((i for i, pattern in enumerate(patterns) if fnmatch(name, pattern)), -1)


def owner(name: str) -> Term:
    """Return the term a constant belongs to: the first in the list whose patterns name it."""
    for term in TERMS:
        if _match(name, term.patterns) >= 0:
            return term
    raise KeyError(f"no term owns the constant {name}: name it in TERMS")


def order_of_addition() -> tuple[Term, ...]:
    """Return the terms in the order they are added: hosts before experts, as experts need both."""
    experts, host = TERMS[7], TERMS[8]
    return (*TERMS[:7], host, experts, TERMS[9])


def switched(runs: Runs, on: Sequence[Term]) -> Runs:
    """Return the runs with kernels and overlap as the terms that are on say."""
    batch = runs.batch if KERNELS in on else _datasheet(runs)
    return replace(runs, batch=batch if OVERLAP in on else _serial(batch))


def _datasheet(runs: Runs) -> Batch:
    """Return the batch at datasheet rates of kernels; links stay as fitted."""
    cases = [formula_run(row) for row in runs.rows]
    kernels = build_batch(cases, TrainingConstants(), fidelity="datasheet").machine.kernels
    return replace(runs.batch, machine=replace(runs.batch.machine, kernels=kernels))


def _serial(batch: Batch) -> Batch:
    """Return the batch with every overlap of its frameworks off."""
    traits = batch.machine.traits
    never = {name: np.zeros_like(np.asarray(getattr(traits, name), dtype=float)) for name in OVERLAPS}
    return replace(batch, machine=replace(batch.machine, traits=replace(traits, **never)))


def constants_off(on: Sequence[Term]) -> TrainingConstants:
    """Return constants whose terms that are not on do nothing."""
    off = {name: value for term in TERMS if term not in on for name, value in term.neutral().items()}
    return replace(TrainingConstants(), **off)


def fitted(runs: Runs, on: Sequence[Term], start: TrainingConstants, rounds: int) -> TrainingConstants:
    """Return the constants of the terms that are on, fitted; the others off."""
    names = [name for term in on for name in term.names()]
    others = constants_off(on)
    if not names:
        return others
    return fit_part(runs, names, others=others, start=start, rounds=rounds)


def columns_of(runs: Runs) -> dict[str, np.ndarray]:
    """Return which runs each column of the table is over: a family's dense or its expert runs."""
    out = {}
    for family in sorted(set(runs.families)):
        for suffix, kind in (("", ~runs.experts), (", experts", runs.experts)):
            mine = (runs.families == family) & kind
            if mine.any():
                out[family + suffix] = mine
    return out


def ladder(runs: Runs) -> list[str]:
    """Return the table of terms added one after the other."""
    columns = columns_of(runs)
    on: list[Term] = []
    start, lines = TrainingConstants(), []
    for title, term in (
        ("datasheet roofline, bubble, uneven stages", None),
        *((t.title, t) for t in order_of_addition()),
    ):
        on += [term] if term else []
        here = switched(runs, on)
        start = fitted(here, on, _joined(start, on), ROUNDS)
        error = np.abs(np.expm1(here.log_error(start)))
        medians = [100 * np.median(error[mine]) for mine in columns.values()]
        tails = [100 * np.quantile(error[mine], 0.9) for mine in columns.values()]
        name = f"T{len(on)} {'+ ' if term else ''}{title}"
        lines.append((name, *(f"{m:.1f}" for m in medians), f"{np.mean(medians):.1f} / {np.mean(tails):.1f}"))
        print(lines[-1][0], lines[-1][-1], file=sys.stderr)
    return markdown(("stage", *columns, "mean of medians / p90"), lines)


def _joined(fit_before: TrainingConstants, on: Sequence[Term]) -> TrainingConstants:
    """Return where a stage starts: the stage before, and the new term at its own start."""
    if not on:
        return fit_before
    first = TrainingConstants()
    return replace(fit_before, **{name: getattr(first, name) for name in on[-1].names()})


def thinned(runs: Runs) -> Runs:
    """Return the runs with every fifth of vTrain."""
    keep = runs.families != APART
    keep[np.flatnonzero(~keep)[::THIN]] = True
    return runs.take(keep)


def left_out_errors(
    runs: Runs, on: Sequence[Term], starts: Sequence[TrainingConstants], rounds: int
) -> tuple[np.ndarray, list[TrainingConstants]]:
    """Return the errors of pooled dense rows, each family left out, and the constants of each fold."""
    errors, found = [], []
    for families, start in zip(FOLDS, starts, strict=True):
        away = np.isin(runs.families, families)
        constants = fitted(switched(runs.take(~away), on), on, start, rounds)
        scored = away & np.array([dense(row) for row in runs.rows])
        errors.append(np.abs(np.expm1(switched(runs.take(scored), on).log_error(constants))))
        found.append(constants)
    return np.concatenate(errors), found


def removals(runs: Runs) -> list[str]:
    """Return the table of one term removed and the rest refitted."""
    runs = thinned(runs)
    whole, starts = left_out_errors(runs, TERMS, [TrainingConstants()] * len(FOLDS), 2 * ROUNDS)
    lines = [_removal("nothing", whole)]
    for term in TERMS:
        on = [other for other in TERMS if other is not term]
        errors, _ = left_out_errors(runs, on, starts, ROUNDS // 2)
        lines.append(_removal(term.title, errors))
    return markdown(("removed", "dense left out, median / p90 (%)"), lines)


def _removal(title: str, errors: np.ndarray) -> tuple[str, str]:
    line = (title, f"{100 * np.median(errors):.1f} / {100 * np.quantile(errors, 0.9):.1f}")
    print("removed", *line, file=sys.stderr)
    return line


def page(runs: Runs) -> str:
    """Return the whole text."""
    folds = "; ".join(" + ".join(names) for names in FOLDS)
    text = [
        "Written by `scripts/ablate_terms.py`. Every stage refits the constants switched on so far "
        f"({ROUNDS} rounds, so a stage may stop short of its best); terms not yet on do nothing. Median "
        "error in percent over distinct configurations, analytical engine, all runs in the fit.",
        "",
        *ladder(runs),
        "One term removed, the others refitted, families left out of the fit: dense rows of quality A and "
        f"SC21 without vTrain, pooled (left out together: {folds}; every fifth vTrain run in the fits). "
        "Differences below 0.5 are noise.",
        "",
        *removals(runs),
    ]
    return "\n".join(text)


def main(write: Callable[[str], object] = lambda text: OUT.write_text(text, encoding="utf-8")) -> int:
    """Compute and write."""
    try:
        runs = load_runs(training_tables(measured_folder()))
    except ForeshardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    write(page(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
