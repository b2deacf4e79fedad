"""Why a plan leaves devices idle, and what it would take to use them: which link, memory or speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from foreshard import quantity
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes
from foreshard.planner.request import PlanRequest
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.plan import Plan
from foreshard.units import number_of

_DOUBLINGS = 10
"""Doublings of a NIC rate that are tried: a thousand times as fast is no network any more."""


def idle_devices(
    request: PlanRequest, chosen: Plan, step_s: float, timed: Sequence[tuple[float, Plan]]
) -> Iterator[str]:
    """Yield a sentence for each kind of device that a plan leaves idle.

    Parameters
    ----------
    request : PlanRequest
    chosen : Plan
    step_s : float, seconds
        Of the chosen plan, by closed forms.
    timed : sequence of (float, Plan)
        Plans found, with their step times; the fastest that uses more of the idle devices is compared.
    """
    used = _used(request.cluster, chosen)
    for g, group in enumerate(request.cluster.nodes):
        idle = group.num_devices - used[g]
        if not idle or not group.device.supports(request.precision) or request.max_devices is not None:
            continue
        who = f"{number_of(idle, 'device')} of {group.num_devices} {group.device.name}"
        others = [(s, plan) for s, plan in timed if _used(request.cluster, plan)[g] > used[g]]
        beside = list(_beside(request, chosen, g))
        missing = [missing_bytes(request, plan) for plan in beside]
        fitting = [plan for plan, lacks in zip(beside, missing, strict=True) if not lacks]
        others += zip(engine_seconds(request, fitting), fitting, strict=True) if fitting else ()
        if not others:
            memory = quantity.memory(group.device.capacity_bytes)
            lacks = f", {quantity.memory(min(missing))} more would do" if missing else ""
            yield f"{who} stay idle: no plan was found in which their {memory} suffice{lacks}"
            continue
        seconds, plan = min(others, key=lambda pair: pair[0])
        loss = quantity.percent(seconds / step_s - 1)
        what = _what(request, g, plan, step_s)
        yield f"{who} stay idle: the best plan found with them takes {loss} longer; {what}"


def _used(cluster: Cluster, plan: Plan) -> list[int]:
    """Return how many devices of each node group a plan uses."""
    ranks, counts, first = sorted(plan.ranks), [], 0
    for group in cluster.nodes:
        counts.append(sum(first <= rank < first + group.num_devices for rank in ranks))
        first += group.num_devices
    return counts


def _beside(request: PlanRequest, chosen: Plan, g: int) -> Iterator[Plan]:
    """Yield the chosen plan with one more pipeline for a few samples, on the idle devices of a group."""
    first = sum(group.num_devices for group in request.cluster.nodes[:g])
    group, taken = request.cluster.nodes[g], set(chosen.ranks)
    idle = [rank for rank in range(first, first + group.num_devices) if rank not in taken]
    largest = max(range(len(chosen.groups)), key=lambda i: chosen.groups[i].share)
    for tp, pp in product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        dp, rest = divmod(len(idle), tp * pp)
        if rest or not dp or tp > group.per_node or pp > request.model.num_layers:
            continue
        samples = min(dp, chosen.groups[largest].share - 1)
        if samples < dp:
            continue
        made = plan_from_degrees(
            request.model.num_layers,
            len(idle),
            tp=tp,
            pp=pp,
            dp=dp,
            recompute="full",
            global_batch=dp,
            seq_len=request.seq_len,
        ).groups[0]
        stages = tuple(
            replace(stage, ranks=tuple(idle[rank] for rank in stage.ranks)) for stage in made.stages
        )
        for share in sorted({dp * k for k in (1, 2, 4) if dp * k < chosen.groups[largest].share}):
            groups = list(chosen.groups)
            groups[largest] = replace(groups[largest], share=groups[largest].share - share)
            plan = replace(chosen, groups=(*groups, replace(made, share=share, stages=stages)))
            if request.choices.holds(plan):
                yield plan


def _what(request: PlanRequest, g: int, plan: Plan, step_s: float) -> str:
    """Return what it would take for the plan to be the faster one: a NIC rate, or nothing of the network."""
    group = request.cluster.nodes[g]
    nic = f"{group.nic_bytes_per_s * 8 / 1e9:g} Gb/s"
    for power in range(1, _DOUBLINGS + 1):
        if _seconds(request, g, plan, 2.0**power) < step_s:
            rate = group.nic_bytes_per_s * 2.0**power * 8 / 1e9
            return f"their NIC of {nic} a node keeps them out, {rate:g} Gb/s would pay"
    left = _seconds(request, g, plan, 2.0**_DOUBLINGS)
    with_all = _seconds(request, None, plan, 2.0**_DOUBLINGS)
    if with_all < step_s:
        return f"faster links of all nodes would pay, not those of these alone ({nic} a node)"
    return (
        "no network would pay: with links as fast as can be it still takes "
        f"{quantity.percent(left / step_s - 1)} longer, for their speed and memory"
    )


def _seconds(request: PlanRequest, g: int | None, plan: Plan, times: float) -> float:
    """Return the step time of a plan where the NICs of a node group, or of all, are so many times as fast."""

    def faster(place: int, group: NodeGroup) -> NodeGroup:
        return (
            group if g not in (None, place) else replace(group, nic_bytes_per_s=times * group.nic_bytes_per_s)
        )

    nodes = tuple(faster(place, group) for place, group in enumerate(request.cluster.nodes))
    changed = replace(request, cluster=replace(request.cluster, nodes=nodes))
    return engine_seconds(changed, [plan])[0]
