"""Pipeline schedules: the order in which every stage works through its micro-batches.

A schedule is the same for all durations: an array of (op, chunk, micro-batch) rows per stage. Chunk c of
stage i is virtual stage ``c * num_stages + i`` of the model.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from foreshard.errors import SpecError
from foreshard.graph.dualpipe import dualpipe_order, dualpipev_order
from foreshard.graph.zero_bubble import Op, delayed_weights, zb_h2_orders, zbv_order
from foreshard.spec.checks import folding_rule
from foreshard.spec.codec import one_of
from foreshard.spec.plan import SCHEDULES

FOLDED = {"zbv": zbv_order, "dualpipev": dualpipev_order, "dualpipe": dualpipe_order}
"""Schedules whose second chunks go through the stages the other way round, and their orders."""
BY_ORDER = ("zb-h2", *FOLDED)
"""Schedules without a closed form: their longest path is that through their order of work."""
PAIRED = ("dualpipe", "dualpipev")
"""Schedules whose forwards run beside backwards, layer by layer."""
ZERO_BUBBLE = ("zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev")
"""Schedules that split some or all backwards; their messages run beside the work."""


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
    schedule : {'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'zbv', 'dualpipe', 'dualpipev'}
    num_stages, num_micro_batches, num_chunks : int, >= 1
        ``num_chunks`` is the number of virtual stages on each stage: any number for ``interleaved``, two for
        the folded schedules (of ``dualpipe`` the second is the copy), else one.
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
    Others: `graph.zero_bubble`, `graph.dualpipe`.

    Examples
    --------
    >>> stage_order("1f1b", num_stages=2, num_micro_batches=2)[0][:, [0, 2]].tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    group_size = _checked_group_size(schedule, num_stages, num_micro_batches, num_chunks, group_size)
    if schedule in FOLDED:
        return [FOLDED[schedule](num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    if schedule == "zb-h2":
        return zb_h2_orders(num_stages, num_micro_batches)
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
        orders = [delayed_weights(order, stage) for stage, order in enumerate(orders)]
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
    if schedule == "gpipe" and num_stages > 1:  # a stage alone has nobody to fill
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


@lru_cache(maxsize=64)
def held_chunks(schedule: str, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the most chunk activations each stage holds at once under a schedule of `BY_ORDER`."""
    chunks = 2 if schedule in FOLDED else 1
    held = in_flight(schedule, num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=chunks)
    return tuple(held.tolist())


def _checked_group_size(
    schedule: str, stages: int, micro_batches: int, chunks: int, group: int | None
) -> int:
    one_of(schedule, SCHEDULES, key="schedule", exact=True)
    for key, count in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if count < 1:
            raise SpecError(f"{count} {key} in a pipeline", key=key, value=count, rule="At least one is due")
    if schedule == "interleaved":
        return _checked_interleaving(stages, micro_batches, chunks, group)
    if schedule in FOLDED:
        return _checked_folding(schedule, stages, micro_batches, chunks)
    if chunks != 1:
        raise SpecError(
            f"schedule {schedule} with {chunks} virtual stages per stage",
            key="schedule",
            value=schedule,
            rule=f"{schedule} has one virtual stage per stage",
            fix="Use schedule interleaved",
        )
    return micro_batches


def _checked_folding(schedule: str, stages: int, micro_batches: int, chunks: int) -> int:
    if chunks != 2:
        raise SpecError(
            f"schedule {schedule} with {chunks} virtual stages per stage",
            key="schedule",
            value=schedule,
            rule=f"{schedule} has two virtual stages per stage",
            fix="Give each stage two",
        )
    if (broken := folding_rule(schedule, stages, micro_batches)) is not None:
        what, rule, fix = broken
        raise SpecError(what, key="schedule", value=schedule, rule=rule, fix=fix)
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
