"""The best pipeline when devices have prices: what column generation asks, with a bound on the answer.

A pipeline of micro-batch m with slowest stage b and tail w gets through
m * ((T - w - sum of stage times) / b + 1) samples in T seconds. With b and w held between limits, the sum over
stages is all that is left, so a shortest path over cuts gives the best pipeline of such a *box* and a bound on
every pipeline in it. Boxes are split, the most promising first, until the bound is met by a pipeline that
exists.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from foreshard.planner.problem import Part, Problem, Template, rounds_of

_ENOUGH = 48
_WIDE = 1.001
_RATIO = 1.3
"""Widest box of slowest stages at the start; narrower ones follow where they matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Pipelines of one micro-batch whose slowest stage and tail lie between limits, seconds.

    cost : least price of the devices plus samples lost to filling, over the pipelines of the box
    """

    micro_batch: int
    bottleneck_s: tuple[float, float]
    tail_s: tuple[float, float]
    cost: float
    template: Template

    def seconds(self, goal: float) -> float:
        """Return a time before which no pipeline of the box gets `goal` samples beyond its price."""
        least = self.bottleneck_s[0]
        return self.tail_s[0] + least * max((goal + self.cost) / self.micro_batch - 1.0, 1.0)


def same_limits(one: Box, other: Box) -> bool:
    """Return whether two boxes are the same."""
    return one.bottleneck_s == other.bottleneck_s and one.tail_s == other.tail_s


@dataclass(slots=True, kw_only=True)
class Pricing:
    """Boxes of all pipelines of a problem for given prices; refined as far as questions need it.

    Parameters
    ----------
    problem : Problem
    num_pipelines : int
        Sets the tails.
    prices : ndarray, shape (kinds,)
        Samples that a device of each kind is worth.
    longest_s : float
        No stage takes longer.
    """

    problem: Problem
    num_pipelines: int
    prices: np.ndarray
    longest_s: float
    boxes: dict[int, Box] = field(default_factory=dict)
    solved: int = 0
    tails: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Look up the tails."""
        self.tails = self.problem.tail_of(self.num_pipelines)

    def start(self) -> None:
        """Make the first boxes."""
        problem, tail = self.problem, self.tails
        usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
        if not usable.any():
            return
        times, tails = problem.time_s[usable], tail[usable]
        low, high = float(times[times > 0].min()), min(float(times.max()), self.longest_s)
        edges = [high]
        while edges[-1] > low:
            edges.append(edges[-1] / _RATIO)
        for size in np.unique(problem.micro_batch):
            for upper, lower in pairwise(edges):
                self._add(int(size), (lower, upper), (float(tails.min()), float(tails.max())))

    def earliest(
        self,
        goal: float,
        *,
        known_s: float,
        aim_s: float,
        tolerance: float,
        deadline: float = np.inf,
    ) -> tuple[float, list[Template]]:
        """Return a time before which no pipeline gets `goal` samples beyond its price, and pipelines found.

        Boxes are split, the earliest first, until none is before `aim_s` (what was to be proven), until a pipeline
        is met within the tolerance, until enough are found that are before `known_s`, or until the deadline.

        Parameters
        ----------
        goal : float, samples
        known_s : float
            Pipelines are returned when they get there sooner.
        aim_s, tolerance, deadline : float
        """
        order = count()
        heap = [(box.seconds(goal), next(order), box) for box in self.boxes.values()]
        heapq.heapify(heap)
        found: dict[Template, float] = {}
        nearest, better = np.inf, 0
        while heap and heap[0][0] < aim_s and better < _ENOUGH:
            bound, number, box = heap[0]
            if box.template not in found:
                own = found[box.template] = self._seconds(box.template, goal)
                nearest = min(nearest, own)
                better += own < known_s
            if bound >= nearest * (1.0 - tolerance) or (number % 64 == 0 and time.perf_counter() > deadline):
                break
            heapq.heappop(heap)
            del self.boxes[id(box)]
            parts = self._split(box, goal)
            for part in parts:
                heapq.heappush(heap, (part.seconds(goal), next(order), part))
            if any(same_limits(part, box) for part in parts):
                break
        bound = heap[0][0] if heap else np.inf
        return bound, [one for one in sorted(found, key=found.__getitem__) if found[one] < known_s]

    def _seconds(self, template: Template, goal: float) -> float:
        """Return when a pipeline gets `goal` samples beyond its price, whole grains not asked for."""
        problem = self.problem
        times, last = self._times(template), float(self._tails(template).max())
        price = float((problem.takes[[p.option for p in template]] @ self.prices).sum())
        passes = max((goal + price) / float(problem.micro_batch[template[0].option]), 1.0)
        return last + float(times.sum() + times.max() * (passes - 1.0))

    def _split(self, box: Box, goal: float) -> list[Box]:
        """Return the parts of a box below and above what its own pipeline does, by what loosens the bound more.

        Above, the pipeline's worth is what the bound says of it; below, it is no longer allowed. A box whose
        tail alone outlasts the time may not come apart: its bound is then as tight as it gets.
        """
        lower, upper = box.bottleneck_s
        least, most = box.tail_s
        times, tails = self._times(box.template), self._tails(box.template)
        own, own_tail = float(times.max()), float(tails.max())
        price = box.cost - box.micro_batch * float(times.sum()) / lower
        by_bottleneck = ((goal + price) / box.micro_batch - 1.0) * (own - lower)
        by_tail = own_tail - least
        parts = []
        if by_bottleneck >= by_tail:
            cut = min(max(own, lower), upper)
            if upper > lower * _WIDE and cut > lower * (1 + 1e-9):
                cut = min(cut, (lower * upper) ** 0.5)
            parts.append(self._add(box.micro_batch, (cut, upper), box.tail_s))
            if cut > lower * (1 + 1e-9):
                parts.append(self._add(box.micro_batch, (lower, cut * (1 - 1e-9)), box.tail_s))
        else:
            cut = min(own_tail, 0.5 * (least + most))
            parts.append(self._add(box.micro_batch, box.bottleneck_s, (cut, most)))
            parts.append(self._add(box.micro_batch, box.bottleneck_s, (least, cut * (1 - 1e-9))))
        return [part for part in parts if part is not None]

    def _times(self, template: Template) -> np.ndarray:
        problem = self.problem
        return np.array([problem.time_s[p.option, problem.types[p.start, p.stop]] for p in template])

    def _tails(self, template: Template) -> np.ndarray:
        problem, tail = self.problem, self.tails
        return np.array([tail[p.option, problem.types[p.start, p.stop]] for p in template])

    def _add(self, size: int, bottleneck: tuple[float, float], tail: tuple[float, float]) -> Box | None:
        """Keep the box of these limits unless it is empty."""
        solution = cheapest_path(self.problem, self.tails, self.prices, size, bottleneck, tail[1])
        self.solved += 1
        if solution is None:
            return None
        cost, template = solution
        box = Box(micro_batch=size, bottleneck_s=bottleneck, tail_s=tail, cost=cost, template=template)
        self.boxes[id(box)] = box
        return box


def cheapest_path(
    problem: Problem,
    tail_s: np.ndarray,
    prices: np.ndarray,
    micro_batch: int,
    bottleneck_s: tuple[float, float],
    longest_tail_s: float,
) -> tuple[float, Template] | None:
    """Return the pipeline that costs least in devices and filling, no stage or tail above its limit.

    Parameters
    ----------
    problem : Problem
    tail_s : ndarray, shape (options, types)
    prices : ndarray, shape (kinds,)
    micro_batch : int
        Of the options to use.
    bottleneck_s : (lower, upper)
        A stage takes at most `upper`; a second of filling costs micro_batch / lower samples.
    longest_tail_s : float

    Returns
    -------
    (cost, template) or None
        Exact: a shortest path over cuts, one layer of the graph for each number of stages still to come,
        since that number is what a stage has in flight.
    """
    find = _path_of_arrays if _compiled() is None else _path_of_loops
    return find(problem, tail_s, prices, micro_batch, bottleneck_s, longest_tail_s)


def _path_of_loops(
    problem: Problem,
    tail_s: np.ndarray,
    prices: np.ndarray,
    micro_batch: int,
    bottleneck_s: tuple[float, float],
    longest_tail_s: float,
) -> tuple[float, Template] | None:
    options, times, rooms = problem.options_of(micro_batch)
    most = rounds_of(problem, micro_batch)
    layers, types = problem.num_layers, times.shape[1]
    deepest = min(problem.max_stages, layers)
    least, chosen = np.full((deepest + 1, types), np.inf), np.full((deepest + 1, types), -1)
    after, stops = np.full((deepest + 1, layers + 1), np.inf), np.full((deepest + 1, layers + 1), -1)
    best, depth = _compiled()(
        times, tail_s[options], rooms, (problem.takes[options] @ prices).astype(float),
        micro_batch / bottleneck_s[0], bottleneck_s[1] * (1 + 1e-12), longest_tail_s * (1 + 1e-12),
        most, deepest, problem.bands, least, after, chosen, stops,
    )  # fmt: skip
    if depth == 0:
        return None
    parts, start = [], 0
    for behind in range(depth, 0, -1):
        end = int(stops[behind, start])
        option = int(options[chosen[behind, problem.types[start, end]]])
        parts.append(Part(option=option, start=start, stop=end))
        start = end
    return float(best), tuple(parts)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Return the loops compiled, None without numba."""
    try:
        import numba
    except ImportError:
        return None
    from foreshard.planner._path import shortest_path

    return numba.njit(cache=True, nogil=True)(shortest_path)


def _path_of_arrays(
    problem: Problem,
    tail_s: np.ndarray,
    prices: np.ndarray,
    micro_batch: int,
    bottleneck_s: tuple[float, float],
    longest_tail_s: float,
) -> tuple[float, Template] | None:
    options = np.flatnonzero(problem.micro_batch == micro_batch)
    allowed = (problem.time_s[options] <= bottleneck_s[1] * (1 + 1e-12)) & (
        problem.max_in_flight[options] > 0
    )
    allowed &= tail_s[options] <= longest_tail_s * (1 + 1e-12)
    used, kept = np.flatnonzero(allowed.any(1)), np.flatnonzero(allowed.any(0))
    if not len(used):
        return None
    options, allowed = options[used], allowed[np.ix_(used, kept)]
    times, rooms = problem.time_s[np.ix_(options, kept)], problem.max_in_flight[np.ix_(options, kept)]
    rate = micro_batch / bottleneck_s[0]
    costs = np.where(allowed, times * rate + (problem.takes[options] @ prices)[:, None], np.inf)
    size = problem.num_layers
    # Stages by start and length: long ones are cut off where none is allowed.
    short = np.full(int(problem.types.max()) + 2, len(kept))
    short[kept] = np.arange(len(kept))
    lengths = problem.bands
    band = short[lengths]
    longest = int(np.flatnonzero((band < len(kept)).any(0)).max()) + 1
    band = band[:, :longest]
    after = np.full(size + 1 + longest, np.inf)
    after[size] = 0.0
    starts = np.arange(size)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    best, best_depth = np.inf, 0
    most = rounds_of(problem, micro_batch)
    room = int(rooms[allowed].max())
    deepest = min(problem.max_stages, size, size if most <= room else room)
    least = np.full(len(kept) + 1, np.inf)
    columns = np.arange(len(kept))
    for depth in range(1, deepest + 1):
        costs[rooms < min(depth, most)] = np.inf
        choice = costs.argmin(0)
        least[:-1] = costs[choice, columns]
        total = least[band] + sliding_window_view(after[1:], longest)[:size]
        length = total.argmin(1)
        after = np.full_like(after, np.inf)
        after[:size] = total[starts, length]
        steps.append((starts + 1 + length, choice))
        if after[0] < best:
            best, best_depth = float(after[0]), depth
        if not np.isfinite(after[:size]).any():
            break
    if not np.isfinite(best):
        return None
    parts, start = [], 0
    for depth in range(best_depth, 0, -1):
        stop, choice = steps[depth - 1]
        end = int(stop[start])
        option = int(options[choice[short[problem.types[start, end]]]])
        parts.append(Part(option=option, start=start, stop=end))
        start = end
    return best, tuple(parts)
