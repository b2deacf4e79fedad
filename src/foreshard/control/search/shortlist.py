"""A closer look at the best of a search and the best replicas, whole or less a group, and at what runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from foreshard.control.budgets.objective import Objective
from foreshard.control.search.slot_search import Compared, PipelineSearch, ReplicaSearch, reshare
from foreshard.control.slots import DP_OVER_MP, Choice, State, Structure
from foreshard.errors import InfeasibleError

Timed = Callable[[State, Structure, Sequence[int]], float]
"""Seconds of a structure with shares, finer than what searches."""


class Shortlist:
    """Compares structures, with finer seconds where there are any.

    Parameters
    ----------
    slots : ReplicaSearch or PipelineSearch
        What searches.
    timed : callable, optional
        Times structures.
    plain : bool
        With `timed`, look at the best replicas too.
    batch, micro_batch : int, samples
    """

    def __init__(
        self,
        slots: ReplicaSearch | PipelineSearch,
        *,
        timed: Timed | None,
        plain: bool,
        batch: int,
        micro_batch: int,
    ):
        self._slots, self._timed = slots, timed
        self._asked: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch}
        self._plain = ReplicaSearch(slots.chain, slots.budgets, **self._asked) if timed and plain else None

    def compare(self, state: State, objective: Objective, running: Structure) -> Compared:
        """Return the best of a slot beside the running structure, both timed as finely as can be."""
        found = self._slots.compare(state, objective, running)
        if self._timed is None:
            return found
        structures = [found.best]
        if self._plain is not None:
            with contextlib.suppress(InfeasibleError):
                structures.append(self._plain.compare(state, objective, running).best)
        seen = {structure: self.seen(state, structure, objective) for structure in structures}
        for structure in map(_without_thinnest, list(seen.values())):
            if structure is not None:
                seen[structure] = self.seen(state, structure, objective)
        objectives = {structure: objective.of(choice) for structure, choice in seen.items()}
        best = min(objectives, key=lambda structure: objectives[structure])
        stay = objectives.get(running, math.inf)
        if running not in seen and state.available[list(running.workers)].all():
            stay = objective.of(self.seen(state, running, objective))
        return Compared(best=best, best_worth=objectives[best], stay_worth=stay)

    def seen(self, state: State, structure: Structure, objective: Objective) -> Choice:
        """Return a structure with its best shares, by the finer seconds and what is paid by these."""
        choice = reshare(self._slots.chain, state, structure, objective, **self._asked)
        if self._timed is None or not math.isfinite(choice.time_s):
            return choice
        time_s = self._timed(state, structure, choice.shares)
        costs = {
            budget.key: choice.costs[budget.key] * (1.0 if budget.kind == "duty" else time_s / choice.time_s)
            for budget in self._slots.budgets
        }
        return replace(choice, time_s=time_s, costs=costs)


def _without_thinnest(choice: Choice) -> Structure | None:
    """Return a structure of several groups without the one of the fewest samples.

    The search takes seconds as linear in samples; update and sum of gradients of a group with few may cost
    more than it saves.
    """
    structure, shares = choice.structure, choice.shares
    if structure.reading != DP_OVER_MP or len(shares) < 2:
        return None
    thinnest = shares.index(min(shares))
    return replace(structure, groups=structure.groups[:thinnest] + structure.groups[thinnest + 1 :])
