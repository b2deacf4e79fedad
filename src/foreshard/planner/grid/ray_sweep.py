"""The same search on many machines: parts of it as tasks of Ray, embedded or on a cluster.

On equal nodes the parts are cells of the grid; on mixed ones each setting of precision and communication is a
task, and of what to rent each instance. Results are those of a local search: the plans kept do not depend on
the order in which parts are searched, and what one task cannot exclude another prices again. Only how many
plans were timed, and how many were excluded, may differ; together they are the space.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from foreshard.errors import ExtraMissingError, SpecError
from foreshard.planner.grid.best_so_far import Found
from foreshard.planner.grid.search import Cells, walk
from foreshard.planner.grid.space import GridRequest

_FIRST = slice(0, 8)
"""Cells searched here before tasks start, so that tasks begin with plans to beat."""
_KNOCK_S = 5.0
"""Seconds in which a Ray head node answers."""
_TASKS_PER_CPU = 4
"""Tasks for each processor: with more of them than processors none waits long for the last."""


def check_executor(text: str) -> str:
    """Return an executor that is 'local', 'ray' or 'ray:ADDRESS', or raise SpecError."""
    kind, colon, address = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == "local" or (kind == "ray" and (address or not colon)):
        return text
    raise SpecError(
        f"{text!r} is no executor",
        key="--executor",
        value=text,
        rule="An executor is local, ray (on this machine) or ray:ADDRESS (a running cluster)",
        fix="Use --executor local, or --executor ray:auto",
    )


def walk_with_ray(
    request: GridRequest,
    cells: Cells,
    found: Found,
    *,
    deadline: float = np.inf,
    patience_s: float = 0.0,
    executor: str = "ray",
) -> None:
    """Search cells as `grid.walk` does, the first ones here, the others in tasks of Ray.

    Parameters
    ----------
    request, cells, found, deadline, patience_s
        As for :func:`foreshard.planner.grid.search.walk`.
    executor : str
        'ray', or 'ray:ADDRESS' of a cluster whose nodes have foreshard installed.

    Raises
    ------
    ExtraMissingError
        Without Ray.
    """
    ray = _ray()
    walk(request, cells.take(_FIRST), found, deadline=deadline, patience_s=patience_s)
    bound, rest = found.bound, cells.take(slice(_FIRST.stop, None))
    if found.interrupted or not len(rest.bound):
        found.bound = min([bound, *rest.bound[:1]])
        return
    _connect(ray, executor)
    stop_at = time.time() + deadline - time.perf_counter()  # the clock that machines share
    num_tasks = int(ray.cluster_resources().get("CPU", 1)) * _TASKS_PER_CPU
    task, shared = ray.remote(_task), ray.put((request, found))
    pending = [
        task.remote(shared, rest.take(slice(first, None, num_tasks)), stop_at, patience_s)
        for first in range(min(num_tasks, len(rest.bound)))
    ]
    bound = _gather(ray, pending, rest, found, bound)
    found.bound = min(bound, *found.score[:1], found.beat)


def _gather(ray: Any, pending: list[Any], rest: Cells, found: Found, bound: float) -> float:
    """Add what tasks find, and return the least of their bounds; on Ctrl-C that of cells not searched."""
    try:
        while pending:
            done, pending = ray.wait(pending)
            other: Found = ray.get(done[0])
            found.merge(other)
            bound = min(bound, other.bound)
    except KeyboardInterrupt:
        for task in pending:
            ray.cancel(task, force=True)
        found.interrupted = found.stopped = True
        bound = min(bound, float(rest.bound[0]))
    return bound


def _task(shared: tuple[GridRequest, Found], cells: Cells, stop_at: float, patience_s: float) -> Found:
    """Search some cells, knowing the plans found before."""
    request, before = shared
    found = Found(keep=before.keep, beat=before.beat, refusals=before.refusals)
    found.tables, found.score, found.step_time_s = before.tables, before.score, before.step_time_s
    deadline = time.perf_counter() + stop_at - time.time()
    walk(request, cells, found, deadline=deadline, patience_s=patience_s)
    return found


def each_in_tasks(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], executor: str
) -> Iterator[tuple[int, Any]]:
    """Yield the place and the result of each call, in the order in which their tasks end.

    Parameters
    ----------
    function : callable
        Of a module, so that another machine finds it.
    arguments : sequence of tuple
        Of each call.
    executor : str
        'ray', or 'ray:ADDRESS'.

    Raises
    ------
    ExtraMissingError
        Without Ray.
    """
    ray = _ray()
    _connect(ray, executor)
    task = ray.remote(function)
    waiting = {task.remote(*some): i for i, some in enumerate(arguments)}
    try:
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            place = waiting.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            yield place, result
    finally:
        for one in waiting:
            ray.cancel(one, force=True)


def num_at_once(executor: str) -> int:
    """Return how many tasks run side by side."""
    ray = _ray()
    _connect(ray, executor)
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _connect(ray: Any, executor: str) -> None:
    """Connect to Ray unless the process has; the connection lasts as long as the process, as Ray's do."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine unasked
    address = executor.partition(":")[2]
    options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
    try:
        _knock(address)
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"no Ray cluster answers: {error}",
            key="--executor",
            value=executor,
            rule="The address is that of a running head node, as ray start tells it",
            fix="Start one, or set RAY_AUTH_MODE=token where it asks for a token",
        ) from error


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT; Ray would go on asking for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ExtraMissingError(
            "ray is not installed",
            key="--executor",
            value="ray",
            rule="Searching in tasks of Ray needs it",
            fix="pip install 'foreshard[sweep]'",
        ) from None
    return ray
