"""Seconds of a step with the micro-batches that a run gives its pipelines: a closer look at finalists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.control.search.pricing import StageArrays, hop_s, largest_micro_batch, sync_s
from foreshard.control.slots import MP_OVER_DP, Chain, State, Structure, WorkerPipeline
from foreshard.graph.pace import pipeline_pace
from foreshard.runtime.adaptive.pass_times import PassTimes


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
                size
                * self._passes.sample_s(rank, (stage.cuts[0], stage.cuts[1]), size, size)
                / float(state.speed[rank])
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
        passes, found = self._passes, np.zeros(len(stages))
        for k, (rank, span) in enumerate(stages):
            found[k] = size * passes.sample_s(rank, span, size, size) / float(state.speed[rank])
            if k:
                before = stages[k - 1][0]
                rate = float(state.bandwidth_bytes_per_s[before, rank])
                found[k] += 2.0 * float(state.latency_s[before, rank])
                found[k] += size * float(self._chain.boundary_bytes[span[0] - 1]) / rate
        return found
