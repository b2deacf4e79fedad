"""Stages given by their workers: where to cut the layers between them and how to split micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foreshard.control.search.cache import Groups
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.costs import slowest_link
from foreshard.control.search.joint_stage import JointStage, splits_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.stage_cuts import CutRow, best_cuts
from foreshard.control.search.stage_pricing import stage_link
from foreshard.control.slots import Chain, Choice, State, Structure

Found = tuple[tuple[int, ...], tuple[int, ...]]
"""Where stages begin, and the end; samples of a micro-batch by worker, stage after stage."""


class Staging:
    """Cuts and splits in one state.

    Parameters
    ----------
    chain, state
    batch, micro_batch : int, samples
    known : dict
        Stages met before, in any state of this chain.
    """

    def __init__(
        self, chain: Chain, state: State, batch: int, micro_batch: int, known: dict[object, JointStage]
    ):
        self.chain, self.state = chain, state
        self.batch, self.micro_batch, self._known = batch, micro_batch, known

    @property
    def rounds(self) -> float:
        """Return the micro-batches of a batch."""
        return self.batch / self.micro_batch

    def settled(self, stages: Groups, weights: Weights) -> Found | None:
        """Return the best cuts and splits of stages of sorted workers; None where none fits."""
        joint = [self._joint(stage, weights) for stage in stages]
        rows: list[CutRow] = []
        fastest: list[np.ndarray | None] = []
        for k, stage in enumerate(stages):
            period_s = np.where(joint[k].fits(self._depth(len(stages) - k)), joint[k].passing_s, np.inf)
            if k:
                period_s = period_s + self._hops(stages[k - 1], stage)[:, None]
            cost = self._cost(stages[k - 1] if k else (), stage, joint[k], weights)
            # Where only time counts, of all splits of a span the fastest is best.
            fastest.append(period_s.argmin(0) if cost is None else None)
            period_s = period_s.min(0)[None] if cost is None else period_s
            rows.append(CutRow(period_s=period_s, cost=cost, sync_s=joint[k].sync_s))
        free = [table for table in fastest if table is not None]
        if self.chain.num_layers == len(stages) == len(free):
            return self._forced(rows, free, joint)
        workers = [worker for stage in stages for worker in stage]
        found = best_cuts(rows, self.rounds, weights.time + float(weights.active[workers].sum()))
        if found is None:
            return None
        shares: list[int] = []
        for k, span in enumerate(pairwise(found.cuts)):
            table = fastest[k]
            split = found.splits[k] if table is None else int(table[span])
            shares += joint[k].splits[split].tolist()
        return found.cuts, tuple(shares)

    def _forced(
        self, rows: Sequence[CutRow], fastest: Sequence[np.ndarray], joint: Sequence[JointStage]
    ) -> Found | None:
        """Return the fastest splits of stages of one layer each."""
        spans = [(at, at + 1) for at in range(len(rows))]
        if not all(np.isfinite(row.period_s[0][span]) for row, span in zip(rows, spans, strict=True)):
            return None
        chosen = zip(joint, fastest, spans, strict=True)
        shares = [n for one, table, span in chosen for n in one.splits[table[span]].tolist()]
        return tuple(range(len(rows) + 1)), tuple(shares)

    def _depth(self, left: int) -> int:
        return int(min(left, np.ceil(self.rounds)))

    def _joint(self, stage: tuple[int, ...], weights: Weights) -> JointStage:
        """Return a stage as in any state in which such workers were so fast and so far apart."""
        chain, state, at = self.chain, self.state, list(stage)
        sample_s = chain.before_s[at, -1] / state.speed[at]
        busy = weights.busy[at] if len(at) > 1 and weights.busy[at].any() else None
        link = slowest_link(state, at) if len(at) > 1 else None
        key = (
            tuple(hash(chain.layer_s[w].tobytes()) for w in at),
            tuple(state.speed[at].tolist()),
            tuple(chain.memory_bytes[at].tolist()),
            link,
            self.micro_batch,
            None if busy is None else tuple(np.argsort(busy * sample_s, kind="stable").tolist()),
        )
        if key not in self._known:
            splits = splits_of(sample_s, chain.memory_bytes[at], self.micro_batch, busy)
            self._known[key] = JointStage.of(chain, state, stage, splits)
        return self._known[key]

    def _hops(self, before: tuple[int, ...], stage: tuple[int, ...]) -> np.ndarray:
        """Return the seconds of a message to a stage that begins at each layer."""
        chain = self.chain
        rate, latency = stage_link(self.state, before, stage)
        found = np.zeros(chain.num_layers + 1)
        wide = min(len(before), len(stage))
        found[1:-1] = 2.0 * latency + self.micro_batch * np.asarray(chain.boundary_bytes) / (wide * rate)
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
                found[1:-1] += each * np.asarray(chain.boundary_bytes)[:, None]
            if len(at) > 1:
                ring = sent[at, np.roll(at, -1)].sum() * 2.0 * (len(at) - 1) / len(at)
                total = np.concatenate([[0.0], np.cumsum(chain.sync_bytes)])
                found += ring * (total[None, :] - total[:, None])
        if not weights.busy[at].any():
            return np.broadcast_to(found, joint.passing_s.shape) if found.any() else None
        busy = self.rounds * np.tensordot(joint.busy_s, weights.busy[at], axes=(1, 0))
        return np.asarray(found + busy)


def restaged(
    chain: Chain, state: State, structure: Structure, weights: Weights, *, batch: int, micro_batch: int
) -> Choice:
    """Return the best splits of stages that are kept; its time is infinite where they cannot run."""
    cuts = (0, *(group.cuts[1] for group in structure.groups))
    stages = tuple(group.workers for group in structure.groups)
    found = Staging(_merged(chain, cuts), state, batch, micro_batch, {}).settled(stages, weights)
    if found is None:
        return Choice(structure=structure, shares=_even(stages, micro_batch), time_s=math.inf, costs={})
    return evaluate(chain, state, structure, found[1], micro_batch=micro_batch, batch=batch)


def _even(stages: Groups, micro_batch: int) -> tuple[int, ...]:
    return tuple(
        micro_batch // len(stage) + (place < micro_batch % len(stage))
        for stage in stages
        for place in range(len(stage))
    )


def _merged(chain: Chain, cuts: tuple[int, ...]) -> Chain:
    """Return the chain whose layers are stages, so that it can be cut in one way only."""
    first, stop = np.array(cuts[:-1]), np.array(cuts[1:])
    sync = np.concatenate([[0.0], np.cumsum(chain.sync_bytes)])
    return Chain(
        layer_s=chain.before_s[:, stop] - chain.before_s[:, first],
        boundary_bytes=np.asarray(chain.boundary_bytes)[stop[:-1] - 1],
        sync_bytes=sync[stop] - sync[first],
        state_bytes=chain.before_state[stop] - chain.before_state[first],
        saved_bytes=chain.before_saved[stop] - chain.before_saved[first],
        memory_bytes=chain.memory_bytes,
    )
