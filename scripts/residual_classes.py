"""Building the residual classes that intervals rest on, from runs of families left out of the fit.

`predict.interval` reads what is built here; the quantiles and distances themselves live there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshard.predict.interval import (
    LEVEL,
    LEVELS,
    MIN_CLASS,
    absolute_bounds,
    class_intervals,
    neighbour_distance,
    signed_quantiles,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One run predicted with constants that never saw its family.

    classes : from `predict.interval.class_of`, the narrowest first
    features : from `predict.interval.features_of`
    """

    family: str
    measured_s: float
    predicted_s: float
    classes: tuple[str, ...]
    features: tuple[float, ...]

    @property
    def residual(self) -> float:
        """log(measured / predicted)."""
        return float(np.log(self.measured_s / self.predicted_s))


def feature_scale(features: ArrayLike) -> NDArray[np.float64]:
    """Return the spread of each feature (median absolute deviation times 1.4826), 1 where it is constant.

    Parameters
    ----------
    features : array, shape (n, k)
    """
    data = np.atleast_2d(np.asarray(features, float))
    middle = 1.4826 * np.median(np.abs(data - np.median(data, axis=0)), axis=0)
    return np.where(middle > 0, middle, np.where(np.ptp(data, axis=0) > 0, np.std(data, axis=0), 1.0))


def class_entry(rows: Sequence[LeftOut], *, signed: bool = False) -> dict[str, Any]:
    """Return one class: bounds of its log residual, distinct points, their scale and typical distance.

    Parameters
    ----------
    signed : bool
        Each end has its own quantile, as for predictions known to be too fast; the prediction itself always
        lies inside.
    """
    points = np.unique(np.array([row.features for row in rows], float).round(3), axis=0)
    scale = feature_scale(points)
    near = neighbour_distance(points, points, scale, skip_self=True) if len(points) > 1 else np.ones(1)
    residuals = [row.residual for row in rows]
    bounds_of = signed_quantiles if signed else absolute_bounds
    bounds = {str(level): bounds_of(residuals, level) for level in LEVELS}
    return {
        "bounds": {
            level: [round(min(low, 0.0), 4), round(max(high, 0.0), 4)]
            for level, (low, high) in bounds.items()
        },
        "rows": len(rows),
        "points": points.tolist(),
        "scale": [round(float(value), 4) for value in scale],
        "typical": round(float(np.quantile(near, 0.9)), 4),
        "families": sorted({row.family for row in rows}),
    }


def build_classes(rows: Iterable[LeftOut], *, signed: bool = False) -> dict[str, dict[str, Any]]:
    """Return every class with enough rows; a class `all` holds every row."""
    groups: dict[str, list[LeftOut]] = {}
    for row in rows:
        for name in row.classes:
            groups.setdefault(name, []).append(row)
    large = {name: group for name, group in sorted(groups.items()) if len(group) >= MIN_CLASS}
    return {name: class_entry(group, signed=signed) for name, group in large.items()}


def no_surer(entry: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a class with bounds at least as wide as those of others at every level."""
    wide = {
        level: [
            min(e["bounds"][level][0] for e in (entry, *others)),
            max(e["bounds"][level][1] for e in (entry, *others)),
        ]
        for level in entry["bounds"]
    }
    return {**entry, "bounds": wide}


def interval_of(
    row: LeftOut, classes: Mapping[str, Mapping[str, Any]], level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the interval a query gets from some classes, None when it has none of its own."""
    if not any(name in classes for name in row.classes):
        return None
    return class_intervals(row.classes, row.features, row.predicted_s, classes)[level]


def inside(
    rows: Sequence[LeftOut], classes: Mapping[str, Mapping[str, Any]], level: float = LEVEL
) -> list[bool | None]:
    """Return whether each row's measured time is in its interval; None where it gets none."""
    made = [interval_of(row, classes, level) for row in rows]
    return [
        None if ends is None else ends[0] <= row.measured_s <= ends[1]
        for row, ends in zip(rows, made, strict=True)
    ]


def judged_by_others(rows: Sequence[LeftOut], together: Sequence[tuple[str, ...]] = ()) -> list[bool | None]:
    """Return whether each row is inside an interval built from families that share nothing with its own.

    Parameters
    ----------
    together : sequence of tuples of families
        Families that share configurations; none of them serves to judge another.
    """
    out: list[bool | None] = [None] * len(rows)
    leaving = [next((names for names in together if row.family in names), (row.family,)) for row in rows]
    for names in dict.fromkeys(leaving):
        mine = [i for i, own in enumerate(leaving) if own == names]
        classes = build_classes(row for row in rows if row.family not in names)
        for i, good in zip(mine, inside([rows[i] for i in mine], classes), strict=True):
            out[i] = good
    return out


def cross_fitted(
    rows: Sequence[LeftOut], *, folds: int = 10, seed: int = 0, level: float = LEVEL
) -> list[bool | None]:
    """Return whether each row is inside an interval built from the rows of the other folds.

    Folds are drawn at random, so rows of one family judge each other: coverage within classes as they are.
    """
    fold = np.random.default_rng(seed).permutation(len(rows)) % folds
    out: list[bool | None] = [None] * len(rows)
    for number in range(folds):
        mine = np.flatnonzero(fold == number).tolist()
        classes = build_classes(row for row, own in zip(rows, fold, strict=True) if own != number)
        for i, good in zip(mine, inside([rows[i] for i in mine], classes, level), strict=True):
            out[i] = good
    return out


def coverage(hits: Iterable[bool | None]) -> float | None:
    """Return the share of hits, None without a row."""
    known = [hit for hit in hits if hit is not None]
    return float(np.mean(known)) if known else None
