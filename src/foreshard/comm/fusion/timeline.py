"""Gradients, buckets of them, and when each bucket is reduced: one after another, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.errors import SpecError

Cost = Callable[[Any], Any]
"""Seconds of an all-reduce as a function of its bytes, a number or an array of them."""
Bounds = tuple[tuple[int, int], ...]
"""Buckets as [start, stop) of the gradients in the order of backward; together they are all gradients."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """Gradients of one rank in the order in which backward makes them; arrays of shape (gradients,)."""

    names: tuple[str, ...]
    num_bytes: NDArray[np.float64]
    ready_s: NDArray[np.float64]  # seconds after the backward begins; never falls
    backward_s: float  # the whole backward

    def __post_init__(self) -> None:
        """Raise for no gradients, and for gradients out of order."""
        ready = self.ready_s
        if not len(ready) == len(self.num_bytes) == len(self.names) > 0 or np.any(np.diff(ready) < 0.0):
            raise SpecError(
                "the gradients are none, of unequal numbers or out of order",
                key="gradients",
                rule="Every gradient has a name, bytes and a time, and times never fall",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTime:
    """One bucket: its gradients, and when it is complete, is sent and is reduced."""

    start: int
    stop: int
    num_bytes: float
    ready_s: float
    start_s: float
    end_s: float


def bucket_times(
    gradients: Gradients, bounds: Bounds, cost: Cost, dispatch_s: tuple[float, ...] = ()
) -> tuple[BucketTime, ...]:
    """Return when every bucket is reduced: after its last gradient and after the bucket before.

    `dispatch_s` is when each bucket may leave, where that is later than its last gradient.
    """
    made: list[BucketTime] = []
    end = 0.0
    for i, (first, stop) in enumerate(bounds):
        size = float(gradients.num_bytes[first:stop].sum())
        ready = float(gradients.ready_s[stop - 1])
        if dispatch_s:
            ready = max(ready, dispatch_s[i])
        begin = max(ready, end)
        end = begin + float(cost(size))
        made.append(
            BucketTime(start=first, stop=stop, num_bytes=size, ready_s=ready, start_s=begin, end_s=end)
        )
    return tuple(made)


def exposed_s(gradients: Gradients, times: tuple[BucketTime, ...]) -> float:
    """Return what of the reduction comes after the backward."""
    return max(0.0, times[-1].end_s - gradients.backward_s)
