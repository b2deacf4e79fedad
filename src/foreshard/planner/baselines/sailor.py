"""Sailor-like: equal cuts and shares, replicas of a stage on mixed kinds with degrees by kind."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, Step, even_cuts, numbers
from foreshard.planner.solver.problem import Problem


def sailor(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best plan of equal cuts whose every stage has as many replicas, on any kinds of device.

    For each depth, number of replicas and limit on the slowest stage, stages take the narrowest option of
    each kind within the limit, and devices go to stages one after another from where most are left.
    """
    for steps in grid.by_micro_batch().values():
        for depth in range(1, grid.problem.max_stages + 1):
            cuts = even_cuts(grid.problem, depth)
            if cuts is None:
                continue
            types = [grid.problem.types[a, b] for a, b in pairwise(cuts)]
            table = np.array([[grid.seconds(s, depth - i)[t] for s in steps] for i, t in enumerate(types)])
            _offer_depth(grid, best, steps, cuts, table)


def _offer_depth(
    grid: DegreeGrid, best: BestTried, steps: list[Step], cuts: list[int], table: np.ndarray
) -> None:
    """Offer each limit on the slowest stage with every number of replicas; table is (stages, steps)."""
    problem, depth = grid.problem, len(table)
    limits = np.unique(table[np.isfinite(table)])
    for limit in limits[limits >= table.min(1).max()].tolist():
        narrow = [_narrowest(steps, row, limit) for row in table]
        for copies in reversed(numbers(min(sum(problem.counts) // depth, problem.global_batch))):
            passes = max(1.0, problem.global_batch / copies / steps[0][0].micro_batch)
            if passes * table.min(1).max() >= best.limit_s:
                break
            placed = _place(problem, narrow, copies)
            if placed is None:
                continue
            _offer_placed(grid, best, placed, cuts)
            if passes * limit >= best.limit_s:
                break


def _narrowest(steps: list[Step], seconds: np.ndarray, limit: float) -> dict[int, Step]:
    """Return for each kind the step of fewest devices within a limit, the faster of equals."""
    found: dict[int, tuple[int, float, Step]] = {}
    for step, time in zip(steps, seconds.tolist(), strict=True):
        if time <= limit:
            row = (step[0].devices, time, step)
            found[step[1]] = min(found.get(step[1], row), row)
    return {kind: step for kind, (_, _, step) in found.items()}


def _place(problem: Problem, narrow: list[dict[int, Step]], copies: int) -> list[list[Step]] | None:
    """Return the replicas of each stage, those with least choice first; None when devices run out."""
    left = list(problem.counts)
    placed: list[list[Step]] = [[] for _ in narrow]
    for stage in sorted(range(len(narrow)), key=lambda i: (len(narrow[i]), i)):
        wanted = copies
        own = narrow[stage]
        for kind in sorted(own, key=lambda k: (-(left[k] // own[k][0].devices), own[k][0].devices)):
            count = min(wanted, left[kind] // own[kind][0].devices)
            placed[stage] += [own[kind]] * count
            left[kind] -= count * own[kind][0].devices
            wanted -= count
        if wanted:
            return None
    return placed


def _offer_placed(grid: DegreeGrid, best: BestTried, placed: list[list[Step]], cuts: list[int]) -> None:
    """Join replicas stage by stage, slow ones with slow ones, and offer the pipelines."""
    problem, depth = grid.problem, len(placed)
    lanes = []
    for i, own in enumerate(placed):
        type_ = problem.types[cuts[i], cuts[i + 1]]
        lanes.append(sorted(own, key=lambda s: (float(grid.seconds(s, depth - i)[type_]), s[0])))
    counts: dict[tuple[Step, ...], int] = {}
    for one in zip(*lanes, strict=True):
        counts[one] = counts.get(one, 0) + 1
    mix = []
    for one, count in counts.items():
        template = grid.template(one, cuts)
        if template is None:
            return
        mix.append((template, count))
    best.offer(mix, even=True)
