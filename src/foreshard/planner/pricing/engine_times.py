"""What the engine says of plans that an abstract problem proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreshard.planner.request import PlanRequest
from foreshard.predict.assumptions import IDLE_PAID
from foreshard.predict.batch import PlannedRun
from foreshard.predict.step import graph_takes
from foreshard.predict.step_source import FormulaSteps
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

_NOT_PAID = "nodes without a rank are not paid: predict pays for the whole cluster"


def engine_seconds(request: PlanRequest, plans: Sequence[Plan]) -> list[float]:
    """Return the step times of plans by the analytical engine."""
    return [steps_of(request).seconds(plan) for plan in plans]


def missing_bytes(request: PlanRequest, plan: Plan) -> float:
    """Return by how much the fullest rank is over its device, 0 where the plan fits."""
    memory = steps_of(request).memory(plan)
    return max(0.0, memory.peak_bytes - memory.capacity_bytes)


def steps_of(request: PlanRequest, usd_per_device_hour: float | None = None) -> FormulaSteps:
    """Return the source of step times that a search asks."""
    return FormulaSteps(
        model=request.model,
        cluster=request.cluster,
        framework=request.priced_framework,
        constants=request.constants,
        engine=request.engine,
        network=request.network,
        costs=request.costs,
        calibration=request.calibration,
        usd_per_device_hour=usd_per_device_hour,
    )


def predicted(request: PlanRequest, plan: Plan) -> Prediction:
    """Return the prediction of a plan as its file states it; nodes that are idle are not paid for."""
    plan = _with_buckets(request, request.stated(plan))
    found = steps_of(request, _paid(request, plan)).predict(plan, tokens=request.tokens)
    used = nodes_in_use(request.cluster, plan)
    if used.num_nodes == request.cluster.num_nodes:
        return found
    dates = [group.price_date for group in used.nodes]
    stated = request.usd_per_device_hour is not None or found.cost.usd_per_step is None
    return replace(
        found,
        cost=replace(found.cost, price_date=None if stated else min(filter(None, dates), default=None)),
        assumptions=tuple(text.replace(IDLE_PAID, _NOT_PAID) for text in found.assumptions),
    )


def resources(request: PlanRequest, plan: Plan, step_s: float) -> float:
    """Return about what a step takes of what is made small beside time, to order plans by.

    Joules of devices that compute throughout, or dollars of the nodes in use; device-seconds where devices
    have no power limit or no price.
    """
    if request.objectives[0] == "energy":
        watts = [request.cluster.device_of(rank).tdp_w for rank in plan.ranks]
        known = [watt for watt in watts if watt is not None]
        return step_s * (sum(known) if len(known) == len(watts) else len(watts))
    usd_per_h = _usd_per_h(request, _used_nodes(request.cluster, plan))
    return step_s * (len(plan.ranks) if usd_per_h is None else usd_per_h)


def _with_buckets(request: PlanRequest, plan: Plan) -> Plan:
    """Return the plan with the best bucket size where that was asked for and the engine can tell."""
    if not request.best_buckets or request.engine == "analytical" or not graph_takes(plan, request.network):
        return plan
    from foreshard.predict.graph.bucket_choice import with_best_buckets

    case = PlannedRun(
        model=request.model,
        cluster=request.cluster,
        plan=plan,
        framework=request.priced_framework,
        costs=request.costs,
    )
    return with_best_buckets(case, request.constants, network=request.network)


def _paid(request: PlanRequest, plan: Plan) -> float | None:
    """Return the price of the nodes in use spread over all devices; None for all nodes, or unknown prices."""
    cluster = request.cluster
    used = _used_nodes(cluster, plan)
    if used.all():
        return request.usd_per_device_hour
    total = _usd_per_h(request, used)
    return None if total is None else total / cluster.num_devices


def _usd_per_h(request: PlanRequest, used: np.ndarray) -> float | None:
    """Return the price of the nodes in use, None where one has none."""
    nodes = request.cluster.nodes
    if request.usd_per_device_hour is not None:
        of_each = [request.usd_per_device_hour * group.per_node for group in nodes]
    else:
        of_each = [np.nan if group.usd_per_h is None else group.usd_per_h for group in nodes]
    total = float(np.repeat(of_each, [group.count for group in nodes])[used].sum())
    return None if np.isnan(total) else total


def nodes_in_use(cluster: Cluster, plan: Plan) -> Cluster:
    """Return the nodes that any rank of a plan is on, as a cluster of their own."""
    counts = [group.count for group in cluster.nodes]
    used = np.add.reduceat(_used_nodes(cluster, plan), np.cumsum([0, *counts[:-1]]), dtype=int)
    kept = [replace(g, count=int(n)) for g, n in zip(cluster.nodes, used, strict=True) if n]
    return replace(cluster, nodes=tuple(kept))


def _used_nodes(cluster: Cluster, plan: Plan) -> np.ndarray:
    """Return which nodes any rank of a plan is on, shape (nodes,)."""
    sizes = np.repeat([g.per_node for g in cluster.nodes], [g.count for g in cluster.nodes])
    nodes = np.searchsorted(np.cumsum(sizes), np.array(plan.ranks), side="right")
    used = np.zeros(len(sizes), dtype=bool)
    used[nodes] = True
    return used
