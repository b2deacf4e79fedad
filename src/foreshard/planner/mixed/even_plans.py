"""The grid of degrees on the nodes of one kind, a part of the space of every cluster.

The grid is searched on a cluster of those nodes alone; its plans are then written on the ranks they have in
the whole cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from foreshard.planner.grid.equal_nodes import least_step_s, search_homogeneous
from foreshard.planner.mixed.best_so_far import MixedFound
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.spec.cluster import NodeGroup
from foreshard.spec.plan import Plan

_LEAST_S = 0.05
"""Seconds of a grid that is searched at all: its first cells are priced in them."""


@dataclass(slots=True, kw_only=True, eq=False)
class EvenPlans:
    """The grid on some equal nodes, searched anew with more time where that was short.

    Attributes
    ----------
    request : PlanRequest
        On those nodes alone.
    ranks : ndarray of int, shape (devices,)
        Of those nodes in the whole cluster.
    result : PlanResult or None
        What the search came to.
    alone : bool
        Whether its own best plan is looked for, however fast others are: it may be cheaper.
    """

    request: PlanRequest
    ranks: np.ndarray
    result: PlanResult | None = None
    alone: bool = False
    spent_s: float = 0.0
    slice_s: float = 0.0
    proof_slice_s: float = 0.0
    _floor_s: list[float] = field(default_factory=list)

    @property
    def bound_s(self) -> float:
        """Return a step time that none of its plans beats."""
        if not self._floor_s:
            self._floor_s.append(least_step_s(self.request))
        return max(self._floor_s[0], self.result.lower_bound_step_time_s if self.result else 0.0)

    @property
    def is_priced(self) -> bool:
        """Return whether its bound is more than what work alone says."""
        return self.result is not None

    def promise_s(self, best_s: float) -> float:
        """Return by how many seconds the step may become shorter; 0 once all of it was searched."""
        if self.result is not None and not self.result.interrupted:
            return 0.0
        if self.alone and self.result is None:
            return np.inf
        if self.alone and self.result is not None and self.result.plans:
            best_s = self.result.plans[0].prediction.step_time_s
        return max(0.0, best_s - self.bound_s) if np.isfinite(best_s) else np.inf

    def is_unproven(self, best_s: float) -> bool:
        """Return whether its bound may still be raised."""
        return self.promise_s(best_s) > 0.0

    def prove(self, found: MixedFound, budget: TimeBudget) -> None:
        """Search on: what is priced is proven."""
        self.advance(found, budget)

    def advance(self, found: MixedFound, budget: TimeBudget) -> None:
        """Search the grid, and keep the plans that fit on the whole cluster."""
        beat_s = min(found.best_s, self.request.beat_s)
        asked = replace(self.request, budget_s=max(budget.left_s, _LEAST_S), beat_s=beat_s)
        self.result = search_homogeneous(asked, explain=False, least_s=0.0)
        for one in (*self.result.plans, *self.result.front):
            found.take_even(_on_ranks(one.plan, self.ranks))

    @property
    def evaluated(self) -> int:
        """Return the plans timed."""
        return self.result.evaluated if self.result else 0


def even_plans_of(request: PlanRequest, *, alone: bool = False) -> list[EvenPlans]:
    """Return the grids of a cluster: on all nodes of each kind of device, and on each group of equal nodes.

    Nodes of one kind that differ, or that slower links join, are taken as equal ones with the best links of
    any: none of their plans is faster than that.
    """
    cluster = request.cluster
    first = np.cumsum([0, *(group.num_devices for group in cluster.nodes)])
    kinds: dict[object, list[int]] = {}
    for g, group in enumerate(cluster.nodes):
        if group.device.supports(request.precision):
            kinds.setdefault((group.device, group.per_node, group.nvlink_domain), []).append(g)
            kinds.setdefault(g, [g])
    found = []
    for use in dict.fromkeys(tuple(use) for use in kinds.values()):
        nodes = replace(
            cluster,
            nodes=(_as_one([cluster.nodes[g] for g in use]),),
        )
        ranks = np.concatenate([np.arange(first[g], first[g + 1]) for g in use])
        local = "local" if len(cluster.nodes) > 1 else request.executor
        own = replace(request, cluster=nodes, executor=local)
        found.append(EvenPlans(request=own, ranks=ranks, alone=alone))
    return found


def _as_one(groups: list[NodeGroup]) -> NodeGroup:
    return replace(
        groups[0],
        count=sum(group.count for group in groups),
        nic_bytes_per_s=max(group.nic_bytes_per_s for group in groups),
        nic_latency_s=min(group.nic_latency_s for group in groups),
    )


def _on_ranks(plan: Plan, ranks: np.ndarray) -> Plan:
    """Return a plan on other ranks: those that its own are the places of."""
    groups = tuple(
        replace(
            group,
            stages=tuple(
                replace(stage, ranks=tuple(ranks[list(stage.ranks)].tolist())) for stage in group.stages
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)
