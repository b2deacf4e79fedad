"""Pipeline schedules: the order in which every stage works through its micro-batches.

A schedule is the same for all durations: an array of (op, chunk, micro-batch) rows per stage. Chunk c of
stage i is virtual stage ``c * num_stages + i`` of the model.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from foreshard.errors import SpecError
from foreshard.spec.checks import MODELLED_SCHEDULES
from foreshard.spec.plan import SCHEDULES


class Op(IntEnum):
    """What a stage does with one chunk and one micro-batch."""

    FORWARD = 0
    BACKWARD = 1  # both gradients at once
    BACKWARD_INPUT = 2  # gradient of the input, on the way to the previous stage
    BACKWARD_WEIGHT = 3  # gradient of the weights, free to wait


def stage_order(
    schedule: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> list[np.ndarray]:
    """Return what each stage executes, in order.

    Parameters
    ----------
    schedule : {'gpipe', '1f1b', 'interleaved', 'zb-h1'}
    num_stages, num_micro_batches, num_chunks : int, >= 1
        ``num_chunks`` is the number of virtual stages on each stage; only ``interleaved`` has more than one.
    group_size : int, optional
        Micro-batches that pass a chunk before the next chunk starts (``interleaved``), ``num_stages`` if
        not given; Megatron calls it ``microbatch_group_size_per_vp_stage``.

    Returns
    -------
    list of ndarray, shape (num_ops, 3), int32
        One array per stage with columns (op, chunk, micro_batch).

    Raises
    ------
    SpecError
        If the schedule is unknown or not modelled, or the counts do not fit it.

    Source
    ------
    gpipe: Huang et al. 2019, backward in the order of torch.distributed.pipelining ScheduleGPipe.
    1f1b, interleaved: Narayanan et al. 2021 and megatron/core/pipeline_parallel/schedules.py.
    zb-h1: Qi et al. 2023 (arXiv 2401.10241) and the zb-h1-quick-start branch of
    sail-sg/zero-bubble-pipeline-parallelism: stage i delays weight gradients by i micro-batches; input
    gradients leave before any weight gradient.

    Examples
    --------
    >>> stage_order("1f1b", num_stages=2, num_micro_batches=2)[0][:, [0, 2]].tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    group_size = _checked_group_size(schedule, num_stages, num_micro_batches, num_chunks, group_size)
    forward, backward = _visits(num_micro_batches, num_chunks, group_size)
    orders = [
        _alternate(forward, backward, warm_up)
        for warm_up in warm_up_counts(
            schedule,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            num_chunks=num_chunks,
            group_size=group_size,
        )
    ]
    if schedule == "zb-h1":
        orders = [_delay_weights(order, stage) for stage, order in enumerate(orders)]
    return orders


def warm_up_counts(
    schedule: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> list[int]:
    """Return how many forwards each stage runs before its first backward can follow a forward.

    Source
    ------
    megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches.

    Examples
    --------
    >>> warm_up_counts("interleaved", num_stages=4, num_micro_batches=8, num_chunks=2)
    [10, 8, 6, 4]
    """
    group_size = _checked_group_size(schedule, num_stages, num_micro_batches, num_chunks, group_size)
    total = num_micro_batches * num_chunks
    to_last = range(num_stages - 1, -1, -1)
    if schedule == "gpipe":
        return [total] * num_stages
    if schedule == "interleaved":
        return [min(total, 2 * hops + (num_chunks - 1) * group_size) for hops in to_last]
    return [min(total, hops) for hops in to_last]


def in_flight(
    schedule: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> np.ndarray:
    """Return the most chunk activations each stage holds at once.

    An activation is held from its forward to the end of its backward; with a split backward to the end of the
    weight gradient.

    Examples
    --------
    >>> in_flight("1f1b", num_stages=4, num_micro_batches=8).tolist()
    [4, 3, 2, 1]
    """
    orders = stage_order(
        schedule,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    change = np.array([1, -1, 0, -1])  # indexed by Op
    return np.array([np.cumsum(change[order[:, 0]]).max() for order in orders])


def _checked_group_size(
    schedule: str, stages: int, micro_batches: int, chunks: int, group: int | None
) -> int:
    if schedule not in MODELLED_SCHEDULES:
        what = "not modelled yet" if schedule in SCHEDULES else "unknown"
        raise SpecError(
            f"schedule {schedule!r} is {what}",
            key="schedule",
            value=schedule,
            fix=f"Use one of {', '.join(MODELLED_SCHEDULES)}",
        )
    for key, count in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if count < 1:
            raise SpecError(f"{count} {key} in a pipeline", key=key, value=count, rule="At least one is due")
    if schedule == "interleaved":
        return _checked_interleaving(stages, micro_batches, chunks, group)
    if chunks != 1:
        raise SpecError(
            f"schedule {schedule} with {chunks} virtual stages per stage",
            key="schedule",
            value=schedule,
            rule=f"{schedule} has one virtual stage per stage",
            fix="Use schedule interleaved",
        )
    return micro_batches


def _checked_interleaving(stages: int, micro_batches: int, chunks: int, group: int | None) -> int:
    group = stages if group is None else group
    remainder = micro_batches % group if group > 0 else 0
    if chunks < 2 or stages < 2:
        raise SpecError(
            f"interleaved with {stages} stages of {chunks} virtual stages",
            key="schedule",
            value="interleaved",
            rule="Interleaving needs at least 2 stages and 2 virtual stages on each",
            fix="Use schedule 1f1b",
        )
    if not stages <= group <= micro_batches:
        raise SpecError(
            f"interleaved groups of {group} micro-batches",
            key="schedule",
            value=group,
            rule=f"The group lies between the stages ({stages}) and the micro-batches ({micro_batches})",
            fix=f"Raise the micro-batches per step to at least {max(stages, group)} or use fewer stages",
        )
    if 0 < remainder < stages:
        raise SpecError(
            f"{micro_batches} micro-batches leave a last group of {remainder}",
            key="schedule",
            value=micro_batches,
            rule=f"Micro-batches modulo the group ({group}) is 0 or at least the stages ({stages})",
            fix=f"Use {micro_batches - remainder} or {micro_batches - remainder + group} micro-batches",
        )
    return group


def _visits(micro_batches: int, chunks: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward rows in the order every stage visits them."""
    micro_batch = np.arange(micro_batches, dtype=np.int32)[None, :].repeat(chunks, axis=0)
    chunk = np.arange(chunks, dtype=np.int32)[:, None].repeat(micro_batches, axis=1)
    order = np.lexsort((micro_batch.ravel(), chunk.ravel(), (micro_batch // group).ravel()))
    micro_batch, chunk = micro_batch.ravel()[order], chunk.ravel()[order]
    forward = np.stack([np.full_like(chunk, Op.FORWARD), chunk, micro_batch], axis=1)
    backward = np.stack([np.full_like(chunk, Op.BACKWARD), chunks - 1 - chunk, micro_batch], axis=1)
    return forward, backward


def _alternate(forward: np.ndarray, backward: np.ndarray, warm_up: int) -> np.ndarray:
    """Run the warm-up forwards, then one forward and one backward in turn, then the backwards left."""
    num, paired = len(forward), len(forward) - warm_up
    order = np.empty((2 * num, 3), dtype=np.int32)
    order[:warm_up] = forward[:warm_up]
    order[warm_up : warm_up + 2 * paired : 2] = forward[warm_up:]
    order[warm_up + 1 : warm_up + 2 * paired : 2] = backward[:paired]
    order[warm_up + 2 * paired :] = backward[paired:]
    return order


def _delay_weights(order: np.ndarray, delay: int) -> np.ndarray:
    """Split backwards; the weight gradient of k follows the input gradient of k + delay (or the last)."""
    is_backward = order[:, 0] == Op.BACKWARD
    position = np.flatnonzero(is_backward)
    weights = order[is_backward].copy()
    weights[:, 0] = Op.BACKWARD_WEIGHT
    split = order.copy()
    split[is_backward, 0] = Op.BACKWARD_INPUT
    follows = position[np.minimum(np.arange(len(position)) + delay, len(position) - 1)]
    rank = np.argsort(np.concatenate([np.arange(len(order)), follows]), kind="stable")
    return np.concatenate([split, weights])[rank]
