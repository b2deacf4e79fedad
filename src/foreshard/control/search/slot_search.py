"""What searches slots of each kind of plan: pipelines, joint stages, or all subsets of replicas by kinds."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.control.budgets.objective import reshare, worth_of
from foreshard.control.budgets.queues import Curve
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.grouping import solve_slot
from foreshard.control.search.stage_cache import StageMemo
from foreshard.control.search.stage_search import solve_stages
from foreshard.control.search.state_cache import StructureMemo
from foreshard.control.search.subsets import SubsetClasses, TooManyError, data_parallel
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
from foreshard.errors import InfeasibleError, SpecError

_STATES = 512
_MOST_SUBSETS = 20_000
_MOST_STRUCTURES = 10_000
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


class PipelineSearch:
    """Slots of pipelines of up to so many stages: searched, see `grouping`."""

    _solve: Callable[..., Choice] = staticmethod(solve_slot)
    _memo: Callable[[], Any] = StructureMemo

    def __init__(
        self, chain: Chain, budgets: Sequence[Budget], *, batch: int, micro_batch: int, max_stages: int
    ):
        self.chain, self.budgets, self.memo = chain, tuple(budgets), self._memo()
        self._asked: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch}
        self._max_stages = max_stages
        self._apart = workers_apart(budgets)

    def compare(
        self,
        state: State,
        time_weight: float,
        cost_weights: Mapping[str, float],
        running: Structure | None,
        change_weight: float = 0.0,
        curve: Curve | None = None,
    ) -> Compared:
        """Return what a search finds that starts from the running structure."""
        best = self._solve(
            self.chain,
            state,
            time_weight=time_weight,
            cost_weights=cost_weights,
            budgets=self.budgets,
            running=running,
            change_weight=change_weight,
            curve=curve,
            memo=self.memo,
            max_stages=self._max_stages,
            **self._asked,
        )
        stay = np.inf
        if running is not None and state.available[list(running.workers)].all():
            kept = self._kept(state, running, time_weight, cost_weights)
            stay = worth_of(kept, time_weight, cost_weights, self.budgets, curve)
        worth = worth_of(best, time_weight, cost_weights, self.budgets, curve)
        return Compared(best=best.structure, best_worth=worth, stay_worth=stay)

    def _kept(
        self, state: State, running: Structure, time_weight: float, cost_weights: Mapping[str, float]
    ) -> Choice:
        """Return the running structure with its best shares."""
        return reshare(
            self.chain,
            state,
            running,
            time_weight=time_weight,
            cost_weights=cost_weights,
            budgets=self.budgets,
            **self._asked,
        )

    def _landscape(self, state: State) -> Any:
        return self.memo.landscape(
            self.chain, state, max_stages=self._max_stages, apart=self._apart, **self._asked
        )

    def rows(self, state: State) -> Rows:
        """Return the structures of a state that were looked at so far; a first look where there was none."""
        library = self._landscape(state).library
        if not library.layouts:
            with contextlib.suppress(InfeasibleError):
                self.compare(state, 1.0, dict.fromkeys((one.name for one in self.budgets), 0.0), None)
        return library.table(state, self.budgets)


class StageSearch(PipelineSearch):
    """Slots of one pipeline whose stages are workers that split every micro-batch: searched, see `stages`."""

    _solve: Callable[..., Choice] = staticmethod(solve_stages)
    _memo: Callable[[], Any] = StageMemo

    def _kept(
        self, state: State, running: Structure, time_weight: float, cost_weights: Mapping[str, float]
    ) -> Choice:
        """Return the running structure with its best splits, those of a state seen before from memory."""
        weights = Weights.of(state, time_weight, cost_weights, self.budgets)
        found: Choice = self._landscape(state).kept(running, weights)
        return found


class ReplicaSearch:
    """Slots of workers that hold the whole model each: all subsets are listed while they are not too many."""

    def __init__(self, chain: Chain, budgets: Sequence[Budget], *, batch: int, micro_batch: int):
        self.chain, self.budgets, self._batch, self._micro_batch = chain, tuple(budgets), batch, micro_batch
        self._known: OrderedDict[bytes, tuple[SubsetClasses, np.ndarray] | None] = OrderedDict()
        self._structures: dict[tuple[int, ...], Structure] = {}
        self._apart = workers_apart(budgets)
        self._searched = PipelineSearch(chain, budgets, batch=batch, micro_batch=micro_batch, max_stages=1)

    def compare(
        self,
        state: State,
        time_weight: float,
        cost_weights: Mapping[str, float],
        running: Structure | None,
        change_weight: float = 0.0,
        curve: Curve | None = None,
    ) -> Compared:
        """Return the best of all subsets; of those that are alike the one nearest to the running one."""
        found = self._listed(state)
        if found is None:
            return self._searched.compare(state, time_weight, cost_weights, running, change_weight, curve)
        kinds, costs = found
        score = time_weight * kinds.time_s
        if self.budgets:
            score = score + costs @ np.array([cost_weights[one.name] for one in self.budgets])
        if curve is not None:
            score = score + curve.extra(kinds.time_s, costs)
        best = int(np.argmin(score))
        kept = kinds.subset(running.workers) if running is not None else None
        chosen = running if kept == best and running is not None else self._structure(kinds, best, running)
        return Compared(
            best=chosen,
            best_worth=float(score[best]),
            stay_worth=np.inf if kept is None else float(score[kept]),
        )

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
                    apart=self._apart,
                    most=_MOST_SUBSETS,
                )
                self._known[key] = kinds, kinds.column(self.budgets)
            except TooManyError:
                self._known[key] = None
            if len(self._known) > _STATES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def slots_of(
    reading: str, chain: Chain, budgets: Sequence[Budget], *, max_stages: int, **asked: Any
) -> PipelineSearch | ReplicaSearch:
    """Return the slots of a reading: stages of several workers, pipelines, or replicas without stages."""
    if reading not in (DP_OVER_MP, MP_OVER_DP):
        raise SpecError(
            f"unknown reading {reading!r}",
            key="reading",
            value=reading,
            rule=f"Plans are read as {DP_OVER_MP} or {MP_OVER_DP}",
        )
    if reading == MP_OVER_DP:
        return StageSearch(chain, budgets, max_stages=max_stages, **asked)
    if max_stages == 1:
        return ReplicaSearch(chain, budgets, **asked)
    return PipelineSearch(chain, budgets, max_stages=max_stages, **asked)
