"""Random plans: what any planner must beat."""

from __future__ import annotations

import numpy as np

from foreshard.planner.baselines.uniform_degrees import Best, Grid, Step
from foreshard.planner.solver.problem import Arrangement, Problem, Template

_TRIES = 200


def anything(problem: Problem, *, seed: int = 0, best: Best | None = None) -> Arrangement | None:
    """Return the best of a number of random plans that fit, with equal shares."""
    rng = np.random.default_rng(seed)
    grid, best = Grid(problem=problem), best or Best(problem=problem)
    steps = sorted(grid.options, key=lambda one: (one[0], grid.layer_seconds(one)))
    for _ in range(_TRIES if steps else 0):
        template = _pipeline(grid, steps, rng)
        if template is None:
            continue
        takes = problem.takes[[part.option for part in template]].sum(0)
        most = min(problem.counts[k] // int(n) for k, n in enumerate(takes) if n)
        if most:
            best.offer([(template, int(rng.integers(1, most + 1)))], even=True)
    return best.arrangement


def _pipeline(grid: Grid, steps: list[Step], rng: np.random.Generator) -> Template | None:
    """Return stages drawn from one micro-batch, with random cuts."""
    first = steps[int(rng.integers(len(steps)))]
    agree = [step for step in steps if step[0].micro_batch == first[0].micro_batch]
    size = grid.problem.num_layers
    depth = int(rng.integers(1, min(grid.problem.max_stages, size) + 1))
    drawn = [agree[int(i)] for i in rng.integers(len(agree), size=depth)]
    inner = rng.permutation(size - 1)[: depth - 1] + 1
    return grid.template(drawn, [0, *sorted(inner.tolist()), size])
