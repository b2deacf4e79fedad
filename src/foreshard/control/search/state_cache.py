"""What structures take in one state, remembered: kinds of workers, fronts of pipelines, times of structures.

Everything here is free of weights, so that a state seen before costs a look-up, however far queues moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.control.search import cuts, pricing
from foreshard.control.search.cache import Groups, SearchCache
from foreshard.control.search.cached_structures import CachedStructures, Weights
from foreshard.control.search.device_classes import kinds_of
from foreshard.control.search.shares import Split, linear_shares, water_filling
from foreshard.control.slots import Chain, Choice, State, Structure, WorkerPipeline

_FRONTS = 20_000
_LEVEL = 16.0
"""Prices of messages are rounded to powers of this when cuts are searched."""
_FEW, _GRAIN = 12, 0.02
"""In longer chains than this, slowest stages closer than the grain are one point of the front."""
_LEAST_ROUNDS = 4.0
"""In longer chains points are left out that are best only for fewer micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerUnit:
    """A pipeline in a state.

    Attributes
    ----------
    pipeline : WorkerPipeline
    fill_s, slowest_s : float
        Of a micro-batch.
    stage_s : ndarray, shape (stages,)
        Compute per sample.
    sent_usd : ndarray, shape (stages,)
        What activations and their gradients cost to send, per sample.
    """

    pipeline: WorkerPipeline
    fill_s: float
    slowest_s: float
    stage_s: np.ndarray
    sent_usd: np.ndarray


@dataclass(slots=True, kw_only=True, eq=False)
class PipelineLayout:
    """A structure in a state.

    Attributes
    ----------
    structure : Structure
    worker, group : ndarray of int, shape (stages,)
    start_s, rate_s : ndarray, shape (groups,)
    stage_s, sent_usd : ndarray, shape (stages,)
    ring_usd : ndarray, shape (stages,)
        What the sum of gradients costs to send.
    fastest : Split
    """

    structure: Structure
    worker: np.ndarray
    group: np.ndarray
    start_s: np.ndarray
    rate_s: np.ndarray
    stage_s: np.ndarray
    sent_usd: np.ndarray
    ring_usd: np.ndarray
    fastest: Split

    def taken(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Return seconds of a batch, and by worker the busy seconds and the dollars for bytes sent."""
        shares = self.fastest.shares[self.group]
        return self.fastest.time_s, shares * self.stage_s, shares * self.sent_usd + self.ring_usd

    def time_weight(self, weights: Weights) -> float:
        """Return what a second of this structure weighs, rent of all its workers included."""
        return weights.time + float(weights.active[self.worker].sum())

    def sample_weight(self, weights: Weights) -> np.ndarray | None:
        """Return what a sample weighs in each group; None if all weigh nothing."""
        each = weights.busy[self.worker] * self.stage_s + weights.sent[self.worker] * self.sent_usd
        if not each.any():
            return None
        return np.bincount(self.group, each, minlength=len(self.start_s))

    def split(self, weights: Weights, batch: int) -> Split:
        """Return the best shares, parts of samples allowed, and all they weigh."""
        time_weight, cost = self.time_weight(weights), self.sample_weight(weights)
        ring = float(weights.sent[self.worker] @ self.ring_usd)
        if cost is None:
            worth = time_weight * self.fastest.time_s + ring
            return Split(shares=self.fastest.shares, time_s=self.fastest.time_s, worth=worth)
        split = linear_shares(self.start_s, self.rate_s, batch, time_weight=time_weight, sample_weight=cost)
        return Split(shares=split.shares, time_s=split.time_s, worth=split.worth + ring)


@dataclass(kw_only=True)
class StructureMemo(SearchCache["StateCache"]):
    """What searches of pipelines remember."""

    fronts: dict[object, tuple[cuts.PipelineCut, ...]] = field(default_factory=dict)
    mixes: dict[object, list[tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    effort: cuts.Effort = field(default_factory=cuts.Effort)

    def made(
        self, chain: Chain, state: State, batch: int, micro_batch: int, max_stages: int, apart: frozenset[int]
    ) -> StateCache:
        """Return the landscape of a new state; now and then all fronts make room."""
        found = StateCache(chain, state, batch, micro_batch, max_stages, apart, self)
        if len(self.fronts) > _FRONTS:
            self.fronts.clear()
        return found

    def forget(self) -> None:
        """Forget everything: it was of another chain."""
        super().forget()
        self.fronts.clear()
        self.mixes.clear()


class StateCache:
    """Structures in one state."""

    def __init__(
        self,
        chain: Chain,
        state: State,
        batch: int,
        micro_batch: int,
        max_stages: int,
        apart: frozenset[int],
        memo: StructureMemo,
    ):
        self.chain, self.state, self.memo = chain, state, memo
        self.batch, self.micro_batch, self.max_stages = batch, micro_batch, max_stages
        self.alive = [int(worker) for worker in np.flatnonzero(state.available & (state.speed > 0))]
        self.kind = kinds_of(chain, state, apart, memo.links)
        self.egress = bool(state.usd_per_byte.any())
        self.everything: list[Groups] | None = None
        self.visits = 0
        self.explored: set[tuple[int, int]] = set()
        self.library = CachedStructures[PipelineLayout](chain.num_workers)
        self.chosen: dict[Structure, Choice] = {}
        self._layouts: dict[object, PipelineLayout] = {}
        self._units: dict[object, WorkerUnit] = {}
        self._front: dict[object, tuple[cuts.PipelineCut, ...]] = {}

    def signature(self, groups: Groups) -> tuple[tuple[int, ...], ...]:
        """Return what is equal for structures that differ in names of workers only."""
        kind = self.kind
        return tuple(sorted([tuple(sorted([kind[worker] for worker in group])) for group in groups]))

    def fits(self, group: Sequence[int]) -> bool:
        """Return whether some order and cuts of a pipeline of these workers hold the model."""
        return len(group) <= self.max_stages and bool(self.front_of(group, 0))

    def front_of(self, group: Sequence[int], level: int) -> tuple[cuts.PipelineCut, ...]:
        """Return the front of a pipeline of these workers, kinds by place in the sorted list of kinds."""
        kinds = tuple(sorted(self.kind[worker] for worker in group))
        key = (kinds, level)
        if key not in self._front:
            self._front[key] = self._remembered_front(group, level)
        return self._front[key]

    def _remembered_front(self, group: Sequence[int], level: int) -> tuple[cuts.PipelineCut, ...]:
        """Return the front from any state in which such workers were so fast and so far apart."""
        members = self._by_kind(group)
        first = [workers[0] for workers in members.values()]
        chain, state = self.chain, self.state
        second = [workers[-1] for workers in members.values()]
        links = tuple(
            (float(state.bandwidth_bytes_per_s[a, b]), float(state.latency_s[a, b]), self._message_usd(a, b))
            for a in first
            for b in second
            if a != b
        )
        rows = tuple(
            (hash(chain.layer_s[w].tobytes()), float(state.speed[w]), float(chain.memory_bytes[w]))
            for w in first
        )
        counts = tuple(len(workers) for workers in members.values())
        key = (self.micro_batch, self.batch, rows, counts, links, level)
        if key not in self.memo.fronts:
            table = self._stage_kinds(first, second, level)
            self.memo.fronts[key] = cuts.front(
                table,
                counts,
                grain=_GRAIN if chain.num_layers > _FEW else 0.0,
                least_rounds=_LEAST_ROUNDS if chain.num_layers > _FEW else 1.0,
                effort=self.memo.effort,
            )
        return self.memo.fronts[key]

    def _by_kind(self, group: Sequence[int]) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for worker in sorted(group, key=lambda one: (self.kind[one], one)):
            members.setdefault(self.kind[worker], []).append(worker)
        return members

    def _message_usd(self, a: int, b: int) -> float:
        """Return dollars per byte, the mean of both directions."""
        prices = self.state.usd_per_byte
        return 0.5 * float(prices[a, b] + prices[b, a]) if self.egress else 0.0

    def _stage_kinds(self, first: Sequence[int], second: Sequence[int], level: int) -> cuts.DeviceClasses:
        chain, state, size = self.chain, self.state, self.chain.num_layers + 1
        before = chain.before_s[first] / state.speed[first][:, None]
        span = np.arange(size)[None, :] > np.arange(size)[:, None]
        seconds = np.where(span, self.micro_batch * (before[:, None, :] - before[:, :, None]), np.inf)
        sent = self.micro_batch * np.concatenate([[0.0], chain.boundary_bytes, [0.0]])
        hop, extra = np.zeros((len(first), len(first), size)), np.zeros((len(first), len(first), size))
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                if a != b:
                    hop[i, j] = 2.0 * state.latency_s[a, b] + sent / state.bandwidth_bytes_per_s[a, b]
                    extra[i, j] = sent * self._message_usd(a, b) * (_LEVEL**level if level else 0.0)
        states = chain.before_state[None, :] - chain.before_state[:, None]
        saved = self.micro_batch * (chain.before_saved[None, :] - chain.before_saved[:, None])
        rounds = -(-self.batch // self.micro_batch)

        def room(kind: int, depth: int) -> np.ndarray:
            return np.asarray(states + min(depth, rounds) * saved <= chain.memory_bytes[first[kind]])

        return cuts.DeviceClasses(
            seconds=seconds, hop_s=hop, room=room, hop_extra=extra if extra.any() else None
        )

    def unit(self, group: Sequence[int], cut: cuts.PipelineCut) -> WorkerUnit:
        """Return a pipeline of these workers with an order and cuts of their front."""
        key = (tuple(group), cut)
        if key not in self._units:
            members = self._by_kind(group)
            left = [list(workers) for workers in members.values()]
            order = [left[kind].pop(0) for kind in cut.order]
            self._units[key] = self.unit_of(WorkerPipeline(workers=tuple(order), cuts=cut.cuts))
        return self._units[key]

    def unit_of(self, pipeline: WorkerPipeline) -> WorkerUnit:
        """Return a pipeline as it goes in this state."""
        chain, state = self.chain, self.state
        alone = Structure(groups=(pipeline,))
        worker, _, first, stop = spans = pricing.stage_spans(alone)
        stage_s = pricing.stage_s(chain, state, worker, first, stop)
        period = self.micro_batch * stage_s
        if len(worker) > 1:
            period[1:] += 2.0 * state.latency_s[worker[:-1], worker[1:]] + (
                self.micro_batch
                * chain.boundary_bytes[first[1:] - 1]
                / state.bandwidth_bytes_per_s[worker[:-1], worker[1:]]
            )
        sent = np.zeros(len(worker))
        if self.egress:
            sent = pricing.boundary_usd(chain, state, spans, np.ones(1))[worker]
        return WorkerUnit(
            pipeline=pipeline,
            fill_s=float(period.sum()),
            slowest_s=float(period.max()),
            stage_s=stage_s,
            sent_usd=sent,
        )

    def layout(self, units: Sequence[WorkerUnit]) -> PipelineLayout:
        """Return a structure of pipelines."""
        key = tuple(unit.pipeline for unit in units)
        if key not in self._layouts:
            self._layouts[key] = self._layout(units)
        return self._layouts[key]

    def _layout(self, units: Sequence[WorkerUnit]) -> PipelineLayout:
        structure = Structure(groups=tuple(unit.pipeline for unit in units))
        sizes = [len(unit.stage_s) for unit in units]
        worker = np.array(structure.workers, dtype=int)
        sync = pricing.sync_s(self.chain, self.state, structure).max()
        start = np.array([unit.fill_s - unit.slowest_s for unit in units]) + sync
        rate = np.array([unit.slowest_s for unit in units]) / self.micro_batch
        ring = np.zeros(len(worker))
        if self.egress:
            ring = pricing.sync_usd(self.chain, self.state, structure)[worker]
        return PipelineLayout(
            structure=structure,
            worker=worker,
            group=np.repeat(np.arange(len(units)), sizes),
            start_s=start,
            rate_s=rate,
            stage_s=np.concatenate([unit.stage_s for unit in units]),
            sent_usd=np.concatenate([unit.sent_usd for unit in units]),
            ring_usd=ring,
            fastest=water_filling(start, rate, float(self.batch)),
        )
