"""Messages between stages that cost by which option comes before, and the cuts that suit them.

Paths over cuts add up stages one by one; what a message costs at least goes into the stage it reaches. What
depends on both ends is left to cutting the pipelines found anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from foreshard.planner.solver.problem import Problem, StageSpan, Template, rounds_of

_PARTS = (1, 2, 4)
"""Parts of the batch that a pipeline may get."""
_STRETCH = (1.0, 1.005, 1.01, 1.02, 1.04, 1.08)
"""Factors by which the slowest stage may exceed the least possible, to shorten the filling by more."""


def least_hops_in_times(problem: Problem) -> Problem:
    """Return the same problem with the least message of every stage but a first one in its time."""
    if not problem.hop_s.any():
        return problem
    agree = problem.micro_batch[:, None] == problem.micro_batch[None, :]
    least = np.where(agree, problem.hop_s, np.inf).min(0)
    later = problem.types + np.where(problem.types >= 0, int(problem.types.max()) + 1, 0)
    later[0] = problem.types[0]

    def twice(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, values], axis=-1)

    return replace(
        problem,
        types=later,
        time_s=np.concatenate([problem.time_s, problem.time_s + least[:, None]], axis=1),
        tail_s=twice(problem.tail_s),
        shortest=None if problem.shortest is None else twice(problem.shortest),
        max_in_flight=twice(problem.max_in_flight),
        forward_s=None if problem.forward_s is None else twice(problem.forward_s),
        backward_s=None if problem.backward_s is None else twice(problem.backward_s),
        leave_s=None if problem.leave_s is None else twice(problem.leave_s),
        leave_tail_s=None if problem.leave_tail_s is None else twice(problem.leave_tail_s),
        hop_s=np.where(agree, problem.hop_s - least[None, :], 0.0),
    )


def recut(problem: Problem, templates: Iterable[Template]) -> Iterator[Template]:
    """Yield the pipelines with the cuts that suit their messages; none where messages cost nothing more."""
    if not problem.hop_s.any():
        return
    seen: set[tuple[int, ...]] = set()
    for template in templates:
        options = tuple(part.option for part in template)
        if len(options) < 2 or options in seen:
            continue
        seen.add(options)
        whole = problem.global_batch / float(problem.micro_batch[options[0]])
        for part in _PARTS:
            made = best_cuts(problem, options, max(1.0, whole / part))
            if made is not None:
                yield made


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
    lowest = least_slowest(costs)
    if not np.isfinite(lowest):
        return None
    best, best_s = None, np.inf
    for stretch in _STRETCH:
        if passes * lowest >= best_s:
            break
        cuts, total = shortest_cuts(costs, lowest * stretch)
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


def least_slowest(costs: Sequence[np.ndarray]) -> float:
    """Return the least time of the slowest stage over all cuts."""
    after = np.full(len(costs[0]), np.inf)
    after[-1] = 0.0
    for cost in reversed(costs):
        after = np.maximum(cost, after[None, :]).min(1)
    return float(after[0])


def shortest_cuts(costs: Sequence[np.ndarray], longest: float) -> tuple[list[int], float]:
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
