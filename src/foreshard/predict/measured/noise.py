"""A measured step whose ranks differ: each rank draws its passes, and the step waits for the slowest.

The program holds the passes of every stage once. Ranks of a stage meet after each pass of a pipeline, and
once in a step where a stage is alone; tensor-parallel ranks meet in every pass. Sums and messages do not
vary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreshard.errors import SpecError
from foreshard.predict.event.jitter import slowest_of
from foreshard.predict.measured.lowering import MeasuredStep, Passes
from foreshard.sim import critical_path
from foreshard.spec.variation import Noise, StepDistribution

_MAX_DRAWS = 2**22  # of a stage at once, some ten MB


def step_distribution(step: MeasuredStep, noise: Noise, alike_s: float) -> StepDistribution:
    """Return the seconds of a step over many draws, and what each kind of noise adds.

    Parameters
    ----------
    step : MeasuredStep
    noise : Noise
    alike_s : float
        Of the step with all ranks alike.

    Raises
    ------
    SpecError
        If the noise names ranks that are not in the plan, or slow links: measured sums are of a ring, not of
        its links.
    """
    noise.check_ranks(step.ranks)
    if noise.slow_link:
        raise SpecError(
            "slow links where sums were measured whole",
            key="--slow-link",
            value=next(iter(noise.slow_link)),
            rule="Measured costs know a sum by its ranks, not by the links it takes",
            fix="Leave it out, or lower the bandwidth of [network] in the cluster file",
        )
    all_s = drawn_seconds(step, noise)
    jitter_s = 0.0
    if noise.jitter > 0.0:
        even_s = drawn_seconds(step, noise.without_slow_ranks()) if noise.slow else all_s
        jitter_s = float(even_s.mean()) - alike_s
    return StepDistribution.of(
        all_s.tolist(), alike_s=alike_s, jitter_s=jitter_s, slow_links_s=0.0, seed=noise.seed
    )


def drawn_seconds(step: MeasuredStep, noise: Noise) -> np.ndarray:
    """Return the seconds of the step, one for each step drawn."""
    steps = noise.seeds if noise.jitter > 0.0 else 1
    rng = np.random.default_rng(noise.seed)
    duration_s = np.repeat(step.program.duration_s[np.newaxis], steps, axis=0)
    for passes in step.passes:
        tasks = list(passes.tasks)
        duration_s[:, tasks] *= _factors(step, passes, noise, rng, steps)[:, np.newaxis]
    runs = (critical_path.run(replace(step.program, duration_s=seconds)) for seconds in duration_s)
    return np.array([run.makespan_s for run in runs])


def _factors(
    step: MeasuredStep, passes: Passes, noise: Noise, rng: np.random.Generator, steps: int
) -> np.ndarray:
    """Return how many times as long the tasks of some passes take, shape (steps,)."""
    work_s = {rank: sum(step.ranks[rank].work_s.values()) for rank in passes.ranks}
    longest_s = max(work_s.values()) or 1.0
    slowest = np.zeros(steps)
    tp = step.ranks[passes.ranks[0]].stage.tp  # ranks that meet in every pass
    for block in (passes.ranks[lo : lo + tp] for lo in range(0, len(passes.ranks), tp)):
        of_block = np.zeros(steps)
        weight = [work_s[rank] / longest_s * noise.slow.get(rank, 1.0) for rank in block]
        at_once = max(1, _MAX_DRAWS // (steps * len(block)))
        for begin in range(0, passes.count, at_once):
            shape = (steps, min(at_once, passes.count - begin), len(block))
            drawn = slowest_of(rng, 1, shape, jitter=noise.jitter, tail=noise.jitter_tail)
            of_block += (drawn * weight).max(axis=2).sum(axis=1)
        slowest = np.maximum(slowest, of_block / passes.count)
    return slowest
