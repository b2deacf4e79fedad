"""Malleus-like: devices grouped first, then layers of every pipeline and samples of each, exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, Step, UniformDegrees, promising


def malleus(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best plan of groups of one shape dealt to pipelines, with uneven cuts and uneven shares.

    Groups are sorted by speed and dealt in turn, so that pipelines are alike, or block by block, so that each
    is of one kind; both are tried for each number of pipelines. Fast groups come last in a pipeline.
    """
    for shape in promising(grid, best):
        units = [kind for kind in grid.kinds(shape) for _ in range(grid.stages((shape, kind)))]
        for depth in range(1, min(grid.problem.max_stages, len(units)) + 1):
            copies = min(len(units) // depth, grid.problem.global_batch)
            used = units[: copies * depth]
            _offer(grid, best, shape, [used[i::copies] for i in range(copies)])
            _offer(grid, best, shape, [used[i : i + depth] for i in range(0, len(used), depth)])


def _offer(
    grid: DegreeGrid, best: BestTried, shape: UniformDegrees, pipelines: Sequence[Sequence[int]]
) -> None:
    """Cut every pipeline for about its passes and offer them together."""
    problem = grid.problem
    passes = math.ceil(problem.global_batch / len(pipelines) / shape.micro_batch)
    mix = []
    for kinds, count in Counter(tuple(reversed(one)) for one in pipelines).items():
        steps: tuple[Step, ...] = tuple((shape, kind) for kind in kinds)
        template = grid.cut(steps, passes)
        if template is not None:
            mix.append((template, count))
    best.offer(mix, even=False)
