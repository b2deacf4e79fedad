"""Samples for groups whose structure is fixed: a linear program in closed form, and its kin in whole numbers.

A group ends after start_s + rate_s * share, and only groups with a share count. What each of its samples
costs enters as a weight; whatever costs by the second enters the weight of time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

_NEVER = 1e300
"""Seconds of an end that is never reached; finite, so that differences of ends are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Shares, when the last group ends, and the weighed sum of both.

    Attributes
    ----------
    shares : ndarray, shape (groups,), samples
    time_s : float
    worth : float
        time_weight * time_s + sum of sample_weight * share.
    """

    shares: np.ndarray
    time_s: float
    worth: float


def water_filling(start_s: np.ndarray, rate_s: np.ndarray, batch: float) -> Split:
    """Return the shares with which all groups in use end together: the least time where samples are free.

    Parameters
    ----------
    start_s, rate_s : ndarray, shape (groups,)
    batch : float, samples
    """
    order = np.argsort(start_s, kind="stable")
    start, rate = start_s[order], rate_s[order]
    levels = (batch + np.cumsum(start / rate)) / np.cumsum(1.0 / rate)
    following = np.append(start[1:], math.inf)
    level = float(levels[int(np.argmax(following >= levels))])
    return Split(shares=np.maximum(level - start_s, 0.0) / rate_s, time_s=level, worth=level)


def linear_shares(
    start_s: np.ndarray,
    rate_s: np.ndarray,
    batch: float,
    *,
    time_weight: float = 1.0,
    sample_weight: np.ndarray | None = None,
) -> Split:
    """Return the best shares, parts of samples allowed: a linear program, by a scan of its breakpoints.

    For a given end T the cheapest groups take all they can until T; the sum is convex and piecewise linear in
    T, with bends where a group begins, has all samples, or where the k cheapest groups begin to suffice.

    Parameters
    ----------
    start_s, rate_s : ndarray, shape (groups,)
    batch : float, samples
    time_weight : float
        Below 0 it counts as 0: no group waits on purpose.
    sample_weight : ndarray, shape (groups,), optional
    """
    cost = np.zeros(len(start_s)) if sample_weight is None else np.asarray(sample_weight, float)
    order = np.lexsort((start_s, cost))
    start, rate = start_s[order], rate_s[order]
    bends = np.unique(np.concatenate([start, start + rate * batch]))
    # Samples that the k cheapest groups get through until each bend.
    through = np.cumsum(np.clip((bends[None, :] - start[:, None]) / rate[:, None], 0.0, batch), axis=0)
    ends = np.concatenate([bends, [_level(bends, row, batch) for row in through]])
    least = _level(bends, through[-1], batch)
    ends = np.unique(ends[(ends >= least) & (ends < _NEVER)])
    return _best_end(order, start, rate, cost[order], ends, batch, time_weight)


def _level(bends: np.ndarray, through: np.ndarray, batch: float) -> float:
    """Return when a rising piecewise linear count reaches the batch; a huge number if never."""
    at = int(np.searchsorted(through, batch * (1 - 1e-12)))
    if at == len(bends):
        return _NEVER
    if at == 0 or through[at] <= through[at - 1]:
        return float(bends[at])
    part = (batch - through[at - 1]) / (through[at] - through[at - 1])
    return float(bends[at - 1] + min(part, 1.0) * (bends[at] - bends[at - 1]))


def _best_end(
    order: np.ndarray,
    start: np.ndarray,
    rate: np.ndarray,
    cost: np.ndarray,
    ends: np.ndarray,
    batch: float,
    time_weight: float,
    unit: float = 0.0,
) -> Split:
    """Return the best of some ends, filling the cheapest groups first; groups are given in that order.

    With a unit, shares are whole multiples of it.
    """
    room = np.clip((ends[:, None] - start[None, :]) / rate[None, :], 0.0, batch)
    if unit:
        room = np.floor(room / unit + 1e-9) * unit
    before = np.cumsum(room, axis=1) - room
    taken = np.clip(batch - before, 0.0, room)
    missing = batch - taken.sum(1)
    worth = max(time_weight, 0.0) * ends + taken @ cost
    worth[missing > 1e-9 * batch] = math.inf
    best = int(np.argmin(worth))
    shares = np.zeros(len(start))
    shares[order] = taken[best]
    used = taken[best] > 0.0
    time_s = float((start[used] + rate[used] * taken[best][used]).max())
    return Split(shares=shares, time_s=time_s, worth=time_weight * time_s + float(taken[best] @ cost))


def counted(shares: np.ndarray) -> tuple[int, ...]:
    """Return whole samples as integers."""
    return tuple(round(float(share)) for share in shares)


def whole_shares(
    start_s: np.ndarray,
    rate_s: np.ndarray,
    batch: int,
    micro_batch: int,
    *,
    time_weight: float = 1.0,
    sample_weight: np.ndarray | None = None,
) -> Split:
    """Return the best shares in whole micro-batches; one group takes what they leave of the batch.

    Parameters
    ----------
    start_s, rate_s : ndarray, shape (groups,)
    batch, micro_batch : int, samples
    time_weight : float
    sample_weight : ndarray, shape (groups,), optional

    Notes
    -----
    Exact. With samples that cost the same, micro-batches go one by one to the group that would end first; it
    is enough to do so from what every group gets through until the linear program's end. Otherwise the end is
    when some group ends a micro-batch, and all such ends are tried that a bound leaves.
    """
    pieces, rest = divmod(batch, micro_batch)
    best: Split | None = None
    for odd in range(len(start_s)) if rest else (-1,):
        start = start_s.copy()
        if odd >= 0:
            start[odd] += rate_s[odd] * rest
        found = _whole(start, rate_s, pieces, micro_batch, time_weight, sample_weight)
        shares = found.shares
        if odd >= 0:
            shares[odd] += rest
        split = _worth(start_s, rate_s, shares, time_weight, sample_weight)
        if best is None or split.worth < best.worth - 1e-12 * abs(best.worth):
            best = split
    assert best is not None
    return best


def _worth(
    start: np.ndarray, rate: np.ndarray, shares: np.ndarray, time_weight: float, cost: np.ndarray | None
) -> Split:
    used = shares > 0
    time_s = float((start[used] + rate[used] * shares[used]).max())
    extra = 0.0 if cost is None else float(shares @ cost)
    return Split(shares=shares, time_s=time_s, worth=time_weight * time_s + extra)


def _whole(
    start: np.ndarray,
    rate: np.ndarray,
    pieces: int,
    micro_batch: int,
    time_weight: float,
    cost: np.ndarray | None,
) -> Split:
    batch = pieces * micro_batch
    if not pieces:
        return Split(shares=np.zeros(len(start)), time_s=0.0, worth=0.0)
    counts = _soonest(start, rate * micro_batch, pieces)
    soonest = _worth(start, rate, counts * float(micro_batch), time_weight, cost)
    if cost is None or float(np.ptp(cost)) == 0.0:
        return soonest
    weight = max(time_weight, 0.0)
    order = np.lexsort((start, cost))
    latest = start[order[0]] + rate[order[0]] * batch
    if weight > 0.0:
        # No end can pay that lies beyond what the cheapest samples save.
        latest = min(
            latest, soonest.time_s + (float(soonest.shares @ cost) - batch * float(cost.min())) / weight
        )
    ends = _piece_ends(start, rate * micro_batch, pieces, soonest.time_s, latest)
    return _best_end(
        order, start[order], rate[order], cost[order], ends, batch, time_weight, float(micro_batch)
    )


def _soonest(start: np.ndarray, period: np.ndarray, pieces: int) -> np.ndarray:
    """Return how many of so many equal pieces each group takes for the last one to end soonest."""
    level = water_filling(start, period, float(pieces)).time_s
    counts = np.maximum(np.floor((level - start) / period * (1 - 1e-12)), 0.0).astype(int)
    left = pieces - int(counts.sum())
    heap = [(float(start[g] + period[g] * (counts[g] + 1)), g) for g in range(len(start))]
    heapq.heapify(heap)
    for _ in range(left):
        end, g = heap[0]
        counts[g] += 1
        heapq.heapreplace(heap, (end + float(period[g]), g))
    return counts


def _piece_ends(
    start: np.ndarray, period: np.ndarray, pieces: int, soonest: float, latest: float
) -> np.ndarray:
    """Return when groups end pieces, from the soonest to the latest end that can be best."""
    slack = 1e-12 * latest
    low = np.maximum(np.ceil((soonest - slack - start) / period), 1.0)
    high = np.minimum(np.floor((latest + slack - start) / period), pieces)
    ends = [
        start[g] + period[g] * np.arange(low[g], high[g] + 1) for g in range(len(start)) if high[g] >= low[g]
    ]
    return np.unique(np.concatenate([[soonest], *ends]))
