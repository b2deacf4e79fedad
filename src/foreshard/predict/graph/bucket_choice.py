"""The bucket size of gradients with which a step is shortest: sizes tried one by one under the graph engine.

Large buckets leave late, small ones pay more start-ups, and both meet the computation and the other transfers
of the step as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from foreshard.catalog.training import TrainingConstants
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.engine import graph_times, shared_times
from foreshard.predict.graph.prices import GroupPrices, group_prices
from foreshard.spec.plan import Plan

_MIB = 2**20
_SAME = 1e-9  # of a step: rounding


def with_best_buckets(
    case: PlannedRun,
    constants: TrainingConstants,
    *,
    fidelity: str = "zero-shot",
    network: str = "closed-form",
) -> Plan:
    """Return the plan with the bucket size of its shortest step.

    Tried are the framework's own buckets and every power of two from 1 MiB to all gradients of a rank; of
    equal ones the framework's, then the larger. Where no gradients are summed in buckets (one replica, fully
    sharded weights) the plan stays as it is.
    """

    def seconds(plan: Plan) -> float:
        tried = replace(case, plan=plan)
        batch = build_batch([tried], constants, fidelity=fidelity)
        if network == "flow":
            return sum(shared_times(tried, batch, timeline=False)[0].values())
        return sum(graph_times(tried, batch, timeline=False)[0].values())

    batch = build_batch([case], constants, fidelity=fidelity)
    best = replace(case.plan, buckets=None)
    best_s = seconds(best)
    for size in _sizes(group_prices(case, batch)):
        plan = replace(best, buckets=size)
        taken_s = seconds(plan)
        if taken_s < best_s * (1.0 - _SAME):
            best, best_s = plan, taken_s
    return best


def _sizes(prices: list[GroupPrices]) -> Iterator[int]:
    """Yield the sizes to try, the largest first."""
    most = max((_bucketed_bytes(price) for price in prices), default=0.0)
    size = _MIB
    while size < most:
        size *= 2
    while most > 0.0 and size >= _MIB:
        yield size
        size //= 2


def _bucketed_bytes(price: GroupPrices) -> float:
    """Return the most gradients of a stage that are summed bucket by bucket."""
    found = [0.0]
    for machine, row in zip(price.machines, price.units, strict=True):
        rank = machine.rank
        if rank.zero < 2 and rank.dp * rank.cp > 1:
            elements = sum(float(units.params.sum() + units.expert_params.sum()) for units in row)
            found.append(elements * float(machine.traits.grad_bytes))
    return max(found)
