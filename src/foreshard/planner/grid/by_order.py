"""Plans whose schedule has no closed form: every one of a small grid is timed by following its order of work.

Only schedules that were stated are searched (`plan --schedule dualpipe`): following an order takes a
thousand times as long as a closed form.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

from foreshard.catalog.offers import offers_of
from foreshard.errors import InfeasibleError, LimitError, SpecError
from foreshard.graph.pipeline_schedules import BY_ORDER
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes, predicted
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.spec.checks import check_plan
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.plan import TURNING, Plan

_SAMPLES = (1, 2, 4)
"""Samples per rank and pass that are tried."""
_MODULES = "selective:layernorm+mla_up_proj+moe_act"
"""What runs again at little cost in blocks of experts with latent attention (DeepSeek-V3 report, 3.2.3)."""


def ordered_schedules(request: PlanRequest) -> tuple[str, ...]:
    """Return the stated schedules that are priced by following their order."""
    return tuple(name for name in request.choices.allowed.get("schedule", ()) if name in BY_ORDER)


def search_by_order(request: PlanRequest) -> PlanResult:
    """Return the best plans of one pipeline a replica under the stated schedules.

    Of each degrees and samples, the first recompute rule that fits is timed, those that run less again first.

    Raises
    ------
    SpecError
        Where nodes differ, or closed forms and orders are stated together.
    """
    schedules = ordered_schedules(request)
    _check(request, schedules)
    started, budget = time.perf_counter(), TimeBudget.of(request.budget_s)
    timed: list[tuple[float, Plan]] = []
    pruned, interrupted = 0, False
    for rules in _degrees(request, schedules):
        if budget.is_over:
            interrupted = True
            break
        for plan in rules:
            if missing_bytes(request, plan) > 0:
                pruned += 1
                continue
            timed.append((engine_seconds(request, [plan])[0], plan))
            break
    timed.sort(key=lambda one: one[0])
    error: InfeasibleError | LimitError | None
    plans, error = request.ranked([predicted(request, plan) for _, plan in timed[: request.top]])
    words = " or ".join(schedules)
    if not timed:
        error = InfeasibleError(
            f"no plan under {words} fits",
            key="--schedule",
            value=words,
            rule="Degrees divide the model and the batch, and the fullest device of a plan fits its memory",
            fix="Leave --schedule out, or state a smaller --memory-margin",
        )
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=timed[0][0] if timed and not interrupted else 0.0,
        evaluated=len(timed),
        pruned=pruned,
        wall_s=time.perf_counter() - started,
        space=f"one pipeline a replica under {words} on all devices, divisors for the degrees, 1, 2 or 4 "
        "samples a rank, of each the recompute rule that runs least again and fits",
        interrupted=interrupted,
        infeasible=error,
        objective=request.objectives[0],
    )


def _check(request: PlanRequest, schedules: tuple[str, ...]) -> None:
    others = [name for name in request.choices.allowed["schedule"] if name not in schedules]
    if others or len(request.cluster.nodes) > 1 or request.max_devices is not None:
        names = ", ".join(request.choices.allowed["schedule"])
        raise SpecError(
            f"a search of {names}",
            key="--schedule",
            value=names,
            rule=f"{' and '.join(schedules)} are searched by themselves, on all devices of equal nodes",
            fix="State one of them alone, and a cluster of equal nodes without --max-devices",
        )


def _degrees(request: PlanRequest, schedules: tuple[str, ...]) -> Iterator[list[Plan]]:
    """Yield the plans of each degrees, that which runs least again first."""
    model, devices, offers = request.model, request.cluster.num_devices, offers_of(request.framework)
    blocks = [block for block, _ in model.block_kinds()]
    experts = max(block.num_experts for block in blocks)
    tensor = [n for n in _divisors(request.cluster.nodes[0].per_node) if "tp" in offers.degrees or n == 1]
    spread = [n for n in _divisors(experts) if "ep" in offers.degrees or n == 1] if experts else [1]
    stages = [n for n in _divisors(devices) if 1 < n <= model.num_layers]
    for schedule, pp, tp, ep, samples in product(schedules, stages, tensor, spread, _SAMPLES):
        chunks = 2 if schedule in TURNING else 1
        layers = -(-model.num_layers // (pp * chunks))
        found = []
        for rule, zero in product(_rules(request, layers), offers.levels(pp)):
            plan = _plan(
                request,
                schedule=schedule,
                pp=pp,
                tp=tp,
                ep=ep,
                micro_batch=samples,
                zero=zero,
                recompute=rule,
            )
            if plan is not None:
                found.append(plan)
        if found:
            yield found


def _rules(request: PlanRequest, layers: int) -> tuple[str, ...]:
    """Return recompute rules, those that run less again first."""
    offered = offers_of(request.framework).recompute
    rules: list[str] = [word for word in ("none", "selective:op") if word in offered]
    if "selective" in offered:
        blocks = [block for block, _ in request.model.block_kinds()]
        latent = any(block.kv_lora and block.num_experts for block in blocks)
        rules += [_MODULES, f"{_MODULES}+moe"] if latent else ["selective:layernorm"]
        rules += [f"full:block:{count}" for count in range(1, layers)]
    return request.choices.rules((*rules, *(word for word in ("full",) if word in offered)))


def _plan(request: PlanRequest, **degrees: object) -> Plan | None:
    """Return the plan of some degrees, None where it breaks a rule or is not as stated."""
    try:
        plan = plan_from_degrees(
            request.model.num_layers,
            request.cluster.num_devices,
            global_batch=request.global_batch,
            seq_len=request.seq_len,
            precision=request.precision,
            optimizer=request.optimizer,
            framework=request.framework.label,
            sp=degrees["tp"] != 1 and offers_of(request.framework).cuts_sequences,
            **degrees,  # type: ignore[arg-type]
        )
        plan = request.stated(plan)
        check_plan(plan, request.model, request.cluster)
    except SpecError:
        return None
    return plan if request.choices.holds(plan) else None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
