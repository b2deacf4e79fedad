"""Reduction by priority in partitions: what the next forward needs first goes first (P3, ByteScheduler).

Gradients are cut into partitions; one link sends one partition at a time to its end, and takes next the one
of the layer that the next forward reaches first. The forward of a layer waits for its gradients. All layers
are reduced when the next forward ends, so one backward with the forward after it is a whole period.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from foreshard.comm.fusion.timeline import Cost

_PARTITIONS = 2**13  # at most, of all layers together: about 10 ms of simulation
_FINEST, _COARSEST = 18, 30  # powers of two of the partitions that are tried: 256 KiB to 1 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer: seconds of its backward and of its next forward, and bytes of its gradients."""

    forward_s: float
    backward_s: float
    num_bytes: float


def period_s(
    layers: Sequence[LayerWork], cost: Cost, partition_bytes: float = inf, *, by_priority: bool = True
) -> float:
    """Return seconds from the begin of a backward to the end of the forward after it.

    `layers` are in the order of the forward. Without priority, partitions go in the order they are made.

    Source
    ------
    Peng et al. 2019 (ByteScheduler), Jayarajan et al. 2019 (P3): the policy; simulated here, not fitted.
    """
    ready, now = [], 0.0
    for index in range(len(layers) - 1, -1, -1):
        now += layers[index].backward_s
        ready.append((now, index))
    done = _link(ready, layers, cost, partition_bytes, by_priority)
    for index, layer in enumerate(layers):
        now = max(now, done[index]) + layer.forward_s
    return now


def _link(
    ready: list[tuple[float, int]],
    layers: Sequence[LayerWork],
    cost: Cost,
    partition_bytes: float,
    by_priority: bool,
) -> list[float]:
    """Return when the gradients of each layer are reduced."""
    done = [0.0] * len(layers)
    parts = [max(1, ceil(layer.num_bytes / partition_bytes)) for layer in layers]
    seconds = [
        float(cost(layer.num_bytes / count)) if layer.num_bytes else 0.0
        for layer, count in zip(layers, parts, strict=True)
    ]
    urgency = range(len(layers)) if by_priority else [len(layers) - 1 - index for index in range(len(layers))]
    for index, ended in sends_in_order(ready, seconds, urgency, parts):
        done[index] = ended  # of the last partition
    return done


def sends_in_order(
    ready: Sequence[tuple[float, int]],
    seconds: Sequence[float],
    urgency: Sequence[int],
    parts: Sequence[int] | None = None,
) -> Iterator[tuple[int, float]]:
    """Yield what one link sends, in order, and when each send ends: of what waits, the most urgent first.

    Parameters
    ----------
    ready : sequence of (float, int)
        When each item may be sent, in rising order, and which it is.
    seconds : sequence of float
        Of one part of each item.
    urgency : sequence of int
        Of each item, the lowest first.
    parts : sequence of int, optional
        Of each item, between which another may go first; 1 unless given.

    Examples
    --------
    >>> [item for item, _ in sends_in_order([(1, 2), (2, 1), (3, 0)], [1, 9, 9], [0, 1, 2])]
    [2, 0, 1]
    """
    waiting: list[tuple[int, int, int]] = []  # urgency, item, parts left
    now, arrived = 0.0, 0
    while arrived < len(ready) or waiting:
        if not waiting:
            now = max(now, ready[arrived][0])
        while arrived < len(ready) and ready[arrived][0] <= now:
            item = ready[arrived][1]
            heapq.heappush(waiting, (urgency[item], item, 1 if parts is None else parts[item]))
            arrived += 1
        place, item, left = heapq.heappop(waiting)
        now += seconds[item]
        yield item, now
        if left > 1:
            heapq.heappush(waiting, (place, item, left - 1))


def best_partition(layers: Sequence[LayerWork], cost: Cost) -> tuple[float, float]:
    """Return the partition in bytes, among powers of two, of the shortest period, and that period.

    Of equal periods the larger partition: it sends fewer messages.
    """
    total = sum(layer.num_bytes for layer in layers)
    sizes = [2.0**power for power in range(_COARSEST, _FINEST - 1, -1) if total / 2.0**power < _PARTITIONS]
    periods = [(period_s(layers, cost, size), -size) for size in sizes]
    period, size = min(periods)
    return -size, period
