"""All-gather on a network whose ranks are all alike: what one rank receives when, done by all at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.synthesis.arcs import speed_tiers
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.synthesis.symmetry import Translations
from foreshard.comm.topology.channel_routes import bottleneck_bytes_per_s, routes_from
from foreshard.comm.topology.graph import Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Shifts:
    """Ways in which every rank sends to the one a fixed shift away, all ranks at once."""

    topology: Topology
    group: Translations
    shift: np.ndarray  # int, shape (ways,); target of rank 0
    # first_channel, num_channels: int, shape (ways,); equally wide routes between the two ranks
    first_channel: np.ndarray
    num_channels: np.ndarray
    # shape (ways, orbits); seconds for which a byte from every rank keeps each orbit of links busy
    occupancy_s_per_byte: np.ndarray
    # transfer_s_per_byte, latency_s: shape (ways,)
    transfer_s_per_byte: np.ndarray
    latency_s: np.ndarray

    def channels(self, way: np.ndarray) -> np.ndarray:
        """Return the channel of every rank in transfers by the given ways, shape (transfers, ranks)."""
        turn = np.arange(len(way))[:, None] + np.arange(self.topology.num_ranks)
        return self.first_channel[way][:, None] + turn % self.num_channels[way][:, None]

    @cached_property
    def rate_bytes_per_s(self) -> float:
        """What a rank receives per second where every orbit that binds is busy."""
        binding = self.occupancy_s_per_byte.argmax(axis=1)
        busiest = self.occupancy_s_per_byte.max(axis=1)
        return float(sum(1.0 / busiest[binding == one].min() for one in set(binding.tolist())))


def shifts_of(topology: Topology, group: Translations) -> Shifts:
    """Return the ways of all ranks to send at once, along the routes of rank 0 that pass no device.

    A route that all ranks can take at once without slowing each other is a way. Of equally wide routes on
    which they would, all together are one way: ranks and transfers take turns on them.
    """
    rank_of = {vertex: rank for rank, vertex in enumerate(topology.devices.tolist())}
    routes = routes_from(topology, int(topology.devices[0]))
    made: list[tuple[int, int, int, float, float]] = []
    occupancy = []
    for target, options in sorted(routes.items()):
        if target not in rank_of:
            continue
        rows = [_occupancy(topology, group, links) for links in options]
        widths = [bottleneck_bytes_per_s(topology, links) for links in options]
        latency_s = [sum(topology.links[link].latency_s for link in links) for links in options]
        for width, alike in groupby(range(len(options)), key=widths.__getitem__):
            channels = list(alike)
            crowded = max(float(rows[c].max()) for c in channels) * width > 1.0 + 1e-9
            for some in [channels] if crowded else [[c] for c in channels]:
                occupancy.append(np.mean([rows[c] for c in some], axis=0))
                slowest_s = max(latency_s[c] for c in some)
                made.append((rank_of[target], some[0], len(some), 1.0 / width, slowest_s))
    shift, channel, number, transfer, latency = zip(*made, strict=True)
    busy = np.array(occupancy)
    return Shifts(
        topology=topology,
        group=group,
        shift=np.array(shift),
        first_channel=np.array(channel),
        num_channels=np.array(number),
        occupancy_s_per_byte=busy,
        transfer_s_per_byte=np.maximum(busy.max(axis=1), transfer),
        latency_s=np.array(latency),
    )


def _occupancy(topology: Topology, group: Translations, links: tuple[int, ...]) -> np.ndarray:
    """Return how long each orbit is busy when every rank sends a byte by the shifted route."""
    orbit_size = np.bincount(group.link_orbit)
    busy = np.zeros(len(orbit_size))
    for link in links:
        orbit = group.link_orbit[link]
        busy[orbit] += topology.num_ranks / orbit_size[orbit] / topology.links[link].bytes_per_s
    return busy


@dataclass(frozen=True, kw_only=True, eq=False)
class Reception:
    """What rank 0 receives in an all-gather, in the order in which the transfers start."""

    seconds: float
    parts: int  # chunks of each rank
    way: np.ndarray  # int, shape (receptions,); of `Shifts`
    item: np.ndarray  # int, shape (receptions,); rank whose data it is times `parts`, plus the part


def greedy_reception(
    shifts: Shifts, num_bytes: float, parts: int, rng: np.random.Generator, check: Check = unlimited
) -> Reception:
    """Return an all-gather of one rank by list scheduling: the scarcest useful item on each free way.

    Whenever a way is free, it takes an item that its sender holds and its receiver is not receiving. A way
    that is much slower than others takes what they cannot carry yet, and else only what it finishes before
    the others would be done with everything.

    Parameters
    ----------
    shifts : Shifts
    num_bytes : float, bytes
        Size of the all-gather.
    parts : int, at least 1
    rng : Generator
        Breaks ties.
    check : callable, optional
        Ends the search by an exception.
    """
    return _Reception(shifts, num_bytes, parts, rng).run(check)


class _Reception:
    """State of the list scheduling: what is held, what is under way, and until when links are busy."""

    def __init__(self, shifts: Shifts, num_bytes: float, parts: int, rng: np.random.Generator) -> None:
        ranks = shifts.topology.num_ranks
        self.shifts, self.parts, self.rng = shifts, parts, rng
        bytes_ = num_bytes / ranks / parts
        self.left = (ranks - 1) * parts
        self.busy_s = shifts.occupancy_s_per_byte * bytes_
        self.transfer_s = shifts.transfer_s_per_byte * bytes_
        self.item_s = bytes_ / shifts.rate_bytes_per_s
        # ways of one tier may take from each other
        self.tier = speed_tiers(self.transfer_s)
        # before[w, s]: the item that rank 0 must hold so that its counterpart can send item s by way w
        every = np.arange(ranks)
        self.before = shifts.group.added(every[None, :], shifts.shift[:, None])
        self.after = shifts.group.subtracted(every[None, :], shifts.shift[:, None])
        self.holds_from = np.full((ranks, parts), np.inf)
        self.holds_from[0] = 0.0
        self.taken = np.zeros((ranks, parts), dtype=bool)
        self.suppliers = np.zeros((int(self.tier.max()) + 1, ranks, parts), dtype=np.int64)
        self.noise = rng.random((ranks, parts))
        for part in range(parts):
            self._take(0, part)
        self.free_s = np.zeros(shifts.occupancy_s_per_byte.shape[1])

    def _take(self, item: int, part: int) -> None:
        """Count an item as received, and its receiver's counterparts as suppliers of what follows it."""
        self.taken[item, part] = True
        np.add.at(self.suppliers[..., part], (self.tier, self.after[:, item]), 1)

    def run(self, check: Check) -> Reception:
        """Return the receptions in order of their start."""
        rows: list[tuple[float, int, int]] = []
        ways = self.rng.permutation(len(self.transfer_s))
        arrivals: set[float] = set()
        now = end = 0.0
        uses = self.busy_s > 0
        while self.left:
            # a slow way takes what only it can carry before any slow way repeats what others will
            for repeats in (False, True):
                for way in ways.tolist():
                    check()
                    if not self.left or (self.free_s[uses[way]] > now).any():
                        continue
                    chosen = self._choice(way, now, repeats)
                    if chosen is None:
                        continue
                    item, part = chosen
                    self.free_s[uses[way]] = now + self.busy_s[way][uses[way]]
                    arrives = now + self.transfer_s[way] + self.shifts.latency_s[way]
                    self.holds_from[item, part] = arrives
                    self._take(item, part)
                    self.left -= 1
                    rows.append((now, way, item * self.parts + part))
                    arrivals.add(arrives)
                    end = max(end, arrives)
            times = [one for one in (*arrivals, *self.free_s.tolist()) if one > now]
            now = min(times)
            arrivals = {one for one in arrivals if one > now}
        return Reception(
            seconds=end,
            parts=self.parts,
            way=np.array([row[1] for row in rows]),
            item=np.array([row[2] for row in rows]),
        )

    def _choice(self, way: int, now: float, repeats: bool) -> tuple[int, int] | None:
        """Return the item that a free way takes, None for none."""
        useful = (self.holds_from[self.before[way]] <= now * (1 + 1e-12)) & ~self.taken
        if not useful.any():
            return None
        tier = self.tier[way]
        score = self.suppliers.sum(axis=0) + self.noise
        if tier:
            faster = self.suppliers[:tier].sum(axis=0) > 0
            if not repeats or self.left * self.item_s < self.transfer_s[way]:
                useful &= ~faster
        score[~useful] = np.inf
        best = int(score.argmin())
        if not np.isfinite(score.flat[best]):
            return None
        return divmod(best, self.parts)


def shifted_schedule(reception: Reception, shifts: Shifts) -> Schedule:
    """Return the schedule in which every rank receives what rank 0 does, shifted."""
    ranks, parts = shifts.topology.num_ranks, reception.parts
    every = np.arange(ranks)
    shift = shifts.shift[reception.way][:, None]
    item, part = np.divmod(reception.item, parts)
    source = shifts.group.subtracted(every[None, :], shift)
    chunk = shifts.group.added(item[:, None], every[None, :]) * parts + part[:, None]
    received = np.full(ranks * parts, -1)
    received[reception.item] = np.arange(len(reception.item))
    needed = received[shifts.group.added(item, shift[:, 0]) * parts + part]
    waits = np.repeat(needed >= 0, ranks)
    index = needed[:, None] * ranks + source
    return Schedule(
        collective="all-gather",
        algorithm="translated greedy",
        num_ranks=ranks,
        chunks=tuple(chunks_of("all-gather", ranks, parts)),
        source=source.ravel(),
        target=np.tile(every, len(reception.item)),
        chunk=chunk.ravel(),
        is_reduced=np.zeros(chunk.size, dtype=bool),
        channel=shifts.channels(reception.way).ravel(),
        indptr=np.concatenate([[0], np.cumsum(waits)]),
        indices=index.ravel()[waits],
    )
