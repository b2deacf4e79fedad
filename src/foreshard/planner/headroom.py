"""Memory that plans leave free, so that they fit with a stated probability."""

from __future__ import annotations

from dataclasses import replace

from foreshard.planner.result import PlanResult, Ranked
from foreshard.predict.memory_interval import fits_probability, usable_share
from foreshard.quantity import percent
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework


def with_headroom(cluster: Cluster, framework: Framework, probability: float) -> Cluster:
    """Return the cluster as a search may fill it: devices with the share of memory that fits so probably.

    Raises
    ------
    SpecError
        For no probability, or one that the known runs cannot show.
    """
    share = usable_share(framework, probability)
    nodes = tuple(
        replace(group, device=replace(group.device, capacity_bytes=share * group.device.capacity_bytes))
        for group in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def with_whole_memory(result: PlanResult, cluster: Cluster, framework: Framework) -> PlanResult:
    """Return the result with plans beside the memory that devices have, and what was left free as a note."""
    plans = tuple(_whole(ranked, cluster, framework) for ranked in result.plans)
    first = cluster.nodes[0].device
    whole = [ranked.prediction.memory for ranked in result.plans]
    if not whole or whole[0].capacity_bytes >= first.capacity_bytes:
        return replace(result, plans=plans)
    left = 1.0 - whole[0].capacity_bytes / cluster.device_of(whole[0].peak_rank).capacity_bytes
    note = f"{percent(left, 0)} of the memory of devices is left free (--memory-margin)"
    return replace(result, plans=plans, notes=(*result.notes, note))


def _whole(ranked: Ranked, cluster: Cluster, framework: Framework) -> Ranked:
    memory = ranked.prediction.memory
    capacity = cluster.device_of(memory.peak_rank).capacity_bytes
    known = (
        None if memory.fits_probability is None else fits_probability(framework, memory.peak_bytes, capacity)
    )
    whole = replace(memory, capacity_bytes=capacity, fits_probability=known)
    return replace(ranked, prediction=replace(ranked.prediction, memory=whole))
