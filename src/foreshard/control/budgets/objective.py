"""What a slot minimises: weighed seconds and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.slots import Budget, Choice, State


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

    def row(self) -> np.ndarray:
        """Return the weights of a row of `CachedStructures`."""
        return np.concatenate([[self.time], self.active, self.busy, self.sent])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """Weights of a second and of each cost.

    Attributes
    ----------
    time : float
        Of a second; below 0 slow structures are preferred, but no group waits on purpose.
    costs : mapping of budget name to weight
    budgets : tuple of Budget
    """

    time: float
    costs: Mapping[str, float]
    budgets: tuple[Budget, ...] = ()

    def weights(self, state: State) -> Weights:
        """Return the weights by worker."""
        return Weights.of(state, self.time, self.costs, self.budgets)

    def of_rows(self, time_s: np.ndarray, costs: np.ndarray) -> np.ndarray:
        """Return the objective, given seconds, shape (n,), and costs, shape (n, budgets)."""
        weigh = np.array([self.costs.get(budget.name, 0.0) for budget in self.budgets])
        return np.asarray(self.time * time_s + (costs @ weigh if self.budgets else 0.0))

    def of(self, choice: Choice) -> float:
        """Return the objective of a choice; infinite where it cannot run."""
        if not math.isfinite(choice.time_s):
            return math.inf
        costs = np.array([[choice.costs[budget.key] for budget in self.budgets]])
        return float(self.of_rows(np.array([choice.time_s]), costs)[0])
