"""Bounds from work alone and cuts of given stages, against every arrangement of small problems."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from foreshard.planner.solver.hops import best_cuts
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    StageSpan,
    pipeline_rate,
    stage_seconds,
    step_seconds,
    tail_seconds,
    template_faults,
)
from foreshard.planner.solver.shares import balance
from foreshard.planner.solver.work_bounds import work_bound


def test_cuts_are_as_good_as_any():
    rng = np.random.default_rng(3)
    pooled = _small(rng)
    for _ in range(40):
        options = rng.integers(0, len(pooled.takes), size=int(rng.integers(1, 4)))
        passes = float(rng.integers(1, 30))
        found = best_cuts(pooled, [int(o) for o in options], passes)
        best = min((_seconds(pooled, one, passes) for one in _all_cuts(pooled, options)), default=math.inf)
        if found is None:
            assert math.isinf(best)
            continue
        assert not template_faults(pooled, found)
        # The slowest stage is the least possible, so the rest can lose at most what a slower one would gain.
        assert _seconds(pooled, found, passes) <= best * 1.08
        least = min(float(stage_seconds(pooled, one).max()) for one in _all_cuts(pooled, options))
        many = best_cuts(pooled, [int(o) for o in options], 1e9)
        assert float(stage_seconds(pooled, many).max()) == pytest.approx(least, rel=1e-9)


def _small(rng: np.random.Generator) -> Problem:
    layers, count = 6, 5
    start, stop = np.triu_indices(layers + 1, k=1)
    types = np.full((layers + 1, layers + 1), -1)
    types[start, stop] = np.arange(len(start))
    time_s = rng.uniform(0.5, 1.5, (count, len(start))) * (stop - start)
    return Problem(
        counts=(8,),
        global_batch=64,
        max_stages=4,
        types=types,
        takes=np.ones((count, 1), dtype=int),
        micro_batch=np.ones(count, dtype=int),
        grain=np.ones(count, dtype=int),
        time_s=time_s,
        copies=(1,),
        tail_s=np.zeros((1, count, len(start))),
        hop_s=rng.uniform(0, 0.2, (count, count)),
        max_in_flight=rng.integers(0, 5, (count, len(start))),
    )


def _all_cuts(problem: Problem, options) -> list[tuple[StageSpan, ...]]:
    made = []
    for inner in itertools.combinations(range(1, problem.num_layers), len(options) - 1):
        cuts = (0, *inner, problem.num_layers)
        template = tuple(
            StageSpan(option=int(o), start=a, stop=b)
            for o, a, b in zip(options, cuts[:-1], cuts[1:], strict=True)
        )
        if not template_faults(problem, template):
            made.append(template)
    return made


def _seconds(problem: Problem, template: tuple[StageSpan, ...], passes: float) -> float:
    times = stage_seconds(problem, template)
    return float(times.sum() + (passes - 1.0) * times.max())


def test_work_alone_bounds_every_step():
    rng = np.random.default_rng(7)
    for _ in range(8):
        problem = _small(rng)
        bound = work_bound(problem)
        for size in (1, 2, 3):
            for options in itertools.product(range(5), repeat=size):
                template = best_cuts(problem, options, 16.0)
                if template is None:
                    continue
                copies = [template] * (8 // size)
                shares = balance(
                    [pipeline_rate(problem, one) for one in copies],
                    [tail_seconds(problem, one, len(copies)) for one in copies],
                    problem.global_batch,
                )
                assert shares is not None
                made = Arrangement(templates=tuple(copies), shares=shares)
                assert bound <= step_seconds(problem, made) * (1 + 1e-12)
