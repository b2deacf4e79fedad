"""Devices that no longer run alike: pools of equal pace, and a priced problem rewritten for them.

Prices are those of healthy devices; a stage takes as many times as long as its slowest device does, a joint
one as long as the slower of its two kinds of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import numpy as np

from foreshard.planner.problem import Problem
from foreshard.planner.stage_options import StageKind
from foreshard.spec.cluster import Cluster

Demand = tuple[tuple[int, int], ...]
"""Devices of each pool that a stage takes: (pool, count), without zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices of nodes in the same state that run at the same pace.

    Attributes
    ----------
    node_group : int
    pace : float
        How many times as long they take as healthy ones.
    nodes : tuple of tuple of int
        Their ranks, node by node.
    state : int
        Which pools lie in the same nodes; 0 for nodes where nothing happened.
    """

    node_group: int
    pace: float
    nodes: tuple[tuple[int, ...], ...]
    state: int

    @property
    def count(self) -> int:
        """Devices in the pool."""
        return sum(len(node) for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledKind:
    """What makes a stage of an option, and the devices it takes."""

    base: StageKind
    demand: Demand
    pace: float


def pools_of(
    cluster: Cluster, use: Sequence[int], slowdown: Mapping[int, float], lost: Collection[int]
) -> tuple[Pool, ...]:
    """Return the pools of some node groups: whole nodes first, then what each kind of hurt node has left."""
    nodes_of: dict[tuple[int, tuple[float, ...], float], list[tuple[int, ...]]] = {}
    first = 0
    for g, group in enumerate(cluster.nodes):
        for start in range(first, first + group.num_devices, group.per_node) if g in use else ():
            paces = {
                rank: float(slowdown.get(rank, 1.0))
                for rank in range(start, start + group.per_node)
                if rank not in lost
            }
            signature = tuple(sorted(paces.values()))
            for pace in sorted(set(signature)):
                ranks = tuple(rank for rank, own in paces.items() if own == pace)
                nodes_of.setdefault((g, signature, pace), []).append(ranks)
        first += group.num_devices
    states: dict[tuple[int, tuple[float, ...]], int] = {}
    pools = []
    for (g, signature, pace), nodes in nodes_of.items():
        whole = signature == (1.0,) * cluster.nodes[g].per_node
        state = 0 if whole else states.setdefault((g, signature), len(states) + 1)
        pools.append(Pool(node_group=g, pace=pace, nodes=tuple(nodes), state=state))
    return tuple(sorted(pools, key=lambda pool: (pool.state > 0, pool.node_group, pool.state, pool.pace)))


def demand_of(ranks: Sequence[int], pools: Sequence[Pool]) -> Demand | None:
    """Return the devices of each pool among some ranks, None where one is in none (lost)."""
    where = {rank: p for p, pool in enumerate(pools) for node in pool.nodes for rank in node}
    if any(rank not in where for rank in ranks):
        return None
    return tuple(sorted(Counter(where[rank] for rank in ranks).items()))


def pooled_problem(
    problem: Problem,
    pools: Sequence[Pool],
    options: Sequence[int],
    extra: Collection[tuple[int, Demand]] = (),
) -> Problem:
    """Return the problem of the pools: chosen options on every mix of pools that makes sense.

    Parameters
    ----------
    problem : Problem
        Of healthy devices, one kind per node group; its options carry their :class:`StageKind`.
    pools : sequence of Pool
    options : sequence of int
        Of the problem, those to offer.
    extra : collection of (option, demand)
        Mixes to offer besides, such as those that run now.
    """
    chosen: dict[tuple[int, Demand], None] = {}
    for o in options:
        kind: StageKind = problem.names[o]  # type: ignore[assignment]
        for demand in _demands(pools, kind):
            chosen[o, demand] = None
    chosen.update(dict.fromkeys(extra))
    rows = [o for o, _ in chosen]
    paces = np.array([max(pools[p].pace for p, _ in demand) for _, demand in chosen])
    takes = np.zeros((len(rows), len(pools)), dtype=int)
    for i, (_, demand) in enumerate(chosen):
        for pool, count in demand:
            takes[i, pool] = count
    return replace(
        problem,
        counts=tuple(pool.count for pool in pools),
        takes=takes,
        micro_batch=problem.micro_batch[rows],
        grain=problem.grain[rows],
        time_s=_times(problem, pools, list(chosen), paces),
        tail_s=problem.tail_s[:, rows] * paces[None, :, None],
        max_in_flight=problem.max_in_flight[rows],
        hop_s=problem.hop_s[np.ix_(rows, rows)],
        names=tuple(
            PooledKind(base=problem.names[o], demand=demand, pace=float(pace))  # type: ignore[arg-type]
            for (o, demand), pace in zip(chosen, paces, strict=True)
        ),
    )


def _times(
    problem: Problem, pools: Sequence[Pool], chosen: Sequence[tuple[int, Demand]], paces: np.ndarray
) -> np.ndarray:
    """Return what stages take on some devices: joint ones by the pace of the devices of either node group.

    What the other ranks of a joint stage take is the price of its kind turned, where the problem has that.
    """
    times = problem.time_s[[o for o, _ in chosen]] * paces[:, None]
    joint = [i for i, (o, _) in enumerate(chosen) if problem.names[o].beside]  # type: ignore[attr-defined]
    at = {name: o for o, name in enumerate(problem.names)} if joint else {}
    for i in joint:
        o, demand = chosen[i]
        kind: StageKind = problem.names[o]  # type: ignore[assignment]
        other = at.get(kind.turned)
        if other is None:
            continue
        sides: dict[bool, float] = {}
        for p, _ in demand:
            own = pools[p].node_group == kind.node_group
            sides[own] = max(sides.get(own, 0.0), pools[p].pace)
        times[i] = np.maximum(problem.time_s[o] * sides[True], problem.time_s[other] * sides[False])
    return times


def _demands(pools: Sequence[Pool], kind: StageKind) -> list[Demand]:
    """Return which devices a stage of a kind may take, on each of its node groups."""
    parts = [_demands_in(pools, part.node_group, kind.split * part.inner_dp) for part in kind.parts]
    return [tuple(sorted(chain.from_iterable(some))) for some in product(*parts)]


def _demands_in(pools: Sequence[Pool], node_group: int, size: int) -> list[Demand]:
    """Return which pools so many devices of a node group may be from.

    Whole nodes alone; what a hurt node has left, its fastest first, down to any pace; a hurt node without
    losses beside whole ones where a stage spans several.
    """
    found: list[Demand] = []
    whole = [p for p, pool in enumerate(pools) if pool.state == 0 and pool.node_group == node_group]
    found += [((p, size),) for p in whole if pools[p].count >= size]
    per_node = max((len(node) for p in whole for node in pools[p].nodes), default=0)
    for state in sorted({pool.state for pool in pools if pool.state and pool.node_group == node_group}):
        inside = [p for p, pool in enumerate(pools) if pool.state == state]
        left = [len(pools[p].nodes[0]) for p in inside]
        for i in range(len(inside)):
            for j in range(i + 1, len(inside) + 1):
                short = size - sum(left[i : j - 1])
                if 0 < short <= left[j - 1]:
                    faster = zip(inside[i : j - 1], left[i : j - 1], strict=True)
                    found.append((*faster, (inside[j - 1], short)))
        rest = size - sum(left)
        if whole and sum(left) == per_node and rest > 0 and rest % per_node == 0:
            found.append(((whole[0], rest), *zip(inside, left, strict=True)))
    return list(dict.fromkeys(found))
