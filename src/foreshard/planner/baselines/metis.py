"""Metis-like: stages of different sizes by kind of device, layers and data balanced greedily by speed."""

from __future__ import annotations

from itertools import product

import numpy as np

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, Step, even_cuts, numbers
from foreshard.planner.solver.problem import Template, pipeline_rate

_MOVES = 64
"""Layers moved at most until a pipeline fits its memory."""
_CHOICES = 64
"""Choices of a size by kind that are tried: each costs a search over numbers of pipelines."""


def metis(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best of pipelines whose stages have a size by kind of device, balanced greedily.

    Layers go to stages in proportion to their speed and move on where memory is short. Kinds follow each
    other in one pipeline, or each has pipelines of its own which take data in proportion to their speed.
    """
    for steps in grid.by_micro_batch().values():
        own: dict[int, list[Step]] = {}
        for step in steps:
            own.setdefault(step[1], []).append(step)
        groups = sorted(own.values(), key=lambda steps: min(grid.layer_seconds(one) for one in steps))
        _chained(grid, best, groups)
        _beside(grid, best, groups)


def _chained(grid: DegreeGrid, best: BestTried, groups: list[list[Step]]) -> None:
    """Offer pipelines that pass through every kind, for the choices of sizes that do most work together."""
    problem = grid.problem
    ranked = sorted(
        product(*groups), key=lambda one: -sum(grid.stages(s) / grid.layer_seconds(s) for s in one)
    )
    for chosen in ranked[:_CHOICES]:
        for copies in numbers(min(max(grid.stages(step) for step in chosen), problem.global_batch), 1.25):
            steps = tuple(step for step in chosen for _ in range(grid.stages(step) // copies))
            if not 0 < len(steps) <= problem.max_stages:
                continue
            if not _bound(grid, steps, copies) < best.limit_s:
                continue
            for order in dict.fromkeys((steps, steps[::-1])):
                template = _greedy(grid, order)
                if template is not None:
                    best.offer([(template, copies)], even=True)


def _beside(grid: DegreeGrid, best: BestTried, groups: list[list[Step]]) -> None:
    """Offer pipelines of one kind each, of one depth, with data by speed."""
    for depth in range(1, grid.problem.max_stages + 1):
        mix: list[tuple[Template, int]] = []
        for steps in groups:
            found = []
            for step in steps:
                count = grid.stages(step) // depth
                template = _greedy(grid, (step,) * depth) if count else None
                if template is not None:
                    found.append(
                        (count / pipeline_rate(grid.problem, template).bottleneck_s, template, count)
                    )
            if found:
                _, template, count = max(found, key=lambda one: one[0])
                mix.append((template, count))
        best.offer(mix, even=False)


def _bound(grid: DegreeGrid, steps: tuple[Step, ...], copies: int) -> float:
    rate = copies * sum(1.0 / grid.layer_seconds(step) for step in steps)
    return grid.problem.global_batch / steps[0][0].micro_batch * grid.problem.num_layers / rate


def _greedy(grid: DegreeGrid, steps: tuple[Step, ...]) -> Template | None:
    """Return layers in proportion to speed, moved to the neighbour with most room where they do not fit."""
    size = grid.problem.num_layers
    if len(steps) > size or even_cuts(grid.problem, len(steps)) is None:
        return None
    speed = np.array([1.0 / grid.layer_seconds(step) for step in steps])
    wanted = speed / speed.sum() * size
    layers = np.maximum(1, np.floor(wanted)).astype(int)
    while layers.sum() != size:
        short = layers.sum() < size
        gap = wanted - layers if short else np.where(layers > 1, layers - wanted, -np.inf)
        layers[int(gap.argmax())] += 1 if short else -1
    able_to = [np.isfinite(grid.seconds(step, len(steps) - i)) for i, step in enumerate(steps)]
    for _ in range(_MOVES):
        cuts = np.concatenate([[0], np.cumsum(layers)])
        types = grid.problem.types[cuts[:-1], cuts[1:]].tolist()
        fits = [bool(row[type_]) for row, type_ in zip(able_to, types, strict=True)]
        if all(fits):
            return grid.template(steps, cuts.tolist())
        over = fits.index(False)
        able = [i for i, one in enumerate(fits) if one]
        if not able or layers[over] == 1:
            return None
        layers[over] -= 1
        layers[min(able, key=lambda i: (layers[i] / wanted[i], i))] += 1
    return None
