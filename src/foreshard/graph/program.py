"""A program: tasks with durations on resources that work in order, and dependencies between them.

``ProgramBuilder`` collects tasks one by one or as arrays; ``foreshard.graph.pipeline`` lowers
a pipeline. What executes a program is ``foreshard.sim.critical_path``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike


class Kind(IntEnum):
    """What a task is; the first four are the codes of ``pipeline_schedules.Op``."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND_FORWARD = 4
    SEND_BACKWARD = 5
    PARAMETER_GATHER = 6
    GRADIENT_REDUCE = 7
    OPTIMIZER = 8
    TENSOR_COMM = 9
    CONTEXT_COMM = 10
    EXPERT_COMM = 11
    RECOMPUTE = 12
    HOST = 13
    OTHER = 14
    PASSES = 15  # forward and backward of several micro-batches in one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Tasks 0..T-1; a resource runs its tasks in the order of their numbers, one at a time.

    ``dataclasses.replace(program, duration_s=...)`` gives the same program with other durations.
    """

    # shape (T,), float64
    duration_s: np.ndarray
    # shape (T,), int32
    resource: np.ndarray
    # task t starts after the tasks ``indices[indptr[t]:indptr[t + 1]]``; shapes (T + 1,) int64 and (E,) int32
    indptr: np.ndarray
    indices: np.ndarray
    # the tasks of each resource in order, derived from ``resource``
    resource_indptr: np.ndarray
    resource_tasks: np.ndarray
    # labels; -1 where a label has no meaning. ``kind`` holds codes of ``Kind``; shape (T,), int32
    kind: np.ndarray
    group: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    resource_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse durations that no task can have; NaN fails both comparisons."""
        if not (self.duration_s.min(initial=0.0) >= 0.0 and self.duration_s.max(initial=0.0) < np.inf):
            raise ValueError("durations must be finite and not negative")

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.duration_s)

    def __repr__(self) -> str:
        """Sizes only."""
        return (
            f"<Program: {self.num_tasks} tasks on {len(self.resource_names)} resources, "
            f"{len(self.indices)} dependencies>"
        )


class ProgramBuilder:
    """Collects tasks, dependencies and resources; task numbers are final as soon as they are returned."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._num_tasks = 0
        self._rows: list[tuple[float, int, int, int, int, int, int]] = []
        self._blocks: list[tuple[np.ndarray, ...]] = []
        self._edge_rows: list[tuple[int, int]] = []
        self._edge_blocks: list[tuple[np.ndarray, np.ndarray]] = []

    def resource(self, name: str) -> int:
        """Return the number of the resource called ``name``, new or known."""
        return self._names.setdefault(name, len(self._names))

    def add(
        self,
        resource: int | str,
        duration_s: float,
        after: Sequence[int] = (),
        *,
        kind: int = Kind.OTHER,
        group: int = 0,
        stage: int = -1,
        chunk: int = -1,
        micro_batch: int = -1,
    ) -> int:
        """Append one task, which starts after those in ``after``; return its number."""
        number = self.resource(resource) if isinstance(resource, str) else resource
        self._rows.append((duration_s, number, int(kind), group, stage, chunk, micro_batch))
        task = self._num_tasks
        self._num_tasks += 1
        for before in after:
            self._edge_rows.append((task, before))
        return task

    def add_many(
        self,
        resource: ArrayLike,
        duration_s: ArrayLike,
        *,
        kind: ArrayLike = Kind.OTHER,
        group: ArrayLike = 0,
        stage: ArrayLike = -1,
        chunk: ArrayLike = -1,
        micro_batch: ArrayLike = -1,
    ) -> np.ndarray:
        """Append tasks given as arrays that broadcast to one dimension; return their numbers."""
        self._flush()
        given = (resource, kind, group, stage, chunk, micro_batch)
        labels = [np.asarray(label, dtype=np.int32) for label in given]
        columns = np.broadcast_arrays(np.atleast_1d(np.asarray(duration_s, dtype=np.float64)), *labels)
        self._blocks.append(tuple(columns))
        first = self._num_tasks
        self._num_tasks += len(columns[0])
        return np.arange(first, self._num_tasks)

    def depend(self, tasks: ArrayLike, after: ArrayLike) -> None:
        """Let each of ``tasks`` start after the one in ``after``; the two broadcast."""
        task, before = np.broadcast_arrays(
            np.atleast_1d(np.asarray(tasks, dtype=np.int64)), np.asarray(after, dtype=np.int64)
        )
        self._edge_blocks.append((task.ravel(), before.ravel()))

    def build(self) -> Program:
        """Return the program of everything added so far."""
        self._flush()
        empty = (np.empty(0),) + (np.empty(0, dtype=np.int32),) * 6
        columns = [np.concatenate(parts) for parts in zip(empty, *self._blocks, strict=True)]
        rows = np.array(self._edge_rows, dtype=np.int64).reshape(-1, 2)
        edges = [*self._edge_blocks, (rows[:, 0], rows[:, 1])]
        task, before = (np.concatenate(parts) for parts in zip(*edges, strict=True))
        duration_s, resource, kind, group, stage, chunk, micro_batch = columns
        ends = np.concatenate([task, before])
        if ends.min(initial=0) < 0 or ends.max(initial=-1) >= len(duration_s):
            raise ValueError("a dependency names a task that was never added")
        indptr, order = _compressed(task, len(duration_s))
        resource_indptr, resource_tasks = _compressed(resource, len(self._names))
        return Program(
            duration_s=duration_s,
            resource=resource,
            indptr=indptr,
            indices=before[order].astype(np.int32),
            resource_indptr=resource_indptr,
            resource_tasks=resource_tasks.astype(np.int32),
            kind=kind,
            group=group,
            stage=stage,
            chunk=chunk,
            micro_batch=micro_batch,
            resource_names=tuple(self._names),
        )

    def _flush(self) -> None:
        if self._rows:
            duration_s, *labels = zip(*self._rows, strict=True)
            columns = [np.array(label, dtype=np.int32) for label in labels]
            self._blocks.append((np.array(duration_s, dtype=np.float64), *columns))
            self._rows = []


def _compressed(row: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Row pointers, and the permutation that sorts entries by row and keeps their order inside one."""
    indptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=indptr[1:])
    return indptr, np.argsort(row, kind="stable")
