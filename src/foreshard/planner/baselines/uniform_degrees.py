"""What the published planners share: uniform degrees, cuts of a chain, the best of what was tried."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.solver.hops import least_slowest, shortest_cuts
from foreshard.planner.solver.problem import (
    Arrangement,
    PipelineRate,
    Problem,
    StageSpan,
    Template,
    faults,
    pipeline_rate,
    rounds_of,
    spread_factor,
    step_seconds,
    tail_seconds,
    takes_of,
    template_faults,
)
from foreshard.planner.solver.shares import balance
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget

_BISECTIONS = 40
"""Of the step time in which pipelines process the batch: to a part in 10^12."""
_SLACK = 0.25
"""Part by which an arrangement may be slower than the best and be looked at: prices leave parts out."""
_STRETCH = (1.0, 1.02, 1.08)
"""Factors by which the slowest stage may exceed the least possible, to shorten the filling by more."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class UniformDegrees:
    """Degrees of a stage on whatever device: options that agree in them trade memory against time."""

    devices: int
    micro_batch: int
    grain: int


Step = tuple[UniformDegrees, int]
"""A stage before it has layers: its shape and the kind of its devices."""


@dataclass(slots=True, kw_only=True)
class DegreeGrid:
    """The options of a problem by shape and kind that run anything; none on devices of several kinds."""

    problem: Problem
    options: dict[Step, np.ndarray] = field(init=False)
    _costs: dict[tuple[Step, int], tuple[np.ndarray, np.ndarray]] = field(init=False, default_factory=dict)
    _fastest: dict[tuple[tuple[Step, ...], int], np.ndarray] = field(init=False, default_factory=dict)
    _paces: dict[Step, float] = field(init=False, default_factory=dict)
    _cut: dict[tuple[tuple[Step, ...], float], Template | None] = field(init=False, default_factory=dict)
    _kinds: dict[UniformDegrees, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the options."""
        found: dict[Step, list[int]] = {}
        for option, takes in enumerate(self.problem.takes):
            used = np.flatnonzero(takes)
            if len(used) == 1 and takes[used[0]] <= self.problem.counts[used[0]]:
                shape = UniformDegrees(
                    devices=int(takes[used[0]]),
                    micro_batch=int(self.problem.micro_batch[option]),
                    grain=int(self.problem.grain[option]),
                )
                found.setdefault((shape, int(used[0])), []).append(option)
        self.options = {key: np.array(value) for key, value in found.items()}
        runs = [step for step in self.options if np.isfinite(self.layer_seconds(step))]
        self.options = {step: self.options[step] for step in runs}
        for step in sorted(self.options, key=self.layer_seconds):
            self._kinds.setdefault(step[0], []).append(step[1])

    def shapes(self) -> list[UniformDegrees]:
        """Return every shape."""
        return sorted({shape for shape, _ in self.options})

    def by_micro_batch(self) -> dict[int, list[Step]]:
        """Return the steps of each micro-batch, both in order."""
        found: dict[int, list[Step]] = {}
        for step in sorted(self.options, key=lambda step: (step[0].micro_batch, step)):
            found.setdefault(step[0].micro_batch, []).append(step)
        return found

    def kinds(self, shape: UniformDegrees) -> list[int]:
        """Return the kinds of device that have a shape, the fastest first."""
        return self._kinds.get(shape, [])

    def stages(self, step: Step) -> int:
        """Return how many stages the devices of a kind make."""
        return self.problem.counts[step[1]] // step[0].devices

    def layer_seconds(self, step: Step) -> float:
        """Return the least seconds per layer of any stage, a bound on all."""
        if step not in self._paces:
            seconds = np.append(self.seconds(step, 1), np.inf)[self.problem.bands]
            self._paces[step] = float((seconds / np.arange(1, self.problem.num_layers + 1)[None, :]).min())
        return self._paces[step]

    def cost(self, step: Step, need: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds by type with room for `need` micro-batches, and the option that takes them."""
        need = min(need, rounds_of(self.problem, step[0].micro_batch))
        if (step, need) not in self._costs:
            own = self.options[step]
            time_s = np.where(self.problem.max_in_flight[own] >= need, self.problem.time_s[own], np.inf)
            self._costs[step, need] = (time_s.min(0), own[time_s.argmin(0)])
        return self._costs[step, need]

    def seconds(self, step: Step, need: int) -> np.ndarray:
        """Return seconds by type with room for `need` micro-batches."""
        return self.cost(step, need)[0]

    def fastest(self, steps: tuple[Step, ...], need: int) -> np.ndarray:
        """Return least seconds of stages [start, stop) in any of some steps, worked out once.

        The shape is (num_layers + 1, num_layers + 1), with room for `need` micro-batches; inf where it lacks.
        """
        if (steps, need) not in self._fastest:
            seconds = np.min([self.seconds(step, need) for step in steps], axis=0)
            self._fastest[steps, need] = np.append(seconds, np.inf)[self.problem.types]
        return self._fastest[steps, need]

    def least_seconds(self, shape: UniformDegrees) -> float:
        """Return a bound on the step of any plan of one shape: the work over all stages at once."""
        rate = sum(
            self.stages((shape, kind)) / self.layer_seconds((shape, kind)) for kind in self.kinds(shape)
        )
        work = self.problem.global_batch / shape.micro_batch * self.problem.num_layers
        return work / rate if rate > 0 else np.inf

    def template(self, steps: Sequence[Step], cuts: Sequence[int]) -> Template | None:
        """Return the pipeline with given cuts, each stage in its fastest option that fits; or None."""
        parts = []
        for i, (step, start, stop) in enumerate(zip(steps, cuts[:-1], cuts[1:], strict=True)):
            seconds, option = self.cost(step, len(steps) - i)
            type_ = self.problem.types[start, stop]
            if type_ < 0 or not np.isfinite(seconds[type_]):
                return None
            parts.append(StageSpan(option=int(option[type_]), start=int(start), stop=int(stop)))
        made = tuple(parts)
        return None if template_faults(self.problem, made) else made

    def even(self, steps: Sequence[Step]) -> Template | None:
        """Return the pipeline with as many layers on every stage."""
        cuts = even_cuts(self.problem, len(steps))
        return None if cuts is None else self.template(steps, cuts)

    def cut(self, steps: tuple[Step, ...], passes: float) -> Template | None:
        """Return the pipeline cut for least time in so many passes; inf: for the least slowest stage."""
        key = (steps, passes)
        if key not in self._cut:
            cuts = best_chain([self._matrix(steps, i) for i in range(len(steps))], passes)
            self._cut[key] = None if cuts is None else self.template(steps, cuts)
        return self._cut[key]

    def _matrix(self, steps: tuple[Step, ...], i: int) -> np.ndarray:
        seconds = self.seconds(steps[i], len(steps) - i)
        hop = 0.0
        if i:
            hop = float(self.problem.hop_s[np.ix_(self.options[steps[i - 1]], self.options[steps[i]])].min())
        return np.append(seconds + hop, np.inf)[self.problem.types]


def even_cuts(problem: Problem, num_stages: int) -> list[int] | None:
    """Return cuts into stages of equal numbers of layers, the first stages one more where they do not divide.

    The first and the last place of the chain go with their neighbours when they are unlike all others: that
    is where embedding and head are, which frameworks do not count.
    """
    size = problem.num_layers
    alone = [int(problem.types[i, i + 1]) for i in range(size)]
    often = max(alone.count(one) for one in set(alone))
    first = int(often > 1 and alone.count(alone[0]) == 1)
    last = int(often > 1 and alone.count(alone[-1]) == 1)
    inner = size - first - last
    if inner < num_stages:
        return None
    sizes = [inner // num_stages + (i < inner % num_stages) for i in range(num_stages)]
    sizes[0] += first
    sizes[-1] += last
    return [0, *np.cumsum(sizes).tolist()]


def best_chain(costs: Sequence[np.ndarray], passes: float) -> list[int] | None:
    """Return the cuts that make `total + (passes - 1) * slowest` least.

    Parameters
    ----------
    costs : sequence of ndarray, shape (num_layers + 1, num_layers + 1), seconds
        Of the stage [start, stop), one array per stage; inf where it does not fit.
    passes : float
        With inf only the slowest stage counts.
    """
    lowest = least_slowest(costs)
    if not np.isfinite(lowest):
        return None
    if np.isinf(passes):
        return shortest_cuts(costs, lowest)[0]

    def seconds(made: tuple[list[int], float]) -> float:
        cuts, total = made
        slowest = max(cost[a, b] for cost, a, b in zip(costs, cuts[:-1], cuts[1:], strict=True))
        return float(total + (passes - 1.0) * slowest)

    return min((shortest_cuts(costs, lowest * stretch) for stretch in _STRETCH), key=seconds)[0]


@dataclass(slots=True, kw_only=True)
class BestTried:
    """The best arrangement of those offered, and the best for each number of pipelines.

    Attributes
    ----------
    by_number : dict of int to (seconds, Arrangement)
    budget : TimeBudget
        After it nothing more is looked at.
    """

    problem: Problem
    budget: TimeBudget = ENDLESS
    arrangement: Arrangement | None = None
    seconds: float = np.inf
    by_number: dict[int, tuple[float, Arrangement]] = field(default_factory=dict)
    _known: dict[Template, tuple[PipelineRate, np.ndarray]] = field(default_factory=dict)
    _tails: dict[tuple[Template, int], float] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """Return the step time from which on nothing need be looked at."""
        return self.seconds * (1.0 + _SLACK)

    def offer(self, mix: Sequence[tuple[Template, int]], *, even: bool) -> None:
        """Keep pipelines, each as often as stated, if with even or with balanced shares they are faster.

        Even shares differ by at most a sample, the larger ones first.
        """
        mix = [(one, count) for one, count in mix if count > 0]
        total = sum(count for _, count in mix)
        if not 0 < total <= self.problem.global_batch:
            return
        factor = spread_factor(self.problem, sum(count * self.pace_of(one)[1].sum() for one, count in mix))
        known = self.by_number.get(total, (np.inf, None))[0]
        limit_s = min(self.limit_s, known) * (1.0 - 1e-9) / factor
        seconds = self._even_seconds(mix, total) if even else self._balanced_seconds(mix, total, limit_s)
        if not seconds < limit_s:
            return
        made = self._made([one for one, count in mix for _ in range(count)], even=even)
        if made is not None and not faults(self.problem, made):
            exact = step_seconds(self.problem, made)
            self.by_number[total] = (exact, made)
            if exact < self.seconds:
                self.arrangement, self.seconds = made, exact

    def pace_of(self, template: Template) -> tuple[PipelineRate, np.ndarray]:
        """Return how a pipeline goes, and the devices of each kind it takes; worked out once."""
        if template not in self._known:
            self._known[template] = (pipeline_rate(self.problem, template), takes_of(self.problem, template))
        return self._known[template]

    def _tail_s(self, template: Template, total: int) -> float:
        """Return the tail of a pipeline among so many, worked out once for numbers that are priced alike."""
        key = template, bisect_right(self.problem.copies, total)
        if key not in self._tails:
            self._tails[key] = tail_seconds(self.problem, template, total)
        return self._tails[key]

    def _even_seconds(self, mix: Sequence[tuple[Template, int]], total: int) -> float:
        share, larger = divmod(self.problem.global_batch, total)
        ends, before = [], 0
        for one, count in mix:
            most = share + (before < larger)
            ends.append(self.pace_of(one)[0].seconds(most) + self._tail_s(one, total))
            before += count
        return max(ends)

    def _balanced_seconds(
        self, mix: Sequence[tuple[Template, int]], total: int, limit_s: float = np.inf
    ) -> float:
        """Return the time in which the pipelines end the batch together; infinite beyond the limit."""
        paces = [(self.pace_of(one)[0], self._tail_s(one, total), count) for one, count in mix]

        def is_enough(seconds: float) -> bool:
            taken = sum(count * max(1, pace.samples(seconds - tail)) for pace, tail, count in paces)
            return taken >= self.problem.global_batch

        low, high = 0.0, max(pace.seconds(self.problem.global_batch) + tail for pace, tail, _ in paces)
        if limit_s < high and not is_enough(limit_s):
            return np.inf
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return max(high, *(pace.seconds(1) + tail for pace, tail, _ in paces))

    def _made(self, templates: list[Template], *, even: bool) -> Arrangement | None:
        copies, batch = len(templates), self.problem.global_batch
        shares: tuple[int, ...] | None = tuple(batch // copies + (i < batch % copies) for i in range(copies))
        if not even:
            tails = [self._tail_s(one, copies) for one in templates]
            shares = balance([self.pace_of(one)[0] for one in templates], tails, batch)
        return None if shares is None else Arrangement(templates=tuple(templates), shares=shares)


def promising(grid: DegreeGrid, best: BestTried) -> Iterator[UniformDegrees]:
    """Yield the shapes whose bound is below the best so far, the most promising first."""
    for shape in sorted(grid.shapes(), key=lambda one: (grid.least_seconds(one), one)):
        if best.budget.is_over:
            return
        if grid.least_seconds(shape) < best.limit_s:
            yield shape


def numbers(most: int, growth: float = 1.125) -> list[int]:
    """Return numbers of pipelines to try: each by a factor more than the last, and by one at least."""
    found, last = [], 0
    while last < most:
        last = max(last + 1, int(last * growth))
        found.append(min(last, most))
    return found
