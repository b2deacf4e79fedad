"""All pipelines that a plan of some seconds can consist of, the best of each demand for devices.

At good duals hardly any pipeline has a negative reduced cost. The reduced costs of the pipelines of a plan
that processes the batch in time sum to no more than zero, so few pipelines are left that whole numbers of
them can be tried out (`integer_combination`): where none processes the batch, no plan takes that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreshard.compiled import allocating_loops
from foreshard.planner.solver.integer_combination import firsts
from foreshard.planner.solver.pricing import (
    Path,
    PipelineBox,
    PricedStages,
    Pricing,
    same_limits,
    template_of,
)
from foreshard.planner.solver.problem import PipelineFamily, Problem, Template
from foreshard.planner.solver.time_budget import TimeBudget

_SLACK = 0.5
"""Samples, by chunk, that the bound of a box may have of slack on its own pipeline when its pipelines are
listed."""
_NARROW = 1.01
"""Ratio of a box's longest to shortest slowest stage from which on it is listed whatever its slack."""
_LABELS = 400_000
"""Labels of the path search: 20 MB; where they do not do, an enumeration takes longer than it is worth."""
_DEMANDS = 8_000_000
"""Most demands for devices that are distinguished: 32 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoices:
    """Stages of a family whose ranks round up to `grain` samples at most, for the loops of `kernels.labels`.

    classes : of equal demand, by stage
    class_takes : devices of each class, shape (classes, kinds)
    most : devices of each kind that a pipeline may take
    """

    stages: PricedStages
    classes: np.ndarray
    class_takes: np.ndarray
    most: np.ndarray
    grain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxColumns:
    """Pipelines of a box, the best of each demand.

    codes : the demands
    samples : no fewer than each processes
    options, stops : of their stages
    """

    box: PipelineBox
    codes: np.ndarray
    samples: np.ndarray
    options: np.ndarray
    stops: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTable:
    """Of each demand the pipeline that may process most, arrays of shape (demands,).

    reduced_cost : dual price of its devices and of a pipeline, less its samples
    at, row : which box it is listed for, and where
    """

    codes: np.ndarray
    samples: np.ndarray
    reduced_cost: np.ndarray
    at: np.ndarray
    row: np.ndarray


@dataclass(slots=True, kw_only=True)
class ColumnEnumeration:
    """Pipelines that may be part of a plan of `seconds`, with upper bounds on the samples they process.

    Parameters
    ----------
    pricing : Pricing
        Its duals decide how many pipelines there are to list.
    seconds : float
    pipeline_dual : float, samples
        The reduced costs of the pipelines of a plan that processes the batch in `seconds` sum to no more
        than zero.
    num_pipelines : int
        At most, in a plan.
    memory : LabelMemory
    budget : TimeBudget
    """

    pricing: Pricing
    seconds: float
    pipeline_dual: float
    num_pipelines: int
    memory: LabelMemory
    budget: TimeBudget
    listed: list[BoxColumns] = field(default_factory=list)
    least_reduced_cost: float = 0.0

    def reduced_cost(self, codes: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return the reduced cost of pipelines of some demands and samples."""
        return self.pipeline_dual + self.memory.demands(codes) @ self.pricing.duals - samples

    @property
    def allowance(self) -> float:
        """Return the highest reduced cost in a plan: what all its other pipelines can make up for."""
        return (self.num_pipelines - 1) * -self.least_reduced_cost

    def list_negative(self) -> bool:
        """List the pipelines of no positive reduced cost: a plan has one of them at least.

        Returns False when there are too many or the time is up.
        """
        if not self.pricing.boxes:
            self.pricing.start()
        self.least_reduced_cost, self.listed = 0.0, []
        complete = self._list_boxes(list(self.pricing.boxes.values()))
        least = (float(self.reduced_cost(columns.codes, columns.samples).min()) for columns in self.listed)
        self.least_reduced_cost = min(0.0, min(least, default=0.0))
        return complete

    def list_all(self) -> bool:
        """List all that a plan can have beside the pipelines of least reduced cost; False as above."""
        if self.allowance <= 0.0 or not self.listed:
            return True
        self.listed = []
        return self._list_boxes(list(self.pricing.boxes.values()))

    def refine(self, at: int, row: int) -> bool:
        """List the parts of a box in its place, which say more of a pipeline; False when none do."""
        box = self.listed[at].box
        parts = self.pricing.apart(box, self.path(at, row), self.seconds)
        if not parts or any(same_limits(part, box) for part in parts):
            return False
        self.listed = [columns for columns in self.listed if columns.box is not box]
        return self._list_boxes(parts, split=False)

    def _list_boxes(self, boxes: list[PipelineBox], *, split: bool = True) -> bool:
        """List the boxes that may hold pipelines of a plan, after splitting those with slack."""
        pending = [box for box in boxes if self._least_cost(box) <= self.allowance + 1e-9]
        done = 0
        while pending:
            box = pending.pop()
            done += 1
            if done % 16 == 0 and self.budget.is_over:
                return False
            if box.is_rough or (split and not self._is_tight(box)):
                parts = self.pricing.parts(box, self.pipeline_dual)
                if box.is_rough or not any(same_limits(part, box) for part in parts):
                    pending += [part for part in parts if self._least_cost(part) <= self.allowance + 1e-9]
                    continue
                box = next(part for part in parts if same_limits(part, box))
            found = self._columns_of(box)
            if found is None:
                return False
            self.listed += found
        return True

    def _reach(self, box: PipelineBox) -> float:
        """Return the samples that a pipeline of a box processes at most, if it loses none to filling."""
        return box.family.micro_batch * ((self.seconds - box.tail_s[0]) / box.bottleneck_s[0] + 1.0)

    def _least_cost(self, box: PipelineBox) -> float:
        """Return a reduced cost that no pipeline of a box is below."""
        return self.pipeline_dual + box.cost - self._reach(box)

    def _is_tight(self, box: PipelineBox) -> bool:
        least, most = box.bottleneck_s
        rate = box.family.micro_batch / least
        narrow = most < least * _NARROW and rate * (box.tail_s[1] - box.tail_s[0]) < 1.0
        return narrow or self.pricing.excess(box, self.seconds) < _SLACK * self.pricing.problem.chunks

    def _columns_of(self, box: PipelineBox) -> list[BoxColumns] | None:
        """Return the pipelines of a box that may be in a plan, by grain; None when there are too many."""
        problem, memory = self.pricing.problem, self.memory
        loops = allocating_loops("foreshard.planner.solver.kernels.labels")
        found = []
        for choices in memory.choices(self.pricing, box.family):
            stages = choices.stages
            paced = self.pricing.paced_labels(box, stages)
            number, codes, samples, options, stops = (loops.paced_labels if paced else loops.plain_labels)(
                stages.types,
                stages.options,
                stages.times_s,
                stages.tail_s,
                stages.rooms,
                choices.classes,
                choices.class_takes,
                self.pricing.duals,
                memory.counts,
                choices.most,
                box.family.micro_batch / box.bottleneck_s[0],
                box.bottleneck_s[1] * (1 + 1e-12),
                box.tail_s[1] * (1 + 1e-12),
                stages.deepest,
                problem.bands,
                problem.lengths,
                self._reach(box),
                self.allowance - self.pipeline_dual + 1e-9,
                float(box.family.micro_batch),
                float(choices.grain),
                float(problem.global_batch),
                float(box.family.micro_batch * problem.chunks),
                problem.chunks > 1,
                memory.slot,
                memory.pool,
                *paced,
            )
            self.pricing.solved += 1
            if number < 0:
                return None
            if number:
                found.append(BoxColumns(box=box, codes=codes, samples=samples, options=options, stops=stops))
        return found

    def table(self) -> LabelTable:
        """Return the listed pipelines that may be in a plan, one of each demand."""
        sizes = [len(columns.codes) for columns in self.listed]
        codes = np.concatenate([np.empty(0, dtype=np.int64), *(columns.codes for columns in self.listed)])
        samples = np.concatenate([np.empty(0), *(columns.samples for columns in self.listed)])
        at = np.repeat(np.arange(len(sizes)), sizes)
        row = np.arange(len(codes)) - np.repeat(np.cumsum(sizes) - sizes, sizes).astype(int)
        cost = self.reduced_cost(codes, samples)
        kept = np.flatnonzero(cost <= self.allowance + 1e-9)
        best = kept[firsts(codes[kept], samples[kept])]
        return LabelTable(
            codes=codes[best], samples=samples[best], reduced_cost=cost[best], at=at[best], row=row[best]
        )

    def path(self, at: int, row: int) -> Path:
        """Return the stages of a listed pipeline."""
        options, stops = self.listed[at].options[row], self.listed[at].stops[row]
        depth = int((options >= 0).sum())
        return tuple(options[:depth].tolist()), tuple(stops[:depth].tolist())

    def template(self, at: int, row: int) -> Template:
        """Return a listed pipeline."""
        return template_of(self.path(at, row))


@dataclass(slots=True)
class LabelMemory:
    """Arrays that the loops work in, and the stages they choose from, kept between enumerations."""

    problem: Problem
    counts: np.ndarray = field(init=False)
    slot: np.ndarray = field(init=False)
    pool: tuple[np.ndarray, ...] = field(init=False)
    _choices: dict[tuple[tuple[int, int], PipelineFamily], list[StageChoices]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate labels, and a slot for every demand."""
        self.counts = np.array(self.problem.counts, dtype=np.int64)
        self.slot = np.full(int(np.prod(self.counts + 1)), -1, dtype=np.int32)
        whole, real = np.empty((5, _LABELS), dtype=np.int64), np.empty(_LABELS)
        self.pool = (whole[0], whole[1], real, whole[2], whole[3], whole[4])

    def demands(self, codes: np.ndarray) -> np.ndarray:
        """Return the devices of each kind that codes stand for, shape (codes, kinds)."""
        radix = np.concatenate([[1], np.cumprod(self.counts[:-1] + 1)])
        return (codes[:, None] // radix) % (self.counts + 1)

    def choices(self, pricing: Pricing, family: PipelineFamily) -> list[StageChoices]:
        """Return the stages of a family by the grain of its pipelines."""
        key = pricing.pipelines, family
        if key not in self._choices:
            options = self.problem.options_of(family)[0]
            grains = np.unique(self.problem.grain[options]).tolist()
            made = [_choices_of(pricing, family, int(grain)) for grain in grains]
            self._choices[key] = [choices for choices in made if len(choices.stages.types)]
        return self._choices[key]


def memory_for(problem: Problem) -> LabelMemory | None:
    """Return memory to enumerate the pipelines of a problem, None where demands are too many."""
    if float(np.prod(np.array(problem.counts) + 1.0)) > _DEMANDS:
        return None
    return LabelMemory(problem)


def _choices_of(pricing: Pricing, family: PipelineFamily, grain: int) -> StageChoices:
    problem, stages = pricing.problem, pricing.stages_with(family, grain)
    takes, classes = np.unique(problem.takes[stages.options], axis=0, return_inverse=True)
    most = np.array(problem.counts, dtype=np.int64)
    if family.kind is not None:
        most = np.where(np.arange(len(most)) == family.kind, stages.limit, 0)
    return StageChoices(
        stages=stages,
        classes=np.ravel(classes).astype(np.int64),
        class_takes=takes.astype(np.int64),
        most=most,
        grain=grain,
    )
