"""Repairs a plan after ranks are lost, by simple rules that need no search.

Layers of a lost stage go to its neighbours, in proportion to the layers that these hold; a pipeline without
ranks is dropped; samples follow the ranks that remain. A planner or controller may improve the plan later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from foreshard.errors import InfeasibleError
from foreshard.spec.plan import Group, Plan, Stage


def repaired(plan: Plan, alive: Collection[int], *, few: bool = False) -> Plan:
    """Return the plan on the ranks of it that are alive, else on idle ones; the plan itself if all are.

    It is infeasible when no rank of the plan is left and too few others are for its seats, unless a
    `few` are to train.
    """
    there, plan = frozenset(alive), taken_over(plan, alive, few=few)
    if there.issuperset(plan.ranks):
        return plan
    groups, weights = [], []
    for group in plan.groups:
        left = _group_left(group, there)
        if left is not None:
            groups.append(left)
            before = sum(len(stage.ranks) for stage in group.stages)
            weights.append(group.share * sum(len(stage.ranks) for stage in left.stages) / before)
    if not groups:
        raise InfeasibleError(
            "no rank of the plan is left",
            key="ranks",
            rule="Training needs at least one rank",
            fix="Start ranks again; training continues from the latest checkpoint",
        )
    shares = _shares(plan.global_batch, weights)
    kept = [replace(group, share=share) for group, share in zip(groups, shares, strict=True) if share]
    return replace(plan, groups=tuple(map(_schedulable, kept)))


def taken_over(plan: Plan, alive: Collection[int], *, few: bool = False) -> Plan:
    """Return the plan with idle ranks in its seats if none of its ranks is left and these are enough.

    A `few` take as many seats as they are, and the others stay with ranks that are gone.

    Examples
    --------
    >>> from foreshard.spec.plan_file import parse_plan
    >>> stage = {"ranks": [0], "layers": [[0, 2]]}
    >>> groups = [{"share": 4, "micro_batch": 2, "stages": [stage]}]
    >>> plan = parse_plan({"global_batch": 4, "seq_len": 1, "groups": groups})
    >>> taken_over(plan, [3, 4]).ranks, taken_over(plan, [0, 3]).ranks
    ((3,), (0,))
    """
    idle = sorted(alive)
    if not frozenset(plan.ranks).isdisjoint(idle) or (len(idle) < len(plan.ranks) and not few):
        return plan
    to = dict(zip(sorted(plan.ranks), idle, strict=False))
    groups = [
        replace(
            group,
            stages=tuple(replace(s, ranks=tuple(to.get(r, r) for r in s.ranks)) for s in group.stages),
        )
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups))


def _group_left(group: Group, alive: frozenset[int]) -> Group | None:
    found = {i: _stage_left(stage, alive) for i, stage in enumerate(group.stages)}
    stages = {i: stage for i, stage in found.items() if stage is not None}
    there = sorted(stages)
    if not there:
        return None
    if len(there) < len(group.stages) and group.num_chunks > 1:
        # the neighbours of a lost stage's interleaved chunks are different stages
        group = replace(group, schedule="1f1b")
        layers = _even_layers(group, len(there))
    else:
        layers = _layers_left(group.stages, there)
    left = [replace(stages[i], layers=layers[n]) for n, i in enumerate(there)]
    return replace(group, stages=tuple(_rescaled(stage, group.micro_batch) for stage in left))


def _schedulable(group: Group) -> Group:
    """Return the group without interleaving if its stages no longer divide its micro-batches."""
    count = len(group.stages)
    if group.num_chunks == 1 or (count > 1 and group.num_micro_batches % count == 0):
        return group
    layers = _even_layers(group, count)
    stages = [replace(stage, layers=own) for stage, own in zip(group.stages, layers, strict=True)]
    return replace(group, schedule="1f1b", stages=tuple(stages))


def _stage_left(stage: Stage, alive: frozenset[int]) -> Stage | None:
    rows = [stage.ranks[lo : lo + stage.tp] for lo in range(0, len(stage.ranks), stage.tp)]
    kept = [place for place, row in enumerate(rows) if alive.issuperset(row)]
    if not kept:
        return _narrower(stage, [rank for rank in stage.ranks if rank in alive])
    shares = None if stage.rank_shares is None else tuple(stage.rank_shares[place] for place in kept)
    ranks = tuple(rank for place in kept for rank in rows[place])
    size = None if stage.shard_size is None else min(stage.shard_size, len(kept))
    return replace(stage, ranks=ranks, rank_shares=shares, shard_size=size)


def _narrower(stage: Stage, there: Sequence[int]) -> Stage | None:
    """Return one tensor-parallel row of a lower degree, where no row of the stage is complete."""
    if not there:
        return None
    degree = max(d for d in range(1, len(there) + 1) if stage.tp % d == 0)
    size = None if stage.shard_size is None else 1
    return replace(stage, ranks=tuple(there[:degree]), tp=degree, rank_shares=None, shard_size=size)


def _rescaled(stage: Stage, micro_batch: int) -> Stage:
    if stage.rank_shares is None or sum(stage.rank_shares) == micro_batch:
        return stage
    weights = stage.rank_shares if any(stage.rank_shares) else (1,) * stage.inner_dp
    return replace(stage, rank_shares=tuple(_shares(micro_batch, weights)))


def _layers_left(stages: Sequence[Stage], there: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Return the layers of the stages left: a gap is split between its neighbours by their layers."""
    if len(there) == len(stages):
        return [stage.layers for stage in stages]
    first, last = stages[0].layers[0][0], stages[-1].layers[-1][1]
    bounds = [first]
    for a, b in pairwise(there):
        low, high = stages[a].layers[-1][1], stages[b].layers[0][0]
        mine, theirs = stages[a].num_layers, stages[b].num_layers
        bounds.append(low + round((high - low) * mine / (mine + theirs)))
    bounds.append(last)
    return [((lo, hi),) for lo, hi in pairwise(bounds)]


def _even_layers(group: Group, count: int) -> list[tuple[tuple[int, int], ...]]:
    bounds = [group.num_layers * n // count for n in range(count + 1)]
    return [((lo, hi),) for lo, hi in pairwise(bounds)]


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers in proportion to weights that sum to the total (largest remainders)."""
    scale = total / sum(weights)
    shares = [int(weight * scale) for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - weights[i] * scale, i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares
