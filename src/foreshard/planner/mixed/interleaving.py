"""Pipelines whose devices hold several chunks of layers in turn, from the search for 1f1b ones.

With V chunks a step fills in a V-th of the time: fill / V + passes * bottleneck + tail. That is how a 1f1b
pipeline goes whose stages take a V-th of the time and which gets V times as many micro-batches; so the search
for 1f1b pipelines finds interleaved ones too, in a problem scaled this way.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from foreshard.catalog.offers import offers_of
from foreshard.planner.pricing.engine_times import engine_seconds, predicted, short_bytes
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Arrangement, Problem, Template, pace_of, tail_seconds
from foreshard.planner.solver.solve import Solution, solve
from foreshard.planner.solver.work_bounds import work_bound
from foreshard.spec.plan import Group, Plan

_CHUNKS = (4, 2)
_MOST_DOUBLINGS = 4
_NEAREST = 4
"""Plans whose own stages are cut in chunks."""
_JUDGED = 12
_SCHEDULED = 3
"""Plans of which the exact schedule is asked for."""
_LEAST_S = 0.5
_PART = 0.5
_AIM = 0.003
_HASTE_S = 0.2
_WORTH = 0.01
"""Part of a step that chunks have to save."""


def interleaved_plans(
    request: PlanRequest,
    known: Sequence[tuple[float, Plan]],
    priced: Callable[[int, int], Problem],
    deadline: float,
) -> list[tuple[float, Plan]]:
    """Return interleaved plans that are faster than any plan known by a percent, with their step times.

    The formula knows nothing of chunks of unequal lengths: only plans stay whose exact schedule is shorter as
    well than that of the fastest plan known.

    Parameters
    ----------
    request : PlanRequest
    known : sequence of (float, Plan)
        Plans that fit by step time, the fastest first.
    priced : callable
        Problem of interleaved pipelines: of how many chunks on each device, of at most how many stages.
    deadline : float
        Until when to look further than the pipelines of plans that are known.
    """
    counts = chunk_counts(request)
    if not counts or not known:
        return []
    best_s, best = known[0]
    least_s = min(seconds - _saved_s(request, plan, max(counts)) for seconds, plan in known[:_NEAREST])
    if least_s > best_s * (1.0 - _WORTH):
        return []
    made = [
        (engine_seconds(request, [one])[0], one)
        for _, plan in known[:_NEAREST]
        for one in (interleaved(plan, chunks) for chunks in counts)
        if one is not None and not short_bytes(request, one)
    ]
    # Powers of two divide most batches; micro-batches come in groups of as many as there are stages.
    near = round(math.log2(max(len(group.stages) for group in best.groups)))
    for stages in (2 ** min(max(near + more, 1), _MOST_DOUBLINGS) for more in (0, 1, -1)):
        for chunks in counts:
            left_s = deadline - time.perf_counter()
            if left_s < _LEAST_S:
                break
            beat_s = min([best_s * (1.0 - _WORTH), *(seconds for seconds, _ in made)])
            problem = scaled(priced(chunks, stages), chunks)
            solution = _solved(problem, _PART * left_s, beat_s)
            made += islice(_judged(request, problem, solution.others, chunks), _JUDGED)
    faster = sorted((one for one in made if one[0] < best_s * (1.0 - _WORTH)), key=lambda one: one[0])
    return _also_by_schedule(request, best, faster[:_SCHEDULED]) if faster else []


def _saved_s(request: PlanRequest, plan: Plan, chunks: int) -> float:
    """Return what so many chunks on each device save of the time that a plan fills and drains pipelines."""
    bubble_s = predicted(replace(request, engine="analytical"), plan).time_breakdown_s["bubble"]
    return bubble_s * (1.0 - 1.0 / chunks)


def interleaved_bound(
    request: PlanRequest,
    sets: Sequence[tuple[int, ...]],
    priced: Callable[[tuple[int, ...], int], Problem],
    best_s: float,
    deadline: float,
) -> float:
    """Return a step time that no plan beats whose pipelines of several stages are all interleaved alike.

    Parameters
    ----------
    request : PlanRequest
    sets : sequence of tuple of int
        Node groups that may train together.
    priced : callable
        Problem of interleaved pipelines on some node groups, of how many chunks on each device.
    best_s : float
        Of the best plan; what cannot beat it is not looked at.
    deadline : float
    """
    asks = [(use, chunks) for chunks in chunk_counts(request) for use in sets]
    bound = np.inf
    for i, (use, chunks) in enumerate(asks):
        problem = scaled(priced(use, chunks), chunks)
        least = work_bound(problem)
        if least < best_s and (request.max_devices is None or sum(problem.counts) < request.max_devices):
            left_s = max((deadline - time.perf_counter()) / (len(asks) - i), 0.05)
            least = max(least, _solved(problem, left_s, best_s).lower_bound_s)
        bound = min(bound, least)
    return bound


def _solved(problem: Problem, budget_s: float, beat_s: float) -> Solution:
    """Return the solution of a problem; what ended before its time was ended by the user, and ends all."""
    until = time.perf_counter() + budget_s
    solution = solve(problem, budget_s=budget_s, target_gap=_AIM, beat_s=beat_s)
    if solution.interrupted and time.perf_counter() < until - _HASTE_S:
        raise KeyboardInterrupt
    return solution


def _also_by_schedule(
    request: PlanRequest, best: Plan, faster: Sequence[tuple[float, Plan]]
) -> list[tuple[float, Plan]]:
    """Return the plans whose exact schedule too is shorter than that of the best plan without chunks."""
    exact = replace(request, engine="graph")
    least = predicted(exact, best).step_time_s
    return [one for one in faster if predicted(exact, one[1]).step_time_s < least]


def _judged(
    request: PlanRequest, problem: Problem, arrangements: Sequence[Arrangement], chunks: int
) -> Iterator[tuple[float, Plan]]:
    """Yield interleaved plans of arrangements of a scaled problem that fit, with their step times."""
    for arrangement in arrangements:
        real = in_rounds(problem, arrangement.templates, chunks, request.global_batch)
        plan = None if real is None else plan_of(request, problem, real)
        made = None if plan is None else interleaved(plan, chunks)
        if made is not None and not short_bytes(request, made):
            yield engine_seconds(request, [made])[0], made


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
        time_s=problem.time_s / chunks,
        leave_s=None if problem.leave_s is None else problem.leave_s / chunks,
        hop_s=problem.hop_s / chunks,
    )


def in_rounds(problem: Problem, templates: Sequence[Template], chunks: int, batch: int) -> Arrangement | None:
    """Return pipelines of a scaled problem with samples that interleaving can take, None where it cannot.

    Interleaving takes micro-batches in groups of as many as a pipeline has stages. What is left over goes to
    one pipeline, which then stays at 1f1b.
    """
    paces = [pace_of(problem, one) for one in templates]
    tails = [tail_seconds(problem, one, len(templates)) for one in templates]
    units = [
        len(one) * pace.micro_batch if len(one) > 1 else 1 for one, pace in zip(templates, paces, strict=True)
    ]
    shares, left = [0] * len(templates), batch

    def ends(g: int) -> float:
        return paces[g].seconds(chunks * (shares[g] + units[g])) + tails[g]

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
            (chunks - 1) * pace.fill_s + pace.seconds(chunks * (share + left)) + tail
            for pace, share, tail in zip(paces, shares, tails, strict=True)
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
