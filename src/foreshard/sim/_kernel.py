"""The loop over tasks and dependencies: plain Python that numba can also compile unchanged.

Every argument is a preallocated list or a one-dimensional array; both are only indexed. No expression
here depends on evaluation order of sums, so both ways give the same bits.
"""

from __future__ import annotations

from typing import Any


def execute(
    duration_s: Any,
    resource_indptr: Any,
    resource_tasks: Any,
    indptr: Any,
    indices: Any,
    start_s: Any,
    end_s: Any,
    head: Any,
    cursor: Any,
    free_s: Any,
    waiter: Any,
    next_waiter: Any,
    stack: Any,
) -> Any:
    """Fill start_s and end_s; return how many tasks could run.

    Each resource walks its own list. At an unfinished dependency it goes to sleep on that dependency and is
    woken when it ends, so every task and every dependency is visited once. ``end_s`` and ``waiter`` come in
    as -1, ``head`` as the start of each list, ``cursor`` as the first dependency of each first task.
    """
    done = 0
    for first in range(len(resource_indptr) - 1):
        stack[0] = first
        top = 1
        while top > 0:
            top -= 1
            resource = stack[top]
            position = head[resource]
            last = resource_indptr[resource + 1]
            edge = cursor[resource]
            now_s = free_s[resource]
            while position < last:
                task = resource_tasks[position]
                edges_end = indptr[task + 1]
                while edge < edges_end:
                    before = indices[edge]
                    ready_s = end_s[before]
                    if ready_s < 0.0:
                        next_waiter[resource] = waiter[before]
                        waiter[before] = resource
                        break
                    if ready_s > now_s:
                        now_s = ready_s
                    edge += 1
                if edge < edges_end:
                    break
                start_s[task] = now_s
                now_s += duration_s[task]
                end_s[task] = now_s
                done += 1
                sleeper = waiter[task]
                while sleeper >= 0:
                    stack[top] = sleeper
                    top += 1
                    sleeper = next_waiter[sleeper]
                position += 1
                if position < last:
                    edge = indptr[resource_tasks[position]]
            head[resource] = position
            cursor[resource] = edge
            free_s[resource] = now_s
    return done
