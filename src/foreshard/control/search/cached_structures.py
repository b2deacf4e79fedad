"""Structures of a state in rows of seconds and dollars by worker, so that all are weighed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from foreshard.control.budgets.objective import Weights
from foreshard.control.slots import Budget, State, Structure


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
