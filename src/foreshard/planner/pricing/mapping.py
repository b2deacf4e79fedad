"""From an arrangement to a plan: which ranks run which stage."""

from __future__ import annotations

from foreshard.catalog.offers import offers_of
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.problem import Arrangement, Problem
from foreshard.spec.plan import Group, Plan, Stage


def plan_of(request: PlanRequest, problem: Problem, arrangement: Arrangement) -> Plan | None:
    """Return the plan of an arrangement, None when its stages do not pack into the nodes.

    A stage of fewer devices than a node lies within one; larger ones take whole nodes. The largest stages are
    placed first, those of equal size pipeline by pipeline, so that neighbours share nodes where they can.
    """
    demands = []
    for g, template in enumerate(arrangement.templates):
        for s, part in enumerate(template):
            kind: StageKind = problem.names[part.option]  # type: ignore[assignment]
            demands.append((kind.num_devices, g, s, kind.node_group))
    free = _free_nodes(request)
    ranks: dict[tuple[int, int], tuple[int, ...]] = {}
    for size, g, s, node_group in sorted(demands, key=lambda one: (-one[0], *one[1:])):
        found = _take(free[node_group], size)
        if found is None:
            return None
        ranks[g, s] = found
    cuts = offers_of(request.framework).cuts_sequences
    templates = range(len(arrangement.templates))
    return Plan(
        global_batch=request.global_batch,
        seq_len=request.seq_len,
        precision=request.precision,
        optimizer=request.optimizer,
        framework=request.framework.label,
        groups=tuple(_group(problem, arrangement, g, ranks, cuts=cuts) for g in templates),
    )


def _free_nodes(request: PlanRequest) -> list[list[list[int]]]:
    """Return the ranks of every node, by node group."""
    free, first = [], 0
    for nodes in request.cluster.nodes:
        starts = range(first, first + nodes.num_devices, nodes.per_node)
        free.append([list(range(start, start + nodes.per_node)) for start in starts])
        first += nodes.num_devices
    return free


def _take(nodes: list[list[int]], size: int) -> tuple[int, ...] | None:
    """Take ranks off the first nodes that have room; a node without free ranks leaves the list."""
    per_node = max(map(len, nodes), default=0)
    if size <= per_node:
        at, node = next((at, node) for at, node in enumerate(nodes) if len(node) >= size)
        taken = tuple(node[:size])
        del node[:size]
        if not node:
            del nodes[at]
        return taken
    whole = [node for node in nodes if len(node) == per_node]
    if not nodes or size % per_node or len(whole) * per_node < size:
        return None
    chosen = whole[: size // per_node]
    nodes[:] = [node for node in nodes if all(node is not one for one in chosen)]
    return tuple(rank for node in chosen for rank in node)


def _group(
    problem: Problem,
    arrangement: Arrangement,
    g: int,
    ranks: dict[tuple[int, int], tuple[int, ...]],
    *,
    cuts: bool,
) -> Group:
    template = arrangement.templates[g]
    stages = []
    for s, part in enumerate(template):
        kind: StageKind = problem.names[part.option]  # type: ignore[assignment]
        stages.append(
            Stage(
                ranks=ranks[g, s],
                layers=((part.start, part.stop),),
                tp=kind.tp,
                cp=kind.cp,
                ep=kind.ep,
                zero=kind.zero,
                recompute=kind.recompute,
            )
        )
    return Group(
        share=arrangement.shares[g],
        stages=tuple(stages),
        micro_batch=int(problem.micro_batch[template[0].option]),
        schedule="1f1b",
        sp=cuts and any(stage.tp > 1 for stage in stages),
    )
