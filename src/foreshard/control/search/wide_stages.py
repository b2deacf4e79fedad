"""Stages of several workers (`mp_over_dp`): a cell is a stage of the pipeline, and splits micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreshard.control.budgets.objective import Weights
from foreshard.control.search.cache import Cells, SearchCache
from foreshard.control.search.costs import Costs, message_s, slowest_link, stage_link
from foreshard.control.search.cuts import LONG_CHAIN, CutSearch, PipelineCut, Tables, points
from foreshard.control.search.joint_stage import JointStage, splits_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.state_cache import Level, StateCache, StructureRow
from foreshard.control.slots import MP_OVER_DP, Chain, Choice, State, Structure, WorkerPipeline

_FEW_WORKERS = 6
"""Workers of which a new state is searched to the end at once, in up to a second."""
EXHAUSTIVE, EXHAUSTIVE_FEW = 220, 1000
"""Structures up to which all are compared, and of few workers: each takes about a millisecond."""
_GRAIN = 0.01
"""In long chains, slowest stages closer than this part are one: estimates are no finer."""

Found = tuple[tuple[int, ...], tuple[int, ...]]
"""Where stages begin, and the end; samples of a micro-batch by worker, stage after stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedChoice:
    """Stages in a state, with shares."""

    choice: Choice

    @property
    def structure(self) -> Structure:
        """Return the structure."""
        return self.choice.structure

    @property
    def worker(self) -> np.ndarray:
        """Return the workers in use."""
        return np.array(self.structure.workers, dtype=int)

    @property
    def spare_s(self) -> float:
        """Return 0: cuts and splits of stages are the best."""
        return 0.0

    def taken(self) -> tuple[float, np.ndarray, np.ndarray]:
        """Return seconds of a batch, and by worker the busy seconds and the dollars for bytes sent."""
        costs = self.choice.costs
        assert isinstance(costs, Costs)
        return self.choice.time_s, costs.by_worker("duty"), costs.by_worker("egress_usd")

    def objective(self, weights: Weights) -> tuple[float, np.ndarray]:
        """Return what the slot minimises; all stages have samples."""
        at, (time_s, busy_s, sent_usd) = self.worker, self.taken()
        active = weights.time + float(weights.active[at].sum())
        cost = float(weights.busy[at] @ busy_s) + float(weights.sent[at] @ sent_usd)
        return active * time_s + cost, np.ones(len(self.structure.groups), bool)


class StageSplitter:
    """Cuts of given stages, and how they split micro-batches, in one state.

    Parameters
    ----------
    chain, state
    batch, micro_batch : int, samples
    cache : SearchCache
        Of the chain: stages met before, in any state.
    """

    def __init__(self, chain: Chain, state: State, batch: int, micro_batch: int, cache: SearchCache):
        self.chain, self.state, self._cache = chain, state, cache
        self.batch, self.micro_batch, self.rounds = batch, micro_batch, batch / micro_batch

    def settled(self, stages: Cells, weights: Weights) -> Found | None:
        """Return the best cuts and splits of stages of sorted workers; None where none fits.

        Exact for chains of up to 12 layers, for longer ones within 1 % of the stages' compute and messages.
        """
        joint = [self._joint(stage, weights) for stage in stages]
        active = weights.active[[worker for stage in stages for worker in stage]]
        weight = max(weights.time + float(active.sum()), 1e-12)
        tables: list[Tables] = []
        fastest: list[np.ndarray | None] = []
        for k, stage in enumerate(stages):
            depth = int(min(len(stages) - k, np.ceil(self.rounds)))
            period_s = np.where(joint[k].fits(depth), joint[k].passing_s, np.inf)
            if k:
                period_s = period_s + self._hops(stages[k - 1], stage)[:, None]
            cost = self._cost(stages[k - 1] if k else (), stage, joint[k], weights)
            # Where only time counts, of all splits of a span the fastest is best.
            fastest.append(period_s.argmin(0) if cost is None else None)
            period_s = period_s.min(0) if cost is None else period_s
            tables.append((period_s, weight * period_s + (0.0 if cost is None else cost)))
        found = self._least(tables, [stage.sync_s for stage in joint], weight)
        if found is None:
            return None
        shares: list[int] = []
        for k, span in enumerate(pairwise(found.cuts)):
            table = fastest[k]
            split = found.splits[k] if table is None else int(table[span])
            shares += joint[k].splits[split].tolist()
        return found.cuts, tuple(shares)

    def _least(
        self, tables: Sequence[Tables], sync_s: Sequence[np.ndarray], weight: float
    ) -> PipelineCut | None:
        """Return the cuts of least weighed seconds and costs.

        A batch takes fill + (rounds - 1) * slowest stage + longest sum of gradients: while a shorter sum may
        pay, cuts are searched among those in which no stage sums as long as the best so far.
        """
        each = max(self.rounds - 1.0, 0.0) * weight
        grain = _GRAIN if self.chain.num_layers > LONG_CHAIN else 0.0
        best, least, limit = None, math.inf, math.inf
        while True:

            def stage(before: int, this: int, depth: int, limit: float = limit) -> Tables:
                if limit == math.inf:
                    return tables[this]
                allowed = sync_s[this] < limit
                return np.where(allowed, tables[this][0], np.inf), np.where(allowed, tables[this][1], np.inf)

            search = CutSearch(stage, (1,) * len(tables), range(len(tables)), self._cache.effort)
            found = points(search, grain, each, least)
            if not each:
                found = itertools.islice(found, 1)
            cut = min(found, key=lambda cut: cut.weighed + each * cut.slowest_s, default=None)
            if cut is None or cut.weighed + each * cut.slowest_s >= least:
                return best
            longest_s = max(
                float(table[span]) for table, span in zip(sync_s, pairwise(cut.cuts), strict=True)
            )
            total = cut.weighed + each * cut.slowest_s + weight * longest_s
            if total < least:
                best, least = cut, total
            if longest_s <= 0.0:
                return best
            limit = longest_s

    def _joint(self, stage: tuple[int, ...], weights: Weights) -> JointStage:
        """Return a stage as in any state in which such workers were so fast and so far apart."""
        chain, state, at = self.chain, self.state, list(stage)
        full_s = chain.before_s[at, -1] / state.speed[at]
        busy = weights.busy[at] if len(at) > 1 and weights.busy[at].any() else None
        key = (
            tuple(hash(chain.layer_s[w].tobytes()) for w in at),
            tuple(state.speed[at].tolist()),
            tuple(chain.memory_bytes[at].tolist()),
            slowest_link(state, at) if len(at) > 1 else None,
            self.micro_batch,
            None if busy is None else tuple(np.argsort(busy * full_s, kind="stable").tolist()),
        )

        def made() -> JointStage:
            splits = splits_of(full_s, chain.memory_bytes[at], self.micro_batch, busy)
            return JointStage.of(chain, state, stage, splits)

        return self._cache.table(key, made)

    def _hops(self, before: tuple[int, ...], stage: tuple[int, ...]) -> np.ndarray:
        """Return the seconds of a message to a stage that begins at each layer."""
        chain = self.chain
        rate, latency = stage_link(self.state, before, stage)
        found = np.zeros(chain.num_layers + 1)
        wide = min(len(before), len(stage))
        found[1:-1] = message_s(self.micro_batch * chain.boundary_bytes, wide * rate, latency)
        return found

    def _cost(
        self, before: tuple[int, ...], stage: tuple[int, ...], joint: JointStage, weights: Weights
    ) -> np.ndarray | None:
        """Return what a batch costs on every span besides its time; None where it costs nothing else."""
        chain, usd, at, size = self.chain, self.state.usd_per_byte, list(stage), self.chain.num_layers + 1
        found = np.zeros((size, size))
        if weights.sent.any() and usd.any():
            sent = weights.sent[:, None] * usd
            if before:
                both = sent[np.ix_(before, at)].sum() + sent[np.ix_(at, before)].sum()
                each = 0.5 * self.batch * both / (len(before) * len(at))
                found[1:-1] += each * chain.boundary_bytes[:, None]
            if len(at) > 1:
                ring = sent[at, np.roll(at, -1)].sum() * 2.0 * (len(at) - 1) / len(at)
                found += ring * (chain.before_sync[None, :] - chain.before_sync[:, None])
        if not weights.busy[at].any():
            return np.broadcast_to(found, joint.passing_s.shape) if found.any() else None
        busy = self.rounds * np.tensordot(joint.busy_s, weights.busy[at], axes=(1, 0))
        return np.asarray(found + busy)


def _even(stages: Cells, micro_batch: int) -> tuple[int, ...]:
    return tuple(
        micro_batch // len(stage) + (place < micro_batch % len(stage))
        for stage in stages
        for place in range(len(stage))
    )


def _merged(chain: Chain, cuts: tuple[int, ...]) -> Chain:
    """Return the chain whose layers are stages, so that it can be cut in one way only."""
    first, stop = np.array(cuts[:-1]), np.array(cuts[1:])
    return Chain(
        layer_s=chain.before_s[:, stop] - chain.before_s[:, first],
        boundary_bytes=chain.boundary_bytes[stop[:-1] - 1],
        sync_bytes=chain.before_sync[stop] - chain.before_sync[first],
        state_bytes=chain.before_state[stop] - chain.before_state[first],
        saved_bytes=chain.before_saved[stop] - chain.before_saved[first],
        memory_bytes=chain.memory_bytes,
    )


class StageStates(StateCache):
    """Stages of several workers in one state."""

    is_ordered = True

    def __init__(self, cache: SearchCache, *given: object):
        super().__init__(cache, *given)  # type: ignore[arg-type]
        self.widest, self.most_cells = self.micro_batch, self.max_stages
        self.exhaustive = EXHAUSTIVE_FEW if len(self.alive) <= _FEW_WORKERS else EXHAUSTIVE
        self._splitter = StageSplitter(self.chain, self.state, self.batch, self.micro_batch, cache)

    def cells_of(self, structure: Structure) -> Cells:
        """Return the workers of each stage."""
        return tuple(group.workers for group in structure.groups)

    def holds(self, cell: Sequence[int]) -> bool:
        """Return whether a micro-batch can be split so far."""
        return len(cell) <= self.micro_batch

    def cell_counts(self, takes: Iterable[int], total: int) -> Iterator[tuple[int, int]]:
        """Return every number of stages."""
        for take in takes:
            yield from ((count, take) for count in range(1, min(self.max_stages, take) + 1))

    def depth_of(self, cells: Cells) -> tuple[float, int, int]:
        """Return the stages, the one pipeline, and the workers of the widest stage."""
        return len(cells), 1, max(map(len, cells))

    def level(self, weights: Weights) -> Level:
        """Return how dear busy seconds and bytes are against time, as powers of 16."""
        chain = self.chain
        time_weight = max(weights.time + float(weights.active.sum()), 1e-12)
        bytes_per_s = float(np.max(chain.boundary_bytes, initial=1.0)) / float(chain.before_s[:, -1].min())
        sent = float(weights.sent.max() * self.state.usd_per_byte.max()) * bytes_per_s
        return tuple(
            round(math.log(price / time_weight, 16.0)) or 1 if price > 0.0 else 0
            for price in (float(np.abs(weights.busy).max()), sent)
        )

    def settled(self, cells: Cells, weights: Weights, level: Level) -> StagedChoice | None:
        """Return stages with the best cuts and splits; None where none fits."""
        if len(cells) > self.max_stages or not all(map(self.holds, cells)):
            return None
        stages = tuple(tuple(sorted(stage)) for stage in cells)
        found = self._splitter.settled(stages, weights)
        if found is None:
            return None
        spans = zip(stages, pairwise(found[0]), strict=True)
        groups = tuple(WorkerPipeline(workers=workers, cuts=span) for workers, span in spans)
        return self._running(self._priced(Structure(groups=groups, reading=MP_OVER_DP), found[1]))

    def as_is(self, structure: Structure, weights: Weights) -> StagedChoice | None:
        """Return stages with their own cuts; None where they cannot run."""
        return self._running(self.kept(structure, weights))

    def _running(self, choice: Choice) -> StagedChoice | None:
        return StagedChoice(choice=choice) if math.isfinite(choice.time_s) else None

    @staticmethod
    def reshared(
        chain: Chain, state: State, structure: Structure, weights: Weights, *, batch: int, micro_batch: int
    ) -> Choice:
        """Return the best splits of stages that are kept; its time is infinite where they cannot run."""
        cuts = (0, *(group.cuts[1] for group in structure.groups))
        stages = tuple(group.workers for group in structure.groups)
        merged = _merged(chain, cuts)
        found = StageSplitter(merged, state, batch, micro_batch, SearchCache()).settled(stages, weights)
        if found is None:
            return Choice(structure=structure, shares=_even(stages, micro_batch), time_s=math.inf, costs={})
        return evaluate(chain, state, structure, found[1], micro_batch=micro_batch, batch=batch)

    def chosen(self, row: StructureRow, structure: Structure, weights: Weights) -> Choice:
        """Return stages under the names of workers that the structure has."""
        assert isinstance(row, StagedChoice)
        return row.choice if structure == row.structure else self._priced(structure, row.choice.shares)

    def _priced(self, structure: Structure, shares: Sequence[int]) -> Choice:
        return evaluate(
            self.chain, self.state, structure, shares, micro_batch=self.micro_batch, batch=self.batch
        )
