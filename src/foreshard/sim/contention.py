"""When every task of a program runs where transfers share a network, by the flow simulation.

A task is one or more phases: a fixed time, then bytes over a route. Transfers that share a resource slow down
alike: max-min fair, weighted by their rates alone. A program without bytes runs exactly as `critical_path`
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.simulation import FlowTimes, simulate
from foreshard.compiled import is_worth_compiling
from foreshard.errors import SpecError
from foreshard.graph.program import Program
from foreshard.sim.critical_path import TaskTimes

MIN_COMPILED_TASKS = 20_000
"""Below, plain Python takes less than to compile the loops once on a machine; half a second."""

MAX_PHASES = 2_000_000
"""Phases that one simulation takes on: some seconds and 1 GB."""

MAX_BURSTS = 20_000
"""Phases of another job within a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phases:
    """What the tasks of a program do, phase after phase, in the order of the tasks.

    A phase that is `beside` runs next to the phases that follow it: it starts with the next phase that is
    not, which is over only when both have ended. The last phase of a task is not beside.

    Attributes
    ----------
    task : ndarray of int, shape (P,)
        Ascending; every task has a phase.
    delay_s, num_bytes : ndarray, shape (P,)
        Fixed seconds, then bytes.
    route : ndarray of int, shape (P,)
        Row of the network's routes, -1 for a phase without bytes.
    beside : ndarray of bool, shape (P,)
    computed_s : ndarray, shape (P,)
        Part of the delay in which a rank computes, so that a slow one takes longer; all of it unless given.
    """

    task: np.ndarray
    delay_s: np.ndarray
    num_bytes: np.ndarray
    route: np.ndarray
    beside: np.ndarray
    computed_s: np.ndarray = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        """Take all of the delay for computed where nothing else is stated."""
        if len(self.computed_s) != len(self.delay_s):
            object.__setattr__(self, "computed_s", self.delay_s)

    @classmethod
    def alone(cls, program: Program) -> Phases:
        """Return one phase without bytes for each task: its duration, whatever else runs."""
        count = program.num_tasks
        return cls(
            task=np.arange(count),
            delay_s=program.duration_s,
            num_bytes=np.zeros(count),
            route=np.full(count, -1),
            beside=np.zeros(count, dtype=bool),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What another job does in a phase of its iteration: it computes, then sends bytes over a route."""

    compute_s: float
    num_bytes: float
    route: int  # row of the network's routes, -1 for none
    overlaps: bool = False  # whether the next phase computes while the bytes are on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherJob:
    """A job that repeats its phases from `start_s` on, as long as the program runs."""

    name: str
    phases: tuple[Burst, ...]
    start_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class SharedNetwork:
    """Resources by name, and routes over them: how many bytes each carries for a byte of a transfer.

    Of a capacity others may use a part; what is `left` transfers share. A resource `of_all` ranks is one for
    all of them: a transfer on it stands for theirs. Any other is of the one rank that stands for several.
    Jobs in `others` send over the same resources, in bursts.
    """

    names: list[str] = field(default_factory=list)
    capacity_bytes_per_s: list[float] = field(default_factory=list)
    of_all: list[bool] = field(default_factory=list)
    left_bytes_per_s: list[float] = field(default_factory=list)
    routes: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = field(default_factory=dict)
    others: list[OtherJob] = field(default_factory=list)

    def resource(self, name: str, bytes_per_s: float, left: float = 1.0, *, of_all: bool = False) -> int:
        """Add a resource, of which others leave a part, and return its number."""
        self.names.append(name)
        self.of_all.append(of_all)
        self.capacity_bytes_per_s.append(bytes_per_s)
        self.left_bytes_per_s.append(bytes_per_s * left)
        return len(self.names) - 1

    def route(self, resources: Sequence[int], usage: Sequence[float]) -> int:
        """Return the route over these resources, new or known."""
        return self.routes.setdefault((tuple(resources), tuple(usage)), len(self.routes))

    def alone_bytes_per_s(self) -> np.ndarray:
        """Return the rate of a transfer that has its route to itself, shape (routes,)."""
        capacity = self.capacity_bytes_per_s
        return np.array(
            [
                min(capacity[one] / part for one, part in zip(resources, usage, strict=True))
                for resources, usage in self.routes
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContendedRun:
    """When tasks and phases run."""

    times: TaskTimes
    program: FlowProgram  # without other jobs
    flows: FlowTimes  # of `program`, and of other jobs behind its tasks
    phase: np.ndarray  # int, shape (P,); task of `program` that each phase is
    longer_s: np.ndarray  # shape (P,); what sharing adds to each phase
    # shape (P,); how long the task waits for a phase beside it, after what it runs next to has ended
    waited_s: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowPlaces:
    """Tasks of the flow program: of the phases, before and after those with others beside them."""

    phase: np.ndarray
    before: np.ndarray  # an instant at which phases beside may start
    after: np.ndarray  # an instant for which they must have ended
    host: np.ndarray  # per phase: itself, or the phase that it is beside
    num_tasks: int


def run(
    program: Program, phases: Phases, network: SharedNetwork, *, compiled: bool | None = None
) -> ContendedRun:
    """Return when every task and phase runs.

    Parameters
    ----------
    program : Program
        Order and dependencies; the durations are those of the phases.
    phases : Phases
    network : SharedNetwork
    compiled : bool, optional
        As in `simulate`; unless given, programs of `MIN_COMPILED_TASKS` are.

    Raises
    ------
    SpecError
        If tasks wait for each other in a circle, or other jobs send too often.
    """
    places = places_of(phases)
    if compiled is None:
        compiled = places.num_tasks >= MIN_COMPILED_TASKS and is_worth_compiling(places.num_tasks)
    flow_program = _builder(program, phases, network, places).build()
    flows = simulate(flow_program, compiled=compiled)
    if network.others:
        flows = _beside_others(program, phases, network, places, flows.makespan_s, compiled=compiled)
    first, last = ends_of(program, phases, places)
    start_s, end_s = flows.start_s[places.phase], flows.end_s[places.phase]
    return ContendedRun(
        times=TaskTimes(start_s=flows.start_s[first], end_s=flows.end_s[last]),
        program=flow_program,
        flows=flows,
        phase=places.phase,
        longer_s=np.maximum(end_s - start_s - _alone_s(phases, network), 0.0),
        waited_s=_waited_s(phases, places, flows),
    )


def _alone_s(phases: Phases, network: SharedNetwork) -> np.ndarray:
    """Return what phases take that have the whole capacity to themselves."""
    rate = np.append(network.alone_bytes_per_s(), 1.0)[phases.route]
    return phases.delay_s + np.where(phases.route >= 0, phases.num_bytes / rate, 0.0)


def places_of(phases: Phases) -> FlowPlaces:
    """Return the numbers of the flow program's tasks, in the order in which queues run them."""
    count = len(phases.task)
    index = np.arange(count)
    # The host of a phase beside others is the next that is not.
    host = np.minimum.accumulate(np.where(phases.beside, count, index)[::-1])[::-1]
    has_others = np.zeros(count, dtype=bool)
    has_others[host[phases.beside]] = True
    size = 1 + 2 * has_others
    start = np.cumsum(size) - size
    return FlowPlaces(
        phase=start + has_others,
        before=np.where(has_others, start, -1),
        after=np.where(has_others, start + 2, -1),
        host=host,
        num_tasks=int(size.sum()),
    )


def ends_of(program: Program, phases: Phases, places: FlowPlaces) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last flow task of each task."""
    tasks = np.arange(program.num_tasks)
    first = places.host[np.searchsorted(phases.task, tasks, side="left")]
    last = np.searchsorted(phases.task, tasks, side="right") - 1
    return (
        np.where(places.before[first] >= 0, places.before[first], places.phase[first]),
        np.where(places.after[last] >= 0, places.after[last], places.phase[last]),
    )


def columns_of(
    program: Program, phases: Phases, network: SharedNetwork, places: FlowPlaces
) -> dict[str, np.ndarray]:
    """Return the columns of the flow program's tasks; `queue` is the resource that a task works on."""
    queue = np.full(places.num_tasks, -1)
    on_queue = ~phases.beside
    queue_of = program.resource[phases.task]
    weight = np.append(network.alone_bytes_per_s(), 1.0)[phases.route]  # route -1 is the last
    columns = {
        "delay_s": phases.delay_s,
        "num_bytes": phases.num_bytes,
        "route": phases.route,
        "weight": weight,
    }
    empty = {"delay_s": 0.0, "num_bytes": 0.0, "route": -1, "weight": 1.0}
    filled = {name: np.full(places.num_tasks, value) for name, value in empty.items()}
    for name, column in filled.items():
        column[places.phase] = columns[name]
    for where in (places.phase, places.before, places.after):
        known = on_queue & (where >= 0)
        queue[where[known]] = queue_of[known]
    return {**filled, "queue": queue}


def _beside_others(
    program: Program,
    phases: Phases,
    network: SharedNetwork,
    places: FlowPlaces,
    alone_s: float,
    *,
    compiled: bool,
) -> FlowTimes:
    """Return when tasks run while other jobs repeat their iterations, at least until the last task ends."""
    until_s = alone_s
    while True:
        builder = _builder(program, phases, network, places)
        last = [_add_other(builder, network, job, until_s) for job in network.others]
        flows = simulate(builder.build(), compiled=compiled)
        end_s = float(flows.end_s[: places.num_tasks].max())
        if all(float(flows.end_s[task]) >= end_s for task in last):
            return flows
        until_s = 2.0 * max(until_s, end_s)


def _add_other(builder: FlowProgramBuilder, network: SharedNetwork, job: OtherJob, until_s: float) -> int:
    """Append iterations of another job that take so long where it is alone; return their last task."""
    rates = network.alone_bytes_per_s()
    send_s = [burst.num_bytes / rates[burst.route] if burst.route >= 0 else 0.0 for burst in job.phases]
    # at the least: where every phase computes while the one before sends
    iteration_s = max(sum(burst.compute_s for burst in job.phases), sum(send_s))
    count = 1 + int((until_s - job.start_s) / iteration_s) if until_s > job.start_s else 1
    if count * len(job.phases) > MAX_BURSTS:
        raise SpecError(
            f"{job.name!r} sends {count * len(job.phases):,} times in a step",
            key="--bursts",
            rule=f"Bursts of a job are simulated one by one, at most {MAX_BURSTS:,}",
            fix="Leave out --bursts: so many are as good as even",
        )
    sent: list[int] = []
    computed = builder.compute(0.0, release_s=job.start_s)
    overlaps = True
    for burst in job.phases * count:
        computed = builder.compute(burst.compute_s, after=[computed, *(() if overlaps else sent)])
        if burst.route >= 0:
            rate = float(rates[burst.route])
            sent = [builder.send(burst.route, burst.num_bytes, after=[computed, *sent], weight=rate)]
        overlaps = burst.overlaps
    return builder.compute(0.0, after=[computed, *sent])


def _builder(
    program: Program, phases: Phases, network: SharedNetwork, places: FlowPlaces
) -> FlowProgramBuilder:
    builder = FlowProgramBuilder(np.array(network.left_bytes_per_s))
    for resources, usage in network.routes:
        builder.route(resources, usage)
    builder.new_queue(len(program.resource_names))
    builder.add_many(**columns_of(program, phases, network, places))
    beside = np.flatnonzero(phases.beside)
    builder.depend(places.phase[beside], places.before[places.host[beside]])
    builder.depend(places.after[places.host[beside]], places.phase[beside])
    first, last = ends_of(program, phases, places)
    task, before = np.repeat(np.arange(program.num_tasks), np.diff(program.indptr)), program.indices
    builder.depend(first[task], last[before])
    return builder


def _waited_s(phases: Phases, places: FlowPlaces, flows: FlowTimes) -> np.ndarray:
    """Return the wait of tasks for the phase beside them that ends last, 0 for all other phases."""
    waited = np.zeros(len(phases.task))
    beside = np.flatnonzero(phases.beside)
    if not len(beside):
        return waited
    host = places.host[beside]
    end_s = flows.end_s[places.phase[beside]]
    order = np.lexsort((end_s, host))
    is_last = np.append(host[order][1:] != host[order][:-1], True)
    latest = order[is_last]
    own_s = flows.end_s[places.phase[host[latest]]]
    waited[beside[latest]] = np.maximum(end_s[latest] - own_s, 0.0)
    return waited
