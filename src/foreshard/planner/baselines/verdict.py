"""Baselines on a real model and cluster: planned on the same prices, timed by the same engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreshard.errors import SpecError
from foreshard.planner.baselines.registry import BASELINES, Baseline
from foreshard.planner.judge import predicted
from foreshard.planner.mapping import plan_of
from foreshard.planner.problem import Problem
from foreshard.planner.request import Request, checked_request
from foreshard.planner.stage_prices import price_stages
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
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
    seed: int = 0,
    **asked: Any,
) -> tuple[Judged, ...]:
    """Return what each baseline comes to on a model and cluster.

    Parameters
    ----------
    model : Model
    cluster : Cluster
    names : sequence of str
        Of `BASELINES`; "all" is every one.
    bound_s : float, optional
        A step time no plan beats, for the gaps.
    seed : int
    asked
        As for `planner.search.plan`: global_batch (required), seq_len, framework, precision, optimizer,
        engine.

    Raises
    ------
    SpecError
        For an unknown name or bad input.
    """
    chosen = [_named(name) for name in (BASELINES if "all" in names else names)]
    request = checked_request(model, cluster, **asked)
    use = _together(request)
    problem = price_stages(request, use) if use else None
    return tuple(_judged(request, problem, one, bound_s, seed) for one in chosen)


def _named(name: str) -> Baseline:
    if name not in BASELINES:
        raise SpecError(
            f"unknown baseline {name!r}", key="--against", value=name,
            rule="Baselines have names", fix=f"Use all or some of {', '.join(BASELINES)}",
        )  # fmt: skip
    return BASELINES[name]


def _together(request: Request) -> tuple[int, ...]:
    """Return the node groups that can train together: of the vendor with most devices, in the precision."""
    nodes = request.cluster.nodes
    able = [g for g, group in enumerate(nodes) if group.device.supports(request.precision)]
    vendors: dict[str, list[int]] = {}
    for g in able:
        vendors.setdefault(nodes[g].device.vendor, []).append(g)
    own = max(vendors.values(), key=lambda use: sum(nodes[g].num_devices for g in use), default=[])
    return tuple(own)


def _judged(
    request: Request, problem: Problem | None, one: Baseline, bound_s: float | None, seed: int
) -> Judged:
    started = time.perf_counter()
    arrangement = None if problem is None else one.planner(problem, seed=seed)
    wall_s = time.perf_counter() - started

    def none(why: str) -> Judged:
        return Judged(
            name=one.name, plan=None, step_time_s=None, gap_to_bound=None, wall_s=wall_s, why_none=why
        )

    if problem is None:
        return none(f"no device has {request.precision}")
    if arrangement is None:
        return none("finds no plan that fits")
    plan = plan_of(request, problem, arrangement)
    if plan is None:
        return none("its stages do not pack into the nodes")
    prediction = predicted(request, plan)
    if not prediction.memory.fits:
        return none("out of memory once it is on ranks")
    step_s = prediction.step_time_s
    return Judged(
        name=one.name,
        plan=plan,
        step_time_s=step_s,
        gap_to_bound=step_s / bound_s - 1.0 if bound_s else None,
        wall_s=wall_s,
    )
