"""Why no pipeline fits on devices of several kinds, and the nearest change that lets one fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.headroom import left_free_words
from foreshard.planner.mixed.node_sets import node_sets
from foreshard.planner.nearest_change import (
    any_number_of_devices,
    fitting_changes,
    fix_of,
    half_precision,
    more_nodes_of_each,
    other_optimizers,
    other_sequences,
    smaller_margins,
)
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult
from foreshard.planner.solver.problem import Problem
from foreshard.planner.solver.solve import ProblemSearch, fewest_devices
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget

_TRIAL_S = 1.0
"""Seconds in which a search finds a pipeline that fits the devices of each kind, where there is one."""


def nothing_fits(
    request: PlanRequest, sets: Sequence[tuple[int, ...]], budget: TimeBudget = ENDLESS
) -> InfeasibleError:
    """Return the error that names what binds, and a change that was tried and fits.

    Parameters
    ----------
    request : PlanRequest
    sets : sequence of tuple of int
        Node groups that may train together, the largest set first.
    budget : TimeBudget
        In which changes are tried.
    """
    groups = [request.cluster.nodes[g] for g in sets[0]]
    memory = sum(group.num_devices * group.device.capacity_bytes for group in groups) / 2**30
    devices = sum(group.num_devices for group in groups)
    where = (
        f"{devices} devices with {memory:,.0f} GiB together"
        if devices > 1
        else f"the one device that may be used, with {memory:,.0f} GiB"
    )
    kinds = (
        *(half_precision, any_number_of_devices, smaller_margins, other_optimizers, other_sequences),
        more_nodes_of_each,
    )
    fits = partial(_fits, budget=budget)
    found = fitting_changes((kind(request) for kind in kinds), fits, most=1, budget=budget)
    return InfeasibleError(
        f"no pipeline of {request.model.name} fits {where}{_left(request)}",
        key="memory",
        value=f"{memory:.0f} GiB",
        rule="Every stage holds its weights, gradients, optimizer states and one micro-batch for each stage "
        "after it",
        fix=fix_of(found) or "Use devices with more memory, many more of them, or a smaller model",
    )


def _left(request: PlanRequest) -> str:
    return f", with {left}" if (left := left_free_words(request)) else ""


def nothing_chosen(request: PlanRequest) -> PlanResult:
    """Return the result where no stage on any device is as stated."""
    devices = ", ".join(f"{nodes.per_node} {nodes.device.name} a node" for nodes in request.cluster.nodes)
    error = InfeasibleError(
        f"no stage on {devices} has {request.choices}",
        key="--" + request.choices.names[0].replace("_", "-"),
        value=str(request.choices),
        rule="tp divides the devices of a node, the attention heads and the sequence",
        fix="State another value, or leave it out",
    )
    return PlanResult(
        plans=(), lower_bound_step_time_s=0.0, evaluated=0, pruned=0, wall_s=0.0, infeasible=error
    )


def _fits(request: PlanRequest, budget: TimeBudget) -> bool:
    """Return whether a pipeline is found on the devices there are of each kind, as far as time allows."""
    for use in node_sets(request):
        if budget.is_over:
            return False
        problem = price_stages(request, use, every=True)
        if least_devices(problem) > sum(problem.counts):
            continue
        search, trial = ProblemSearch(problem, target_gap=np.inf, filling="full"), _trial(budget)
        while search.is_open and not (search.has_plan or trial.is_over):
            search.advance(trial)
        if search.has_plan:
            return True
    return False


def _trial(budget: TimeBudget) -> TimeBudget:
    """Return the time of one trial: a search without a plan ends with it too."""
    seconds = min(_TRIAL_S, budget.left_s)
    return TimeBudget.of(seconds, last_s=seconds)


def least_devices(problem: Problem) -> float:
    """Return the fewest devices a pipeline takes, inf where none fits."""
    return fewest_devices(problem, np.ones(len(problem.counts)))[0]
