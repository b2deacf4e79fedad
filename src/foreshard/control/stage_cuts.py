"""Cuts of stages that are given in order: least weighed seconds and costs, exactly.

A batch of n micro-batches takes fill + (n - 1) * slowest stage + longest sum of gradients. For every slowest
stage that may be best, and while a shorter sum of gradients may pay, cuts are a shortest path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_TOGETHER = 8
"""Bounds on the slowest stage that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A stage on all spans of layers.

    Attributes
    ----------
    period_s : ndarray, shape (splits, L + 1, L + 1)
        Of a micro-batch with the message before it; inf where it does not fit.
    cost : ndarray or None, same shape
        Of a batch, besides its time.
    sync_s : ndarray, shape (L + 1, L + 1)
    """

    period_s: np.ndarray
    cost: np.ndarray | None
    sync_s: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Where stages begin, and the end, which split each takes, and all that it is worth."""

    cuts: tuple[int, ...]
    splits: tuple[int, ...]
    worth: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tables:
    """Rows as what a shortest path adds up and what bounds it."""

    added: list[np.ndarray]
    period_s: list[np.ndarray]

    def paths(self, bounds: np.ndarray) -> np.ndarray:
        """Return the least sum of a path with no period above each of some bounds."""
        last, least = len(self.added) - 1, np.zeros((len(bounds), 1))
        for k, (added, period) in enumerate(zip(self.added, self.period_s, strict=True)):
            start = slice(0, 1) if k == 0 else slice(None)
            stop = slice(-1, None) if k == last else slice(None)
            inside = period[None, :, start, stop] <= bounds[:, None, None, None]
            each = np.where(inside, added[None, :, start, stop], math.inf).min(1)
            least = (least[:, :, None] + each).min(1)
        return np.asarray(least[:, 0])

    def path(self, bound: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return cuts and splits of the best path with no period above a bound, which there is."""
        size = self.added[0].shape[-1]
        least = np.full(size, math.inf)
        least[0] = 0.0
        back = []
        for added, period in zip(self.added, self.period_s, strict=True):
            each = np.where(period <= bound, added, math.inf)
            split = each.argmin(0)
            total = least[:, None] + each.min(0)
            start = total.argmin(0)
            back.append((start, split[start, np.arange(size)]))
            least = total.min(0)
        at, cuts, splits = size - 1, [size - 1], []
        for start, chosen in reversed(back):
            splits.append(int(chosen[at]))
            at = int(start[at])
            cuts.append(at)
        return tuple(reversed(cuts)), tuple(reversed(splits))


def best_cuts(rows: Sequence[Row], rounds: float, time_weight: float) -> Cuts | None:
    """Return the best cuts and splits of stages in order; None where none fits.

    Parameters
    ----------
    rows : sequence of Row
        First stage first.
    rounds : float
        Micro-batches of a batch.
    time_weight : float
        Of a second; what is not above 0 counts as hardly anything.
    """
    weight = max(time_weight, 1e-12)
    best: Cuts | None = None
    limit = math.inf
    while True:
        found = _least(rows, rounds, weight, limit)
        if found is None or (best is not None and found.worth >= best.worth):
            return best
        spans = zip(found.cuts[:-1], found.cuts[1:], strict=True)
        sync_s = max(float(row.sync_s[span]) for row, span in zip(rows, spans, strict=True))
        total = found.worth + weight * sync_s
        if best is None or total < best.worth:
            best = Cuts(cuts=found.cuts, splits=found.splits, worth=total)
        if sync_s <= 0.0:
            return best
        limit = sync_s


def _least(rows: Sequence[Row], rounds: float, weight: float, limit: float) -> Cuts | None:
    """Return the best cuts where every sum of gradients is shorter than a limit and does not count."""
    tables = _tables(rows, weight, limit)
    free = float(tables.paths(np.array([math.inf]))[0])
    if not math.isfinite(free):
        return None
    each = max(rounds - 1.0, 0.0) * weight
    if each == 0.0:
        cuts, splits = tables.path(math.inf)
        return Cuts(cuts=cuts, splits=splits, worth=free)
    bounds = _slowest(tables)
    best, at = float(tables.paths(bounds[:1])[0]) + each * float(bounds[0]), float(bounds[0])
    bounds = bounds[1:][bounds[1:] < (best - free) / each]
    for some in np.split(bounds, range(_TOGETHER, len(bounds), _TOGETHER)):
        if not len(some) or free + each * float(some[0]) >= best:
            break
        totals = tables.paths(some) + each * some
        place = int(totals.argmin())
        if totals[place] < best:
            best, at = float(totals[place]), float(some[place])
    cuts, splits = tables.path(at)
    return Cuts(cuts=cuts, splits=splits, worth=best)


def _tables(rows: Sequence[Row], weight: float, limit: float) -> _Tables:
    added, periods = [], []
    for row in rows:
        period = row.period_s
        if math.isfinite(limit):
            period = np.where(row.sync_s < limit, period, math.inf)
        added.append(weight * period if row.cost is None else weight * period + row.cost)
        periods.append(period)
    return _Tables(added=added, period_s=periods)


def _slowest(tables: _Tables) -> np.ndarray:
    """Return what can be the slowest period, from the least possible one on."""
    least = np.zeros(1)
    for k, period in enumerate(tables.period_s):
        each = period.min(0)
        each = each[:1] if k == 0 else each
        least = np.maximum(least[:, None], each).min(0)
    values = np.concatenate([period.ravel() for period in tables.period_s])
    return np.unique(values[(values >= least[-1]) & np.isfinite(values)])
