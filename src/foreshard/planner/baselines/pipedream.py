"""PipeDream's partition: stages of any size along the device order, the slowest as fast as can be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid, Step, numbers
from foreshard.planner.solver.problem import Template


def pipedream(grid: DegreeGrid, best: BestTried) -> None:
    """Offer the best number of copies of the partition that makes the slowest stage as fast as possible.

    Devices are in order, the fastest first or last; a stage takes the next ones, as many as suit it. Fill and
    tail are not looked at, shares are equal.
    """
    by_size = grid.by_micro_batch()
    for bound_s, size, copies, kinds in sorted(_promises(grid, by_size)):
        if best.budget.is_over:
            return
        if bound_s >= best.limit_s:
            break
        longest = best.limit_s / math.ceil(grid.problem.global_batch / copies / size)
        for order in dict.fromkeys((kinds, kinds[::-1])):
            template = _partition(grid, by_size[size], order, copies, longest)
            if template is not None:
                best.offer([(template, copies)], even=True)


def _promises(
    grid: DegreeGrid, by_size: Mapping[int, list[Step]]
) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    """Yield a bound on the step of every micro-batch and number of copies, and the kinds, fastest first.

    All devices of a copy at once get through its passes no sooner.
    """
    problem = grid.problem
    most = min(sum(problem.counts), problem.global_batch)
    for size, steps in by_size.items():
        pace = {
            kind: min(grid.layer_seconds(step) * step[0].devices for step in steps if step[1] == kind)
            for kind in {kind for _, kind in steps}
        }
        kinds = tuple(sorted(pace, key=pace.__getitem__))
        for copies in numbers(most, 1.5):
            rate = sum(problem.counts[kind] // copies / pace[kind] for kind in kinds)
            if rate > 0.0:
                passes = math.ceil(problem.global_batch / copies / size)
                yield passes * problem.num_layers / rate, size, copies, kinds


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
    stages = _by_place(usable)
    if not len(times) or (best := _within(grid, stages, line, float(times[-1]))) is None:
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        found = _within(grid, stages, line, float(times[middle]))
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _by_place(steps: list[Step]) -> list[tuple[Step, ...]]:
    """Return the steps that take as many devices of a kind, together."""
    found: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        found.setdefault((step[0].devices, step[1]), []).append(step)
    return [tuple(own) for own in found.values()]


def _within(
    grid: DegreeGrid, stages: list[tuple[Step, ...]], line: dict[int, tuple[int, int]], longest: float
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
        for i, steps in enumerate(stages):
            begin, end = line[steps[0][1]]
            at = np.minimum(first, end) - steps[0][0].devices
            able = (at >= begin) & (first >= 0)
            if not able.any():
                continue
            fits = grid.fastest(steps, depth) <= longest
            place = np.where(fits & able[None, :], at[None, :], -1)
            stop = place.argmax(1)
            reach = place[np.arange(size + 1), stop]
            better = reach > now
            now[better], chosen[better], stops[better] = reach[better], i, stop[better]
        first = now
        trail.append((chosen, stops))
        if first[0] >= 0:
            return _walk(grid, stages, trail)
        if first.max() < 0:
            return None
    return None


def _walk(
    grid: DegreeGrid, stages: list[tuple[Step, ...]], trail: list[tuple[np.ndarray, np.ndarray]]
) -> Template | None:
    cuts, used = [0], []
    for depth, (chosen, stops) in zip(range(len(trail), 0, -1), reversed(trail), strict=True):
        start, stop = cuts[-1], int(stops[cuts[-1]])
        type_ = grid.problem.types[start, stop]
        steps = stages[int(chosen[start])]
        used.append(min(steps, key=lambda step: float(grid.seconds(step, depth)[type_])))
        cuts.append(stop)
    return grid.template(used, cuts)
