"""Plans for devices of several kinds: pipelines of their own cuts and degrees, with shares to match."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.mapping import plan_of
from foreshard.planner.problem import Problem
from foreshard.planner.ranking import ranked
from foreshard.planner.request import Request
from foreshard.planner.result import PlanResult
from foreshard.planner.solve import Solution, solve
from foreshard.planner.stage_prices import price_stages
from foreshard.predict.analytical import step_times
from foreshard.predict.batch import Case, build_batch
from foreshard.predict.step import predict
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

SPACE = (
    "pipelines beside each other, each of at most 16 stages cut anywhere; stages of devices of one node group with "
    "tp within a node, 1, 2, 4 or 8 inner data-parallel ranks, 1, 2 or 4 samples a rank, three recompute rules; "
    "any shares; 1f1b; every stage has memory for one micro-batch for each stage after it"
)
_JUDGED = 24


def search_mixed(request: Request) -> PlanResult:
    """Return the best plans on devices of several kinds, with a bound on every plan of the space.

    Every set of node groups is a problem of its own, since gradients join over the slowest link in use; sets
    that cannot beat the best plan by computation alone are left out.
    """
    started = time.perf_counter()
    deadline = started + 0.9 * request.budget_s
    judged: list[tuple[float, Plan]] = []
    bounds: list[float] = []
    ladder: dict[str, float] = {}
    evaluated = pruned = 0
    interrupted = False
    for use in _sets(request):
        best = min((seconds for seconds, _ in judged), default=np.inf)
        problem = price_stages(request, use)
        left = deadline - time.perf_counter()
        solution = solve(problem, budget_s=max(left, 0.05), target_gap=0.008, beat_s=best)
        evaluated += solution.evaluated
        bounds.append(solution.lower_bound_s)
        interrupted |= solution.interrupted
        if not ladder:
            ladder = dict(solution.ladder)
        pruned += solution.excluded
        judged.extend(_judge(request, problem, solution))
    order = sorted(judged, key=lambda one: one[0])
    predictions = [_predicted(request, plan) for _, plan in order[: 2 * request.top]]
    fitting = [one for one in predictions if one.memory.fits]
    plans, error = ranked(fitting, request.objectives, request.limits, request.top)
    best_s = plans[0].prediction.step_time_s if plans else 0.0
    bound = min([*bounds, best_s]) if plans else 0.0
    ladder["configuration"] = bound
    if request.engine != "analytical":
        bound = min(ladder.get("compute", 0.0), best_s)
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=bound,
        gap=best_s / bound - 1.0 if bound > 0 else 0.0,
        binding=plans[0].prediction.bottleneck if plans else "",
        evaluated=evaluated + len(judged),
        pruned=pruned,
        wall_s=time.perf_counter() - started,
        space=SPACE,
        ladder={name: float(value) for name, value in ladder.items()},
        interrupted=interrupted,
        infeasible=error if plans else InfeasibleError("nothing fits"),
    )


def _sets(request: Request) -> list[tuple[int, ...]]:
    """Return the sets of node groups that may train together, the largest first: one vendor, the precision."""
    nodes = request.cluster.nodes
    able = [g for g, group in enumerate(nodes) if group.device.supports(request.precision)]
    found = []
    for size in range(len(able), 0, -1):
        for use in combinations(able, size):
            if len({nodes[g].device.vendor for g in use}) == 1:
                found.append(use)
    return found


def _judge(request: Request, problem: Problem, solution: Solution) -> list[tuple[float, Plan]]:
    """Return the plans of a solution's arrangements and their step times by the analytical engine."""
    plans: list[Plan] = []
    for arrangement in solution.others[:_JUDGED]:
        plan = plan_of(request, problem, arrangement)
        if plan is not None:
            plans.append(plan)
    seconds = engine_seconds(request, plans)
    return list(zip(seconds, plans, strict=True))


def engine_seconds(request: Request, plans: Sequence[Plan]) -> list[float]:
    """Return the step times of plans by the analytical engine."""
    made = []
    for plan in plans:
        case = Case(model=request.model, cluster=request.cluster, plan=plan, framework=request.framework)
        step = step_times(build_batch([case], request.constants))
        last = step.parts["optimizer"]
        made.append(float((step.total - last).max() + last.max()))
    return made


def _predicted(request: Request, plan: Plan) -> Prediction:
    return predict(
        request.model, request.cluster, plan, framework=request.framework, engine=request.engine,
        tokens=request.tokens, usd_per_device_hour=request.usd_per_device_hour, timeline=False,
    )  # fmt: skip
