"""What a batch takes and costs under a structure with shares, and whether it runs at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreshard.control.search.costs import cost_table, slowest_link
from foreshard.control.search.stage_pricing import evaluate_stages
from foreshard.control.slots import MP_OVER_DP, Chain, Choice, State, Structure
from foreshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRate:
    """What a structure takes and costs as a function of shares: all of it is linear.

    Attributes
    ----------
    start_s, rate_s : ndarray, shape (groups,)
        A group ends after start_s + rate_s * share.
    """

    start_s: np.ndarray
    rate_s: np.ndarray


def stage_spans(structure: Structure) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return worker, group, first layer and end of every stage of `dp_over_mp` pipelines."""
    groups = structure.groups
    workers = np.array(structure.workers, dtype=int)
    group = np.repeat(np.arange(len(groups)), [len(one.workers) for one in groups])
    first = np.array([cut for one in groups for cut in one.cuts[:-1]], dtype=int)
    stop = np.array([cut for one in groups for cut in one.cuts[1:]], dtype=int)
    return workers, group, first, stop


def evaluate(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float],
    *,
    micro_batch: int,
    schedule_memory: str = "1f1b",
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
    schedule_memory : {'1f1b', 'gpipe'}
        How many micro-batches a stage keeps activations of: as many as stages from it to the end, or all.
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
    if structure.reading == MP_OVER_DP:
        if batch is None:
            raise SpecError("no batch", key="batch", rule="Shares of mp_over_dp are parts of a micro-batch")
        return evaluate_stages(chain, state, structure, shares, micro_batch, schedule_memory, batch)
    used = [(group, share) for group, share in zip(structure.groups, shares, strict=True) if share > 0]
    active = Structure(groups=tuple(group for group, _ in used))
    if not used:
        return Choice(structure=structure, shares=tuple(shares), time_s=math.inf, costs={})  # type: ignore[arg-type]
    amounts = np.array([share for _, share in used], dtype=float)
    spans = stage_spans(active)
    pace = pace_of(chain, state, active, micro_batch=micro_batch)
    time_s = float((pace.start_s + pace.rate_s * amounts).max())
    if not runs(chain, state, active, amounts, micro_batch=micro_batch, schedule_memory=schedule_memory):
        time_s = math.inf
    worker, group, first, stop = spans
    busy = amounts[group] * stage_s(chain, state, worker, first, stop)
    sent = boundary_usd(chain, state, spans, amounts) + sync_usd(chain, state, active)
    costs = cost_table(state, worker, busy, sent, time_s)
    return Choice(structure=structure, shares=tuple(shares), time_s=time_s, costs=costs)  # type: ignore[arg-type]


def pace_of(chain: Chain, state: State, structure: Structure, *, micro_batch: int) -> GroupRate:
    """Return how `dp_over_mp` groups go when all of them take part."""
    worker, group, first, stop = stage_spans(structure)
    period = micro_batch * stage_s(chain, state, worker, first, stop)
    inner = np.flatnonzero(first > 0)
    before, after = worker[inner - 1], worker[inner]
    period[inner] += (
        2.0 * state.latency_s[before, after]
        + micro_batch * chain.boundary_bytes[first[inner] - 1] / state.bandwidth_bytes_per_s[before, after]
    )
    starts = np.searchsorted(group, np.arange(len(structure.groups)))
    slowest = np.maximum.reduceat(period, starts)
    fill = np.add.reduceat(period, starts)
    # A ring can begin when the last of its members has computed, whichever group that is in.
    sync = sync_s(chain, state, structure).max()
    return GroupRate(start_s=fill - slowest + sync, rate_s=slowest / micro_batch)


def stage_s(
    chain: Chain, state: State, worker: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Return the seconds per sample of layers [first, stop) on each worker."""
    return (chain.before_s[worker, stop] - chain.before_s[worker, first]) / state.speed[worker]


def sync_s(chain: Chain, state: State, structure: Structure) -> np.ndarray:
    """Return the seconds of gradient synchronisation of every stage, shape (stages,).

    A ring all-reduce per layer among the workers that hold it, at the rate of the slowest link between two.
    """
    groups = structure.groups
    num = len(groups)
    workers = structure.workers
    total = np.zeros(len(workers))
    if num == 1:
        return total
    ends = sorted({cut for one in groups for cut in one.cuts})
    offsets = np.cumsum([0] + [len(one.workers) for one in groups])
    for low, high in pairwise(ends):
        at = [
            offset + next(k for k, stop in enumerate(one.cuts[1:]) if stop > low)
            for one, offset in zip(groups, offsets, strict=False)
        ]
        owners = [workers[place] for place in at]
        rate, latency = slowest_link(state, owners)
        size = float(chain.sync_bytes[low:high].sum())
        total[at] += 2.0 * (num - 1) * ((high - low) * latency + size / (num * rate))
    return total


def runs(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float] | np.ndarray,
    *,
    micro_batch: int,
    schedule_memory: str = "1f1b",
) -> bool:
    """Return whether all workers are there and hold their layers."""
    worker, group, first, stop = stage_spans(structure)
    if not state.available[worker].all():
        return False
    ends = np.searchsorted(group, group, side="right")
    rounds = np.ceil(np.asarray(shares, float) / micro_batch - 1e-9)[group]
    kept = np.minimum(ends - np.arange(len(worker)), rounds) if schedule_memory == "1f1b" else rounds
    need = chain.before_state[stop] - chain.before_state[first]
    need = need + kept * micro_batch * (chain.before_saved[stop] - chain.before_saved[first])
    return bool((need <= chain.memory_bytes[worker]).all())


def boundary_usd(
    chain: Chain,
    state: State,
    spans: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    shares: np.ndarray,
) -> np.ndarray:
    """Return what each worker's activations and their gradients cost to send, shape (W,)."""
    worker, group, first, _ = spans
    sent = np.zeros(chain.num_workers)
    inner = np.flatnonzero(first > 0)
    if len(inner) and state.usd_per_byte.any():
        before, after = worker[inner - 1], worker[inner]
        # Half of the bytes go forward, half come back.
        one_way = 0.5 * chain.boundary_bytes[first[inner] - 1] * shares[group[inner]]
        np.add.at(sent, before, one_way * state.usd_per_byte[before, after])
        np.add.at(sent, after, one_way * state.usd_per_byte[after, before])
    return sent


def sync_usd(chain: Chain, state: State, structure: Structure) -> np.ndarray:
    """Return what each worker's part of the rings costs to send, shape (W,); rings go in order of workers."""
    sent = np.zeros(chain.num_workers)
    groups = structure.groups
    if len(groups) == 1 or not state.usd_per_byte.any():
        return sent
    ends = sorted({cut for one in groups for cut in one.cuts})
    for low, high in pairwise(ends):
        owners = np.sort(
            [one.workers[next(k for k, stop in enumerate(one.cuts[1:]) if stop > low)] for one in groups]
        )
        size = 2.0 * (len(groups) - 1) / len(groups) * float(chain.sync_bytes[low:high].sum())
        sent[owners] += size * state.usd_per_byte[owners, np.roll(owners, -1)]
    return sent
