"""The exact schedule as judge of measured plans, and what is moved in them while a step gets shorter."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.engine import step_seconds
from foreshard.predict.measured.memory import measured_memory
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage

_WORTH_BALANCING = 1.5
"""A plan with a device moved is balanced first if it takes no more than so many times as long."""


class ScheduleTimer:
    """Times plans by the exact schedule, and moves one thing at a time while a step gets shorter.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
    sizes : sequence of int
        Micro-batches to choose from.
    blocks : sequence of ranks
        What may be a stage.
    deadline : float
        Of `time.perf_counter`.
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        cluster: Cluster,
        sizes: Sequence[int],
        blocks: Sequence[tuple[int, ...]],
        deadline: float,
    ):
        self._costs, self._cluster, self._sizes, self._deadline = costs, cluster, sizes, deadline
        self._blocks = blocks
        self._seen: dict[tuple[Group, ...], float] = {}

    @property
    def evaluated(self) -> int:
        """Plans timed."""
        return len(self._seen)

    def seconds(self, plan: Plan) -> float:
        """Return the step's time, inf where it does not fit."""
        if plan.groups not in self._seen:
            fits = measured_memory(self._costs, self._cluster, plan).fits
            self._seen[plan.groups] = step_seconds(self._costs, self._cluster, plan) if fits else math.inf
        return self._seen[plan.groups]

    def refined(self, plan: Plan) -> Plan:
        """Return a plan that no move of samples, micro-batch, layer or device makes faster."""
        plan = self._balanced(plan)
        improved = True
        while improved and time.perf_counter() < self._deadline:
            improved = False
            for made in self._changed(plan):
                if self.seconds(made) < self.seconds(plan) * _WORTH_BALANCING:
                    better = self._balanced(made)
                    if self.seconds(better) < self.seconds(plan) * (1 - 1e-9):
                        plan, improved = better, True
                        break
        return plan

    def _changed(self, plan: Plan) -> Iterator[Plan]:
        yield from _without_group(plan)
        yield from _joined(plan)
        yield from _shortened(plan)
        yield from _enlisted(plan, self._blocks)
        yield from _swapped(plan, self._blocks)

    def _balanced(self, plan: Plan) -> Plan:
        grain = max(1, plan.global_batch // 32)
        while grain and time.perf_counter() < self._deadline:
            better = self._first_better(plan, grain)
            plan, grain = (better, grain) if better is not None else (plan, grain // 2)
        return plan

    def _first_better(self, plan: Plan, grain: int) -> Plan | None:
        for moved in (*_shares(plan, grain), *_batches(plan, self._sizes), *_cuts(plan)):
            if time.perf_counter() > self._deadline:
                return None
            if self.seconds(moved) < self.seconds(plan) * (1 - 1e-9):
                return moved
        return None


def _without_group(plan: Plan) -> Iterator[Plan]:
    """Return the plans in which one group is idle and another does its samples."""
    for gone, group in enumerate(plan.groups):
        for heir in range(len(plan.groups)):
            if heir != gone:
                groups = list(plan.groups)
                groups[heir] = _with_share(groups[heir], groups[heir].share + group.share)
                del groups[gone]
                yield replace(plan, groups=tuple(groups))


def _joined(plan: Plan) -> Iterator[Plan]:
    """Return the plans in which the devices of a group of one stage become a stage of another group."""
    for gone, group in enumerate(plan.groups):
        if len(group.stages) > 1:
            continue
        for heir, other in enumerate(plan.groups):
            if heir == gone:
                continue
            for stages in _lengthened(other, group.stages[0]):
                groups = list(plan.groups)
                groups[heir] = _with_share(replace(other, stages=stages), other.share + group.share)
                del groups[gone]
                yield replace(plan, groups=tuple(groups))


def _enlisted(plan: Plan, blocks: Sequence[tuple[int, ...]]) -> Iterator[Plan]:
    """Return the plans in which idle devices become a stage of a group, or take half of its samples."""
    last = plan.groups[0].stages[-1].layers[0][1]
    for ranks in blocks:
        if set(ranks) & set(plan.ranks) or not _one_degree(plan, ranks):
            continue
        alone = Stage(ranks=ranks, tp=len(ranks), layers=((0, last),), zero=0)
        for g, group in enumerate(plan.groups):
            for stages in _lengthened(group, alone):
                yield _with_group(plan, g, replace(group, stages=stages))
            if group.share > 1:
                part = _with_share(replace(group, stages=(alone,)), group.share // 2)
                kept = _with_group(plan, g, _with_share(group, group.share - part.share))
                yield replace(kept, groups=(*kept.groups, part))


def _swapped(plan: Plan, blocks: Sequence[tuple[int, ...]]) -> Iterator[Plan]:
    """Return the plans in which other devices run a stage, idle ones or with its own among them."""
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            others = set(plan.ranks) - set(stage.ranks)
            for ranks in blocks:
                if ranks != stage.ranks and not others & set(ranks) and _one_degree(plan, ranks):
                    made = replace(stage, ranks=ranks, tp=len(ranks))
                    stages = (*group.stages[:s], made, *group.stages[s + 1 :])
                    yield _with_group(plan, g, replace(group, stages=stages))


def _one_degree(plan: Plan, ranks: tuple[int, ...]) -> bool:
    """Return whether a plan with a stage of these ranks has one tp above 1, as measured costs take it."""
    degrees = {stage.tp for group in plan.groups for stage in group.stages} - {1}
    return len(ranks) == 1 or degrees <= {len(ranks)}


def _shortened(plan: Plan) -> Iterator[Plan]:
    """Return the plans in which a stage's devices are idle and a neighbour runs its layers."""
    for g, group in enumerate(plan.groups):
        for s in range(len(group.stages) - 1):
            before, after = group.stages[s : s + 2]
            span = ((before.layers[0][0], after.layers[0][1]),)
            for kept in (before, after):
                stages = (*group.stages[:s], replace(kept, layers=span), *group.stages[s + 2 :])
                yield _with_group(plan, g, replace(group, stages=stages))


def _lengthened(group: Group, new: Stage) -> Iterator[tuple[Stage, ...]]:
    """Return the stages of a group with one more at either end, which takes 1, 2, 4, ... layers."""
    first, last = group.stages[0], group.stages[-1]
    (start, stop), (begin, end) = first.layers[0], last.layers[0]
    count = 1
    while count < max(stop - start, end - begin):
        if count < stop - start:
            added = replace(new, layers=((start, start + count),))
            yield (added, replace(first, layers=((start + count, stop),)), *group.stages[1:])
        if count < end - begin:
            added = replace(new, layers=((end - count, end),))
            yield (*group.stages[:-1], replace(last, layers=((begin, end - count),)), added)
        count *= 2


def _shares(plan: Plan, count: int) -> Iterator[Plan]:
    for source, one in enumerate(plan.groups):
        if one.share <= count:
            continue
        for target, other in enumerate(plan.groups):
            if target != source:
                groups = list(plan.groups)
                groups[source] = _with_share(one, one.share - count)
                groups[target] = _with_share(other, other.share + count)
                yield replace(plan, groups=tuple(groups))


def _batches(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    for g, group in enumerate(plan.groups):
        for size in sizes:
            if size <= group.share and size != group.micro_batch:
                yield _with_group(plan, g, replace(group, micro_batch=size))


def _cuts(plan: Plan) -> Iterator[Plan]:
    for g, group in enumerate(plan.groups):
        for s in range(len(group.stages) - 1):
            (lo, cut), (_, hi) = group.stages[s].layers[0], group.stages[s + 1].layers[0]
            for new in (cut - 1, cut + 1):
                if lo < new < hi:
                    stages = list(group.stages)
                    stages[s] = replace(stages[s], layers=((lo, new),))
                    stages[s + 1] = replace(stages[s + 1], layers=((new, hi),))
                    yield _with_group(plan, g, replace(group, stages=tuple(stages)))


def _with_group(plan: Plan, place: int, group: Group) -> Plan:
    return replace(plan, groups=(*plan.groups[:place], group, *plan.groups[place + 1 :]))


def _with_share(group: Group, share: int) -> Group:
    return replace(group, share=share, micro_batch=min(group.micro_batch, share))
