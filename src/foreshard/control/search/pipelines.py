"""Pipelines side by side (`dp_over_mp`): a cell is a pipeline of one worker per stage, with a share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.budgets.objective import Weights
from foreshard.control.search.cache import Cells, SearchCache
from foreshard.control.search.costs import message_s
from foreshard.control.search.cuts import LONG_CHAIN, DeviceClasses, PipelineCut, front
from foreshard.control.search.pipeline_table import PipelineTable, rows_of, weighed
from foreshard.control.search.pricing import (
    StageArrays,
    boundary_usd,
    evaluate,
    least_sync_s,
    pace_of,
    runs,
    sample_s,
    sync_usd,
)
from foreshard.control.search.shares import Split, counted, linear_shares, water_filling, whole_shares
from foreshard.control.search.state_cache import Level, StateCache, StructureRow
from foreshard.control.slots import Chain, Choice, State, Structure, WorkerPipeline

EXHAUSTIVE = 220
"""Structures up to which all are compared: each takes about half a millisecond."""
_LEVEL = 16.0
"""Prices of messages are rounded to powers of this when cuts are searched, so that fronts are met again."""
_GRAIN = 0.02
"""In long chains, slowest stages closer than this part are one point of the front: estimates are no finer."""
_BETTER = 1.0 - 1e-9
"""Factor below which an objective is better: more than rounding, or turns between equals would never end."""
_LEAST_ROUNDS = 4.0
"""In long chains points are left out that are best only for fewer micro-batches than these."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineLayout:
    """Pipelines in a state.

    Attributes
    ----------
    structure : Structure
    worker, group : ndarray of int, shape (stages,)
    start_s, rate_s : ndarray, shape (groups,)
        A group ends after start_s + rate_s * share.
    spare_s : float
        Of the seconds in which gradients are summed, what other orders and cuts can spare at most.
    stage_s, sent_usd : ndarray, shape (stages,)
        Per sample: compute, and what activations and their gradients cost to send.
    ring_usd : ndarray, shape (stages,)
        What the sum of gradients costs to send.
    fastest : Split
    """

    structure: Structure
    worker: np.ndarray
    group: np.ndarray
    start_s: np.ndarray
    rate_s: np.ndarray
    spare_s: float
    stage_s: np.ndarray
    sent_usd: np.ndarray
    ring_usd: np.ndarray
    fastest: Split
    batch: int

    @staticmethod
    def of(
        chain: Chain, state: State, structure: Structure, *, batch: int, micro_batch: int
    ) -> PipelineLayout:
        """Return a structure as it goes in a state."""
        stages = StageArrays.of(structure)
        pace = pace_of(chain, state, structure, micro_batch=micro_batch)
        sent, ring = np.zeros(chain.num_workers), np.zeros(chain.num_workers)
        if state.usd_per_byte.any():
            sent = boundary_usd(chain, state, stages, np.ones(len(structure.groups)))
            ring = sync_usd(chain, state, stages)
        return PipelineLayout(
            structure=structure,
            worker=stages.worker,
            group=stages.group,
            start_s=pace.start_s,
            rate_s=pace.rate_s,
            spare_s=pace.sync_s - least_sync_s(chain, state, structure),
            stage_s=sample_s(chain, state, stages),
            sent_usd=sent[stages.worker],
            ring_usd=ring[stages.worker],
            fastest=water_filling(pace.start_s, pace.rate_s, float(batch)),
            batch=batch,
        )

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

    def split(self, weights: Weights) -> Split:
        """Return the best shares, parts of samples allowed, and all they weigh."""
        time_weight, cost = self.time_weight(weights), self.sample_weight(weights)
        ring = float(weights.sent[self.worker] @ self.ring_usd)
        if cost is None:
            worth = time_weight * self.fastest.time_s + ring
            return Split(shares=self.fastest.shares, time_s=self.fastest.time_s, worth=worth)
        split = linear_shares(
            self.start_s, self.rate_s, self.batch, time_weight=time_weight, sample_weight=cost
        )
        return Split(shares=split.shares, time_s=split.time_s, worth=split.worth + ring)

    def objective(self, weights: Weights) -> tuple[float, np.ndarray]:
        """Return what the slot minimises at the best shares, and which pipelines then have samples."""
        split = self.split(weights)
        return split.worth, split.shares > 0.0

    def whole(self, weights: Weights, micro_batch: int) -> np.ndarray:
        """Return the best shares in whole micro-batches."""
        return whole_shares(
            self.start_s,
            self.rate_s,
            self.batch,
            micro_batch,
            time_weight=self.time_weight(weights),
            sample_weight=self.sample_weight(weights),
        ).shares


class PipelineStates(StateCache):
    """Pipelines side by side in one state: cuts and order of each from the front of its workers."""

    is_ordered = False

    def __init__(self, cache: SearchCache, *given: object):
        super().__init__(cache, *given)  # type: ignore[arg-type]
        self.widest, self.most_cells, self.exhaustive = self.max_stages, len(self.alive), EXHAUSTIVE
        self._layouts: dict[Structure, PipelineLayout] = {}
        self._chosen: dict[Structure, Choice] = {}
        self._front: dict[object, tuple[PipelineCut, ...]] = {}
        self._sent: dict[WorkerPipeline, np.ndarray] = {}

    def cells_of(self, structure: Structure) -> Cells:
        """Return the workers of each pipeline, sorted: their order is searched."""
        return tuple(sorted(tuple(sorted(group.workers)) for group in structure.groups))

    def holds(self, cell: Sequence[int]) -> bool:
        """Return whether some order and cuts of a pipeline of these workers hold the model."""
        return len(cell) <= self.max_stages and bool(self.front_of(cell, 0))

    def cell_counts(self, takes: Iterable[int], total: int) -> Iterator[tuple[int, int]]:
        """Return equal pipelines of every length."""
        for take in takes:
            for length in range(1, min(self.max_stages, take) + 1):
                if take % length == 0 or take == total:
                    yield take // length, take - take % length

    def depth_of(self, cells: Cells) -> tuple[float, int, int]:
        """Return the mean length of pipelines, and twice how many they are."""
        return sum(map(len, cells)) / len(cells), len(cells), len(cells)

    def level(self, weights: Weights) -> Level:
        """Return how dear messages are against time, as a power: what decides on cuts."""
        time_weight = weights.time + float(weights.active.sum())
        if not self.state.usd_per_byte.any() or time_weight <= 0.0 or not weights.sent.any():
            return (0,)
        price = float(weights.sent.max()) * self.batch / self.micro_batch / time_weight
        return (round(math.log(price, _LEVEL)) or 1,)

    def front_of(self, cell: Sequence[int], level: int) -> tuple[PipelineCut, ...]:
        """Return the front of a pipeline of these workers, classes by place in the sorted list of classes."""
        key = (tuple(sorted(self.device_class[worker] for worker in cell)), level)
        if key not in self._front:
            self._front[key] = self._remembered_front(cell, level)
        return self._front[key]

    def _remembered_front(self, cell: Sequence[int], level: int) -> tuple[PipelineCut, ...]:
        """Return the front from any state in which such workers were so fast and so far apart."""
        members = self._by_class(cell)
        first, second = [some[0] for some in members.values()], [some[-1] for some in members.values()]
        chain, state = self.chain, self.state
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
        counts, is_long = tuple(map(len, members.values())), chain.num_layers > LONG_CHAIN

        def made() -> tuple[PipelineCut, ...]:
            return front(
                self._device_classes(first, second, level),
                counts,
                grain=_GRAIN if is_long else 0.0,
                least_rounds=_LEAST_ROUNDS if is_long else 1.0,
                effort=self.cache.effort,
            )

        return self.cache.table((self.micro_batch, self.batch, rows, counts, links, level), made)

    def alone(self, cell: Sequence[int]) -> tuple[DeviceClasses, tuple[int, ...]]:
        """Return what stages of these workers take, and how many there are of each class."""
        members = self._by_class(cell).values()
        classes = self._device_classes([some[0] for some in members], [some[-1] for some in members], 0)
        return classes, tuple(map(len, members))

    def _by_class(self, cell: Sequence[int]) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for worker in sorted(cell, key=lambda worker: (self.device_class[worker], worker)):
            members.setdefault(self.device_class[worker], []).append(worker)
        return members

    def _message_usd(self, a: int, b: int) -> float:
        """Return dollars per byte, the mean of both directions."""
        prices = self.state.usd_per_byte
        return 0.5 * float(prices[a, b] + prices[b, a])

    def _device_classes(self, first: Sequence[int], second: Sequence[int], level: int) -> DeviceClasses:
        chain, state, size = self.chain, self.state, self.chain.num_layers + 1
        before = chain.before_s[first] / state.speed[first][:, None]
        span = np.arange(size)[None, :] > np.arange(size)[:, None]
        seconds = np.where(span, self.micro_batch * (before[:, None, :] - before[:, :, None]), np.inf)
        sent = self.micro_batch * np.concatenate([[0.0], chain.boundary_bytes, [0.0]])
        hop, extra = np.zeros((len(first), len(first), size)), np.zeros((len(first), len(first), size))
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                if a != b:
                    hop[i, j] = message_s(sent, state.bandwidth_bytes_per_s[a, b], state.latency_s[a, b])
                    extra[i, j] = sent * self._message_usd(a, b) * (_LEVEL**level if level else 0.0)
        states = chain.before_state[None, :] - chain.before_state[:, None]
        saved = self.micro_batch * (chain.before_saved[None, :] - chain.before_saved[:, None])
        rounds = -(-self.batch // self.micro_batch)

        def room(this: int, depth: int) -> np.ndarray:
            return np.asarray(states + min(depth, rounds) * saved <= chain.memory_bytes[first[this]])

        return DeviceClasses(seconds=seconds, hop_s=hop, room=room, hop_extra=extra if extra.any() else None)

    def settled(self, cells: Cells, weights: Weights, level: Level) -> PipelineLayout | None:
        """Choose a point of the front for each pipeline, for the micro-batches that it then gets."""
        if not all(self.holds(cell) for cell in cells):
            return None
        rates = np.array([1.0 / self.front_of(cell, 0)[-1].slowest_s for cell in cells])
        rounds = self.batch / self.micro_batch * rates / rates.sum()
        best: PipelineLayout | None = None
        least = math.inf
        time_weight = weights.time + sum(float(weights.active[w]) for cell in cells for w in cell)
        for _ in range(3):
            chosen = zip(cells, rounds, strict=True)
            groups = tuple(self._pipeline(c, float(n), time_weight, weights, level[0]) for c, n in chosen)
            layout = self.layout(Structure(groups=groups))
            if layout is best:
                break
            split = layout.split(weights)
            if best is None or split.worth < least:
                best, least = layout, split.worth
            rounds = split.shares / self.micro_batch
        return best

    def improved(self, row: StructureRow, weights: Weights) -> PipelineLayout | None:
        """Return pipelines with better orders and cuts beside one another; None where there are none.

        One pipeline after the other gets the best of all orders and cuts, until none changes: from the
        pipelines as they are, and from those built one by one beside the first of them, or its reverse.
        """
        groups, tables = row.structure.groups, []
        if all(len(group.workers) == 1 for group in groups):
            return None
        for group in groups:
            cell = sorted(group.workers)
            orders, cuts = rows_of(
                cell, [group.cuts, *(cut.cuts for cut in self.front_of(cell, 0))], self.chain.num_layers
            )
            tables.append(
                PipelineTable.of(
                    self.chain, self.state, orders, cuts, batch=self.batch, micro_batch=self.micro_batch
                )
            )
            self.cache.effort.done += 1
        if not all(len(table.fill_s) for table in tables):
            return None

        def beside(table: PipelineTable, others: Sequence[PipelineTable]) -> PipelineTable:
            worth = weighed(
                self.chain,
                self.state,
                table,
                others,
                weights,
                batch=self.batch,
                micro_batch=self.micro_batch,
            )
            return table.rows(slice(int(worth.argmin()), int(worth.argmin()) + 1))

        own = [table.rows(table.places(group)) for table, group in zip(tables, groups, strict=True)]
        starts = [own] if all(len(pipeline.fill_s) for pipeline in own) else []
        for order in (groups[0].workers, groups[0].workers[::-1]):
            some = tables[0].rows((tables[0].worker == order).all(1))
            if len(some.fill_s):
                starts.append([beside(some, [])])
                for table in tables[1:]:
                    starts[-1].append(beside(table, starts[-1]))
        best: StructureRow = row
        least = row.objective(weights)[0]
        for chosen in starts:
            layout, at, kept = self._side_by_side(chosen), 0, 0
            worth = layout.split(weights).worth
            while kept < len(groups):
                tried = [*chosen]
                tried[at] = beside(tables[at], chosen[:at] + chosen[at + 1 :])
                new = self._side_by_side(tried)
                kept += 1
                if (found := new.split(weights).worth) < worth * _BETTER:
                    layout, worth, chosen, kept = new, found, tried, 1
                at = (at + 1) % len(groups)
            if worth < least * _BETTER:
                best, least = layout, worth
        return None if best is row else best  # type: ignore[return-value]

    def _side_by_side(self, tables: Sequence[PipelineTable]) -> PipelineLayout:
        """Return tables of one row each as pipelines in this state."""
        return self.layout(Structure(groups=tuple(table.pipeline() for table in tables)))

    def layout(self, structure: Structure) -> PipelineLayout:
        """Return pipelines as they go in this state."""
        if structure not in self._layouts:
            self._layouts[structure] = PipelineLayout.of(
                self.chain, self.state, structure, batch=self.batch, micro_batch=self.micro_batch
            )
        return self._layouts[structure]

    def _pipeline(
        self, cell: Sequence[int], rounds: float, time_weight: float, weights: Weights, level: int
    ) -> WorkerPipeline:
        """Return the order and cuts that are best for so many micro-batches."""
        level = level if len(cell) > 1 else 0
        rounds, weight = max(rounds, 1.0), max(time_weight, 1e-12)

        def total(cut: PipelineCut) -> float:
            seconds = weight * cut.batch_s(rounds)
            if not level:
                return seconds
            return seconds + rounds * self.micro_batch * float(weights.sent @ self._sent_usd(cell, cut))

        return self.pipeline(cell, min(self.front_of(cell, level), key=total))

    def _sent_usd(self, cell: Sequence[int], cut: PipelineCut) -> np.ndarray:
        """Return what each worker's messages cost per sample, shape (W,)."""
        pipeline = self.pipeline(cell, cut)
        if pipeline not in self._sent:
            stages = StageArrays.of(Structure(groups=(pipeline,)))
            self._sent[pipeline] = boundary_usd(self.chain, self.state, stages, np.ones(1))
        return self._sent[pipeline]

    def pipeline(self, cell: Sequence[int], cut: PipelineCut) -> WorkerPipeline:
        """Return a point of the front of some workers as a pipeline of these."""
        left = [list(workers) for workers in self._by_class(cell).values()]
        return WorkerPipeline(workers=tuple(left[at].pop(0) for at in cut.order), cuts=cut.cuts)

    def as_is(self, structure: Structure, weights: Weights) -> PipelineLayout | None:
        """Return a structure with its own order and cuts; None where it cannot run."""
        shares = [-(-self.batch // len(structure.groups))] * len(structure.groups)
        if runs(self.chain, self.state, structure, shares, micro_batch=self.micro_batch):
            return self.layout(structure)
        return None

    @staticmethod
    def reshared(
        chain: Chain, state: State, structure: Structure, weights: Weights, *, batch: int, micro_batch: int
    ) -> Choice:
        """Return the best shares of pipelines that are kept: each keeps a sample at least."""
        layout = PipelineLayout.of(chain, state, structure, batch=batch, micro_batch=micro_batch)
        shares = layout.whole(weights, micro_batch)
        for empty in np.flatnonzero(shares == 0):
            given = min(micro_batch, int(shares.max()) - 1)
            shares[int(shares.argmax())] -= given
            shares[empty] = given
        return evaluate(chain, state, structure, counted(shares), micro_batch=micro_batch)

    def chosen(self, row: StructureRow, structure: Structure, weights: Weights) -> Choice:
        """Return pipelines in whole micro-batches; where samples weigh nothing they are always the same."""
        assert isinstance(row, PipelineLayout)
        free = row.sample_weight(weights) is None and row.time_weight(weights) > 0.0
        if not free or structure not in self._chosen:
            shares = counted(row.whole(weights, self.micro_batch))
            found = evaluate(self.chain, self.state, structure, shares, micro_batch=self.micro_batch)
            found = _without_idle(found)
            if not free:
                return found
            self._chosen[structure] = found
        return self._chosen[structure]


def _without_idle(choice: Choice) -> Choice:
    """Return the choice without groups that got no sample."""
    if all(choice.shares):
        return choice
    kept = [(g, share) for g, share in zip(choice.structure.groups, choice.shares, strict=True) if share]
    structure = Structure(groups=tuple(group for group, _ in kept))
    shares = tuple(share for _, share in kept)
    return Choice(structure=structure, shares=shares, time_s=choice.time_s, costs=choice.costs)
