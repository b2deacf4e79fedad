"""Where to cut a pipeline whose stages are given: the cuts that take least time for some number of passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.planner.solver.problem import Problem, StageSpan, Template, rounds_of

_STRETCH = (1.0, 1.005, 1.01, 1.02, 1.04, 1.08)


def best_cuts(problem: Problem, options: Sequence[int], passes: float) -> Template | None:
    """Return the pipeline of given options with the cuts that make `fill + passes * slowest` least.

    Parameters
    ----------
    problem : Problem
    options : sequence of int
        One per stage, first to last; they agree on the micro-batch.
    passes : float

    Returns
    -------
    Template or None
        None when the stages cannot hold the model. The slowest stage is as fast as cuts allow, or slower by
        one of a few factors where that shortens the fill by more.
    """
    costs = _costs(problem, options)
    lowest = _least_slowest(costs)
    if not np.isfinite(lowest):
        return None
    best, best_s = None, np.inf
    for stretch in _STRETCH:
        if passes * lowest >= best_s:
            break
        cuts, total = _shortest(costs, lowest * stretch)
        slowest = max(cost[a, b] for cost, a, b in zip(costs, cuts[:-1], cuts[1:], strict=True))
        seconds = total + (passes - 1.0) * slowest
        if seconds < best_s:
            best, best_s = cuts, seconds
    if best is None:
        return None
    return tuple(
        StageSpan(option=int(o), start=a, stop=b)
        for o, a, b in zip(options, best[:-1], best[1:], strict=True)
    )


def _costs(problem: Problem, options: Sequence[int]) -> list[np.ndarray]:
    """Return seconds of every interval on each stage, messages included; inf where it does not fit."""
    most = rounds_of(problem, int(problem.micro_batch[options[0]]))
    costs = []
    for i, o in enumerate(options):
        need = min(len(options) - i, most)
        time = np.where(problem.max_in_flight[o] >= need, problem.time_s[o], np.inf)
        hop = problem.hop_s[options[i - 1], o] if i else 0.0
        # The last entry stands for intervals of no layer.
        costs.append(np.append(time + hop, np.inf)[problem.types])
    return costs


def _least_slowest(costs: Sequence[np.ndarray]) -> float:
    """Return the least time of the slowest stage over all cuts."""
    after = np.full(len(costs[0]), np.inf)
    after[-1] = 0.0
    for cost in reversed(costs):
        after = np.maximum(cost, after[None, :]).min(1)
    return float(after[0])


def _shortest(costs: Sequence[np.ndarray], longest: float) -> tuple[list[int], float]:
    """Return the cuts of least total time with no stage above a limit."""
    after = np.full(len(costs[0]), np.inf)
    after[-1] = 0.0
    chosen = []
    for cost in reversed(costs):
        total = np.where(cost <= longest * (1.0 + 1e-12), cost, np.inf) + after[None, :]
        stop = total.argmin(1)
        after = total[np.arange(len(stop)), stop]
        chosen.append(stop)
    cuts = [0]
    for stop in reversed(chosen):
        cuts.append(int(stop[cuts[-1]]))
    return cuts, float(after[0])
