"""Samples, micro-batches and cuts of a plan, moved a little at a time while its step gets shorter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from foreshard.planner.pricing.judged import JudgedPlans
from foreshard.spec.plan import Group, Plan

_COARSEST = 32
"""Samples move first in parts of the global batch this small, then in halves of them down to one."""
_LEAST_GAIN = 1e-9
"""Of the step time: a smaller gain is the rounding of sums."""


def balanced(plan: Plan, judged: JudgedPlans, sizes: Sequence[int], deadline: float) -> Plan:
    """Return a plan that no small move makes faster, or the best so far at the deadline.

    The abstract problem prices tails at their best and messages not at all; what a plan loses to that is
    mostly made up by moving samples between its pipelines.

    Parameters
    ----------
    plan : Plan
        Of one chunk of layers a stage.
    judged : JudgedPlans
    sizes : sequence of int, samples
        Micro-batches to choose from.
    deadline : float
        Of `time.perf_counter`.
    """
    grain = max(1, plan.global_batch // _COARSEST)
    while grain:
        better = _first_better(plan, judged, sizes, grain, deadline)
        if time.perf_counter() > deadline:
            return better or plan
        plan, grain = (plan, grain // 2) if better is None else (better, grain)
    return plan


def _first_better(
    plan: Plan, judged: JudgedPlans, sizes: Sequence[int], grain: int, deadline: float
) -> Plan | None:
    limit = judged.seconds(plan) * (1 - _LEAST_GAIN)
    for moved in (*_shares(plan, grain), *_micro_batches(plan, sizes), *_cuts(plan)):
        if time.perf_counter() > deadline:
            return None
        if judged.seconds(moved) < limit:
            return moved
    return None


def _shares(plan: Plan, count: int) -> Iterator[Plan]:
    """Yield the plans in which one pipeline takes so many samples from another."""
    for source, giving in enumerate(plan.groups):
        if giving.share <= count:
            continue
        for target, taking in enumerate(plan.groups):
            if target != source:
                less = _with_group(plan, source, _with_share(giving, giving.share - count))
                yield _with_group(less, target, _with_share(taking, taking.share + count))


def _micro_batches(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans in which one pipeline has another micro-batch."""
    for g, group in enumerate(plan.groups):
        for size in sizes:
            if size <= group.share and size != group.micro_batch:
                yield _with_group(plan, g, replace(group, micro_batch=size))


def _cuts(plan: Plan) -> Iterator[Plan]:
    """Yield the plans in which a layer moves to the neighbouring stage."""
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
