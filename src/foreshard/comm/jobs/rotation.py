"""Time shifts of periodic jobs on one circle, so that they send at different times (CASSINI).

A circle is a time in which every job of a component repeats a whole number of iterations. Jobs that load a
common link beyond its capacity belong to one component of the affinity graph. Each job is shifted on the
circle by a part of its period, in steps, so that the demand above the capacities of links is least.

Source: Rajasekaran et al., CASSINI (NSDI 2024), from its abstract and summaries: the unified circle, the
affinity graph, the score. Paced periods are our own way to let jobs of unequal periods share a circle: the
circle is some longer than needed, and jobs wait for their place on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreshard.comm.jobs.demand import Choice, JobDemand, phase_spans_s

NUM_STEPS = 72
"""Steps of a circle: 5 degrees, as CASSINI takes them (recalled)."""
MAX_REPEATS = 4
"""Iterations of the slowest job on a circle; more would be finer than the steps."""
_STRETCHES = (1.01, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0)
"""Lengths of a circle over the least; slack lets a job that was late catch up with its place."""
_ROUGH = 2
"""Steps that are one step while lengths of the circle are compared."""
_KEPT = 3
"""Rotations that are returned, to be tried."""
_SWEEPS = 8
"""Rounds of moves; more than three were never needed by random circles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircleJob:
    """A job on a circle."""

    repeats: int  # iterations on the circle
    # shape (resources, steps); mean part of each resource's capacity that it asks for, unshifted
    demand: np.ndarray

    @property
    def num_shifts(self) -> int:
        """Shifts that differ, in steps."""
        return -(-self.demand.shape[1] // self.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Places of jobs on a circle."""

    periods_s: tuple[float, ...]
    shifts_s: tuple[float, ...]
    excess: float  # mean over the circle of the demand above capacity, summed over resources


def profile(demand: JobDemand, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    """Return when a lone iteration sends: spans, shape (phases, 2), and parts of capacities in each."""
    loads = demand.phase_loads(choice) / demand.capacity_bytes_per_s
    seconds = demand.phase_times_s(choice)
    spans, _ = phase_spans_s(demand.job.phases, seconds)
    rates = np.divide(loads, seconds[:, None], out=np.zeros_like(loads), where=seconds[:, None] > 0.0)
    return spans, rates


def components(demands: Sequence[JobDemand], choices: Sequence[Choice]) -> list[list[int]]:
    """Return the connected jobs of the affinity graph, those that share no contended link left out."""
    peaks = np.array(
        [profile(demand, choice)[1].max(axis=0) for demand, choice in zip(demands, choices, strict=True)]
    )
    first = list(range(len(demands)))
    contended = np.flatnonzero((peaks.sum(axis=0) > 1.0 + 1e-9) & ((peaks > 0.0).sum(axis=0) > 1))
    for resource in contended.tolist():
        members = np.flatnonzero(peaks[:, resource] > 0.0).tolist()
        for one, other in pairwise(members):
            old, new = first[other], first[one]
            first = [new if root == old else root for root in first]
    groups = [[job for job, root in enumerate(first) if root == kept] for kept in dict.fromkeys(first)]
    return [group for group in groups if len(group) > 1]


def on_circle(
    spans: np.ndarray, rates: np.ndarray, *, repeats: int, length_s: float, num_steps: int = NUM_STEPS
) -> CircleJob:
    """Return an iteration's profile repeated on a circle, as means over its steps."""
    edges = np.linspace(0.0, length_s, num_steps + 1)
    demand = np.zeros((rates.shape[1], num_steps))
    for repeat in range(repeats):
        begin_s = repeat * length_s / repeats
        for (start_s, end_s), rate in zip(spans, rates, strict=True):
            for turn_s in (0.0, -length_s):  # what passes the end of the circle goes on at its start
                low = np.maximum(edges[:-1], begin_s + start_s + turn_s)
                high = np.minimum(edges[1:], begin_s + end_s + turn_s)
                part = np.maximum(high - low, 0.0) * (num_steps / length_s)
                demand += rate[:, None] * part
    return CircleJob(repeats=repeats, demand=demand)


def excess(jobs: Sequence[CircleJob], shifts: Sequence[int]) -> float:
    """Return the mean demand above capacity over the circle, summed over resources."""
    total = sum(np.roll(job.demand, shift, axis=1) for job, shift in zip(jobs, shifts, strict=True))
    return float(np.maximum(np.asarray(total) - 1.0, 0.0).mean(axis=1).sum())


def best_shifts(jobs: Sequence[CircleJob], *, in_pairs: bool = True) -> tuple[int, ...]:
    """Return shifts in steps of little excess; the first job stays.

    Jobs are placed one by one, the busiest first, then moved one at a time and, `in_pairs`, two at a time
    while that helps. For three jobs and fewer the moves of two try all there is.
    """
    order = sorted(range(1, len(jobs)), key=lambda job: -float(jobs[job].demand.sum()))
    shifts, total = [0] * len(jobs), jobs[0].demand.copy()
    for job in order:
        shifts[job] = int(np.argmin(_excesses(total, jobs[job])))
        total += np.roll(jobs[job].demand, shifts[job], axis=1)
    for _ in range(_SWEEPS):
        if not _move_one(jobs, shifts, order) and not (in_pairs and _move_two(jobs, shifts, order)):
            break
    return tuple(shifts)


def _rolled(job: CircleJob) -> np.ndarray:
    """Return the demand under each shift, shape (shifts, resources, steps); a view of the demand twice."""
    steps = job.demand.shape[1]
    twice = np.concatenate([job.demand, job.demand], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(twice, steps, axis=1)
    return windows[:, steps : steps - job.num_shifts : -1].transpose(1, 0, 2)


def _excesses(others: np.ndarray, job: CircleJob) -> np.ndarray:
    """Return the excess under each shift of a job beside others, shape (shifts,)."""
    over = _rolled(job) + (others - 1.0)
    np.maximum(over, 0.0, out=over)
    found: np.ndarray = over.sum(axis=(1, 2)) / job.demand.shape[1]
    return found


def _rest(jobs: Sequence[CircleJob], shifts: Sequence[int], without: set[int]) -> np.ndarray:
    """Return the demand of all jobs but some."""
    found = np.zeros_like(jobs[0].demand)
    for i, (job, shift) in enumerate(zip(jobs, shifts, strict=True)):
        if i not in without:
            found += np.roll(job.demand, shift, axis=1)
    return found


def _move_one(jobs: Sequence[CircleJob], shifts: list[int], movable: Sequence[int]) -> bool:
    """Move each job to its best place; return whether any move helped."""
    helped = False
    for job in movable:
        found = _excesses(_rest(jobs, shifts, {job}), jobs[job])
        best = int(np.argmin(found))
        if found[best] < found[shifts[job]] - 1e-12:
            shifts[job], helped = best, True
    return helped


def _move_two(jobs: Sequence[CircleJob], shifts: list[int], movable: Sequence[int]) -> bool:
    """Move two jobs together, all pairs of places; return whether any move helped."""
    for i, one in enumerate(movable):
        for other in movable[i + 1 :]:
            rest = _rest(jobs, shifts, {one, other})
            now = excess(jobs, shifts)
            if now <= 1e-12:
                return False
            rows = [
                _excesses(rest + np.roll(jobs[one].demand, shift, axis=1), jobs[other])
                for shift in range(jobs[one].num_shifts)
            ]
            table = np.array(rows)
            best = np.unravel_index(int(np.argmin(table)), table.shape)
            if table[best] < now - 1e-12:
                shifts[one], shifts[other] = int(best[0]), int(best[1])
                return True
    return False


def rotations(demands: Sequence[JobDemand], choices: Sequence[Choice]) -> list[Rotation]:
    """Return the most promising rotations of the jobs of a component, over lengths of the circle.

    Those of the least mean of period over lone iteration, times one plus the excess, come first.
    """
    profiles = [profile(demand, choice) for demand, choice in zip(demands, choices, strict=True)]
    peaks = np.array([rates.max(axis=0) for _, rates in profiles])
    contended = np.flatnonzero(peaks.sum(axis=0) > 1.0 + 1e-9)
    circles = _Circles(
        alone_s=np.array(
            [demand.iteration_s(choice) for demand, choice in zip(demands, choices, strict=True)]
        ),
        profiles=[(spans, rates[:, contended]) for spans, rates in profiles],
    )
    # by periods in 1/1000 of lone iterations, the most promising circle: its promise and its length
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    for mean, length_s, repeats in circles.by_mean():
        worst = sorted(promise for promise, _ in found.values())[_KEPT - 1 : _KEPT]
        if worst and mean >= worst[0]:
            break  # no promise is below the mean
        tried = [(repeats, circles.promise(length_s, repeats))]
        if length_s <= circles.alone_s.max() * MAX_REPEATS * _STRETCHES[0] * (1.0 + 1e-9):
            tried += circles.slowed(length_s, *tried[0])
        for fewer, promise in tried:
            key = (round(1e3 * circles.mean(length_s, fewer)), *fewer.tolist())
            if key not in found or promise < found[key][0]:
                found[key] = (promise, length_s)
    best = sorted(found.items(), key=lambda item: item[1])[:_KEPT]
    return [
        circles.rotation(length_s, np.array(key[1:]), NUM_STEPS, in_pairs=True) for key, (_, length_s) in best
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Circles:
    """Circles for some jobs: a length in seconds, and how often each job iterates on it."""

    alone_s: np.ndarray  # shape (jobs,); a lone iteration
    profiles: Sequence[tuple[np.ndarray, np.ndarray]]  # of each job, on the resources that are contended

    def mean(self, length_s: float, repeats: np.ndarray) -> float:
        """Return the mean of period over lone iteration."""
        return float((length_s / repeats / self.alone_s).mean())

    def by_mean(self) -> list[tuple[float, float, np.ndarray]]:
        """Return circles as (mean of period over lone iteration, length, repeats), the least mean first."""
        found = []
        for turns in range(1, MAX_REPEATS + 1):
            for more in _STRETCHES:
                length_s = float(self.alone_s.max()) * turns * more
                most = np.floor(length_s / (self.alone_s * _STRETCHES[0]) + 1e-9)
                repeats = np.maximum(most, 1).astype(int)
                found.append((self.mean(length_s, repeats), length_s, repeats))
        return sorted(found, key=lambda circle: circle[:2])

    def promise(self, length_s: float, repeats: np.ndarray) -> float:
        """Return the mean of period over lone iteration, times one plus the excess after moves of one job."""
        rough = self.rotation(length_s, repeats, max(1, NUM_STEPS // _ROUGH), in_pairs=False)
        return self.mean(length_s, repeats) * (1.0 + rough.excess)

    def slowed(self, length_s: float, repeats: np.ndarray, promise: float) -> list[tuple[np.ndarray, float]]:
        """Return circles on which single jobs iterate less often, each better than the one before.

        Where jobs that contend pair by pair form a cycle, not all fit: one that waits is better than all.
        """
        found: list[tuple[np.ndarray, float]] = []
        while promise > self.mean(length_s, repeats) + 1e-9:
            trials = []
            for job in np.flatnonzero(repeats > 1).tolist():
                fewer = repeats.copy()
                fewer[job] -= 1
                if self.mean(length_s, fewer) < promise:
                    trials.append((self.promise(length_s, fewer), job, fewer))
            if not trials:
                break
            best, _, fewer = min(trials, key=lambda trial: trial[:2])
            if best >= promise - 1e-9:
                break
            promise, repeats = best, fewer
            found.append((fewer, best))
        return found

    def rotation(self, length_s: float, repeats: np.ndarray, num_steps: int, *, in_pairs: bool) -> Rotation:
        """Return the best places on a circle of one length."""
        jobs = [
            on_circle(spans, rates, repeats=number, length_s=length_s, num_steps=num_steps)
            for (spans, rates), number in zip(self.profiles, repeats.tolist(), strict=True)
        ]
        shifts = best_shifts(jobs, in_pairs=in_pairs)
        return Rotation(
            periods_s=tuple((length_s / repeats).tolist()),
            shifts_s=tuple(shift * length_s / num_steps for shift in shifts),
            excess=excess(jobs, shifts),
        )
