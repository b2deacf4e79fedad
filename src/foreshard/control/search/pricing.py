"""What a batch takes and costs under a structure with shares, and whether it runs at all.

One model for both readings: groups are pipelines of stages, stages are workers that split every micro-batch.
Pipelines side by side have one worker in every stage, a pipeline of wide stages is alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from foreshard.control.search.costs import cost_table, message_s, ring_s, slowest_link, stage_link
from foreshard.control.slots import MP_OVER_DP, Chain, Choice, State, Structure, WorkerPipeline
from foreshard.errors import SpecError
from foreshard.graph.pace import pipeline_pace

_MOST_STRUCTURES = 4096
"""Structures whose arrays are kept, some hundred bytes each for few workers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageArrays:
    """The stages of a structure, groups one after the other, and the workers of each.

    Attributes
    ----------
    worker, stage : ndarray of int, shape (workers in use,)
        Worker, and the stage that it is in.
    begin : ndarray of int, shape (stages,)
        Place of the first worker of each stage.
    group, first, stop : ndarray of int, shape (stages,)
        Group, and layers [first, stop).
    rings : tuple of (int, int, ndarray)
        Layers [low, high) that the same several workers hold, with the places of these.
    """

    worker: np.ndarray
    stage: np.ndarray
    begin: np.ndarray
    group: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    rings: tuple[tuple[int, int, np.ndarray], ...]

    @staticmethod
    @lru_cache(_MOST_STRUCTURES)
    def of(structure: Structure) -> StageArrays:
        """Return the stages of a structure of either reading."""
        groups, worker = structure.groups, np.array(structure.workers, dtype=int)
        sizes = [len(group.workers) for group in groups]
        if structure.reading == MP_OVER_DP:
            stage, group = np.repeat(np.arange(len(groups)), sizes), np.zeros(len(groups), dtype=int)
            begin = np.cumsum([0, *sizes[:-1]])
        else:
            stage = begin = np.arange(len(worker))
            group = np.repeat(np.arange(len(groups)), sizes)
        first = np.array([cut for group in groups for cut in group.cuts[:-1]], dtype=int)
        stop = np.array([cut for group in groups for cut in group.cuts[1:]], dtype=int)
        return StageArrays(
            worker=worker,
            stage=stage,
            begin=begin,
            group=group,
            first=first,
            stop=stop,
            rings=tuple(_rings(first[stage], stop[stage])),
        )

    @property
    def is_narrow(self) -> bool:
        """Return whether every stage is one worker."""
        return len(self.worker) == len(self.first)

    def workers_of(self, stage: int) -> np.ndarray:
        """Return the workers of a stage."""
        return self.worker[self.stage == stage]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRate:
    """When groups end, as a function of their shares: it is linear.

    Attributes
    ----------
    start_s, rate_s : ndarray, shape (groups,)
        A group ends after start_s + rate_s * share.
    sync_s : float
        Part of every start in which gradients are summed.
    """

    start_s: np.ndarray
    rate_s: np.ndarray
    sync_s: float


def evaluate(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float],
    *,
    micro_batch: int,
    batch: int | None = None,
) -> Choice:
    """Return the choice with the seconds and the costs of a batch.

    Parameters
    ----------
    chain, state
    structure : Structure
    shares : sequence of int
        As :attr:`Choice.shares`; parts of samples are taken as they are.
    micro_batch : int, samples
    batch : int, samples
        `mp_over_dp` only: the batch, which the shares do not say.

    Returns
    -------
    Choice
        With infinite time where a worker is missing or out of memory. Groups without a share take no part.

    Source
    ------
    Fill + (n - 1) bottleneck is the flush of one batch through a pipeline; after the last of them gradients
    are summed, in the time of the worker with most of them.
    """
    active, splits = structure, None
    if structure.reading == MP_OVER_DP:
        if batch is None:
            raise SpecError("no batch", key="batch", rule="Shares of mp_over_dp are parts of a micro-batch")
        samples, splits = np.array([float(batch)]), np.array(shares, dtype=float)
    else:
        used = [(group, share) for group, share in zip(structure.groups, shares, strict=True) if share > 0]
        if not used:
            return Choice(structure=structure, shares=tuple(shares), time_s=math.inf, costs={})  # type: ignore[arg-type]
        active = Structure(groups=tuple(group for group, _ in used))
        samples = np.array([share for _, share in used], dtype=float)
    stages = StageArrays.of(active)
    pace = pace_of(chain, state, active, micro_batch=micro_batch, splits=splits)
    time_s = float((pace.start_s + pace.rate_s * samples).max())
    if not runs(chain, state, active, samples, micro_batch=micro_batch, splits=splits):
        time_s = math.inf
    part = 1.0 if splits is None else splits / micro_batch
    busy_s = part * samples[stages.group[stages.stage]] * sample_s(chain, state, stages)
    sent_usd = boundary_usd(chain, state, stages, samples) + sync_usd(chain, state, stages)
    costs = cost_table(state, stages.worker, busy_s, sent_usd, time_s)
    return Choice(structure=structure, shares=tuple(shares), time_s=time_s, costs=costs)  # type: ignore[arg-type]


def pace_of(
    chain: Chain,
    state: State,
    structure: Structure,
    *,
    micro_batch: int,
    splits: np.ndarray | None = None,
) -> GroupRate:
    """Return how groups go when all of them take part.

    Parameters
    ----------
    chain, state, structure, micro_batch
    splits : ndarray, shape (workers in use,), samples, optional
        Of every micro-batch by worker; all of it by default.
    """
    stages = StageArrays.of(structure)
    period = period_s(chain, state, stages, micro_batch, splits)
    first = np.searchsorted(stages.group, stages.group)
    place = np.arange(len(period)) - first
    table = np.zeros((int(place.max()) + 1, int(stages.group[-1]) + 1))
    table[place, stages.group] = period
    pace = pipeline_pace(table)
    # A ring can begin when the last of its members has computed, whichever group that is in.
    sync = sync_s(chain, state, stages).max()
    return GroupRate(start_s=pace.fill_s + sync, rate_s=pace.period_s / micro_batch, sync_s=float(sync))


def period_s(
    chain: Chain, state: State, stages: StageArrays, micro_batch: int, splits: np.ndarray | None = None
) -> np.ndarray:
    """Return the seconds of a micro-batch in each stage, the message before it included."""
    own = (micro_batch if splits is None else splits) * sample_s(chain, state, stages)
    if not stages.is_narrow:
        own = np.maximum.reduceat(own, stages.begin)
    return np.asarray(own + hop_s(chain, state, stages, micro_batch))


def sample_s(chain: Chain, state: State, stages: StageArrays) -> np.ndarray:
    """Return the seconds per sample of each worker in use."""
    worker, at = stages.worker, stages.stage
    before = chain.before_s
    return (before[worker, stages.stop[at]] - before[worker, stages.first[at]]) / state.speed[worker]


def hop_s(chain: Chain, state: State, stages: StageArrays, micro_batch: int) -> np.ndarray:
    """Return the seconds of the message of a micro-batch before each stage, both ways; 0 before the first.

    Between stages that split micro-batches differently every worker may have to send to every other, over the
    slowest link; the narrower side is what binds.
    """
    found, inner = np.zeros(len(stages.first)), np.flatnonzero(stages.first > 0)
    if not len(inner):
        return found
    if stages.is_narrow:
        before, after = stages.worker[inner - 1], stages.worker[inner]
        rate, latency = state.bandwidth_bytes_per_s[before, after], state.latency_s[before, after]
    else:
        members = [stages.workers_of(k) for k in range(len(stages.first))]
        wide = np.array([min(len(members[k - 1]), len(members[k])) for k in inner])
        rate, latency = np.transpose([stage_link(state, members[k - 1], members[k]) for k in inner])
        rate = wide * rate
    found[inner] = message_s(micro_batch * chain.boundary_bytes[stages.first[inner] - 1], rate, latency)
    return found


def sync_s(chain: Chain, state: State, stages: StageArrays) -> np.ndarray:
    """Return the seconds in which each worker sums gradients with others, shape (workers in use,).

    A ring per layer among the workers that hold it, at the rate of the slowest link between two.
    """
    total = np.zeros(len(stages.worker))
    for low, high, at in stages.rings:
        size = float(chain.sync_bytes[low:high].sum())
        total[at] += ring_s(len(at), high - low, size, *slowest_link(state, stages.worker[at]))
    return total


def least_sync_s(chain: Chain, state: State, structure: Structure) -> float:
    """Return seconds that summing gradients takes at least, whatever orders and cuts the pipelines have.

    All layers of a pipeline take part, on no more workers than it has; between two pipelines no link is
    better than the best.
    """
    num = len(structure.groups)
    if num == 1:
        return 0.0
    sizes, worker = [len(group.workers) for group in structure.groups], np.array(structure.workers)
    begin, apart = np.cumsum([0, *sizes[:-1]]), ~np.eye(num, dtype=bool)
    rate, delay = state.bandwidth_bytes_per_s[np.ix_(worker, worker)], state.latency_s[np.ix_(worker, worker)]
    best = np.maximum.reduceat(np.maximum.reduceat(rate, begin, axis=0), begin, axis=1)[apart].min()
    least = np.minimum.reduceat(np.minimum.reduceat(delay, begin, axis=0), begin, axis=1)[apart].max()
    whole_s = ring_s(num, chain.num_layers, float(chain.sync_bytes.sum()), best, least)
    return float(whole_s) / min(sizes)


def _rings(first: np.ndarray, stop: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the layers [low, high) that the same several workers hold, with the places of these."""
    for low, high in pairwise(sorted({*first.tolist(), *stop.tolist()})):
        at = np.flatnonzero((first <= low) & (low < stop))
        if len(at) > 1:
            yield low, high, at


def runs(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float] | np.ndarray,
    *,
    micro_batch: int,
    splits: np.ndarray | None = None,
) -> bool:
    """Return whether all workers are there and hold their layers; shares are samples by group.

    Under 1f1b a stage keeps activations of as many micro-batches as there are stages from it to the end.
    """
    stages = StageArrays.of(structure)
    group = stages.group
    if not state.available[stages.worker].all():
        return False
    rounds = np.ceil(np.asarray(shares, float) / micro_batch - 1e-9)[group]
    ahead = np.searchsorted(group, group, side="right") - np.arange(len(group))
    states = chain.before_state[stages.stop] - chain.before_state[stages.first]
    saved = np.minimum(ahead, rounds) * (chain.before_saved[stages.stop] - chain.before_saved[stages.first])
    own = micro_batch if splits is None else splits
    need = states[stages.stage] + own * saved[stages.stage]
    return bool((need <= chain.memory_bytes[stages.worker]).all())


def largest_micro_batch(chain: Chain, pipeline: WorkerPipeline, share: int, most: int) -> int:
    """Return the largest micro-batch, up to `most`, with which a pipeline fits under 1f1b; at least 1.

    A stage keeps activations of as many micro-batches as there are stages from it to the end, but of no more
    than there are.
    """
    worker, cuts = np.array(pipeline.workers), np.array(pipeline.cuts)
    states, saved = np.diff(chain.before_state[cuts]), np.diff(chain.before_saved[cuts])
    ahead, free = np.arange(len(worker), 0, -1), chain.memory_bytes[worker] - states
    for size in range(max(min(most, share), 1), 1, -1):
        if (size * np.minimum(ahead, -(-share // size)) * saved <= free).all():
            return size
    return 1


def boundary_usd(chain: Chain, state: State, stages: StageArrays, samples: np.ndarray) -> np.ndarray:
    """Return what each worker's activations and their gradients cost to send, shape (W,).

    `samples` are those of each group.
    """
    sent = np.zeros(chain.num_workers)
    if state.usd_per_byte.any():
        for k in np.flatnonzero(stages.first > 0).tolist():
            before, after = stages.workers_of(k - 1), stages.workers_of(k)
            size = chain.boundary_bytes[stages.first[k] - 1] * samples[stages.group[k]]
            # Half of the bytes go forward, half come back; of each pair of workers an equal part.
            each = 0.5 * float(size) / (len(before) * len(after))
            sent[before] += each * state.usd_per_byte[np.ix_(before, after)].sum(1)
            sent[after] += each * state.usd_per_byte[np.ix_(after, before)].sum(1)
    return sent


def sync_usd(chain: Chain, state: State, stages: StageArrays) -> np.ndarray:
    """Return what each worker's part of the rings costs to send, shape (W,); rings go in order of workers."""
    sent = np.zeros(chain.num_workers)
    if state.usd_per_byte.any():
        for low, high, at in stages.rings:
            ring = np.sort(stages.worker[at])
            size = 2.0 * (len(ring) - 1) / len(ring) * float(chain.sync_bytes[low:high].sum())
            sent[ring] += size * state.usd_per_byte[ring, np.roll(ring, -1)]
    return sent
