"""How a plan sums gradients, as measured links have it: the size of buckets, and ring or tree.

What a plan states of its sums may be changed with it; what it leaves to the runtime stays so. Small buckets
begin while the backward still runs, large ones pay latency less often, and a tree has fewer rounds than a
ring, over other links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from foreshard.comm.fusion.advice import caps_mib
from foreshard.comm.fusion.rules import MIB, ddp_buckets
from foreshard.comm.fusion.timeline import Gradients, bucket_times, exposed_s
from foreshard.comm.schedules.cost import RoundCost, RoundTraffic
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.topology.graph import Edge, Topology, Vertex
from foreshard.control.slots import Chain, State
from foreshard.spec.plan import AUTO, Plan

SCHEDULES = {"ring": "ring", "tree": "double-tree"}
"""The schedules that ranks execute for the `collectives` of a plan."""
_BACKWARD = 2 / 3
"""Of a layer's seconds: a backward takes twice as long as a forward."""
_WORTH = 0.02
"""Part of a step that other sums have to save: less is within the noise of measured links."""


def with_best_sums(plan: Plan, chain: Chain, state: State, step_s: float) -> Plan:
    """Return the plan with the sums that leave least of them after the backward, where that is worth it.

    Parameters
    ----------
    plan : Plan
        Changes of `collectives` and `buckets` that it states; the plan itself where it states neither.
    chain : Chain
    state : State
        Speeds and links as they seem to be.
    step_s : float
        Of the plan.
    """
    if plan.collectives == AUTO and plan.buckets is None:
        return plan
    segments = list(_segments(plan, chain, state))
    if not segments:
        return plan
    algorithms = [plan.collectives] if plan.collectives == AUTO else list(SCHEDULES)
    total = max(float(gradients.num_bytes.sum()) for _, gradients in segments)
    sizes = [plan.buckets] if plan.buckets is None else [plan.buckets, *(n * MIB for n in caps_mib(total))]
    found = [
        (sum_s(segments, state, algorithm, size), replace(plan, collectives=algorithm, buckets=size))
        for algorithm in algorithms
        for size in sizes
    ]
    now_s = next(seconds for seconds, one in found if one == plan)
    least_s, best = min(found, key=lambda pair: pair[0])
    return best if now_s - least_s > _WORTH * step_s else plan


def change_of_sums(old: Plan, new: Plan) -> str:
    """Return what the change of sums is called, or nothing where there is none."""
    if old.collectives != new.collectives:
        return "re-route"
    return "re-bucket" if old.buckets != new.buckets else ""


Segment = tuple[tuple[int, ...], Gradients]
"""Ranks that sum the same gradients, and these in the order in which the last of them makes them."""


def sum_s(segments: Sequence[Segment], state: State, algorithm: str, size: int | None) -> float:
    """Return the seconds of sums after the backward, of the ranks that wait longest."""
    longest = 0.0
    for owners, gradients in segments:
        cost = _cost(owners, state, SCHEDULES.get(algorithm, "ring"))
        limit = float(gradients.num_bytes.sum()) if size is None else float(size)
        bounds = ddp_buckets(gradients.num_bytes.tolist(), (limit,))
        times = bucket_times(gradients, bounds, cost.time_s)
        longest = max(longest, exposed_s(gradients, times))
    return longest


def _segments(plan: Plan, chain: Chain, state: State) -> Iterator[Segment]:
    """Yield the layers that the same ranks hold, last layers first."""
    owners = [tuple(sorted(rank for rank, _ in _holders(plan, layer))) for layer in range(chain.num_layers)]
    for same in dict.fromkeys(owners):
        layers = [layer for layer in reversed(range(chain.num_layers)) if owners[layer] == same]
        if len(same) < 2 or not chain.sync_bytes[layers].any():
            continue
        taken_s = np.zeros(len(layers))
        for place, layer in enumerate(layers):
            for rank, samples in _holders(plan, layer):
                own_s = _BACKWARD * samples * float(chain.layer_s[rank, layer]) / float(state.speed[rank])
                taken_s[place] = max(taken_s[place], own_s)
        backward_s = float(taken_s.sum())
        overlaps = plan.comm.get("grad_overlap", True)
        yield (
            same,
            Gradients(
                names=tuple(map(str, layers)),
                num_bytes=np.asarray(chain.sync_bytes[layers], dtype=float),
                ready_s=np.cumsum(taken_s) if overlaps else np.full(len(layers), backward_s),
                backward_s=backward_s,
            ),
        )


def _holders(plan: Plan, layer: int) -> Iterator[tuple[int, float]]:
    """Yield the ranks that hold a layer, and the samples of each in its last micro-batch."""
    for group in plan.groups:
        last = group.share % group.micro_batch or group.micro_batch
        for stage in group.stages:
            if any(lo <= layer < hi for lo, hi in stage.layers):
                for rank in stage.ranks:
                    yield rank, last / len(stage.ranks) if stage.tp == 1 else last


def _cost(owners: tuple[int, ...], state: State, algorithm: str) -> RoundCost:
    """Return what a sum costs by its schedule, each pair of ranks over its own link."""
    pairs = [(a, b) for a in range(len(owners)) for b in range(len(owners)) if a != b]
    links = {
        pair: Edge(
            source=pair[0],
            target=pair[1],
            bytes_per_s=float(state.bandwidth_bytes_per_s[owners[pair[0]], owners[pair[1]]]),
            latency_s=float(state.latency_s[owners[pair[0]], owners[pair[1]]]),
        )
        for pair in pairs
    }
    vertices = tuple(Vertex(name=str(rank), kind="device") for rank in owners)
    number = {pair: place for place, pair in enumerate(links)}
    network = Topology(vertices=vertices, links=tuple(links.values()))
    schedule = _schedule(algorithm, len(owners))
    return RoundTraffic(schedule, network, lambda a, b, channel: (number[a, b],)).cost()


@cache
def _schedule(algorithm: str, num_ranks: int) -> Schedule:
    return schedule_of("all-reduce", algorithm, num_ranks)
