"""Policies on one trace of jobs, side by side, with the bound that contention sets to none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.jobs.demand import JobDemand
from foreshard.comm.jobs.policies import POLICIES, RunningJob
from foreshard.comm.jobs.run import FlowSetting, JobTimes, run_jobs

SAME_TIME = 1e-9
"""Relative; starts and ends nearer than this are one moment."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyOutcome:
    """What jobs took under a policy, or at least take without contention."""

    # mean_iteration_s, p99_iteration_s: over all iterations of all jobs
    mean_iteration_s: float
    p99_iteration_s: float
    # mean_slowdown, p99_slowdown: of iterations over the bound of their job: mean of the means of jobs, 99 %
    # of all iterations
    mean_slowdown: float
    p99_slowdown: float
    makespan_s: float  # end of the last job
    mean_completion_s: float  # from arrival to end, over jobs
    job_iteration_s: np.ndarray  # shape (jobs,); mean iteration of each job
    job_end_s: np.ndarray  # shape (jobs,)


def simulated(demands: Sequence[JobDemand], policy: str) -> tuple[JobTimes, ...]:
    """Return when iterations run under a policy, which decides anew whenever a job starts or ends.

    A decision holds from each job's next iteration on.
    """
    rule = POLICIES[policy]
    decide = rule.decide()
    histories = [[(0, FlowSetting(choice=demand.hashed))] for demand in demands]
    decided_s = -1.0
    while True:
        times = run_jobs(demands, histories, ramp=rule.ramp)
        moments = sorted({one.ready_s for one in times} | {float(one.end_s[-1]) for one in times})
        for now_s in moments:
            if now_s <= decided_s * (1.0 + SAME_TIME):
                continue
            decided_s = now_s
            running, firsts = _running(demands, histories, times, now_s)
            settings = decide(running)
            if any(job.setting != setting for job, setting in zip(running, settings, strict=True)):
                _apply(histories, running, firsts, settings)
                break
        else:
            return times


def _running(
    demands: Sequence[JobDemand],
    histories: Sequence[list[tuple[int, FlowSetting]]],
    times: Sequence[JobTimes],
    now_s: float,
) -> tuple[list[RunningJob], list[int]]:
    """Return the jobs that run, and the first iteration of each that starts now or later."""
    running, firsts = [], []
    edge_s = now_s * (1.0 - SAME_TIME)
    for index, (demand, made) in enumerate(zip(demands, times, strict=True)):
        if made.ready_s > now_s * (1.0 + SAME_TIME) or made.end_s[-1] <= now_s * (1.0 + SAME_TIME):
            continue
        first = int(np.searchsorted(made.start_s, edge_s))
        if first == len(made.start_s):
            ready_s = float(made.end_s[-1])
        else:
            ready_s = max(now_s, float(made.end_s[first - 1]) if first else made.ready_s)
        setting = histories[index][-1][1]
        running.append(RunningJob(index=index, demand=demand, setting=setting, ready_s=ready_s))
        firsts.append(first)
    return running, firsts


def _apply(
    histories: Sequence[list[tuple[int, FlowSetting]]],
    running: Sequence[RunningJob],
    firsts: Sequence[int],
    settings: Sequence[FlowSetting],
) -> None:
    """Let new settings hold from the first iteration that they reach."""
    for job, first, setting in zip(running, firsts, settings, strict=True):
        if job.setting == setting or first >= job.demand.job.num_iterations:
            continue
        kept = [(start, old) for start, old in histories[job.index] if start < first]
        histories[job.index][:] = [*kept, (first, setting)]


def compared(demands: Sequence[JobDemand], policies: Sequence[str]) -> dict[str, PolicyOutcome]:
    """Return the outcome under each policy, by name, and that of the bound, named 'bound'."""
    bounds_s = np.array([demand.bound_s() for demand in demands])
    found = {name: _outcome(demands, simulated(demands, name), bounds_s) for name in policies}
    return found | {"bound": _outcome(demands, _bound_times(demands, bounds_s), bounds_s)}


def _bound_times(demands: Sequence[JobDemand], bounds_s: np.ndarray) -> tuple[JobTimes, ...]:
    """Return times no policy beats: every iteration takes its bound, and ranks are waited for."""
    free_s: dict[int, float] = {}
    found = []
    for demand, bound_s in zip(demands, bounds_s.tolist(), strict=True):
        job = demand.job
        ready_s = max([job.arrival_s, *(free_s.get(rank, 0.0) for rank in job.ranks)])
        end_s = ready_s + bound_s * np.arange(1, job.num_iterations + 1)
        free_s |= dict.fromkeys(job.ranks, float(end_s[-1]))
        found.append(JobTimes(ready_s=ready_s, start_s=end_s - bound_s, end_s=end_s))
    return tuple(found)


def _outcome(demands: Sequence[JobDemand], times: Sequence[JobTimes], bounds_s: np.ndarray) -> PolicyOutcome:
    per_job = [made.iteration_s for made in times]
    every = np.concatenate(per_job)
    ratios = np.concatenate([own / bound for own, bound in zip(per_job, bounds_s, strict=True)])
    means = np.array([own.mean() for own in per_job])
    ends = np.array([made.end_s[-1] for made in times])
    arrivals = np.array([demand.job.arrival_s for demand in demands])
    return PolicyOutcome(
        mean_iteration_s=float(every.mean()),
        p99_iteration_s=float(np.percentile(every, 99)),
        mean_slowdown=float((means / bounds_s).mean()),
        p99_slowdown=float(np.percentile(ratios, 99)),
        makespan_s=float(ends.max()),
        mean_completion_s=float((ends - arrivals).mean()),
        job_iteration_s=means,
        job_end_s=ends,
    )
