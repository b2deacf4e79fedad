"""Whole numbers of the columns generated so far, by small enumerations and integer programs."""

from __future__ import annotations

import numpy as np

from foreshard.planner.solver.duals import duals_at, pipeline_dual
from foreshard.planner.solver.integer_combination import combine
from foreshard.planner.solver.pipeline_mix import whole_mix
from foreshard.planner.solver.search_state import SearchState

_STRETCH = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.25, 0.4, 0.7, 1.2)
"""Parts by which the step time of fractions is exceeded, until whole numbers process the batch."""
_SMALL_STRETCHES = 10
"""Of those, the ones that sets of few pipelines are tried for first."""
_CLOSER = 4
"""Times tried between fractions and the best so far, each at 0.6 of the way."""
_CLOSE = 1.002
"""Ratio of the best to fractions at which no time between is tried."""
_MOST_COLUMNS = 96
"""Columns that whole numbers are made of: those of least reduced cost."""
_PROGRAM_S, _LEAST_PROGRAM_S = 0.2, 0.02
"""Seconds of an integer program: it finds what it will find in the first tenths."""
_FEW = 6
"""Pipelines up to which all sets are enumerated instead."""


def offer_whole(
    state: SearchState, pipelines: tuple[int, int], bound_s: float, *, closely: bool = True
) -> None:
    """Offer whole numbers of the columns, for step times from the bound on until some process the batch.

    With `closely`, then for times between what fractions need and the best so far.
    """
    found = duals_at(state, pipelines, bound_s) if state.columns else None
    if found is None:
        return
    low, duals = found
    mixer = _Mixer(state, pipelines, duals)
    # Small sets first: unlike a program with a limit, enumerating them ends the same on a busy machine.
    for small in (True, False):
        for stretch in _STRETCH[: _SMALL_STRETCHES if small else None]:
            if np.isfinite(state.best_s) or state.is_late:
                break
            mixer.offer(low * (1.0 + stretch), small=small)
    for _ in range(_CLOSER if closely else 0):
        high = state.best_s / state.factor
        if not np.isfinite(high) or high <= low * _CLOSE or state.is_late:
            return
        middle = low + 0.6 * (high - low)
        if not mixer.offer(middle):
            low = middle


class _Mixer:
    """Whole numbers of the columns there are devices for, of a range of pipelines."""

    def __init__(self, state: SearchState, pipelines: tuple[int, int], duals: np.ndarray) -> None:
        self.state, self.pipelines, self.duals = state, pipelines, duals
        self.templates, self.table = list(state.columns), state.table()
        self.fits = np.all(self.table.takes <= np.array(state.problem.counts)[:, None], axis=0)

    def offer(self, seconds: float, *, small: bool = False) -> bool:
        """Offer the mix that processes most samples in some seconds; return whether it is a better plan."""
        problem = self.state.problem
        takes = self.table.takes
        samples = self.table.whole_samples(seconds - self.table.tails(problem, self.pipelines[0]))
        order = np.argsort(self.duals @ takes - samples, kind="stable")
        kept = order[self.fits[order] & (samples[order] > 0)][:_MOST_COLUMNS]
        if not len(kept):
            return False
        chosen = self._chosen(takes[:, kept], samples[kept], small=small)
        if chosen is None:
            return False
        before_s = self.state.best_s
        self.state.offer([self.templates[i] for i, n in zip(kept, chosen, strict=True) for _ in range(n)])
        return float(samples[kept] @ chosen) >= problem.global_batch and self.state.best_s < before_s

    def _chosen(self, takes: np.ndarray, samples: np.ndarray, *, small: bool) -> np.ndarray | None:
        """Return how many of each column: a small set that processes the batch, or any by a program."""
        problem, pipelines = self.state.problem, self.pipelines
        whole = takes.T.astype(np.int64)
        for number in range(pipelines[0], min(pipelines[1], _FEW) + 1):
            size = number, number
            reduced_cost = pipeline_dual(problem, self.duals, size) + self.duals @ takes - samples
            found = combine(whole, samples, reduced_cost, problem.counts, size, keep=1)
            if found.sets and found.samples[0] >= problem.global_batch:
                return np.bincount(found.sets[0], minlength=len(samples))
        if small:
            return None
        limit_s = min(_PROGRAM_S, max(_LEAST_PROGRAM_S, self.state.budget.left_s))
        return whole_mix(takes, samples, problem.counts, pipelines, limit_s=limit_s)
