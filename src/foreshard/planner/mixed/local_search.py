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


class LocalSearch:
    """A search around one 1f1b plan, best first, which may be taken up again.

    Parameters
    ----------
    request : PlanRequest
    plan : Plan
    seconds : float
        Its step time by the analytical engine.
    """

    def __init__(self, request: PlanRequest, plan: Plan, seconds: float) -> None:
        self.request, self.plan, self.seconds = request, plan, seconds
        self._order = count()
        self._ahead = [(seconds, next(self._order), plan.groups)]
        self._seen = {plan.groups}
        self._changes: Iterator[tuple[Group, ...]] = iter(())
        self._fruitless = 0

    @property
    def is_done(self) -> bool:
        """Return whether changes of the last few plans made none faster."""
        return self._fruitless > _PATIENCE

    def advance(self, budget: TimeBudget) -> bool:
        """Try changes of one plan after the other until time is up; return whether a faster one was found."""
        before_s = self.seconds
        while not (self.is_done or budget.is_over):
            groups = next(self._changes, None)
            if groups is None:
                self._turn()
            elif groups not in self._seen:
                self._seen.add(groups)
                self._try(groups)
        return self.seconds < before_s

    def _turn(self) -> None:
        """Turn to the fastest plan whose changes were not tried."""
        self._fruitless += 1
        if not self._ahead:
            self._fruitless = _PATIENCE + 1
            return
        groups = heapq.heappop(self._ahead)[2]
        self._changes = _changes(self.request, groups)

    def _try(self, groups: tuple[Group, ...]) -> None:
        """Time a changed plan; if it is the fastest, its changes come next."""
        made = replace(self.plan, groups=groups)
        if missing_bytes(self.request, made):
            return
        seconds = engine_seconds(self.request, [made])[0]
        heapq.heappush(self._ahead, (seconds, next(self._order), groups))
        if seconds < self.seconds * (1.0 - _FASTER):
            self.plan, self.seconds = made, seconds
            self._fruitless = 0
            self._turn()


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
    """Yield the group with another recompute rule in one stage, and in all."""
    for rule in recompute_rules(request):
        alike = tuple(replace(stage, recompute=rule) for stage in group.stages)
        if alike != group.stages:
            yield replace(group, stages=alike)
        for i, stage in enumerate(group.stages):
            if stage.recompute != rule and len(group.stages) > 1:
                yield replace(group, stages=(*group.stages[:i], alike[i], *group.stages[i + 1 :]))
