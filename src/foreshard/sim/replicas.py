"""When a program ends that many ranks run at once, each with seconds of its own, and wait for each other.

A program of one rank stands for many: a task is run by every rank, by every set of ranks together, or by all
of them together. A task that ranks run together starts when the last of them can. Only the tasks that are run
alone are repeated, as rows of arrays; nothing is lowered a second time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foreshard.graph.program import Program

EACH, SET, ALL = 0, 1, 2
"""Who runs a task: every rank by itself, the ranks of a set together, all ranks together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicatedProgram:
    """A program, and who runs its tasks."""

    program: Program
    together: np.ndarray  # int, shape (T,); `EACH`, `SET` or `ALL`
    ranks: Mapping[int, tuple[int, int]]  # by group: sets, and ranks of a set

    def shape(self, task: int) -> tuple[int, int]:
        """Return how many times a task is run: in how many sets, and how many times in each."""
        sets, ranks = self.ranks[int(self.program.group[task])]
        together = self.together[task]
        return (1 if together == ALL else sets), (ranks if together == EACH else 1)


def last_end_s(
    replicated: ReplicatedProgram, seconds: Callable[[int], np.ndarray], start_s: np.ndarray, *, steps: int
) -> np.ndarray:
    """Return when the last task ends, shape (steps,).

    Parameters
    ----------
    replicated : ReplicatedProgram
    seconds : callable of task to ndarray, shape broadcasting to (steps, *shape(task))
        Called once for each task, in an order that follows from the program and `start_s` alone.
    start_s : ndarray, shape (T,)
        Starts of the tasks in any run; tasks are visited in about their order, so that few are kept.
    steps : int
        Runs at once.
    """
    program, together = replicated.program, replicated.together
    before = before_of(program)
    left = np.bincount(np.concatenate(before), minlength=program.num_tasks)
    end_s: dict[int, np.ndarray] = {}
    last_s = np.zeros(steps)
    for task in order_of(before, start_s):
        ready_s: np.ndarray | float = 0.0
        for one in before[task].tolist():
            seen = end_s[one]
            is_foreign = program.group[one] != program.group[task]
            if together[task] == ALL or is_foreign:
                seen = seen.max(axis=(1, 2), keepdims=True)
            elif together[task] == SET:
                seen = seen.max(axis=2, keepdims=True)
            ready_s = seen if isinstance(ready_s, float) else np.maximum(ready_s, seen)
            left[one] -= 1
            if left[one] == 0:
                del end_s[one]
        ended = np.broadcast_to(ready_s + seconds(task), (steps, *replicated.shape(task)))
        if left[task] == 0:
            last_s = np.maximum(last_s, ended.max(axis=(1, 2)))
        else:
            end_s[task] = ended
    return last_s


def before_of(program: Program) -> list[np.ndarray]:
    """Return what each task waits for: its dependencies, and the task before it on its resource."""
    previous = np.full(program.num_tasks, -1)
    ordered = program.resource_tasks
    is_next = program.resource[ordered[1:]] == program.resource[ordered[:-1]]
    previous[ordered[1:][is_next]] = ordered[:-1][is_next]
    found = []
    for task in range(program.num_tasks):
        waits = program.indices[program.indptr[task] : program.indptr[task + 1]]
        found.append(np.append(waits, previous[task]) if previous[task] >= 0 else waits)
    return found


def order_of(before: list[np.ndarray], start_s: np.ndarray) -> list[int]:
    """Return the tasks in the order of their starts, each behind all that it waits for."""
    behind: list[list[int]] = [[] for _ in before]
    waits = [len(found) for found in before]
    for task, found in enumerate(before):
        for one in found.tolist():
            behind[one].append(task)
    heap = [(float(start_s[task]), task) for task, count in enumerate(waits) if count == 0]
    heapq.heapify(heap)
    order = []
    while heap:
        _, task = heapq.heappop(heap)
        order.append(task)
        for other in behind[task]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(heap, (float(start_s[other]), other))
    return order
