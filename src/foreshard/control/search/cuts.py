"""Cuts and order of one pipeline: all good trades between the time to fill it and its slowest stage.

A batch of n micro-batches takes fill + (n - 1) * slowest, so the best cuts for any n are on the front of
these two. Workers come by kind: those of one kind are alike in everything, so that orders are sequences of
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_MOST_STEPS = 150_000
"""Transitions between sets of kinds, times pairs of cuts, up to which all orders are searched at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCut:
    """A point of the front.

    Attributes
    ----------
    order : tuple of int
        Kind of the worker of each stage.
    cuts : tuple of int
    fill_s, slowest_s : float
        Sum and maximum of the stage times of a micro-batch.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    fill_s: float
    slowest_s: float

    def batch_s(self, num_micro_batches: float) -> float:
        """Return the seconds of a batch."""
        return self.fill_s + (num_micro_batches - 1.0) * self.slowest_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceClasses:
    """What stages of each kind take.

    Attributes
    ----------
    seconds : ndarray, shape (kinds, L + 1, L + 1), seconds
        Of a micro-batch through layers [start, stop); inf where stop <= start.
    hop_s : ndarray, shape (kinds, kinds, L + 1), seconds
        Message from a stage of the first kind to one of the second that begins at a layer.
    hop_extra : ndarray or None, same shape, seconds
        What the message costs otherwise, worth as many seconds; adds to the sum, not to the slowest.
    room : callable
        (kind, stages from here to the end) -> ndarray of bool, shape (L + 1, L + 1): does the stage fit.
    """

    seconds: np.ndarray
    hop_s: np.ndarray
    room: Callable[[int, int], np.ndarray]
    hop_extra: np.ndarray | None = None


@dataclass(slots=True)
class Effort:
    """Counts tables of all cuts between two stages: what a search takes its time for, but no clock."""

    done: int = 0


def front(
    kinds: DeviceClasses,
    counts: Sequence[int],
    *,
    grain: float = 0.0,
    least_rounds: float = 1.0,
    effort: Effort | None = None,
) -> tuple[PipelineCut, ...]:
    """Return the front of fill and slowest stage, least fill first; empty where nothing fits.

    Parameters
    ----------
    kinds : DeviceClasses
    counts : sequence of int
        Workers of each kind; all are used.
    grain : float
        Points closer than this part in the slowest stage are left out; 0 finds all.
    least_rounds : float
        Points that are best only for fewer micro-batches than these are left out, but for the first.
    effort : Effort, optional
        Counts what is done.

    Notes
    -----
    The least fill is a shortest path over cuts. Forbidding stages as slow as its slowest gives the next
    point, until no path is left: every point in as many searches as there are points. Orders are searched
    with the path, over how many of each kind are used; where these are too many, a few orders by speed are
    tried.
    """
    counts = tuple(counts)
    if _num_steps(counts) * kinds.seconds.shape[1] ** 2 <= _MOST_STEPS:
        return _thinned(_sweep(_Search(kinds, counts, None, effort), grain, least_rounds), kinds)
    found: list[PipelineCut] = []
    for order in _likely_orders(kinds, counts):
        found += _sweep(_Search(kinds, counts, order, effort), grain, least_rounds)
    return _thinned(found, kinds)


def _num_steps(counts: Sequence[int]) -> float:
    alive = [count for count in counts if count]
    states = float(np.prod([count + 1.0 for count in alive]))
    return states * len(alive) ** 2 if len(alive) > 1 else sum(alive)


def _likely_orders(kinds: DeviceClasses, counts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Return orders worth trying: slow or fast first, with neighbours that hear each other well."""
    alive = [kind for kind, count in enumerate(counts) if count]
    speed = {kind: float(kinds.seconds[kind, 0, -1]) for kind in alive}
    orders = [
        sorted(alive, key=lambda kind: (speed[kind], kind)),
        sorted(alive, key=lambda k: (-speed[k], k)),
    ]
    near = [alive[0]]
    while len(near) < len(alive):
        rest = [kind for kind in alive if kind not in near]
        near.append(min(rest, key=lambda kind: (float(kinds.hop_s[near[-1], kind].sum()), kind)))
    orders += [near, near[::-1]]
    return dict.fromkeys(tuple(kind for kind in order for _ in range(counts[kind])) for order in orders)


def _sweep(search: _Search, grain: float, least_rounds: float) -> list[PipelineCut]:
    found: list[PipelineCut] = []
    limit, step = np.inf, 1.0 - max(grain, 1e-12)
    while (cut := search.least_fill(limit)) is not None:
        found.append(cut)
        limit = cut.slowest_s * step
        if len(found) == 1 and least_rounds > 1.0:
            limit = min(limit, _worth_seeing(search, cut, least_rounds))
    return found


def _worth_seeing(search: _Search, first: PipelineCut, least_rounds: float) -> float:
    """Return the slowest stage above which no cuts are best for so many micro-batches.

    A slower one than the least possible has to pay for its (n - 1) rounds by what it saves in the fill.
    """
    slowest = search.least_slowest()
    last = search.least_fill(slowest * (1.0 + 1e-12))
    assert last is not None
    saved = search.weighed_of(last) - search.weighed_of(first)
    return slowest * (1.0 + 1e-12) + max(saved, 0.0) / (least_rounds - 1.0)


def _thinned(found: Sequence[PipelineCut], kinds: DeviceClasses) -> tuple[PipelineCut, ...]:
    """Return the points that no other beats in both; all where there is something else to weigh."""
    if kinds.hop_extra is not None:
        return tuple(found)
    kept: list[PipelineCut] = []
    for cut in sorted(found, key=lambda one: (one.fill_s, one.slowest_s, one.order, one.cuts)):
        if not kept or cut.slowest_s < kept[-1].slowest_s:
            kept.append(cut)
    return tuple(kept)


class _Search:
    """Shortest paths over (workers used by kind, kind of the last, layers done)."""

    def __init__(
        self,
        kinds: DeviceClasses,
        counts: tuple[int, ...],
        order: tuple[int, ...] | None,
        effort: Effort | None,
    ):
        self.effort = effort or Effort()
        self.kinds, self.counts, self.order = kinds, counts, order
        self.total = sum(counts)
        self._ends = np.arange(kinds.seconds.shape[1])
        self._stage: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def least_fill(self, limit: float) -> PipelineCut | None:
        """Return the cuts of least sum with all stages within the limit."""
        zero = (0,) * len(self.counts)
        start = np.full(self.kinds.seconds.shape[1], np.inf)
        start[0] = 0.0
        level = {(zero, -1): start}
        came: list[dict[tuple[tuple[int, ...], int], tuple[np.ndarray, np.ndarray]]] = []
        for done in range(self.total):
            level, back = self._advance(level, done, limit)
            came.append(back)
            if not level:
                return None
        last = min(level, key=lambda key: (level[key][-1], key))
        return self._cut(last, came) if np.isfinite(level[last][-1]) else None

    def least_slowest(self) -> float:
        """Return the slowest stage of the cuts in which it is fastest; some cuts have to fit."""
        zero = (0,) * len(self.counts)
        start = np.full(self.kinds.seconds.shape[1], np.inf)
        start[0] = 0.0
        level = {(zero, -1): start}
        for done in range(self.total):
            level, _ = self._advance(level, done, np.inf, widest=True)
        return min(float(reached[-1]) for reached in level.values())

    def weighed_of(self, cut: PipelineCut) -> float:
        """Return what the sum of the stages of some cuts weighs."""
        total, before = 0.0, -1
        for depth, kind in enumerate(cut.order):
            _, weighed = self._stage_of(before, kind, self.total - depth)
            total += float(weighed[cut.cuts[depth], cut.cuts[depth + 1]])
            before = kind
        return total

    def _advance(
        self,
        level: dict[tuple[tuple[int, ...], int], np.ndarray],
        done: int,
        limit: float,
        *,
        widest: bool = False,
    ) -> tuple[
        dict[tuple[tuple[int, ...], int], np.ndarray],
        dict[tuple[tuple[int, ...], int], tuple[np.ndarray, np.ndarray]],
    ]:
        options: dict[tuple[tuple[int, ...], int], list[tuple[np.ndarray, int]]] = {}
        for (used, last), reached in level.items():
            for kind in self._next(used, done):
                after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                seconds, weighed = self._stage_of(last, kind, self.total - done)
                if widest:
                    way = np.maximum(reached[:, None], seconds)
                elif limit < np.inf:
                    way = reached[:, None] + np.where(seconds <= limit, weighed, np.inf)
                else:
                    way = reached[:, None] + weighed
                options.setdefault((after, kind), []).append((way, last))
                self.effort.done += 1
        level, back = {}, {}
        for key, ways in options.items():
            starts = [way.argmin(0) for way, _ in ways]
            values = [way[start, self._ends] for start, (way, _) in zip(starts, ways, strict=True)]
            best, start, lasts = values[0], starts[0], np.full(len(self._ends), ways[0][1])
            for value, other, (_, last) in zip(values[1:], starts[1:], ways[1:], strict=True):
                better = value < best
                best, start = np.where(better, value, best), np.where(better, other, start)
                lasts[better] = last
            if np.isfinite(best).any():
                level[key], back[key] = best, (start, lasts)
        return level, back

    def _next(self, used: tuple[int, ...], done: int) -> Iterable[int]:
        if self.order is not None:
            return (self.order[done],)
        return (kind for kind, count in enumerate(self.counts) if used[kind] < count)

    def _stage_of(self, last: int, kind: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds of a stage, and what it adds to the sum, by first layer and end."""
        key = (last, kind, depth)
        if key not in self._stage:
            seconds = np.where(self.kinds.room(kind, depth), self.kinds.seconds[kind], np.inf)
            weighed = seconds
            if last >= 0:
                seconds = seconds + self.kinds.hop_s[last, kind][:, None]
                weighed = seconds
                if self.kinds.hop_extra is not None:
                    weighed = seconds + self.kinds.hop_extra[last, kind][:, None]
            self._stage[key] = (seconds, weighed)
        return self._stage[key]

    def _cut(
        self,
        last: tuple[tuple[int, ...], int],
        came: Sequence[dict[tuple[tuple[int, ...], int], tuple[np.ndarray, np.ndarray]]],
    ) -> PipelineCut:
        """Walk back along the path."""
        cuts, order = [self.kinds.seconds.shape[1] - 1], []
        key, times = last, []
        for depth, back in enumerate(reversed(came), start=1):
            used, kind = key
            starts, lasts = back[key]
            stop, start, before = cuts[-1], int(starts[cuts[-1]]), int(lasts[cuts[-1]])
            times.append(float(self._stage_of(before, kind, depth)[0][start, stop]))
            order.append(kind)
            cuts.append(start)
            key = ((*used[:kind], used[kind] - 1, *used[kind + 1 :]), before)
        return PipelineCut(
            order=tuple(reversed(order)), cuts=tuple(reversed(cuts)), fill_s=sum(times), slowest_s=max(times)
        )
