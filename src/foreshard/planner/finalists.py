"""The last choice of a search: the engine asked for times the best plans before one of them is chosen."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from foreshard.planner.pricing.engine_times import predicted
from foreshard.planner.ranking import SHOWN, front_of, score
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult, Ranked
from foreshard.predict.step import graph_takes
from foreshard.spec.prediction import Prediction

NUMBER = 12
"""Plans that the engine times: within the few percent that the closed form may be off, several plans lie."""
_AT_LEAST = 0.02
"""Part of the budget that timing them may take when the search has used all of it."""


def searching(request: PlanRequest) -> PlanRequest:
    """Return the request as the search takes it: by closed forms, with enough plans to choose from."""
    if request.engine == "analytical":
        return request
    return replace(
        request, engine="analytical", network="closed-form", top=max(request.top, NUMBER), chooses_later=True
    )


def retimed(request: PlanRequest, result: PlanResult, *, started: float) -> PlanResult:
    """Return what a search found in the order of the engine asked for, with its times and the gap to them.

    Only then is it known which space the chosen plan lies in, and the bound is that of this space.

    The bound stays that of the closed form: for equal stages the longest of some paths through the graph, for
    unequal or interleaved ones up to some percent above it (docs/planning.md).

    Parameters
    ----------
    request : PlanRequest
    result : PlanResult
        Of :func:`searching`.
    started : float
        Of `time.perf_counter`, when the search began.
    """
    if request.engine == "analytical" or not result.plans:
        return result.bounded()
    until = max(started + request.budget_s, time.perf_counter() + _AT_LEAST * request.budget_s)
    made: list[Prediction] = []
    order = _in_order(request, (*result.plans, *result.front))
    known = [one.prediction for one in order]
    shown = [one.plan for one in request.ranked(known)[0]]
    shown += [one.plan for one in result.front]
    for one in order:
        if len(made) >= min(request.top, SHOWN) and time.perf_counter() >= until:
            break
        if made and one.plan not in shown and _is_beaten(request, one, made):
            continue
        made.append(_timed(request, one))
    plans, error = request.ranked(made)
    best = plans[0].prediction
    result = replace(result, plans=plans).bounded()
    return replace(
        result,
        bound=None if result.bound is None else result.bound.of(best),
        infeasible=error,
        front=front_of(made, request.limits),
        wall_s=time.perf_counter() - started,
    )


def _timed(request: PlanRequest, one: Ranked) -> Prediction:
    """Return a plan as the engine asked for predicts it, as the closed form does where it is too large."""
    if graph_takes(one.plan, request.network):
        return predicted(request, one.plan)
    if not request.best_buckets:
        return one.prediction
    own = replace(request.framework, bucket_bytes=0)
    closed = replace(request, engine="analytical", network="closed-form", best_buckets=False, framework=own)
    return predicted(closed, one.plan)


def _in_order(request: PlanRequest, found: Iterable[Ranked]) -> list[Ranked]:
    """Return distinct plans, the best by the closed form first."""
    distinct: list[Ranked] = []
    for one in found:
        if all(one.plan != other.plan for other in distinct):
            distinct.append(one)
    return sorted(distinct, key=lambda one: score(one.prediction, request.objectives))


def _is_beaten(request: PlanRequest, one: Ranked, made: list[Prediction]) -> bool:
    """Return whether a plan cannot be chosen any more, by its closed form."""
    best = min(score(prediction, request.objectives) for prediction in made)
    return not request.limits and score(one.prediction, request.objectives) >= best
