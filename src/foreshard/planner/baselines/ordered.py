"""Planners that lay stages along devices in order: AMP-like and HetPipe-like."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from foreshard.planner.baselines.uniform_degrees import (
    BestTried,
    DegreeGrid,
    Step,
    UniformDegrees,
    numbers,
    promising,
)


def amp(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best grid of one shape along the order of devices, with uneven cuts and equal shares.

    All pipelines are alike; fast devices come first or last.
    """
    for shape in promising(grid, best):
        kinds = grid.kinds(shape)
        for depth in range(1, grid.problem.max_stages + 1):
            copies = _most_copies(grid, shape, depth)
            if not 0 < copies <= grid.problem.global_batch:
                continue
            room = {kind: grid.stages((shape, kind)) // copies for kind in kinds}
            passes = math.ceil(grid.problem.global_batch / copies / shape.micro_batch)
            for steps in _orders(shape, _first(room, depth)):
                template = grid.cut(steps, passes)
                if template is not None:
                    best.offer([(template, copies)], even=True)


def hetpipe(grid: DegreeGrid, best: BestTried) -> None:
    """Offer virtual workers of the same devices each, cut for the least slowest stage, with equal shares.

    The equal distribution of HetPipe: every virtual worker has as many devices of each kind as any other.
    Its workers push to parameter servers at different times; here a step ends for all together.
    """
    for shape in promising(grid, best):
        kinds = grid.kinds(shape)
        for copies in numbers(min(max(grid.stages((shape, k)) for k in kinds), grid.problem.global_batch)):
            each = {kind: grid.stages((shape, kind)) // copies for kind in kinds}
            if sum(each.values()) > grid.problem.max_stages:
                continue
            for steps in _orders(shape, each):
                template = grid.cut(steps, math.inf)
                if template is not None:
                    best.offer([(template, copies)], even=True)


def _most_copies(grid: DegreeGrid, shape: UniformDegrees, depth: int) -> int:
    """Return how many pipelines of so many stages there are, each with the same stages of each kind."""
    kinds = grid.kinds(shape)
    copies = sum(grid.stages((shape, kind)) for kind in kinds) // depth
    while copies and sum(grid.stages((shape, kind)) // copies for kind in kinds) < depth:
        copies -= 1
    return copies


def _first(room: Mapping[int, int], depth: int) -> dict[int, int]:
    """Return so many stages, of the fastest kinds first."""
    chosen = {}
    for kind, count in room.items():
        chosen[kind] = min(count, depth)
        depth -= chosen[kind]
    return chosen


def _orders(shape: UniformDegrees, counts: Mapping[int, int]) -> Iterator[tuple[Step, ...]]:
    """Yield the stages with fast devices first, and last."""
    steps = tuple((shape, kind) for kind, count in counts.items() for _ in range(count))
    if steps:
        yield steps
    if steps != steps[::-1]:
        yield steps[::-1]
