"""The pricing problem of column generation: the best pipeline at given duals, with a bound on all others.

A pipeline of micro-batch m with slowest stage b and tail w processes
m * ((T - w - sum of stage times) / b + 1) samples in T seconds. With b and w held between limits, the sum
over stages is all that is left, so a shortest path over cuts gives the best pipeline of such a *box* and a
bound on every pipeline in it. Boxes are split, the most promising first, until the bound is met by a pipeline
that exists.

That counts filling in full, which pipelines of unequal stages may beat; `least_pricing` bounds those.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np

from foreshard.compiled import allocating_loops
from foreshard.planner.solver.problem import PipelineFamily, Problem, StageSpan, Template, rounds_of
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget

_ENOUGH = 48
"""Pipelines better than known ones at which a search of boxes stops: more would only replace each other."""
_WIDE = 1.001
"""Ratio of limits of the slowest stage up to which a box is not cut at their mean as well."""
_RATIO = 1.3
"""Ratio of limits of the slowest stage of the first boxes; narrower ones follow where they matter."""
_CLOCK_EVERY = 64
"""Boxes split between two looks at the clock."""

Path = tuple[tuple[int, ...], tuple[int, ...]]
"""Options and stops of the stages of a pipeline, first to last."""


def template_of(path: Path) -> Template:
    """Return the pipeline of a path."""
    starts = (0, *path[1][:-1])
    return tuple(
        StageSpan(option=option, start=start, stop=stop)
        for option, start, stop in zip(path[0], starts, path[1], strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBox:
    """Pipelines of one family whose slowest stage and tail lie between limits, seconds.

    cost : least dual price of devices plus samples lost to filling, over the pipelines of the box
    path : of the pipeline of that cost
    by_longest_tail : whether the longest tail is counted, which may begin early, or that of the first stage
    is_rough : whether the cost is that of devices alone, for want of an exact search
    """

    family: PipelineFamily
    bottleneck_s: tuple[float, float]
    tail_s: tuple[float, float]
    cost: float
    path: Path
    by_longest_tail: bool = False
    is_rough: bool = False

    @property
    def template(self) -> Template:
        """Return the pipeline of least cost."""
        return template_of(self.path)

    def seconds(self, net_samples: float) -> float:
        """Return a time before which no pipeline of the box processes so many samples beyond its cost."""
        least = self.bottleneck_s[0]
        return self.tail_s[0] + least * max((net_samples + self.cost) / self.family.micro_batch - 1.0, 0.0)


def same_limits(one: PipelineBox, other: PipelineBox) -> bool:
    """Return whether two boxes are the same."""
    return one.bottleneck_s == other.bottleneck_s and one.tail_s == other.tail_s


class PathTimes(NamedTuple):
    """Seconds of the slowest stage, of a micro-batch alone and of the longest tail; what devices cost."""

    slowest_s: float
    once_s: float
    tail_s: float
    cost: float


@dataclass(slots=True, kw_only=True)
class Pricing:
    """Boxes of all pipelines of a problem at given duals; split as far as questions need it.

    Parameters
    ----------
    problem : Problem
    pipelines : (fewest, most)
        Sets the tails.
    duals : ndarray, shape (kinds,), samples
        Worth of a device of each kind.
    longest_s : float
        No stage takes longer.
    stages : dict, optional
        Of earlier questions with the same tails.
    """

    problem: Problem
    pipelines: tuple[int, int]
    duals: np.ndarray
    longest_s: float
    boxes: dict[int, PipelineBox] = field(default_factory=dict)
    solved: int = 0
    stages: dict[PipelineFamily, PricedStages] = field(default_factory=dict)
    tails: dict[PipelineFamily, np.ndarray] = field(init=False)
    option_cost: np.ndarray = field(init=False)
    _times: dict[tuple[PipelineFamily, Path], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up the tails and what options cost."""
        tails = self.problem.tail_between(self.pipelines)
        self.tails = {family: self.problem.tails_in(family, tails) for family in self.problem.families}
        self.option_cost = (self.problem.takes @ self.duals).astype(float)

    def start(self) -> None:
        """Make the first boxes."""
        problem = self.problem
        usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
        if not usable.any():
            return
        times = problem.time_s[usable]
        low, high = float(times[times > 0].min()), min(float(problem.far_s[usable].max()), self.longest_s)
        edges = [high]
        while len(edges) < 2 or edges[-1] > low:
            edges.append(edges[-1] / _RATIO)
        for family in problem.families:
            tails = self.tails[family][usable]
            for upper, lower in pairwise(edges):
                made = self._begin(family, (lower, upper), (float(tails.min()), float(tails.max())))
                if self._is_last(family, lower, made):
                    break

    def earliest(
        self,
        net_samples: float,
        *,
        known_s: float,
        aim_s: float,
        tolerance: float,
        budget: TimeBudget = ENDLESS,
    ) -> tuple[float, list[Template]]:
        """Return a time before which no pipeline processes `net_samples` beyond its cost, and those found.

        Boxes are split, the earliest first, until none is before `aim_s` (what was to be proven), until a
        pipeline is met within the tolerance, until enough are found that are before `known_s`, or until the
        time is up.

        Parameters
        ----------
        net_samples : float
        known_s : float
            Pipelines are returned when they get there sooner.
        aim_s, tolerance : float
        budget : TimeBudget
        """
        order = count()
        heap = [(box.seconds(net_samples), next(order), box) for box in self.boxes.values()]
        heapq.heapify(heap)
        found: dict[Path, float] = {}
        nearest, better = np.inf, 0
        while heap and heap[0][0] < aim_s and better < _ENOUGH:
            bound, number, box = heap[0]
            if box.path not in found:
                own = found[box.path] = self._seconds(box, net_samples)
                nearest = min(nearest, own)
                better += own < known_s
            if bound >= nearest * (1.0 - tolerance) or (number % _CLOCK_EVERY == 0 and budget.is_over):
                break
            heapq.heappop(heap)
            parts = self.parts(box, net_samples)
            for part in parts:
                heapq.heappush(heap, (part.seconds(net_samples), next(order), part))
            if not box.is_rough and any(same_limits(part, box) for part in parts):
                break
        bound = heap[0][0] if heap else np.inf
        return bound, [
            template_of(path) for path in sorted(found, key=found.__getitem__) if found[path] < known_s
        ]

    def _seconds(self, box: PipelineBox, net_samples: float) -> float:
        """Return when a box's own pipeline has processed that, fractions of a grain included."""
        own = self._of(box.family, box.path)
        least = float(len(box.path[0]) > 1)
        passes = max((net_samples + own.cost) / box.family.micro_batch, least)
        return own.tail_s + own.once_s + own.slowest_s * (passes - 1.0)

    def parts(self, box: PipelineBox, net_samples: float) -> list[PipelineBox]:
        """Return the parts of a box below and above its own pipeline, by what loosens the bound more.

        Above, the bound on the pipeline is exact; below, the pipeline is no longer allowed. A box whose
        tail alone outlasts the time may not come apart: its bound is then as tight as it gets.
        """
        lower, upper = box.bottleneck_s
        least, most = box.tail_s
        own, _, own_tail, cost = self._of(box.family, box.path)
        size = box.family.micro_batch
        del self.boxes[id(box)]
        by_bottleneck = ((net_samples + cost) / size - 1.0) * (own - lower)
        by_tail = own_tail - least
        if by_bottleneck >= by_tail:
            cut = min(max(own, lower), upper)
            if upper > lower * _WIDE and cut > lower * (1 + 1e-9):
                cut = min(cut, (lower * upper) ** 0.5)
            return self._cut_bottleneck(box, cut)
        return self._cut_tail(box, min(own_tail, 0.5 * (least + most)))

    def _cut_bottleneck(self, box: PipelineBox, cut: float) -> list[PipelineBox]:
        """Return the parts of a box with slowest stages from a limit on, and below it."""
        lower, upper = box.bottleneck_s
        parts = [self._add(box.family, (cut, upper), box.tail_s)]
        if cut > lower * (1 + 1e-9):
            parts.append(self._add(box.family, (lower, cut * (1 - 1e-9)), box.tail_s))
        return [part for part in parts if part is not None]

    def _cut_tail(self, box: PipelineBox, cut: float) -> list[PipelineBox]:
        """Return the parts of a box with tails from a limit on, and below it."""
        least, most = box.tail_s
        parts = [self._add(box.family, box.bottleneck_s, (cut, most))]
        parts.append(self._add(box.family, box.bottleneck_s, (least, cut * (1 - 1e-9))))
        return [part for part in parts if part is not None]

    def excess(self, box: PipelineBox, seconds: float) -> float:
        """Return by how many samples the bound of a box on its own pipeline exceeds what it processes."""
        own, size = self._of(box.family, box.path), box.family.micro_batch
        least, tail_s = box.bottleneck_s[0], box.tail_s[0]
        reach = size * ((seconds - tail_s) / least + 1.0)
        return reach * (1.0 - least / own.slowest_s) + size / least * (own.tail_s - tail_s)

    def paced_labels(self, box: PipelineBox, stages: PricedStages) -> tuple[Any, ...]:
        """Return what `kernels.paced_labels` asks for beside what the plain loops do; nothing for those."""
        return ()

    def stages_with(self, family: PipelineFamily, grain: int | None = None) -> PricedStages:
        """Return the stages that pipelines of a family choose from, of those that round up to a grain."""
        return stages_of(self.problem, self.tails[family], family, grain)

    def apart(self, box: PipelineBox, path: Path, seconds: float) -> list[PipelineBox]:
        """Return two parts of a box, one of which says more of a pipeline; none where the box says all."""
        path_times = self._of(box.family, path)
        own, tail = path_times.slowest_s, path_times.tail_s
        lower, least = box.bottleneck_s[0], box.tail_s[0]
        by_bottleneck, by_tail = (seconds - least) * (1.0 - lower / own), tail - least
        if by_bottleneck >= by_tail and own > lower * (1 + 1e-8):
            self.boxes.pop(id(box), None)
            return self._cut_bottleneck(box, min(own, box.bottleneck_s[1]))
        if tail > least + 1e-9 and box.tail_s[1] > least + 1e-9:
            self.boxes.pop(id(box), None)
            return self._cut_tail(box, tail)
        return []

    def _of(self, family: PipelineFamily, path: Path) -> PathTimes:
        """Return how a pipeline goes; boxes often share theirs."""
        found: PathTimes | None = self._times.get((family, path))
        if found is None:
            options = path[0]
            stages, times = self._stages_on(family, path)
            tails = self.tails[family]
            found = self._times[family, path] = PathTimes(
                slowest_s=max(times),
                once_s=sum(times),
                tail_s=max(float(tails[stage]) for stage in stages),
                cost=sum(float(self.option_cost[option]) for option in options),
            )
        return found

    def _stages_on(self, family: PipelineFamily, path: Path) -> tuple[list[tuple[int, int]], list[float]]:
        """Return the stages of a pipeline by option and type, and their times."""
        options, stops = path
        types = [int(self.problem.types[pair]) for pair in zip((0, *stops[:-1]), stops, strict=True)]
        table = self.problem.far_s if family.kind is None else self.problem.time_s
        stages = list(zip(options, types, strict=True))
        return stages, [float(table[stage]) for stage in stages]

    def _add(
        self, family: PipelineFamily, bottleneck: tuple[float, float], tail: tuple[float, float]
    ) -> PipelineBox | None:
        """Keep the box of these limits unless it is empty."""
        stages, rate = self._stages(family), self._rate(family, bottleneck[0])
        solution = path_among(self.problem, stages, self.option_cost, rate, (bottleneck[1], tail[1]))
        self.solved += 1
        if solution is None:
            return None
        cost, path = solution
        box = PipelineBox(family=family, bottleneck_s=bottleneck, tail_s=tail, cost=cost, path=path)
        self.boxes[id(box)] = box
        return box

    def _begin(
        self, family: PipelineFamily, bottleneck: tuple[float, float], tail: tuple[float, float]
    ) -> PipelineBox | None:
        """Keep one of the first boxes, of these limits, unless it is empty."""
        return self._add(family, bottleneck, tail)

    def _rate(self, family: PipelineFamily, bottleneck_s: float) -> float:
        """Return the samples that a second of filling costs."""
        return family.micro_batch / bottleneck_s

    def _is_last(self, family: PipelineFamily, lower_s: float, made: PipelineBox | None) -> bool:
        """Return whether no pipeline of a family has a quicker slowest stage than the box just made."""
        return made is None

    def _stages(self, family: PipelineFamily) -> PricedStages:
        if family not in self.stages:
            self.stages[family] = self.stages_with(family)
        return self.stages[family]


@dataclass(slots=True, kw_only=True)
class UnfilledPricing(Pricing):
    """Boxes that count no filling, and of tails that of the first stage.

    A pipeline takes at least what its slowest stage does with all micro-batches but a short last one, and
    then the tail of the first stage: nothing hides that. Few boxes say so of all pipelines.
    """

    def __post_init__(self) -> None:
        """Leave out the tails of stages that are not the first."""
        Pricing.__post_init__(self)
        is_first = np.zeros(self.problem.time_s.shape[1], dtype=bool)
        is_first[self.problem.types[0, 1:]] = True
        self.tails = {family: np.where(is_first, tails, 0.0) for family, tails in self.tails.items()}

    def _rate(self, family: PipelineFamily, bottleneck_s: float) -> float:
        return 0.0

    def _seconds(self, box: PipelineBox, net_samples: float) -> float:
        """Return when the slowest stage of a box's own pipeline is through."""
        own = self._of(box.family, box.path)
        passes = max((net_samples + own.cost) / box.family.micro_batch - 1.0, 0.0)
        return own.tail_s + own.slowest_s * passes


def cheapest_path(
    problem: Problem,
    tail_s: np.ndarray,
    duals: np.ndarray,
    family: PipelineFamily | int,
    rate: float,
    longest_s: tuple[float, float],
    known: dict[PipelineFamily, PricedStages] | None = None,
) -> tuple[float, Template] | None:
    """Return the pipeline that costs least in devices and seconds of all stages, none above its limit.

    Parameters
    ----------
    problem : Problem
    tail_s : ndarray, shape (options, types)
    duals : ndarray, shape (kinds,)
        Cost of a device of each kind.
    family : PipelineFamily or int
        Of the pipelines; an integer stands for all of a micro-batch.
    rate : float
        Cost of a second.
    longest_s : (time, tail)
        Of any stage.
    known : dict, optional
        Stages of earlier questions with the same tails; takes up those of this one.

    Returns
    -------
    (cost, template) or None
        Exact: a shortest path over cuts, one layer of the graph for each number of stages still to come,
        since that number is what a stage has in flight.
    """
    asked = family if isinstance(family, PipelineFamily) else PipelineFamily(int(family))
    known = {} if known is None else known
    if asked not in known:
        known[asked] = stages_of(problem, tail_s, asked)
    found = path_among(problem, known[asked], problem.takes @ duals, rate, longest_s)
    return None if found is None else (found[0], template_of(found[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStages:
    """Stages that a pipeline of a family may have, by time, none worse than another of its kind.

    Arrays of shape (stages,); `rooms` is how many stages may follow one, itself included, at most `deepest`.
    A pipeline takes at most `limit` devices, each stage `units` of them; both are 0 where it is all one.
    """

    family: PipelineFamily
    types: np.ndarray
    options: np.ndarray
    times_s: np.ndarray
    tail_s: np.ndarray
    rooms: np.ndarray
    units: np.ndarray
    limit: int
    deepest: int


def stages_of(
    problem: Problem,
    tail_s: np.ndarray,
    family: PipelineFamily,
    grain: int | None = None,
    *,
    parts: Sequence[np.ndarray] = (),
) -> PricedStages:
    """Return the stages that pipelines of a family choose from, of those that round up to a grain at most.

    A stage stands for others on its devices that are no quicker; with tables of `parts` of what stages take,
    shape (options, types), only where no part is quicker, and for those that round up as it does.
    """
    options, times, room = problem.options_of(family)
    if grain is not None:
        fine = problem.grain[options] <= grain
        options, times, room = options[fine], times[fine], room[fine]
    limit, units = 0, np.zeros(len(options), dtype=np.int64)
    if family.kind is not None:
        limit = min(problem.domains[family.kind], problem.counts[family.kind])
        units = problem.takes[options].sum(1).astype(np.int64)
    deepest = min(problem.max_stages, problem.num_layers, limit or problem.num_layers)
    tails = tail_s[options]
    # Room for all rounds is room for any number of stages behind.
    rooms = np.where(room >= rounds_of(problem, family.micro_batch), deepest, np.minimum(room, deepest))
    usable = (rooms > 0) & np.isfinite(times) & (units <= limit)[:, None]
    kinds = [problem.takes[options], problem.grain[options][:, None]]
    _, same = np.unique(np.hstack(kinds if parts else kinds[:1]), axis=0, return_inverse=True)
    same = np.ravel(same)
    for devices in range(int(same.max(initial=-1)) + 1):
        own = np.flatnonzero(same == devices)
        values = [times[own], tails[own], *(part[options[own]] for part in parts)]
        usable[own] &= ~beaten(values, rooms[own], usable[own])
    kept, types = np.nonzero(usable)
    order = np.argsort(times[kept, types], kind="stable")
    kept, types = kept[order], types[order]
    return PricedStages(
        family=family,
        types=types,
        options=options[kept],
        times_s=times[kept, types],
        tail_s=tails[kept, types],
        rooms=rooms[kept, types].astype(np.int64),
        units=units[kept],
        limit=limit,
        deepest=deepest,
    )


def beaten(values: Sequence[np.ndarray], rooms: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Return which stages on the same devices another is no worse than in all values, by option and type.

    Of equal ones the first is kept.
    """
    found = np.zeros_like(usable)
    for i in range(len(rooms)):
        worse, same = (rooms[i] <= rooms) & usable, rooms[i] == rooms[i:]
        for each in values:
            worse &= each[i] >= each
            same &= each[i] == each[i:]
        worse[i:] &= ~same
        found[i] = worse.any(0)
    return found


def path_among(
    problem: Problem,
    stages: PricedStages,
    option_cost: np.ndarray,
    rate: float,
    longest_s: tuple[float, float],
    paced: tuple[Any, ...] = (),
) -> tuple[float, Path] | None:
    """Return the path over some stages that costs least, as :func:`cheapest_path`.

    `paced` is what `kernels.paths.paced_path` asks for beside that.
    """
    if not len(stages.types):
        return None
    loops = allocating_loops("foreshard.planner.solver.kernels.paths")
    best, depth, options, stops = (loops.paced_path if paced else loops.plain_path)(
        stages.types,
        stages.options,
        stages.times_s,
        stages.tail_s,
        stages.rooms,
        stages.units,
        option_cost.astype(float),
        stages.limit,
        rate,
        longest_s[0] * (1 + 1e-12),
        longest_s[1] * (1 + 1e-12),
        stages.deepest,
        problem.bands,
        problem.lengths,
        *paced,
    )
    if depth == 0:
        return None
    return float(best), (tuple(options.tolist()), tuple(stops.tolist()))
