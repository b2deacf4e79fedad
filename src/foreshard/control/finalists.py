"""A closer look at what a search finds: the best of it, the running structure and the best replicas."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreshard.control.queues import Curve
from foreshard.control.replicas import Compared, Pipelines, Replicas
from foreshard.control.slots import Budget, Choice, State, Structure
from foreshard.control.worth import reshare, worth_of
from foreshard.errors import InfeasibleError

Timed = Callable[[State, Structure, Sequence[int]], float]
"""Seconds of a structure with shares, finer than what searches."""


class Finalists:
    """Compares structures, with finer seconds where there are any.

    Parameters
    ----------
    slots : Replicas or Pipelines
        What searches.
    budgets : sequence of Budget
    timed : callable, optional
        Times finalists.
    plain : bool
        With `timed`, look at the best replicas too.
    batch, micro_batch : int, samples
    """

    def __init__(
        self, slots: Replicas | Pipelines, budgets: Sequence[Budget], *, timed: Timed | None, plain: bool,
        batch: int, micro_batch: int,
    ):  # fmt: skip
        self._slots, self.budgets, self._timed = slots, tuple(budgets), timed
        self._asked: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch}
        self._plain = Replicas(slots.chain, budgets, **self._asked) if timed and plain else None

    def compare(
        self,
        state: State,
        time_weight: float,
        cost_weights: Mapping[str, float],
        running: Structure,
        change_weight: float = 0.0,
        curve: Curve | None = None,
    ) -> Compared:
        """Return the best of a slot beside the running structure, both timed as finely as can be."""
        asked = (state, time_weight, cost_weights, running, change_weight, curve)
        found = self._slots.compare(*asked)
        if self._timed is None:
            return found
        finalists = [found.best]
        if self._plain is not None:
            with contextlib.suppress(InfeasibleError):
                finalists.append(self._plain.compare(*asked).best)
        looked = [*finalists, running] if state.available[list(running.workers)].all() else finalists
        worth = {}
        for one in dict.fromkeys(looked):
            seen = self.seen(state, one, time_weight, cost_weights)
            worth[one] = worth_of(seen, time_weight, cost_weights, self.budgets, curve)
        best = min(finalists, key=lambda one: worth[one])
        return Compared(best=best, best_worth=worth[best], stay_worth=worth.get(running, math.inf))

    def seen(
        self, state: State, structure: Structure, time_weight: float, cost_weights: Mapping[str, float]
    ) -> Choice:
        """Return a structure with its best shares, by the finer seconds and what is paid by these."""
        choice = reshare(
            self._slots.chain, state, structure, time_weight=time_weight, cost_weights=cost_weights,
            budgets=self.budgets, **self._asked,
        )  # fmt: skip
        if self._timed is None or not math.isfinite(choice.time_s):
            return choice
        time_s = self._timed(state, structure, choice.shares)
        costs = {
            one.key: choice.costs[one.key] * (1.0 if one.kind == "duty" else time_s / choice.time_s)
            for one in self.budgets
        }
        return replace(choice, time_s=time_s, costs=costs)
