"""Refit the constants of training steps without parts of the runs and predict those parts.

    python scripts/cross_validate.py            write docs/data/cross_validation.json

Three questions. The NVIDIA trio and vTrain share their configurations with no other family, so besides
leaving them out whole they are cut into 5 folds: by configuration, whatever the release, and by cell of
(hidden, tp, pp, micro-batch). And how much do 10 runs of a cluster teach, when the cluster was never seen?
Predictions are those of the graph engine. Needs FORESHARD_MEASURED and scipy; draws are seeded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from accuracy_rows import APART, CONSTANTS, ROOT, TRIO, counted, dense, is_moe, run_row
from fit_part import all_names, fit_part, posterior, subset
from fit_training import Runs, fit, load_runs, training_tables

from foreshard.catalog.training import TrainingConstants, training_constants
from foreshard.errors import ForeshardError
from foreshard.validation.rows import TrainingRow
from foreshard.validation.scoring import RowOutcome, distinct, rank_regrets, rank_tau, summarise
from foreshard.validation.tables import measured_folder

OUT = ROOT / "docs/data/cross_validation.json"
FOLDS = 5
SEEDS = 20
DRAWN = 10
ROUNDS = 15
ENGINE = "graph"


def configuration(row: TrainingRow) -> Hashable:
    """Return what rows of the trio share when they are one configuration in several releases."""
    stage = row.plan.groups[0].stages[0]
    return (
        row.model.num_layers,
        row.model.hidden,
        row.model.vocab,
        row.cluster.nodes[0].device.name,
        row.plan.precision,
        row.plan.seq_len,
        row.plan.global_batch,
        row.plan.groups[0].micro_batch,
        len(row.plan.ranks),
        stage.tp,
        stage.cp,
        stage.ep,
        len(row.plan.groups[0].stages),
        len(stage.layers),
    )


def cell(row: TrainingRow) -> Hashable:
    """Return the cell of a vTrain row."""
    return tuple(row.raw[name] for name in ("hidden", "tp", "pp", "micro_batch"))


def folds_of(
    rows: Sequence[TrainingRow], key: Callable[[TrainingRow], Hashable], seed: int = 0
) -> np.ndarray:
    """Return the fold of each row; rows with equal keys share one."""
    keys = sorted({key(row) for row in rows}, key=str)
    order = np.random.default_rng(seed).permutation(len(keys)) % FOLDS
    fold = dict(zip(keys, order.tolist(), strict=True))
    return np.array([fold[key(row)] for row in rows])


def cross_validated(
    runs: Runs, families: Sequence[str], key: Callable[[TrainingRow], Hashable], start: TrainingConstants
) -> list[RowOutcome]:
    """Return every run of some families predicted by constants that saw neither it nor rows with its key."""
    places = np.flatnonzero(np.isin(runs.families, families))
    fold = folds_of([runs.rows[i] for i in places], key)
    out = []
    for number in range(FOLDS):
        away = places[fold == number]
        keep = np.ones(len(runs.rows), dtype=bool)
        keep[away] = False
        constants = fit(runs.take(keep), start=start, rounds=ROUNDS)
        made = predicted(runs, away, constants)
        print(f"{'+'.join(families)} fold {number}: {figures(made)}", file=sys.stderr)
        out += made
    return out


def predicted(runs: Runs, places: np.ndarray, constants: TrainingConstants) -> list[RowOutcome]:
    """Return the outcomes of some runs, with the median of their repeats as measured."""
    made = [run_row(runs.rows[int(i)], engine=ENGINE, constants=constants).outcome for i in places]
    measured = runs.measured_s[places].tolist()
    return [replace(row, measured_s=seconds) for row, seconds in zip(made, measured, strict=True)]


def figures(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Return rows, median and 90th percentile of the error, and bias."""
    scores = summarise(outcomes)
    return {
        "rows": len(outcomes),
        **{name: round(scores[name], 4) for name in ("median_ape", "p90_ape", "bias")},
    }


def order_figures(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Return tau, and mean and largest regret over groups of at least 2 and of at least 3 inputs."""
    rows = distinct(outcomes)
    out: dict[str, Any] = {"kendall_tau": round(rank_tau(rows), 4)}
    for least in (2, 3):
        regrets = rank_regrets(rows, least)
        out[f"groups_of_{least}"] = {
            "groups": len(regrets),
            "regret_mean": round(float(np.mean(regrets)), 4),
            "regret_max": round(float(np.max(regrets)), 4),
            "best_found": int(np.sum(np.array(regrets) <= 1e-9)),
        }
    return out


def trio_part(runs: Runs) -> dict[str, Any]:
    """Return the cross-validation of the trio by configuration, dense rows and experts."""
    made = cross_validated(runs, TRIO, configuration, training_constants(TRIO[0]))
    rows = {row.id: row for row in runs.rows}
    dense_rows = [o for o in made if dense(rows[o.id])]
    experts = [o for o in made if is_moe(rows[o.id]) and counted(rows[o.id])]
    keys = {configuration(row) for row in runs.rows if row.family in TRIO}
    return {"configurations": len(keys), "dense": figures(dense_rows), "experts": figures(experts)}


def vtrain_part(runs: Runs) -> dict[str, Any]:
    """Return the cross-validation of vTrain by cell, and it left out and in the fit beside."""
    places = np.flatnonzero(runs.families == APART)
    made = {
        "cross_validated": cross_validated(runs, [APART], cell, training_constants(APART)),
        "left_out": predicted(runs, places, training_constants(APART)),
        "in_fit": predicted(runs, places, training_constants()),
    }
    return {
        "cells": len({cell(runs.rows[int(i)]) for i in places}),
        **{name: figures(_counted(runs, rows)) | order_figures(rows) for name, rows in made.items()},
    }


def _counted(runs: Runs, outcomes: Sequence[RowOutcome]) -> list[RowOutcome]:
    """Return the outcomes of rows of quality A; order is over all of them, as its groups are."""
    known = {row.id for row in runs.rows if counted(row)}
    return [row for row in outcomes if row.id in known]


def few_rows(runs: Runs) -> dict[str, Any]:
    """Return the error on the other vTrain rows after 10 of them, drawn at random, adjust the constants.

    The constants fitted without vTrain and their curvature there are the prior (Laplace's approximation of
    what the other runs know), so a draw moves what they leave open and little else; each drawn row counts 1.
    """
    is_vtrain = runs.families == APART
    start = training_constants(APART)
    prior, names = posterior(runs.take(~is_vtrain), start), all_names()
    places = np.flatnonzero(is_vtrain)
    found = []
    for seed in range(SEEDS):
        drawn = np.random.default_rng(seed).choice(places, DRAWN, replace=False)
        constants = fit_part(
            subset(runs, drawn), names, others=start, start=start, prior=prior, row_weights=np.ones(DRAWN)
        )
        found.append(figures(predicted(runs, np.setdiff1d(places, drawn), constants)))
        print(f"10 rows, seed {seed}: {found[-1]}", file=sys.stderr)
    medians, tails = ([f[name] for f in found] for name in ("median_ape", "p90_ape"))
    return {
        "seeds": SEEDS,
        "rows_drawn": DRAWN,
        "median_ape": round(float(np.median(medians)), 4),
        "p90_ape": round(float(np.median(tails)), 4),
        "median_ape_range": [min(medians), max(medians)],
    }


def constants_digest() -> str:
    """Return what tells which shipped constants a figure was computed with."""
    return hashlib.sha256(CONSTANTS.read_bytes()).hexdigest()[:16]


def main() -> int:
    """Compute and write."""
    try:
        runs = load_runs(training_tables(measured_folder()))
    except ForeshardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    document = {
        "written_by": "scripts/cross_validate.py",
        "constants": constants_digest(),
        "engine": ENGINE,
        "folds": FOLDS,
        "trio": trio_part(runs),
        "vtrain": vtrain_part(runs),
        "vtrain_after_10_rows": few_rows(runs),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
