"""A program: tasks with durations on resources that work in order, and dependencies between them.

``ProgramBuilder`` collects tasks one by one or as arrays; ``pipeline_program`` lowers one pipeline. What
executes a program is ``foreshard.sim.critical_path``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from foreshard.graph.schedules import Op, stage_order, warm_up_counts

LABELS = ("kind", "group", "stage", "chunk", "micro_batch")


class Kind(IntEnum):
    """What a task is; the first four are the codes of ``schedules.Op``."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Tasks 0..T-1; a resource runs its tasks in the order of their numbers, one at a time.

    ``dataclasses.replace(program, duration_s=...)`` gives the same program with other durations.

    Attributes
    ----------
    duration_s : ndarray, shape (T,), float64
    resource : ndarray, shape (T,), int32
    indptr, indices : ndarray, shapes (T + 1,) int64 and (E,) int32
        Task t starts after the tasks ``indices[indptr[t]:indptr[t + 1]]``.
    lag_s : ndarray, shape (E,) or (0,), float64
        Delay between the end of a dependency and the start it allows; empty when all are zero.
    resource_indptr, resource_tasks : ndarray
        The tasks of each resource in order, derived from ``resource``.
    kind, group, stage, chunk, micro_batch : ndarray, shape (T,), int32
        Labels; -1 where a label has no meaning. ``kind`` holds codes of ``Kind``.
    resource_names : tuple of str
    """

    duration_s: np.ndarray
    resource: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    lag_s: np.ndarray
    resource_indptr: np.ndarray
    resource_tasks: np.ndarray
    kind: np.ndarray
    group: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    resource_names: tuple[str, ...]

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTasks:
    """Where the tasks of one pipeline lie in a program.

    Attributes
    ----------
    ops : ndarray, shape (4, num_stages, num_chunks, num_micro_batches), int64
        Task of each op, indexed by ``Op``; -1 where the schedule has no such op.
    last : tuple of ndarray
        Per stage the tasks after which the stage has nothing left to compute or to wait for.
    compute : ndarray, shape (num_stages,), int64
        Resource on which each stage computes.
    """

    ops: np.ndarray
    last: tuple[np.ndarray, ...]
    compute: np.ndarray


class ProgramBuilder:
    """Collects tasks, dependencies and resources; task numbers are final as soon as they are returned."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._num_tasks = 0
        self._rows: list[tuple[float, int, int, int, int, int, int]] = []
        self._blocks: list[tuple[np.ndarray, ...]] = []
        self._edge_rows: list[tuple[int, int, float]] = []
        self._edge_blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def resource(self, name: str) -> int:
        """Return the number of the resource called ``name``, new or known."""
        return self._names.setdefault(name, len(self._names))

    def add(
        self,
        resource: int | str,
        duration_s: float,
        after: Sequence[int] = (),
        *,
        lag_s: float = 0.0,
        kind: int = Kind.OTHER,
        group: int = 0,
        stage: int = -1,
        chunk: int = -1,
        micro_batch: int = -1,
    ) -> int:
        """Append one task to a resource and return its number; it starts ``lag_s`` after those in ``after``."""
        number = self.resource(resource) if isinstance(resource, str) else resource
        self._rows.append((duration_s, number, int(kind), group, stage, chunk, micro_batch))
        task = self._num_tasks
        self._num_tasks += 1
        for before in after:
            self._edge_rows.append((task, before, lag_s))
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
        labels = [np.asarray(label, dtype=np.int32) for label in (resource, kind, group, stage, chunk, micro_batch)]
        columns = np.broadcast_arrays(np.atleast_1d(np.asarray(duration_s, dtype=np.float64)), *labels)
        self._blocks.append(tuple(columns))
        first = self._num_tasks
        self._num_tasks += len(columns[0])
        return np.arange(first, self._num_tasks)

    def depend(self, tasks: ArrayLike, after: ArrayLike, lag_s: ArrayLike = 0.0) -> None:
        """Let each of ``tasks`` start ``lag_s`` after the one in ``after``; the three broadcast."""
        edges = np.broadcast_arrays(
            np.atleast_1d(np.asarray(tasks, dtype=np.int64)),
            np.asarray(after, dtype=np.int64),
            np.asarray(lag_s, dtype=np.float64),
        )
        self._edge_blocks.append((edges[0].ravel(), edges[1].ravel(), edges[2].ravel()))

    def add_pipeline(self, shape: PipelineShape, durations_s: np.ndarray, *, group: int = 0) -> PipelineTasks:
        """Append a lowered pipeline whose resources carry the group in their name."""
        names = [self.resource(f"group{group}.{name}") for name in shape.resource_names]
        tasks = self.add_many(
            np.array(names)[shape.resource],
            durations_s,
            kind=shape.kind,
            group=group,
            stage=shape.stage,
            chunk=shape.chunk,
            micro_batch=shape.micro_batch,
        )
        first = int(tasks[0])
        self.depend(shape.edge_task + first, shape.edge_before + first)
        return PipelineTasks(
            ops=np.where(shape.ops >= 0, shape.ops + first, -1),
            last=tuple(last + first for last in shape.last),
            compute=np.array(names[: len(shape.last)]),
        )

    def build(self) -> Program:
        """Return the program of everything added so far."""
        self._flush()
        empty = (np.empty(0),) + (np.empty(0, dtype=np.int32),) * 6
        columns = [np.concatenate(parts) for parts in zip(empty, *self._blocks, strict=True)]
        edges = [np.concatenate(parts) for parts in zip(*self._edges(), strict=True)]
        duration_s, resource, kind, group, stage, chunk, micro_batch = columns
        _check(duration_s, edges)
        indptr, order = _compressed(edges[0], len(duration_s))
        resource_indptr, resource_tasks = _compressed(resource, len(self._names))
        lag_s = edges[2][order]
        return Program(
            duration_s=duration_s,
            resource=resource,
            indptr=indptr,
            indices=edges[1][order].astype(np.int32),
            lag_s=lag_s if lag_s.any() else np.empty(0),
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
            self._blocks.append(
                (np.array(duration_s, dtype=np.float64), *(np.array(label, dtype=np.int32) for label in labels))
            )
            self._rows = []

    def _edges(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        rows = np.array(self._edge_rows, dtype=np.float64).reshape(-1, 3)  # exact: task numbers are < 2**53
        return [*self._edge_blocks, (rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2])]


def _check(duration_s: np.ndarray, edges: list[np.ndarray]) -> None:
    if not (np.isfinite(duration_s).all() and (duration_s >= 0.0).all()):
        raise ValueError("durations must be finite and not negative")
    task, before, lag_s = edges
    if len(task) and not (0 <= min(task.min(), before.min()) and max(task.max(), before.max()) < len(duration_s)):
        raise ValueError("a dependency names a task that was never added")
    if not (np.isfinite(lag_s).all() and (lag_s >= 0.0).all()):
        raise ValueError("lags must be finite and not negative")


def _compressed(row: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Row pointers, and the permutation that sorts entries by row and keeps their order inside one."""
    indptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=indptr[1:])
    return indptr, np.argsort(row, kind="stable")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineShape:
    """A lowered pipeline without durations: what depends only on the schedule and the counts.

    Tasks are the ops stage by stage, then the transfers. Resources are the compute stream of every stage,
    then its stream to the next stage, then its stream to the previous one.
    """

    resource: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    edge_task: np.ndarray
    edge_before: np.ndarray
    ops: np.ndarray
    last: tuple[np.ndarray, ...]
    resource_names: tuple[str, ...]


@lru_cache(maxsize=64)
def pipeline_shape(
    schedule: str,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    overlap_p2p: bool = False,
) -> PipelineShape:
    """Lower a schedule to tasks, transfers and dependencies.

    With ``overlap_p2p`` a transfer has its own stream: it starts when its op ends and only the op that needs
    it waits. Without, it occupies both ends: it starts when both stages have reached it and neither goes on
    before it ends; the sends and receives that Megatron issues as one call start together.

    Source
    ------
    megatron/core/pipeline_parallel/schedules.py: send_forward_recv_backward and its siblings.
    """
    counts = {
        "num_stages": num_stages,
        "num_micro_batches": num_micro_batches,
        "num_chunks": num_chunks,
        "group_size": group_size,
    }
    rows = np.stack(stage_order(schedule, **counts)).astype(np.int64)
    num_ops = rows.shape[1]
    op, chunk, micro_batch = rows.reshape(-1, 3).T
    stage = np.repeat(np.arange(num_stages), num_ops)
    ops = np.full((4, num_stages, num_chunks, num_micro_batches), -1)
    ops[op, stage, chunk, micro_batch] = np.arange(len(op))
    source, target = _transfers(op, stage, chunk, micro_batch, ops)
    transfer = len(op) + np.arange(len(source))
    backward = op[source] != Op.FORWARD
    if overlap_p2p:
        edges = [(transfer, source), (target, transfer)]
        pending = [np.empty(0, dtype=np.int64)] * num_stages
    else:
        warm_up = np.array(warm_up_counts(schedule, **counts))
        calls = _calls(source, target, backward, num_ops, warm_up if schedule == "interleaved" else None)
        edges, pending = _blocking_edges(calls, transfer, num_stages, num_ops)
    ends = np.arange(1, num_stages + 1) * num_ops - 1
    streams = ("compute", "send_forward", "send_backward")
    return PipelineShape(
        resource=np.concatenate([stage, stage[source] + num_stages * (1 + backward)]),
        kind=np.concatenate([op, np.where(backward, Kind.SEND_BACKWARD, Kind.SEND_FORWARD)]),
        stage=np.concatenate([stage, stage[source]]),
        chunk=np.concatenate([chunk, chunk[source]]),
        micro_batch=np.concatenate([micro_batch, micro_batch[source]]),
        edge_task=np.concatenate([task for task, _ in edges]),
        edge_before=np.concatenate([before for _, before in edges]),
        ops=ops,
        last=tuple(np.append(waits, end) for waits, end in zip(pending, ends, strict=True)),
        resource_names=tuple(f"stage{i}.{stream}" for stream in streams for i in range(num_stages)),
    )


def _transfers(op, stage, chunk, micro_batch, ops) -> tuple[np.ndarray, np.ndarray]:
    """Op that sends and op that needs it, for every activation and gradient that leaves a stage."""
    num_stages, num_chunks = ops.shape[1:3]
    virtual = chunk * num_stages + stage
    forward = op == Op.FORWARD
    to = np.where(forward, virtual + 1, virtual - 1)
    sends = (op != Op.BACKWARD_WEIGHT) & (to >= 0) & (to < num_stages * num_chunks) & (num_stages > 1)
    source = np.flatnonzero(sends)
    to = to[source]
    return source, ops[op[source], to % num_stages, to // num_stages, micro_batch[source]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Calls:
    """Between which ops each stage sends and receives: call g comes before op g of the stage.

    A second receive waits for the send of the same call.
    """

    send_stage: np.ndarray
    send_call: np.ndarray
    receive_stage: np.ndarray
    receive_call: np.ndarray
    receive_second: np.ndarray


def _calls(source, target, backward, num_ops: int, interleaved_warm_up: np.ndarray | None) -> _Calls:
    send_stage, send_call = source // num_ops, source % num_ops + 1
    receive_stage, receive_call = target // num_ops, target % num_ops
    if interleaved_warm_up is None:
        # a send and a receive with the same neighbour are one call; else the send comes first
        sends_backward = np.full((source.max(initial=-1) // num_ops + 2, num_ops + 1), -1)
        sends_backward[send_stage, send_call] = backward
        second = sends_backward[receive_stage, receive_call] == backward
    else:
        # in the steady state one call serves a forward and the backward after it
        steady = interleaved_warm_up, num_ops - interleaved_warm_up
        position = source % num_ops
        in_steady = (position >= steady[0][send_stage]) & (position < steady[1][send_stage])
        send_call = send_call + (in_steady & ~backward)
        position = target % num_ops
        in_steady = (position >= steady[0][receive_stage]) & (position < steady[1][receive_stage])
        receive_call = receive_call - (in_steady & backward)
        # with nothing but warm-up, the last send has ended before the first gradient is awaited
        second = backward & (receive_call == num_ops // 2) & (interleaved_warm_up[receive_stage] == num_ops // 2)
    return _Calls(
        send_stage=send_stage,
        send_call=send_call,
        receive_stage=receive_stage,
        receive_call=receive_call,
        receive_second=second,
    )


def _blocking_edges(calls: _Calls, transfer: np.ndarray, num_stages: int, num_ops: int):
    """Dependencies that hold both ends of every transfer, and the transfers after each stage's last op."""
    sent = np.full((num_stages, num_ops + 1), -1)
    sent[calls.send_stage, calls.send_call] = transfer
    sent_before = sent[calls.receive_stage, calls.receive_call]
    second = calls.receive_second & (sent_before >= 0)
    edges = [(transfer[second], sent_before[second])]
    pending = [np.empty(0, dtype=np.int64)] * num_stages
    for stage, call, starts_call in (
        (calls.send_stage, calls.send_call, np.ones(len(transfer), dtype=bool)),
        (calls.receive_stage, calls.receive_call, ~second),
    ):
        first = starts_call & (call > 0)
        edges.append((transfer[first], (stage * num_ops + call - 1)[first]))
        blocks = call < num_ops
        edges.append(((stage * num_ops + call)[blocks], transfer[blocks]))
        for i in range(num_stages):
            pending[i] = np.append(pending[i], transfer[~blocks & (stage == i)])
    return edges, pending


def pipeline_durations(
    shape: PipelineShape,
    *,
    forward_s: ArrayLike,
    backward_s: ArrayLike | None = None,
    backward_input_s: ArrayLike | None = None,
    backward_weight_s: ArrayLike | None = None,
    send_forward_s: ArrayLike = 0.0,
    send_backward_s: ArrayLike = 0.0,
) -> np.ndarray:
    """Return the duration of every task of a lowered pipeline.

    Parameters
    ----------
    forward_s, backward_s, backward_input_s, backward_weight_s : array_like, seconds
        Shape (num_stages,), (num_stages, num_chunks) or (num_stages, num_chunks, num_micro_batches), or one
        number. A schedule that splits the backward needs the last two, the others need ``backward_s``.
    send_forward_s, send_backward_s : array_like, seconds
        One number, or one per boundary: entry i is between stage i and stage i + 1 and, with several
        chunks, the last between the last stage and the first.

    Returns
    -------
    ndarray, shape (T,), float64
    """
    _, num_stages, num_chunks, num_micro_batches = shape.ops.shape
    full = (num_stages, num_chunks, num_micro_batches)
    duration_s = np.empty(len(shape.kind))
    by_op = (forward_s, backward_s, backward_input_s, backward_weight_s)
    for op, given in zip(Op, by_op, strict=True):
        at = shape.kind == op
        if given is None:
            if at.any():
                raise ValueError(f"the schedule needs durations for {op.name.lower()}")
            continue
        table = np.asarray(given, dtype=np.float64)
        table = np.broadcast_to(table.reshape(table.shape + (1,) * (3 - table.ndim)), full)
        duration_s[at] = table[shape.stage[at], shape.chunk[at], shape.micro_batch[at]]
    for kind, given in ((Kind.SEND_FORWARD, send_forward_s), (Kind.SEND_BACKWARD, send_backward_s)):
        at = shape.kind == kind
        boundary = shape.stage[at] - (kind == Kind.SEND_BACKWARD)
        table = np.asarray(given, dtype=np.float64)
        num_boundaries = num_stages if num_chunks > 1 else num_stages - 1
        duration_s[at] = np.broadcast_to(table, (max(num_boundaries, 1),))[boundary % num_stages]
    return duration_s


def pipeline_program(
    *,
    schedule: str,
    num_micro_batches: int,
    forward_s: ArrayLike,
    group_size: int | None = None,
    overlap_p2p: bool = False,
    **durations_s: ArrayLike,
) -> Program:
    """Return the program of one pipeline; ``forward_s`` gives the number of stages and chunks.

    Other keywords are those of ``pipeline_durations``.
    """
    num_stages, num_chunks = (np.shape(forward_s) + (1,))[:2]
    shape = pipeline_shape(schedule, num_stages, num_micro_batches, num_chunks, group_size, overlap_p2p)
    builder = ProgramBuilder()
    builder.add_pipeline(shape, pipeline_durations(shape, forward_s=forward_s, **durations_s))
    return builder.build()
