"""Sets of node groups that may train together, caps on devices, and which pipelines the bound speaks of."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np

from foreshard.planner.pricing.stage_options import stage_options
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Problem
from foreshard.planner.solver.work_bounds import speed_of
from foreshard.predict.batch import short_samples
from foreshard.predict.placement import link_domains
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Plan

_MANY_GROUPS = 6
"""Node groups above which not every set of them is a problem of its own: there would be over 63."""


def node_sets(request: PlanRequest) -> list[tuple[int, ...]]:
    """Return the sets of node groups that may train together, the largest first: one vendor, the precision.

    Of many groups: all of a vendor, all but one, and each alone.
    """
    nodes = request.cluster.nodes
    able = [g for g, group in enumerate(nodes) if group.device.supports(request.precision)]
    if request.choices:
        able = [g for g in able if stage_options(request, (g,), every=True)]
    found: dict[tuple[int, ...], None] = {}
    for vendor in dict.fromkeys(nodes[g].device.vendor for g in able):
        own = [g for g in able if nodes[g].device.vendor == vendor]
        most = range(len(own), 0, -1)
        for size in most if len(own) <= _MANY_GROUPS else (len(own), len(own) - 1, 1):
            found.update(dict.fromkeys(combinations(own, size)))
    return sorted(found, key=lambda use: -sum(nodes[g].num_devices for g in use))


def capped(problem: Problem, max_devices: int | None) -> Problem:
    """Return the problem on at most so many devices, those that do most work first."""
    if max_devices is None or sum(problem.counts) <= max_devices:
        return problem
    speeds = np.array([speed_of(problem, kind) for kind in range(len(problem.counts))])
    counts, left = [0] * len(problem.counts), max_devices
    for kind in np.argsort(-speeds, kind="stable"):
        counts[kind] = min(left, problem.counts[kind])
        left -= counts[kind]
    return replace(problem, counts=tuple(counts))


def are_apart(cluster: Cluster, plan: Plan) -> bool:
    """Return whether stages of the same layers in different pipelines are as the space of the bound has them.

    In different link domains, if the node groups in use have several, and of at most twice each other's inner
    data-parallel ranks.
    """
    domains = link_domains(cluster)
    groups = np.repeat(np.arange(len(cluster.nodes)), [nodes.num_devices for nodes in cluster.nodes])
    several = len(np.unique(domains[np.isin(groups, groups[list(plan.ranks)])])) > 1
    holder: dict[tuple[int, int], int] = {}
    widths: dict[int, set[int]] = {}
    for g, group in enumerate(plan.groups):
        for stage in group.stages:
            own = np.unique(domains[list(stage.ranks)]).tolist() if several else []
            for layer in (layer for start, stop in stage.layers for layer in range(start, stop)):
                widths.setdefault(layer, set()).add(stage.inner_dp)
                if any(holder.setdefault((layer, domain), g) != g for domain in own):
                    return False
    return all(max(some) <= 2 * min(some) for some in widths.values())


def are_short_alike(plan: Plan) -> bool:
    """Return whether a short last micro-batch takes the same part of a whole one on each stage of a pipeline.

    Other stages split it over more ranks, of which each has a sample more or none.
    """
    return all(len({short_samples(group, stage) for stage in group.stages}) == 1 for group in plan.groups)
