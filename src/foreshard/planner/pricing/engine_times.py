"""What the engine says of plans that an abstract problem proposes."""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.planner.request import PlanRequest
from foreshard.predict.batch import PlannedRun
from foreshard.predict.step import graph_takes
from foreshard.predict.step_source import FormulaSteps
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction


def engine_seconds(request: PlanRequest, plans: Sequence[Plan]) -> list[float]:
    """Return the step times of plans by the analytical engine."""
    return steps_of(request).seconds_of(plans)


def missing_bytes(request: PlanRequest, plan: Plan) -> float:
    """Return by how much the fullest rank is over its device, 0 where the plan fits."""
    memory = steps_of(request).memory(plan)
    return max(0.0, memory.peak_bytes - memory.capacity_bytes)


def steps_of(request: PlanRequest) -> FormulaSteps:
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
        usd_per_device_hour=request.usd_per_device_hour,
    )


def predicted(request: PlanRequest, plan: Plan) -> Prediction:
    """Return the prediction of a plan as its file states it."""
    plan = _with_buckets(request, request.stated(plan))
    return steps_of(request).predict(plan, tokens=request.tokens)


def resources(request: PlanRequest, plan: Plan, step_s: float) -> float:
    """Return about what a step takes of what is made small beside time, to order plans by.

    Joules of devices that compute throughout, or dollars of the nodes in use; device-seconds where devices
    have no power limit or no price.
    """
    if request.objectives[0] == "energy":
        watts = [request.cluster.device_of(rank).tdp_w for rank in plan.ranks]
        known = [watt for watt in watts if watt is not None]
        return step_s * (sum(known) if len(known) == len(watts) else len(watts))
    usd_per_h = (
        request.cluster.in_use(plan.ranks).at_usd_per_device_hour(request.usd_per_device_hour).usd_per_h
    )
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
