"""The sets of ranks of a plan that communicate by collectives, and which collectives they use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreshard.spec.plan import Group, Plan, Stage

_SHARDED = ("reduce-scatter", "all-gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Ranks in the order of a communicator, the collectives that they use, and for what."""

    ranks: tuple[int, ...]
    collectives: tuple[str, ...]
    purpose: str


def rank_sets(plan: Plan) -> tuple[RankSet, ...]:
    """Return every set of at least two ranks that a plan's collectives join, each set and purpose once.

    Tensor parallelism gathers and scatters the sequence (`sp`) or sums; context parallelism gathers keys and
    values where `context_gather` says so, else it sends messages along a ring, which are no collective;
    experts exchange tokens; gradients are summed over the data-parallel and context ranks, within shards
    reduced and gathered (zero 1 to 3), over shard groups and pipelines summed whole.

    Examples
    --------
    >>> from foreshard.spec.degrees import plan_from_degrees
    >>> for found in rank_sets(plan_from_degrees(8, 4, tp=2, zero=1, global_batch=8, seq_len=16)):
    ...     print(found.purpose, found.ranks, *found.collectives)
    tensor (0, 1) reduce-scatter all-gather
    tensor (2, 3) reduce-scatter all-gather
    gradients (0, 2) reduce-scatter all-gather
    gradients (1, 3) reduce-scatter all-gather
    """
    found: dict[tuple[str, tuple[int, ...], tuple[str, ...]], RankSet] = {}
    for group in plan.groups:
        for stage in group.stages:
            for one in _of_stage(plan, group, stage):
                found.setdefault((one.purpose, one.ranks, one.collectives), one)
    for one in _across_pipelines(plan):
        found.setdefault((one.purpose, one.ranks, one.collectives), one)
    return tuple(found.values())


def _of_stage(plan: Plan, group: Group, stage: Stage) -> Iterator[RankSet]:
    dense = np.array(stage.ranks).reshape(-1, stage.cp, stage.tp)  # tp fastest, then cp, then inner dp
    experts = np.array(stage.ranks).reshape(-1, stage.ep, stage.etp)
    within = _SHARDED if group.sp else ("all-reduce",)
    yield from _sets(dense.reshape(-1, stage.tp), within, "tensor")
    if plan.comm.get("context_gather", False):
        yield from _sets(dense.swapaxes(1, 2).reshape(-1, stage.cp), _SHARDED, "context")
    if stage.ep > 1:
        yield from _sets(experts.swapaxes(1, 2).reshape(-1, stage.ep), ("all-to-all",), "experts")
        yield from _sets(experts.reshape(-1, stage.etp), _SHARDED, "tensor of experts")
        yield from _gradients(experts.reshape(len(experts), -1).T, stage, "gradients of experts")
    yield from _gradients(dense.reshape(-1, stage.tp).T, stage, "gradients")


def _gradients(members: np.ndarray, stage: Stage, purpose: str) -> Iterator[RankSet]:
    """Yield the sets that sum gradients, one row of `members` each."""
    count = members.shape[1]
    if not stage.zero:
        yield from _sets(members, ("all-reduce",), purpose)
        return
    shard = count if stage.shard_size is None else min(count, stage.shard_size * stage.cp)
    parts = members.reshape(len(members), -1, shard) if count % shard == 0 else members[:, None]
    yield from _sets(parts.reshape(-1, parts.shape[2]), _SHARDED, purpose)
    yield from _sets(parts.swapaxes(1, 2).reshape(-1, parts.shape[1]), ("all-reduce",), purpose)


def _across_pipelines(plan: Plan) -> Iterator[RankSet]:
    """Yield the sets that sum gradients of the same layers over pipelines.

    Stages of one tensor degree sum part by part; of several, the first ranks of their parts stand for all.
    """
    if len(plan.groups) == 1:
        return
    stages = [stage for group in plan.groups for stage in group.stages]
    bounds = {bound for stage in stages for span in stage.layers for bound in span}
    for layer in sorted(bounds)[:-1]:
        holders = [s for s in stages if any(start <= layer < stop for start, stop in s.layers)]
        degrees = {stage.tp for stage in holders}
        width = degrees.pop() if len(degrees) == 1 else 1
        rows = [np.concatenate([np.array(s.ranks[part :: s.tp]) for s in holders]) for part in range(width)]
        yield from _sets(np.array(rows), ("all-reduce",), "gradients")


def _sets(members: np.ndarray, collectives: tuple[str, ...], purpose: str) -> Iterator[RankSet]:
    if members.shape[1] > 1:
        for row in members.tolist():
            yield RankSet(ranks=tuple(row), collectives=collectives, purpose=purpose)
