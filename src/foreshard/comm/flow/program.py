"""A flow program: tasks that take a fixed time, move bytes over shared resources, or both, in columns.

A compute task has a duration and no bytes. A flow has a latency, then bytes. Both wait for other tasks, and
both may stand in a queue, which runs its tasks one at a time in the order of their numbers: a device's
stream, or a channel between two places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from foreshard.errors import SpecError

COLUMNS = {
    "delay_s": np.float64,
    "num_bytes": np.float64,
    "weight": np.float64,
    "priority": np.int64,
    "release_s": np.float64,
    "route": np.int64,
    "queue": np.int64,
}
"""Columns of the tasks and their types."""
TABLES = {
    "capacity_bytes_per_s": np.float64,
    "indptr": np.int64,
    "indices": np.int64,
    "route_indptr": np.int64,
    "route_resources": np.int64,
    "route_usage": np.float64,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowProgram:
    """Tasks 0..T-1 on resources 0..R-1, over a table of routes.

    Task t starts when every task of ``indices[indptr[t]:indptr[t + 1]]`` and the task before it in its queue
    have ended, not before `release_s`. It takes `delay_s`; then its bytes flow at the rate that the resources
    of its route allow, and it ends when the last byte has passed: alone, delay + bytes / capacity.

    Attributes
    ----------
    capacity_bytes_per_s : ndarray, shape (R,)
    delay_s : ndarray, shape (T,)
        Duration of a compute task, latency of a flow.
    num_bytes : ndarray, shape (T,)
    weight : ndarray, shape (T,)
        Where flows of one priority share a resource, their rates are as their weights, as far as other
        resources let them.
    priority : ndarray of int, shape (T,)
        A flow gets only what flows of higher priority leave.
    release_s : ndarray, shape (T,)
    route : ndarray of int, shape (T,)
        Row of the route table, -1 for none.
    queue : ndarray of int, shape (T,)
        -1 for a task in no queue.
    indptr, indices : ndarray of int
        Dependencies (CSR).
    route_indptr, route_resources : ndarray of int
        Resources of every route (CSR).
    route_usage : ndarray
        Bytes that a resource carries for each byte of the flow: 1, or a part where the flow is split.
    """

    capacity_bytes_per_s: np.ndarray
    delay_s: np.ndarray
    num_bytes: np.ndarray
    weight: np.ndarray
    priority: np.ndarray
    release_s: np.ndarray
    route: np.ndarray
    queue: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    route_indptr: np.ndarray
    route_resources: np.ndarray
    route_usage: np.ndarray

    def __post_init__(self) -> None:
        """Refuse numbers that no task, route or resource can have; give every column its type."""
        for name, kind in {**COLUMNS, **TABLES}.items():  # the compiled loops are made for one type each
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=kind))
        for name in COLUMNS:
            if len(getattr(self, name)) != self.num_tasks:
                found = len(getattr(self, name))
                rule = f"Every column has one entry for each of the {self.num_tasks} tasks"
                raise SpecError(f"{name} has {found} entries", key=name, value=found, rule=rule)
        for name in ("delay_s", "num_bytes", "release_s"):
            _check_range(name, getattr(self, name), above=False)
        for name in ("weight", "capacity_bytes_per_s", "route_usage"):
            _check_range(name, getattr(self, name), above=True)
        _check_index("indices", self.indices, 0, self.num_tasks, "tasks")
        _check_index("route", self.route, -1, self.num_routes, "routes")
        _check_index("route_resources", self.route_resources, 0, self.num_resources, "resources")

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.indptr) - 1

    @property
    def num_resources(self) -> int:
        """Number of resources."""
        return len(self.capacity_bytes_per_s)

    @property
    def num_routes(self) -> int:
        """Rows of the route table."""
        return len(self.route_indptr) - 1

    @cached_property
    def num_queues(self) -> int:
        """Number of queues."""
        return int(self.queue.max(initial=-1)) + 1

    @cached_property
    def num_flows(self) -> int:
        """Tasks that move bytes."""
        return int(np.count_nonzero(self.num_bytes))

    @cached_property
    def slot(self) -> np.ndarray:
        """Place of each task among those that can run at once, shape (T,): its queue, or one of its own."""
        free = self.queue < 0
        if not free.any():
            return self.queue
        slot = self.queue.copy()
        slot[free] = self.num_queues + np.arange(np.count_nonzero(free))
        return slot

    @cached_property
    def num_slots(self) -> int:
        """Tasks that can run at once, at most."""
        return self.num_queues + int(np.count_nonzero(self.queue < 0))

    @cached_property
    def rate_alone_bytes_per_s(self) -> np.ndarray:
        """Rate of a flow that has its route to itself, shape (routes,); infinite on an empty route."""
        rate = np.full(self.num_routes, np.inf)
        row = np.repeat(np.arange(self.num_routes), np.diff(self.route_indptr))
        np.minimum.at(rate, row, self.capacity_bytes_per_s[self.route_resources] / self.route_usage)
        return rate

    @cached_property
    def alone_s(self) -> np.ndarray:
        """Seconds of each task that shares nothing: its delay and its bytes, shape (T,)."""
        alone_s, sends = self.delay_s.copy(), self.route >= 0
        alone_s[sends] += self.num_bytes[sends] / self.rate_alone_bytes_per_s[self.route[sends]]
        return alone_s

    @cached_property
    def resource_bytes(self) -> np.ndarray:
        """Bytes that each resource carries, shape (R,)."""
        sends = self.route >= 0
        of_route = np.bincount(self.route[sends], self.num_bytes[sends], minlength=self.num_routes)
        carried = np.repeat(of_route, np.diff(self.route_indptr)) * self.route_usage
        return np.bincount(self.route_resources, carried, minlength=self.num_resources)

    @property
    def resource_s(self) -> np.ndarray:
        """How long each resource carries its bytes at its full capacity, shape (R,): a lower bound."""
        return self.resource_bytes / self.capacity_bytes_per_s

    def __repr__(self) -> str:
        """Sizes only."""
        return (
            f"<FlowProgram: {self.num_tasks} tasks, {self.num_flows} of them flows, "
            f"on {self.num_resources} resources, {len(self.indices)} dependencies>"
        )


def _check_range(name: str, values: np.ndarray, *, above: bool) -> None:
    low = values.min(initial=np.inf)
    in_range = low > 0.0 if above else low >= 0.0  # NaN fails both
    if in_range and values.max(initial=0.0) < np.inf:
        return
    inside = (values > 0.0 if above else values >= 0.0) & (values < np.inf)
    first = int(np.argmin(inside))
    raise SpecError(
        f"{name}[{first}] is {values[first]:g}",
        key=name,
        value=float(values[first]),
        rule=f"{name} is finite and {'above' if above else 'at least'} 0",
    )


def _check_index(name: str, values: np.ndarray, low: int, end: int, what: str) -> None:
    if len(values) and not (values.min() >= low and values.max() < end):
        wrong = values[(values < low) | (values >= end)][0]
        raise SpecError(f"{name} names {wrong}", key=name, value=int(wrong), rule=f"There are {end} {what}")


@dataclass(slots=True)
class FlowProgramBuilder:
    """Collects tasks, one by one or as columns; task numbers are final as soon as they are returned.

    Parameters
    ----------
    capacity_bytes_per_s : ndarray, shape (R,)

    Examples
    --------
    >>> build = FlowProgramBuilder(np.array([50e9]))
    >>> stream, link = build.new_queue(), build.route([0])
    >>> backward = build.compute(2e-3, queue=stream)
    >>> build.send(link, 100e6, latency_s=5e-6, after=[backward])
    1
    >>> build.build()
    <FlowProgram: 2 tasks, 1 of them flows, on 1 resources, 1 dependencies>
    """

    capacity_bytes_per_s: np.ndarray
    num_queues: int = 0
    _num_tasks: int = 0
    _routes: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = field(default_factory=dict)
    _rows: list[tuple[float, float, float, int, float, int, int]] = field(default_factory=list)
    _blocks: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    _edge_rows: list[tuple[int, int]] = field(default_factory=list)
    _edge_blocks: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def new_queue(self, count: int = 1) -> int:
        """Return the number of a new queue, the first of `count`."""
        self.num_queues += count
        return self.num_queues - count

    def route(self, resources: Sequence[int], usage: Sequence[float] = ()) -> int:
        """Return the route over these resources, new or known; `usage` is 1 unless given."""
        key = (tuple(resources), tuple(usage) or (1.0,) * len(resources))
        return self._routes.setdefault(key, len(self._routes))

    def compute(
        self, duration_s: float, *, queue: int = -1, after: Sequence[int] = (), release_s: float = 0.0
    ) -> int:
        """Add a task of a fixed duration and return its number."""
        return self._add((duration_s, 0.0, 1.0, 0, release_s, -1, queue), after)

    def send(
        self,
        route: int,
        num_bytes: float,
        *,
        latency_s: float = 0.0,
        queue: int = -1,
        after: Sequence[int] = (),
        weight: float = 1.0,
        priority: int = 0,
        release_s: float = 0.0,
    ) -> int:
        """Add a flow and return its number."""
        return self._add((latency_s, num_bytes, weight, priority, release_s, route, queue), after)

    def add_many(
        self,
        *,
        delay_s: ArrayLike = 0.0,
        num_bytes: ArrayLike = 0.0,
        weight: ArrayLike = 1.0,
        priority: ArrayLike = 0,
        release_s: ArrayLike = 0.0,
        route: ArrayLike = -1,
        queue: ArrayLike = -1,
    ) -> int:
        """Add tasks given as columns that broadcast to one dimension, and return the number of the first."""
        self._flush()
        floats = [np.asarray(one, dtype=np.float64) for one in (delay_s, num_bytes, weight, release_s)]
        whole = [np.asarray(one, dtype=np.int64) for one in (priority, route, queue)]
        shape = np.broadcast_shapes((1,), *(one.shape for one in (*floats, *whole)))
        delay, size, share, release, rank, row, line = (
            one if one.shape == shape else np.full(shape, one) for one in (*floats, *whole)
        )
        self._blocks.append((delay, size, share, rank, release, row, line))
        self._num_tasks += len(delay)
        return self._num_tasks - len(delay)

    def depend(self, tasks: ArrayLike, after: ArrayLike) -> None:
        """Let each of `tasks` wait for the one in `after`; the two broadcast."""
        pair = np.broadcast_arrays(
            np.atleast_1d(np.asarray(tasks, dtype=np.int64)), np.asarray(after, dtype=np.int64)
        )
        self._edge_blocks.append((pair[0].ravel(), pair[1].ravel()))

    def build(self) -> FlowProgram:
        """Return the program of everything added so far."""
        self._flush()
        columns = {
            name: self._blocks[0][i]
            if len(self._blocks) == 1
            else np.concatenate([np.empty(0, kind), *(block[i] for block in self._blocks)])
            for i, (name, kind) in enumerate(COLUMNS.items())
        }
        indptr, indices = self._dependencies()
        resources = [one for key in self._routes for one in key[0]]
        usage = [one for key in self._routes for one in key[1]]
        lengths = [len(key[0]) for key in self._routes]
        return FlowProgram(
            capacity_bytes_per_s=self.capacity_bytes_per_s,
            **columns,
            indptr=indptr,
            indices=indices,
            route_indptr=np.concatenate([[0], np.cumsum(lengths)]),
            route_resources=np.array(resources, dtype=np.int64),
            route_usage=np.array(usage, dtype=np.float64),
        )

    def _add(self, row: tuple[float, float, float, int, float, int, int], after: Sequence[int]) -> int:
        self._rows.append(row)
        self._edge_rows += [(self._num_tasks, before) for before in after]
        self._num_tasks += 1
        return self._num_tasks - 1

    def _flush(self) -> None:
        if self._rows:
            self._blocks.append(tuple(np.array(column) for column in zip(*self._rows, strict=True)))
            self._rows = []

    def _dependencies(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.array(self._edge_rows, dtype=np.int64).reshape(-1, 2)
        task = np.concatenate([rows[:, 0], *(one[0] for one in self._edge_blocks)])
        before = np.concatenate([rows[:, 1], *(one[1] for one in self._edge_blocks)])
        if len(task) and not (task.min() >= 0 and task.max() < self._num_tasks):
            wrong = int(task[(task < 0) | (task >= self._num_tasks)][0])
            rule = f"There are {self._num_tasks} tasks"
            raise SpecError(f"a dependency names task {wrong}", key="tasks", value=wrong, rule=rule)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(task, minlength=self._num_tasks))])
        if len(task) and np.all(task[1:] >= task[:-1]):  # in order already: a sort costs more than the rest
            return indptr, before
        return indptr, before[np.argsort(task, kind="stable")]
