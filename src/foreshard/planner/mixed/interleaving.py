"""Pipelines whose devices hold several chunks of layers in turn, found by the search for 1f1b pipelines.

With V chunks a pipeline fills in a V-th of the time: fill / V + passes * bottleneck + tail. A 1f1b pipeline
whose stages take a V-th of the time and which gets V times as many micro-batches takes as long, so the search
for 1f1b pipelines finds interleaved ones in a problem scaled this way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from foreshard.catalog.offers import offers_of
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Arrangement, Problem, Template, pipeline_rate, tail_seconds
from foreshard.spec.plan import Group, Plan

_CHUNKS = (4, 2)
"""Chunks of layers on each device: with more, messages take longer than the shorter filling saves."""
_MOST_DOUBLINGS = 4
"""Depths that are searched are powers of two up to 16 stages, which divide most batches."""


def depths(request: PlanRequest, plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield chunks and stages of pipelines to search, the likeliest first: near those of a good 1f1b plan.

    Micro-batches come in groups of as many as there are stages.
    """
    near = round(math.log2(max(len(group.stages) for group in plan.groups)))
    for stages in (2 ** min(max(near + more, 1), _MOST_DOUBLINGS) for more in (0, 1, -1)):
        for chunks in chunk_counts(request):
            yield chunks, stages


def plan_in_chunks(
    request: PlanRequest, problem: Problem, arrangement: Arrangement, chunks: int
) -> Plan | None:
    """Return the interleaved plan of an arrangement of a scaled problem, None where there is none."""
    real = in_rounds(problem, arrangement.templates, chunks, request.global_batch)
    plain = None if real is None else plan_of(request, problem, real)
    return None if plain is None else interleaved(plain, chunks)


def chunk_counts(request: PlanRequest) -> tuple[int, ...]:
    """Return how many chunks of layers a device may hold; none where the framework does not interleave.

    Layers of one chain go round the devices more than once, which changes the kinds of layers that a device
    has where they are unlike each other: such models stay at 1f1b.
    """
    offers = offers_of(request.framework)
    may = "interleaved" in offers.schedules and "vpp" in offers.degrees
    return _CHUNKS if may and len(request.model.block_kinds()) == 1 else ()


def scaled(problem: Problem, chunks: int, stages: int = 0) -> Problem:
    """Return the 1f1b problem that interleaved pipelines of a problem are; shares count samples by chunks.

    With `stages`, samples come in rounds of as many micro-batches, which is exact for pipelines so long.
    """
    return replace(
        problem,
        global_batch=problem.global_batch * chunks,
        grain=np.maximum(problem.grain, problem.micro_batch * stages * chunks),
        time_s=problem.time_s / chunks,
        leave_s=None if problem.leave_s is None else problem.leave_s / chunks,
        hop_s=problem.hop_s / chunks,
    )


def loosest(problems: Mapping[int, Problem]) -> Problem:
    """Return a scaled problem of which no pipeline takes longer than in any, by chunks of layers.

    It fills as fast as with most chunks and takes as long as with those that suit a stage best: its bound
    holds for pipelines of any of these numbers of chunks, at the price of one search.
    """
    some = list(problems.values())

    def least(name: str) -> np.ndarray:
        return np.asarray(np.min([getattr(one, name) for one in some], axis=0))

    loose = replace(
        some[0],
        time_s=least("time_s"),
        tail_s=least("tail_s"),
        hop_s=least("hop_s"),
        shortest=least("shortest"),
        grain=least("grain"),
        max_in_flight=np.max([one.max_in_flight for one in some], axis=0),
        leave_s=None,
        leave_tail_s=None,
        domains=(),
    )
    if all(one.leave_s is not None for one in some):
        loose = replace(
            loose,
            leave_s=least("far_s") - loose.time_s,
            leave_tail_s=least("leave_tail_s"),
            domains=some[0].domains,
        )
    return scaled(loose, max(problems))


def in_rounds(
    problem: Problem,
    templates: Sequence[Template],
    chunks: int,
    batch: int,
) -> Arrangement | None:
    """Return pipelines of a scaled problem with samples that interleaving can take, None where it cannot.

    Interleaving takes micro-batches in groups of as many as a pipeline has stages. What is left over goes to
    one pipeline, which then stays at 1f1b.
    """
    rates = [pipeline_rate(problem, template) for template in templates]
    tails = [tail_seconds(problem, template, len(templates)) for template in templates]
    units = [
        len(one) * rate.micro_batch if len(one) > 1 else 1 for one, rate in zip(templates, rates, strict=True)
    ]
    shares, left = [0] * len(templates), batch

    def ends(g: int) -> float:
        return rates[g].seconds(chunks * (shares[g] + units[g])) + tails[g]

    heap = [(ends(g), g) for g in range(len(templates))]
    heapq.heapify(heap)
    while heap and left:
        _, g = heapq.heappop(heap)
        if units[g] <= left:
            shares[g] += units[g]
            left -= units[g]
            heapq.heappush(heap, (ends(g), g))
    if left:
        plain = [
            (chunks - 1) * rate.fill_s + rate.seconds(chunks * (share + left)) + tail
            for rate, share, tail in zip(rates, shares, tails, strict=True)
        ]
        shares[int(np.argmin(plain))] += left
    return Arrangement(templates=tuple(templates), shares=tuple(shares)) if min(shares) > 0 else None


def interleaved(plan: Plan, chunks: int) -> Plan | None:
    """Return a plan with so many chunks of layers on each device where that can be, None if nowhere."""
    groups = tuple(_in_chunks(group, chunks) for group in plan.groups)
    return None if groups == plan.groups else replace(plan, groups=groups)


def _in_chunks(group: Group, chunks: int) -> Group:
    """Return a group whose stages hold as many layers as before, in chunks; itself where they cannot."""
    stages = group.stages
    sizes = [stage.num_layers for stage in stages]
    if len(stages) < 2 or group.num_micro_batches % len(stages) or min(sizes) < chunks:
        return group
    spans: list[list[tuple[int, int]]] = [[] for _ in stages]
    at = 0
    for chunk in range(chunks):
        for own, size in zip(spans, sizes, strict=True):
            stop = at + size // chunks + (chunk < size % chunks)
            own.append((at, stop))
            at = stop
    made = tuple(replace(one, layers=tuple(own)) for one, own in zip(stages, spans, strict=True))
    return replace(group, schedule="interleaved", stages=made)
