"""A schedule on a topology: how long it takes, how near that is to a bound, and which resources are busiest.

Every send is a flow. Sends of one channel between the same two places are a queue, and all take the route
that the routing function gives to their channel. Those of one round are one message, whose chunks leave back
to back; a message starts when the one before has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.flow.program import FlowProgramBuilder
from foreshard.comm.flow.simulation import longest_path_s, simulate
from foreshard.comm.flow.symmetry import fold
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError

Routing = Callable[[int, int, int], Sequence[int]]
"""Links, in order, from a source place to a target place for a flow: the channel of the sends."""

NUM_BUSIEST = 10
"""Resources that a result names, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """What a schedule of a given size takes on a topology."""

    seconds: float
    # no order and no sharing of the same sends over the same routes takes less, to rounding: the longest
    # path, or bytes over capacity of the resource where that is largest
    lower_bound_s: float
    longest_path_s: float  # longest chain of sends that wait for each other, each as if alone on its route
    # resources with the highest utilisation, and that utilisation; up to `NUM_BUSIEST`, highest first
    busiest: tuple[tuple[int, float], ...]
    # num_sends, num_simulated: sends of the schedule, and those simulated after folding
    num_sends: int
    num_simulated: int


def run_schedule(
    schedule: Schedule,
    size_bytes: float,
    topology: Topology,
    route: Routing,
    *,
    folded: bool = True,
    compiled: bool | None = None,
) -> ScheduleRun:
    """Return what a schedule takes.

    Parameters
    ----------
    schedule : Schedule
    size_bytes : float
        Size of the collective; a send carries its chunk's part of it.
    topology : Topology
    route : callable
        ``route(source_place, target_place, flow)`` returns the links, with the channel as flow; it is asked
        once for each.
    folded : bool
        Simulate symmetric ranks once; the same result to rounding.
    compiled : bool, optional
        As in `simulate`.

    Raises
    ------
    SpecError
        If sends wait for each other in a circle, or the size is no finite number of at least 0.
    """
    builder = FlowProgramBuilder(topology.capacity_bytes_per_s)
    add_schedule(builder, schedule, size_bytes, topology, route)
    program = builder.build()
    small = fold(program, compiled=compiled) if folded else None
    used = program if small is None else small.program
    seconds = simulate(used, compiled=compiled).makespan_s
    path_s = longest_path_s(program, small, compiled=compiled)
    resource_s = program.resource_s
    top = np.argsort(-resource_s, kind="stable")[:NUM_BUSIEST]
    return ScheduleRun(
        seconds=seconds,
        lower_bound_s=max(float(resource_s.max(initial=0.0)), path_s),
        longest_path_s=path_s,
        busiest=tuple((int(one), float(resource_s[one] / seconds)) for one in top if resource_s[one] > 0.0),
        num_sends=schedule.num_sends,
        num_simulated=used.num_tasks,
    )


def send_times(
    schedule: Schedule, size_bytes: float, topology: Topology, route: Routing
) -> tuple[np.ndarray, np.ndarray]:
    """Return when each send starts and has arrived, in seconds; shape (sends,) each. As `run_schedule`."""
    builder = FlowProgramBuilder(topology.capacity_bytes_per_s)
    first, arrived = add_schedule(builder, schedule, size_bytes, topology, route)
    times, sends = simulate(builder.build()), np.arange(schedule.num_sends)
    return times.start_s[first + sends], times.end_s[arrived + sends]


def add_schedule(
    builder: FlowProgramBuilder,
    schedule: Schedule,
    size_bytes: float,
    topology: Topology,
    route: Routing,
    *,
    priority: int = 0,
) -> tuple[int, int]:
    """Add the sends of a schedule to a program, in order.

    Where a send starts before the one ahead of it has arrived, arrivals are tasks of their own.

    Parameters
    ----------
    builder : FlowProgramBuilder
    schedule, size_bytes, topology, route
        As in `run_schedule`; the builder's resources start with those of the topology.
    priority : int

    Returns
    -------
    int, int
        Numbers of the task that is the first send, and of the one at whose end it has arrived; those of the
        other sends follow them.
    """
    if not 0.0 <= size_bytes < np.inf:
        raise SpecError(
            f"size is {size_bytes:g} bytes", key="size_bytes", value=size_bytes, rule="A size is at least 0"
        )
    ways, queue = schedule.ways()
    links = [tuple(route(*way)) for way in ways]
    rows = np.array([builder.route(topology.resources_of(one)) for one in links], dtype=np.int64)
    latency = topology.latency_s.tolist()
    latency_s = np.array([sum(latency[link] for link in one) for one in links], dtype=np.float64)
    messages = None if schedule.overlaps else _messages(schedule.rounds(), queue)
    has_arrivals = schedule.overlaps or messages is not None
    first = builder.add_many(
        delay_s=0.0 if has_arrivals else latency_s[queue],
        num_bytes=schedule.weight * size_bytes,
        priority=priority,
        route=rows[queue],
        queue=builder.new_queue(len(ways)) + queue,
    )
    arrived = first
    if has_arrivals:  # the latency follows outside the queue
        arrived = builder.add_many(delay_s=latency_s[queue])
        builder.depend(arrived + np.arange(schedule.num_sends), first + np.arange(schedule.num_sends))
    if messages is not None:
        behind, ahead = messages
        builder.depend(first + behind, arrived + ahead)
    count = np.diff(schedule.indptr)
    builder.depend(first + np.repeat(np.arange(schedule.num_sends), count), arrived + schedule.indices)
    return first, arrived


def _messages(rounds: np.ndarray, queue: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first sends of messages behind others, the last sends of those; None for single chunks."""
    num_rounds = int(rounds.max(initial=0)) + 1
    key = queue * num_rounds + rounds
    # counting is faster than sorting
    is_small = (int(queue.max(initial=-1)) + 1) * num_rounds <= 4 * len(key) + 2**20
    chunks = np.bincount(key) if is_small else np.unique(key, return_counts=True)[1]
    if chunks.max(initial=0) <= 1:
        return None
    order = np.argsort(queue, kind="stable")
    is_behind = (np.diff(queue[order]) == 0) & (np.diff(rounds[order]) != 0)
    return order[1:][is_behind], order[:-1][is_behind]
