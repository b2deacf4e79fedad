"""When a program ends that many ranks run at once, each on links of its own and with seconds of its own.

`contention` runs the program of one rank that stands for many, `replicas` gives every rank seconds of its own
where transfers take what they take. Here both hold: every rank has a copy of the tasks on copies of its
resources, and transfers of each copy share what is busy at their own time. What ranks run together begins
when the last of them can and ends when its last copy has ended. A resource of all ranks is one: the copies
share it, and each puts an equal part of the bytes on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate
from foreshard.compiled import is_worth_compiling
from foreshard.sim.contention import (
    MIN_COMPILED_TASKS,
    FlowPlaces,
    Phases,
    SharedNetwork,
    columns_of,
    ends_of,
    places_of,
)
from foreshard.sim.replicas import ALL, EACH, SET, ReplicatedProgram, before_of, order_of


def num_copies(replicated: ReplicatedProgram, phases: Phases) -> int:
    """Return how many phases all ranks have together."""
    sets, ranks = _shapes(replicated)
    return int((sets * ranks)[replicated.program.group[phases.task]].sum())


def contended_end_s(
    replicated: ReplicatedProgram,
    phases: Phases,
    network: SharedNetwork,
    added_s: Callable[[int], np.ndarray],
    start_s: np.ndarray,
    *,
    steps: int,
    compiled: bool | None = None,
) -> np.ndarray:
    """Return when the last task ends, shape (steps,).

    Parameters
    ----------
    replicated : ReplicatedProgram
    phases : Phases
        Of the program; `computed_s` says which phases of a task take longer.
    network : SharedNetwork
    added_s : callable of task to ndarray, shape broadcasting to (steps, *shape(task))
        Seconds, perhaps below 0, that a task computes longer than its phases say. Called once for each task,
        in the order of `replicas.last_end_s`.
    start_s : ndarray, shape (T,)
    steps : int
    compiled : bool, optional
        As in `contention.run`.
    """
    copies = _Copies(replicated, phases, network)
    program = copies.program()
    if compiled is None:
        compiled = steps * program.num_tasks >= MIN_COMPILED_TASKS and is_worth_compiling(program.num_tasks)
    delay_s = np.repeat(program.delay_s[None], steps, axis=0)
    for task in order_of(before_of(replicated.program), start_s):
        copies.lengthen(delay_s, task, added_s(task))
    np.maximum(delay_s, 0.0, out=delay_s)
    return np.array(
        [simulate(replace(program, delay_s=row), compiled=compiled).makespan_s for row in delay_s]
    )


def _shapes(replicated: ReplicatedProgram) -> tuple[np.ndarray, np.ndarray]:
    """Return the sets, and the ranks of a set, of each group; groups that nothing belongs to have one."""
    count = int(replicated.program.group.max(initial=0)) + 1
    found = np.ones((2, count), dtype=np.int64)
    for group, shape in replicated.ranks.items():
        found[:, group] = shape
    return found[0], found[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Nodes:
    """Where the copies of a task lie: the first copy of its first and of its last flow task, and instants."""

    first: np.ndarray  # per task; its copies follow
    last: np.ndarray
    begins: np.ndarray  # per task: the first instant that joins those who run it, -1 for none
    ends: np.ndarray
    count: np.ndarray  # per task: instants that join, one for each set or one for all


class _Copies:
    """Copies of a program's flow tasks for every rank, joined where ranks meet."""

    def __init__(self, replicated: ReplicatedProgram, phases: Phases, network: SharedNetwork):
        self.replicated, self.phases, self.network = replicated, phases, network
        self.places: FlowPlaces = places_of(phases)
        sets, ranks = _shapes(replicated)
        group = replicated.program.group
        self.width, self.ranks = ranks[group], (sets * ranks)[group]  # per task
        owner = np.zeros(self.places.num_tasks, dtype=np.int64)
        for where in (self.places.phase, self.places.before, self.places.after):
            owner[where[where >= 0]] = phases.task[where >= 0]
        self.owner, self.of_flow = owner, self.ranks[owner]  # per flow task
        self.base = np.cumsum(self.of_flow) - self.of_flow
        share = phases.computed_s.copy()
        total = np.bincount(phases.task, share, minlength=len(group))
        first = np.searchsorted(phases.task, np.arange(len(group)))
        bare = total <= 0.0  # no phase computes: the first is lengthened
        share[first[bare]], total[bare] = 1.0, 1.0
        self.share, self.first_phase = share / total[phases.task], np.append(first, len(phases.task))

    def lengthen(self, delay_s: np.ndarray, task: int, added_s: np.ndarray) -> None:
        """Add seconds to the copies of a task's phases, row by row of `delay_s`."""
        if not added_s.any():
            return
        count = int(self.ranks[task])
        added = np.broadcast_to(added_s, (len(delay_s), *self.replicated.shape(task)))
        added = added.reshape(len(delay_s), -1)  # what ranks run together is not computed
        for phase in range(self.first_phase[task], self.first_phase[task + 1]):
            at = self.base[self.places.phase[phase]]
            if self.share[phase] > 0.0:
                delay_s[:, at : at + count] += self.share[phase] * added

    def program(self) -> FlowProgram:
        """Return the flow program of all copies."""
        replicated, places = self.replicated, self.places
        capacity, routes, table = self._routes()
        builder = FlowProgramBuilder(capacity)
        for resources, usage in table:
            builder.route(resources, usage)
        columns = columns_of(replicated.program, self.phases, self.network, places)
        flow = np.repeat(np.arange(places.num_tasks), self.of_flow)
        copy = np.arange(len(flow)) - np.repeat(self.base, self.of_flow)
        most = int(self.ranks.max(initial=1))
        builder.new_queue(len(replicated.program.resource_names) * most)
        queue, route = columns.pop("queue")[flow], columns.pop("route")[flow]
        moved = route >= 0
        route[moved] = routes[route[moved]] + copy[moved]
        builder.add_many(
            queue=np.where(queue >= 0, queue * most + copy, -1),
            route=route,
            **{name: column[flow] for name, column in columns.items()},
        )
        self._join_phases(builder)
        self._join_tasks(builder)
        return builder.build()

    def _routes(self) -> tuple[np.ndarray, np.ndarray, list[tuple[list[int], list[float]]]]:
        """Return capacities, the first copy of each route, and the routes of all copies."""
        network, count = self.network, np.zeros(len(self.network.routes), dtype=np.int64)
        uses = self.phases.route >= 0
        np.maximum.at(count, self.phases.route[uses], self.ranks[self.phases.task[uses]])
        of_resource = np.ones(len(network.names), dtype=np.int64)
        for (resources, _), ranks in zip(network.routes, count.tolist(), strict=True):
            for one in resources:
                if not network.of_all[one]:
                    of_resource[one] = max(of_resource[one], ranks)
        base = np.cumsum(of_resource) - of_resource
        table = [
            (
                [int(base[one]) + (0 if network.of_all[one] else copy) for one in resources],
                [
                    part / ranks if network.of_all[one] else part
                    for one, part in zip(resources, usage, strict=True)
                ],
            )
            for (resources, usage), ranks in zip(network.routes, count.tolist(), strict=True)
            for copy in range(ranks)
        ]
        return np.repeat(np.array(network.left_bytes_per_s), of_resource), np.cumsum(count) - count, table

    def _join_phases(self, builder: FlowProgramBuilder) -> None:
        """Let phases beside others begin and end with them, copy by copy."""
        beside = np.flatnonzero(self.phases.beside)
        own, host = self.places.phase[beside], self.places.host[beside]
        self._copy_by_copy(builder, own, self.places.before[host])
        self._copy_by_copy(builder, self.places.after[host], own)

    def _copy_by_copy(self, builder: FlowProgramBuilder, flows: np.ndarray, after: np.ndarray) -> None:
        """Let each copy of `flows` wait for the same copy of the one in `after`."""
        count = self.of_flow[flows]
        copy = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        builder.depend(np.repeat(self.base[flows], count) + copy, np.repeat(self.base[after], count) + copy)

    def _join_tasks(self, builder: FlowProgramBuilder) -> None:
        """Add the dependencies between tasks, and instants where ranks meet."""
        program, together = self.replicated.program, self.replicated.together
        before = before_of(program)
        task = np.repeat(np.arange(program.num_tasks), [len(one) for one in before])
        earlier = np.concatenate(before).astype(np.int64)
        foreign = program.group[task] != program.group[earlier]
        meets = together != EACH
        meets[task[foreign]] = True
        nodes = self._nodes(builder, meets)
        level = np.where(foreign, ALL, together[task])
        for one, other, how in zip(task.tolist(), earlier.tolist(), level.tolist(), strict=True):
            source = self._ends(nodes, other)
            if how == EACH:
                builder.depend(nodes.first[one] + np.arange(self.ranks[one]), self._for_each(other, source))
            elif how == SET:
                sets = int(nodes.count[one])
                waits = self._for_each(other, source)
                builder.depend(nodes.begins[one] + np.arange(len(waits)) // (len(waits) // sets), waits)
            else:
                builder.depend(
                    np.repeat(nodes.begins[one] + np.arange(nodes.count[one]), len(source)),
                    np.tile(source, int(nodes.count[one])),
                )

    def _nodes(self, builder: FlowProgramBuilder, meets: np.ndarray) -> _Nodes:
        """Add the instants at which tasks that ranks run together begin and end."""
        program, together = self.replicated.program, self.replicated.together
        first, last = (self.base[one] for one in ends_of(program, self.phases, self.places))
        count = np.where(together == SET, self.ranks // self.width, 1)
        begins, ends = np.full(program.num_tasks, -1), np.full(program.num_tasks, -1)
        for task in np.flatnonzero(meets).tolist():
            begins[task] = builder.add_many(delay_s=np.zeros(count[task]))
            copies = np.arange(self.ranks[task])
            joined = copies // (self.ranks[task] // count[task])
            builder.depend(first[task] + copies, begins[task] + joined)
            if together[task] != EACH:
                ends[task] = builder.add_many(delay_s=np.zeros(count[task]))
                builder.depend(ends[task] + joined, last[task] + copies)
        return _Nodes(first=first, last=last, begins=begins, ends=ends, count=count)

    def _ends(self, nodes: _Nodes, task: int) -> np.ndarray:
        """Return the flow tasks or instants at which a task has ended: of each rank, each set, or all."""
        if nodes.ends[task] >= 0:
            return nodes.ends[task] + np.arange(nodes.count[task])  # type: ignore[no-any-return]
        return nodes.last[task] + np.arange(self.ranks[task])  # type: ignore[no-any-return]

    def _for_each(self, task: int, ends: np.ndarray) -> np.ndarray:
        """Return which of the ends of a task each rank of its group waits for."""
        return np.repeat(ends, self.ranks[task] // len(ends))
