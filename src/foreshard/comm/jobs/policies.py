"""Policies by name: how flows of jobs are treated while a set of jobs runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from foreshard.comm.jobs.demand import Choice, JobDemand
from foreshard.comm.jobs.intensity import chosen_paths, priorities
from foreshard.comm.jobs.rotation import Rotation, components, rotations
from foreshard.comm.jobs.run import FlowSetting, Pace, Ramp, run_jobs
from foreshard.compiled import is_worth_compiling

_MLTCP_SLOPE, _MLTCP_START, _MLTCP_PARTS = 1.75, 0.25, 8
"""Weight of a flow that has sent all and none of its iteration (MLTCP, recalled), and steps between."""
_TRIAL_ITERATIONS = 10
"""Of the slowest job, when a rotation is compared with none in simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that runs when a policy decides."""

    index: int  # of the job in the trace
    demand: JobDemand
    setting: FlowSetting  # as it is now
    ready_s: float  # when its first iteration can start that the decision reaches


Decide = Callable[[Sequence[RunningJob]], Sequence[FlowSetting]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPolicy:
    """A policy of the fabric."""

    about: str  # what it does, in a few words
    # makes a function of the running jobs, called when a job starts or ends, that returns a setting for each
    decide: Callable[[], Decide]
    ramp: Ramp = (1.0,)  # weights of a flow while an iteration's bytes leave it


def _unchanged(running: Sequence[RunningJob]) -> list[FlowSetting]:
    return [job.setting for job in running]


def _by_intensity(running: Sequence[RunningJob], *, paths: bool, classes: bool) -> list[FlowSetting]:
    """Return priorities in the order of intensity, paths chosen in that order, or both."""
    demands = [job.demand for job in running]
    choices: list[Choice] = chosen_paths(demands) if paths else [demand.hashed for demand in demands]
    ranks = priorities(demands, choices) if classes else [0] * len(demands)
    return [FlowSetting(choice=choice, priority=rank) for choice, rank in zip(choices, ranks, strict=True)]


@dataclass(slots=True)
class _Rotations:
    """Rotations of every component, kept while its jobs stay the same."""

    paths: bool
    known: dict[tuple[tuple[int, Choice], ...], tuple[Pace | None, ...]] = field(default_factory=dict)

    def decide(self, running: Sequence[RunningJob]) -> list[FlowSetting]:
        demands = [job.demand for job in running]
        choices = [demand.hashed for demand in demands]
        if self.paths:
            choices = chosen_paths(demands)
        paces: list[Pace | None] = [None] * len(running)
        current = {}
        for group in components(demands, choices):
            members = [running[place] for place in group]
            taken = [choices[place] for place in group]
            key = tuple((job.index, choice) for job, choice in zip(members, taken, strict=True))
            current[key] = self.known[key] if key in self.known else _paces(members, taken)
            for place, pace in zip(group, current[key], strict=True):
                paces[place] = pace
        self.known = current
        return [FlowSetting(choice=choice, pace=pace) for choice, pace in zip(choices, paces, strict=True)]


def _paces(members: Sequence[RunningJob], choices: Sequence[Choice]) -> tuple[Pace | None, ...]:
    """Return the places of a component's jobs; none where no rotation is faster than none in simulation."""
    made = rotations([job.demand for job in members], choices)
    nothing: tuple[Pace | None, ...] = (None,) * len(members)
    trials = [nothing, *(_anchored(members, one) for one in made)]
    if any(job.setting.pace is not None for job in members):
        trials.append(tuple(job.setting.pace for job in members))
    seconds = [_trial(members, choices, paces) for paces in trials]
    return trials[int(np.argmin(seconds))]


def _anchored(members: Sequence[RunningJob], rotation: Rotation) -> tuple[Pace, ...]:
    """Return starts on the circle, turned so that jobs wait least for their first place."""
    ready_s = np.array([job.ready_s for job in members])
    periods_s, shifts_s = np.array(rotation.periods_s), np.array(rotation.shifts_s)
    origins_s = ready_s - shifts_s
    waits = np.mod(origins_s[:, None] + shifts_s - ready_s, periods_s)
    waits[np.isclose(waits, periods_s, rtol=1e-9)] = 0.0  # rounding below a whole turn
    best = int(np.argmin((waits / periods_s).sum(axis=1)))
    return tuple(
        Pace(first_s=first, period_s=period)
        for first, period in zip((ready_s + waits[best]).tolist(), periods_s.tolist(), strict=True)
    )


def _trial(members: Sequence[RunningJob], choices: Sequence[Choice], paces: Sequence[Pace | None]) -> float:
    """Return the mean of iteration over lone iteration of a component's jobs, simulated on their own."""
    alone_s = [job.demand.iteration_s(choice) for job, choice in zip(members, choices, strict=True)]
    span_s, begin_s = max(alone_s) * _TRIAL_ITERATIONS, min(job.ready_s for job in members)
    trial, histories, counts = [], [], []
    for job, choice, seconds, pace in zip(members, choices, alone_s, paces, strict=True):
        counts.append(max(2, int(span_s / seconds)))
        short = replace(job.demand.job, num_iterations=counts[-1], arrival_s=job.ready_s - begin_s)
        trial.append(replace(job.demand, job=short))
        moved = None if pace is None else _moved(pace, job.ready_s, begin_s)
        histories.append([(0, FlowSetting(choice=choice, pace=moved))])
    whole = sum(job.demand.job.num_iterations * len(job.demand.options) for job in members)
    times = run_jobs(trial, histories, compiled=is_worth_compiling(whole))  # loops are loaded already then
    ratios = [
        (made.end_s[-1] - made.ready_s) / count / seconds
        for made, count, seconds in zip(times, counts, alone_s, strict=True)
    ]
    return float(np.mean(ratios))


def _moved(pace: Pace, ready_s: float, begin_s: float) -> Pace:
    """Return a pace as a trial that begins later sees it; a job that is late starts at once."""
    turns = max(0.0, np.floor((ready_s - pace.first_s) / pace.period_s))
    return replace(pace, first_s=max(0.0, pace.first_s + float(turns) * pace.period_s - begin_s))


POLICIES: Mapping[str, FlowPolicy] = {
    "fair-share": FlowPolicy(about="max-min fair, paths by hash", decide=lambda: _unchanged),
    "rotations": FlowPolicy(
        about="CASSINI: shifts on a circle", decide=lambda: _Rotations(paths=False).decide
    ),
    "rotations+paths": FlowPolicy(
        about="the same over the least loaded paths", decide=lambda: _Rotations(paths=True).decide
    ),
    "priorities": FlowPolicy(
        about="Crux: strict, by intensity", decide=lambda: partial(_by_intensity, paths=False, classes=True)
    ),
    "paths": FlowPolicy(
        about="Crux: least loaded paths, fair",
        decide=lambda: partial(_by_intensity, paths=True, classes=False),
    ),
    "priorities+paths": FlowPolicy(
        about="Crux: both", decide=lambda: partial(_by_intensity, paths=True, classes=True)
    ),
    "mltcp": FlowPolicy(
        about="MLTCP: weight grows with bytes sent",
        decide=lambda: _unchanged,
        ramp=tuple(_MLTCP_START + _MLTCP_SLOPE * (i + 0.5) / _MLTCP_PARTS for i in range(_MLTCP_PARTS)),
    ),
}
"""Policies by name; the first is what the others are compared with."""
