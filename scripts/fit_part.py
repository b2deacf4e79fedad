"""Fits of some constants of training steps beside the shipped fit: cross-validation, few rows, ablation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from fit_training import HOLD, SPREAD, Runs, batch_of, robust_residuals, weights
from scipy.optimize import least_squares

from foreshard.catalog.training import TrainingConstants, term_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is known of the constants before a fit: a mean and a precision matrix, in units of the ranges."""

    mean: np.ndarray
    root: np.ndarray  # shape (k, k), root.T @ root is the precision

    @classmethod
    def held_at_start(cls, names: Sequence[str]) -> Prior:
        """Return the hold of the shipped fit: each constant at its start, independently."""
        return cls(mean=to_unit(TrainingConstants(), names), root=HOLD * np.eye(len(names)))


def to_unit(constants: TrainingConstants, names: Sequence[str]) -> np.ndarray:
    """Return some constants as places in their ranges, 0 at the low and 1 at the high end."""
    terms = term_metadata()
    return np.array(
        [(getattr(constants, n) - terms[n]["low"]) / (terms[n]["high"] - terms[n]["low"]) for n in names]
    )


def from_unit(point: np.ndarray, names: Sequence[str], others: TrainingConstants) -> TrainingConstants:
    """Return `others` with the named constants at these places of their ranges."""
    terms = term_metadata()
    found: dict[str, Any] = {
        name: float(terms[name]["low"] + place * (terms[name]["high"] - terms[name]["low"]))
        for name, place in zip(names, point, strict=True)
    }
    return replace(others, **found)


def all_names() -> list[str]:
    """Return the names of every constant."""
    return list(asdict(TrainingConstants()))


def fit_part(
    runs: Runs,
    names: Sequence[str],
    *,
    others: TrainingConstants,
    start: TrainingConstants,
    prior: Prior | None = None,
    row_weights: np.ndarray | None = None,
    rounds: int = 10,
) -> TrainingConstants:
    """Return `others` with the named constants fitted as `fit_training.fit` fits all of them.

    Parameters
    ----------
    others : TrainingConstants
        Values of the constants that stay; they may lie outside their ranges (a term switched off).
    start : TrainingConstants
        Where the named ones begin.
    prior : Prior, optional
        Default: held at their starts.
    row_weights : ndarray, optional
        Default: the weights of the shipped fit.
    """
    prior = prior or Prior.held_at_start(names)
    counts = weights(runs) if row_weights is None else row_weights

    def residuals(point: np.ndarray) -> np.ndarray:
        data = robust_residuals(runs.log_error(from_unit(point, names, others)), counts)
        return np.concatenate([data, prior.root @ (point - prior.mean)])

    begin = np.clip(to_unit(start, names), 1e-3, 1.0 - 1e-3)
    found = least_squares(residuals, begin, bounds=(0.0, 1.0), max_nfev=rounds, diff_step=1e-3)
    return from_unit(found.x, names, others)


def posterior(runs: Runs, constants: TrainingConstants) -> Prior:
    """Return what the runs tell of all constants at their fit: Gauss-Newton curvature plus the hold."""
    names = all_names()
    point = to_unit(constants, names)
    base = runs.log_error(constants)
    # Soft-L1 counts an error e with slope 1 / sqrt(1 + (e / SPREAD)^2): far rows pull less.
    slack = np.sqrt(weights(runs)) / SPREAD / (1.0 + (base / SPREAD) ** 2) ** 0.25
    columns = []
    for i in range(len(names)):
        step = 1e-3 if point[i] < 0.5 else -1e-3
        moved = point.copy()
        moved[i] += step
        columns.append((runs.log_error(from_unit(moved, names, constants)) - base) / step * slack)
    curvature = np.array(columns) @ np.array(columns).T + HOLD**2 * np.eye(len(names))
    return Prior(mean=point, root=np.linalg.cholesky(curvature).T)


def subset(runs: Runs, keep: np.ndarray) -> Runs:
    """Return the rows at some places, in that order."""
    rows = tuple(runs.rows[int(i)] for i in keep)
    return Runs(rows=rows, measured_s=runs.measured_s[keep], batch=batch_of(rows))
