"""Loop of `timing`, in plain Python as numba compiles it: numbers and arrays only, nothing allocated."""

from __future__ import annotations

from typing import Any


def serve(
    end: Any,
    size: Any,
    indptr: Any,
    indices: Any,
    first: Any,
    resources: Any,
    per_byte: Any,
    free: Any,
    out: Any,
) -> None:
    """Set the arrival of each send; `per_byte` has the resources' seconds, then latency and narrowest."""
    busy_s, latency_s, slowest_s = per_byte
    for send in range(len(end)):
        start = 0.0
        for i in range(indptr[send], indptr[send + 1]):
            start = max(start, out[indices[i]])
        low, high = first[end[send]], first[end[send] + 1]
        for i in range(low, high):
            start = max(start, free[resources[i]])
        for i in range(low, high):
            free[resources[i]] = start + size[send] * busy_s[resources[i]]
        out[send] = start + size[send] * slowest_s[end[send]] + latency_s[end[send]]
