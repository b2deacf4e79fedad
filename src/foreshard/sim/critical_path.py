"""When every task of a program runs, and which of them make it as long as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foreshard.errors import ExtraMissingError, ForeshardError
from foreshard.graph.program import Program
from foreshard.sim import _kernel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTimes:
    """Times of the tasks of a program.

    Attributes
    ----------
    start_s, end_s : ndarray, shape (T,), float64
    order : ndarray, shape (T,), int32
        The tasks such that each comes after all it waits for.
    """

    start_s: np.ndarray
    end_s: np.ndarray
    order: np.ndarray

    @property
    def makespan_s(self) -> float:
        """End of the last task."""
        return float(self.end_s.max(initial=0.0))


def run(program: Program, *, compiled: bool = False) -> TaskTimes:
    """Return the earliest times at which every task can run.

    A task starts when its resource has finished the task before it and every dependency has ended and its
    lag has passed. One visit of every task and dependency.

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
    inputs = [
        program.duration_s,
        program.resource_indptr,
        program.resource_tasks,
        program.indptr,
        program.indices,
        program.lag_s,
    ]
    start_s, end_s, order = np.zeros(num_tasks), np.full(num_tasks, -1.0), np.zeros(num_tasks, dtype=np.int32)
    head = program.resource_indptr[:-1].copy()
    state = [
        _first_edges(program),
        np.zeros(num_resources),
        np.full(num_tasks, -1, dtype=np.int32),
        np.full(num_resources, -1, dtype=np.int32),
        np.zeros(num_resources, dtype=np.int32),
    ]
    done = _call("execute", inputs, [start_s, end_s, order, head], state, compiled=compiled)
    if done < num_tasks:
        raise ForeshardError(_circle(program, head))
    return TaskTimes(start_s=start_s, end_s=end_s, order=order)


def critical_path(program: Program, timeline: TaskTimes) -> np.ndarray:
    """Return the tasks of one longest chain, first to last.

    Each task starts at the moment the one before it lets it; of several that do, the one before it on the
    same resource is taken, then the dependency named first.
    """
    before_on_resource = _neighbours(program)[0]
    ready_s = timeline.end_s[program.indices]
    if len(program.lag_s):
        ready_s = ready_s + program.lag_s
    path = [int(np.argmax(timeline.end_s))] if program.num_tasks else []
    while path:
        task = path[-1]
        start_s = timeline.start_s[task]
        before = before_on_resource[task]
        if before >= 0 and timeline.end_s[before] == start_s:
            path.append(int(before))
            continue
        edges = np.arange(program.indptr[task], program.indptr[task + 1])
        binding = edges[ready_s[edges] == start_s]
        if len(binding) == 0:
            break
        path.append(int(program.indices[binding[0]]))
    return np.array(path[::-1], dtype=np.int64)


def slack(program: Program, timeline: TaskTimes, *, compiled: bool = False) -> np.ndarray:
    """Return how much later each task could end without a later end of the whole, in seconds.

    Zero exactly on every critical chain.
    """
    inputs = [
        timeline.order,
        _neighbours(program)[1],
        program.indptr,
        program.indices,
        program.lag_s,
        timeline.start_s,
        timeline.end_s,
    ]
    slack_s = timeline.makespan_s - timeline.end_s
    _call("slack_backwards", inputs, [slack_s], [], compiled=compiled)
    return slack_s


def _first_edges(program: Program) -> np.ndarray:
    """First dependency of the first task of every resource."""
    first = np.zeros(len(program.resource_names), dtype=np.int64)
    used = program.resource_indptr[:-1] < program.resource_indptr[1:]
    first[used] = program.indptr[program.resource_tasks[program.resource_indptr[:-1][used]]]
    return first


def _neighbours(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Task before and task after each task on its resource, -1 at the ends."""
    tasks = program.resource_tasks
    before, after = np.full((2, program.num_tasks), -1, dtype=np.int32)
    same = program.resource[tasks[1:]] == program.resource[tasks[:-1]]
    before[tasks[1:][same]] = tasks[:-1][same]
    after[tasks[:-1][same]] = tasks[1:][same]
    return before, after


def _circle(program: Program, head: np.ndarray) -> str:
    stuck = [
        f"{program.resource_names[r]} at task {program.resource_tasks[head[r]]}"
        for r in np.flatnonzero(head < program.resource_indptr[1:])
    ]
    return f"tasks wait for each other in a circle: {', '.join(stuck[:8])}"


def _call(
    name: str, inputs: list[np.ndarray], outputs: list[np.ndarray], state: list[np.ndarray], *, compiled: bool
) -> int:
    """Run a kernel on arrays if compiled, else on lists, which plain Python indexes faster."""
    if compiled:
        return _compiled(name)(*inputs, *outputs, *state)
    lists = [array.tolist() for array in (*inputs, *outputs, *state)]
    result = getattr(_kernel, name)(*lists)
    for array, values in zip(outputs, lists[len(inputs) :], strict=False):
        array[:] = values
    return result


@lru_cache(maxsize=2)
def _compiled(name: str) -> Callable:
    try:
        import numba
    except ImportError as error:
        raise ExtraMissingError(
            "compiled execution needs numba", key="compiled", fix="Install foreshard[fast]"
        ) from error
    return numba.njit(cache=True)(getattr(_kernel, name))
