"""Paths for the chunks of all-to-alls and sends that load links evenly."""

from __future__ import annotations

import numpy as np

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.synthesis.legs import HopGraph, HopOrder, Legs, ordered, remaining_s
from foreshard.comm.synthesis.quotient import Shifts

_STEEPNESS = 8
"""Power of a resource's load that a path pays: high enough to shun what is full, low enough to spread."""
_PASSES = 3
"""Times that every path is chosen anew given all others; later passes change less than 1 % of the load."""


def routed_order(
    hops: HopGraph,
    demands: np.ndarray,
    pieces: int,
    chunk_bytes: float,
    bound_s: float,
    rng: np.random.Generator,
    check: Check = unlimited,
) -> HopOrder:
    """Return the hops of equal chunks along paths that load resources evenly.

    Paths are chosen one by one, each the shortest given the load of all others, the load's price rising
    steeply towards what the bound allows; then again given all. On each resource the chunk with the longest
    way to go is first; where all chunks go the same way, those of different bottlenecks take turns.

    Parameters
    ----------
    hops : HopGraph
    demands : ndarray of int, shape (demands, 2)
        Places where each path starts and ends.
    pieces : int, at least 1
        Chunks that follow each other on each path.
    chunk_bytes : float
    bound_s : float, seconds
        That no schedule takes fewer of.
    rng : Generator
        Breaks ties.
    check : callable, optional
        Ends the search by an exception.
    """
    chosen = _even_paths(hops, demands, pieces * chunk_bytes / bound_s, rng, check)
    paths = [path for path in chosen for _ in range(pieces)]
    same_way = bool((demands == demands[0]).all())
    turn = _turns(hops, paths) if same_way else rng.random(len(paths))
    legs = _legs_of(hops, paths, chunk_bytes, turn, longest_first=not same_way)
    return ordered(hops, legs, chunk_bytes, check)


def _even_paths(
    hops: HopGraph, demands: np.ndarray, bytes_per_s: float, rng: np.random.Generator, check: Check
) -> list[list[int]]:
    """Return a path of hops for each demand; a resource is full where its load is 1."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import dijkstra

    count = len(hops.source)
    width = max(len(one) for one in hops.resources)
    # resources as a padded table: the last column stands for none
    uses = np.full((count, width), hops.num_resources)
    busy = np.zeros((count, width))
    for i, (used, seconds) in enumerate(zip(hops.resources, hops.busy_s_per_byte, strict=True)):
        uses[i, : len(used)], busy[i, : len(used)] = used, seconds
    busy *= bytes_per_s
    load = np.zeros(hops.num_resources + 1)
    order = np.lexsort((hops.target, hops.source))
    ends = np.stack([hops.source, hops.target], axis=1)[order]
    first = np.flatnonzero(np.concatenate([[True], (ends[1:] != ends[:-1]).any(axis=1)]))
    indptr = np.searchsorted(ends[first, 0], np.arange(hops.num_places + 1))
    columns = ends[first, 1]
    latency = hops.latency_s * (1e-3 / max(float(hops.latency_s.max()), 1e-12))
    base = busy.max() * 1e-3 * (1.0 + latency + 1e-2 * rng.random(count))
    paths: list[list[int]] = [[] for _ in demands]
    for _ in range(_PASSES):
        for item in rng.permutation(len(demands)).tolist():
            check()
            for hop in paths[item]:
                load[uses[hop]] -= busy[hop]
            price = (busy * (0.01 + np.maximum(load[uses] + busy, 0.0) ** _STEEPNESS)).sum(axis=1) + base
            sorted_price = price[order]
            cheapest = np.minimum.reduceat(sorted_price, first)
            graph = csr_matrix((cheapest, columns, indptr), shape=(hops.num_places,) * 2)
            start, at = (int(one) for one in demands[item])
            before = dijkstra(graph, indices=start, return_predecessors=True)[1]
            path: list[int] = []
            while at != start:
                came = int(before[at])
                k = int(indptr[came] + np.searchsorted(columns[indptr[came] : indptr[came + 1]], at))
                among = np.arange(first[k], first[k + 1] if k + 1 < len(first) else count)
                path.append(int(order[among[sorted_price[among].argmin()]]))
                at = came
            paths[item] = path[::-1]
            for hop in path:
                load[uses[hop]] += busy[hop]
    return paths


def _turns(hops: HopGraph, paths: list[list[int]]) -> np.ndarray:
    """Return a number from 0 to 1 for each path: those through one bottleneck are spread evenly over it."""
    load = np.zeros(hops.num_resources)
    for path in paths:
        for hop in path:
            load[list(hops.resources[hop])] += hops.busy_s_per_byte[hop]
    narrowest = [max((one for hop in path for one in hops.resources[hop]), key=load.item) for path in paths]
    count = np.bincount(narrowest, minlength=len(load))
    seen = np.zeros(len(load))
    turn = np.empty(len(paths))
    for item, one in enumerate(narrowest):
        turn[item] = (seen[one] + 0.5) / count[one]
        seen[one] += 1
    return turn


def _legs_of(
    hops: HopGraph, paths: list[list[int]], chunk_bytes: float, turn: np.ndarray, *, longest_first: bool
) -> Legs:
    """Return the legs of paths: the longest way first, or the one whose turn it is."""
    length = np.array([len(path) for path in paths])
    item = np.repeat(np.arange(len(paths)), length)
    hop = np.array([hop for path in paths for hop in path], dtype=np.int64)
    begins = np.zeros(len(hop), dtype=bool)
    begins[(np.cumsum(length) - length)[length > 0]] = True
    parent = np.where(begins, -1, np.arange(len(hop)) - 1)
    order = turn[item]
    if longest_first:
        left_s = remaining_s(hops, chunk_bytes, hop, parent)
        order = np.lexsort((order, -left_s)).argsort().astype(float)
    return Legs(item=item, hop=hop, parent=parent, turn=order)


def demands_of(collective: str, num_ranks: int, parts: int) -> np.ndarray:
    """Return the ends of each chunk of an all-to-all or send, in the order of `chunks_of`."""
    if collective == "send":
        return np.tile([[0, num_ranks - 1]], (parts, 1))
    every = np.arange(num_ranks)
    pairs = np.stack([np.repeat(every, num_ranks), np.tile(every, num_ranks)], axis=1)
    return np.repeat(pairs, parts, axis=0)


def all_to_all_of_shifts(order: HopOrder, hops: HopGraph, shifts: Shifts, parts: int) -> Schedule:
    """Return the all-to-all in which every rank sends as rank 0 does, shifted.

    Item `d * parts + p` of the order is part p of what rank 0 sends to rank d.
    """
    ranks = hops.num_places
    every = np.arange(ranks)[None, :]
    distance, part = (one[:, None] for one in np.divmod(order.item, parts))
    chunk = (every * ranks + shifts.group.added(every, distance)) * parts + part
    waits = np.repeat(order.previous >= 0, ranks)
    index = (order.previous[:, None] * ranks + every).ravel()
    return Schedule(
        collective="all-to-all",
        algorithm="translated even paths",
        num_ranks=ranks,
        chunks=tuple(chunks_of("all-to-all", ranks, parts)),
        source=shifts.group.added(every, hops.source[order.hop][:, None]).ravel(),
        target=shifts.group.added(every, hops.target[order.hop][:, None]).ravel(),
        chunk=chunk.ravel(),
        is_reduced=np.zeros(chunk.size, dtype=bool),
        channel=shifts.channels(order.hop % len(shifts.shift)).ravel(),
        indptr=np.concatenate([[0], np.cumsum(waits)]),
        indices=index[waits],
    )
