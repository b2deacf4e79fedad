"""Plans near a good one: a sample, a layer, a micro-batch or a recompute rule away, timed by the engine.

Prices of stages take links, neighbours and other pipelines at their best; the engine has them as they are,
so that the best plan by the engine is often a few changes from the best by price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from foreshard.planner.pricing.stage_options import rank_samples, recompute_rules
from foreshard.planner.request import PlanRequest
from foreshard.predict.placement import link_domains
from foreshard.spec.plan import Group, Plan

_TAKERS = 3
"""Pipelines that a sample of the slowest one is offered to: those that end first."""


def near(request: PlanRequest, plan: Plan, ends_s: np.ndarray) -> Iterator[Plan]:
    """Yield the plans of the space one change away: in the slowest pipeline, or samples of it in another.

    Parameters
    ----------
    request : PlanRequest
    plan : Plan
    ends_s : ndarray, shape (pipelines,), seconds
        When each of its pipelines ends a step.
    """
    order = np.argsort(ends_s, kind="stable").tolist()
    slowest = order[-1]
    for taker in order[:_TAKERS]:
        if taker != slowest:
            yield from _samples_moved(plan, slowest, taker)
    domains = link_domains(request.cluster)
    for changed in _of_group(request, plan.groups[slowest]):
        made = _with_groups(plan, {slowest: changed})
        if _is_apart(made, domains):
            yield made


def _samples_moved(plan: Plan, giver: int, taker: int) -> Iterator[Plan]:
    """Yield plans with a sample or a micro-batch of one pipeline in another; of interleaved ones, rounds."""
    pair = plan.groups[giver], plan.groups[taker]
    whole = max(group.micro_batch * (len(group.stages) if group.num_chunks > 1 else 1) for group in pair)
    chunked = any(group.num_chunks > 1 for group in pair)
    for samples in {whole} if chunked else {1, whole}:
        left = pair[0].share - samples
        if left >= pair[0].micro_batch:
            moved = replace(pair[0], share=left), replace(pair[1], share=pair[1].share + samples)
            yield _with_groups(plan, dict(zip((giver, taker), moved, strict=True)))


def _of_group(request: PlanRequest, group: Group) -> Iterator[Group]:
    """Yield a pipeline with another micro-batch, another rule on a stage or on all, or a layer moved."""
    stages = group.stages
    if group.num_chunks == 1 and all(stage.rank_shares is None and stage.cp == 1 for stage in stages):
        fits = [{n * s.inner_dp for n in rank_samples(request, s.inner_dp)} for s in stages]
        for samples in sorted(set.intersection(*fits) - {group.micro_batch}):
            if samples <= group.share:
                yield replace(group, micro_batch=samples)
    for rule in recompute_rules(request):
        yield replace(group, stages=tuple(replace(stage, recompute=rule) for stage in stages))
        for i, stage in enumerate(stages):
            changed = replace(stage, recompute=rule)
            yield replace(group, stages=(*stages[:i], changed, *stages[i + 1 :]))
    if group.num_chunks > 1:
        return
    for i in range(1, len(stages)):
        (start, middle), (_, stop) = stages[i - 1].layers[0], stages[i].layers[0]
        for at in (middle - 1, middle + 1):
            if start < at < stop:
                pair = replace(stages[i - 1], layers=((start, at),)), replace(stages[i], layers=((at, stop),))
                yield replace(group, stages=(*stages[: i - 1], *pair, *stages[i + 1 :]))


def _with_groups(plan: Plan, changed: dict[int, Group]) -> Plan:
    return replace(plan, groups=tuple(changed.get(g, group) for g, group in enumerate(plan.groups)))


def _is_apart(plan: Plan, domains: np.ndarray) -> bool:
    """Return whether stages of the same layers lie in different link domains and are about as wide."""
    for one, other in combinations(plan.groups, 2):
        for mine in one.stages:
            own = set(domains[list(mine.ranks)].tolist())
            for theirs in other.stages:
                shared = mine.layers[0][0] < theirs.layers[0][1] and theirs.layers[0][0] < mine.layers[0][1]
                if shared and (
                    own & set(domains[list(theirs.ranks)].tolist())
                    or not 0.5 <= mine.inner_dp / theirs.inner_dp <= 2.0
                ):
                    return False
    return True
