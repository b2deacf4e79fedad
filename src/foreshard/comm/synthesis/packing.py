"""All-gathers and broadcasts by trees: equally many from each root, packed into the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.arcs import Arc
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.synthesis.legs import HopGraph, HopOrder, Legs, ordered, remaining_s, schedule_of_hops
from foreshard.comm.synthesis.splitting import TreeFlows, tree_capacities
from foreshard.comm.topology.graph import Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanningTree:
    """A tree of arcs from a rank to all others, several of the same shape counted as one."""

    root: int
    copies: int  # trees of this shape
    arcs: tuple[int, ...]  # one into each rank but the root, parents before children


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Trees that the links of a topology carry at once."""

    roots: tuple[int, ...]
    trees_per_root: int
    seconds_per_byte: float  # of the data of one tree, when all trees stream
    trees: tuple[SpanningTree, ...]

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the collective over its seconds, for sizes at which filling the trees takes no time."""
        return len(self.roots) * self.trees_per_root / self.seconds_per_byte


def packed_trees(
    topology: Topology,
    arcs: list[Arc],
    roots: Sequence[int],
    trees_per_root: int,
    rate_bytes_per_s: float,
    check: Check = unlimited,
) -> Packing | None:
    """Return the packing with the most bandwidth for a number of trees per root, None where none is found.

    Parameters
    ----------
    topology : Topology
    arcs : list of Arc
    roots : sequence of int
        Ranks that the trees start at: all for an all-gather, one for a broadcast.
    trees_per_root : int, at least 1
        More come nearer the bound, and take longer to find.
    rate_bytes_per_s : float
        Bytes of the collective over its seconds, that no schedule exceeds.
    check : callable, optional
        Ends the search by an exception.

    Returns
    -------
    Packing or None
        None also for topologies with shared resources, which cuts do not describe.
    """
    if topology.shared:
        return None
    count = np.zeros(topology.num_ranks, dtype=np.int64)
    count[list(roots)] = trees_per_root
    scaled = tree_capacities(topology, arcs, count, rate_bytes_per_s, check)
    if scaled is None:
        return None
    seconds_per_byte, room = scaled
    trees = tuple(_grown(arcs, room, count, check))
    return Packing(
        roots=tuple(roots), trees_per_root=trees_per_root, seconds_per_byte=seconds_per_byte, trees=trees
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Partial:
    """Copies of a tree that does not reach all ranks yet; ranks outside have depth -1."""

    root: int
    copies: int
    arcs: tuple[int, ...]
    depth: np.ndarray


def _grown(arcs: list[Arc], room: np.ndarray, count: np.ndarray, check: Check) -> list[SpanningTree]:
    """Return trees grown one by one, arc by arc, each arc by as many copies as leaves room for the others.

    Source
    ------
    Berczi and Frank 2010 (packing by maximum flows), as in ForestColl, arXiv 2402.06787, section 5.3.
    """
    ranks = np.arange(len(count))
    forest = _Forest(len(count), arcs, room)
    done: list[SpanningTree] = []
    waiting = [
        _Partial(root=root, copies=int(count[root]), arcs=(), depth=np.where(ranks == root, 0, -1))
        for root in np.flatnonzero(count)[::-1].tolist()
    ]
    while waiting:
        tree = waiting.pop()
        tight = np.zeros(len(arcs), dtype=bool)
        while (tree.depth < 0).any():
            check()
            arc, number = forest.next_arc(tree, waiting, tight)
            if number < tree.copies:
                waiting.append(replace(tree, copies=tree.copies - number))
            depth = tree.depth.copy()
            depth[arcs[arc].target] = depth[arcs[arc].source] + 1
            tree = replace(tree, copies=number, arcs=(*tree.arcs, arc), depth=depth)
            forest.room[arc] -= number
        done.append(SpanningTree(root=tree.root, copies=tree.copies, arcs=tree.arcs))
    return done


class _Forest:
    """Room for trees on arcs, and what of it a tree may take without leaving others too little."""

    def __init__(self, num_ranks: int, arcs: list[Arc], room: np.ndarray) -> None:
        self.num_ranks, self.room = num_ranks, room.copy()
        self.source = np.array([arc.source for arc in arcs])
        self.target = np.array([arc.target for arc in arcs])
        self.latency_s = np.array([arc.latency_s for arc in arcs])

    def next_arc(self, tree: _Partial, waiting: list[_Partial], tight: np.ndarray) -> tuple[int, int]:
        """Return the arc nearest the root by which a tree can grow, and how many copies can grow by it.

        Taking copies of an arc from the room narrows only cuts around its target, each by as many: as many
        can be taken as the flow to the target does not miss. An arc that is `tight` for a tree stays so.
        """
        options = np.flatnonzero(
            (self.room > 0) & (tree.depth[self.source] >= 0) & (tree.depth[self.target] < 0) & ~tight
        )
        keys = options, -self.room[options], self.latency_s[options], tree.depth[self.source[options]]
        flows = self._flows(tree, waiting)
        of_tree = self.num_ranks
        for arc in options[np.lexsort(keys)].tolist():
            source, target = self.source[arc], self.target[arc]
            number = min(int(self.room[arc]), tree.copies)
            # these copies supply the target themselves
            change = ((source, target), -number), ((-1, of_tree), -number), ((-1, target), number)
            for place, amount in change:
                flows.capacity[place] += amount
            short = flows.shortfall(int(target))
            for place, amount in change:
                flows.capacity[place] -= amount
            if short < number:
                return arc, number - short
            tight[arc] = True
        raise AssertionError("a packing with room for all trees can always grow one (Edmonds 1973)")

    def _flows(self, tree: _Partial, waiting: list[_Partial]) -> TreeFlows:
        """Return the flows of the room that is left: a tree may supply any rank that it reaches."""
        begun = [tree, *(one for one in waiting if one.arcs)]
        count = self.num_ranks + len(begun) + 1
        capacity = np.zeros((count, count), dtype=np.int64)
        np.add.at(capacity, (self.source, self.target), self.room)
        for one in waiting:
            if not one.arcs:
                capacity[-1, one.root] += one.copies
        for node, one in enumerate(begun, self.num_ranks):
            capacity[-1, node] = one.copies
            capacity[node, np.flatnonzero(one.depth >= 0)] = one.copies
        needed = tree.copies + sum(one.copies for one in waiting)
        return TreeFlows(capacity, list(range(self.num_ranks)), needed)


def streamed(
    packing: Packing,
    hops: HopGraph,
    num_bytes: float,
    pieces: int,
    *,
    by_piece: bool,
    check: Check = unlimited,
) -> HopOrder:
    """Return the hops of a collective in which each tree streams its data in pieces.

    Parameters
    ----------
    packing : Packing
    hops : HopGraph
        Of the arcs of the trees.
    num_bytes : float, bytes
        Size of the collective.
    pieces : int, at least 1
        Of the data of one tree.
    by_piece : bool
        Whether each link takes the first pieces of all trees before the second ones; else the leg with most
        behind it.
    check : callable, optional
        Ends the search by an exception.
    """
    chunk_bytes = num_bytes / len(packing.roots) / packing.trees_per_root / pieces
    items, arcs, parents = [], [], []
    begun = {root: i * packing.trees_per_root for i, root in enumerate(packing.roots)}
    total = 0
    for tree in packing.trees:
        leg_into: dict[int, int] = {}
        parent = []
        for leg, arc in enumerate(tree.arcs):
            parent.append(leg_into.get(int(hops.source[arc]), -1))
            leg_into[int(hops.target[arc])] = leg
        number = tree.copies * pieces
        first = begun[tree.root] * pieces
        begun[tree.root] += tree.copies
        shift = total + len(parent) * np.arange(number)[:, None]
        items.append(np.repeat(first + np.arange(number), len(parent)))
        arcs.append(np.tile(tree.arcs, number))
        parents.append(np.where(np.array(parent) < 0, -1, np.array(parent) + shift).ravel())
        total += len(parent) * number
    item, hop, before = (np.concatenate(one) for one in (items, arcs, parents))
    left_s = remaining_s(hops, chunk_bytes, hop, before)
    piece = item % pieces
    keys = (piece, -left_s) if not by_piece else (-left_s, piece)
    turn = np.lexsort(keys).argsort().astype(float)
    return ordered(hops, Legs(item=item, hop=hop, parent=before, turn=turn), chunk_bytes, check)


def schedule_of_trees(
    order: HopOrder, packing: Packing, hops: HopGraph, arcs: list[Arc], pieces: int
) -> Schedule:
    """Return the schedule of streamed trees."""
    return schedule_of_hops(
        order,
        hops,
        arcs,
        collective="broadcast" if len(packing.roots) == 1 else "all-gather",
        algorithm="spanning trees",
        parts=packing.trees_per_root * pieces,
    )
