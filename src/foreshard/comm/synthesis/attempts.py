"""What is tried for each collective, the quickest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.arcs import Arc, arcs_of, reversed_topology
from foreshard.comm.synthesis.bounds import all_gather_bytes_per_s, broadcast_bytes_per_s
from foreshard.comm.synthesis.in_network import in_network_schedule, reducing_planes
from foreshard.comm.synthesis.legs import hops_of_arcs, hops_of_shifts
from foreshard.comm.synthesis.matching import greedy_transfers, schedule_of_transfers, spread_chunks
from foreshard.comm.synthesis.packing import Packing, packed_trees, schedule_of_trees, streamed
from foreshard.comm.synthesis.quotient import greedy_reception, schedule_of, shifts_of
from foreshard.comm.synthesis.reversal import all_reduce_from, reduce_scatter_from
from foreshard.comm.synthesis.routing import (
    all_to_all_of_shifts,
    demands_of,
    routed_order,
    schedule_of_hops,
)
from foreshard.comm.synthesis.symmetry import translations_of
from foreshard.comm.synthesis.timing import seconds_of
from foreshard.comm.topology.graph import Topology

MAX_SENDS = 250_000
"""Sends of the largest schedule: each costs some 4 us to time and some 100 bytes to keep."""
_PARTS = (1, 2, 4, 8, 16, 32)
"""Chunks of a rank's data that are tried; more make shorter last transfers, and more sends."""
_RESTARTS = 3
"""Times that each number of chunks is tried, with other ties: results of later ones differ by about 1 %."""
_TREES = ((1, 16), (3, 10), (2, 16), (8, 4))
"""Trees of each rank, and pieces that each streams its data in, that are tried for an all-gather."""
_BROADCAST_TREES = ((4, 32), (8, 16), (4, 256), (8, 128), (12, 64))
"""The same of the root of a broadcast."""
_MAX_RANKS_ROUTED_ALONE = 128
"""Ranks of an all-to-all whose chunks are routed one by one though all ranks are alike: some 16,000 paths."""
_IN_NETWORK_PIECES = (1, 4, 16, 64, 256)
"""Pieces tried of what goes through a switch that reduces: more make the last one's way back shorter."""
_MAX_PATHS = 64
"""Paths that a send is spread over, each with several chunks: as many load links evenly."""
_PACKING_S = 2e-3
"""Seconds that packing trees takes for each pair of a rank and a vertex, before any is measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleFound:
    """What an attempt came to: its own count of seconds, and the schedule when it is asked for."""

    seconds: float
    schedule: Callable[[], Schedule]


Attempt = Callable[[float], ScheduleFound | None]
"""Given the seconds to beat, makes a schedule, or None where it does not beat them."""


def attempts_at(
    collective: str, num_bytes: float, topology: Topology, seed: int, bound_s: float
) -> Iterator[tuple[str, float, Attempt]]:
    """Yield the attempts at a collective, the quickest first."""
    if collective in ("all-reduce", "broadcast") and reducing_planes(topology):
        for pieces in _IN_NETWORK_PIECES:
            yield "in-network", pieces, partial(_through_switches, collective, num_bytes, topology, pieces)
    if collective == "broadcast":
        yield from _spreads("broadcast", num_bytes, topology, seed)
    elif collective == "all-gather":
        yield from _all_gathers(num_bytes, topology, seed)
    elif collective == "reduce-scatter":
        for method, work, attempt in _all_gathers(num_bytes, reversed_topology(topology), seed):
            yield method, work, _backwards(attempt, topology, num_bytes)
    elif collective in ("all-to-all", "send"):
        yield from _routings(collective, num_bytes, topology, seed, bound_s)
    else:
        gathers = _all_gathers(num_bytes, topology, seed)
        scatters = _all_gathers(num_bytes, reversed_topology(topology), seed)
        for (method, work, gather), (_, _, scatter) in zip(gathers, scatters, strict=True):
            yield method, 2 * work, _both_ways(gather, scatter, topology, num_bytes)


def _through_switches(
    collective: str, num_bytes: float, topology: Topology, pieces: int, _: float
) -> ScheduleFound:
    schedule = in_network_schedule(collective, topology, pieces)
    return ScheduleFound(seconds=seconds_of(schedule, topology, num_bytes), schedule=lambda: schedule)


def _backwards(attempt: Attempt, topology: Topology, num_bytes: float) -> Attempt:
    """Return the attempt at a reduce-scatter of an attempt at an all-gather of the links turned round."""

    def scatter(to_beat_s: float) -> ScheduleFound | None:
        found = attempt(to_beat_s)
        if found is None:
            return None
        gathered = found.schedule
        return ScheduleFound(
            seconds=found.seconds, schedule=lambda: reduce_scatter_from(gathered(), topology, num_bytes)
        )

    return scatter


def _both_ways(gather: Attempt, scatter: Attempt, topology: Topology, num_bytes: float) -> Attempt:
    """Return the attempt at an all-reduce of attempts at all-gathers along and against the links."""

    def reduce(to_beat_s: float) -> ScheduleFound | None:
        out, back = gather(to_beat_s), scatter(to_beat_s)
        if out is None or back is None:
            return None
        made, turned = out.schedule, back.schedule

        def schedule() -> Schedule:
            return all_reduce_from(reduce_scatter_from(turned(), topology, num_bytes), made())

        return ScheduleFound(seconds=out.seconds + back.seconds, schedule=schedule)

    return reduce


def _all_gathers(num_bytes: float, topology: Topology, seed: int) -> Iterator[tuple[str, float, Attempt]]:
    """Yield attempts at an all-gather: by symmetry where there is one, else by matching."""
    group = translations_of(topology)
    if group is None:
        yield from _spreads("all-gather", num_bytes, topology, seed)
        return
    shifts = shifts_of(topology, group)

    def attempt(parts: int, rng: np.random.Generator) -> ScheduleFound:
        reception = greedy_reception(shifts, num_bytes, parts, rng)
        if (shifts.num_channels > 1).any():
            # ranks that take turns on routes wait for each other: only the whole schedule tells how long
            schedule = schedule_of(reception, shifts)
            return ScheduleFound(seconds=seconds_of(schedule, topology, num_bytes), schedule=lambda: schedule)
        return ScheduleFound(seconds=reception.seconds, schedule=lambda: schedule_of(reception, shifts))

    for parts, rng in _chunkings(seed, topology.num_ranks * (topology.num_ranks - 1)):
        yield "symmetry", parts, partial(_ignoring_limit, attempt, parts, rng)


def _ignoring_limit(
    attempt: Callable[[int, np.random.Generator], ScheduleFound],
    parts: int,
    rng: np.random.Generator,
    _: float,
) -> ScheduleFound:
    return attempt(parts, rng)


def _spreads(
    collective: str, num_bytes: float, topology: Topology, seed: int
) -> Iterator[tuple[str, float, Attempt]]:
    """Yield attempts at an all-gather or broadcast: a matching of each size, trees, other matchings."""
    arcs = arcs_of(topology)
    matchings = list(_matchings(collective, num_bytes, topology, arcs, seed))
    first = len(matchings) // _RESTARTS
    yield from matchings[:first]
    yield from _packings(collective, num_bytes, topology, arcs)
    yield from matchings[first:]


def _packings(
    collective: str, num_bytes: float, topology: Topology, arcs: list[Arc]
) -> Iterator[tuple[str, float, Attempt]]:
    """Yield attempts at an all-gather or broadcast by packing trees."""
    hops = hops_of_arcs(topology, arcs)
    ranks = topology.num_ranks
    gathers = collective == "all-gather"
    roots = tuple(range(ranks)) if gathers else (0,)

    @cache
    def packed(trees: int) -> Packing | None:
        bytes_per_s = all_gather_bytes_per_s(topology) if gathers else broadcast_bytes_per_s(topology)
        return packed_trees(topology, arcs, roots, trees, bytes_per_s)

    def attempt(trees: int, pieces: int, _: float) -> ScheduleFound | None:
        packing = packed(trees)
        if packing is None:
            return None
        orders = [streamed(packing, hops, num_bytes, pieces, by_piece=one) for one in (True, False)]
        best = min(orders, key=lambda order: order.seconds)
        return ScheduleFound(
            seconds=best.seconds, schedule=lambda: schedule_of_trees(best, packing, hops, arcs, pieces)
        )

    for trees, pieces in _TREES if gathers else _BROADCAST_TREES:
        if trees * pieces * len(roots) * (ranks - 1) <= MAX_SENDS:
            yield "trees", _PACKING_S * ranks * len(topology.vertices), partial(attempt, trees, pieces)


def _matchings(
    collective: str, num_bytes: float, topology: Topology, arcs: list[Arc], seed: int
) -> Iterator[tuple[str, float, Attempt]]:
    """Yield attempts at an all-gather or broadcast by greedy matching."""
    ranks = topology.num_ranks

    def attempt(parts: int, rng: np.random.Generator, to_beat_s: float) -> ScheduleFound | None:
        spread = spread_chunks(collective, num_bytes, ranks, parts)
        made = greedy_transfers(topology, arcs, spread, rng, give_up_s=to_beat_s)
        if made is None:
            return None
        return ScheduleFound(
            seconds=made.seconds, schedule=lambda: schedule_of_transfers(made, arcs, spread, ranks)
        )

    more = ranks if collective == "broadcast" else 1
    for parts, rng in _chunkings(seed, (ranks - 1) * (ranks // more), more):
        yield "matching", parts, partial(attempt, parts, rng)


def _routings(
    collective: str, num_bytes: float, topology: Topology, seed: int, bound_s: float
) -> Iterator[tuple[str, float, Attempt]]:
    """Yield attempts at an all-to-all or send by paths that load links evenly."""
    ranks = topology.num_ranks
    group = translations_of(topology) if collective == "all-to-all" else None
    shifts = shifts_of(topology, group) if group else None
    if shifts and (shifts.num_channels > 1).any() and ranks <= _MAX_RANKS_ROUTED_ALONE:
        # which of several routes a chunk takes matters more than that all ranks do alike
        shifts = None
    arcs = [] if shifts else arcs_of(topology)
    hops = hops_of_shifts(shifts) if shifts else hops_of_arcs(topology, arcs)

    def attempt(parts: int, rng: np.random.Generator, _: float) -> ScheduleFound:
        paths = min(parts, _MAX_PATHS) if collective == "send" else parts
        demands = demands_of(collective, ranks, paths)
        if shifts:
            demands = demands[: ranks * parts]  # those of rank 0
        chunk_bytes = num_bytes / parts / (1 if collective == "send" else ranks)
        order = routed_order(hops, demands, parts // paths, chunk_bytes, bound_s, rng)
        if shifts:
            return ScheduleFound(
                seconds=order.seconds, schedule=lambda: all_to_all_of_shifts(order, hops, shifts, parts)
            )
        return ScheduleFound(
            seconds=order.seconds, schedule=lambda: schedule_of_hops(order, hops, arcs, collective, parts)
        )

    sends, most = (1, _MAX_PATHS) if collective == "send" else (ranks * (ranks - 1), 1)
    for parts, rng in _chunkings(seed, sends, most):
        yield "even paths", parts, partial(attempt, parts, rng)


def _chunkings(seed: int, num_sends: int, most: int = 1) -> Iterator[tuple[int, np.random.Generator]]:
    """Yield numbers of chunks, smallest first, with a generator each, for every restart."""
    options = [parts * scale for scale in sorted({1, most}) for parts in _PARTS]
    for restart in range(_RESTARTS):
        for parts in sorted(set(options)):
            if parts == 1 or parts * num_sends <= MAX_SENDS:
                yield parts, np.random.default_rng([seed, restart, parts])
