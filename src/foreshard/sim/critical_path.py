"""When every task of a program runs: the longest path through tasks and resources."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshard.compiled import loops
from foreshard.errors import ForeshardError
from foreshard.graph.program import Program

_KERNEL = "foreshard.sim._kernel"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTimes:
    """Start and end of each task of a program, in seconds; shape (T,), float64."""

    start_s: np.ndarray
    end_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        """End of the last task."""
        return float(self.end_s.max(initial=0.0))


def run(program: Program, *, compiled: bool = False) -> TaskTimes:
    """Return the earliest times at which every task can run.

    A task starts when its resource has finished the task before it and every dependency has ended.
    One visit of every task and dependency.

    Parameters
    ----------
    program : Program
    compiled : bool
        Run the same loop compiled by numba; same bits, worth it from some 100,000 tasks.

    Raises
    ------
    ForeshardError
        If tasks wait for each other in a circle.
    ExtraMissingError
        If ``compiled`` and numba is not installed.
    """
    num_tasks, num_resources = program.num_tasks, len(program.resource_names)
    start_s, end_s = np.zeros(num_tasks), np.full(num_tasks, -1.0)
    head = program.resource_indptr[:-1].copy()
    arrays = [
        program.duration_s,
        program.resource_indptr,
        program.resource_tasks,
        program.indptr,
        program.indices,
        start_s,
        end_s,
        head,
        _first_edges(program),
        np.zeros(num_resources),
        np.full(num_tasks, -1, dtype=np.int32),
        np.full(num_resources, -1, dtype=np.int32),
        np.zeros(num_resources, dtype=np.int32),
    ]
    if compiled:
        done = loops(_KERNEL, True).execute(*arrays)
    else:  # plain Python indexes lists faster than arrays
        lists = [array.tolist() for array in arrays]
        done = loops(_KERNEL, False).execute(*lists)
        start_s[:], end_s[:], head[:] = lists[5:8]
    if done < num_tasks:
        raise ForeshardError(_circle(program, head))
    return TaskTimes(start_s=start_s, end_s=end_s)


def _first_edges(program: Program) -> np.ndarray:
    """First dependency of the first task of every resource."""
    first = np.zeros(len(program.resource_names), dtype=np.int64)
    used = program.resource_indptr[:-1] < program.resource_indptr[1:]
    first[used] = program.indptr[program.resource_tasks[program.resource_indptr[:-1][used]]]
    return first


def _circle(program: Program, head: np.ndarray) -> str:
    stuck = [
        f"{program.resource_names[r]} at task {program.resource_tasks[head[r]]}"
        for r in np.flatnonzero(head < program.resource_indptr[1:])
    ]
    return f"tasks wait for each other in a circle: {', '.join(stuck[:8])}"
