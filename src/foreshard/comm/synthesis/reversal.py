"""A reduce-scatter as an all-gather backwards, and an all-reduce as one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.comm.schedules.schedule import Chunk, Schedule, chunks_of
from foreshard.comm.synthesis.arcs import reversed_topology
from foreshard.comm.synthesis.timing import arrivals_s
from foreshard.comm.topology.channel_routes import routes_from
from foreshard.comm.topology.graph import Topology


def reduce_scatter_from(all_gather: Schedule, topology: Topology, num_bytes: float) -> Schedule:
    """Return the reduce-scatter whose sends are those of an all-gather, backwards in time.

    Parameters
    ----------
    all_gather : Schedule
        Of the topology with all links turned round.
    topology : Topology
        That of the reduce-scatter.
    num_bytes : float, bytes
        Size at which the order of the sends is turned round.
    """
    turned = reversed_topology(topology)
    # stable: of sends that arrive together, the later listed one may wait for the earlier one
    order = np.argsort(-arrivals_s(all_gather, turned, num_bytes)[::-1], kind="stable")
    order = all_gather.num_sends - 1 - order
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    waiting = np.repeat(np.arange(all_gather.num_sends), np.diff(all_gather.indptr))
    # what waited for a send is now what that send waits for
    indptr, indices = _grouped(position[all_gather.indices], position[waiting], all_gather.num_sends)
    ranks = all_gather.num_ranks
    chunks = [
        Chunk(weight=chunk.weight, sources=tuple(range(ranks)), targets=chunk.sources)
        for chunk in all_gather.chunks
    ]
    channel = _turned_channels(all_gather, topology, turned)
    return Schedule(
        collective="reduce-scatter",
        algorithm=f"{all_gather.algorithm}, reversed",
        num_ranks=ranks,
        chunks=tuple(chunks),
        source=all_gather.target[order],
        target=all_gather.source[order],
        chunk=all_gather.chunk[order],
        is_reduced=np.ones(len(order), dtype=bool),
        channel=channel[order],
        indptr=indptr,
        indices=indices,
    )


def all_reduce_from(reduce_scatter: Schedule, all_gather: Schedule) -> Schedule:
    """Return the all-reduce in which each chunk is gathered as soon as its owner has its sum.

    Parameters
    ----------
    reduce_scatter, all_gather : Schedule
        Of the same topology and number of chunks.
    """
    ranks, first = reduce_scatter.num_ranks, reduce_scatter.num_sends
    owner = np.array([chunk.sources[0] for chunk in all_gather.chunks])
    final = np.flatnonzero(reduce_scatter.target == owner[reduce_scatter.chunk])
    by_chunk, last_sends = _grouped(reduce_scatter.chunk[final], final, len(owner))
    begins = np.flatnonzero(np.diff(all_gather.indptr) == 0)
    chunk = all_gather.chunk[begins]
    waits = [np.repeat(np.arange(first), np.diff(reduce_scatter.indptr))]
    waits.append(first + np.repeat(np.arange(all_gather.num_sends), np.diff(all_gather.indptr)))
    counts = by_chunk[chunk + 1] - by_chunk[chunk]
    waits.append(first + np.repeat(begins, counts))
    starts = np.repeat(by_chunk[chunk] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    ends = [reduce_scatter.indices, first + all_gather.indices]
    ends.append(last_sends[starts + np.arange(len(starts))])
    total = first + all_gather.num_sends
    indptr, indices = _grouped(np.concatenate(waits), np.concatenate(ends), total)
    parts = len(owner) // ranks
    weights = [sum(c.weight for c in all_gather.chunks[r * parts : (r + 1) * parts]) for r in range(ranks)]
    chunks: Sequence[Chunk] = chunks_of("all-reduce", ranks, parts, weights=weights)
    if any(made.weight != chunk.weight for made, chunk in zip(chunks, all_gather.chunks, strict=True)):
        every = tuple(range(ranks))
        chunks = [Chunk(weight=one.weight, sources=every, targets=every) for one in all_gather.chunks]
    both = (reduce_scatter, all_gather)
    return Schedule(
        collective="all-reduce",
        algorithm=f"{all_gather.algorithm}, both ways",
        num_ranks=ranks,
        chunks=tuple(chunks),
        source=np.concatenate([one.source for one in both]),
        target=np.concatenate([one.target for one in both]),
        chunk=np.concatenate([one.chunk for one in both]),
        is_reduced=np.concatenate([one.is_reduced for one in both]),
        channel=np.concatenate([one.channel for one in both]),
        indptr=indptr,
        indices=indices,
    )


def _grouped(key: np.ndarray, value: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values by key as CSR: of key k, `values[indptr[k]:indptr[k + 1]]`."""
    order = np.argsort(key, kind="stable")
    return np.concatenate([[0], np.cumsum(np.bincount(key, minlength=count))]), value[order]


def _turned_channels(all_gather: Schedule, topology: Topology, turned: Topology) -> np.ndarray:
    """Return the channel of each send whose route is the same links the other way."""
    channel = all_gather.channel.copy()
    ends = np.stack([all_gather.source, all_gather.target, channel], axis=1)
    distinct, of = np.unique(ends, axis=0, return_inverse=True)
    devices = topology.devices.tolist()
    forward = {v: routes_from(topology, devices[v]) for v in np.unique(distinct[:, 1]).tolist()}
    backward = {u: routes_from(turned, devices[u]) for u in np.unique(distinct[:, 0]).tolist()}
    found = np.empty(len(distinct), dtype=np.int64)
    for i, (u, v, c) in enumerate(distinct.tolist()):
        there, back = backward[u][devices[v]], forward[v][devices[u]]
        links = there[c % len(there)][::-1]
        found[i] = back.index(links) if links in back else c
    return found[of.ravel()]
