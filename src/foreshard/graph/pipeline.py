"""Lowering of one pipeline: ops and transfers of a schedule as tasks with dependencies.

``pipeline_shape`` is what the schedule and the counts decide, cached; ``pipeline_durations`` fills in the
times; ``add_pipeline`` puts both into a program that may hold more; ``pipeline_program`` does all three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from foreshard.graph.pipeline_schedules import FOLDED, Op, stage_order, warm_up_counts
from foreshard.graph.program import Kind, Program, ProgramBuilder
from foreshard.graph.transfers import interleaved_ends, next_places, plain_ends, transfer_edges, transfers

STREAMS = ("compute", "send_forward", "send_backward")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineShape:
    """A lowered pipeline without durations.

    Tasks are the ops stage by stage, then the transfers. Resources are the compute stream of every stage,
    then its stream to the next stage, then its stream to the previous one.
    """

    # a transfer carries the labels of the op it follows; shape (T,)
    resource: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    # whether a transfer goes to the stage after (the first after the last), else to the one before
    to_next: np.ndarray
    # task ``edge_task[e]`` starts after ``edge_before[e]``; shape (E,)
    edge_task: np.ndarray
    edge_before: np.ndarray
    # place of each task's duration: ops by (op, stage, chunk, micro-batch), then transfers by direction and
    # boundary; shape (T,)
    duration_index: np.ndarray
    # task of each op, indexed by ``Op``; -1 where the schedule has no such op; shape (4, num_stages,
    # num_chunks, num_micro_batches)
    ops: np.ndarray
    # per stage the tasks after which the stage has nothing left to compute or to wait for
    last: tuple[np.ndarray, ...]
    resource_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTasks:
    """Where the tasks of one pipeline lie in a program: ``ops`` and ``last`` as in ``PipelineShape``.

    ``compute`` is the resource on which each stage computes, shape (num_stages,).
    """

    ops: np.ndarray
    last: tuple[np.ndarray, ...]
    compute: np.ndarray


@lru_cache(maxsize=64)
def pipeline_shape(
    schedule: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    overlap_p2p: bool = False,
    overlap_warm_up: bool = False,
) -> PipelineShape:
    """Lower a schedule to tasks, transfers and dependencies.

    Parameters
    ----------
    overlap_p2p : bool
        True: a transfer starts when its op ends, on its own stream, and only the op that needs it waits.
        False: a transfer occupies both ends. It starts when both stages have reached it and neither goes on
        before it has ended; sends and receives that Megatron issues as one call start together. Megatron
        overlaps only ``interleaved``; zero-bubble runtimes always do.
    overlap_warm_up : bool
        Overlap ``interleaved`` outside its steady state too (``overlap_p2p_comm_warmup_flush``).

    Source
    ------
    megatron/core/pipeline_parallel/schedules.py: send_forward_recv_backward and its siblings.
    """
    orders = stage_order(
        schedule,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    lengths = [len(order) for order in orders]
    op, chunk, micro_batch = np.concatenate(orders).astype(np.int64).T
    stage = np.repeat(np.arange(num_stages), lengths)
    ops = np.full((4, num_stages, num_chunks, num_micro_batches), -1)
    ops[op, stage, chunk, micro_batch] = np.arange(len(op))
    after, before = next_places(schedule, num_stages, num_chunks)
    source, target = transfers(op, stage, chunk, micro_batch, ops, after, before)
    backward = op[source] != Op.FORWARD
    transfer = len(op) + np.arange(len(source))
    boundary = stage[source] - backward
    to_previous = backward
    pending = np.zeros((0, 2), dtype=np.int64)
    if schedule in FOLDED:
        boundary = np.minimum(stage[source], stage[target])
        to_previous = stage[target] < stage[source]
        edges = np.stack([np.append(transfer, target), np.append(source, transfer)], axis=1)
    elif schedule == "interleaved":
        warm_up = warm_up_counts(
            schedule,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            num_chunks=num_chunks,
            group_size=group_size,
        )
        ends = interleaved_ends(source, target, backward, lengths[0], np.array(warm_up), overlap_p2p)
        hold = not (overlap_p2p and overlap_warm_up)
        edges, pending = transfer_edges(ends, source, target, transfer, lengths[0], hold)
    else:
        ends = plain_ends(source, target, backward, lengths[0])
        edges, pending = transfer_edges(ends, source, target, transfer, lengths[0], not overlap_p2p)
    ends_at = np.cumsum(lengths) - 1
    last = [np.append(pending[pending[:, 0] == i, 1], end) for i, end in enumerate(ends_at)]
    return PipelineShape(
        resource=np.concatenate([stage, stage[source] + num_stages * (1 + to_previous)]),
        kind=np.concatenate([op, np.where(backward, Kind.SEND_BACKWARD, Kind.SEND_FORWARD)]),
        stage=np.concatenate([stage, stage[source]]),
        chunk=np.concatenate([chunk, chunk[source]]),
        micro_batch=np.concatenate([micro_batch, micro_batch[source]]),
        to_next=np.append(np.zeros(len(op), dtype=bool), ~to_previous),
        edge_task=edges[:, 0],
        edge_before=edges[:, 1],
        duration_index=np.concatenate(
            [
                np.ravel_multi_index((op, stage, chunk, micro_batch), ops.shape),
                ops.size + backward * num_stages + boundary % num_stages,
            ]
        ),
        ops=ops,
        last=tuple(last),
        resource_names=tuple(f"stage{i}.{stream}" for stream in STREAMS for i in range(num_stages)),
    )


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
    num_stages, num_chunks = shape.ops.shape[1:3]
    table_s = np.zeros(shape.ops.size + 2 * num_stages)
    op_s = table_s[: shape.ops.size].reshape(shape.ops.shape)
    for op, given in zip(Op, (forward_s, backward_s, backward_input_s, backward_weight_s), strict=True):
        if given is not None:
            values = np.asarray(given, dtype=np.float64)
            op_s[op] = values.reshape(values.shape + (1,) * (3 - values.ndim))
        elif (shape.ops[op] >= 0).any():
            raise ValueError(f"the schedule needs durations for {op.name.lower()}")
    send_s = table_s[shape.ops.size :].reshape(2, num_stages)
    num_boundaries = max(num_stages - (num_chunks == 1), 1)
    send_s[0, :num_boundaries] = send_forward_s
    send_s[1, :num_boundaries] = send_backward_s
    return table_s[shape.duration_index]


@lru_cache(maxsize=64)
def _template(shape: PipelineShape) -> Program:
    """Program of one pipeline without its durations."""
    builder = ProgramBuilder()
    add_pipeline(builder, shape, np.zeros(len(shape.kind)))
    return builder.build()


def add_pipeline(
    builder: ProgramBuilder, shape: PipelineShape, durations_s: np.ndarray, *, group: int = 0
) -> PipelineTasks:
    """Append a lowered pipeline to a program; its resources carry the group in their name."""
    names = np.array([builder.resource(f"group{group}.{name}") for name in shape.resource_names])
    tasks = builder.add_many(
        names[shape.resource],
        durations_s,
        kind=shape.kind,
        group=group,
        stage=shape.stage,
        chunk=shape.chunk,
        micro_batch=shape.micro_batch,
    )
    first = int(tasks[0])
    builder.depend(shape.edge_task + first, shape.edge_before + first)
    return PipelineTasks(
        ops=np.where(shape.ops >= 0, shape.ops + first, -1),
        last=tuple(last + first for last in shape.last),
        compute=names[: len(shape.last)],
    )


def pipeline_program(
    *,
    schedule: str,
    num_micro_batches: int,
    forward_s: ArrayLike,
    group_size: int | None = None,
    overlap_p2p: bool = False,
    overlap_warm_up: bool = False,
    **durations_s: ArrayLike,
) -> Program:
    """Return the program of one pipeline; the shape of ``forward_s`` tells its stages and chunks.

    Other keywords are those of ``pipeline_shape`` and ``pipeline_durations``.

    Examples
    --------
    >>> pipeline_program(schedule="1f1b", num_micro_batches=2, forward_s=[1.0, 1.0], backward_s=2.0)
    <Program: 12 tasks on 6 resources, 14 dependencies>
    """
    num_stages, num_chunks = (*np.shape(forward_s), 1)[:2]
    shape = pipeline_shape(
        schedule,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        group_size=group_size,
        overlap_p2p=overlap_p2p,
        overlap_warm_up=overlap_warm_up,
    )
    return program_of(shape, pipeline_durations(shape, forward_s=forward_s, **durations_s))


def program_of(shape: PipelineShape, durations_s: np.ndarray) -> Program:
    """Return the program of one lowered pipeline; another call for the same shape only sets durations."""
    return replace(_template(shape), duration_s=durations_s)
