"""Other planners beside ours, all plans timed by the same engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreshard.planner.baselines import BaselineResult
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlanner:
    """The best plan of another planner."""

    name: str
    step_time_s: float | None
    ratio: float | None  # its step time over ours
    gap: float | None  # (its step time - bound) / bound
    wall_s: float
    note: str  # why it has no plan

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``plan --compare-with --json`` prints for one planner."""
        return asdict(self)


def compared(judged: BaselineResult, ours_s: float | None) -> ComparedPlanner:
    """Return a planner's result relative to the step time of ours."""
    known = judged.step_time_s is not None and ours_s
    return ComparedPlanner(
        name=judged.name,
        step_time_s=judged.step_time_s,
        ratio=judged.step_time_s / ours_s if known else None,  # type: ignore[operator]
        gap=judged.gap_to_bound,
        wall_s=judged.wall_s,
        note=judged.why_none,
    )


def beyond(plan: Plan, cluster: Cluster) -> str:
    """Return in a sentence what a plan has that other planners do not choose from, empty where nothing."""
    stages = [stage for group in plan.groups for stage in group.stages]
    kinds = [{cluster.device_of(rank).name for rank in stage.ranks} for stage in stages]
    has = {
        "stages on two kinds of devices": any(len(names) > 1 for names in kinds),
        "experts cut over ranks": any(stage.ep > 1 for stage in stages),
        "sequences split over ranks": any(stage.cp > 1 for stage in stages),
        "interleaved stages": any(group.num_chunks > 1 for group in plan.groups),
    }
    some = " and ".join(name for name, present in has.items() if present)
    return f"Not among what the other planners choose from: {some}." if some else ""
