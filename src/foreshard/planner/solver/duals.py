"""Duals of the configuration program: what a device of each kind is worth to a step of some seconds."""

from __future__ import annotations

import numpy as np

from foreshard.planner.solver.pipeline_mix import fractional_mix
from foreshard.planner.solver.problem import Problem
from foreshard.planner.solver.search_state import SearchState

_NEWTON_STEPS = 12
"""Steps towards the time in which the columns process the batch; samples are concave in time."""


def pipeline_dual(problem: Problem, duals: np.ndarray, pipelines: tuple[int, int]) -> float:
    """Return the dual of the number of pipelines, in samples.

    If every pipeline processes fewer samples than its devices are worth plus this, no mix of them processes
    the batch.
    """
    left = problem.global_batch - float(duals @ np.array(problem.counts))
    return left / (pipelines[1] if left > 0 else pipelines[0])


def duals_at(
    state: SearchState, pipelines: tuple[int, int], low_s: float, *, fills: bool = True
) -> tuple[float, np.ndarray] | None:
    """Return the step time in which fractions of the columns process the batch, and the duals there.

    With `fills` their filling counts.
    """
    problem = state.problem
    table = state.table() if fills else state.table().unfilled()
    tails = table.tails(problem, pipelines[0])
    rates = table.rates[2] / table.rates[1]  # samples a second of pipelines that are full
    seconds, high, duals = low_s, np.inf, np.zeros(len(problem.counts))
    for _ in range(_NEWTON_STEPS):
        samples = table.samples(seconds - tails)
        mix = fractional_mix(table.takes, samples, problem.counts, pipelines)
        if mix is None:
            return None
        duals = mix.device_duals
        if mix.samples >= problem.global_batch:
            high = seconds
            break
        gain = float((rates * (samples > 0)) @ mix.counts)
        short = problem.global_batch - mix.samples
        seconds += max(short / gain if gain > 0 else seconds, 1e-4 * seconds)
    return min(high, seconds), duals
