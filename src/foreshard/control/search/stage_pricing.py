"""What a batch takes and costs in one pipeline whose stages are workers that split every micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foreshard.control.search.costs import cost_table, slowest_link
from foreshard.control.slots import Chain, Choice, State, Structure, WorkerPipeline


def evaluate_stages(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float],
    micro_batch: int,
    schedule_memory: str,
    batch: int,
) -> Choice:
    """Return the choice of `mp_over_dp`: stages of workers that split every micro-batch."""
    stages, at = structure.groups, 0
    rounds = batch / micro_batch
    worker = np.array(structure.workers, dtype=int)
    amounts = np.array(shares, dtype=float)
    periods, syncs, fits = [], [], bool(state.available[worker].all())
    busy, sent = np.zeros(len(worker)), np.zeros(chain.num_workers)
    for k, stage in enumerate(stages):
        here = slice(at, at + len(stage.workers))
        members, (low, high) = np.array(stage.workers), stage.cuts
        seconds = (chain.before_s[members, high] - chain.before_s[members, low]) / state.speed[members]
        passing = seconds * amounts[here]
        hop = stage_hop_s(chain, state, stages[k - 1].workers, stage, micro_batch) if k else 0.0
        periods.append(float(passing.max()) + hop)
        busy[here] = passing * rounds
        kept = rounds if schedule_memory != "1f1b" else min(len(stages) - k, math.ceil(rounds))
        need = chain.before_state[high] - chain.before_state[low]
        saved = kept * amounts[here] * (chain.before_saved[high] - chain.before_saved[low])
        fits &= bool((need + saved <= chain.memory_bytes[members]).all())
        syncs.append(stage_sync_s(chain, state, stage))
        sent += _stage_usd(chain, state, stage, stages[k - 1].workers if k else (), batch)
        at += len(stage.workers)
    slowest = max(periods)
    time_s = sum(periods) + (rounds - 1.0) * slowest + max(syncs) if fits else math.inf
    costs = cost_table(state, worker, busy, sent, time_s)
    return Choice(structure=structure, shares=tuple(shares), time_s=time_s, costs=costs)  # type: ignore[arg-type]


def stage_hop_s(
    chain: Chain, state: State, before: Sequence[int], stage: WorkerPipeline, micro_batch: int
) -> float:
    """Return the seconds in which a micro-batch passes between two stages that split it differently.

    Every worker may have to send to every other, over the slowest link; the narrower side is what binds.
    """
    rate, latency = stage_link(state, before, stage.workers)
    wide = min(len(before), len(stage.workers))
    return 2.0 * latency + micro_batch * float(chain.boundary_bytes[stage.cuts[0] - 1]) / (wide * rate)


def stage_link(state: State, before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
    """Return the least bandwidth and the greatest latency from a worker of one stage to one of the next."""
    pairs = np.ix_(before, after)
    return float(state.bandwidth_bytes_per_s[pairs].min()), float(state.latency_s[pairs].max())


def stage_sync_s(chain: Chain, state: State, stage: WorkerPipeline) -> float:
    """Return the seconds in which the workers of a stage sum their gradients, in one ring."""
    num, (low, high) = len(stage.workers), stage.cuts
    if num == 1:
        return 0.0
    rate, latency = slowest_link(state, stage.workers)
    size = float(chain.sync_bytes[low:high].sum())
    return 2.0 * (num - 1) * ((high - low) * latency + size / (num * rate))


def _stage_usd(
    chain: Chain, state: State, stage: WorkerPipeline, before: Sequence[int], batch: int
) -> np.ndarray:
    """Return what each worker of two stages sends: activations and gradients, and the ring of the second."""
    sent, low = np.zeros(chain.num_workers), stage.cuts[0]
    if not state.usd_per_byte.any():
        return sent
    if before:
        one_way = 0.5 * batch * float(chain.boundary_bytes[low - 1]) / (len(before) * len(stage.workers))
        sent[list(before)] += one_way * state.usd_per_byte[np.ix_(before, stage.workers)].sum(1)
        sent[list(stage.workers)] += one_way * state.usd_per_byte[np.ix_(stage.workers, before)].sum(1)
    num = len(stage.workers)
    if num > 1:
        ring = np.sort(stage.workers)
        size = 2.0 * (num - 1) / num * float(chain.sync_bytes[low : stage.cuts[1]].sum())
        sent[ring] += size * state.usd_per_byte[ring, np.roll(ring, -1)]
    return sent
