"""All pipelines that a plan of some seconds can be made of, the best of each demand for devices.

At the right prices hardly any pipeline is worth the devices it takes; a plan that gets through the batch in
time consists of those that are, all but a little that the others make up for. So few are left that whole
numbers of them can be tried out (`combination`): where none reaches the batch, no plan takes that time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from foreshard.planner.solver.compiled import compiled
from foreshard.planner.solver.pricing import (
    LayerBox,
    Path,
    PricedStages,
    Pricing,
    same_limits,
    stages_of,
    template_of,
)
from foreshard.planner.solver.problem import PipelineFamily, Problem, Template

_LOOSE = 0.5
"""Samples by which a box may flatter its own pipeline before its pipelines are listed."""
_WIDTH = 1.01
_LABELS = 400_000
_GRID = 8_000_000
"""Most demands of devices that are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Stages of a family whose ranks round up to `grain` at most, for the loops of `_labels`.

    classes : of equal demand, by stage; class_takes : devices of each, shape (classes, kinds); most : devices
    of each kind that a pipeline may take
    """

    stages: PricedStages
    classes: np.ndarray
    class_takes: np.ndarray
    most: np.ndarray
    grain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Pipelines of a box, the best of each demand.

    codes : the demands; samples : no fewer than each gets through; options, stops : of their stages
    """

    box: LayerBox
    codes: np.ndarray
    samples: np.ndarray
    options: np.ndarray
    stops: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTable:
    """Of each demand the contender that may get through most, arrays of shape (demands,).

    worth : how much more it costs than that; at, row : which list it is in, and where
    """

    codes: np.ndarray
    samples: np.ndarray
    worth: np.ndarray
    at: np.ndarray
    row: np.ndarray


@dataclass(slots=True, kw_only=True)
class ColumnEnumeration:
    """Pipelines that may be part of a plan of `seconds`, with upper bounds on what they get through.

    Parameters
    ----------
    pricing : Pricing
        Fresh; its prices decide how many pipelines there are to list.
    seconds, goal : float
        A plan of n pipelines that gets through the batch in `seconds` has n pipelines whose prices sum to no
        more than what they get through less n times the goal.
    num_pipelines : int
        At most.
    room : Room
    deadline : float
    whole : bool
        Whether all that was to be listed is.
    """

    pricing: Pricing
    seconds: float
    goal: float
    num_pipelines: int
    room: Room
    deadline: float
    listed: list[Listed] = field(default_factory=list)
    short: float = 0.0
    whole: bool = True

    def worth(self, codes: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return how much more than the samples beyond the goal pipelines cost; negative for a bargain."""
        return self.goal + self.room.demands(codes) @ self.pricing.prices - samples

    @property
    def spare(self) -> float:
        """Return how much more than its worth a pipeline may cost: what all others can make up for."""
        return (self.num_pipelines - 1) * -self.short

    def find_bargains(self) -> bool:
        """List the pipelines that cost no more than they are worth: a plan has one of them at least.

        Returns False when there are too many or the time is up.
        """
        if not self.pricing.boxes:
            self.pricing.start()
        self.short, self.listed = 0.0, []
        self.whole = self._work_off(list(self.pricing.boxes.values()))
        self.short = self._best_bargain()
        return self.whole

    def sharpen(self, at: int, row: int) -> bool:
        """Find bargains anew in the parts of a box that flatters one; return False when there are none.

        What is `short` then allows for fewer contenders. Out of time, the list is no longer `whole`.
        """
        self.short = 0.0
        refined = self.refine(at, row)
        self.short = self._best_bargain()
        return refined

    def _best_bargain(self) -> float:
        bargains = (float(self.worth(one.codes, one.samples).min()) for one in self.listed)
        return min(0.0, min(bargains, default=0.0))

    def find_all(self) -> bool:
        """List besides what the best bargains can make up for; return False as :meth:`find_bargains`."""
        if self.spare <= 0.0 or not self.listed:
            return True
        self.listed = []
        return self._work_off(list(self.pricing.boxes.values()))

    def refine(self, at: int, row: int) -> bool:
        """List the parts of a box instead, which say more of one of its pipelines; False when none do."""
        box = self.listed[at].box
        parts = self.pricing.apart(box, self.path(at, row), self.seconds)
        if not parts or any(same_limits(part, box) for part in parts):
            return False
        self.listed = [one for one in self.listed if one.box is not box]
        self.whole = self._work_off(parts, wide=False)
        return self.whole

    def _work_off(self, boxes: list[LayerBox], *, wide: bool = True) -> bool:
        """List the boxes that may hold contenders; wide ones in parts that are tight enough."""
        pending = [box for box in boxes if self._bargain(box) <= self.spare + 1e-9]
        done = 0
        while pending:
            box = pending.pop()
            done += 1
            if done % 16 == 0 and time.perf_counter() > self.deadline:
                return False
            if wide and not self._is_tight(box):
                parts = self.pricing.parts(box, self.goal)
                if not any(same_limits(part, box) for part in parts):
                    pending += [part for part in parts if self._bargain(part) <= self.spare + 1e-9]
                    continue
                box = next(part for part in parts if same_limits(part, box))
            found = self._list(box)
            if found is None:
                return False
            self.listed += found
        return True

    def _reach(self, box: LayerBox) -> float:
        """Return the samples that a pipeline of a box which loses none to filling gets through at most."""
        return box.family.micro_batch * ((self.seconds - box.tail_s[0]) / box.bottleneck_s[0] + 1.0)

    def _bargain(self, box: LayerBox) -> float:
        return self.goal + box.cost - self._reach(box)

    def _is_tight(self, box: LayerBox) -> bool:
        least, most = box.bottleneck_s
        own, tail = self.pricing.extremes(box.family, box.path)
        rate = box.family.micro_batch / least
        loose = self._reach(box) * (1.0 - least / own) + rate * (tail - box.tail_s[0])
        narrow = most < least * _WIDTH and rate * (box.tail_s[1] - box.tail_s[0]) < 1.0
        return narrow or loose < _LOOSE

    def _list(self, box: LayerBox) -> list[Listed] | None:
        """Return the pipelines of a box that may contend, by grain; None when there are too many."""
        problem = self.pricing.problem
        found = []
        for choices in self.room.choices(self.pricing, box.family):
            stages = choices.stages
            number, codes, samples, options, stops = _compiled()(
                stages.types,
                stages.options,
                stages.times_s,
                stages.tail_s,
                stages.rooms,
                choices.classes,
                choices.class_takes,
                self.pricing.prices,
                self.room.counts,
                choices.most,
                box.family.micro_batch / box.bottleneck_s[0],
                box.bottleneck_s[1] * (1 + 1e-12),
                box.tail_s[1] * (1 + 1e-12),
                stages.deepest,
                problem.bands,
                problem.lengths,
                self._reach(box),
                self.spare - self.goal + 1e-9,
                float(box.family.micro_batch),
                float(choices.grain),
                float(problem.global_batch),
                self.room.slot,
                self.room.pool,
            )
            self.pricing.solved += 1
            if number < 0:
                return None
            if number:
                found.append(Listed(box=box, codes=codes, samples=samples, options=options, stops=stops))
        return found

    def table(self) -> LabelTable:
        """Return the contenders, one of each demand."""
        sizes = [len(one.codes) for one in self.listed]
        codes = np.concatenate([np.empty(0, dtype=np.int64), *(one.codes for one in self.listed)])
        samples = np.concatenate([np.empty(0), *(one.samples for one in self.listed)])
        at = np.repeat(np.arange(len(sizes)), sizes)
        row = np.arange(len(codes)) - np.repeat(np.cumsum(sizes) - sizes, sizes).astype(int)
        worth = self.worth(codes, samples)
        kept = np.flatnonzero(worth <= self.spare + 1e-9)
        order = kept[np.lexsort((-samples[kept], codes[kept]))]
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(codes[order]) > 0
        best = order[first]
        return LabelTable(
            codes=codes[best], samples=samples[best], worth=worth[best], at=at[best], row=row[best]
        )

    def path(self, at: int, row: int) -> Path:
        """Return the stages of a pipeline of a list."""
        options, stops = self.listed[at].options[row], self.listed[at].stops[row]
        depth = int((options >= 0).sum())
        return tuple(options[:depth].tolist()), tuple(stops[:depth].tolist())

    def template(self, at: int, row: int) -> Template:
        """Return a pipeline of a list."""
        return template_of(self.path(at, row))


@dataclass(slots=True)
class Room:
    """Memory of the loops, and what they choose from, kept from one question to the next."""

    problem: Problem
    counts: np.ndarray = field(init=False)
    slot: np.ndarray = field(init=False)
    pool: tuple[np.ndarray, ...] = field(init=False)
    _choices: dict[tuple[tuple[int, int], PipelineFamily], list[Choices]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make room for labels and for every demand."""
        self.counts = np.array(self.problem.counts, dtype=np.int64)
        self.slot = np.full(int(np.prod(self.counts + 1)), -1, dtype=np.int32)
        whole, real = np.empty((5, _LABELS), dtype=np.int64), np.empty(_LABELS)
        self.pool = (whole[0], whole[1], real, whole[2], whole[3], whole[4])

    def demands(self, codes: np.ndarray) -> np.ndarray:
        """Return the devices of each kind that codes stand for, shape (codes, kinds)."""
        radix = np.concatenate([[1], np.cumprod(self.counts[:-1] + 1)])
        return (codes[:, None] // radix) % (self.counts + 1)

    def choices(self, pricing: Pricing, family: PipelineFamily) -> list[Choices]:
        """Return the stages of a family by the grain of its pipelines."""
        key = pricing.pipelines, family
        if key not in self._choices:
            options = self.problem.options_of(family)[0]
            grains = np.unique(self.problem.grain[options]).tolist()
            made = [_choices_of(self.problem, pricing.tails[family], family, int(grain)) for grain in grains]
            self._choices[key] = [one for one in made if len(one.stages.types)]
        return self._choices[key]


def room_for(problem: Problem) -> Room | None:
    """Return room to list the contenders of a problem, None without numba or where demands are too many."""
    if _compiled() is None or float(np.prod(np.array(problem.counts) + 1.0)) > _GRID:
        return None
    return Room(problem)


def _choices_of(problem: Problem, tail_s: np.ndarray, family: PipelineFamily, grain: int) -> Choices:
    stages = stages_of(problem, tail_s, family, grain)
    takes, classes = np.unique(problem.takes[stages.options], axis=0, return_inverse=True)
    most = np.array(problem.counts, dtype=np.int64)
    if family.kind is not None:
        most = np.where(np.arange(len(most)) == family.kind, stages.limit, 0)
    return Choices(
        stages=stages,
        classes=np.ravel(classes).astype(np.int64),
        class_takes=takes.astype(np.int64),
        most=most,
        grain=grain,
    )


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Return the loops compiled, None without numba."""
    from foreshard.planner.solver.label_kernel import label_paths

    return compiled(label_paths)
