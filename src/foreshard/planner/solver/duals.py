"""What devices are worth to a plan of some seconds, by a linear program over the pipelines so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.planner.solver.pipeline_mix import fractional_mix
from foreshard.planner.solver.problem import Problem, Template, takes_of
from foreshard.planner.solver.search_state import SearchState

_KEPT = 96
_ALIKE = 3


def goal_of(problem: Problem, prices: np.ndarray, pipelines: tuple[int, int]) -> float:
    """Return the samples less prices that every pipeline must stay below for the batch to be out of reach."""
    left = problem.global_batch - float(prices @ np.array(problem.counts))
    return left / (pipelines[1] if left > 0 else pipelines[0])


def priced(progress: SearchState, pipelines: tuple[int, int], low: float) -> tuple[float, np.ndarray] | None:
    """Return the time in which fractions of the columns get through the batch, and the prices then."""
    problem = progress.problem
    table = progress.table()
    tails = table.tails_s(pipelines[0])
    seconds, high, prices = low, np.inf, np.zeros(len(problem.counts))
    for _ in range(12):
        samples = table.samples(seconds - tails)
        mix = fractional_mix(table.takes, samples, problem.counts, pipelines)
        if mix is None:
            return None
        if mix.samples >= problem.global_batch:
            high, prices = seconds, mix.device_prices
            break
        gain = float((table.rate * (samples > 0)) @ mix.counts)
        short = problem.global_batch - mix.samples
        seconds += max(short / gain if gain > 0 else seconds, 1e-4 * seconds)
        prices = mix.device_prices
    return min(high, seconds), prices


def varied(problem: Problem, templates: Sequence[Template]) -> list[Template]:
    """Return the first few pipelines of each demand for devices, best first."""
    seen: dict[tuple[int, ...], int] = {}
    kept: list[Template] = []
    for one in templates:
        key = (*takes_of(problem, one).tolist(), int(problem.micro_batch[one[0].option]))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= _ALIKE and len(kept) < _KEPT:
            kept.append(one)
    return kept
