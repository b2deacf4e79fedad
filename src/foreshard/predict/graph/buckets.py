"""Gradient buckets of a chunk: where they are cut, what reducing and gathering them takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshard.predict.graph.prices import Units
from foreshard.predict.machine import Machine
from foreshard.predict.tasks.collectives import expert_replicas, sync_times
from foreshard.spec.framework import Framework

# Size of a gradient bucket: DistributedDataParallel's bucket_cap_mb, DeepSpeed's reduce_bucket_size
# (runtime/zero/config.py), InternEvo's reduce_bucket_size (configs/7B_sft.py).
_BUCKET_BYTES = {"ddp": 25 * 2**20}
_BUCKET_ELEMENTS = {"deepspeed": 5e8, "megatron-deepspeed": 5e8, "internevo": 512 * 1024**2}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buckets:
    """Gradient buckets of one chunk in order of backward: [start, stop) of its reversed units."""

    bounds: list[tuple[int, int]]
    reduce_s: np.ndarray
    gather_s: np.ndarray


def overlaps(machine: Machine) -> bool:
    """Return whether gradients or weights move beside compute, which takes buckets."""
    return float(machine.traits.grad_overlap) > 0 or float(machine.traits.param_gather_overlap) > 0


def chunk_buckets(units: Units, machine: Machine, framework: Framework, *, first: bool) -> Buckets:
    """Cut the units of a chunk, in order of backward, into buckets and price them."""
    rank = machine.rank
    sizes = (units.params + units.expert_params)[::-1]
    limit = _bucket_elements(framework, float(rank.dp * rank.cp), first=first)
    bounds, start, filled = [], 0, 0.0
    for i, size in enumerate(sizes.tolist()):
        filled += size
        if filled >= limit or i == len(sizes) - 1:
            bounds.append((start, i + 1))
            start, filled = i + 1, 0.0
    dense = np.array([units.params[::-1][a:b].sum() for a, b in bounds])
    expert = np.array([units.expert_params[::-1][a:b].sum() for a, b in bounds])
    reduce_s, gather_s = bucket_sync_s(dense, expert, machine)
    return Buckets(bounds=bounds, reduce_s=reduce_s, gather_s=gather_s)


def _bucket_elements(framework: Framework, replicas: float, *, first: bool) -> float:
    """Return the elements after which a bucket leaves.

    Megatron has small ones only on the first stage's first chunk (megatron/training/training.py, ddp_config);
    what is not known is taken as Megatron.
    """
    if framework.name in _BUCKET_BYTES:
        return _BUCKET_BYTES[framework.name] / framework.grad_bytes
    if framework.name in _BUCKET_ELEMENTS:
        return _BUCKET_ELEMENTS[framework.name]
    return max(40e6, 1e6 * replicas) if first else np.inf


def slowdown_s(seconds: np.ndarray, moved: np.ndarray, contention: float) -> np.ndarray:
    """Return what collectives add to each piece; that of piece b starts at its end, one after another."""
    tax, pending = np.zeros(len(seconds)), 0.0
    for b, (busy, after) in enumerate(zip(seconds.tolist(), moved.tolist(), strict=True)):
        tax[b] = contention * min(pending, busy)
        pending = max(0.0, pending - busy - tax[b]) + after
    return tax


def bucket_sync_s(
    params: np.ndarray, expert_params: np.ndarray, machine: Machine
) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of reducing each bucket and of gathering its updated weights.

    Parameters
    ----------
    params, expert_params : ndarray, shape (buckets,)
        Trained parameters of this rank in each bucket.
    machine : Machine
        Of one stage, every field a number.
    """
    rank = machine.rank
    reduce, gather = sync_times(
        params, rank.dp * rank.cp, rank.sync_stride, machine, own_stride=rank.own_stride
    )
    if np.any(expert_params):
        more = sync_times(
            expert_params,
            expert_replicas(rank),
            rank.expert_stride,
            machine,
            own_stride=rank.own_expert_stride,
        )
        reduce, gather = reduce + more[0], gather + more[1]
    return np.broadcast_to(reduce, params.shape), np.broadcast_to(gather, params.shape)
