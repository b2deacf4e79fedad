"""Plans for devices of several kinds: pipelines of their own cuts and degrees, with shares to match."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.mixed.found import MixedFound
from foreshard.planner.mixed.infeasible import nothing_fits
from foreshard.planner.mixed.loading import HASTE, is_hasty
from foreshard.planner.mixed.node_sets import capped, node_sets
from foreshard.planner.mixed.phases import (
    QUICK,
    is_closed,
    offer_published,
    rivals,
    search_again,
    search_apart,
    search_interleaved,
    search_one_domain,
    search_roomier,
    search_set,
)
from foreshard.planner.pricing.engine_times import predicted
from foreshard.planner.pricing.stage_options import MOST_JOINED
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.ranking import front_of, ranked
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult
from foreshard.planner.solver.work_bounds import work_bound
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

SPACE = (
    "pipelines beside each other, each of at most 16 stages cut anywhere; stages of devices of one node "
    "group, inside a link domain or of whole ones, with tp within a node, up to 8 inner data-parallel "
    "ranks, 1, 2 or 4 samples a rank, sequences whole or one split over a power of two of ranks (cp) that "
    "leaves each 8192 tokens or more, experts whole on each rank or cut over the most that "
    "divide both, three recompute rules; on at most "
    f"{MOST_JOINED} devices also stages of ranks of two node groups, 1, 2 or 4 samples a rank of the slower "
    "and as many times more a rank of the faster as keep it no longer busy; any shares of at least a "
    "micro-batch; 1f1b; "
    "every stage has memory for one micro-batch for each stage after it; stages of the same layers in "
    "different pipelines "
    "lie in different link domains (side by side in one they are inner data-parallel ranks of one pipeline), "
    "differ at most by a factor of two in inner data-parallel ranks and in ranks that hold the same experts, "
    "which all of them cut, over ranks that follow each other, or none, and no gradient collective has more "
    "members in a link domain than its stage's tp leaves room for"
)
INTERLEAVED = (
    "or plans whose pipelines of several stages are all interleaved with 2, or all with 4, chunks of layers "
    "on each device"
)
"""Of the space where an interleaved plan is chosen."""
_SEARCHING = 0.88
_FIRST = 0.5
_ALONE = 0.6
_APART = 0.5
_LATER = 0.2
_SLACK = 2.0
_PROVEN = 0.01
"""Gap from which both bounds are told, where the chosen plan is interleaved."""
_GAP = 0.15
"""Gap above which plans are looked for again at less hopeful prices."""


def search_mixed(request: PlanRequest) -> PlanResult:
    """Return the best plans on devices of several kinds, with a bound on every plan of the space.

    Every set of node groups is a problem of its own, since gradients join over the slowest link in use; sets
    that cannot beat the best plan by computation alone are left out.
    """
    started = time.perf_counter()
    deadline = started + _SEARCHING * request.budget_s
    found, notes = MixedFound(), _notes(request)
    sets = node_sets(request)
    price = request.objectives[0] != "time" or request.limits.max_usd is not None
    hasty = is_hasty(max(request.budget_s, request.overall_s))
    if hasty:
        _until_stopped(found, offer_published, request, sets[0], found, deadline, some=QUICK)
        hasty = found.interrupted = bool(found.judged)
        notes += [HASTE] if hasty else []
    if price and not hasty:
        _until_stopped(found, search_one_domain, request, sets, found)
    num_rivals = 0 if hasty else rivals(request, sets, found, every=price)
    for i, use in enumerate(sets):
        now = time.perf_counter()
        # The first set has most devices; each later one as long as the others leave it.
        alone = min(max(1.0 - _LATER * num_rivals, _FIRST), _ALONE)
        share = alone if i == 0 else min(_SLACK / (len(sets) - i), 1.0)
        if found.stopped or hasty:
            found.bounds.append(found.work_s(request, use))
            continue
        _until_stopped(found, search_set, request, sets, found, now + share * (deadline - now), every=price)
        if len(found.bounds) == i:
            found.bounds.append(found.work_s(request, use))
    _until_stopped(found, search_roomier, request, sets[0], found)
    if not (price or hasty):
        now = time.perf_counter()
        share = 1.0 if is_closed(found) else _APART
        _until_stopped(found, search_apart, request, sets[0], found, now + share * (deadline - now))
        _until_stopped(found, search_again, found, request, deadline)
    if not hasty:
        _until_stopped(found, search_interleaved, request, sets, found, started, deadline)
    above = found.best_s / max(min(found.proven), 1e-12) - 1.0
    if not found.judged or (not hasty and (price or above > _GAP)):
        _until_stopped(found, offer_published, request, sets[0], found, deadline)
        _until_stopped(found, search_apart, request, sets[0], found, deadline)
    predictions = _predictions(request, found, deadline)
    plans, error = ranked(predictions, request.objectives, request.limits, request.top)
    if not plans:
        return PlanResult(
            plans=(),
            lower_bound_step_time_s=0.0,
            gap=0.0,
            binding="memory",
            evaluated=found.evaluated,
            pruned=found.pruned,
            wall_s=time.perf_counter() - started,
            space=SPACE,
            interrupted=found.interrupted,
            stopped=found.stopped,
            infeasible=_none(request, found, sets),
            notes=tuple(notes),
        )
    bound = _bound(request, found, sets, notes)
    if found.set_aside_s:
        proven = plans[0].prediction.step_time_s / bound - 1.0
        notes.append(
            f"An interleaved plan would take {found.set_aside_s:.3g} s; it was set aside for one that is"
            f" proven within {proven:.1%}, since its own gap is wide"
        )
    best_s = plans[0].prediction.step_time_s
    space = SPACE
    if any(group.num_chunks > 1 for group in plans[0].plan.groups):
        space = f"{SPACE}; {INTERLEAVED}"
        if request.engine == "analytical":
            bound = _with_interleaved(found, bound, best_s, notes)
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=min(bound, best_s),
        gap=max(0.0, best_s / bound - 1.0) if bound > 0 else np.inf,
        binding=plans[0].prediction.bottleneck,
        evaluated=found.evaluated + len(found.judged),
        pruned=found.pruned,
        wall_s=time.perf_counter() - started,
        space=space,
        ladder={name: float(value) for name, value in found.ladder.items()} | {"configuration": float(bound)},
        interrupted=found.interrupted,
        stopped=found.stopped,
        infeasible=error,
        notes=tuple(notes),
        front=front_of(predictions, request.limits),
    )


def _until_stopped(found: MixedFound, search: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Run a part of the search; once there is a plan, Ctrl-C ends it and all parts that follow."""
    if found.stopped and found.judged:
        return
    try:
        search(*arguments, **options)
    except KeyboardInterrupt:
        if not found.judged:
            raise
        found.stopped = found.interrupted = True


def _none(request: PlanRequest, found: MixedFound, sets: Sequence[tuple[int, ...]]) -> InfeasibleError:
    """Return why there is no plan: nothing fits, or nothing was found though something may fit."""
    if not np.isfinite(min(found.proven, default=np.inf)):
        return nothing_fits(request, sets)
    return InfeasibleError(
        "no plan was found; one may exist, or lie outside the space that is searched",
        key="--budget-s",
        value=request.budget_s,
        rule=f"Searched were {SPACE}",
        fix="Allow more seconds, or try degrees of your own with foreshard predict",
    )


def _notes(request: PlanRequest) -> list[str]:
    """Return what is left out before any search, and why."""
    nodes, notes = request.cluster.nodes, []
    unable = [g.device.name for g in nodes if not g.device.supports(request.precision)]
    if unable:
        names = ", ".join(dict.fromkeys(unable))
        notes.append(f"{names}: no {request.precision} in hardware, left idle; --dtype fp16 may use them")
    vendors = sorted({g.device.vendor for g in nodes if g.device.supports(request.precision)})
    if len(vendors) > 1:
        notes.append(f"No collective joins devices of {' and '.join(vendors)}: each vendor was planned alone")
    return notes


def _with_interleaved(found: MixedFound, bound: float, best_s: float, notes: list[str]) -> float:
    """Return the bound on interleaved plans as well, and say how much of a gap they leave."""
    whole = min(bound, found.interleaved_s)
    if best_s > whole * (1.0 + _PROVEN):
        notes.append(
            f"The chosen plan is interleaved: no 1f1b plan takes less than {bound:.3g} s, and none"
            f" interleaved throughout, with 2 or 4 chunks, less than {found.interleaved_s:.3g} s"
        )
    return whole


def _predictions(request: PlanRequest, found: MixedFound, deadline: float) -> list[Prediction]:
    """Return the predictions of the best plans that fit, the best on each number of devices among them.

    Late, the fastest alone; where time is not to be small, as many as are shown, of least device-seconds.
    """
    order = sorted(found.judged, key=lambda one: one[0])
    first: dict[int, tuple[float, Plan]] = {}
    for seconds, plan in order:
        first.setdefault(len(plan.ranks), (seconds * len(plan.ranks), plan))
    frugal = [plan for _, plan in sorted(first.values(), key=lambda one: one[0])]
    fastest, others = [plan for _, plan in order[: request.top]], order[request.top : 4 * request.top]
    by_time = request.objectives[0] == "time"
    wanted = [*fastest, *frugal] if by_time else [*frugal, *fastest]
    wanted += [plan for _, plan in others]
    least = 1 if by_time else request.top
    made: list[Prediction] = []
    seen: list[Plan] = []
    for plan in wanted:
        if plan in seen or (len(made) >= least and time.perf_counter() > deadline):
            continue
        seen.append(plan)
        made.append(predicted(request, plan))
        if len(made) >= 2 * request.top + len(first):
            break
    return made


def _bound(
    request: PlanRequest, found: MixedFound, sets: Sequence[tuple[int, ...]], notes: list[str]
) -> float:
    """Return a step time that no plan of the space beats, by the engine asked for."""
    bound = min(found.proven, default=0.0)
    if request.engine == "analytical":
        return bound
    notes.append(
        f"The bound for engine {request.engine} is that of computation alone, spread over all devices: it "
        "overlaps messages that the analytical engine adds"
    )
    priced = (price_stages(request, use, compute_only=True, every=True) for use in sets)
    return min(work_bound(capped(problem, request.max_devices)) for problem in priced)
