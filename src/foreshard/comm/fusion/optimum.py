"""The buckets that end first of all: exact, by dynamic programming over where the last bucket begins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshard.comm.fusion.timeline import Bounds, Cost, Gradients

_ROUNDING = 1e-12  # of the end: what sums of floats may differ by


def optimal_buckets(gradients: Gradients, cost: Cost) -> Bounds:
    """Return the buckets of adjacent gradients whose reduction ends first; of equals those large at the end.

    Where the last bucket is [i, n), it begins when the gradient n - 1 is ready and the buckets before i are
    done, so that no later end of those can be better: the earliest end for every i is enough to know. The
    number of steps is the square of the gradients.

    Source
    ------
    Derived in docs/derivations/fusion.md; equal to all 2^(n-1) ways on small cases (tests).
    """
    sums = np.concatenate([[0.0], np.cumsum(gradients.num_bytes)])
    ends = np.zeros(len(sums))
    for stop in range(1, len(sums)):
        seconds = _last_bucket_s(sums, stop, cost)
        ends[stop] = np.min(np.maximum(ends[:stop], gradients.ready_s[stop - 1]) + seconds)
    bounds, stop, deadline = [], len(sums) - 1, float(ends[-1])
    while stop > 0:
        latest = deadline - _last_bucket_s(sums, stop, cost)
        begins = np.maximum(ends[:stop], gradients.ready_s[stop - 1])
        first = int(np.argmax(begins <= latest + _ROUNDING * deadline))
        bounds.append((first, stop))
        stop, deadline = first, float(latest[first])
    return tuple(reversed(bounds))


def _last_bucket_s(sums: NDArray[np.float64], stop: int, cost: Cost) -> NDArray[np.float64]:
    """Return the seconds of the buckets [i, stop) for every i."""
    return np.asarray(cost(sums[stop] - sums[:stop]), dtype=float)
