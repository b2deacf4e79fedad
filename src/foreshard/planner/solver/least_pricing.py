"""Boxes of pipelines by the least that their stages take, whichever is the slowest: bounds that hold.

A pipeline of micro-batch m with slowest stage b and tail w processes at most m * ((T - w - F) / b + 1)
samples in T seconds. F adds up over stages: p for each one up to the slowest, 2 p - b for each one behind it
(docs/derivations/step.md). A box of limits of b and w has a shortest path that says which stages lie behind.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from foreshard.planner.solver.pricing import (
    Path,
    PipelineBox,
    PricedStages,
    Pricing,
    path_among,
    stages_of,
)
from foreshard.planner.solver.problem import PipelineFamily, Problem, hidden_in_rounds, wrapped_in_rounds

_WIDE = 1.001
"""Ratio of limits of the slowest stage up to which a box is not cut at their mean as well."""
_WEIGHTS = (1.0, 0.5, 0.0)
"""Weights of the seconds behind the slowest stage: one of them says most of what it does not hide."""


class LeastTimes(NamedTuple):
    """A pipeline by its stages: see `LeastStages`; its extremes, and what its devices cost.

    spared : samples of a short last micro-batch, at most
    wrapped_s : of the first stage
    """

    times_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    early_s: tuple[float, ...]
    tails_s: tuple[float, ...]
    slowest_s: float
    tail_s: float
    first_backward_s: float
    spared: float
    wrapped_s: float
    cost: float

    def lost(self, rate: float, bottleneck_s: tuple[float, float], tail_s: float, chunks: int) -> float:
        """Return the samples that it loses as a box counts them, its first pass included.

        In a box of its own (its slowest stage and longest tail as limits) that is all that it loses.
        """
        lower, upper = bottleneck_s
        in_rounds = chunks > 1
        if len(self.times_s) == 1:
            return rate * (lower + self.tail_s - tail_s)
        at = max(i for i, time_s in enumerate(self.times_s) if time_s >= lower * (1 - 1e-12))
        before_s = sum(self.times_s[: at + 1])
        behind_s = 0.0 if in_rounds else sum(2.0 * time_s - upper for time_s in self.times_s[at + 1 :])
        half_s = sum(self.times_s[at + 1 :]) - self.hidden_s[at] * (len(self.times_s) - 1 - at)
        seconds = before_s + max(0.0, half_s, behind_s)
        first = self.first_of(min(tail_s, self.tail_s))
        by_tail_s = (seconds if first <= at else before_s + behind_s) - sum(self.early_s[:first])
        seconds += self.tails_s[0] - tail_s - self.wrapped_s
        if not in_rounds:
            seconds = max(seconds, by_tail_s)
        longest = self.early_s[at] / self.times_s[at] if in_rounds else 1.0
        part = max(0.0, longest - self.first_backward_s / upper) / chunks
        return rate * seconds - self.spared * part

    def first_of(self, tail_s: float) -> int:
        """Return the first stage with a tail so long."""
        return next(i for i, own_s in enumerate(self.tails_s) if own_s >= tail_s * (1 - 1e-12))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastStages(PricedStages):
    """Stages with what is known of their parts, arrays of shape (stages,).

    early_s : most that a backward takes with its messages
    backward_s : least that it takes without
    hidden_s : most that the stage does beside the longer of both
    spared : samples of a last micro-batch that is short by a grain
    wrapped_s : what a pipeline may not wait for of its first stage while it fills
    quickest_s : the slowest stage of no pipeline is quicker
    """

    early_s: np.ndarray
    backward_s: np.ndarray
    hidden_s: np.ndarray
    spared: np.ndarray
    wrapped_s: np.ndarray
    quickest_s: float


@dataclass(slots=True, kw_only=True)
class LeastPricing(Pricing):
    """Boxes whose bounds hold for every pipeline, however unequal its stages are."""

    @property
    def is_by_pace(self) -> bool:
        """Return whether the tails of stages behind the slowest count."""
        return self.problem.chunks == 1

    def stages_with(self, family: PipelineFamily, grain: int | None = None) -> LeastStages:
        """Return the stages that pipelines of a family choose from; none has quicker parts than another."""
        problem = self.problem
        table = problem.far_s if family.kind is None else problem.time_s
        forward_s = np.zeros_like(table) if problem.forward_s is None else problem.forward_s
        parts = early_of(problem, table, slice(None)), forward_s, first_backward_of(problem)
        stages = stages_of(problem, self.tails[family], family, grain, parts=parts)
        at = stages.options, stages.types
        return LeastStages(
            **{each.name: getattr(stages, each.name) for each in fields(stages)},
            early_s=early_of(problem, stages.times_s, at),
            backward_s=first_backward_of(problem)[at],
            hidden_s=hidden_of(problem, stages.times_s, at),
            spared=spared_of(problem, stages.options),
            wrapped_s=wrapped_in_rounds(problem, stages.times_s, at),
            quickest_s=_quickest(problem, stages.types, stages.times_s),
        )

    def _seconds(self, box: PipelineBox, net_samples: float) -> float:
        """Return when a box's own pipeline has processed that, fractions of a grain included."""
        own = self._least_of(box.family, box.path)
        size = box.family.micro_batch
        alone_s = own.slowest_s, own.slowest_s
        lost = own.lost(size / own.slowest_s, alone_s, own.tail_s, self.problem.chunks)
        passes = max((net_samples + own.cost + lost) / size - 1.0, 0.0)
        return own.tail_s + own.slowest_s * passes

    def parts(self, box: PipelineBox, net_samples: float) -> list[PipelineBox]:
        """Return the parts of a box below and above its own pipeline, by what loosens the bound more.

        A box whose tail alone outlasts the time may not come apart: its bound is then as tight as it gets.
        A rough box has one part, itself with its cost.
        """
        del self.boxes[id(box)]
        if box.is_rough:
            made = self._add(box.family, box.bottleneck_s, box.tail_s)
            return [] if made is None else [made]
        lower, upper = box.bottleneck_s
        least, most = box.tail_s
        own = self._least_of(box.family, box.path)
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

    def _slack(self, box: PipelineBox, own: LeastTimes, samples: float) -> tuple[float, float]:
        """Return the seconds by which a box is too quick for a pipeline, by its stages and by its tail."""
        size = box.family.micro_batch
        alone_s = own.slowest_s, own.slowest_s

        def seconds(bottleneck_s: tuple[float, float], tail_s: float) -> float:
            lost = own.lost(size / bottleneck_s[0], bottleneck_s, tail_s, self.problem.chunks)
            return tail_s + bottleneck_s[0] * ((samples + lost) / size - 1.0)

        real_s = seconds(alone_s, own.tail_s)
        by_tail = real_s - seconds(alone_s, box.tail_s[0])
        return real_s - seconds(box.bottleneck_s, own.tail_s), by_tail

    def apart(self, box: PipelineBox, path: Path, seconds: float) -> list[PipelineBox]:
        """Return two parts of a box, one of which says more of a pipeline; none where the box says all."""
        own = self._least_of(box.family, path)
        lower, upper = box.bottleneck_s
        reach = box.family.micro_batch * ((seconds - box.tail_s[0]) / lower + 1.0)
        rate = box.family.micro_batch / lower
        lost = own.lost(rate, box.bottleneck_s, box.tail_s[0], self.problem.chunks)
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
        own, size = self._least_of(box.family, box.path), box.family.micro_batch

        def samples(bottleneck_s: tuple[float, float], tail_s: float) -> float:
            rate = size / bottleneck_s[0]
            lost = own.lost(rate, bottleneck_s, tail_s, self.problem.chunks)
            return rate * (seconds - tail_s) + size - lost

        return samples(box.bottleneck_s, box.tail_s[0]) - samples((own.slowest_s,) * 2, own.tail_s)

    def _least_of(self, family: PipelineFamily, path: Path) -> LeastTimes:
        """Return how a pipeline goes; boxes often share theirs."""
        found: LeastTimes | None = self._times.get((family, path))
        if found is None:
            options = path[0]
            stages, times = self._stages_on(family, path)
            tails, at = self.tails[family], tuple(np.array(stages).T)
            early, hidden = (of(self.problem, np.array(times), at) for of in (early_of, hidden_of))
            backward = self.problem.backward_s
            found = self._times[family, path] = LeastTimes(
                times_s=tuple(times),
                hidden_s=tuple(hidden.tolist()),
                early_s=tuple(early.tolist()),
                tails_s=tuple(float(tails[stage]) for stage in stages),
                slowest_s=max(times),
                tail_s=max(float(tails[stage]) for stage in stages),
                first_backward_s=0.0 if backward is None else float(backward[stages[0]]),
                spared=float(spared_of(self.problem, options[0])),
                wrapped_s=float(wrapped_in_rounds(self.problem, np.array(times), at)[0]),
                cost=sum(float(self.option_cost[option]) for option in options),
            )
        return found

    def _begin(
        self, family: PipelineFamily, bottleneck: tuple[float, float], tail: tuple[float, float]
    ) -> PipelineBox | None:
        """Keep a first box by the least cost of its devices, as `UnfilledPricing` has it.

        Most of the first boxes never hold the bound down: their exact search is left until they do. No tail
        is shorter than `tail`, that of the first stage included.
        """
        stages = self._stages(family)
        limits = bottleneck[1], tail[1]
        solution = path_among(self.problem, stages, self.option_cost, 0.0, limits)
        self.solved += 1
        if solution is None:
            return None
        cost, path = solution
        box = PipelineBox(
            family=family, bottleneck_s=bottleneck, tail_s=tail, cost=cost, path=path, is_rough=True
        )
        self.boxes[id(box)] = box
        return box

    def _add(
        self, family: PipelineFamily, bottleneck: tuple[float, float], tail: tuple[float, float]
    ) -> PipelineBox | None:
        """Keep the box of these limits unless it is empty."""
        solution = self._path(family, bottleneck, tail, by_longest_tail=False)
        if solution is None:
            return None
        (cost, path), longest = solution, False
        own = self._least_of(family, path)
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
        paced = self._paced(family, stages, bottleneck, tail[0], by_longest_tail=by_longest_tail, spares=True)
        rate = family.micro_batch / bottleneck[0]
        return path_among(self.problem, stages, self.option_cost, rate, (bottleneck[1], tail[1]), paced)

    def paced_labels(self, box: PipelineBox, stages: PricedStages) -> tuple[Any, ...]:
        """Return what `kernels.labels.paced_labels` asks for beside what the plain loops do."""
        assert isinstance(stages, LeastStages)
        upper = box.bottleneck_s[1]
        paced = self._paced(
            box.family,
            stages,
            box.bottleneck_s,
            box.tail_s[0],
            by_longest_tail=box.by_longest_tail,
            spares=False,
        )
        return *paced, upper * (1.0 - spared_part(self.problem, stages, box.bottleneck_s))

    def _paced(
        self,
        family: PipelineFamily,
        stages: PricedStages,
        bottleneck_s: tuple[float, float],
        tail_s: float,
        *,
        by_longest_tail: bool,
        spares: bool,
    ) -> tuple[Any, ...]:
        """Return what `kernels.paths.paced_path` asks for beside what the plain loops do."""
        assert isinstance(stages, LeastStages)
        return (
            box_seconds(
                self.problem, stages, bottleneck_s, tail_s, by_longest_tail=by_longest_tail, spares=spares
            ),
            bottleneck_s[0] * (1 - 1e-12),
            stages.hidden_s,
            stages.early_s,
            np.array(_WEIGHTS if self.is_by_pace else _WEIGHTS[1:]),
            tail_s * (1 - 1e-12),
            by_longest_tail,
        )

    def _is_last(self, family: PipelineFamily, lower_s: float, made: PipelineBox | None) -> bool:
        """Return whether no pipeline of a family has a quicker slowest stage than a box had."""
        stages = self._stages(family)
        assert isinstance(stages, LeastStages)
        return lower_s < stages.quickest_s * (1 - 1e-9)


def _quickest(problem: Problem, types: np.ndarray, times_s: np.ndarray) -> float:
    """Return the least time of the slowest stage over all cuts, by the quickest stage of each type."""
    least = np.full(int(problem.types.max()) + 2, np.inf)
    np.minimum.at(least, types, times_s)
    by_cut, after = least[problem.types], np.full(problem.num_layers + 1, np.inf)
    after[problem.num_layers] = 0.0
    for start in range(problem.num_layers - 1, -1, -1):
        after[start] = np.maximum(by_cut[start], after).min()
    return float(after[0])


def early_of(problem: Problem, times_s: np.ndarray, at: Any) -> np.ndarray:
    """Return the most that backwards take of the times of some stages, with messages: all but the forward."""
    return times_s if problem.forward_s is None else times_s - problem.forward_s[at]


def hidden_of(problem: Problem, times_s: np.ndarray, at: Any) -> np.ndarray:
    """Return the most that some stages, the slowest ones, do while one behind them fills and drains.

    In chunks two forwards are ahead for each stage behind; messages beside work may take all else.
    """
    in_rounds = problem.chunks > 1
    if problem.forward_s is None or problem.backward_s is None:
        return times_s if in_rounds else 0.5 * times_s
    forward_s, backward_s = problem.forward_s[at], problem.backward_s[at]
    if in_rounds:
        return np.minimum(times_s, hidden_in_rounds(problem, times_s, forward_s, backward_s))
    return np.minimum(0.5 * times_s, times_s - np.maximum(forward_s, backward_s))


def first_backward_of(problem: Problem) -> np.ndarray:
    """Return the least that backwards take, shape (options, types)."""
    return np.zeros_like(problem.time_s) if problem.backward_s is None else problem.backward_s


def spared_of(problem: Problem, options: Any) -> np.ndarray:
    """Return the most samples that a micro-batch short by a grain has, none where it cannot be short."""
    return np.maximum(problem.chunks * problem.micro_batch[options] - problem.grain[options], 0)


def box_seconds(
    problem: Problem,
    stages: LeastStages,
    bottleneck_s: tuple[float, float],
    tail_s: float,
    *,
    by_longest_tail: bool,
    spares: bool,
) -> np.ndarray:
    """Return the seconds that stages lose in a box: before the slowest, behind it, as the first, alone.

    Parameters
    ----------
    problem : Problem
    stages : LeastStages
    bottleneck_s : (lower, upper)
        Limits of the slowest stage.
    tail_s : float
        Least longest tail of the box.
    by_longest_tail : bool
        Whether that tail counts, instead of that of the first stage.
    spares : bool
        Whether a short last micro-batch counts for what it spares at most.

    Source
    ------
    docs/derivations/step.md.
    """
    lower, upper = bottleneck_s
    times_s, in_rounds = stages.times_s, problem.chunks > 1
    behind_s = 2.0 * times_s - (2.0 * upper if in_rounds else upper)
    part = spared_part(problem, stages, bottleneck_s)
    spared_s = stages.spared * part * lower / stages.family.micro_batch if spares else 0.0
    later_s = stages.tail_s - tail_s
    first_s = (0.0 if by_longest_tail else later_s) - spared_s - stages.wrapped_s
    return np.array([times_s, behind_s, first_s, lower + later_s])


def spared_part(problem: Problem, stages: LeastStages, bottleneck_s: tuple[float, float]) -> np.ndarray:
    """Return by the first stage of which part of a short last micro-batch its time is spared at most."""
    lower, upper = bottleneck_s
    if problem.chunks == 1:
        return np.maximum(0.0, 1.0 - stages.backward_s / upper)
    is_pace = (stages.times_s >= lower * (1 - 1e-12)) & (stages.times_s <= upper * (1 + 1e-12))
    longest = float((stages.early_s[is_pace] / stages.times_s[is_pace]).max(initial=0.0))
    return np.maximum(0.0, longest - stages.backward_s / upper) / problem.chunks
