"""Baselines on a real model and cluster: planned on the same prices, timed by the same engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.errors import SpecError
from foreshard.planner.baselines.registry import BASELINES, Baseline
from foreshard.planner.headroom import leaving_free
from foreshard.planner.mixed.node_sets import node_sets
from foreshard.planner.pricing.engine_times import engine_seconds, predicted
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.solver.problem import Arrangement, Problem
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

_JUDGED = 12
"""Arrangements that the engine times, each of another number of pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """What a baseline came to.

    Attributes
    ----------
    name : str
    plan : Plan or None
    step_time_s, gap_to_bound : float or None
        By the engine of the request; the gap is (step - bound) / bound, None without a bound.
    wall_s : float
        Its search, prices of stages apart.
    why_none : str
        Why there is no plan, empty if there is one.
    """

    name: str
    plan: Plan | None
    step_time_s: float | None
    gap_to_bound: float | None
    wall_s: float
    why_none: str = ""


def judge(
    model: Model,
    cluster: Cluster,
    names: Sequence[str] = ("all",),
    *,
    bound_s: float | None = None,
    **asked: Any,
) -> tuple[BaselineResult, ...]:
    """Return what each baseline comes to on a model and cluster.

    Prices of stages leave out what depends on the whole plan, so each baseline has its best arrangement for
    every number of pipelines timed by the engine and keeps the fastest.

    Parameters
    ----------
    model : Model
    cluster : Cluster
    names : sequence of str
        Of `BASELINES`; "all" is every one.
    bound_s : float, optional
        A step time no plan beats, for the gaps.
    asked
        As for `planner.search.plan`: global_batch (required), seq_len, framework, precision, optimizer,
        engine, memory_margin.

    Raises
    ------
    SpecError
        For an unknown name or bad input.
    """
    chosen = [_named(name) for name in (BASELINES if "all" in names else names)]
    request = leaving_free(checked_request(model, cluster, **asked))
    sets = node_sets(request)
    problem = price_stages(request, sets[0]) if sets else None
    return tuple(_judged(request, problem, one, bound_s) for one in chosen)


def _named(name: str) -> Baseline:
    if name not in BASELINES:
        raise SpecError(
            f"unknown baseline {name!r}",
            key="--compare-with",
            value=name,
            rule="Baselines have names",
            fix=f"Use all or some of {', '.join(BASELINES)}",
        )
    return BASELINES[name]


def _judged(
    request: PlanRequest, problem: Problem | None, one: Baseline, bound_s: float | None
) -> BaselineResult:
    started = time.perf_counter()
    found: list[Arrangement] = []
    if problem is not None:
        offered = one.best(problem).by_number.values()
        found = [made for _, made in sorted(offered, key=lambda row: row[0])[:_JUDGED]]
    wall_s = time.perf_counter() - started
    plan, prediction, why = _fastest(request, problem, found)
    step_s = None if prediction is None else prediction.step_time_s
    return BaselineResult(
        name=one.name,
        plan=plan,
        step_time_s=step_s,
        gap_to_bound=step_s / bound_s - 1.0 if step_s and bound_s else None,
        wall_s=wall_s,
        why_none=why,
    )


def _fastest(
    request: PlanRequest, problem: Problem | None, found: Sequence[Arrangement]
) -> tuple[Plan | None, Prediction | None, str]:
    """Return the plan that is fastest by the engine, its prediction, and why there is none."""
    if problem is None:
        return None, None, f"no device has {request.precision}"
    if not found:
        return None, None, "finds no plan that fits"
    plans = [plan for one in found if (plan := plan_of(request, problem, one)) is not None]
    if not plans:
        return None, None, "its stages do not pack into the nodes"
    order = np.argsort(engine_seconds(request, plans), kind="stable")
    for i in order:
        prediction = predicted(request, plans[i])
        if prediction.memory.fits:
            return plans[i], prediction, ""
    return None, None, "out of memory once it is on ranks"
