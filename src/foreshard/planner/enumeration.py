"""Small problems solved to the end: every pipeline that no other dominates, and whole numbers of them."""

from __future__ import annotations

import time

import numpy as np

from foreshard.planner.configuration import columns_of, samples_of, whole_mix
from foreshard.planner.problem import (
    Arrangement,
    Part,
    Problem,
    Template,
    pace_of,
    rounds_of,
    spread_factor,
    step_seconds,
    tail_seconds,
    takes_of,
)
from foreshard.planner.shares import balance

MOST_TEMPLATES = 20_000
_TIGHT = 1e-9


def all_templates(problem: Problem, most: int = MOST_TEMPLATES) -> list[Template] | None:
    """Return every pipeline that may run, None when there are more than `most`."""
    found: list[Template] = []
    counts = np.array(problem.counts)
    size = problem.num_layers

    def extend(stop: int, behind: tuple[Part, ...], used: np.ndarray) -> bool:
        if stop == 0:
            found.append(behind)
            return len(found) <= most
        if len(behind) == problem.max_stages:
            return True
        for option, takes in enumerate(problem.takes):
            if behind and problem.micro_batch[option] != problem.micro_batch[behind[0].option]:
                continue
            if np.any(used + takes > counts):
                continue
            need = min(len(behind) + 1, rounds_of(problem, int(problem.micro_batch[option])))
            for start in range(stop):
                type_ = problem.types[start, stop]
                if problem.max_in_flight[option, type_] < need or not np.isfinite(
                    problem.time_s[option, type_]
                ):
                    continue
                part = Part(option=option, start=start, stop=stop)
                if not extend(start, (part, *behind), used + takes):
                    return False
        return True

    return found if extend(size, (), np.zeros(len(counts), dtype=int)) else None


def undominated(problem: Problem, templates: list[Template]) -> list[Template]:
    """Return the pipelines than which none with the same shares is faster on no more devices."""
    rows: dict[tuple[int, int], list[tuple[np.ndarray, Template]]] = {}
    for one in templates:
        pace = pace_of(problem, one)
        tails = [tail_seconds(problem, one, copies) for copies in problem.copies]
        row = np.array([*takes_of(problem, one), pace.fill_s, pace.bottleneck_s, *tails])
        rows.setdefault((pace.micro_batch, pace.grain), []).append((row, one))
    kept = []
    for group in rows.values():
        values = np.array([row for row, _ in group])
        alive = np.ones(len(values), dtype=bool)
        for i in range(len(values)):
            if alive[i]:
                worse = np.all(values >= values[i], axis=1)
                worse[i] = False
                alive &= ~worse
        kept += [one for (_, one), lives in zip(group, alive, strict=True) if lives]
    return kept


def best_of_all(
    problem: Problem, templates: list[Template], ranges: list[tuple[int, int]], deadline: float
) -> tuple[Arrangement | None, bool]:
    """Return the best arrangement of some pipelines, and whether no mix of them is faster.

    By branch and bound; where the spread counts, every number of devices in use is asked apart. At the
    deadline (`time.perf_counter`) it is the best so far.
    """
    takes = columns_of(problem, templates)
    devices = sum(problem.counts)
    limits = range(1, devices + 1) if problem.jitter > 0 else [devices]
    best: Arrangement | None = None
    best_s = np.inf
    for pipelines in ranges:
        for limit in limits:
            if time.perf_counter() > deadline:
                return best, False
            factor = spread_factor(problem, limit) if problem.jitter > 0 else 1.0
            high = (
                _longest(problem, templates, pipelines[0]) if best is None else best_s / factor * (1 - _TIGHT)
            )
            found = _mix(problem, templates, takes, pipelines, limit, high)
            while found is not None:
                seconds = step_seconds(problem, found)
                if seconds < best_s:
                    best, best_s = found, seconds
                high = min(high, seconds / factor) * (1 - _TIGHT)
                if time.perf_counter() > deadline:
                    return best, False
                found = _bisect(problem, templates, takes, pipelines, limit, high)
    return best, True


def _longest(problem: Problem, templates: list[Template], copies: int) -> float:
    return max(
        pace_of(problem, one).seconds(problem.global_batch) + tail_seconds(problem, one, copies)
        for one in templates
    )


def _bisect(
    problem: Problem,
    templates: list[Template],
    takes: np.ndarray,
    pipelines: tuple[int, int],
    limit: int,
    high: float,
) -> Arrangement | None:
    """Return an arrangement near the least time, None when `high` itself is out of reach."""
    found = _mix(problem, templates, takes, pipelines, limit, high)
    if found is None:
        return None
    low = 0.0
    for _ in range(12):
        middle = 0.5 * (low + high)
        made = _mix(problem, templates, takes, pipelines, limit, middle)
        if made is None:
            low = middle
        else:
            found, high = made, middle
    return found


def _mix(
    problem: Problem,
    templates: list[Template],
    takes: np.ndarray,
    pipelines: tuple[int, int],
    limit: int,
    seconds: float,
) -> Arrangement | None:
    """Return pipelines on at most `limit` devices that get through the batch in so many seconds."""
    samples = samples_of(problem, templates, pipelines[0], seconds)
    keep = np.flatnonzero(samples > 0)
    if not len(keep):
        return None
    rows = np.vstack([takes[:, keep], takes[:, keep].sum(0)])
    capped = np.minimum(samples[keep], problem.global_batch)
    chosen = whole_mix(rows, capped, [*problem.counts, limit], pipelines, gap=0.0, limit_s=10.0)
    if chosen is None or float(capped @ chosen) < problem.global_batch:
        return None
    made = [templates[i] for i, n in zip(keep, chosen, strict=True) for _ in range(n)]
    if len(made) > problem.global_batch:
        return None
    tails = [tail_seconds(problem, one, len(made)) for one in made]
    shares = balance([pace_of(problem, one) for one in made], tails, problem.global_batch)
    return None if shares is None else Arrangement(templates=tuple(made), shares=shares)
