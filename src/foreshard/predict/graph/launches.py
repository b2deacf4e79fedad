"""The thread of the host that launches kernels, as a stream of a stage beside that of its computation.

A pass computes what has been launched: it starts when the thread gets to it, and ends no sooner than its last
launch. The thread runs ahead of the device, across passes and while the device waits for messages, until the
launches that wait fill the queue of the device.

Source
------
Kernel launches are asynchronous (CUDA C++ Programming Guide, 'Asynchronous Concurrent Execution'). Length of
the queue and seconds of a launch: see `AHEAD_S`.
"""

from __future__ import annotations

import numpy as np

from foreshard.graph.program import Kind, Program, ProgramBuilder
from foreshard.sim.critical_path import TaskTimes

AHEAD_S = 1024 * 5e-6
"""Host seconds of launches that may wait: a queue of 1,024 kernels, at 5 us of the host for each. The length
is what CUDA is known to hold before a launch blocks (not documented); the seconds are of an eager launch."""


def with_launches(
    program: Program, streams: list[tuple[str, np.ndarray, np.ndarray]]
) -> tuple[Program, list[np.ndarray]]:
    """Return the program with a task of the host for each launched task, and these tasks.

    Parameters
    ----------
    program : Program
    streams : list of (name, tasks, seconds)
        Of every stage: the name of its host thread, the tasks that it launches in the order in which they
        run, and its seconds for each.

    Returns
    -------
    Program
        The tasks of `program` keep their numbers.
    list of ndarray of int
        Tasks of the host, one array for each stream.
    """
    builder = ProgramBuilder()
    for name in program.resource_names:
        builder.resource(name)
    builder.add_many(
        program.resource,
        program.duration_s,
        kind=program.kind,
        group=program.group,
        stage=program.stage,
        chunk=program.chunk,
        micro_batch=program.micro_batch,
    )
    waiting, before = np.repeat(np.arange(program.num_tasks), np.diff(program.indptr)), program.indices
    builder.depend(waiting, before)
    launch_of = np.full(program.num_tasks, -1)
    added = []
    for name, tasks, seconds in streams:
        launches = builder.add_many(
            builder.resource(name),
            seconds,
            kind=Kind.HOST,
            group=program.group[tasks],
            stage=program.stage[tasks],
            chunk=program.chunk[tasks],
            micro_batch=program.micro_batch[tasks],
        )
        builder.depend(tasks[1:], launches[:-1])  # the thread gets to a task when it has launched the last
        builder.depend(*_full_queue(tasks, launches, np.asarray(seconds, dtype=np.float64)))
        launch_of[tasks] = launches
        added.append(launches)
    known = launch_of[before] >= 0
    builder.depend(waiting[known], launch_of[before[known]])  # nothing has ended that is not launched
    return builder.build(), added


def _full_queue(
    tasks: np.ndarray, launches: np.ndarray, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which launches wait for which tasks of the device, so that no more than `AHEAD_S` are ahead."""
    until = np.cumsum(seconds)
    start = until - seconds
    # The last task whose launches all lie further back than the queue is long.
    last = np.searchsorted(until, start - AHEAD_S, side="right") - 1
    waits = last >= 0
    return launches[waits], tasks[last[waits]]


def launch_wait_s(program: Program, times: TaskTimes, tasks: np.ndarray, launches: np.ndarray) -> float:
    """Return how long the stream of a stage stands still because the host has not launched what is next.

    Parameters
    ----------
    program : Program
    times : TaskTimes
    tasks : ndarray of int
        Of the stream, in order; the first are those that `launches` belong to, what follows is not launched.
    launches : ndarray of int
    """
    if not len(launches):
        return 0.0
    count = len(launches)
    start_s = np.append(times.start_s[tasks[1 : count + 1]], times.makespan_s)[:count]
    ready_s = times.end_s[tasks[:count]].copy()
    for place, task in enumerate(tasks[1:count].tolist()):
        waits = program.indices[program.indptr[task] : program.indptr[task + 1]]
        others = waits[program.kind[waits] != Kind.HOST]
        ready_s[place] = max(ready_s[place], times.end_s[others].max(initial=0.0))
    launched_s = np.minimum(start_s, times.end_s[launches])
    return float(np.maximum(launched_s - ready_s, 0.0).sum())
