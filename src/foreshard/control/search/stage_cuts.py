"""Cuts of stages that are given in order: least weighed seconds and costs, exactly.

A batch of n micro-batches takes fill + (n - 1) * slowest stage + longest sum of gradients. For every slowest
stage that may be best, and while a shorter sum of gradients may pay, cuts are a shortest path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_TOGETHER = 8
"""Bounds on the slowest stage that are looked at together."""
_FEW, _GRAIN = 12, 0.01
"""In longer chains than this, slowest stages closer than the grain are one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutRow:
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

    def least_slowest(self) -> float:
        """Return the least possible slowest period; inf where no path is."""
        last, least = len(self.period_s) - 1, np.zeros(1)
        for k, period in enumerate(self.period_s):
            start = slice(0, 1) if k == 0 else slice(None)
            stop = slice(-1, None) if k == last else slice(None)
            least = np.maximum(least[:, None], period[:, start, stop].min(0)).min(0)
        return float(least[0])

    def between(self, low: float, high: float, grain: float) -> np.ndarray:
        """Return what can be the slowest period between two, of those closer than a grain the last."""
        values = np.concatenate([period.ravel() for period in self.period_s])
        found = np.unique(values[(values > low) & (values < high)])
        if not grain or not len(found):
            return found
        place = (np.log(found / low) / math.log1p(grain)).astype(int)
        return found[np.append(place[1:] != place[:-1], True)]

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


def best_cuts(rows: Sequence[CutRow], rounds: float, time_weight: float) -> Cuts | None:
    """Return the best cuts and splits of stages in order; None where none fits.

    Parameters
    ----------
    rows : sequence of CutRow
        First stage first.
    rounds : float
        Micro-batches of a batch.
    time_weight : float
        Of a second; what is not above 0 counts as hardly anything.

    Notes
    -----
    Exact for up to 12 layers, for more within 1 % of what the stages' compute and messages are worth.
    """
    weight = max(time_weight, 1e-12)
    grain = _GRAIN if rows[0].sync_s.shape[0] - 1 > _FEW else 0.0
    best: Cuts | None = None
    limit = math.inf
    while True:
        below = math.inf if best is None else best.worth
        found = _least(_tables(rows, weight, limit), max(rounds - 1.0, 0.0) * weight, below, grain)
        if found is None:
            return best
        spans = zip(found.cuts[:-1], found.cuts[1:], strict=True)
        sync_s = max(float(row.sync_s[span]) for row, span in zip(rows, spans, strict=True))
        total = found.worth + weight * sync_s
        if best is None or total < best.worth:
            best = Cuts(cuts=found.cuts, splits=found.splits, worth=total)
        if sync_s <= 0.0:
            return best
        limit = sync_s


def _tables(rows: Sequence[CutRow], weight: float, limit: float) -> _Tables:
    """Return the rows without spans whose gradients take as long as a limit."""
    added, periods = [], []
    for row in rows:
        period = row.period_s
        if math.isfinite(limit):
            period = np.where(row.sync_s < limit, period, math.inf)
        added.append(weight * period if row.cost is None else weight * period + row.cost)
        periods.append(period)
    return _Tables(added=added, period_s=periods)


def _least(tables: _Tables, each: float, below: float, grain: float) -> Cuts | None:
    """Return the best cuts by fill and costs and `each` times the slowest period, if they are below a worth.

    All slowest periods are tried that a bound leaves; those closer than the grain are one.
    """
    low = tables.least_slowest()
    if not math.isfinite(low):
        return None
    free, best = (float(one) for one in tables.paths(np.array([math.inf, low])))
    best, at = best + each * low, low
    if free + each * low >= below * (1.0 - grain):
        return None
    if each > 0.0:
        for some in _together(tables.between(low, (best - free) / each, grain)):
            if free + each * float(some[0]) >= best:
                break
            totals = tables.paths(some) + each * some
            place = int(totals.argmin())
            if totals[place] < best:
                best, at = float(totals[place]), float(some[place])
    else:
        best, at = free, math.inf
    if best >= below:
        return None
    cuts, splits = tables.path(at)
    return Cuts(cuts=cuts, splits=splits, worth=best)


def _together(bounds: np.ndarray) -> Iterator[np.ndarray]:
    for at in range(0, len(bounds), _TOGETHER):
        yield bounds[at : at + _TOGETHER]
