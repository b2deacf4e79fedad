"""What structures take in one state, remembered: device classes of workers, and structures in rows.

Everything here is free of weights, so that a state seen before costs a look-up, however far queues moved. The
two readings differ in what a cell is (`pipelines`, `wide_stages`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np

from foreshard.control.budgets.objective import Weights
from foreshard.control.search.cache import Cells, SearchCache
from foreshard.control.search.costs import slowest_link
from foreshard.control.search.device_classes import device_classes, remembered_link_kinds
from foreshard.control.slots import Budget, Chain, Choice, State, Structure

_DEAR = 4.0
"""Factor by which a price must change before better orders and cuts, dear to find, are sought again."""
Level = tuple[int, ...]
"""How dear busy seconds and bytes are against time, as powers: what decides on cuts and splits."""


class StructureRow(Protocol):
    """A structure in a state, with shares."""

    @property
    def structure(self) -> Structure:
        """Return the structure."""
        ...

    @property
    def worker(self) -> np.ndarray:
        """Return the workers in use."""
        ...

    @property
    def spare_s(self) -> float:
        """Return the seconds that other orders and cuts of its cells can spare at most."""
        ...

    def taken(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Return seconds of a batch, and by worker the busy seconds and the dollars for bytes sent."""
        ...

    def objective(self, weights: Weights) -> tuple[float, np.ndarray]:
        """Return what the slot minimises at the best shares, and which cells then have samples."""
        ...


class CachedStructures:
    """Structures of a state in rows, so that all are weighed at once."""

    def __init__(self, num_workers: int):
        self.layouts: list[StructureRow] = []
        self.known: dict[object, int | None] = {}
        self._size = num_workers
        self._rows, self._spare_s = np.zeros((0, 3 * num_workers + 1)), np.zeros(0)

    def add(self, layout: StructureRow) -> int:
        """Take a structure in; return its row."""
        at = len(self.layouts)
        if at == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros((max(64, at), 3 * self._size + 1))])
            self._spare_s = np.append(self._spare_s, np.zeros(max(64, at)))
        self.layouts.append(layout)
        row, size = self._rows[at], self._size
        time_s, busy_s, sent_usd = layout.taken()
        row[0] = time_s
        self._spare_s[at] = layout.spare_s
        row[1:][layout.worker] = time_s
        row[1 + size :][layout.worker] = busy_s
        row[1 + 2 * size :][layout.worker] = sent_usd
        return at

    def objective(self, weights: Weights) -> np.ndarray:
        """Return what the slot minimises, with the shares that structures were taken in with."""
        return np.asarray(self._rows[: len(self.layouts)] @ weights.row())

    def spare(self, weights: Weights) -> np.ndarray:
        """Return what other orders and cuts can spare at most: seconds of rings, and all that is sent."""
        count = len(self.layouts)
        used = self._rows[:count, : 1 + self._size] > 0.0
        sent = self._rows[:count, 1 + 2 * self._size :] @ weights.sent
        return np.asarray(used @ weights.row()[: 1 + self._size] * self._spare_s[:count] + sent)

    def table(self, state: State, budgets: Sequence[Budget]) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds and costs, shape (n, budgets), of structures with these shares."""
        found = self._rows[: len(self.layouts)]
        weigh = [Weights.of(state, 0.0, {budget.name: 1.0}, (budget,)).row() for budget in budgets]
        return found[:, 0].copy(), found @ np.array(weigh).reshape(len(budgets), found.shape[1]).T


class StateCache(ABC):
    """Structures of one reading in one state.

    Attributes
    ----------
    is_ordered : bool
        Whether cells are stages in order, or pipelines side by side.
    widest, most_cells : int
        Workers of a cell; cells.
    exhaustive : int
        Structures up to which all are compared.
    alive : list of int
        Workers that are there.
    device_class : list of int
        Equal for workers that are alike.
    structures : CachedStructures
        All that were looked at.
    visits : int
        Slots in which this state was searched.
    explored : set
        Structures, at a level, whose neighbours were all looked at.
    complete : set
        Levels at which every structure was looked at.
    settled_at : set
        Structures, at a dearness, of which better orders and cuts were sought.
    """

    is_ordered: ClassVar[bool]

    def __init__(
        self,
        cache: SearchCache,
        chain: Chain,
        state: State,
        batch: int,
        micro_batch: int,
        max_stages: int,
        apart: frozenset[int],
    ):
        self.cache, self.chain, self.state = cache, chain, state
        self.batch, self.micro_batch = batch, micro_batch
        self.max_stages = min(max_stages, chain.num_layers)
        self.alive = [int(worker) for worker in np.flatnonzero(state.available & (state.speed > 0))]
        places = remembered_link_kinds(state, cache.links)
        self.device_class = device_classes(chain, state, apart, places)
        self.structures = CachedStructures(chain.num_workers)
        self.everything: Sequence[Cells] | None = None
        self.visits = 0
        self.explored: set[tuple[int, Level]] = set()
        self.complete: set[Level] = set()
        self.settled_at: set[tuple[int, Level]] = set()
        self._kept: dict[Structure, Choice] = {}

    widest: int
    most_cells: int
    exhaustive: int

    @property
    def shape(self) -> tuple[object, ...]:
        """Return what the structures of some numbers of workers depend on."""
        return type(self), self.widest, self.most_cells, self.exhaustive

    def pools(self) -> dict[int, list[int]]:
        """Return the workers of each class that are there."""
        found: dict[int, list[int]] = {}
        for worker in self.alive:
            found.setdefault(self.device_class[worker], []).append(worker)
        return found

    def signature(self, cells: Cells) -> Cells:
        """Return what is equal for structures that differ in names of workers only."""
        found = [tuple(sorted([self.device_class[worker] for worker in cell])) for cell in cells]
        return tuple(found if self.is_ordered else sorted(found))

    def guess(self, cells: Cells, weights: Weights) -> float:
        """Return a rough objective: work over all speeds, the fill of even stages, the widest ring."""
        at = np.array([worker for cell in cells for worker in cell])
        depth, pipelines, ring = self.depth_of(cells)
        speed = float((self.state.speed[at] / self.chain.before_s[at, -1]).sum())
        rounds = self.batch / self.micro_batch / pipelines
        seconds = self.batch / speed * (1.0 + (depth - 1.0) / rounds)
        if ring > 1:
            rate, _ = slowest_link(self.state, at)
            seconds += 2.0 * (ring - 1) / ring * float(self.chain.sync_bytes.sum()) / depth / rate
        return (weights.time + float(weights.active[at].sum())) * seconds

    def kept(self, structure: Structure, weights: Weights) -> Choice:
        """Return a structure that is kept with its best shares; its time is infinite where it cannot run."""
        free = not weights.busy.any() and not weights.sent.any()
        if free and structure in self._kept:
            return self._kept[structure]
        asked = {"batch": self.batch, "micro_batch": self.micro_batch}
        found = self.reshared(self.chain, self.state, structure, weights, **asked)
        if free:
            self._kept[structure] = found
        return found

    @abstractmethod
    def cells_of(self, structure: Structure) -> Cells:
        """Return the cells of a structure of this reading."""

    @abstractmethod
    def holds(self, cell: Sequence[int]) -> bool:
        """Return whether these workers can be a cell."""

    @abstractmethod
    def cell_counts(self, takes: Iterable[int], total: int) -> Iterator[tuple[int, int]]:
        """Return into how many cells how many of the workers are built."""

    @abstractmethod
    def depth_of(self, cells: Cells) -> tuple[float, int, int]:
        """Return stages of a pipeline, pipelines, and workers that hold the same layers."""

    @abstractmethod
    def level(self, weights: Weights) -> Level:
        """Return what of the weights decides on cuts and splits."""

    @abstractmethod
    def settled(self, cells: Cells, weights: Weights, level: Level) -> StructureRow | None:
        """Return cells with the best order, cuts and splits; None where none fits."""

    def dearness(self, weights: Weights) -> Level:
        """Return how dear busy seconds and bytes are by worker, as powers of `_DEAR`."""
        time_weight = max(weights.time + float(weights.active.sum()), 1e-300)
        price = np.concatenate([weights.busy, weights.sent]) / time_weight
        return tuple(np.round(np.log(np.maximum(price, 1e-9)) / math.log(_DEAR)).astype(int).tolist())

    def improved(self, row: StructureRow, weights: Weights) -> StructureRow | None:
        """Return a structure with better orders and cuts of the same cells; None where there are none."""
        return None

    @abstractmethod
    def as_is(self, structure: Structure, weights: Weights) -> StructureRow | None:
        """Return a structure with its own order and cuts; None where it cannot run."""

    @staticmethod
    @abstractmethod
    def reshared(
        chain: Chain, state: State, structure: Structure, weights: Weights, *, batch: int, micro_batch: int
    ) -> Choice:
        """Return a structure that is kept with its best shares; its time is infinite where it cannot run.

        Every group keeps at least one sample, and so does every worker of a stage of several.
        """

    @abstractmethod
    def chosen(self, row: StructureRow, structure: Structure, weights: Weights) -> Choice:
        """Return a row in whole samples, under the names of workers that the structure has."""
