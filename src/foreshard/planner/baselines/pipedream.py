"""PipeDream's partition: stages of any size along the device order, the slowest as fast as can be."""

from __future__ import annotations

import math

import numpy as np

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, Step, numbers
from foreshard.planner.solver.problem import Template


def pipedream(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best number of copies of the partition that makes the slowest stage as fast as possible.

    Devices are in order, the fastest first or last; a stage takes the next ones, as many as suit it. Fill and
    tail are not looked at, shares are equal.
    """
    most = min(sum(grid.problem.counts), grid.problem.global_batch)
    for size, steps in grid.by_micro_batch().items():
        pace = {
            kind: min(grid.layer_seconds(step) * step[0].devices for step in steps if step[1] == kind)
            for kind in {kind for _, kind in steps}
        }
        kinds = sorted(pace, key=pace.__getitem__)
        for copies in numbers(most, 1.5):
            passes = math.ceil(grid.problem.global_batch / copies / size)
            longest = best.limit_s / passes
            # Layers that all devices of a copy get through in that time.
            layers = longest * sum(grid.problem.counts[kind] // copies / pace[kind] for kind in kinds)
            if layers < grid.problem.num_layers:
                continue
            for order in dict.fromkeys((tuple(kinds), tuple(reversed(kinds)))):
                template = _partition(grid, steps, order, copies, longest)
                if template is not None:
                    best.offer([(template, copies)], even=True)


def _partition(
    grid: DegreeGrid, steps: list[Step], order: tuple[int, ...], copies: int, longest: float
) -> Template | None:
    """Return the partition of least slowest stage, None when none is below `longest`."""
    most = max(grid.problem.counts) // copies
    usable = [step for step in steps if step[0].devices <= most]
    if not usable:
        return None
    times = np.unique(np.concatenate([grid.seconds(step, 1) for step in usable]))
    times = times[np.isfinite(times) & (times < longest)]
    ends = np.cumsum([grid.problem.counts[kind] // copies for kind in order]).tolist()
    line = {
        kind: (end - grid.problem.counts[kind] // copies, end) for kind, end in zip(order, ends, strict=True)
    }
    if not len(times) or (best := _within(grid, usable, line, float(times[-1]))) is None:
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        found = _within(grid, usable, line, float(times[middle]))
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _within(
    grid: DegreeGrid, steps: list[Step], line: dict[int, tuple[int, int]], longest: float
) -> Template | None:
    """Return a pipeline on the line of devices with no stage above a time, of as few stages as possible.

    For each number of stages still to come, `first[start]` is the furthest device at which layers from
    `start` on can begin; a stage takes the last devices of its kind before that.
    """
    problem = grid.problem
    size = problem.num_layers
    first = np.full(size + 1, -1)
    first[size] = max(end for _, end in line.values())
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for depth in range(1, problem.max_stages + 1):
        now, chosen, stops = np.full(size + 1, -1), np.full(size + 1, -1), np.full(size + 1, -1)
        for i, step in enumerate(steps):
            begin, end = line[step[1]]
            at = np.minimum(first, end) - step[0].devices
            fits = np.append(grid.seconds(step, depth) <= longest, False)[problem.types]
            place = np.where(fits & (at >= begin)[None, :] & (first >= 0)[None, :], at[None, :], -1)
            stop = place.argmax(1)
            reach = place[np.arange(size + 1), stop]
            better = reach > now
            now[better], chosen[better], stops[better] = reach[better], i, stop[better]
        first = now
        trail.append((chosen, stops))
        if first[0] >= 0:
            return _walk(grid, steps, trail)
        if first.max() < 0:
            return None
    return None


def _walk(grid: DegreeGrid, steps: list[Step], trail: list[tuple[np.ndarray, np.ndarray]]) -> Template | None:
    cuts, used = [0], []
    for chosen, stops in reversed(trail):
        used.append(steps[int(chosen[cuts[-1]])])
        cuts.append(int(stops[cuts[-1]]))
    return grid.template(used, cuts)
