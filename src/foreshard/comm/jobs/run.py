"""Jobs as one flow program, and when their iterations end under the settings of a policy.

A setting holds from an iteration on. Settings may change while jobs run: what was decided later changes
nothing before, so that the whole program is simulated again after each change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate
from foreshard.comm.jobs.demand import Choice, JobDemand

Ramp = tuple[float, ...]
"""Weights of the equal parts of what a flow sends in an iteration, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Earliest starts of iterations: `first_s`, then one each `period_s`."""

    first_s: float
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSetting:
    """How a job's flows are treated."""

    choice: Choice  # path of each transfer
    priority: int = 0  # flows of higher priority are served first
    pace: Pace | None = None  # of the iterations from the one on that the setting holds from


History = Sequence[tuple[int, FlowSetting]]
"""Settings of a job, each with the iteration it holds from; the first from 0, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobTimes:
    """When a job ran."""

    ready_s: float  # it had arrived and its ranks were free
    # start_s, end_s: shape (iterations,)
    start_s: np.ndarray
    end_s: np.ndarray

    @property
    def iteration_s(self) -> np.ndarray:
        """Seconds from the end of the iteration before (at first: from `ready_s`) to the end of each."""
        return np.diff(self.end_s, prepend=self.ready_s)


def run_jobs(
    demands: Sequence[JobDemand],
    histories: Sequence[History],
    *,
    ramp: Ramp = (1.0,),
    compiled: bool | None = None,
) -> tuple[JobTimes, ...]:
    """Return when each job's iterations run, all jobs together.

    Parameters
    ----------
    demands, histories, ramp
        As in `program_of_jobs`.
    compiled : bool, optional
        As in `simulate`.
    """
    program, placed = program_of_jobs(demands, histories, ramp=ramp)
    times = simulate(program, compiled=compiled)
    return tuple(
        JobTimes(
            ready_s=max(demand.job.arrival_s, float(times.end_s[where.before].max(initial=0.0))),
            start_s=times.start_s[where.starts],
            end_s=times.end_s[where.ends],
        )
        for demand, where in zip(demands, placed, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobTasks:
    """Tasks of a job in a program: what it waits for, and the first and last of each iteration."""

    before: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def program_of_jobs(
    demands: Sequence[JobDemand], histories: Sequence[History], *, ramp: Ramp = (1.0,)
) -> tuple[FlowProgram, tuple[JobTasks, ...]]:
    """Return all iterations of all jobs as one program, and where each job's are.

    Parameters
    ----------
    demands : sequence of JobDemand
        Jobs in the order in which they get ranks that several of them use.
    histories : sequence of History
    ramp : tuple of float
    """
    builder = FlowProgramBuilder(demands[0].capacity_bytes_per_s)
    last_on: dict[int, int] = {}
    placed = []
    for demand, history in zip(demands, histories, strict=True):
        before = np.array(sorted({last_on[rank] for rank in demand.job.ranks if rank in last_on}), dtype=int)
        starts, ends = _add_job(builder, demand, history, ramp)
        if len(before):
            builder.depend(np.full(len(before), starts[0]), before)
        last_on |= dict.fromkeys(demand.job.ranks, int(ends[-1]))
        placed.append(JobTasks(before=before, starts=starts, ends=ends))
    return builder.build(), tuple(placed)


def _add_job(
    builder: FlowProgramBuilder, demand: JobDemand, history: History, ramp: Ramp
) -> tuple[np.ndarray, np.ndarray]:
    """Add all iterations of a job; return the first and the last task of each."""
    count = demand.job.num_iterations
    starts, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    stops = [first for first, _ in history[1:]] + [count]
    for (first, setting), stop in zip(history, stops, strict=True):
        if stop <= first:
            continue
        rows, edges = _iteration(builder, demand, setting, ramp)
        size, repeats = len(rows), stop - first
        delay_s, num_bytes, weight, route = (np.tile(column, repeats) for column in zip(*rows, strict=True))
        release = np.zeros((repeats, size))
        if setting.pace is not None:
            release[:, 0] = setting.pace.first_s + setting.pace.period_s * np.arange(repeats)
        release[:, 0] = np.maximum(release[:, 0], demand.job.arrival_s)
        begin = builder.add_many(
            delay_s=delay_s,
            num_bytes=num_bytes,
            weight=weight,
            priority=setting.priority,
            release_s=release.ravel(),
            route=route,
        )
        offset = begin + size * np.arange(repeats)
        waits = np.array(edges, dtype=np.int64).reshape(-1, 2)
        builder.depend((offset[:, None] + waits[:, 0]).ravel(), (offset[:, None] + waits[:, 1]).ravel())
        starts[first:stop], ends[first:stop] = offset, offset + size - 1
    if count > 1:
        builder.depend(starts[1:], ends[:-1])
    return starts, ends


def _iteration(
    builder: FlowProgramBuilder, demand: JobDemand, setting: FlowSetting, ramp: Ramp
) -> tuple[list[tuple[float, float, float, int]], list[tuple[int, int]]]:
    """Return the tasks of one iteration, the first its start, the last its end, and which waits for which.

    A task is its delay, bytes, weight and route.
    """
    rows: list[tuple[float, float, float, int]] = []
    edges: list[tuple[int, int]] = []

    def add(
        after: Sequence[int],
        delay_s: float = 0.0,
        num_bytes: float = 0.0,
        weight: float = 1.0,
        route: int = -1,
    ) -> int:
        edges.extend((len(rows), before) for before in after)
        rows.append((delay_s, num_bytes, weight, route))
        return len(rows) - 1

    computed = sent = add(())
    done_bytes: dict[tuple[int, int, int], float] = {}
    whole_bytes = _pair_bytes(demand)
    paths = iter(zip(demand.paths(setting.choice), demand.num_bytes.tolist(), strict=True))
    for phase in demand.job.phases:
        computed = add((computed,), phase.compute_s)
        if not phase.transfers:
            continue
        lasts = []
        for transfer in phase.transfers:
            path, size = next(paths)
            pair = (transfer.source, transfer.target, transfer.flow)
            begun = done_bytes.get(pair, 0.0)
            done_bytes[pair] = begun + size
            route = builder.route(path.resources)
            after, delay_s = [computed, sent], path.latency_s
            for part, weight in _parts(begun, size, whole_bytes[pair], ramp):
                after, delay_s = [add(after, delay_s, part, weight, route)], 0.0
            lasts += after
        sent = add(lasts)
        if not phase.overlaps:
            computed = sent
    add((computed, sent))
    return rows, edges


def _pair_bytes(demand: JobDemand) -> dict[tuple[int, int, int], float]:
    """Return what each flow sends in an iteration, over all phases."""
    found: dict[tuple[int, int, int], float] = {}
    for phase in demand.job.phases:
        for one in phase.transfers:
            pair = (one.source, one.target, one.flow)
            found[pair] = found.get(pair, 0.0) + one.num_bytes
    return found


def _parts(begun: float, size: float, whole: float, ramp: Ramp) -> list[tuple[float, float]]:
    """Return bytes and weight of the parts of a transfer that begins after `begun` bytes of `whole`."""
    if len(ramp) == 1:
        return [(size, ramp[0])]
    edges = whole * np.arange(1, len(ramp)) / len(ramp)
    inside = edges[(edges > begun) & (edges < begun + size)]
    cuts = np.concatenate([[begun], inside, [begun + size]])
    middle = (cuts[1:] + cuts[:-1]) / 2.0
    step = np.minimum((middle / whole * len(ramp)).astype(int), len(ramp) - 1)
    return [(float(part), ramp[i]) for part, i in zip(np.diff(cuts), step, strict=True) if part > 0.0]
