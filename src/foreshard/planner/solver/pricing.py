"""The pricing problem of column generation: the best pipeline at given duals, with a bound on all others.

A pipeline of micro-batch m with slowest stage b and tail w processes at most m * ((T - w - F) / b + 1)
samples in T seconds. F adds up over stages: p for each one up to the slowest, 2 p - b for each one behind it
(docs/derivations/step.md). With b and w held between limits that sum is all that is left, so a shortest path
over cuts gives the best pipeline of such a *box* and a bound on every pipeline in it. Boxes are split, the
most promising first, until the bound is met by a pipeline that exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np

from foreshard.planner.solver.compiled import compiled
from foreshard.planner.solver.problem import (
    Filling,
    PipelineFamily,
    Problem,
    StageSpan,
    Template,
    rounds_of,
)
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget

_ENOUGH = 48
"""Pipelines better than known ones at which a search of boxes stops: more would only replace each other."""
_WIDE = 1.001
"""Ratio of limits of the slowest stage up to which a box is not cut at their mean as well."""
_RATIO = 1.3
"""Ratio of limits of the slowest stage of the first boxes; narrower ones follow where they matter."""
_WEIGHTS = (1.0, 0.5, 0.0)
"""Weights of the seconds behind the slowest stage: one of them says most of what it does not hide."""
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
    """Pipelines of one family whose slowest stage and longest tail lie between limits, seconds.

    cost : least dual price of devices plus samples lost to filling, over the pipelines of the box
    path : of the pipeline of that cost
    by_longest_tail : whether the longest tail is counted, which may begin early, or that of the first stage
    """

    family: PipelineFamily
    bottleneck_s: tuple[float, float]
    tail_s: tuple[float, float]
    cost: float
    path: Path
    by_longest_tail: bool = False

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


class _PathTimes(NamedTuple):
    """A pipeline by its stages: see `PricedStages`; its extremes, and what its devices cost.

    spared : samples of a short last micro-batch, at most
    """

    times_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    early_s: tuple[float, ...]
    tails_s: tuple[float, ...]
    slowest_s: float
    tail_s: float
    first_backward_s: float
    spared: float
    cost: float

    def lost(
        self,
        rate: float,
        bottleneck_s: tuple[float, float],
        tail_s: float,
        *,
        chunks: int,
        filling: Filling = "least",
    ) -> float:
        """Return the samples that it loses as a box counts them, its first pass included.

        In a box of its own (its slowest stage and longest tail as limits) that is all that it loses.
        """
        lower, upper = bottleneck_s
        in_rounds = chunks > 1
        if filling == "full":
            return rate * sum(self.times_s)
        if len(self.times_s) == 1:
            return rate * (lower + self.tail_s - tail_s)
        at = max(i for i, time_s in enumerate(self.times_s) if time_s >= lower * (1 - 1e-12))
        before_s = sum(self.times_s[: at + 1])
        behind_s = 0.0 if in_rounds else sum(2.0 * time_s - upper for time_s in self.times_s[at + 1 :])
        half_s = sum(self.times_s[at + 1 :]) - self.hidden_s[at] * (len(self.times_s) - 1 - at)
        seconds = before_s + (0.0 if in_rounds else max(0.0, half_s, behind_s))
        first = self.first_of(min(tail_s, self.tail_s))
        by_tail_s = (seconds if first <= at else before_s + behind_s) - sum(self.early_s[:first])
        seconds += self.tails_s[0] - tail_s
        if not in_rounds:
            seconds = max(seconds, by_tail_s)
        longest = self.early_s[at] / self.times_s[at] if in_rounds else 1.0
        part = max(0.0, longest - self.first_backward_s / upper) / chunks
        return rate * seconds - self.spared * part

    def first_of(self, tail_s: float) -> int:
        """Return the first stage with a tail so long."""
        return next(i for i, own_s in enumerate(self.tails_s) if own_s >= tail_s * (1 - 1e-12))


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
    filling : {'least', 'full'}
        The least costs are a bound on every pipeline; the full ones are nearer to what pipelines take.
    stages : dict, optional
        Of earlier questions with the same tails.
    """

    problem: Problem
    pipelines: tuple[int, int]
    duals: np.ndarray
    longest_s: float
    filling: Filling = "least"
    boxes: dict[int, PipelineBox] = field(default_factory=dict)
    solved: int = 0
    stages: dict[PipelineFamily, PricedStages] = field(default_factory=dict)
    tails: dict[PipelineFamily, np.ndarray] = field(init=False)
    option_cost: np.ndarray = field(init=False)
    _times: dict[tuple[PipelineFamily, Path], _PathTimes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up the tails and what options cost."""
        tails = self.problem.tail_between(self.pipelines)
        self.tails = {family: self.problem.tails_in(family, tails) for family in self.problem.families}
        self.option_cost = (self.problem.takes @ self.duals).astype(float)

    @property
    def _counting(self) -> dict[str, Any]:
        return {"chunks": self.problem.chunks, "filling": self.filling}

    @property
    def is_by_pace(self) -> bool:
        """Return whether stages behind the slowest may be hidden by it."""
        return self.problem.chunks == 1 and self.filling == "least"

    def start(self) -> None:
        """Make the first boxes."""
        problem = self.problem
        usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
        if not usable.any():
            return
        times = problem.time_s[usable]
        low, high = float(times[times > 0].min()), min(float(problem.far_s[usable].max()), self.longest_s)
        edges = [high]
        while edges[-1] > low:
            edges.append(edges[-1] / _RATIO)
        for family in problem.families:
            tails = self.tails[family][usable]
            limits = float(tails.min()), float(tails.max())
            for upper, lower in pairwise(edges):
                if upper >= self._stages(family).quickest_s * (1 - 1e-9):
                    self._add(family, (lower, upper), limits)

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
            if any(same_limits(part, box) for part in parts):
                break
        bound = heap[0][0] if heap else np.inf
        return bound, [
            template_of(path) for path in sorted(found, key=found.__getitem__) if found[path] < known_s
        ]

    def _seconds(self, box: PipelineBox, net_samples: float) -> float:
        """Return when a box's own pipeline has processed that, fractions of a grain included."""
        own = self._of(box.family, box.path)
        size = box.family.micro_batch
        alone_s = own.slowest_s, own.slowest_s
        lost = own.lost(size / own.slowest_s, alone_s, own.tail_s, **self._counting)
        passes = max((net_samples + own.cost + lost) / size - 1.0, 0.0)
        return own.tail_s + own.slowest_s * passes

    def parts(self, box: PipelineBox, net_samples: float) -> list[PipelineBox]:
        """Return the parts of a box below and above its own pipeline, by what loosens the bound more.

        A box whose tail alone outlasts the time may not come apart: its bound is then as tight as it gets.
        """
        lower, upper = box.bottleneck_s
        least, most = box.tail_s
        own = self._of(box.family, box.path)
        del self.boxes[id(box)]
        by_bottleneck, by_tail = self._slack(box, own, net_samples + own.cost)
        if by_bottleneck >= by_tail:
            cut = min(max(own.slowest_s, lower), upper)
            if upper > lower * _WIDE and cut > lower * (1 + 1e-9):
                cut = min(cut, (lower * upper) ** 0.5)
            elif cut <= lower * (1 + 1e-9) and upper > lower * (1 + 4e-9):
                # Stages behind the slowest count by its upper limit: the pipeline has a box of its own.
                cut = (lower * upper) ** 0.5 if upper > lower * _WIDE else lower * (1 + 3e-9)
            return self._cut_bottleneck(box, cut)
        return self._cut_tail(box, min(own.tail_s, 0.5 * (least + most)))

    def _slack(self, box: PipelineBox, own: _PathTimes, samples: float) -> tuple[float, float]:
        """Return the seconds by which a box is too quick for a pipeline, by its stages and by its tail."""
        size = box.family.micro_batch
        alone_s = own.slowest_s, own.slowest_s

        def seconds(bottleneck_s: tuple[float, float], tail_s: float) -> float:
            lost = own.lost(size / bottleneck_s[0], bottleneck_s, tail_s, **self._counting)
            return tail_s + bottleneck_s[0] * ((samples + lost) / size - 1.0)

        real_s = seconds(alone_s, own.tail_s)
        by_tail = real_s - seconds(alone_s, box.tail_s[0])
        return real_s - seconds(box.bottleneck_s, own.tail_s), by_tail

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

    def apart(self, box: PipelineBox, path: Path, seconds: float) -> list[PipelineBox]:
        """Return two parts of a box, one of which says more of a pipeline; none where the box says all."""
        own = self._of(box.family, path)
        lower, upper = box.bottleneck_s
        reach = box.family.micro_batch * ((seconds - box.tail_s[0]) / lower + 1.0)
        rate = box.family.micro_batch / lower
        lost = own.lost(rate, box.bottleneck_s, box.tail_s[0], **self._counting)
        by_bottleneck, by_tail = self._slack(box, own, reach - lost)
        is_above = own.slowest_s > lower * (1 + 1e-8)
        if by_bottleneck >= by_tail and (is_above or upper > lower * (1 + 1e-8)):
            self.boxes.pop(id(box), None)
            return self._cut_bottleneck(box, min(own.slowest_s, upper) if is_above else lower * (1 + 3e-9))
        if own.tail_s > box.tail_s[0] + 1e-9 and box.tail_s[1] > box.tail_s[0] + 1e-9 and by_tail > 0.0:
            self.boxes.pop(id(box), None)
            return self._cut_tail(box, own.tail_s)
        return []

    def excess(self, box: PipelineBox, seconds: float) -> float:
        """Return by how many samples the bound of a box on its own pipeline exceeds what it processes."""
        own, size = self._of(box.family, box.path), box.family.micro_batch

        def samples(bottleneck_s: tuple[float, float], tail_s: float) -> float:
            rate = size / bottleneck_s[0]
            lost = own.lost(rate, bottleneck_s, tail_s, **self._counting)
            return rate * (seconds - tail_s) + size - lost

        return samples(box.bottleneck_s, box.tail_s[0]) - samples((own.slowest_s,) * 2, own.tail_s)

    def _of(self, family: PipelineFamily, path: Path) -> _PathTimes:
        """Return how a pipeline goes; boxes often share theirs."""
        found = self._times.get((family, path))
        if found is None:
            options, stops = path
            types = [self.problem.types[pair] for pair in zip((0, *stops[:-1]), stops, strict=True)]
            table = self.problem.far_s if family.kind is None else self.problem.time_s
            stages = list(zip(options, types, strict=True))
            times = tuple(float(table[stage]) for stage in stages)
            tails, at = self.tails[family], (np.array(options), np.array(types))
            early, hidden = (of(self.problem, table[at], at) for of in (early_of, hidden_of))
            backward = self.problem.backward_s
            found = self._times[family, path] = _PathTimes(
                times_s=times,
                hidden_s=tuple(hidden.tolist()),
                early_s=tuple(early.tolist()),
                tails_s=tuple(float(tails[stage]) for stage in stages),
                slowest_s=max(times),
                tail_s=max(float(tails[stage]) for stage in stages),
                first_backward_s=0.0 if backward is None else float(backward[stages[0]]),
                spared=float(spared_of(self.problem, options[0])),
                cost=sum(float(self.option_cost[option]) for option in options),
            )
        return found

    def _add(
        self, family: PipelineFamily, bottleneck: tuple[float, float], tail: tuple[float, float]
    ) -> PipelineBox | None:
        """Keep the box of these limits unless it is empty."""
        solution = self._path(family, bottleneck, tail, by_longest_tail=False)
        if solution is None:
            return None
        (cost, path), longest = solution, False
        own = self._of(family, path)
        begun_s = tail[0] - sum(own.early_s[: own.first_of(min(tail[0], own.tail_s))])
        if self.is_by_pace and len(path[0]) > 1 and begun_s > own.tails_s[0]:
            other = self._path(family, bottleneck, tail, by_longest_tail=True)
            if other is None:
                return None
            if other[0] > cost:
                (cost, path), longest = other, True
        box = PipelineBox(
            family=family, bottleneck_s=bottleneck, tail_s=tail, cost=cost, path=path, by_longest_tail=longest
        )
        self.boxes[id(box)] = box
        return box

    def _path(
        self,
        family: PipelineFamily,
        bottleneck: tuple[float, float],
        tail: tuple[float, float],
        *,
        by_longest_tail: bool,
    ) -> tuple[float, Path] | None:
        self.solved += 1
        stages = self._stages(family)
        seconds = box_seconds(
            self.problem,
            stages,
            bottleneck,
            tail[0],
            by_longest_tail=by_longest_tail,
            spares=True,
            filling=self.filling,
        )
        rate = family.micro_batch / bottleneck[0]
        return path_among(
            self.problem,
            stages,
            self.option_cost,
            seconds,
            rate,
            bottleneck,
            tail[1],
            may_hide=self.is_by_pace,
            by_longest_tail=by_longest_tail,
            least_tail_s=tail[0],
        )

    def _stages(self, family: PipelineFamily) -> PricedStages:
        if family not in self.stages:
            self.stages[family] = stages_of(self.problem, self.tails[family], family)
        return self.stages[family]


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
    stages = known[asked]
    found = path_among(
        problem, stages, problem.takes @ duals, plain_seconds(stages), rate, (0.0, longest_s[0]), longest_s[1]
    )
    return None if found is None else (found[0], template_of(found[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStages:
    """Stages that a pipeline of a family may have, by time, none worse than another of its kind.

    Arrays of shape (stages,); `early_s` is the most that a backward takes with its messages, `backward_s` the
    least without, `hidden_s` the most that the stage does beside the longer of both, `spared` the samples of
    a last micro-batch that is short by a grain; `rooms` is how many stages may follow one, itself included,
    at most `deepest`.
    A pipeline takes at most `limit` devices, each stage `units` of them; both are 0 where it is all one. The
    slowest stage of no pipeline is quicker than `quickest_s`.
    """

    family: PipelineFamily
    types: np.ndarray
    options: np.ndarray
    times_s: np.ndarray
    tail_s: np.ndarray
    early_s: np.ndarray
    backward_s: np.ndarray
    hidden_s: np.ndarray
    spared: np.ndarray
    rooms: np.ndarray
    units: np.ndarray
    limit: int
    deepest: int
    quickest_s: float


def stages_of(
    problem: Problem, tail_s: np.ndarray, family: PipelineFamily, grain: int | None = None
) -> PricedStages:
    """Return the stages that pipelines of a family choose from, of those that round up to a grain at most."""
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
    early, backward = early_of(problem, times, options), first_backward_of(problem)[options]
    forward = np.zeros_like(times) if problem.forward_s is None else problem.forward_s[options]
    _, same = np.unique(
        np.column_stack([problem.takes[options], problem.grain[options]]), axis=0, return_inverse=True
    )
    same = np.ravel(same)
    for devices in range(int(same.max(initial=-1)) + 1):
        own = np.flatnonzero(same == devices)
        # A pipeline is no slower with a stage of which forward and backward are quicker.
        worse = times[own], early[own], forward[own], backward[own], tails[own]
        usable[own] &= ~_beaten(worse, rooms[own], usable[own])
    kept, types = np.nonzero(usable)
    order = np.argsort(times[kept, types], kind="stable")
    kept, types = kept[order], types[order]
    return PricedStages(
        family=family,
        types=types,
        options=options[kept],
        times_s=times[kept, types],
        tail_s=tails[kept, types],
        early_s=early[kept, types],
        backward_s=backward[kept, types],
        hidden_s=hidden_of(problem, times, options)[kept, types],
        spared=spared_of(problem, options[kept]),
        rooms=rooms[kept, types].astype(np.int64),
        units=units[kept],
        limit=limit,
        deepest=deepest,
        quickest_s=_quickest(problem, types, times[kept, types]),
    )


def _quickest(problem: Problem, types: np.ndarray, times_s: np.ndarray) -> float:
    """Return the least time of the slowest stage over all cuts, by the quickest stage of each type."""
    least = np.full(int(problem.types.max()) + 2, np.inf)
    np.minimum.at(least, types, times_s)
    by_cut, after = least[problem.types], np.full(problem.num_layers + 1, np.inf)
    after[problem.num_layers] = 0.0
    for start in range(problem.num_layers - 1, -1, -1):
        after[start] = np.maximum(by_cut[start], after).min()
    return float(after[0])


def _beaten(values: Sequence[np.ndarray], rooms: np.ndarray, usable: np.ndarray) -> np.ndarray:
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


def early_of(problem: Problem, times_s: np.ndarray, at: Any) -> np.ndarray:
    """Return the most that backwards take of the times of some stages, with messages: all but the forward."""
    return times_s if problem.forward_s is None else times_s - problem.forward_s[at]


def hidden_of(problem: Problem, times_s: np.ndarray, at: Any) -> np.ndarray:
    """Return the most that some stages do beside the longer of forward and backward."""
    if problem.forward_s is None or problem.backward_s is None:
        return 0.5 * times_s
    longer_s = np.maximum(problem.forward_s[at], problem.backward_s[at])
    return np.minimum(0.5 * times_s, times_s - longer_s)


def first_backward_of(problem: Problem) -> np.ndarray:
    """Return the least that backwards take, shape (options, types)."""
    return np.zeros_like(problem.time_s) if problem.backward_s is None else problem.backward_s


def spared_of(problem: Problem, options: Any) -> np.ndarray:
    """Return the most samples that a micro-batch short by a grain has, none where it cannot be short."""
    return np.maximum(problem.chunks * problem.micro_batch[options] - problem.grain[options], 0)


def plain_seconds(stages: PricedStages) -> np.ndarray:
    """Return `seconds` of :func:`path_among` by which each stage costs its time."""
    none = np.zeros_like(stages.times_s)
    return np.array([stages.times_s, stages.times_s, none, stages.times_s])


def box_seconds(
    problem: Problem,
    stages: PricedStages,
    bottleneck_s: tuple[float, float],
    tail_s: float,
    *,
    by_longest_tail: bool,
    spares: bool,
    filling: Filling = "least",
) -> np.ndarray:
    """Return the seconds that stages lose in a box: before the slowest, behind it, as the first, alone.

    Parameters
    ----------
    problem : Problem
    stages : PricedStages
    bottleneck_s : (lower, upper)
        Limits of the slowest stage.
    tail_s : float
        Least longest tail of the box.
    by_longest_tail : bool
        Whether that tail counts, instead of that of the first stage.
    spares : bool
        Whether a short last micro-batch counts for what it spares at most.
    filling : {'least', 'full'}
        In full every stage costs its time, and the longest tail all of it.

    Source
    ------
    docs/derivations/step.md.
    """
    lower, upper = bottleneck_s
    times_s, in_rounds = stages.times_s, problem.chunks > 1
    if filling == "full":
        return plain_seconds(stages)
    behind_s = np.zeros_like(times_s) if in_rounds else 2.0 * times_s - upper
    part = spared_part(problem, stages, bottleneck_s, filling)
    spared_s = stages.spared * part * lower / stages.family.micro_batch if spares else 0.0
    later_s = stages.tail_s - tail_s
    first_s = (0.0 if by_longest_tail else later_s) - spared_s + np.zeros_like(times_s)
    return np.array([times_s, behind_s, first_s, lower + later_s])


def spared_part(
    problem: Problem, stages: PricedStages, bottleneck_s: tuple[float, float], filling: Filling
) -> np.ndarray:
    """Return by the first stage of which part of a short last micro-batch its time is spared at most."""
    if filling == "full":  # it takes its part of the time
        return np.zeros_like(stages.times_s)
    lower, upper = bottleneck_s
    if problem.chunks == 1:
        return np.maximum(0.0, 1.0 - stages.backward_s / upper)
    is_pace = (stages.times_s >= lower * (1 - 1e-12)) & (stages.times_s <= upper * (1 + 1e-12))
    longest = float((stages.early_s[is_pace] / stages.times_s[is_pace]).max(initial=0.0))
    return np.maximum(0.0, longest - stages.backward_s / upper) / problem.chunks


def path_among(
    problem: Problem,
    stages: PricedStages,
    option_cost: np.ndarray,
    seconds: np.ndarray,
    rate: float,
    bottleneck_s: tuple[float, float],
    longest_tail_s: float,
    *,
    may_hide: bool = False,
    by_longest_tail: bool = False,
    least_tail_s: float = 0.0,
) -> tuple[float, Path] | None:
    """Return the path over some stages that costs least, no stage or tail above its limit.

    Parameters
    ----------
    problem : Problem
    stages : PricedStages
    option_cost : ndarray, shape (options,)
    seconds : ndarray, shape (4, stages)
        As :func:`box_seconds`.
    rate : float
        Cost of a second.
    bottleneck_s : (lower, upper)
        A stage takes at most `upper`; the last one of at least `lower` counts as the slowest.
    longest_tail_s : float
    may_hide : bool
        Whether stages behind the slowest may be hidden by it, but gain nothing.
    by_longest_tail, least_tail_s : bool, float
        Whether a tail of at least so many seconds counts, wherever it is; stages before it cost no backward.
    """
    if not len(stages.types):
        return None
    best, depth, options, stops = _shortest_path()(
        stages.types,
        stages.options,
        stages.times_s,
        stages.tail_s,
        stages.rooms,
        stages.units,
        seconds,
        option_cost.astype(float),
        stages.limit,
        rate,
        bottleneck_s[0] * (1 - 1e-12),
        bottleneck_s[1] * (1 + 1e-12),
        longest_tail_s * (1 + 1e-12),
        stages.deepest,
        problem.bands,
        problem.lengths,
        stages.hidden_s,
        stages.early_s,
        np.array(_WEIGHTS if may_hide else _WEIGHTS[:1]),
        least_tail_s * (1 - 1e-12),
        by_longest_tail,
    )
    if depth == 0:
        return None
    return float(best), (tuple(options.tolist()), tuple(stops.tolist()))


@lru_cache(maxsize=1)
def _shortest_path() -> Callable[..., Any]:
    """Return the loops, compiled when they are first needed."""
    from foreshard.planner.solver.path_kernel import shortest_path

    return compiled(shortest_path)
