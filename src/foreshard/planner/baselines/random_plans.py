"""Random plans: what any planner must beat."""

from __future__ import annotations

import numpy as np

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, Step
from foreshard.planner.solver.problem import Template, takes_of

_TRIES = 200
"""Plans drawn: a second or two of the judge."""
_SEED = 0
"""Of the draws: the same problem has the same random plan."""


def anything(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best of a number of random plans that fit, with equal shares."""
    rng = np.random.default_rng(_SEED)
    steps = sorted(grid.options, key=lambda one: (one[0], grid.layer_seconds(one)))
    for _ in range(_TRIES if steps else 0):
        template = _pipeline(grid, steps, rng)
        if template is None:
            continue
        takes = takes_of(grid.problem, template)
        most = min(grid.problem.counts[k] // int(n) for k, n in enumerate(takes) if n)
        if most:
            best.offer([(template, int(rng.integers(1, most + 1)))], even=True)


def _pipeline(grid: DegreeGrid, steps: list[Step], rng: np.random.Generator) -> Template | None:
    """Return stages drawn from one micro-batch, with random cuts."""
    first = steps[int(rng.integers(len(steps)))]
    agree = [step for step in steps if step[0].micro_batch == first[0].micro_batch]
    size = grid.problem.num_layers
    depth = int(rng.integers(1, min(grid.problem.max_stages, size) + 1))
    drawn = [agree[int(i)] for i in rng.integers(len(agree), size=depth)]
    inner = rng.permutation(size - 1)[: depth - 1] + 1
    return grid.template(drawn, [0, *sorted(inner.tolist()), size])
