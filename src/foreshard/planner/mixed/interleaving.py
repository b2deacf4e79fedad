"""Pipelines whose devices hold several chunks of layers in turn, found by the search for 1f1b pipelines.

With V chunks a pipeline fills in a V-th of the time: fill / V + passes * bottleneck + tail. A 1f1b pipeline
whose stages take a V-th of the time and which gets V times as many micro-batches takes as long, so the search
for 1f1b pipelines finds interleaved ones in a problem scaled this way.
"""

from __future__ import annotations

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
    """Yield chunks and stages of pipelines to search: as few as hold a good plan, then more, then fewer.

    Micro-batches come in groups of as many as there are stages.
    """
    near = math.ceil(math.log2(max(len(group.stages) for group in plan.groups)))
    for stages in (2 ** min(max(near + more, 1), _MOST_DOUBLINGS) for more in (0, 1, -1)):
        for chunks in chunk_counts(request):
            yield chunks, stages


def plan_in_chunks(request: PlanRequest, problem: Problem, arrangement: Arrangement) -> Plan | None:
    """Return the interleaved plan of an arrangement of a scaled problem, None where there is none."""
    real = in_rounds(problem, arrangement.templates, request.global_batch)
    plain = None if real is None else plan_of(request, problem, real)
    return None if plain is None else interleaved(plain, problem.chunks)


def chunk_counts(request: PlanRequest) -> tuple[int, ...]:
    """Return how many chunks of layers a device may hold; none where the framework does not interleave.

    Layers of one chain go round the devices more than once, which changes the kinds of layers that a device
    has where they are unlike each other: such models stay at 1f1b.
    """
    offers = offers_of(request.framework)
    may = "interleaved" in offers.schedules and "vpp" in offers.degrees
    return _CHUNKS if may and len(request.model.block_kinds()) == 1 else ()


def scaled(problem: Problem, chunks: int) -> Problem:
    """Return the 1f1b problem that interleaved pipelines of a problem are; shares count samples by chunks."""
    return replace(
        problem,
        global_batch=problem.global_batch * chunks,
        grain=problem.grain * chunks,
        time_s=problem.time_s / chunks,
        leave_s=None if problem.leave_s is None else problem.leave_s / chunks,
        hop_s=problem.hop_s / chunks,
        forward_s=None if problem.forward_s is None else problem.forward_s / chunks,
        backward_s=None if problem.backward_s is None else problem.backward_s / chunks,
        chunks=chunks,
    )


def loosest(problems: Mapping[int, Problem]) -> Problem:
    """Return a scaled problem of which no pipeline takes longer than in any, by chunks of layers.

    It fills as fast as with most chunks and takes as long as with those that suit a stage best: its bound
    holds for pipelines of any of these numbers of chunks, at the price of one search: stages work in the
    same order however long that takes, so the least times make no step longer (docs/derivations/step.md).
    """
    some = list(problems.values())
    runs = [np.isfinite(one.time_s) & (one.max_in_flight > 0) for one in some]

    def least(values: Sequence[np.ndarray], otherwise: float = 0.0) -> np.ndarray:
        own = [np.where(able, value, np.inf) for able, value in zip(runs, values, strict=True)]
        found = np.min(own, axis=0)
        return np.where(np.isfinite(found), found, otherwise)

    def stated(name: str) -> list[np.ndarray]:
        return [getattr(one, name) for one in some]

    by_domain = all(one.leave_s is not None for one in some)
    copies = max((one.copies for one in some), key=len)  # the others are their first ones
    tails_s = [one.tail_s[[one.row_of(n) for n in copies]] for one in some]
    if not by_domain:  # any pipeline may be one that leaves its domain
        tails_s = [
            tail if one.leave_tail_s is None else tail + np.minimum(one.leave_tail_s, 0.0)
            for tail, one in zip(tails_s, some, strict=True)
        ]
    loose = replace(
        some[0],
        time_s=least(stated("time_s"), np.inf),
        copies=copies,
        tail_s=least(tails_s),
        hop_s=np.min(stated("hop_s"), axis=0),
        shortest=least(stated("shortest")),
        max_in_flight=np.max(stated("max_in_flight"), axis=0),
        forward_s=None if some[0].forward_s is None else least(stated("forward_s")),
        backward_s=None if some[0].backward_s is None else least(stated("backward_s")),
        leave_s=None,
        leave_tail_s=None,
        domains=(),
    )
    if by_domain:
        loose = replace(
            loose,
            leave_s=least(stated("far_s")) - np.where(np.any(runs, axis=0), loose.time_s, 0.0),
            leave_tail_s=least(stated("leave_tail_s")),
            domains=some[0].domains,
        )
    return scaled(loose, max(problems))


def in_rounds(problem: Problem, templates: Sequence[Template], batch: int) -> Arrangement | None:
    """Return pipelines of a scaled problem with samples that interleaving can take, None where it cannot.

    Interleaving takes micro-batches in groups of as many as a pipeline has stages. Where no such shares make
    the batch, one pipeline takes what is left over, and then stays at 1f1b.
    """
    chunks = problem.chunks
    rates = [pipeline_rate(problem, template) for template in templates]
    tails = [tail_seconds(problem, template, len(templates)) for template in templates]
    own = [
        {
            share: rate.seconds(chunks * share) + tail
            for share in range(1, batch + 1)
            if -(-share * chunks // rate.micro_batch) % rate.together == 0
        }
        for rate, tail in zip(rates, tails, strict=True)
    ]
    found = _earliest(own, batch)
    if found is None:
        plain = [
            replace(rate, fill_s=chunks * rate.fill_s, together=1) if len(one) > 1 else None
            for one, rate in zip(templates, rates, strict=True)
        ]
        mixed = [
            _earliest(
                [
                    *own[:g],
                    {n: rate.seconds(chunks * n) + tails[g] for n in range(1, batch + 1)},
                    *own[g + 1 :],
                ],
                batch,
            )
            for g, rate in enumerate(plain)
            if rate is not None
        ]
        found = min((one for one in mixed if one), default=None)
    return None if found is None else Arrangement(templates=tuple(templates), shares=found[1])


def _earliest(ends_s: Sequence[Mapping[int, float]], total: int) -> tuple[float, tuple[int, ...]] | None:
    """Return the least time by which pipelines process `total` samples, and their shares, None for no such.

    Parameters
    ----------
    ends_s : sequence of dict
        Of each pipeline the shares it may have, with the seconds at which it ends.
    total : int, samples
    """
    times = sorted({seconds for ends in ends_s for seconds in ends.values()})
    first, last = 0, len(times)
    found: tuple[int, ...] | None = None
    while first < last:
        middle = (first + last) // 2
        made = _shares_within(ends_s, total, times[middle])
        if made is None:
            first = middle + 1
        else:
            found, last = made, middle
    return None if found is None else (times[last], found)


def _shares_within(
    ends_s: Sequence[Mapping[int, float]], total: int, seconds: float
) -> tuple[int, ...] | None:
    """Return shares that sum to `total`, each ended in time, None where there are none."""
    within = [[share for share, end_s in ends.items() if end_s <= seconds] for ends in ends_s]
    sums = [1]  # bit n: the pipelines so far can have n samples
    for shares in within:
        made = 0
        for share in shares:
            made |= sums[-1] << share
        sums.append(made & ((2 << total) - 1))
    if not sums[-1] >> total & 1:
        return None
    chosen, left = [], total
    for shares, before in zip(reversed(within), reversed(sums[:-1]), strict=True):
        share = next(n for n in reversed(shares) if n <= left and before >> (left - n) & 1)
        chosen.append(share)
        left -= share
    return tuple(reversed(chosen))


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
