"""Cuts of one pipeline: all good trades between the time to fill it and its slowest stage.

A batch of n micro-batches takes fill + (n - 1) * slowest stage, so the best cuts for any n are on the front
of these two. Stages are workers of device classes in an order that is searched, or given sets of workers that
split every micro-batch in one of several ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_MOST_STEPS = 150_000
"""Transitions between sets of classes, times pairs of cuts, up to which all orders are searched at once.

It takes a few milliseconds.
"""
LONG_CHAIN = 12
"""Layers beyond which fronts are thinned: the number of points grows with the square of the layers."""

Node = tuple[tuple[int, ...], int]
"""Workers used by class, and the class of the last."""
Tables = tuple[np.ndarray, np.ndarray]
"""Seconds of a stage, and what it adds to the sum, by first layer and end; inf where it does not fit.

Shape (L + 1, L + 1), or with one table for every way to split micro-batches (splits, L + 1, L + 1).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCut:
    """A point of the front.

    Attributes
    ----------
    order : tuple of int
        Device class of each stage.
    cuts : tuple of int
        Where stages begin, and the end.
    splits : tuple of int
        Way to split micro-batches of each stage.
    fill_s, slowest_s : float
        Sum and maximum of the stage times of a micro-batch.
    weighed : float
        What the stages add to the sum that was minimised: `fill_s` where nothing but time counts.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    splits: tuple[int, ...]
    fill_s: float
    slowest_s: float
    weighed: float

    def batch_s(self, num_micro_batches: float) -> float:
        """Return the seconds of a batch."""
        return self.fill_s + (num_micro_batches - 1.0) * self.slowest_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceClasses:
    """What stages of one worker of each device class take.

    Attributes
    ----------
    seconds : ndarray, shape (classes, L + 1, L + 1), seconds
        Of a micro-batch through layers [start, stop); inf where stop <= start.
    hop_s : ndarray, shape (classes, classes, L + 1), seconds
        Message from a stage of the first class to one of the second that begins at a layer.
    hop_extra : ndarray or None, same shape, seconds
        What the message costs otherwise, worth as many seconds; adds to the sum, not to the slowest.
    room : callable
        (class, stages from here to the end) -> ndarray of bool, shape (L + 1, L + 1): does the stage fit.
    """

    seconds: np.ndarray
    hop_s: np.ndarray
    room: Callable[[int, int], np.ndarray]
    hop_extra: np.ndarray | None = None

    def stage(self, before: int, this: int, depth: int) -> Tables:
        """Return a stage after one of another class, or the first of all, so many stages from the end."""
        seconds = np.where(self.room(this, depth), self.seconds[this], np.inf)
        if before < 0:
            return seconds, seconds
        seconds = seconds + self.hop_s[before, this][:, None]
        extra = None if self.hop_extra is None else self.hop_extra[before, this]
        return seconds, seconds if extra is None else seconds + extra[:, None]


@dataclass(slots=True)
class Effort:
    """Counts tables of all cuts between two stages: what a search takes its time for, but no clock."""

    done: int = 0


def front(
    classes: DeviceClasses,
    counts: Sequence[int],
    *,
    grain: float = 0.0,
    least_rounds: float = 1.0,
    every_order: bool = False,
    effort: Effort | None = None,
) -> tuple[PipelineCut, ...]:
    """Return the front of fill and slowest stage, least fill first; empty where nothing fits.

    Parameters
    ----------
    classes : DeviceClasses
    counts : sequence of int
        Workers of each class; all are used.
    grain : float
        Points closer than this part in the slowest stage are left out; 0 finds all.
    least_rounds : float
        Points that are best only for fewer micro-batches than these are left out, but for the first.
    every_order : bool
        Search all orders, however many; a few by speed and by links where they are too many else.
    effort : Effort, optional
        Counts what is done.

    Notes
    -----
    The least fill is a shortest path over cuts. Forbidding stages as slow as its slowest gives the next
    point, until no path is left: every point in as many searches as there are points. Orders are searched
    with the path, over how many of each class are used.
    """
    counts = tuple(counts)
    few = every_order or _num_steps(counts) * classes.seconds.shape[1] ** 2 <= _MOST_STEPS
    orders = (None,) if few else _likely_orders(classes, counts)
    found: list[PipelineCut] = []
    for order in orders:
        found += points(CutSearch(classes.stage, counts, order, effort), grain, least_rounds - 1.0)
    if classes.hop_extra is not None:
        return tuple(found)
    kept: list[PipelineCut] = []
    for cut in sorted(found, key=lambda cut: (cut.fill_s, cut.slowest_s, cut.order, cut.cuts)):
        if not kept or cut.slowest_s < kept[-1].slowest_s:
            kept.append(cut)
    return tuple(kept)


def _num_steps(counts: Sequence[int]) -> float:
    alive = [count for count in counts if count]
    states = float(np.prod([count + 1.0 for count in alive]))
    return states * len(alive) ** 2 if len(alive) > 1 else sum(alive)


def _likely_orders(classes: DeviceClasses, counts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Return orders worth trying: slow or fast first, with neighbours that hear each other well."""
    alive = [at for at, count in enumerate(counts) if count]
    speed = {at: float(classes.seconds[at, 0, -1]) for at in alive}
    orders = [sorted(alive, key=lambda at: (speed[at], at)), sorted(alive, key=lambda at: (-speed[at], at))]
    near = [alive[0]]
    while len(near) < len(alive):
        rest = [at for at in alive if at not in near]
        near.append(min(rest, key=lambda at: (float(classes.hop_s[near[-1], at].sum()), at)))
    orders += [near, near[::-1]]
    return dict.fromkeys(tuple(at for at in order for _ in range(counts[at])) for order in orders)


def points(
    search: CutSearch, grain: float, slowest_weight: float, below: float = math.inf
) -> Iterator[PipelineCut]:
    """Yield points of the front, least sum first, as long as one can be best.

    Parameters
    ----------
    search : CutSearch
    grain : float
        Points closer than this part in the slowest stage are left out.
    slowest_weight : float
        What a second of the slowest stage weighs at least; 0 for any weight.
    below : float
        Nothing is yielded where no sum plus weighed slowest stage is less.
    """
    first = search.least_sum(math.inf)
    if first is None:
        return
    limit, step = first.slowest_s * (1.0 - max(grain, 1e-12)), 1.0 - max(grain, 1e-12)
    if slowest_weight > 0.0:
        least_s = search.least_slowest()
        if first.weighed + slowest_weight * least_s >= below * step:
            return
        # A slower stage than the least possible has to pay for itself by what it saves in the sum.
        last = search.least_sum(least_s * (1.0 + 1e-12))
        assert last is not None
        saved = max(last.weighed - first.weighed, 0.0)
        limit = min(limit, least_s * (1.0 + 1e-12) + saved / slowest_weight)
    yield first
    while (cut := search.least_sum(limit)) is not None:
        yield cut
        limit = cut.slowest_s * step


class CutSearch:
    """Shortest paths over (workers used by class, class of the last, layers done).

    Parameters
    ----------
    stage : callable
        (class of the stage before, -1 for none; class; stages from here to the end) -> Tables.
    counts : sequence of int
        Workers of each class; all are used.
    order : sequence of int, optional
        Of classes; all orders are searched without it.
    effort : Effort, optional
    """

    def __init__(
        self,
        stage: Callable[[int, int, int], Tables],
        counts: Sequence[int],
        order: Sequence[int] | None = None,
        effort: Effort | None = None,
    ):
        self._stage, self._counts, self._order = stage, tuple(counts), order
        self._effort, self._total = effort or Effort(), sum(counts)
        self._tables: dict[tuple[int, int, int], Tables] = {}

    def least_sum(self, limit: float) -> PipelineCut | None:
        """Return the cuts of least weighed sum with all stages within the limit."""
        level: dict[Node, np.ndarray] = {}
        came: list[dict[Node, tuple[np.ndarray, np.ndarray]]] = []
        for done in range(self._total):
            level, back = self._advance(level, done, limit)
            came.append(back)
            if not level:
                return None
        last = min(level, key=lambda node: (level[node][-1], node))
        return self._cut(last, came, limit) if np.isfinite(level[last][-1]) else None

    def least_slowest(self) -> float:
        """Return the slowest stage of the cuts in which it is fastest; inf where no cuts fit."""
        level: dict[Node, np.ndarray] = {}
        for done in range(self._total):
            level, _ = self._advance(level, done, math.inf, widest=True)
        return min((float(reached[-1]) for reached in level.values()), default=math.inf)

    def _advance(
        self, level: dict[Node, np.ndarray], done: int, limit: float, *, widest: bool = False
    ) -> tuple[dict[Node, np.ndarray], dict[Node, tuple[np.ndarray, np.ndarray]]]:
        """Return what is reached with one stage more, and by class of the one before and its first layer."""
        zero = (0,) * len(self._counts)
        options: dict[Node, list[tuple[np.ndarray, int]]] = {}
        for (used, last), reached in level.items() if done else [((zero, -1), None)]:
            for this in self._next(used, done):
                after = (*used[:this], used[this] + 1, *used[this + 1 :])
                seconds, weighed = self._stage_of(last, this, self._total - done)
                each = seconds if widest else weighed
                if reached is None:  # the first stage begins with the first layer
                    seconds, each = seconds[..., :1, :], each[..., :1, :]
                if limit < math.inf:
                    each = np.where(seconds <= limit, each, math.inf)
                each = each if each.ndim == 2 else each.min(0)
                if reached is None:
                    way = each
                elif widest:
                    way = np.maximum(reached[:, None], each)
                else:
                    way = reached[:, None] + each
                options.setdefault((after, this), []).append((way, last))
                self._effort.done += 1
        level, back = {}, {}
        for node, ways in options.items():
            (way, last), *others = ways
            best, start = way.min(0), way.argmin(0)
            lasts = np.full(len(best), last)
            for way, last in others:
                value = way.min(0)
                better = value < best
                best, start = np.where(better, value, best), np.where(better, way.argmin(0), start)
                lasts[better] = last
            if np.isfinite(best).any():
                level[node], back[node] = best, (start, lasts)
        return level, back

    def _next(self, used: tuple[int, ...], done: int) -> Iterable[int]:
        if self._order is not None:
            return (self._order[done],)
        return (at for at, count in enumerate(self._counts) if used[at] < count)

    def _stage_of(self, last: int, this: int, depth: int) -> Tables:
        key = (last, this, depth)
        if key not in self._tables:
            self._tables[key] = self._stage(last, this, depth)
        return self._tables[key]

    def _cut(
        self, last: Node, came: Sequence[dict[Node, tuple[np.ndarray, np.ndarray]]], limit: float
    ) -> PipelineCut:
        """Walk back along the path."""
        cuts, order, splits, times, weighed = [len(came[0][min(came[0])][0]) - 1], [], [], [], 0.0
        node = last
        for depth, back in enumerate(reversed(came), start=1):
            used, this = node
            starts, lasts = back[node]
            stop, start, before = cuts[-1], int(starts[cuts[-1]]), int(lasts[cuts[-1]])
            own = [np.atleast_1d(table[..., start, stop]) for table in self._stage_of(before, this, depth)]
            split = int(np.where(own[0] <= limit, own[1], math.inf).argmin())
            times.append(float(own[0][split]))
            weighed += float(own[1][split])
            splits.append(split)
            order.append(this)
            cuts.append(start)
            node = ((*used[:this], used[this] - 1, *used[this + 1 :]), before)
        return PipelineCut(
            order=tuple(reversed(order)),
            cuts=tuple(reversed(cuts)),
            splits=tuple(reversed(splits)),
            fill_s=sum(times),
            slowest_s=max(times),
            weighed=weighed,
        )
