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
    MIN_CLASS,
    conformal_quantile,
    neighbour_distance,
    signed_quantiles,
    spread,
    widening,
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


def class_entry(rows: Sequence[LeftOut]) -> dict[str, Any]:
    """Return one class of `residuals.json`: residuals, points, their scale and typical distance."""
    points = np.array([row.features for row in rows], float)
    scale = feature_scale(points)
    near = neighbour_distance(points, points, scale, skip_self=True)
    distinct = near[near > 0]
    return {
        "residuals": [round(row.residual, 4) for row in rows],
        "points": [[round(value, 3) for value in row.features] for row in rows],
        "scale": [round(float(value), 4) for value in scale],
        "typical": round(float(np.quantile(distinct, 0.9)) if len(distinct) else 1.0, 4),
        "families": sorted({row.family for row in rows}),
    }


def build_classes(rows: Iterable[LeftOut]) -> dict[str, dict[str, Any]]:
    """Return every class with enough rows for two finite ends; `all` holds every row."""
    groups: dict[str, list[LeftOut]] = {}
    for row in rows:
        for name in row.classes:
            groups.setdefault(name, []).append(row)
    return {name: class_entry(group) for name, group in sorted(groups.items()) if len(group) >= MIN_CLASS}


def interval_of(
    row: LeftOut, classes: Mapping[str, Mapping[str, Any]], level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the interval a query gets from some classes, None when none of them is finite."""
    for name in row.classes:
        entry = classes.get(name)
        if entry is None:
            continue
        bounds = signed_quantiles(entry["residuals"], level)
        if np.all(np.isfinite(bounds)):
            distance = neighbour_distance([row.features], entry["points"], entry["scale"])
            low, high = spread(row.predicted_s, bounds, widening(distance, entry["typical"])[0])
            return float(low), float(high)
    return None


def family_coverage(
    rows: Sequence[LeftOut], level: float = LEVEL, together: Sequence[tuple[str, ...]] = ()
) -> dict[str, float]:
    """Return for each family the share of its runs inside intervals built from the other families.

    Parameters
    ----------
    together : sequence of tuples of families
        Families that share configurations; none of them serves to judge another.
    """
    out = {}
    for family in dict.fromkeys(row.family for row in rows):
        leaving = next((set(names) for names in together if family in names), {family})
        classes = build_classes(row for row in rows if row.family not in leaving)
        mine = [row for row in rows if row.family == family]
        made = [(row, interval_of(row, classes, level)) for row in mine]
        known = [low_high[0] <= row.measured_s <= low_high[1] for row, low_high in made if low_high]
        if known:
            out[family] = float(np.mean(known))
    return out


__all__ = [
    "LeftOut",
    "build_classes",
    "class_entry",
    "conformal_quantile",
    "family_coverage",
    "feature_scale",
    "interval_of",
]
