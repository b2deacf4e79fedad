"""Plans a change away from a known one, as long as the engine says that they are faster.

The problem prices stages alone; what pipelines do to each other only the engine knows. A sample, a layer, a
micro-batch or a recompute rule more here and less there makes up for it.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count, islice, permutations, product
from math import lcm
from operator import itemgetter

from foreshard.planner.mixed.interleaving import interleaved
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes
from foreshard.planner.pricing.stage_options import rank_samples, recompute_rules, samples_in_chunks
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.spec.plan import Group, Plan

_FASTER = 1e-6
"""Part of a step by which a change has to shorten it."""
_PATIENCE = 6
"""Plans whose changes are tried in vain before the search ends: two changes at once may be needed."""
AT_ONCE = 8
"""Changes that are priced together, of which the fastest comes first."""
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
    ahead = [(seconds, next(order), plan)]
    seen = {plan.groups}
    while ahead and fruitless < _PATIENCE:
        _, _, start = heapq.heappop(ahead)
        if start is not plan and missing_bytes(request, start):
            continue
        fruitless += 1
        changes = _unseen(_changes(request, start.groups), seen)
        while not budget.is_over and (some := list(islice(changes, AT_ONCE))):
            made = [replace(plan, groups=groups) for groups in some]
            timed = list(zip(engine_seconds(request, made), made, strict=True))
            for made_s, one in timed:
                heapq.heappush(ahead, (made_s, next(order), one))
            faster = [pair for pair in timed if pair[0] < seconds * (1.0 - _FASTER)]
            fits = (pair for pair in sorted(faster, key=itemgetter(0)) if not missing_bytes(request, pair[1]))
            if found := next(fits, None):
                (seconds, plan), fruitless = found, 0
                break
        if budget.is_over:
            break
    return plan, seconds


def _unseen(
    changes: Iterable[tuple[Group, ...]], seen: set[tuple[Group, ...]]
) -> Iterator[tuple[Group, ...]]:
    for groups in changes:
        if groups not in seen:
            seen.add(groups)
            yield groups


def changed_in_chunks(request: PlanRequest, plan: Plan, chunks: int) -> Iterator[Plan]:
    """Yield plans with so many chunks on each device, a cut, a micro-batch or a rule from a known one.

    Where samples go from pipeline to pipeline is left to :mod:`foreshard.planner.mixed.chunk_layout`.
    """
    row = in_a_row(plan).groups
    several, sizes = sum(len(group.stages) > 1 for group in row), samples_in_chunks(request)
    for groups in (row, *_other_groups(_alike(request, row), request, row)):
        made = interleaved(replace(plan, groups=groups), chunks)
        if made is None or sum(group.num_chunks > 1 for group in made.groups) < several:
            continue
        if all(group.micro_batch // group.stages[0].inner_dp in sizes for group in made.groups):
            yield made


def in_a_row(plan: Plan) -> Plan:
    """Return a 1f1b plan whose stages hold as many layers as before, in one chunk."""
    return replace(plan, groups=tuple(_in_a_row(group) for group in plan.groups))


def _in_a_row(group: Group) -> Group:
    ends = list(accumulate(stage.num_layers for stage in group.stages))
    spans = zip([0, *ends[:-1]], ends, strict=True)
    stages = (replace(one, layers=(span,)) for one, span in zip(group.stages, spans, strict=True))
    return replace(group, stages=tuple(stages), schedule="1f1b")


def _changes(request: PlanRequest, groups: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
    """Yield groups that differ in samples, a cut, a micro-batch or a rule, what helps most often first.

    Groups that are alike change together, since the step waits for the slowest; then one of them alone.
    """
    alike = _alike(request, groups)
    for givers, takers in permutations(alike, 2):
        each = lcm(len(givers), len(takers))
        yield from _moved(groups, givers, takers, (each // len(givers), each // len(takers)))
    for givers, takers in product(alike, repeat=2):
        taker = [g for g in takers if g != givers[-1]][:1]
        if taker and not len(givers) == len(takers) == 1:
            yield from _moved(groups, givers[-1:], taker, (1, 1))
    yield from _other_groups(alike, request, groups)


def _other_groups(
    alike: Sequence[Sequence[int]], request: PlanRequest, groups: tuple[Group, ...]
) -> Iterator[tuple[Group, ...]]:
    """Yield groups of which those alike, or one of them, differ in a cut, a micro-batch or a rule."""
    for members in alike:
        first = groups[members[0]]
        for made in (*_other_cuts(first), *_other_sizes(request, first), *_other_rules(request, first)):
            for chosen in (members, members[:1]) if len(members) > 1 else (members,):
                changed = list(groups)
                for g in chosen:
                    stages = zip(made.stages, groups[g].stages, strict=True)
                    own = tuple(replace(new, ranks=stage.ranks) for new, stage in stages)
                    changed[g] = replace(made, stages=own)
                if _widths_agree(changed):
                    yield tuple(changed)


def _alike(request: PlanRequest, groups: tuple[Group, ...]) -> list[list[int]]:
    """Return the places of groups that differ only in which ranks of the same kind of nodes they have."""
    cluster = request.cluster
    ends = list(accumulate(nodes.num_devices for nodes in cluster.nodes))
    found: dict[Hashable, list[int]] = {}
    for g, group in enumerate(groups):
        places = [
            (bisect(ends, s.ranks[0]), cluster.node_of(s.ranks[-1]) - cluster.node_of(s.ranks[0]))
            for s in group.stages
        ]
        bare = replace(group, stages=tuple(replace(s, ranks=(len(s.ranks),)) for s in group.stages))
        found.setdefault((bare, tuple(places)), []).append(g)
    return list(found.values())


def _moved(
    groups: tuple[Group, ...], givers: Sequence[int], takers: Sequence[int], samples: tuple[int, int]
) -> Iterator[tuple[Group, ...]]:
    """Yield groups of which each giver gives, and each taker takes, so many samples, or a part of a share."""
    given, taken = samples
    first = groups[givers[0]]
    for times in sorted({1, first.share // _PART // given}, reverse=True):
        if 0 < times * given <= first.share - first.micro_batch:
            moved = list(groups)
            for g in givers:
                moved[g] = replace(groups[g], share=groups[g].share - times * given)
            for g in takers:
                moved[g] = replace(groups[g], share=groups[g].share + times * taken)
            yield tuple(moved)


def _widths_agree(groups: Sequence[Group]) -> bool:
    """Return whether stages of the same layers have at most twice each other's inner data-parallel ranks."""
    spans = {(*stage.layers[0], stage.inner_dp) for group in groups for stage in group.stages}
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
    alone = len(group.stages) == 1
    sizes = [width * n for n in rank_samples(request, width, alone=alone)]
    if group.micro_batch in sizes:
        at = sizes.index(group.micro_batch)
        for size in (*sizes[max(at - 1, 0) : at], *sizes[at + 1 : at + 2]):
            if alone or size <= group.share:
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
