"""Groups that differ in speed: how long each works and waits, and the shares that would even them out.

A group is timed alone, as a run of its own share on its own ranks; what it then spends on its own samples
is its work, and the slowest group sets the pace of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foreshard.advise.traced_request import Asked
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan

_TOGETHER = ("data_comm", "optimizer", "straggler")  # what groups do together, after their own samples
# Wait over work from which groups are called uneven: within the noise of a step below it.
UNEVEN = 0.02
# Groups timed alone at most, each with a prediction; tables of more are not read.
MAX_GROUPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """One group of a plan: samples of a step, seconds of work on them, and seconds of waiting after."""

    group: int
    devices: str
    share: int
    work_s: float
    wait_s: float


def group_times(request: Asked, plan: Plan) -> tuple[GroupTime, ...]:
    """Return how long each group works and waits; empty for one group, or for very many."""
    if not 1 < len(plan.groups) <= MAX_GROUPS:
        return ()
    works: list[float] = []
    known: dict[object, float] = {}
    names = []
    for group in plan.groups:
        kinds = {request.cluster.device_of(rank).name: None for stage in group.stages for rank in stage.ranks}
        names.append(" + ".join(kinds))
        shape = names[-1], _moved(group, request.cluster)
        if shape not in known:
            alone = replace(plan, groups=(group,), global_batch=group.share)
            asked = request.alone(alone)
            made = asked.predict(asked.trial_engine)
            parts = made.time_breakdown_s
            known[shape] = made.step_time_s - sum(parts[name] for name in _TOGETHER)
        works.append(known[shape])
    slowest = max(works)
    return tuple(
        GroupTime(group=g, devices=names[g], share=group.share, work_s=work, wait_s=slowest - work)
        for g, (group, work) in enumerate(zip(plan.groups, works, strict=True))
    )


def _moved(group: Group, cluster: Cluster) -> Group:
    """Return the group on the first ranks that lie in nodes as its own do, to compare groups."""
    first = min(rank for stage in group.stages for rank in stage.ranks)
    shift = first - first % max(node.per_node for node in cluster.nodes)
    stages = (replace(stage, ranks=tuple(rank - shift for rank in stage.ranks)) for stage in group.stages)
    return replace(group, stages=tuple(stages))


def uneven(times: Sequence[GroupTime]) -> bool:
    """Return whether some group waits for more than a hundredth or two of its work."""
    return any(group.wait_s > UNEVEN * (group.wait_s + group.work_s) for group in times)


def better_shares(request: Asked, plan: Plan) -> Iterator[str]:
    """Yield shares in proportion to the samples each group does in a second, as a change 24:8."""
    if request.plan is None:
        return
    times = group_times(request, plan)
    if not uneven(times):
        return
    speeds = [group.share / group.work_s for group in times]
    for unit in dict.fromkeys((_unit(plan), 1)):
        shares = apportioned(speeds, plan.global_batch, unit)
        if shares is not None and shares != [group.share for group in times]:
            yield "shares=" + ":".join(map(str, shares))


def _unit(plan: Plan) -> int:
    """Return the micro-batch of all groups, 1 where they differ or do not divide the global batch."""
    sizes = {group.micro_batch for group in plan.groups}
    size = max(sizes)
    return size if len(sizes) == 1 and plan.global_batch % size == 0 else 1


def apportioned(weights: Sequence[float], total: int, unit: int = 1) -> list[int] | None:
    """Return shares of `total` in proportion to the weights, in multiples of `unit`, by largest remainder.

    None when there is not a unit for everybody.

    Examples
    --------
    >>> apportioned([3.0, 1.0], 32, 4)
    [24, 8]
    """
    count = total // unit
    if count < len(weights) or total % unit:
        return None
    spare = count - len(weights)
    exact = [max(0.0, count * weight / sum(weights) - 1) for weight in weights]
    scale = spare / (sum(exact) or 1.0)
    exact = [value * scale for value in exact]
    whole = [int(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_rest[: spare - sum(whole)]:
        whole[i] += 1
    return [unit * (1 + value) for value in whole]
