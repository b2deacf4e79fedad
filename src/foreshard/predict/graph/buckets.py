"""Gradient buckets of a chunk: where they are cut, what reducing and gathering them takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foreshard.predict.graph.prices import LayerUnits
from foreshard.predict.machine import Machine
from foreshard.predict.tasks.collectives import bucket_elements, gradient_sync_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buckets:
    """Gradient buckets of one chunk in order of backward: [start, stop) of its reversed units."""

    bounds: list[tuple[int, int]]
    reduce_s: np.ndarray
    gather_s: np.ndarray

    def sped_up(self, speed: float) -> Buckets:
        """Return the same buckets so many times as fast."""
        if speed == 1.0:
            return self
        return replace(self, reduce_s=self.reduce_s / speed, gather_s=self.gather_s / speed)


def chunk_buckets(units: LayerUnits, machine: Machine, *, first: bool) -> Buckets:
    """Cut the units of a chunk, in order of backward, into buckets and price them."""
    rank = machine.rank
    sizes = (units.params + units.expert_params)[::-1]
    limit = float(bucket_elements(machine.traits.bucket_elements, rank.dp * rank.cp, first))
    bounds, start, filled = [], 0, 0.0
    for i, size in enumerate(sizes.tolist()):
        filled += size
        if filled >= limit or i == len(sizes) - 1:
            bounds.append((start, i + 1))
            start, filled = i + 1, 0.0
    dense = np.array([units.params[::-1][a:b].sum() for a, b in bounds])
    expert = np.array([units.expert_params[::-1][a:b].sum() for a, b in bounds])
    reduce_s, gather_s = gradient_sync_s(dense, expert, machine)
    return Buckets(bounds=bounds, reduce_s=reduce_s, gather_s=gather_s)


def slowdown_s(seconds: np.ndarray, moved: np.ndarray, contention: float) -> np.ndarray:
    """Return what collectives add to each piece; that of piece b starts at its end, one after another."""
    tax, pending = np.zeros(len(seconds)), 0.0
    for b, (busy, after) in enumerate(zip(seconds.tolist(), moved.tolist(), strict=True)):
        tax[b] = contention * min(pending, busy)
        pending = max(0.0, pending - busy - tax[b]) + after
    return tax
