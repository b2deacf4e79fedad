"""Bytes per second that no all-to-all on a topology exceeds: a multicommodity flow."""

from __future__ import annotations

import numpy as np

from foreshard.comm.synthesis.cuts import crossing_bytes_per_s, device_partitions
from foreshard.comm.synthesis.symmetry import Translations, translations_of
from foreshard.comm.topology.graph import Topology

_LARGEST_FLOW_LP = 200_000
"""Variables of the largest flow problem that HiGHS is given."""
_SOLVED = 0
"""Of a result of ``linprog``: the optimum was found. A solution that ran out of time bounds nothing."""


def all_to_all_bytes_per_s(topology: Topology, limit_s: float = np.inf) -> float:
    """Return the bytes of an all-to-all over its seconds that no schedule exceeds.

    A linear program: one commodity per source, x units to every other rank, the largest x whose flows fit
    links and shared resources. On a symmetric topology one source stands for all. A problem that is too
    large, or takes longer than so many seconds, leaves what is found at once: the sum of the shortest
    distances over the capacity (links weighted by the inverse of their bandwidth), and what leaves and enters
    devices and nodes.
    """
    shifts = translations_of(topology)
    sources = 1 if shifts else topology.num_ranks
    rate = min(_distance_rate(topology), _cut_rate(topology))
    if sources * len(topology.links) <= _LARGEST_FLOW_LP:
        rate = min(rate, _concurrent_flow(topology, shifts, limit_s))
    return topology.num_ranks * rate


def _cut_rate(topology: Topology) -> float:
    """Return a rate per pair that no all-to-all exceeds: what crosses a cut over the pairs that it parts."""
    groups = [group for partition in device_partitions(topology) for group in partition]
    inside = [int(group[topology.devices].sum()) for group in groups]
    return min(
        crossing_bytes_per_s(topology, group, inward) / (count * (topology.num_ranks - count))
        for group, count in zip(groups, inside, strict=True)
        for inward in (False, True)
    )


def _concurrent_flow(topology: Topology, shifts: Translations | None, limit_s: float) -> float:
    """Return the largest x such that every rank can send x bytes/s to every other at once; inf if late."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    links, vertices = len(topology.links), len(topology.vertices)
    sources = [0] if shifts else list(range(topology.num_ranks))
    tail, head = topology.link_ends.T
    each = np.arange(links)
    is_device = np.zeros(vertices)
    is_device[topology.devices] = 1.0
    rows, columns, values = [], [], []
    kept = []
    for k, source in enumerate(sources):
        rows += [k * vertices + head, k * vertices + tail]
        columns += [k * links + each] * 2
        values += [np.ones(links), -np.ones(links)]
        rows.append(k * vertices + np.arange(vertices))
        columns.append(np.full(vertices, len(sources) * links))
        values.append(-is_device)
        # what leaves the source follows from what the others receive
        kept.append(np.delete(k * vertices + np.arange(vertices), topology.devices[source]))
    shape = (len(sources) * vertices, len(sources) * links + 1)
    balance = coo_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape
    ).tocsr()[np.concatenate(kept)]
    used, limit = _capacity_rows(topology, len(sources), shifts)
    scale = float(topology.capacity_bytes_per_s.max())
    cost = np.zeros(shape[1])
    cost[-1] = -1.0
    solved = linprog(
        cost,
        A_ub=used,
        b_ub=limit / scale,
        A_eq=balance,
        b_eq=np.zeros(balance.shape[0]),
        options={"time_limit": limit_s} if limit_s < np.inf else {},
    )
    return float(solved.x[-1]) * scale if solved.status == _SOLVED else np.inf


def _capacity_rows(
    topology: Topology, sources: int, shifts: Translations | None
) -> tuple[object, np.ndarray]:
    """Return the rows and limits of what links and shared resources carry of all sources."""
    from scipy.sparse import coo_matrix

    links = len(topology.links)
    if shifts:
        # by symmetry all links of an orbit carry the same: all sources together, what one puts on the orbit
        orbit = shifts.link_orbit
        limit = np.zeros(orbit.max() + 1)
        np.add.at(limit, orbit, topology.capacity_bytes_per_s[:links])
        rows = coo_matrix((np.ones(links), (orbit, np.arange(links))), shape=(len(limit), links + 1))
        return rows.tocsr(), limit / topology.num_ranks
    uses = [(i, i) for i in range(links)]
    uses += [(links + one, i) for i, link in enumerate(topology.links) for one in link.shared]
    pairs = np.array(uses)
    row = np.tile(pairs[:, 0], sources)
    column = (pairs[:, 1] + links * np.arange(sources)[:, None]).ravel()
    limit = topology.capacity_bytes_per_s
    matrix = coo_matrix((np.ones(len(row)), (row, column)), shape=(len(limit), sources * links + 1))
    return matrix.tocsr(), limit


def _distance_rate(topology: Topology) -> float:
    """Return a rate per pair that no all-to-all exceeds: links over the summed distances of all pairs."""
    rate = topology.capacity_bytes_per_s[: len(topology.links)]
    distance = distances(topology, 1.0 / rate, topology.devices)[:, topology.devices]
    return len(topology.links) / float(distance.sum())


def distances(topology: Topology, length: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the shortest distance from each start to each vertex, over links of these lengths."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import dijkstra

    shortest: dict[tuple[int, int], float] = {}
    for link, own in zip(topology.links, length.tolist(), strict=True):
        key = link.source, link.target
        shortest[key] = min(shortest.get(key, np.inf), own)
    rows, columns = np.array(list(shortest)).T
    graph = csr_matrix((list(shortest.values()), (rows, columns)), shape=(len(topology.vertices),) * 2)
    return np.asarray(dijkstra(graph, indices=starts))
