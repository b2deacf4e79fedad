"""Structures of a state in rows of seconds and dollars by worker, and what weighs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from foreshard.control.budgets.queues import Curve
from foreshard.control.slots import Budget, State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """What a slot minimises, by worker.

    Attributes
    ----------
    time : float
        Of a second.
    active, busy, sent : ndarray, shape (W,)
        Of a second that a worker is taken, of a busy second on top, of a dollar for bytes that it sends.
    """

    time: float
    active: np.ndarray
    busy: np.ndarray
    sent: np.ndarray

    @staticmethod
    def of(state: State, time: float, costs: Mapping[str, float], budgets: Sequence[Budget]) -> Weights:
        """Return the weights that weights of budgets, by name, amount to."""
        size = len(state.speed)
        active, busy, sent = np.zeros(size), np.zeros(size), np.zeros(size)
        for budget in budgets:
            weight = float(costs.get(budget.name, 0.0))
            who = slice(None) if budget.worker is None else slice(budget.worker, budget.worker + 1)
            if budget.kind in ("usd", "rent_usd"):
                active[who] += weight * state.usd_per_h[who] / 3600.0
            if budget.kind in ("usd", "egress_usd"):
                sent[who] += weight
            if budget.kind in ("joule", "carbon_kg"):
                scale = weight * (state.kg_per_j[who] if budget.kind == "carbon_kg" else 1.0)
                active[who] += scale * state.idle_w[who]
                busy[who] += scale * (state.busy_w[who] - state.idle_w[who])
            if budget.kind == "duty":
                busy[who] += weight
        return Weights(time=time, active=active, busy=busy, sent=sent)


class StructureRow(Protocol):
    """A structure in a state, with shares."""

    @property
    def worker(self) -> np.ndarray:
        """Return the workers in use."""
        ...

    def taken(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Return seconds of a batch, and by worker the busy seconds and the dollars for bytes sent."""
        ...


R = TypeVar("R", bound=StructureRow)


class CachedStructures(Generic[R]):
    """Structures of a state in rows, so that all are weighed at once."""

    def __init__(self, num_workers: int):
        self.layouts: list[R] = []
        self.known: dict[object, int | None] = {}
        self._size = num_workers
        self._rows = np.zeros((0, 3 * num_workers + 1))

    def add(self, layout: R) -> int:
        """Take a structure in; return its row."""
        at = len(self.layouts)
        if at == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros((max(64, at), 3 * self._size + 1))])
        self.layouts.append(layout)
        row, size = self._rows[at], self._size
        time_s, busy_s, sent_usd = layout.taken()
        row[0] = time_s
        row[1:][layout.worker] = time_s
        row[1 + size :][layout.worker] = busy_s
        row[1 + 2 * size :][layout.worker] = sent_usd
        return at

    def worth(self, weights: Weights, rows: slice = slice(None)) -> np.ndarray:
        """Return what structures are worth with the shares that they were taken in with."""
        weigh = np.concatenate([[weights.time], weights.active, weights.busy, weights.sent])
        return np.asarray(self._rows[: len(self.layouts)][rows] @ weigh)

    def weighed(
        self, weights: Weights, state: State, curve: Curve | None, rows: slice = slice(None)
    ) -> np.ndarray:
        """Return what structures are worth, what is not linear in time and costs included."""
        worth = self.worth(weights, rows)
        return worth if curve is None else worth + curve.extra(*self.table(state, curve.budgets, rows))

    def table(
        self, state: State, budgets: Sequence[Budget], rows: slice = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds and costs, shape (n, budgets), of structures with these shares."""
        found = self._rows[: len(self.layouts)][rows]
        weigh = np.zeros((found.shape[1], len(budgets)))
        for i, one in enumerate(budgets):
            each = Weights.of(state, 0.0, {one.name: 1.0}, (one,))
            weigh[:, i] = np.concatenate([[0.0], each.active, each.busy, each.sent])
        return found[:, 0].copy(), found @ weigh
