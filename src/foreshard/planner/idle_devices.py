"""Why a plan leaves devices idle, and what it would take to use them: which link, memory or speed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from foreshard import quantity
from foreshard.catalog.offers import offers_of
from foreshard.planner.pricing.engine_times import engine_seconds, missing_bytes
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget
from foreshard.spec.cluster import NodeGroup
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.plan import Plan
from foreshard.units import number_of

_DOUBLINGS = 10
"""Doublings of a NIC rate that are tried: a thousand times as fast is no network any more."""
_FASTEST = 16
"""Plans of the search that are timed with faster links: with those, another than the fastest may be it."""


def idle_devices(
    request: PlanRequest,
    chosen: Plan,
    step_s: float,
    timed: Sequence[tuple[float, Plan]],
    budget: TimeBudget = ENDLESS,
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
    budget : TimeBudget
        After it no more plans are priced: what was found is said, and not what it would take.
    """
    used = request.cluster.counts_by_group(chosen.ranks)
    for g, group in enumerate(request.cluster.nodes):
        idle = group.num_devices - used[g]
        if not idle or not group.device.supports(request.precision) or request.max_devices is not None:
            continue
        who = f"{number_of(idle, 'device')} of {group.num_devices} {group.device.name}"
        on = request.cluster.counts_by_group
        others = [(s, plan) for s, plan in timed if on(plan.ranks)[g] > used[g]]
        missing: list[float] = []
        fitting: list[Plan] = []
        for plan in _beside(request, chosen, g):
            if budget.is_over and others:
                break
            missing.append(missing_bytes(request, plan))
            if not missing[-1]:
                fitting.append(plan)
                others.append((engine_seconds(request, [plan])[0], plan))
        if not others:
            memory = quantity.memory(group.device.capacity_bytes)
            lacks = f", {quantity.memory(min(missing))} more would do" if missing else ""
            yield f"{who} stay idle: no plan was found in which their {memory} suffice{lacks}"
            continue
        others.sort(key=lambda pair: pair[0])
        loss = quantity.longer(others[0][0] / step_s)
        plans = [plan for _, plan in others[:_FASTEST]]
        plans += [plan for plan in fitting if not any(plan is other for other in plans)]
        what = _what(request, g, plans, step_s, budget)
        yield f"{who} stay idle: the best plan found with them takes {loss}{what}"


def _beside(request: PlanRequest, chosen: Plan, g: int) -> Iterator[Plan]:
    """Yield the chosen plan with one more pipeline for a few samples, on the idle devices of a group."""
    first = sum(group.num_devices for group in request.cluster.nodes[:g])
    group, taken = request.cluster.nodes[g], set(chosen.ranks)
    idle = [rank for rank in range(first, first + group.num_devices) if rank not in taken]
    largest = max(range(len(chosen.groups)), key=lambda i: chosen.groups[i].share)
    speed = group.device.peak(request.precision) * len(idle)
    theirs = sum(
        count * device.peak(request.precision)
        for stage in chosen.groups[largest].stages
        for device, count in request.cluster.devices_on(stage.ranks)
    )
    for tp, pp, recompute in product((1, 2, 4, 8), (1, 2, 4, 8, 16), ("none", "full")):
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
            recompute=recompute,
            sp=tp > 1 and offers_of(request.framework).cuts_sequences,
            global_batch=dp,
            seq_len=request.seq_len,
        ).groups[0]
        stages = tuple(
            replace(stage, ranks=tuple(idle[rank] for rank in stage.ranks)) for stage in made.stages
        )
        even = round(chosen.groups[largest].share * speed / (speed + theirs) / dp)
        for share in sorted({dp * k for k in (1, 2, 4, even) if 0 < dp * k < chosen.groups[largest].share}):
            groups = list(chosen.groups)
            groups[largest] = replace(groups[largest], share=groups[largest].share - share)
            plan = replace(chosen, groups=(*groups, replace(made, share=share, stages=stages)))
            if request.choices.holds(plan):
                yield plan


def _what(request: PlanRequest, g: int, plans: Sequence[Plan], step_s: float, budget: TimeBudget) -> str:
    """Return what it would take for one of the plans to be the fastest: a NIC rate, or no network at all.

    Nothing where time is over.
    """
    group = request.cluster.nodes[g]
    with_all = [step_s]
    nic = f"{group.nic_bytes_per_s * 8 / 1e9:g} Gb/s"
    for place in (g, None):
        if budget.is_over:
            return ""
        with_all = _seconds(request, place, plans, 2.0**_DOUBLINGS)
        # A plan that is too slow with the fastest links is so with all others.
        able = [plan for plan, seconds in zip(plans, with_all, strict=True) if seconds < step_s]
        if not able:
            continue
        powers = range(1, _DOUBLINGS + 1)
        first = bisect_left(powers, True, key=lambda n: min(_seconds(request, place, able, 2.0**n)) < step_s)
        times = 2.0 ** powers[first]
        rate = f"{group.nic_bytes_per_s * times * 8 / 1e9:g} Gb/s"
        if place is not None:
            return f"; their NIC of {nic} a node keeps them out, {rate} would pay"
        if len({nodes.nic_bytes_per_s for nodes in request.cluster.nodes}) > 1:
            rate = f"NICs of all nodes {times:g} times as fast"
        else:
            rate = f"NICs of {rate} on all nodes"
        return f"; their NIC of {nic} a node keeps them out, {rate} would pay"
    return (
        f"; no network would pay: with all links as fast as can be the best of {len(plans)} such plans "
        f"still takes {quantity.longer(min(with_all) / step_s)}, for their speed and memory"
    )


def _seconds(request: PlanRequest, g: int | None, plans: Sequence[Plan], times: float) -> list[float]:
    """Return the step times of plans, NICs of a node group or of all being so many times as fast."""

    def faster(place: int, group: NodeGroup) -> NodeGroup:
        return (
            group if g not in (None, place) else replace(group, nic_bytes_per_s=times * group.nic_bytes_per_s)
        )

    nodes = tuple(faster(place, group) for place, group in enumerate(request.cluster.nodes))
    changed = replace(request, cluster=replace(request.cluster, nodes=nodes))
    return engine_seconds(changed, plans)
