"""The even grid and what speed-proportional shares make of it."""

from __future__ import annotations

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, UniformDegrees, promising
from foreshard.planner.solver.problem import Template


def even(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best plan in which every device does the same: one shape, equal cuts, equal shares.

    Exhaustive over shapes, depths and numbers of pipelines; a pipeline stays on one kind of device, and
    the fastest are taken first, so that slow devices may stay idle.
    """
    for shape in promising(grid, best):
        for depth in range(1, grid.problem.max_stages + 1):
            mix = _pure(grid, best, shape, depth)
            before: list[tuple[Template, int]] = []
            for template, count in mix:
                for number in range(1, count + 1):
                    best.offer([*before, (template, number)], even=True)
                before.append((template, count))


def lb_bsp(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best plan of one shape and equal cuts on all devices, with shares by speed."""
    for shape in promising(grid, best):
        for depth in range(1, grid.problem.max_stages + 1):
            best.offer(_pure(grid, best, shape, depth), even=False)


def _pure(grid: DegreeGrid, best: BestTried, shape: UniformDegrees, depth: int) -> list[tuple[Template, int]]:
    """Return the pipelines of one depth on each kind, and how many there is room for; the fastest first."""
    found = []
    for kind in grid.kinds(shape):
        count = grid.stages((shape, kind)) // depth
        template = grid.even([(shape, kind)] * depth) if count else None
        if template is not None:
            found.append((template, count))
    return sorted(found, key=lambda one: best.pace_of(one[0])[0].bottleneck_s)
