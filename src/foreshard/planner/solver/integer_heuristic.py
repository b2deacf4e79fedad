"""Whole numbers of the pipelines so far, by integer programs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from foreshard.planner.solver.duals import goal_of, priced
from foreshard.planner.solver.integer_combination import combine
from foreshard.planner.solver.pipeline_mix import columns_of, samples_of, whole_mix
from foreshard.planner.solver.problem import Template, takes_of
from foreshard.planner.solver.search_state import SearchState

_STRETCH = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.25, 0.4, 0.7, 1.2)
_CLOSER = 4
_CLOSE = 1.002
_MIXED = 96
_MIX_S = 0.2
_FEW = 6
_TRIED = 10


def offer_whole(
    progress: SearchState, pipelines: tuple[int, int], bound: float, *, closely: bool = True
) -> None:
    """Offer whole numbers of the columns: for times from the bound on until some get through the batch.

    Closely, then for times between what fractions need and the best so far, as long as that closes in.
    """
    problem = progress.problem
    templates = [
        one for one in progress.columns if np.all(takes_of(problem, one) <= np.array(problem.counts))
    ]
    mix = priced(progress, pipelines, bound) if templates else None
    if mix is None:
        return
    low, prices = mix
    takes = columns_of(problem, templates)
    # Small sets are tried out first: that takes no longer on a busy machine, and what comes of it is good.
    for few in (True, False):
        for stretch in _STRETCH[: _TRIED if few else None]:
            if np.isfinite(progress.best_s) or progress.interrupted:
                break
            _offer_mix(progress, pipelines, templates, takes, low * (1.0 + stretch), prices, few=few)
    for _ in range(_CLOSER if closely else 0):
        high = progress.best_s / progress.factor
        if not np.isfinite(high) or high <= low * _CLOSE or progress.late:
            return
        middle = low + 0.6 * (high - low)
        if not _offer_mix(progress, pipelines, templates, takes, middle, prices):
            low = middle


def _chosen(
    progress: SearchState,
    pipelines: tuple[int, int],
    takes: np.ndarray,
    samples: np.ndarray,
    prices: np.ndarray,
    *,
    few: bool,
) -> np.ndarray | None:
    """Return how many of each pipeline get through most: a few that reach the batch, or any by a program."""
    problem = progress.problem
    whole = takes.T.astype(np.int64)
    for number in range(pipelines[0], min(pipelines[1], _FEW) + 1):
        some = number, number
        worth = goal_of(problem, prices, some) + prices @ takes - samples
        found = combine(whole, samples, worth, problem.counts, some, keep=1)
        if found.sets and found.samples[0] >= problem.global_batch:
            return np.bincount(found.sets[0], minlength=len(samples))
    if few:
        return None
    limit = min(_MIX_S, max(0.02, progress.deadline - time.perf_counter()))
    return whole_mix(takes, samples, problem.counts, pipelines, limit_s=limit)


def _offer_mix(
    progress: SearchState,
    pipelines: tuple[int, int],
    templates: Sequence[Template],
    takes: np.ndarray,
    seconds: float,
    prices: np.ndarray,
    *,
    few: bool = False,
) -> bool:
    """Offer whole numbers of some pipelines that get through most in some time; return whether it is all."""
    problem = progress.problem
    samples = samples_of(problem, templates, pipelines[0], seconds)
    # Those that are worth most beyond the devices they take, at what devices are worth to fractions.
    order = np.argsort(-(samples - prices @ takes), kind="stable")
    keep = order[samples[order] > 0][:_MIXED]
    if not len(keep):
        return False
    chosen = _chosen(progress, pipelines, takes[:, keep], samples[keep], prices, few=few)
    if chosen is None:
        return False
    before = progress.best_s
    progress.offer([templates[i] for i, n in zip(keep, chosen, strict=True) for _ in range(n)])
    return float(samples[keep] @ chosen) >= problem.global_batch and progress.best_s < before
