"""The rules by which frameworks fill buckets: PyTorch DDP, Horovod, MG-WFBP."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf

from foreshard.comm.fusion.timeline import Bounds, Cost, Gradients

MIB = 2**20
DDP_CAP_MIB = 25
"""Default of DDP's ``bucket_cap_mb``."""
DDP_FIRST_BYTES = MIB
"""First bucket of DDP where the cap is the default; a cap that the user sets holds for the first too."""
HOROVOD_BYTES = 64 * MIB
"""Default of HOROVOD_FUSION_THRESHOLD."""
HOROVOD_CYCLE_S = 1e-3
"""Default of HOROVOD_CYCLE_TIME."""


def ddp_limits(cap_mib: float | None = None) -> tuple[float, ...]:
    """Return DDP's limits in bytes by bucket; the last one holds for all further buckets.

    Source
    ------
    torch 2.13 nn/parallel/distributed.py: without a cap the first bucket ends at 1 MiB; a cap holds for the
    first as well.
    """
    if cap_mib is None:
        return float(DDP_FIRST_BYTES), float(DDP_CAP_MIB * MIB)
    return (float(int(cap_mib * MIB)),)


def ddp_buckets(num_bytes: Sequence[float], limits: Sequence[float]) -> Bounds:
    """Return the buckets of PyTorch's DDP for gradients in the order of backward.

    A bucket is closed by the gradient that brings it to its limit; gradients are never split, so a bucket may
    be larger than its limit by all but one byte of a gradient.

    Source
    ------
    torch csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size; pytorch issue 48880.

    Examples
    --------
    >>> ddp_buckets([4, 10, 3, 3, 3], [8, 6])
    ((0, 2), (2, 4), (4, 5))
    """
    bounds, start, filled, which = [], 0, 0.0, 0
    for i, size in enumerate(num_bytes):
        filled += size
        if filled >= limits[min(which, len(limits) - 1)]:
            bounds.append((start, i + 1))
            start, filled, which = i + 1, 0.0, which + 1
    if start < len(num_bytes):
        bounds.append((start, len(num_bytes)))
    return tuple(bounds)


def horovod_buckets(
    gradients: Gradients, threshold_bytes: float = HOROVOD_BYTES, cycle_s: float = HOROVOD_CYCLE_S
) -> tuple[Bounds, tuple[float, ...]]:
    """Return Horovod's buckets, and when each may leave.

    At every cycle the gradients that are ready are fused in order, up to the threshold; a larger gradient
    goes alone.
    """
    bounds: list[tuple[int, int]] = []
    dispatch: list[float] = []
    filled, cycle = inf, -1
    for i, size in enumerate(gradients.num_bytes.tolist()):
        tick = _cycle_of(float(gradients.ready_s[i]), cycle_s)
        if tick == cycle and filled + size <= threshold_bytes:
            bounds[-1] = (bounds[-1][0], i + 1)
            filled += size
        else:
            bounds.append((i, i + 1))
            dispatch.append(tick * cycle_s)
            filled, cycle = size, tick
    return tuple(bounds), tuple(dispatch)


def _cycle_of(ready_s: float, cycle_s: float) -> int:
    """Return the first cycle that begins when a gradient is ready, or after."""
    cycle = floor(ready_s / cycle_s)
    return cycle if cycle * cycle_s >= ready_s else cycle + 1


def merged_buckets(gradients: Gradients, cost: Cost, start_up_s: float) -> Bounds:
    """Return the buckets of MG-WFBP: a gradient waits for the next one where that saves a start-up.

    Where the next gradient is ready before the present bucket would be reduced, both are merged if the
    present one has not been sent by then, or if waiting takes less than the start-up of an all-reduce.

    Source
    ------
    Shi, Chu, Li 2019 (arXiv 1811.11141), algorithm 1; its repository, distributed_optimizer.py.
    """
    ready, sizes = gradients.ready_s.tolist(), gradients.num_bytes.tolist()
    bounds, start, filled, free_s = [], 0, sizes[0], 0.0
    for i in range(len(sizes) - 1):
        begin = max(ready[i], free_s)
        end = begin + float(cost(filled))
        if ready[i + 1] < end and ready[i + 1] - begin < start_up_s:
            filled += sizes[i + 1]
            continue
        bounds.append((start, i + 1))
        start, filled, free_s = i + 1, sizes[i + 1], end
    return (*bounds, (start, len(sizes)))
