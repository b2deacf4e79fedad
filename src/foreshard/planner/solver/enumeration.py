"""Small problems solved by enumeration: every pipeline that no other dominates, in all whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from foreshard.planner.solver.integer_combination import combine
from foreshard.planner.solver.problem import (
    Arrangement,
    Filling,
    PipelineColumns,
    Problem,
    StageSpan,
    Template,
    pipeline_columns,
    rounds_of,
    spread_factor,
    step_seconds,
)
from foreshard.planner.solver.shares import balance
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget

MOST_TEMPLATES = 40_000
"""Pipelines up to which a problem is enumerated: some seconds of comparisons."""
_TIGHT = 1e-9
"""Relative difference between step times that are different."""
_STEPS = 12
"""Bisections towards the least step time; what is left is then closed by exact times."""
_LOOKED = 512
"""Stages tried between two looks at the clock."""


_Ending = tuple[StageSpan, int, int, tuple[int, ...]]
"""A stage, its micro-batch, how many stages from it on it has memory for, its devices of each kind."""
_Stages = tuple[list[tuple[StageSpan, int]], list[tuple[StageSpan, int]]]
"""Stages and how many from each on it has memory for: those that begin at the first layer, others."""


def all_templates(
    problem: Problem, most: int = MOST_TEMPLATES, budget: TimeBudget = ENDLESS, *, every: bool = True
) -> list[Template] | None:
    """Return every pipeline that may run, None when there are more than `most` or time is up.

    Without `every`, pipelines are left out of which a stage could be quicker on the same devices: with that
    one instead no step is longer.
    """
    found: list[Template] = []
    offered = np.ones_like(problem.time_s, dtype=bool) if every else _worthwhile(problem)
    if _num_templates(problem, offered, most) > most:
        return None
    tried = 0
    ends = [_by_devices(ending) for ending in _endings(problem, offered)]
    sizes = sorted({size for size, _ in chain.from_iterable(ends)})

    def extend(stop: int, behind: tuple[StageSpan, ...], left: tuple[int, ...], size: int) -> bool:
        nonlocal tried
        if stop == 0:
            found.append(behind)
            return True
        if len(behind) == problem.max_stages:
            return True
        for (own, takes), (first, later) in ends[stop].items():
            free = tuple([n - taken for n, taken in zip(left, takes, strict=True)])
            if own != size or min(free) < 0:
                continue
            for part, room in chain(first, later if any(free) else ()):
                tried += 1
                if tried % _LOOKED == 0 and budget.is_over:
                    return False
                if room > len(behind) and not extend(part.start, (part, *behind), free, own):
                    return False
        return True

    ended = all(extend(problem.num_layers, (), problem.counts, size) for size in sizes)
    return found if ended else None


def _by_devices(endings: Sequence[_Ending]) -> dict[tuple[int, tuple[int, ...]], _Stages]:
    """Return stages that begin at the first layer and others, by their micro-batch and their devices."""
    found: dict[tuple[int, tuple[int, ...]], _Stages] = {}
    for part, size, room, takes in endings:
        found.setdefault((size, takes), ([], []))[part.start > 0].append((part, room))
    return found


def _num_templates(problem: Problem, is_offered: np.ndarray, most: float) -> float:
    """Return how many pipelines there are of some stages, unlisted; above `most` some number above it."""
    places = problem.num_layers + 1
    stages: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
    rooms = np.where(is_offered & np.isfinite(problem.time_s), _rooms(problem), 0)
    stages_behind = np.arange(problem.max_stages)[:, None, None]
    for option, takes in enumerate(map(tuple, problem.takes.tolist())):
        if any(taken > n for n, taken in zip(problem.counts, takes, strict=True)):
            continue  # of a problem that may use fewer devices than there are
        # by stages behind, start and stop
        ways = np.where(problem.types >= 0, rooms[option][problem.types], 0) > stages_behind
        key = int(problem.micro_batch[option]), takes
        stages[key] = stages[key] + ways if key in stages else ways.astype(float)
    total = 0.0
    for size in {size for size, _ in stages}:
        own = [(takes, ways) for (its, takes), ways in stages.items() if its == size]
        # Pipelines of the last layers, by where they start and the devices they leave.
        last = np.zeros((places, *(n + 1 for n in problem.counts)))
        last[(-1, *problem.counts)] = 1.0
        for behind in range(problem.max_stages):
            more = np.zeros_like(last)
            for takes, ways in own:
                to = tuple(slice(0, n + 1 - taken) for n, taken in zip(problem.counts, takes, strict=True))
                left = tuple(slice(taken, None) for taken in takes)
                more[(slice(None), *to)] += np.tensordot(ways[behind], last[(slice(None), *left)], axes=1)
            total += float(more[0].sum())
            last = more
            last[0] = 0.0
            if total > most:
                return total
            if not last.any():
                break
    return total


def _rooms(problem: Problem) -> np.ndarray:
    """Return how many stages from each on it has memory for, by option and type."""
    whole = [rounds_of(problem, int(size)) for size in problem.micro_batch]
    holds_all = problem.max_in_flight >= np.array(whole)[:, None]
    return np.where(holds_all, problem.max_stages, problem.max_in_flight)


def with_least_parts(problem: Problem) -> Problem:
    """Return the problem in which stages worth a try have the quickest parts of those they stand for.

    A stage is no quicker in all when another is, but its forward or backward may be. By the least of both, no
    pipeline of stages that were left out takes less than the one of those that stand for them.
    """
    if problem.forward_s is None or problem.backward_s is None or problem.hop_s.any():
        return problem
    kept = _worthwhile(problem)
    costs, groups = _stage_costs(problem)
    forward_s, backward_s = problem.forward_s.copy(), problem.backward_s.copy()
    for own in groups:
        for i in own[kept[own].any(1)]:
            worse = np.all(costs[:, own] >= costs[:, i : i + 1], axis=0) & np.isfinite(costs[0, own])
            for parts_s, of in ((forward_s, problem.forward_s), (backward_s, problem.backward_s)):
                least_s = np.where(worse, of[own], np.inf).min(0)
                parts_s[i] = np.where(kept[i], np.minimum(of[i], least_s), of[i])
    return replace(problem, forward_s=forward_s, backward_s=backward_s)


def _worthwhile(problem: Problem) -> np.ndarray:
    """Return which stages no other on as many devices is better than in all respects, by option and type.

    Where messages cost by the options at both ends, every stage is worth a try.
    """
    kept = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
    if problem.hop_s.any():
        return kept
    costs, groups = _stage_costs(problem)
    for own in groups:
        for i in own:
            worse = np.all(costs[:, own] >= costs[:, i : i + 1], axis=0) & kept[i]
            worse &= np.any(costs[:, own] > costs[:, i : i + 1], axis=0) | (own > i)[:, None]
            kept[own] &= ~worse
    return kept


def _stage_costs(problem: Problem) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return what stages cost in all respects, infinite where they cannot run, and options on as much."""
    runs = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
    values = [problem.time_s, problem.far_s, *problem.tail_s, -problem.max_in_flight.astype(float)]
    if problem.leave_tail_s is not None:
        values += [tail + problem.leave_tail_s for tail in problem.tail_s]
    if problem.shortest is not None:
        values.append(problem.shortest * np.where(runs, problem.time_s, 0.0))
    costs = np.where(runs, np.array(values), np.inf)
    _, alike = np.unique(
        np.column_stack([problem.takes, problem.micro_batch, problem.grain]), axis=0, return_inverse=True
    )
    groups = [np.flatnonzero(np.ravel(alike) == group) for group in range(int(np.max(alike)) + 1)]
    return costs, groups


def _endings(problem: Problem, is_offered: np.ndarray) -> list[list[_Ending]]:
    """Return by its end what stages there are: the stage, its micro-batch, stages from it on, devices."""
    found: list[list[_Ending]] = [[] for _ in range(problem.num_layers + 1)]
    rooms = _rooms(problem)
    for option, takes in enumerate(problem.takes.tolist()):
        size = int(problem.micro_batch[option])
        for stop in range(1, problem.num_layers + 1):
            for start in range(stop):
                type_ = problem.types[start, stop]
                room = int(rooms[option, type_])
                if room and is_offered[option, type_] and np.isfinite(problem.time_s[option, type_]):
                    found[stop].append(
                        (StageSpan(option=option, start=start, stop=stop), size, room, tuple(takes))
                    )
    return found


def undominated(problem: Problem, templates: list[Template], *, filling: Filling = "full") -> list[Template]:
    """Return the pipelines than which none with the same shares is faster on no more devices."""
    if not templates:
        return []
    takes, rates, tails = pipeline_columns(problem, templates, filling=filling)
    fill_s, slowest_s, micro_batch, grain, _, drained_s, shadowed_s, together, least, *way = rates
    values = np.vstack([takes, fill_s, slowest_s, fill_s - drained_s, slowest_s - shadowed_s, *way, tails]).T
    _, which = np.unique(np.array([micro_batch, grain, together, least]), axis=1, return_inverse=True)
    kept: list[Template] = []
    for size in range(int(which.max()) + 1):
        own = np.flatnonzero(which == size)
        # What others may beat comes last: a sum is no greater than that of what is worse.
        left = own[np.argsort(values[own].sum(1), kind="stable")]
        while len(left):
            kept.append(templates[left[0]])
            left = left[~np.all(values[left] >= values[left[0]], axis=1)]
    return kept


def best_of_all(
    problem: Problem,
    templates: list[Template],
    ranges: list[tuple[int, int]],
    budget: TimeBudget,
    *,
    filling: Filling = "full",
) -> tuple[Arrangement | None, bool]:
    """Return the best arrangement of some pipelines, and whether no mix of them is faster.

    Every number of devices in use at which the spread factor rises is solved apart. When time is up, it is
    the best so far. Both are by the seconds of a step in a `filling`.
    """
    mixes = _Mixes(problem=problem, templates=templates, filling=filling)
    devices = sum(problem.counts)
    factors = [spread_factor(problem, limit) for limit in range(1, devices + 2)]
    limits = [n for n in range(1, devices + 1) if n == devices or factors[n - 1] < factors[n]]
    best: Arrangement | None = None
    best_s = np.inf
    for pipelines in ranges:
        for limit in limits:
            factor = factors[limit - 1]
            high = mixes.longest_s(pipelines[0])
            high = high if best is None else min(high, best_s / factor * (1 - _TIGHT))
            found = mixes.reach(pipelines, limit, high)
            while found is not None:
                seconds = step_seconds(problem, found, filling=filling)
                if seconds < best_s:
                    best, best_s = found, seconds
                if budget.is_over:
                    return best, False
                high = min(high, seconds / factor) * (1 - _TIGHT)
                found = mixes.sooner(pipelines, limit, high)
            if budget.is_over:
                return best, False
    return best, True


@dataclass(slots=True, kw_only=True)
class _Mixes:
    """All whole numbers of some pipelines, by the devices they take.

    demands : ndarray, shape (demands, kinds)
        What pipelines take, each once; `which` is that of every pipeline.
    """

    problem: Problem
    templates: list[Template]
    filling: Filling
    columns: PipelineColumns = field(init=False)
    demands: np.ndarray = field(init=False)
    which: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Look up what pipelines take and how they go."""
        self.columns = pipeline_columns(self.problem, self.templates, filling=self.filling)
        demands, which = np.unique(self.columns.takes.T.astype(int), axis=0, return_inverse=True)
        self.demands, self.which = demands, np.ravel(which)

    def longest_s(self, copies: int) -> float:
        """Return the time of the slowest pipeline that processes the batch alone."""
        rates = (self.columns.rate(i) for i in range(len(self.templates)))
        ends = zip(rates, self.columns.tails(self.problem, copies).tolist(), strict=True)
        return max(rate.seconds(self.problem.global_batch) + tail for rate, tail in ends)

    def sooner(self, pipelines: tuple[int, int], limit: int, high: float) -> Arrangement | None:
        """Return an arrangement near the least time, None when `high` itself is out of reach."""
        found = self.reach(pipelines, limit, high)
        low = 0.0
        for _ in range(_STEPS if found is not None else 0):
            middle = 0.5 * (low + high)
            made = self.reach(pipelines, limit, middle)
            if made is None:
                low = middle
            else:
                found, high = made, middle
        return found

    def reach(self, pipelines: tuple[int, int], limit: int, seconds: float) -> Arrangement | None:
        """Return pipelines on at most `limit` devices that process the batch in so many seconds."""
        problem = self.problem
        columns = self.columns
        samples = columns.whole_samples(seconds - columns.tails(problem, pipelines[0]))
        through = np.zeros(len(self.demands))
        np.maximum.at(through, self.which, samples)
        runs = np.flatnonzero(through > 0)
        demands = self.demands[runs]
        combined = combine(
            np.column_stack([demands, demands.sum(1)]),  # all devices together are a kind of their own
            np.minimum(through[runs], problem.global_batch),
            np.zeros(len(runs)),
            (*problem.counts, limit),
            (pipelines[0], min(pipelines[1], limit, problem.global_batch)),
            keep=1,
        )
        assert combined.proven, "problems that are enumerated have few demands"
        if not combined.sets or combined.samples[0] < problem.global_batch:
            return None
        best = {d: int(np.argmax(np.where(self.which == d, samples, -1.0))) for d in runs.tolist()}
        at = [best[int(runs[row])] for row in combined.sets[0]]
        tails = columns.tails(problem, len(at))[at].tolist()
        shares = balance([columns.rate(i) for i in at], tails, problem.global_batch)
        made = tuple(self.templates[i] for i in at)
        return None if shares is None else Arrangement(templates=made, shares=shares)
