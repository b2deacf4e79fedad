"""How well predictions meet measurements: errors, order, coverage, memory and feasibility.

Errors are fractions. Rows of a family with identical inputs count once, with the median of what was
measured and predicted. Definitions bind: docs/design.md, section on validation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

APART = "vtrain_single"  # its pairs would swamp the order of all other families together

LEAST_IN_GROUP = 3  # distinct inputs below which a group has no order to speak of


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """One row of a table: what was measured and what was predicted.

    intervals_s : (low, high) by level; `interval_s` is that of 90 %
    evidence : what the prediction rests on
    oom : the run did not fit; with the runs that state their memory, the labels of feasibility
    fits : the prediction says that it fits; None when memory was not predicted
    """

    id: str
    family: str
    status: str = "ok"
    reason: str | None = None
    measured_s: float | None = None
    predicted_s: float | None = None
    interval_s: tuple[float, float] | None = None
    intervals_s: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    evidence: str | None = None
    measured_peak_bytes: float | None = None
    predicted_peak_bytes: float | None = None
    predict_s: float | None = None
    config_key: Hashable = None
    rank_key: Hashable = None
    oom: bool = False
    fits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `validate --json` prints it."""
        shown = {name: getattr(self, name) for name in self.__slots__ if name not in _NOT_SHOWN}
        return shown | {"interval_s": None if self.interval_s is None else list(self.interval_s)}


_NOT_SHOWN = ("intervals_s", "evidence", "config_key", "rank_key", "oom", "fits")


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _median_ends(intervals: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return None
    low, high = (float(np.median(side)) for side in zip(*known, strict=True))
    return low, high


def _merged(repeats: Sequence[RowOutcome]) -> RowOutcome:
    """Return one outcome for rows with identical inputs: medians, and the labels of the first."""
    first = repeats[0]
    if len(repeats) == 1:
        return first
    levels = set.intersection(*(set(row.intervals_s) for row in repeats))
    return replace(
        first,
        reason=None,
        predict_s=None,
        measured_s=_median(row.measured_s for row in repeats),
        predicted_s=_median(row.predicted_s for row in repeats),
        interval_s=_median_ends(row.interval_s for row in repeats),
        intervals_s={
            level: ends
            for level in sorted(levels)
            if (ends := _median_ends(row.intervals_s[level] for row in repeats))
        },
        measured_peak_bytes=_median(row.measured_peak_bytes for row in repeats),
        predicted_peak_bytes=_median(row.predicted_peak_bytes for row in repeats),
    )


def distinct(outcomes: Iterable[RowOutcome]) -> list[RowOutcome]:
    """Return the outcomes with status ok, rows with identical inputs merged; a None key never merges."""
    groups: dict[Hashable, list[RowOutcome]] = {}
    for index, row in enumerate(outcomes):
        if row.status == "ok":
            key = ("row", index) if row.config_key is None else (row.family, row.oom, row.config_key)
            groups.setdefault(key, []).append(row)
    return [_merged(rows) for rows in groups.values()]


def kendall_tau_b(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return Kendall's tau-b of two sequences, None when either is constant.

    Source
    ------
    Kendall 1945, "The treatment of ties in ranking problems"; tested against scipy.stats.kendalltau.
    """
    x, y = np.asarray(first, float), np.asarray(second, float)
    upper = np.triu_indices(len(x), 1)
    dx = np.sign(x[:, None] - x[None, :])[upper]
    dy = np.sign(y[:, None] - y[None, :])[upper]
    norm = np.sqrt(np.count_nonzero(dx) * float(np.count_nonzero(dy)))
    return float(np.sum(dx * dy) / norm) if norm else None


def _rank_groups(
    rows: Iterable[RowOutcome], least: int = LEAST_IN_GROUP
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return (measured, predicted) step times of each group of at least `least` distinct inputs."""
    groups: dict[Hashable, list[RowOutcome]] = {}
    for row in rows:
        if row.rank_key is not None and row.measured_s and row.predicted_s:
            groups.setdefault(row.rank_key, []).append(row)
    return [
        (
            np.array([row.measured_s for row in group], float),
            np.array([row.predicted_s for row in group], float),
        )
        for group in groups.values()
        if len(group) >= least
    ]


def rank_tau(rows: Iterable[RowOutcome]) -> float | None:
    """Return Kendall's tau-b on throughput inside groups, weighted by pairs; None without a group.

    Inside a group devices, sequence and global batch are equal, so throughput per device is one over time.
    """
    total, pairs = 0.0, 0.0
    for measured, predicted in _rank_groups(rows):
        tau = kendall_tau_b(1.0 / measured, 1.0 / predicted)
        if tau is not None:
            weight = len(measured) * (len(measured) - 1) / 2
            total += tau * weight
            pairs += weight
    return total / pairs if pairs else None


def rank_regrets(rows: Iterable[RowOutcome], least: int = LEAST_IN_GROUP) -> list[float]:
    """Return for each group the measured time of the predicted best over the measured best, less 1."""
    return [
        float(measured[int(np.argmin(predicted))] / measured.min() - 1.0)
        for measured, predicted in _rank_groups(rows, least)
    ]


def _feasibility(rows: Iterable[RowOutcome]) -> dict[str, int]:
    """Return the confusion of "does not fit": rows labelled OOM, and rows that ran and state memory."""
    counts = {"tp": 0, "fp": 0, "tn": 0, "fn": 0}
    for row in rows:
        if row.fits is None or not (row.oom or row.measured_peak_bytes is not None):
            continue
        truth = "fn" if row.fits else "tp"
        counts[truth if row.oom else ("tn" if row.fits else "fp")] += 1
    return counts


def _interval_scores(rows: Sequence[RowOutcome]) -> tuple[float | None, float | None]:
    """Return coverage and the median of interval width over prediction."""
    bounded = [row for row in rows if row.interval_s is not None]
    if not bounded:
        return None, None
    low, high = np.array([row.interval_s for row in bounded], float).T
    measured = np.array([row.measured_s for row in bounded], float)
    predicted = np.array([row.predicted_s for row in bounded], float)
    inside = (low <= measured) & (measured <= high)
    return float(inside.mean()), float(np.median((high - low) / predicted))


def interval_summary(outcomes: Iterable[RowOutcome]) -> dict[str, Any]:
    """Return how often intervals hold: `by_level` all of them, `by_evidence` those of 90 %."""
    timed = [row for row in distinct(outcomes) if row.measured_s and row.predicted_s and not row.oom]
    return {"by_level": _level_coverage(timed), "by_evidence": _by_evidence(timed)}


def _level_coverage(rows: Sequence[RowOutcome]) -> dict[str, float]:
    """Return the share of measured times inside the intervals of each level."""
    inside: dict[float, list[bool]] = {}
    for row in rows:
        for level, (low, high) in row.intervals_s.items():
            inside.setdefault(level, []).append(low <= (row.measured_s or 0.0) <= high)
    return {f"{level:g}": float(np.mean(hits)) for level, hits in sorted(inside.items())}


def _by_evidence(rows: Sequence[RowOutcome]) -> dict[str, dict[str, Any]]:
    """Return rows, coverage and width of the 90 % intervals by what predictions rest on."""
    groups: dict[str, list[RowOutcome]] = {}
    for row in rows:
        if row.evidence is not None and row.interval_s is not None:
            groups.setdefault(row.evidence, []).append(row)
    found = {name: (len(group), *_interval_scores(group)) for name, group in sorted(groups.items())}
    return {
        name: {"rows": count, "coverage": coverage, "relative_width_median": width}
        for name, (count, coverage, width) in found.items()
    }


def summarise(outcomes: Sequence[RowOutcome], *, order: Sequence[RowOutcome] | None = None) -> dict[str, Any]:
    """Return the summary of some rows, in the shape of `validate --json`.

    `order` are the rows that Kendall's tau and regret look at, all of them by default. Scores are None where
    no row allows them; `rows` counts skipped ones too.
    """
    merged = distinct(outcomes)
    timed = [row for row in merged if row.measured_s and row.predicted_s and not row.oom]
    skipped = sum(row.status != "ok" for row in outcomes)
    measured = np.array([row.measured_s for row in timed], float)
    error = (np.array([row.predicted_s for row in timed], float) - measured) / measured
    ape = np.abs(error)
    ranked = merged if order is None else distinct(order)
    regrets = rank_regrets(ranked)
    coverage, width = _interval_scores(timed)
    memory = [
        abs(row.predicted_peak_bytes / row.measured_peak_bytes - 1.0)
        for row in merged
        if row.predicted_peak_bytes and row.measured_peak_bytes
    ]
    everything = np.concatenate([ape, np.ones(skipped)])
    return {
        "rows": len(outcomes),
        "skipped": skipped,
        "mape": float(ape.mean()) if len(ape) else None,
        "mape_all": float(everything.mean()) if len(everything) else None,
        "median_ape": float(np.median(ape)) if len(ape) else None,
        "p90_ape": float(np.quantile(ape, 0.9)) if len(ape) else None,
        "bias": float(np.median(error)) if len(ape) else None,
        "coverage": coverage,
        "kendall_tau": rank_tau(ranked),
        "regret_mean": float(np.mean(regrets)) if regrets else None,
        "relative_width_median": width,
        "memory_median_ape": _median(memory),
        "feasibility": _feasibility(merged),
    }


def score(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Return the whole validation object: rows, the summary overall and by family, and how intervals hold.

    The overall order leaves vTrain out when other families are there; its own family states it.
    """
    families: dict[str, list[RowOutcome]] = {}
    for row in outcomes:
        families.setdefault(row.family, []).append(row)
    others = [row for row in outcomes if row.family != APART]
    overall = summarise(outcomes, order=others if others else None)
    return {
        "schema_version": 1,
        "rows": [row.to_dict() for row in outcomes],
        "summary": {
            "overall": overall,
            "by_family": {name: summarise(rows) for name, rows in families.items()},
            "intervals": interval_summary(outcomes),
        },
    }
