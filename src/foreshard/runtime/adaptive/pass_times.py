"""Nominal seconds of forward and backward passes: layers on each rank, for micro-batches of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.predict.measured.costs import LayerCost, MeasuredCosts
from foreshard.spec.cluster import Cluster

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Forward and backward of layers on each rank.

    Attributes
    ----------
    fixed_s, each_s : ndarray, shape (ranks, layers)
        Seconds per micro-batch and per sample, at nominal speed.
    speed : ndarray, shape (ranks,)
        Relative to the nominal speed, as stated or as first measured.
    """

    fixed_s: np.ndarray
    each_s: np.ndarray
    speed: np.ndarray

    @classmethod
    def measured(cls, costs: MeasuredCosts, cluster: Cluster) -> PassTimes:
        """Return the measured layers; a device without costs is as fast as the first that was measured."""
        names = [cluster.device_of(rank).name for rank in range(cluster.num_devices)]
        lines = np.array([[_line(layer) for layer in costs.layers_on(name)] for name in names])
        speed = np.array([1.0 / costs.slow.get(name, 1.0) for name in names])
        return cls(fixed_s=lines[:, :, 0], each_s=lines[:, :, 1], speed=speed)

    def layer_s(self, size: int) -> np.ndarray:
        """Return seconds per sample of every layer on every rank."""
        return np.asarray(self.fixed_s / size + self.each_s)

    def sample_s(self, rank: int, span: Span, share: int, size: int) -> float:
        """Return seconds per sample of layers [first, stop) for a share in micro-batches of a size."""
        fixed, each = (float(table[rank, slice(*span)].sum()) for table in (self.fixed_s, self.each_s))
        return -(-share // size) * fixed / share + each

    def best_size(self, stages: Sequence[tuple[int, Span]], share: int, most: int) -> int:
        """Return the micro-batch with which a share passes through stages soonest, at `speed`.

        Small ones fill the pipeline sooner, large ones pause less often.
        """

        def step_s(size: int) -> float:
            def pass_s(samples: int) -> list[float]:
                return [
                    samples * self.sample_s(rank, span, samples, samples) / float(self.speed[rank])
                    for rank, span in stages
                ]

            whole, rest = divmod(share, size)
            first = pass_s(size)
            fill_s = sum(first) - max(first)
            return fill_s + whole * max(first) + (max(pass_s(rest)) if rest else 0.0)

        return min(range(1, min(most, share) + 1), key=lambda size: (step_s(size), -size))


def _line(layer: LayerCost) -> tuple[float, float]:
    forward, backward = layer.forward_s, layer.backward_s
    return forward[0] + backward[0], forward[1] + backward[1]
