"""Greedy matching of chunks to free links over time, on any network."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.schedules.schedule import Chunk, Schedule
from foreshard.comm.synthesis.arcs import Arc, speed_tiers
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.topology.graph import Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Who sends what to whom, in the order in which the transfers start."""

    seconds: float
    arc: np.ndarray  # int, shape (transfers,)
    item: np.ndarray  # int, shape (transfers,); chunk


def greedy_transfers(
    topology: Topology,
    arcs: list[Arc],
    chunks: Sequence[Chunk],
    num_bytes: float,
    rng: np.random.Generator,
    *,
    give_up_s: float = np.inf,
    check: Check = unlimited,
) -> Transfers | None:
    """Return transfers that bring every chunk to every rank, by matching free arcs with chunks over time.

    At every instant at which a link becomes free or a chunk arrives, free arcs are matched: the receiver with
    most left to receive first, from the sender with fewest other receivers, the chunk that fewest ranks have.
    An arc that is much slower than others carries a chunk that no rank which its target reaches by faster
    arcs has, or else only one that it brings before everything would be done without it.

    Parameters
    ----------
    topology : Topology
    arcs : list of Arc
        Of the topology.
    chunks : sequence of Chunk
        Equal ones, each of one source.
    num_bytes : float, bytes
        Size of the collective, as `Chunk.weight` is a part of it.
    rng : Generator
        Breaks ties.
    give_up_s : float, seconds
        Schedules that end no sooner are not wanted.
    check : callable, optional
        Ends the search by an exception.

    Returns
    -------
    Transfers or None
        None where the time to give up is reached.
    """
    return _Matching(topology, arcs, chunks, num_bytes, rng, check).run(give_up_s)


class _Matching:
    """State of the matching: who holds what, which arcs are useful, until when links are busy."""

    def __init__(
        self,
        topology: Topology,
        arcs: list[Arc],
        chunks: Sequence[Chunk],
        num_bytes: float,
        rng: np.random.Generator,
        check: Check,
    ) -> None:
        ranks, items = topology.num_ranks, len(chunks)
        chunk_bytes = chunks[0].weight * num_bytes
        self.rng, self.check = rng, check
        self.source = np.array([arc.source for arc in arcs])
        self.target = np.array([arc.target for arc in arcs])
        self.transfer_s = chunk_bytes / np.array([arc.bytes_per_s for arc in arcs])
        self.latency_s = np.array([arc.latency_s for arc in arcs])
        self.resources = [list(arc.resources) for arc in arcs]
        busy_s = chunk_bytes / topology.capacity_bytes_per_s
        self.busy_s = [busy_s[one] for one in self.resources]
        self.arcs_on: list[list[int]] = [[] for _ in busy_s]
        for i, arc in enumerate(arcs):
            for one in arc.resources:
                self.arcs_on[one].append(i)
        self.free_s = np.zeros(len(busy_s))
        self.arc_free_s = np.zeros(len(arcs))
        self.arcs_out = [np.flatnonzero(self.source == rank) for rank in range(ranks)]
        self.arcs_in = [np.flatnonzero(self.target == rank) for rank in range(ranks)]
        self.taken = np.zeros((ranks, items), dtype=bool)
        self.useful = np.zeros((len(arcs), items), dtype=bool)
        self.num_useful = np.zeros(len(arcs), dtype=np.int64)
        self.copies = np.zeros(items)
        self.missing = np.full(ranks, items)
        self._set_tiers(ranks, items)
        self.wait_s = self._seconds_per_item(chunk_bytes, topology)
        for item, chunk in enumerate(chunks):
            self._take(chunk.sources[0], item)
        for item, chunk in enumerate(chunks):
            self._arrive(chunk.sources[0], item)

    def _set_tiers(self, ranks: int, items: int) -> None:
        """Group ranks that arcs faster than those of each tier connect; the fastest tier has single ranks."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        self.tier = speed_tiers(self.transfer_s)
        self.domain = np.zeros((int(self.tier.max()) + 1, ranks), dtype=np.int64)
        for tier in range(len(self.domain)):
            faster = self.tier < tier
            ends = self.source[faster], self.target[faster]
            graph = coo_matrix((np.ones(int(faster.sum())), ends), shape=(ranks, ranks))
            self.domain[tier] = connected_components(graph, connection="strong")[1]
        self.in_domain = np.zeros((len(self.domain), ranks, items), dtype=np.int64)

    def _seconds_per_item(self, chunk_bytes: float, topology: Topology) -> np.ndarray:
        """Return how long each rank takes for a chunk when all that ends at it is busy."""
        rate = np.zeros(len(self.arcs_in))
        last = {self.resources[i][-1] for i in range(len(self.source))}
        for rank, arcs in enumerate(self.arcs_in):
            ends = {next(one for one in reversed(self.resources[i]) if one in last) for i in arcs.tolist()}
            rate[rank] = sum(topology.capacity_bytes_per_s[one] for one in ends)
        return chunk_bytes / rate

    def _take(self, rank: int, item: int) -> None:
        """Count a chunk as on its way to a rank: nobody else needs to send it there."""
        self.taken[rank, item] = True
        arcs = self.arcs_in[rank]
        self.num_useful[arcs] -= self.useful[arcs, item]
        self.useful[arcs, item] = False
        self.copies[item] += 1
        self.missing[rank] -= 1
        self.in_domain[np.arange(len(self.domain)), self.domain[:, rank], item] += 1

    def _arrive(self, rank: int, item: int) -> None:
        """Let a rank send a chunk on."""
        arcs = self.arcs_out[rank]
        wanted = ~self.taken[self.target[arcs], item]
        self.useful[arcs, item] = wanted
        self.num_useful[arcs] += wanted

    def run(self, give_up_s: float) -> Transfers | None:
        """Return the transfers in order of their start, None if they end no sooner than a time."""
        rows: list[tuple[int, int]] = []
        arriving: list[tuple[float, int, int]] = []
        now = end = 0.0
        times: list[float] = []
        while self.missing.any():
            for arc, item in self._matched(now):
                rows.append((arc, item))
                arrives = now + self.transfer_s[arc] + self.latency_s[arc]
                end = max(end, arrives)
                heapq.heappush(arriving, (arrives, int(self.target[arc]), item))
                for busy in self.busy_s[arc].tolist():
                    heapq.heappush(times, now + busy)
            if end >= give_up_s:
                return None
            soonest = [*times[:1], *(arrival[0] for arrival in arriving[:1])]
            if not soonest:
                return None
            # what differs by rounding only is one instant
            now = min(soonest) * (1 + 1e-12)
            while times and times[0] <= now:
                heapq.heappop(times)
            while arriving and arriving[0][0] <= now:
                _, rank, item = heapq.heappop(arriving)
                self._arrive(rank, item)
        pairs = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return Transfers(seconds=end, arc=pairs[:, 0], item=pairs[:, 1])

    def _matched(self, now: float) -> list[tuple[int, int]]:
        """Match free arcs with chunks until nothing useful is left, and occupy their links."""
        made: list[tuple[int, int]] = []
        for repeats in (False, True):
            free = np.flatnonzero(self.arc_free_s <= now)
            if repeats:
                # a slow arc that ends after everything else would be done had better stay free
                done_s = now + float((self.missing * self.wait_s).max())
                late = now + self.transfer_s[free] + self.latency_s[free] > done_s
                free = free[~(late & (self.tier[free] > 0))]
            free = free[self._has_work(free, repeats)]
            noise = self.rng.random(len(free))
            while len(free):
                self.check()
                arc = int(free[self._most_urgent(free, noise)])
                item = self._scarcest(arc, repeats)
                self._take(int(self.target[arc]), item)
                self._occupy(arc, now)
                made.append((arc, item))
                still = self.arc_free_s[free] <= now
                free, noise = free[still], noise[still]
                keep = self._has_work(free, repeats)
                free, noise = free[keep], noise[keep]
        return made

    def _has_work(self, arcs: np.ndarray, repeats: bool) -> np.ndarray:
        """Return which arcs have a useful chunk, one that no faster arc can bring unless `repeats`."""
        found = self.num_useful[arcs] > 0
        slow = np.flatnonzero(found & (self.tier[arcs] > 0))
        if len(slow) and not repeats:
            found[slow] = self._novel(arcs[slow]).any(axis=1)
        return found

    def _novel(self, arcs: np.ndarray) -> np.ndarray:
        """Return which useful chunks of arcs no faster arc can bring, shape (arcs, items)."""
        tier = self.tier[arcs]
        known = self.in_domain[tier, self.domain[tier, self.target[arcs]]] > 0
        return self.useful[arcs] & ~known

    def _most_urgent(self, free: np.ndarray, noise: np.ndarray) -> int:
        """Return the position of the arc that is matched next."""
        left = (self.missing * self.wait_s)[self.target[free]] / self.wait_s.min()
        options = np.bincount(self.source[free], minlength=len(self.missing))[self.source[free]]
        # in this order: what is left to receive, in chunks; the sender's options; chance
        return int((noise + options - 1e4 * left).argmin())

    def _scarcest(self, arc: int, repeats: bool) -> int:
        """Return the chunk that an arc carries."""
        useful = self.useful[arc] if repeats else self._novel(np.array([arc]))[0]
        items = np.flatnonzero(useful)
        return int(items[(self.copies[items] + self.rng.random(len(items))).argmin()])

    def _occupy(self, arc: int, now: float) -> None:
        """Keep the links of an arc busy for a chunk, and the arcs that share one."""
        for one, busy in zip(self.resources[arc], self.busy_s[arc].tolist(), strict=True):
            self.free_s[one] = now + busy
            arcs = self.arcs_on[one]
            self.arc_free_s[arcs] = np.maximum(self.arc_free_s[arcs], now + busy)


def schedule_of_transfers(
    transfers: Transfers, arcs: list[Arc], collective: str, chunks: Sequence[Chunk], num_ranks: int
) -> Schedule:
    """Return the schedule of transfers: each waits for the arrival of its chunk at its sender."""
    source = np.array([arc.source for arc in arcs])[transfers.arc]
    target = np.array([arc.target for arc in arcs])[transfers.arc]
    arrival = np.full((num_ranks, len(chunks)), -1)
    arrival[target, transfers.item] = np.arange(len(source))
    needed = arrival[source, transfers.item]
    return Schedule(
        collective=collective,
        algorithm="greedy matching",
        num_ranks=num_ranks,
        chunks=tuple(chunks),
        source=source,
        target=target,
        chunk=transfers.item,
        is_reduced=np.zeros(len(source), dtype=bool),
        channel=np.array([arc.channel for arc in arcs])[transfers.arc],
        indptr=np.concatenate([[0], np.cumsum(needed >= 0)]),
        indices=needed[needed >= 0],
    )
