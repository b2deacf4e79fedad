"""The plan of another planner taken in, where a short search has found nothing as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foreshard.planner.baselines.verdict import BaselineResult, judge
from foreshard.planner.pricing.engine_times import predicted
from foreshard.planner.ranking import front_of, score
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.result import PlanResult
from foreshard.quantity import seconds
from foreshard.spec.adapters import with_adapters
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.prediction import Prediction

_TIE = 1e-9
"""Part of a step by which another plan has to be better: less is rounding."""
_JUDGED = ("global_batch", "seq_len", "framework", "precision", "optimizer", "engine", "memory_margin")
"""Words of a request that :func:`judge` takes."""


def beside_others(
    model: Model, cluster: Cluster, result: PlanResult, names: Sequence[str], **asked: Any
) -> tuple[PlanResult, tuple[BaselineResult, ...]]:
    """Return a result beside other planners, with the best of their plans where that is better; and theirs.

    Parameters
    ----------
    model : Model
    cluster : Cluster
    result : PlanResult
        Of the search.
    names : sequence of str
        Of the other planners, as :func:`judge` takes them.
    asked
        What the search was asked (:func:`foreshard.planner.search.plan`). Of several precisions the others
        have the one that was chosen.
    """
    comparable = {name: value for name, value in asked.items() if name not in ("comm", "precision")}
    adapters = comparable.pop("lora", None)
    model = model if adapters is None else with_adapters(model, adapters)
    words = asked.get("precision") or cluster.default_precision(of_all=False)
    first = words if isinstance(words, str) else words[0]
    comparable["precision"] = result.plans[0].plan.precision if result.plans else first
    bound_s = result.lower_bound_step_time_s if result.plans else None
    judging = {name: comparable[name] for name in _JUDGED if name in comparable}
    judged = judge(model, cluster, names, bound_s=bound_s, **judging)
    made = adopted(checked_request(model, cluster, **comparable), result, judged)
    return made.with_lora(adapters), judged


def adopted(request: PlanRequest, result: PlanResult, judged: Sequence[BaselineResult]) -> PlanResult:
    """Return the result with the best plan of other planners first, if it beats all plans found.

    Parameters
    ----------
    request : PlanRequest
        What was asked; the plan keeps its limits and its number of devices.
    result : PlanResult
    judged : sequence of BaselineResult

    Returns
    -------
    PlanResult
        The same where nothing is better. A plan from outside the space may lie below the bound, which then is
        its step time.
    """
    most = request.max_devices or request.cluster.num_devices
    offers = [
        (predicted(request, one.plan), one.name)
        for one in judged
        if one.plan is not None and len(one.plan.ranks) <= most and request.choices.holds(one.plan)
    ]
    offers = [offer for offer in offers if request.limits.keeps(offer[0])]
    best, name = min(offers, key=lambda offer: score(offer[0], request.objectives), default=(None, ""))
    if best is None or not _beats(request, best, result):
        return result
    found = [best, *(one.prediction for one in result.plans)]
    plans, error = request.ranked(found)
    searched = result.plans[0].prediction.step_time_s if result.plans else None
    alone = f"the search alone came to {seconds(searched)}" if searched else "the search found none"
    return replace(
        result,
        plans=plans,
        infeasible=error,
        notes=(*result.notes, f"The chosen plan is that of {name}: {alone}"),
        front=front_of([best, *(one.prediction for one in result.front)], request.limits),
    )


def _beats(request: PlanRequest, best: Prediction, result: PlanResult) -> bool:
    """Return whether a plan within the limits is better than the one chosen, or that breaks a limit."""
    if not result.plans or not request.limits.keeps(result.plans[0].prediction):
        return True
    mine, theirs = (score(one, request.objectives)[0] for one in (result.plans[0].prediction, best))
    return theirs < mine * (1.0 - _TIE)
