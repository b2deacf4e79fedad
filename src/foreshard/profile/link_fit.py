"""From timed messages and sums to links: a floor and a rate, fitted in relative error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from foreshard.predict.measured.links import LinkCost


def fitted_links(links: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the links of a profile as a costs file holds them, None where none were timed."""
    if not links:
        return None
    return {name: _fitted(links, apart) for name, apart in (("within", False), ("across", True))}


def _fitted(links: Mapping[str, Any], apart: bool) -> dict[str, float] | None:
    messages = [(1.0, row["bytes"], row["seconds"]) for row in links["messages"] if row["apart"] == apart]
    sums = []
    for row in links["sums"]:
        if row["apart"] == apart:
            hops = 2 * (len(row["ranks"]) - 1)
            sums.append((float(hops), hops / len(row["ranks"]) * row["bytes"], row["seconds"]))
    if not messages:
        return None
    floor_s, rate, error = floor_and_rate(messages)
    hop_s, ring_rate, ring_error = floor_and_rate(sums or messages)
    fitted = LinkCost(
        floor_s=floor_s,
        bytes_per_s=rate,
        hop_s=hop_s,
        ring_bytes_per_s=ring_rate,
        relative_error=max(error, ring_error),
    )
    return asdict(fitted)


def floor_and_rate(timed: Sequence[tuple[float, float, Sequence[float]]]) -> tuple[float, float, float]:
    """Return (floor, bytes/s, median relative error) of max(hops * floor, bytes / rate).

    It is fitted to (hops, bytes, seconds of repeats). Every split of the points into those at the floor and
    those at the rate is tried; each side's line goes through the median of its ratios, and the split with the
    least mean of |log(formula / measured)| is kept: half and twice as long are equally wrong.
    """
    points = sorted(timed, key=lambda point: point[1] / point[0])
    hops, size, seconds = (
        np.array([point[0] for point in points]),
        np.array([point[1] for point in points], dtype=float),
        np.maximum([float(np.median(point[2])) for point in points], 1e-9),
    )
    best, least = (0.0, np.inf), np.inf
    for split in range(len(points)):
        floor_s = float(np.median(seconds[:split] / hops[:split])) if split else 0.0
        per_byte_s = float(np.median(seconds[split:] / size[split:]))
        error = float(np.abs(np.log(np.maximum(hops * floor_s, size * per_byte_s) / seconds)).mean())
        if error < least:
            best, least = (floor_s, 1.0 / per_byte_s), error
    floor_s, rate = best
    errors = np.abs(np.maximum(hops * floor_s, size / rate) / seconds - 1)
    return floor_s, rate, float(np.median(errors))
