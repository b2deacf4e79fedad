"""Ranks for the stages of an arrangement of pools, as near as can be to where its layers are now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreshard.planner.pools import Demand, Pool, demand_of
from foreshard.planner.problem import Arrangement, Part, Problem
from foreshard.spec.plan import Plan

Ranks = dict[tuple[int, int], tuple[int, ...]]
"""Ranks of each (pipeline, stage)."""


def place(running: Plan, problem: Problem, pools: Sequence[Pool], arrangement: Arrangement) -> Ranks | None:
    """Return the ranks of every (pipeline, stage): those that hold most of its layers first.

    None where stages do not pack into nodes.
    """
    needs: dict[tuple[int, int], tuple[Part, Any]] = {
        (g, s): (part, problem.names[part.option])
        for g, template in enumerate(arrangement.templates)
        for s, part in enumerate(template)
    }
    free = [[list(node) for node in pool.nodes] for pool in pools]
    found: Ranks = {}
    used: set[int] = set()
    for _, where, block in _kept(running, pools, needs):
        if where not in found and used.isdisjoint(block):
            found[where] = block
            used.update(block)
    for pool in free:
        for node in pool:
            node[:] = [rank for rank in node if rank not in used]
    # What joins several pools of a node is hardest to place, then what is large.
    for where in sorted(
        (w for w in needs if w not in found),
        key=lambda w: (-len(needs[w][1].demand), -sum(n for _, n in needs[w][1].demand)),
    ):
        taken = _take(free, pools, needs[where][1].demand)
        if taken is None:
            return None
        found[where] = taken
    return found


def _kept(
    running: Plan, pools: Sequence[Pool], needs: Mapping[tuple[int, int], tuple[Part, Any]]
) -> list[tuple[int, tuple[int, int], tuple[int, ...]]]:
    """Return (layers kept, negative; stage; ranks) for blocks of ranks that run a stage of that make now."""
    blocks = [(stage, demand_of(stage.ranks, pools)) for group in running.groups for stage in group.stages]
    made = []
    for where, (part, kind) in needs.items():
        for stage, demand in blocks:
            if demand == kind.demand and stage.tp == kind.base.tp:
                start, stop = stage.layers[0]
                made.append((-max(0, min(stop, part.stop) - max(start, part.start)), where, stage.ranks))
    return sorted(made)


def _take(free: list[list[list[int]]], pools: Sequence[Pool], demand: Demand) -> tuple[int, ...] | None:
    """Take ranks for a demand, node group by node group."""
    taken: list[int] = []
    by_group: dict[int, list[tuple[int, int]]] = {}
    for p, count in demand:
        by_group.setdefault(pools[p].node_group, []).append((p, count))
    for _, part in sorted(by_group.items()):
        some = _take_in(free, pools, part)
        if some is None:
            return None
        taken += some
    return tuple(taken)


def _take_in(
    free: list[list[list[int]]], pools: Sequence[Pool], demand: Sequence[tuple[int, int]]
) -> list[int] | None:
    """Take ranks of one group: whole nodes of pools with no hurt ones, or what one hurt node has left."""
    taken: list[int] = []
    hurt = [(p, count) for p, count in demand if pools[p].state]
    for p, count in demand:
        if not pools[p].state:
            some = _take_nodes(free[p], count)
            if some is None:
                return None
            taken += some
    if hurt:
        sizes = [(free[p], count) for p, count in hurt]
        at = next((i for i in range(len(sizes[0][0])) if all(len(f[i]) >= n for f, n in sizes)), None)
        if at is None:
            return None
        for nodes, count in sizes:
            taken += nodes[at][:count]
            del nodes[at][:count]
    return taken


def _take_nodes(nodes: list[list[int]], count: int) -> list[int] | None:
    """Take ranks of the fullest node that is no fuller than needed, or of several whole nodes."""
    fitting = sorted((node for node in nodes if len(node) >= count), key=len)
    if fitting:
        taken = fitting[0][:count]
        del fitting[0][:count]
        return taken
    per_node = max((len(node) for node in nodes), default=0)
    whole = [node for node in nodes if len(node) == per_node]
    if not per_node or count % per_node or len(whole) * per_node < count:
        return None
    taken = []
    for node in whole[: count // per_node]:
        taken += node
        node.clear()
    return taken
