"""All orders and cuts of one pipeline at once, beside pipelines that stay: rings and busy seconds included.

Fill and slowest stage decide on a pipeline alone (`cuts`). Beside others, who holds which layers decides on
the rings that sum gradients too, and so do orders that are equal alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from foreshard.control.budgets.objective import Weights
from foreshard.control.search.costs import message_s, ring_s
from foreshard.control.slots import Chain, State, WorkerPipeline

_MOST_ROWS = 1000
"""Orders times cuts up to which all are compared, a millisecond; else those near the front in any order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTable:
    """Orders and cuts of a pipeline, those that fit in memory.

    Attributes
    ----------
    worker : ndarray of int, shape (rows, stages)
    cuts : ndarray of int, shape (rows, stages + 1)
    fill_s, slowest_s : ndarray, shape (rows,), seconds
        Sum and maximum of the stage times of a micro-batch.
    stage_s : ndarray, shape (rows, stages), seconds
        Compute per sample.
    sent_usd : ndarray, shape (rows, stages), dollars
        For messages, per sample.
    """

    worker: np.ndarray
    cuts: np.ndarray
    fill_s: np.ndarray
    slowest_s: np.ndarray
    stage_s: np.ndarray
    sent_usd: np.ndarray

    @staticmethod
    def of(
        chain: Chain, state: State, orders: np.ndarray, cuts: np.ndarray, *, batch: int, micro_batch: int
    ) -> PipelineTable:
        """Return rows of workers, shape (rows, stages), with cuts, shape (rows, stages + 1), as they go."""
        first, stop, depth = cuts[:, :-1], cuts[:, 1:], orders.shape[1]
        ahead = np.minimum(np.arange(depth, 0, -1), -(-batch // micro_batch))
        saved = micro_batch * ahead * (chain.before_saved[stop] - chain.before_saved[first])
        need = chain.before_state[stop] - chain.before_state[first] + saved
        fits = (need <= chain.memory_bytes[orders]).all(1)
        orders, cuts, first, stop = orders[fits], cuts[fits], first[fits], stop[fits]
        stage_s = (chain.before_s[orders, stop] - chain.before_s[orders, first]) / state.speed[orders]
        a, b, size = orders[:, :-1], orders[:, 1:], chain.boundary_bytes[first[:, 1:] - 1]
        period, sent = micro_batch * stage_s, np.zeros(stage_s.shape)
        period[:, 1:] += message_s(
            micro_batch * size, state.bandwidth_bytes_per_s[a, b], state.latency_s[a, b]
        )
        sent[:, :-1] += 0.5 * size * state.usd_per_byte[a, b]
        sent[:, 1:] += 0.5 * size * state.usd_per_byte[b, a]
        return PipelineTable(
            worker=orders,
            cuts=cuts,
            fill_s=period.sum(1),
            slowest_s=period.max(1),
            stage_s=stage_s,
            sent_usd=sent,
        )

    def rows(self, at: np.ndarray | slice) -> PipelineTable:
        """Return some rows."""
        return PipelineTable(**{column.name: getattr(self, column.name)[at] for column in fields(self)})

    def places(self, pipeline: WorkerPipeline) -> np.ndarray:
        """Return in which row a pipeline is, shape (rows,)."""
        return np.asarray((self.worker == pipeline.workers).all(1) & (self.cuts == pipeline.cuts).all(1))

    def pipeline(self) -> WorkerPipeline:
        """Return the first row."""
        return WorkerPipeline(workers=tuple(self.worker[0].tolist()), cuts=tuple(self.cuts[0].tolist()))

    def owner(self, num_layers: int) -> np.ndarray:
        """Return who holds each layer, shape (rows, layers)."""
        stage = (self.cuts[:, 1:-1, None] <= np.arange(num_layers)).sum(1)
        return np.take_along_axis(self.worker, stage, axis=1)

    def sample_weight(self, weights: Weights) -> np.ndarray:
        """Return what a sample weighs, shape (rows,)."""
        return np.asarray(
            (weights.busy[self.worker] * self.stage_s + weights.sent[self.worker] * self.sent_usd).sum(1)
        )


def rows_of(
    workers: Sequence[int], near: Iterable[tuple[int, ...]], num_layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return all orders and cuts of some workers; where these are too many, cuts near given ones.

    Parameters
    ----------
    workers : sequence of int
    near : iterable of tuple of int
        Cuts; their sizes are tried in any order, and a layer more or less in each stage.
    num_layers : int

    Returns
    -------
    ndarray of int, shape (rows, stages); ndarray of int, shape (rows, stages + 1)
    """
    depth = len(workers)
    orders = np.array(list(itertools.permutations(workers)))
    if len(orders) * math.comb(num_layers - 1, depth - 1) <= _MOST_ROWS:
        inner = np.array(list(itertools.combinations(range(1, num_layers), depth - 1)), dtype=int)
    else:
        near = list(near)
        found = dict.fromkeys(cuts[1:-1] for cuts in near)
        for cuts in near:
            for at, step in itertools.product(range(1, depth), (-1, 1)):
                if cuts[at - 1] < cuts[at] + step < cuts[at + 1]:
                    found[*cuts[1:at], cuts[at] + step, *cuts[at + 1 : -1]] = None
        for cuts in near:
            for sizes in itertools.permutations(np.diff(cuts).tolist()):
                found[tuple(itertools.accumulate(sizes[:-1]))] = None
        inner = np.array(list(found)[: max(_MOST_ROWS // len(orders), 1)], dtype=int)
    ends = np.ones((len(inner), 1), dtype=int)
    cuts_of = np.concatenate([0 * ends, inner, num_layers * ends], axis=1)
    return np.repeat(orders, len(cuts_of), axis=0), np.tile(cuts_of, (len(orders), 1))


def weighed(
    chain: Chain,
    state: State,
    table: PipelineTable,
    others: Sequence[PipelineTable],
    weights: Weights,
    *,
    batch: int,
    micro_batch: int,
) -> np.ndarray:
    """Return what each row of a table weighs beside other pipelines, shape (rows,); each ends with the last.

    Parameters
    ----------
    chain, state, table
    others : sequence of PipelineTable
        Of one row each.
    weights : Weights
    batch, micro_batch : int, samples
    """
    rows = len(table.fill_s)
    sync_s, ring = rings_beside(chain, state, table, others, weights)

    def columns(own: np.ndarray, rest: list[np.ndarray]) -> np.ndarray:
        return np.stack([own, *(np.full(rows, float(pipeline[0])) for pipeline in rest)], axis=1)

    slowest = columns(table.slowest_s, [pipeline.slowest_s for pipeline in others])
    start = columns(table.fill_s, [pipeline.fill_s for pipeline in others]) - slowest + sync_s[:, None]
    rate = slowest / micro_batch
    order = np.argsort(start, axis=1, kind="stable")
    first, each = np.take_along_axis(start, order, 1), np.take_along_axis(rate, order, 1)
    end_s = ((batch + np.cumsum(first / each, axis=1)) / np.cumsum(1.0 / each, axis=1)).min(1)
    share = np.maximum(end_s[:, None] - start, 0.0) / rate
    sample = columns(table.sample_weight(weights), [pipeline.sample_weight(weights) for pipeline in others])
    active = sum(float(weights.active[pipeline.worker[0]].sum()) for pipeline in (table, *others))
    return np.asarray(max(weights.time + active, 0.0) * end_s + (sample * share).sum(1) + ring)


def rings_beside(
    chain: Chain, state: State, table: PipelineTable, others: Sequence[PipelineTable], weights: Weights
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds in which gradients are summed beside other pipelines, and what rings weigh."""
    rows, num, layers = len(table.fill_s), 1 + len(others), chain.num_layers
    if num == 1:
        return np.zeros(rows), np.zeros(rows)
    owner = table.owner(layers)
    fixed = [pipeline.owner(layers) for pipeline in others]
    rate, delay = np.full((1, layers), np.inf), np.zeros((1, layers))
    for source, target in itertools.permutations([owner, *fixed], 2):
        rate = np.minimum(rate, state.bandwidth_bytes_per_s[source, target])
        delay = np.maximum(delay, state.latency_s[source, target])
    each_s = ring_s(num, 1, chain.sync_bytes, rate, delay)
    before = np.concatenate([np.zeros((rows, 1)), np.cumsum(each_s, axis=1)], axis=1)
    total = np.zeros(rows)
    for pipeline in (table, *others):
        cuts = np.broadcast_to(pipeline.cuts, (rows, pipeline.cuts.shape[1]))
        total = np.maximum(total, np.diff(np.take_along_axis(before, cuts, 1), axis=1).max(1))
    if not (weights.sent.any() and state.usd_per_byte.any()):
        return total, np.zeros(rows)
    ring = np.sort(np.stack([owner, *(np.broadcast_to(other, owner.shape) for other in fixed)]), axis=0)
    hop = (weights.sent[ring] * state.usd_per_byte[ring, np.roll(ring, -1, axis=0)]).sum(0)
    return total, np.asarray(2.0 * (num - 1) / num * (hop * chain.sync_bytes).sum(1))
