"""A plan as a job on a shared fabric: when an iteration computes, and which gradients it sends then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreshard.comm.fusion.rules import ddp_buckets, ddp_limits
from foreshard.comm.jobs.job import IterationPhase, TrainingJob, Transfer, collective_transfers
from foreshard.errors import SpecError
from foreshard.predict.gradients import backward_pass
from foreshard.predict.step import predict
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan


def job_of_plan(
    name: str, model: Model, cluster: Cluster, plan: Plan, *, num_iterations: int, arrival_s: float = 0.0
) -> TrainingJob:
    """Return the job that trains a model under a data-parallel plan.

    The predicted step without exposed gradient collectives is the computation. Buckets of gradients (DDP's
    rule) leave as rings, one for each rank of a node, while the last backward runs; the optimizer waits for
    them. Latencies of rounds, and what the predictor adds to collectives inside a step, are left out.

    Raises
    ------
    SpecError
        For a plan with a pipeline or expert parallelism, or whose tensor-parallel ranks span nodes: the
        traffic of those is not modelled as flows.
    """
    rings = [ring for part in _replicas(cluster, plan) for ring in node_rings(cluster, part)]
    num_parts = plan.groups[0].stages[0].tp
    made = backward_pass(model, cluster, plan)
    found = predict(model, cluster, plan)
    optimizer_s = found.time_breakdown_s["optimizer"]
    compute_s = found.step_time_s - found.time_breakdown_s["data_comm"]
    before_s = max(0.0, compute_s - optimizer_s - made.gradients.backward_s)
    sizes = made.gradients.num_bytes
    phases, last_s = [], -before_s
    bounds = ddp_buckets(sizes.tolist(), ddp_limits())
    for number, (start, stop) in enumerate(bounds):
        ready_s = float(made.gradients.ready_s[stop - 1])
        if number == len(bounds) - 1:
            ready_s = made.gradients.backward_s
        phases.append(
            IterationPhase(
                compute_s=ready_s - last_s,
                transfers=_sends(float(np.sum(sizes[start:stop])), rings, len(rings) // num_parts),
                overlaps=number < len(bounds) - 1,
            )
        )
        last_s = ready_s
    phases.append(IterationPhase(compute_s=optimizer_s))
    return TrainingJob(
        name=name,
        ranks=tuple(sorted(plan.ranks)),
        phases=tuple(phases),
        num_iterations=num_iterations,
        arrival_s=arrival_s,
    )


def _sends(num_bytes: float, rings: list[list[int]], shares: int) -> tuple[Transfer, ...]:
    """Return all-reduces over rings; as many as `shares` have equal shares of the same bytes."""
    return tuple(
        replace(one, flow=number)
        for number, ring in enumerate(rings)
        for one in collective_transfers("all-reduce", num_bytes / shares, ring)
    )


def node_rings(cluster: Cluster, ranks: Sequence[int]) -> list[list[int]]:
    """Return rings over ranks, as many as each node has of them: every rank's NIC is used by one.

    A ring enters a node where it has left the node before, in every second node backwards. Nodes with unequal
    numbers of ranks have one ring in the order of ranks.

    Examples
    --------
    >>> from foreshard.catalog.clusters import load_cluster
    >>> node_rings(load_cluster("2x2xa100-sxm-40gb"), range(4))
    [[0, 1, 3, 2], [1, 0, 2, 3]]
    """
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(cluster.node_of(rank), []).append(rank)
    sizes = {len(inside) for inside in nodes.values()}
    if len(nodes) == 1 or len(sizes) > 1:
        return [sorted(ranks)]
    found = []
    for first in range(sizes.pop()):
        ring: list[int] = []
        for number, inside in enumerate(nodes.values()):
            turned = [*inside[first:], *inside[:first]]
            ring += turned[::-1] if number % 2 else turned
        found.append(ring)
    return found


def _replicas(cluster: Cluster, plan: Plan) -> list[list[int]]:
    """Return the ranks that hold the same part of the model, part by part."""
    parts: dict[int, list[int]] = {}
    for group in plan.groups:
        if len(group.stages) > 1 or group.stages[0].ep > 1:
            raise SpecError(
                f"{len(group.stages)} stages, expert parallelism {group.stages[0].ep}",
                key="plan",
                value=len(group.stages),
                rule="Jobs made from plans are data-parallel, with tensor parallelism inside nodes",
                fix="State the phases of the job",
            )
        stage = group.stages[0]
        inside = stage.tp * stage.cp
        for first in range(0, len(stage.ranks), inside):
            held = stage.ranks[first : first + inside]
            if len({cluster.node_of(rank) for rank in held}) > 1:
                raise SpecError(
                    f"ranks {held[0]} to {held[-1]} share layers across nodes",
                    key="plan",
                    value=inside,
                    rule="Jobs made from plans have tensor parallelism inside nodes",
                    fix="State the phases of the job",
                )
            for place, rank in enumerate(held):
                parts.setdefault(place % stage.tp, []).append(rank)
    found = [sorted(part) for part in parts.values()]
    if len(found[0]) < 2:
        rule = "A job on a shared fabric has at least two replicas"
        raise SpecError("one replica sends no gradients", key="plan", value=1, rule=rule)
    return found
