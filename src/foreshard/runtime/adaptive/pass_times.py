"""Nominal seconds of layers on each rank, for micro-batches of any size, and of steps made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreshard.control.search.pricing import StageArrays, hop_s, largest_micro_batch, sync_s
from foreshard.control.slots import MP_OVER_DP, Chain, State, Structure, WorkerPipeline
from foreshard.graph.pace import pipeline_pace
from foreshard.predict.measured.costs import MeasuredCosts, between_sizes
from foreshard.spec.cluster import Cluster

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Forward and backward of layers on each rank.

    Attributes
    ----------
    sizes : tuple of int
        Samples of the micro-batches whose seconds are known, in rising order.
    pass_s : ndarray, shape (ranks, layers, sizes)
        Seconds of a micro-batch at nominal speed; those of others follow from these, see `between_sizes`.
    speed : ndarray, shape (ranks,)
        Relative to the nominal speed, as stated or as first measured.
    """

    sizes: tuple[int, ...]
    pass_s: np.ndarray
    speed: np.ndarray

    @classmethod
    def measured(cls, costs: MeasuredCosts, cluster: Cluster) -> PassTimes:
        """Return the measured layers; a device without costs is as fast as the first that was measured."""
        names = [cluster.device_of(rank).name for rank in range(cluster.num_devices)]
        timed = {size for name in names for layer in costs.layers_on(name) for size in layer.timed_sizes}
        sizes = tuple(sorted(timed | {1, 2}))  # a line goes through its values at two sizes
        upto = {
            name: sum(costs.sums(name).upto_seconds(part, sizes) for part in ("forward_s", "backward_s"))
            for name in set(names)
        }
        speed = np.array([1.0 / costs.slow.get(name, 1.0) for name in names])
        pass_s = np.array([np.diff(upto[name], axis=0) for name in names])
        return cls(sizes=sizes, pass_s=pass_s, speed=speed)

    def layer_s(self, size: int) -> np.ndarray:
        """Return seconds per sample of every layer on every rank."""
        return between_sizes(size, self.sizes, self.pass_s) / size

    def sample_s(self, rank: int, span: Span, share: int, size: int) -> float:
        """Return seconds per sample of layers [first, stop) for a share in micro-batches of a size."""
        whole, rest = divmod(share, size)
        whole_s = whole * self._seconds(rank, span, size) if whole else 0.0
        return (whole_s + (self._seconds(rank, span, rest) if rest else 0.0)) / share

    def pass_seconds(self, rank: int, span: Span, samples: int, speed: np.ndarray) -> float:
        """Return the seconds of a micro-batch through layers [first, stop), at speeds by rank."""
        return samples * self.sample_s(rank, span, samples, samples) / float(speed[rank])

    def _seconds(self, rank: int, span: Span, samples: int) -> float:
        """Return the nominal seconds of a micro-batch through layers [first, stop)."""
        key = rank, span, samples
        if key not in self._known_s:
            pass_s = self.pass_s[rank, slice(*span)].sum(axis=0)
            self._known_s[key] = float(between_sizes(samples, self.sizes, pass_s))
        return self._known_s[key]

    @cached_property
    def _known_s(self) -> dict[tuple[int, Span, int], float]:
        return {}

    def best_size(self, stages: Sequence[tuple[int, Span]], share: int, most: int) -> int:
        """Return the micro-batch with which a share passes through stages soonest, at `speed`.

        Small ones fill the pipeline sooner, large ones pause less often.
        """

        def step_s(size: int) -> float:
            def pass_s(samples: int) -> list[float]:
                return [self.pass_seconds(rank, span, samples, self.speed) for rank, span in stages]

            whole, rest = divmod(share, size)
            first = pass_s(size)
            fill_s = sum(first) - max(first)
            return fill_s + whole * max(first) + (max(pass_s(rest)) if rest else 0.0)

        return min(range(1, min(most, share) + 1), key=lambda size: (step_s(size), -size))


class StepTiming:
    """Times structures by measured passes; what searches has one micro-batch size for all of them.

    The chain is there for messages and rings. `most` are the samples of the largest micro-batch; of all where
    stages split them.
    """

    def __init__(self, passes: PassTimes, chain: Chain, most: int, batch: int):
        self._passes, self._chain, self._most, self._batch = passes, chain, most, batch

    def __call__(self, state: State, structure: Structure, shares: Sequence[int]) -> float:
        """Return the seconds of a batch, shares in whole samples."""
        if structure.reading == MP_OVER_DP:
            return self._stages_s(state, structure, shares)
        groups = zip(structure.groups, shares, strict=True)
        ends = [self._group_s(state, group, share) for group, share in groups if share > 0]
        return max(ends) + float(sync_s(self._chain, state, StageArrays.of(structure)).max())

    def _stages_s(self, state: State, structure: Structure, shares: Sequence[int]) -> float:
        """Return the seconds of a batch through stages whose workers split every micro-batch."""
        taken, periods, stages = iter(shares), [], StageArrays.of(structure)
        hops = hop_s(self._chain, state, stages, self._most).tolist()
        for stage, message_s in zip(structure.groups, hops, strict=True):
            passing = [
                self._passes.pass_seconds(rank, (stage.cuts[0], stage.cuts[1]), size, state.speed)
                for rank, size in zip(stage.workers, taken, strict=False)
            ]
            periods.append(max(passing) + message_s)
        sums = float(sync_s(self._chain, state, stages).max())
        pace = pipeline_pace(np.array(periods))
        return float(pace.fill_s + self._batch / self._most * pace.period_s) + sums

    def _group_s(self, state: State, group: WorkerPipeline, share: int) -> float:
        """Return when a pipeline has passed its share: fill, then the slowest stage again and again."""
        cuts = group.cuts
        stages = [(w, (lo, hi)) for w, lo, hi in zip(group.workers, cuts[:-1], cuts[1:], strict=True)]
        most = largest_micro_batch(self._chain, group, share, self._most)
        size = self._passes.best_size(stages, share, most)
        whole, rest = divmod(share, size)
        pace = pipeline_pace(self._periods(state, stages, size))
        last = float(self._periods(state, stages, rest).max()) if rest else 0.0
        return float(pace.fill_s + whole * pace.period_s) + last

    def _periods(self, state: State, stages: Sequence[tuple[int, tuple[int, int]]], size: int) -> np.ndarray:
        found = np.zeros(len(stages))
        for k, (rank, span) in enumerate(stages):
            found[k] = self._passes.pass_seconds(rank, span, size, state.speed)
            if k:
                before = stages[k - 1][0]
                rate = float(state.bandwidth_bytes_per_s[before, rank])
                found[k] += 2.0 * float(state.latency_s[before, rank])
                found[k] += size * float(self._chain.boundary_bytes[span[0] - 1]) / rate
        return found
