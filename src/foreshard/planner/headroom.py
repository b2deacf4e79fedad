"""Memory that plans leave free, so that they fit with a stated probability."""

from __future__ import annotations

from dataclasses import replace

from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult, Ranked
from foreshard.predict.memory_interval import fits_probability, usable_share
from foreshard.quantity import percent
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework


def leaving_free(request: PlanRequest) -> PlanRequest:
    """Return a request whose devices have the share of memory that fits as probably as it asks.

    Raises
    ------
    SpecError
        For no probability, or one that the known runs cannot show.
    """
    return replace(request, cluster=resized(request.cluster, _share(request)))


def resized(cluster: Cluster, share: float) -> Cluster:
    """Return a cluster whose devices have so many times their memory."""
    nodes = tuple(
        replace(group, device=replace(group.device, capacity_bytes=share * group.device.capacity_bytes))
        for group in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def asking(
    filled: PlanRequest, *, framework: Framework | None = None, margin: float | None = None
) -> PlanRequest:
    """Return a request that already leaves memory free, with another framework or margin in its place."""
    changed = replace(
        filled,
        framework=framework or filled.framework,
        memory_margin=filled.memory_margin if margin is None else margin,
    )
    return replace(changed, cluster=resized(filled.cluster, _share(changed) / _share(filled)))


def left_free_words(request: PlanRequest) -> str:
    """Return how much memory plans leave free, empty where they may take all."""
    left = 1.0 - _share(request)
    return (
        f"{percent(left, 0)} of memory left free (--memory-margin {request.memory_margin:g})" if left else ""
    )


def with_whole_memory(result: PlanResult, request: PlanRequest) -> PlanResult:
    """Return the result with plans beside all the memory that devices have."""
    plans, front = (
        tuple(beside_whole_memory(one, request.cluster, request.framework) for one in found)
        for found in (result.plans, result.front)
    )
    return replace(result, plans=plans, front=front)


def _share(request: PlanRequest) -> float:
    return usable_share(request.framework, request.memory_margin)


def beside_whole_memory(ranked: Ranked, cluster: Cluster, framework: Framework) -> Ranked:
    """Return a plan beside all the memory that its fullest device has."""
    memory = ranked.prediction.memory
    capacity = cluster.device_of(memory.peak_rank).capacity_bytes
    known = (
        None if memory.fits_probability is None else fits_probability(framework, memory.peak_bytes, capacity)
    )
    whole = replace(memory, capacity_bytes=capacity, fits_probability=known)
    return replace(ranked, prediction=replace(ranked.prediction, memory=whole))
