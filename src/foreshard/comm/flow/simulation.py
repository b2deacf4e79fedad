"""When every task of a flow program starts and ends: a simulation from event to event.

Between two events every flow has a constant rate, the weighted max-min fair one. At an event only the flows
that are connected, through shared resources, with one that starts or ends get new rates. These come by
progressive filling: all rates rise together, by their weights; where a resource is full, its flows
keep theirs and the others rise on. Flows of a higher priority are filled first, the rest share what is left.

Source: Bertsekas and Gallager, Data Networks (1992), 6.5.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.comm.flow._kernel import Routes, Shares, Slots, Tasks
from foreshard.comm.flow.program import FlowProgram
from foreshard.comm.flow.symmetry import Fold
from foreshard.compiled import is_worth_compiling, loops
from foreshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowTimes:
    """Start and end of each task in seconds, shape (T,).

    A flow starts when it waits for nothing more: its latency passes first, then its bytes.
    """

    start_s: np.ndarray
    end_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        """End of the last task."""
        return float(self.end_s.max(initial=0.0))


def simulate(program: FlowProgram, *, compiled: bool | None = None) -> FlowTimes:
    """Return when each task starts and ends.

    Parameters
    ----------
    program : FlowProgram
    compiled : bool, optional
        Run the loop compiled by numba, with the same result to rounding. Unless given, a program of some
        hundred tasks is run compiled where numba is installed.

    Raises
    ------
    SpecError
        If tasks wait for each other in a circle.
    ExtraMissingError
        If `compiled` and numba is not installed.
    """
    if compiled is None:
        compiled = is_worth_compiling(program.num_tasks)
    kernel = loops("foreshard.comm.flow._kernel", compiled)
    start_s, end_s = np.zeros(program.num_tasks), np.full(program.num_tasks, -1.0)
    tasks, waits = _kernel_tasks(program, kernel)
    routes = Routes(
        program.capacity_bytes_per_s,
        program.route_indptr,
        program.route_resources,
        program.route_usage,
        program.rate_alone_bytes_per_s,
    )
    # bits that number the resources of the longest route
    shift = int(np.diff(program.route_indptr).max(initial=1) - 1).bit_length()
    slots = _empty_slots(program.num_slots)
    shares = _empty_shares(program.num_resources, program.num_slots, shift)
    done = kernel.execute(routes, tasks, slots, shares, shift, waits, start_s, end_s)
    if done < program.num_tasks:
        raise _circle(np.flatnonzero(end_s < 0.0))
    return FlowTimes(start_s=start_s, end_s=end_s)


def _kernel_tasks(program: FlowProgram, kernel: Any) -> tuple[Tasks, np.ndarray]:
    """Return the columns that the loops read, and how many tasks each task waits for."""
    num_tasks = program.num_tasks
    waits = np.diff(program.indptr)
    after_indptr = np.zeros(num_tasks + 1, dtype=np.int64)
    after = np.empty(len(program.indices), dtype=np.int64)
    fill = np.zeros(num_tasks, dtype=np.int64)
    kernel.transpose(program.indptr, program.indices, after_indptr, after, fill)
    next_task, last = np.full(num_tasks, -1), np.full(program.num_slots, -1)
    kernel.chain(program.slot, last, next_task, waits)
    columns = (program.num_bytes, program.weight, program.priority, program.release_s, program.route)
    links = (program.slot, next_task, after_indptr, after)
    return Tasks(program.delay_s, *columns, *links), waits


def longest_path_s(program: FlowProgram, small: Fold | None = None, *, compiled: bool | None = None) -> float:
    """Return the makespan if every flow had its route to itself: sharing never makes it shorter.

    Parameters
    ----------
    program : FlowProgram
        Without circles.
    small : Fold, optional
        Its symmetric form, which gives the same sooner.
    compiled : bool, optional
        As in `simulate`.
    """
    alone_s = program.alone_s
    if small is not None:
        program, alone_s = small.program, alone_s[small.kept]
    if compiled is None:
        compiled = is_worth_compiling(program.num_tasks)
    kernel = loops("foreshard.comm.flow._kernel", compiled)
    tasks, waits = _kernel_tasks(program, kernel)
    stack = np.empty(program.num_tasks, dtype=np.int64)
    return float(kernel.longest_path(tasks, waits, alone_s, program.release_s.copy(), stack))


def _empty_slots(num_slots: int) -> Slots:
    """Return slots that run nothing."""
    return Slots(
        task=np.full(num_slots, -1),
        phase=np.zeros(num_slots, dtype=np.int64),
        route=np.zeros(num_slots, dtype=np.int64),
        weight=np.ones(num_slots),
        priority=np.zeros(num_slots, dtype=np.int64),
        rate=np.zeros(num_slots),
        new_rate=np.zeros(num_slots),
        left_bytes=np.zeros(num_slots),
        since_s=np.zeros(num_slots),
        mark=np.zeros(num_slots, dtype=np.int64),
        seen=np.zeros(num_slots, dtype=np.int64),
        event_s=np.zeros(num_slots),
        heap=np.zeros(num_slots, dtype=np.int64),
        place=np.full(num_slots, -1),
    )


def _empty_shares(num_resources: int, num_slots: int, shift: int) -> Shares:
    """Return resources without flows; no route has more than ``2**shift`` resources."""
    return Shares(
        head=np.full(num_resources, -1),
        next=np.full(num_slots << shift, -1),
        before=np.full(num_slots << shift, -1),
        left=np.zeros(num_resources),
        load=np.zeros(num_resources),
        num_filling=np.zeros(num_resources, dtype=np.int64),
        level=np.zeros(num_resources),
        heap=np.zeros(num_resources, dtype=np.int64),
        place=np.full(num_resources, -1),
        seen=np.zeros(num_resources, dtype=np.int64),
        resources=np.zeros(num_resources, dtype=np.int64),
        flows=np.zeros(num_slots, dtype=np.int64),
        seeds=np.zeros(num_resources, dtype=np.int64),
    )


def _circle(stuck: np.ndarray) -> SpecError:
    named = ", ".join(str(task) for task in stuck[:8])
    return SpecError(
        f"tasks {named}{' and others' if len(stuck) > 8 else ''} never start",
        key="indices",
        value=int(stuck[0]),
        rule="Tasks do not wait for each other in a circle, through dependencies and the order of queues",
    )
