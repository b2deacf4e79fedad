"""Stages of several workers in one state, remembered: the best cuts, whole structures in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from foreshard.control.search.cache import Groups, SearchCache
from foreshard.control.search.cached_structures import CachedStructures, Weights
from foreshard.control.search.costs import Costs
from foreshard.control.search.device_classes import kinds_of
from foreshard.control.search.joint_stage import JointStage
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.stage_splits import Staging, restaged
from foreshard.control.slots import MP_OVER_DP, Chain, Choice, State, Structure, WorkerPipeline

_STAGES = 4096
Level = tuple[int, int]
"""How dear busy seconds and bytes are against time, as powers: what decides on cuts and splits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A structure in a state, with shares."""

    choice: Choice

    @property
    def worker(self) -> np.ndarray:
        """Return the workers in use."""
        return np.array(self.choice.structure.workers, dtype=int)

    def taken(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Return seconds of a batch, and by worker the busy seconds and the dollars for bytes sent."""
        costs = self.choice.costs
        assert isinstance(costs, Costs)
        return self.choice.time_s, costs.by_worker("duty"), costs.by_worker("egress_usd")


@dataclass(kw_only=True)
class StageMemo(SearchCache["StageLandscape"]):
    """What searches of stages of several workers remember."""

    stages: dict[object, JointStage] = field(default_factory=dict)

    def made(
        self, chain: Chain, state: State, batch: int, micro_batch: int, max_stages: int, apart: frozenset[int]
    ) -> StageLandscape:
        """Return the landscape of a new state; now and then all stages make room."""
        found = StageLandscape(chain, state, batch, micro_batch, max_stages, apart, self)
        if len(self.stages) > _STAGES:
            self.stages.clear()
        return found

    def forget(self) -> None:
        """Forget everything: it was of another chain."""
        super().forget()
        self.stages.clear()


class StageLandscape:
    """Structures of stages in one state."""

    def __init__(
        self,
        chain: Chain,
        state: State,
        batch: int,
        micro_batch: int,
        max_stages: int,
        apart: frozenset[int],
        memo: StageMemo,
    ):
        self.chain, self.state, self.memo = chain, state, memo
        self.batch, self.micro_batch = batch, micro_batch
        self.max_stages = min(max_stages, chain.num_layers)
        self.alive = [int(worker) for worker in np.flatnonzero(state.available & (state.speed > 0))]
        self.kind = kinds_of(chain, state, apart, memo.links)
        self._staging = Staging(chain, state, batch, micro_batch, memo.stages)
        self.library = CachedStructures[Staged](chain.num_workers)
        self.everything: list[Groups] | None = None
        self.visits = 0
        self.explored: set[tuple[int, Level]] = set()
        self.complete: set[Level] = set()
        self.changes: dict[tuple[Structure, int], tuple[Structure, float]] = {}
        self._kept: dict[Structure, Choice] = {}

    def signature(self, stages: Groups) -> tuple[tuple[int, ...], ...]:
        """Return what is equal for structures that differ in names of workers only."""
        return tuple(tuple(sorted([self.kind[worker] for worker in stage])) for stage in stages)

    def fits(self, stages: Groups) -> bool:
        """Return whether there may be so many stages of so many workers."""
        widest = max(map(len, stages), default=0)
        return 0 < len(stages) <= self.max_stages and 0 < widest <= self.micro_batch

    def choice(self, stages: Groups, weights: Weights) -> Choice | None:
        """Return stages with the best cuts and splits; None where none fits."""
        stages = tuple(tuple(sorted(stage)) for stage in stages)
        found = self._staging.settled(stages, weights)
        if found is None:
            return None
        groups = tuple(
            WorkerPipeline(workers=w, cuts=span) for w, span in zip(stages, pairwise(found[0]), strict=True)
        )
        return self.priced(Structure(groups=groups, reading=MP_OVER_DP), found[1])

    def kept(self, structure: Structure, weights: Weights) -> Choice:
        """Return stages that are kept with the best splits."""
        free = not weights.busy.any() and not weights.sent.any()
        if free and structure in self._kept:
            return self._kept[structure]
        found = restaged(
            self.chain, self.state, structure, weights, batch=self.batch, micro_batch=self.micro_batch
        )
        if free:
            self._kept[structure] = found
        return found

    def priced(self, structure: Structure, shares: Sequence[int]) -> Choice:
        """Return a structure with shares as it goes in this state."""
        return evaluate(
            self.chain, self.state, structure, shares, micro_batch=self.micro_batch, batch=self.batch
        )
