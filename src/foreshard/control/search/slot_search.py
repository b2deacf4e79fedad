"""The best structure of a slot: tentative search over cells of workers, or all subsets of replicas.

All structures are compared where device classes are few enough; else one is searched by tentative moves from
the running one, from those chosen lately and from a few built ones. Moves are of classes, not of workers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.control.budgets.objective import Objective
from foreshard.control.search.cache import Cells, SearchCache
from foreshard.control.search.candidates import built, every_structure, neighbours, renamed, repaired
from foreshard.control.search.pipelines import PipelineStates
from foreshard.control.search.state_cache import StateCache
from foreshard.control.search.subsets import SubsetClasses, TooManyError, data_parallel
from foreshard.control.search.wide_stages import StageStates
from foreshard.control.slots import (
    DP_OVER_MP,
    MP_OVER_DP,
    Budget,
    Chain,
    Choice,
    State,
    Structure,
    workers_apart,
)
from foreshard.errors import InfeasibleError, unknown

MAX_STAGES = 8
"""Stages of a pipeline at most where nothing is said: orders grow with their factorial."""
_MOST_LISTED = 512
"""States whose subsets of replicas are kept: up to some megabytes each, mostly kilobytes."""
_MOST_SUBSETS = 20_000
"""Subsets of replicas that are listed in every new state: some milliseconds."""
_MOST_STRUCTURES = 10_000
"""Structures of replicas that are kept by their workers, so that equal ones are one object."""
_COLD_LOOKS = 2000
"""New structures that a slot looks at where nothing runs yet, or workers are few: a second at most."""
_WARM_LOOKS, _WARM_EFFORT = 12, 50
"""New structures, and tables of cuts beyond the first structure, that any other slot has time for: a few
milliseconds. A state that comes back is looked at further."""
_STARTS = 2
"""Structures from which tentative moves are made: a second one leads out of what is best nearby."""
_SHORTLIST = 6
"""Structures of which better orders and cuts are sought in any case if busy seconds or bytes weigh."""
_MOST_WHOLE = 30
"""Structures that are compared in whole samples: few micro-batches are far from parts of samples."""
_MOST_IMPROVED = 32
"""Structures of which a slot looks for better orders and cuts: some milliseconds each."""
_VISITS = 6
"""Slots of a state in which built structures are looked at; later ones only move on from the best."""
_BETTER = 1.0 - 1e-12
"""Factor below which an objective is better: more than rounding, or walks between equals would never end."""
_STATES_OF: Mapping[str, type[StateCache]] = {DP_OVER_MP: PipelineStates, MP_OVER_DP: StageStates}
_FEW_WORKERS = {DP_OVER_MP: 6, MP_OVER_DP: 4}
"""Workers up to which every slot has time for all structures."""
Rows = tuple[np.ndarray, np.ndarray]
"""Seconds, shape (n,), and costs, shape (n, budgets), of what can run in a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The best structure of a slot beside the running one.

    Attributes
    ----------
    best : Structure
    best_worth, stay_worth : float
        What the slot minimises; infinite for a running structure that cannot run.
    """

    best: Structure
    best_worth: float
    stay_worth: float


def solve_slot(
    chain: Chain,
    state: State,
    *,
    batch: int,
    micro_batch: int,
    time_weight: float,
    cost_weights: Mapping[str, float] | None = None,
    budgets: Sequence[Budget] = (),
    running: Structure | Choice | None = None,
    cache: SearchCache | None = None,
    reading: str = DP_OVER_MP,
    max_stages: int = MAX_STAGES,
    most_looks: int | None = None,
) -> Choice:
    """Return the choice that minimises time_weight * seconds + sum of cost_weights * costs.

    Parameters
    ----------
    chain, state
    batch, micro_batch : int, samples
    time_weight : float
        Of a second; below 0 slow structures are preferred, but no group waits on purpose.
    cost_weights : mapping of budget name to weight
    budgets : sequence of Budget
    running : Structure or Choice, optional
        Where to search from, besides what is built; of workers that are alike those that hold most of its
        layers already are chosen.
    cache : SearchCache, optional
        Makes later slots fast; belongs to one chain.
    reading : {'dp_over_mp', 'mp_over_dp'}
        Pipelines side by side, or one pipeline whose stages split every micro-batch. There every worker has a
        sample of every micro-batch at least; where these can be split in many ways a few are tried.
    max_stages : int
        Of a pipeline.
    most_looks : int, optional
        New structures to look at in this slot.

    Raises
    ------
    InfeasibleError
        When nothing that the workers that are there can form holds the model.
    """
    cache = SearchCache() if cache is None else cache
    known = cache.state(
        _STATES_OF[reading],
        chain,
        state,
        batch=batch,
        micro_batch=micro_batch,
        max_stages=max_stages,
        apart=workers_apart(budgets),
    )
    objective = Objective(time=time_weight, costs=cost_weights or {}, budgets=tuple(budgets))
    start = running.structure if isinstance(running, Choice) else running
    if start is not None and start.reading != reading:
        start = None
    is_warm = start is not None and chain.num_workers > _FEW_WORKERS[reading]
    if most_looks is None:
        most_looks = _WARM_LOOKS if is_warm else _COLD_LOOKS
    search = _SlotSearch(known, objective, start, most_looks, _WARM_EFFORT if is_warm else math.inf)
    search.run()
    if not search.found:
        what = "pipeline" if reading == DP_OVER_MP else "stages"
        raise InfeasibleError(
            f"no {what} of {len(known.alive)} workers hold{'s' * (what == 'pipeline')} the model",
            rule="A stage needs memory",
            fix="Allow more stages, or add workers",
        )
    choice = search.best()
    cache.chose(known.cells_of(choice.structure))
    return choice


class _SlotSearch:
    """Looks at structures until none is better, or as many as a slot has time for."""

    def __init__(
        self,
        state: StateCache,
        objective: Objective,
        running: Structure | None,
        most_looks: int,
        effort: float,
    ):
        self.state, self.objective, self.structures = state, objective, state.structures
        self.weights = objective.weights(state.state)
        self.running, self.left = running, most_looks
        self.until = state.cache.effort.done + effort
        self.level = state.level(self.weights)
        self.found: dict[int, float] = {}

    def run(self) -> None:
        """Look at all structures, or walk from the best that are known."""
        state = self.state
        if self.running is not None:
            self._look_as_is(self.running)
            self.look(repaired(state, state.cells_of(self.running)))
        if self.level not in state.complete:
            spare = self.left // 3
            for cells in self._promising() if state.visits < _VISITS else ():
                if self.left <= spare or self._is_spent():
                    break
                self.look(repaired(state, cells))
            state.visits += 1
            everything = every_structure(state)
            for cells in everything:
                self.look(cells)
            if everything and self.left > 0 and not self._is_spent():
                state.complete.add(self.level)
        for at in self._ranked():
            if self.level not in state.complete:
                self._walk(at)
        while True:
            self._improve()
            best = min(self.found, key=lambda at: (self.found[at], at), default=-1)
            is_walked = best < 0 or self.level in state.complete or (best, self.level) in state.explored
            if is_walked or self.left <= 0 or self._is_spent():
                return
            self._walk(best)

    def _promising(self) -> list[Cells]:
        """Return structures chosen lately and built ones, the most promising first; not all of them fit."""
        state, known = self.state, dict[object, Cells]()
        there = set(state.alive)
        for cells in itertools.chain(state.cache.recent, built(state, self.weights)):
            alive = tuple(some for cell in cells if (some := tuple(w for w in cell if w in there)))
            if alive:
                known.setdefault(state.signature(alive), alive)
        return sorted(known.values(), key=lambda cells: state.guess(cells, self.weights))

    def _look_as_is(self, structure: Structure) -> None:
        """Look at a structure with its own order and cuts, if it can run."""
        known = self.structures.known
        if self.state.state.available[list(structure.workers)].all():
            if structure not in known:
                row = self.state.as_is(structure, self.weights)
                known[structure] = None if row is None else self.structures.add(row)
            at = known[structure]
            if at is not None:
                self._weigh(at)

    def look(self, cells: Cells) -> int | None:
        """Return the row of a structure, None if it cannot run or there is no time to see."""
        if not cells:
            return None
        key, known = (self.state.signature(cells), self.level), self.structures.known
        if key not in known:
            if self.left <= 0 or (self.found and self._is_spent()):
                return None
            self.left -= 1
            row = self.state.settled(cells, self.weights, self.level)
            known[key] = None if row is None else self.structures.add(row)
        return known[key]

    def _is_spent(self) -> bool:
        """Return whether so many tables of cuts were made as the slot has time for."""
        return self.state.cache.effort.done >= self.until

    def _ranked(self) -> list[int]:
        """Weigh the best of all known; return the best few, and at first that of each number of stages."""
        order = np.argsort(self.structures.objective(self.weights), kind="stable")
        best_of: dict[int, int] = {}
        for place, at in enumerate(order.tolist()):
            count = len(self.structures.layouts[at].structure.groups)
            if place < _MOST_WHOLE or (self.state.is_ordered and count not in best_of):
                self._weigh(at)
            best_of.setdefault(count, at)
            if place >= _MOST_WHOLE and (not self.state.is_ordered or len(best_of) == self.state.max_stages):
                break
        best = sorted(self.found, key=lambda at: (self.found[at], at))[:_STARTS]
        deep = self.state.is_ordered and self.state.visits <= _VISITS
        return list(dict.fromkeys([*best, *best_of.values()])) if deep else best

    def _weigh(self, at: int) -> float:
        """Return the objective with parts of samples allowed; look at it without idle cells too."""
        if at not in self.found:
            row = self.structures.layouts[at]
            self.found[at], used = row.objective(self.weights)
            if not used.all():
                groups = zip(row.structure.groups, used, strict=True)
                fewer = self.look(tuple(group.workers for group, is_used in groups if is_used))
                if fewer is not None:
                    self._weigh(fewer)
        return self.found[at]

    def _walk(self, at: int) -> None:
        """Move on while some tentative move is better; where all are known, the ranking has seen them."""
        while self.left > 0 and (at, self.level) not in self.state.explored:
            best = at
            cells = tuple(group.workers for group in self.structures.layouts[at].structure.groups)
            for other in neighbours(self.state, cells):
                tried = self.look(other)
                if tried is not None and self._weigh(tried) < self._weigh(best) * _BETTER:
                    best = tried
                if self.left <= 0 or self._is_spent():
                    break  # what was not looked at is no neighbour that is known
            else:
                self.state.explored.add((at, self.level))
            if best == at:
                return
            at = best

    def _improve(self) -> None:
        """Find better orders and cuts of structures that these may make the best."""
        structures, state, left = self.structures, self.state, _MOST_IMPROVED
        weights, dearness = self.weights, state.dearness(self.weights)
        hope = structures.objective(weights) - structures.spare(weights)
        shortlist = _SHORTLIST if weights.busy.any() or weights.sent.any() else 1
        for place, at in enumerate(np.argsort(hope, kind="stable").tolist()):
            if place >= shortlist and hope[at] >= min(self.found.values()):
                break
            if left <= 0 or self._is_spent():
                break
            if (at, dearness) not in state.settled_at:
                state.settled_at.add((at, dearness))
                left -= 1
                better = state.improved(structures.layouts[at], weights)
                if better is not None:
                    new = structures.known.get(better.structure)
                    new = structures.add(better) if new is None else new
                    structures.known[better.structure] = new
                    state.settled_at.add((new, dearness))
                    self._weigh(new)

    def best(self) -> Choice:
        """Return the best of the shortlist in whole samples."""
        best: Choice | None = None
        least = math.inf
        for place, at in enumerate(sorted(self.found, key=lambda at: (self.found[at], at))):
            if self.found[at] >= least or (place >= _MOST_WHOLE and best is not None):
                break
            row = self.structures.layouts[at]
            named = (
                row.structure if self.running is None else renamed(self.state, row.structure, self.running)
            )
            choice = self.state.chosen(row, named, self.weights)
            worth = self.objective.of(choice)
            if best is None or worth < least:
                best, least = choice, worth
        assert best is not None
        return best


class PipelineSearch:
    """Slots of pipelines side by side, or of one whose stages split micro-batches: searched."""

    def __init__(
        self,
        chain: Chain,
        budgets: Sequence[Budget],
        *,
        batch: int,
        micro_batch: int,
        max_stages: int,
        reading: str = DP_OVER_MP,
    ):
        self.chain, self.budgets, self.cache = chain, tuple(budgets), SearchCache()
        self.reading = reading
        self._asked: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch, "max_stages": max_stages}

    def compare(self, state: State, objective: Objective, running: Structure | None) -> Compared:
        """Return what a search finds that starts from the running structure."""
        best = solve_slot(
            self.chain,
            state,
            time_weight=objective.time,
            cost_weights=objective.costs,
            budgets=self.budgets,
            running=running,
            cache=self.cache,
            reading=self.reading,
            **self._asked,
        )
        stay = np.inf
        if running is not None and state.available[list(running.workers)].all():
            stay = objective.of(self.kept(state, running, objective))
        return Compared(best=best.structure, best_worth=objective.of(best), stay_worth=stay)

    def kept(self, state: State, structure: Structure, objective: Objective) -> Choice:
        """Return the best shares of a structure that is kept, remembered where only seconds decide."""
        return self._state(state).kept(structure, objective.weights(state))

    def _state(self, state: State) -> StateCache:
        kind, apart = _STATES_OF[self.reading], workers_apart(self.budgets)
        return self.cache.state(kind, self.chain, state, apart=apart, **self._asked)

    def rows(self, state: State) -> Rows:
        """Return the structures of a state that were looked at so far; a first look where there was none."""
        structures = self._state(state).structures
        if not structures.layouts:
            with contextlib.suppress(InfeasibleError):
                self.compare(state, Objective(time=1.0, costs={}, budgets=self.budgets), None)
        return structures.table(state, self.budgets)

    def structure_at(self, state: State, row: int, running: Structure) -> Structure:
        """Return the structure of a row, by the names of workers that are nearest to the running one."""
        known = self._state(state)
        return renamed(known, known.structures.layouts[row].structure, running)


class ReplicaSearch:
    """Slots of workers that hold the whole model each: all subsets are listed while they are not too many."""

    def __init__(self, chain: Chain, budgets: Sequence[Budget], *, batch: int, micro_batch: int):
        self.chain, self.budgets, self._batch, self._micro_batch = chain, tuple(budgets), batch, micro_batch
        self._known: OrderedDict[bytes, tuple[SubsetClasses, np.ndarray] | None] = OrderedDict()
        self._structures: dict[tuple[int, ...], Structure] = {}
        self._searched = PipelineSearch(chain, budgets, batch=batch, micro_batch=micro_batch, max_stages=1)

    def compare(self, state: State, objective: Objective, running: Structure | None) -> Compared:
        """Return the best of all subsets; of those that are alike the one nearest to the running one."""
        found = self._listed(state)
        if found is None:
            return self._searched.compare(state, objective, running)
        kinds, costs = found
        score = objective.of_rows(kinds.time_s, costs)
        best = int(np.argmin(score))
        kept = kinds.subset(running.workers) if running is not None else None
        chosen = running if kept == best and running is not None else self._structure(kinds, best, running)
        return Compared(
            best=chosen,
            best_worth=float(score[best]),
            stay_worth=np.inf if kept is None else float(score[kept]),
        )

    def kept(self, state: State, structure: Structure, objective: Objective) -> Choice:
        """Return the best shares of a structure that is kept, remembered where only seconds decide."""
        return self._searched.kept(state, structure, objective)

    def _structure(self, kinds: SubsetClasses, subset: int, running: Structure | None) -> Structure:
        workers = kinds.devices(subset, running.workers if running is not None else ())
        if workers not in self._structures:
            if len(self._structures) > _MOST_STRUCTURES:
                self._structures.clear()
            self._structures[workers] = data_parallel(workers, self.chain)
        return self._structures[workers]

    def rows(self, state: State) -> Rows:
        """Return all subsets of a state."""
        found = self._listed(state)
        return self._searched.rows(state) if found is None else (found[0].time_s, found[1])

    def structure_at(self, state: State, row: int, running: Structure) -> Structure:
        """Return the structure of a row, by the names of workers that are nearest to the running one."""
        found = self._listed(state)
        if found is None:
            return self._searched.structure_at(state, row, running)
        return self._structure(found[0], row, running)

    def _listed(self, state: State) -> tuple[SubsetClasses, np.ndarray] | None:
        """Return the subsets of a state and what they cost; None where they are too many."""
        key = state.key()
        if key not in self._known:
            try:
                kinds = SubsetClasses.of(
                    self.chain,
                    state,
                    self._batch,
                    micro_batch=self._micro_batch,
                    apart=workers_apart(self.budgets),
                    most=_MOST_SUBSETS,
                )
                self._known[key] = kinds, kinds.column(self.budgets)
            except TooManyError:
                self._known[key] = None
            if len(self._known) > _MOST_LISTED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def slots_of(
    reading: str, chain: Chain, budgets: Sequence[Budget], *, max_stages: int, **asked: Any
) -> PipelineSearch | ReplicaSearch:
    """Return the slots of a reading: stages of several workers, pipelines, or replicas without stages."""
    if reading not in (DP_OVER_MP, MP_OVER_DP):
        raise unknown("reading", reading, (DP_OVER_MP, MP_OVER_DP), key="reading", rule="Plans are read as")
    if reading == DP_OVER_MP and max_stages == 1:
        return ReplicaSearch(chain, budgets, **asked)
    return PipelineSearch(chain, budgets, max_stages=max_stages, reading=reading, **asked)


def reshare(
    chain: Chain, state: State, structure: Structure, objective: Objective, *, batch: int, micro_batch: int
) -> Choice:
    """Return the best shares of a structure that is kept (`StateCache.reshared`)."""
    reshared = _STATES_OF[structure.reading].reshared
    return reshared(chain, state, structure, objective.weights(state), batch=batch, micro_batch=micro_batch)
