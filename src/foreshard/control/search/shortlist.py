"""A closer look at the best of a search and the best replicas, whole or less a group, and at what runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreshard.control.budgets.objective import reshare, worth_of
from foreshard.control.budgets.queues import Curve
from foreshard.control.search.slot_search import Compared, PipelineSearch, ReplicaSearch
from foreshard.control.slots import DP_OVER_MP, Budget, Choice, State, Structure
from foreshard.errors import InfeasibleError

Timed = Callable[[State, Structure, Sequence[int]], float]
"""Seconds of a structure with shares, finer than what searches."""


class Shortlist:
    """Compares structures, with finer seconds where there are any.

    Parameters
    ----------
    slots : ReplicaSearch or PipelineSearch
        What searches.
    budgets : sequence of Budget
    timed : callable, optional
        Times finalists.
    plain : bool
        With `timed`, look at the best replicas too.
    batch, micro_batch : int, samples
    """

    def __init__(
        self,
        slots: ReplicaSearch | PipelineSearch,
        budgets: Sequence[Budget],
        *,
        timed: Timed | None,
        plain: bool,
        batch: int,
        micro_batch: int,
    ):
        self._slots, self.budgets, self._timed = slots, tuple(budgets), timed
        self._asked: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch}
        self._plain = ReplicaSearch(slots.chain, budgets, **self._asked) if timed and plain else None

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

        def see(one: Structure) -> Choice:
            return self.seen(state, one, time_weight, cost_weights)

        seen = {one: see(one) for one in finalists}
        seen |= {one: see(one) for one in map(self._without_thinnest, list(seen.values())) if one is not None}
        finalists = list(seen)
        if state.available[list(running.workers)].all():
            seen.setdefault(running, see(running))
        worth = {
            one: worth_of(choice, time_weight, cost_weights, self.budgets, curve)
            for one, choice in seen.items()
        }
        best = min(finalists, key=lambda one: worth[one])
        return Compared(best=best, best_worth=worth[best], stay_worth=worth.get(running, math.inf))

    def _without_thinnest(self, choice: Choice) -> Structure | None:
        """Return a structure of several groups without the one of the fewest samples.

        The search takes seconds as linear in samples; update and sum of gradients of a group with few may
        cost more than it saves.
        """
        structure, shares = choice.structure, choice.shares
        if structure.reading != DP_OVER_MP or len(shares) < 2:
            return None
        thinnest = shares.index(min(shares))
        return replace(structure, groups=structure.groups[:thinnest] + structure.groups[thinnest + 1 :])

    def seen(
        self, state: State, structure: Structure, time_weight: float, cost_weights: Mapping[str, float]
    ) -> Choice:
        """Return a structure with its best shares, by the finer seconds and what is paid by these."""
        choice = reshare(
            self._slots.chain,
            state,
            structure,
            time_weight=time_weight,
            cost_weights=cost_weights,
            budgets=self.budgets,
            **self._asked,
        )
        if self._timed is None or not math.isfinite(choice.time_s):
            return choice
        time_s = self._timed(state, structure, choice.shares)
        costs = {
            one.key: choice.costs[one.key] * (1.0 if one.kind == "duty" else time_s / choice.time_s)
            for one in self.budgets
        }
        return replace(choice, time_s=time_s, costs=costs)
