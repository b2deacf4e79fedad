"""Plans a change away from a known one, as long as the engine says that they are faster.

The problem prices stages alone; what pipelines do to each other only the engine knows. A sample, a layer, a
micro-batch or a recompute rule more here and less there makes up for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, count, permutations

from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes
from foreshard.planner.pricing.stage_options import rank_samples, recompute_rules
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.spec.plan import Group, Plan

_FASTER = 1e-6
"""Part of a step by which a change has to shorten it."""
_PATIENCE = 6
"""Plans whose changes are tried in vain before the search ends: two changes at once may be needed."""
_PART = 16
"""Part of a share that moves at once, beside single samples."""


def improved(request: PlanRequest, plan: Plan, seconds: float, budget: TimeBudget) -> tuple[Plan, float]:
    """Return the fastest plan found by changes of a 1f1b plan and of their results, and its step time.

    The changes of the fastest plan come first; the search ends when those of a few plans are in vain.

    Parameters
    ----------
    request : PlanRequest
    plan : Plan
    seconds : float
        Its step time by the analytical engine.
    budget : TimeBudget
    """
    order, fruitless = count(), 0
    ahead = [(seconds, next(order), plan.groups)]
    seen = {plan.groups}
    while ahead and fruitless < _PATIENCE:
        fruitless += 1
        for groups in _changes(request, heapq.heappop(ahead)[2]):
            if budget.is_over:
                return plan, seconds
            if groups in seen:
                continue
            seen.add(groups)
            made = replace(plan, groups=groups)
            if missing_bytes(request, made):
                continue
            made_s = engine_seconds(request, [made])[0]
            heapq.heappush(ahead, (made_s, next(order), groups))
            if made_s < seconds * (1.0 - _FASTER):
                plan, seconds, fruitless = made, made_s, 0
                break
    return plan, seconds


def _changes(request: PlanRequest, groups: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
    """Yield groups that differ in samples, a cut, a micro-batch or a rule, what helps most often first."""
    for g, group in enumerate(groups):
        for other in range(len(groups)):
            for more in sorted({1, group.share // _PART}, reverse=True):
                if other != g and 0 < more <= group.share - group.micro_batch:
                    moved = list(groups)
                    moved[g] = replace(group, share=group.share - more)
                    moved[other] = replace(groups[other], share=groups[other].share + more)
                    yield tuple(moved)
    for g, group in enumerate(groups):
        for made in (*_other_cuts(group), *_other_sizes(request, group), *_other_rules(request, group)):
            changed = (*groups[:g], made, *groups[g + 1 :])
            if _widths_agree(changed):
                yield changed


def _widths_agree(groups: tuple[Group, ...]) -> bool:
    """Return whether stages of the same layers have at most twice each other's inner data-parallel ranks."""
    spans = [(*stage.layers[0], stage.inner_dp) for group in groups for stage in group.stages]
    return not any(
        wide > 2 * narrow and start < end and begin < stop
        for start, stop, wide in spans
        for begin, end, narrow in spans
    )


def _other_cuts(group: Group) -> Iterator[Group]:
    """Yield the group with a layer less on one stage and one more on another; those between move along."""
    sizes = [stage.num_layers for stage in group.stages]
    places = range(len(sizes))
    for giver, taker in sorted(permutations(places, 2), key=lambda pair: abs(pair[0] - pair[1])):
        if sizes[giver] > 1:
            more = [size - (i == giver) + (i == taker) for i, size in enumerate(sizes)]
            ends = list(accumulate(more))
            spans = zip([0, *ends[:-1]], ends, strict=True)
            stages = zip(group.stages, spans, strict=True)
            yield replace(group, stages=tuple(replace(stage, layers=(span,)) for stage, span in stages))


def _other_sizes(request: PlanRequest, group: Group) -> Iterator[Group]:
    """Yield the group with the next smaller and larger micro-batch of the space."""
    width = group.stages[0].inner_dp
    sizes = [width * n for n in rank_samples(request, width)]
    if group.micro_batch in sizes:
        at = sizes.index(group.micro_batch)
        for size in (*sizes[max(at - 1, 0) : at], *sizes[at + 1 : at + 2]):
            if size <= group.share:
                yield replace(group, micro_batch=size)


def _other_rules(request: PlanRequest, group: Group) -> Iterator[Group]:
    """Yield the group with another recompute rule in one stage that has blocks, and in all."""
    blocks = range(1, request.model.num_layers + 1)
    for rule in recompute_rules(request):
        alike = tuple(replace(stage, recompute=rule) for stage in group.stages)
        if alike != group.stages:
            yield replace(group, stages=alike)
        for i, stage in enumerate(group.stages):
            (start, stop), *_ = stage.layers
            has_block = start < blocks.stop and blocks.start < stop
            if has_block and stage.recompute != rule and len(group.stages) > 1:
                yield replace(group, stages=(*group.stages[:i], alike[i], *group.stages[i + 1 :]))
