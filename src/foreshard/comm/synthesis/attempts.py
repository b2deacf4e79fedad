"""What is tried for each collective: algorithms of the library, then searches, the quickest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.synthesis.arcs import Arc, arcs_of, reversed_topology
from foreshard.comm.synthesis.bounds import all_gather_bytes_per_s, broadcast_bytes_per_s
from foreshard.comm.synthesis.budget import Check, unlimited
from foreshard.comm.synthesis.in_network import in_network_schedule, reducing_planes
from foreshard.comm.synthesis.legs import hops_of_arcs, hops_of_shifts, schedule_of_hops
from foreshard.comm.synthesis.matching import greedy_transfers, schedule_of_transfers
from foreshard.comm.synthesis.packing import Packing, packed_trees, schedule_of_trees, streamed
from foreshard.comm.synthesis.quotient import greedy_reception, shifted_schedule, shifts_of
from foreshard.comm.synthesis.reversal import all_reduce_from, reduce_scatter_from
from foreshard.comm.synthesis.routing import (
    all_to_all_of_shifts,
    demands_of,
    routed_order,
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
_TREE_PIECES = (1, 4, 16)
"""Pieces that the library's two trees each stream a broadcast in."""
_MAX_RANKS_ROUTED_ALONE = 128
"""Ranks of an all-to-all whose chunks are routed one by one though all ranks are alike: some 16,000 paths."""
_IN_NETWORK_PIECES = (1, 4, 16, 64, 256)
"""Pieces tried of what goes through a switch that reduces: more make the last one's way back shorter."""
_MAX_PATHS = 64
"""Paths that a send is spread over, each with several chunks: as many load links evenly."""
_MAX_MATCHED = 500_000_000
"""Pairs of an arc and a chunk of the largest matching: each is a byte of its table of useful transfers."""
_PACKING_S = 2e-3
"""Seconds that packing trees takes for each pair of a rank and a vertex, before any is measured."""
_LISTING_S = 2e-5
"""Seconds in which the library lists a send of a schedule and times it, of a tree over many ranks."""
_SIMULATING_S = 4e-6
"""Seconds of the flow simulation for each send of a schedule of the library, whose ranks are alike."""
_FINISHING_S = 2e-5
"""Seconds to list, verify and simulate each send of what a search finds: 4 to 20 us on one core."""
KNOWN_PACE = {"trees": 1.0, "hierarchical": 1.0, "binomial": 1.0, "double-tree": 1.0}
"""Methods whose work is in seconds before any attempt is measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleFound:
    """What an attempt came to: its own count of seconds, and the schedule when it is asked for.

    What `is_listed` is an algorithm of the library as it is: right by its tests, and timed already.
    """

    seconds: float
    schedule: Callable[[], Schedule]
    is_listed: bool = False


Make = Callable[[float, Check], ScheduleFound | None]
"""Given the seconds to beat, makes a schedule, or None where it does not beat them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleAttempt:
    """One way to look for a schedule."""

    method: str
    work: float  # in any unit of that method; in seconds where `KNOWN_PACE` has it
    finishing_s: float  # seconds; for listing, verifying and simulating the schedule that it would make
    make: Make


def attempts_at(
    collective: str, num_bytes: float, topology: Topology, seed: int, bound_s: float, check: Check = unlimited
) -> Iterator[ScheduleAttempt]:
    """Yield the attempts at a collective: algorithms of the library, then the quickest search first."""
    yield from _templates(collective, num_bytes, topology)
    if collective in ("all-reduce", "broadcast") and reducing_planes(topology):
        for pieces in _IN_NETWORK_PIECES:
            through = partial(in_network_schedule, collective, topology, pieces)
            finishing_s = _FINISHING_S * pieces * 2 * topology.num_ranks
            yield _made("in-network", pieces, finishing_s, through, topology, num_bytes)
    if collective == "broadcast":
        yield from _spreads("broadcast", num_bytes, topology, seed, check)
    elif collective == "all-gather":
        yield from _all_gathers(num_bytes, topology, seed, check)
    elif collective == "reduce-scatter":
        for gather in _all_gathers(num_bytes, reversed_topology(topology), seed, check):
            yield replace(gather, make=_backwards(gather.make, topology, num_bytes))
    elif collective in ("all-to-all", "send"):
        yield from _routings(collective, num_bytes, topology, seed, bound_s, check)
    else:
        gathers = _all_gathers(num_bytes, topology, seed, check)
        scatters = _all_gathers(num_bytes, reversed_topology(topology), seed, check)
        for out, back in zip(gathers, scatters, strict=True):
            make = _both_ways(out.make, back.make, topology, num_bytes)
            yield replace(out, work=2 * out.work, finishing_s=2 * out.finishing_s, make=make)


def _templates(collective: str, num_bytes: float, topology: Topology) -> Iterator[ScheduleAttempt]:
    """Yield what the library has: it is at hand at once, and right by its tests."""
    ranks = topology.num_ranks
    once = ranks * (ranks - 1)
    options: list[tuple[str, int, int, int | None]]
    if collective in ("all-to-all", "send"):
        options = [("direct", once if collective == "all-to-all" else 1, 1, None)]
    elif collective == "broadcast":
        options = [("ring", _PARTS[-1] * (ranks - 1), _PARTS[-1], None)]
    else:
        sends = 2 * once if collective == "all-reduce" else once
        options = [("ring", sends, 1, None)]
        per_node = _ranks_of_nodes(topology)
        if per_node:
            options.append(("hierarchical", sends, 1, per_node))
    for name, sends, parts, per_node in options:
        make = partial(schedule_of, collective, name, ranks, parts=parts, per_node=per_node)
        yield _made(
            name, _LISTING_S * sends, _SIMULATING_S * sends, make, topology, num_bytes, is_listed=True
        )
    if collective == "broadcast":
        yield from _broadcast_trees(num_bytes, topology)


def _broadcast_trees(num_bytes: float, topology: Topology) -> Iterator[ScheduleAttempt]:
    """Yield the trees of the library, which have few hops where a ring has one for each rank."""
    ranks = topology.num_ranks

    def made(name: str, parts: int) -> Schedule:
        return schedule_of("broadcast", name, ranks, parts=parts).listed_by_rounds()

    options = [("binomial", 1, ranks), *(("double-tree", n, 2 * n * ranks) for n in _TREE_PIECES)]
    for name, parts, sends in options:
        if sends <= MAX_SENDS:
            make = partial(made, name, parts)
            yield _made(name, _LISTING_S * sends, _FINISHING_S * sends, make, topology, num_bytes)


def _ranks_of_nodes(topology: Topology) -> int | None:
    """Return the ranks of each node where several equal nodes follow each other, else None."""
    nodes = np.array([topology.vertices[device].node for device in topology.devices.tolist()])
    size = int((nodes == nodes[0]).sum())
    known = nodes[0] >= 0 and 1 < size < len(nodes) and len(nodes) % size == 0
    in_order = known and (np.diff(nodes.reshape(-1, size)) == 0).all()
    return size if in_order and len(np.unique(nodes)) * size == len(nodes) else None


def _made(
    method: str,
    work: float,
    finishing_s: float,
    make: Callable[[], Schedule],
    topology: Topology,
    num_bytes: float,
    *,
    is_listed: bool = False,
) -> ScheduleAttempt:
    """Return the attempt of a schedule that is made whole and then timed."""

    def timed(_: float, check: Check) -> ScheduleFound:
        schedule = make()
        seconds = seconds_of(schedule, topology, num_bytes)
        return ScheduleFound(seconds=seconds, schedule=lambda: schedule, is_listed=is_listed)

    return ScheduleAttempt(method=method, work=work, finishing_s=finishing_s, make=timed)


def _backwards(attempt: Make, topology: Topology, num_bytes: float) -> Make:
    """Return the attempt at a reduce-scatter of an attempt at an all-gather of the links turned round."""

    def scatter(to_beat_s: float, check: Check) -> ScheduleFound | None:
        found = attempt(to_beat_s, check)
        if found is None:
            return None
        gathered = found.schedule
        return ScheduleFound(
            seconds=found.seconds, schedule=lambda: reduce_scatter_from(gathered(), topology, num_bytes)
        )

    return scatter


def _both_ways(gather: Make, scatter: Make, topology: Topology, num_bytes: float) -> Make:
    """Return the attempt at an all-reduce of attempts at all-gathers along and against the links."""

    def reduce(to_beat_s: float, check: Check) -> ScheduleFound | None:
        out, back = gather(to_beat_s, check), scatter(to_beat_s, check)
        if out is None or back is None:
            return None
        made, turned = out.schedule, back.schedule

        def schedule() -> Schedule:
            return all_reduce_from(reduce_scatter_from(turned(), topology, num_bytes), made())

        return ScheduleFound(seconds=out.seconds + back.seconds, schedule=schedule)

    return reduce


def _all_gathers(num_bytes: float, topology: Topology, seed: int, check: Check) -> Iterator[ScheduleAttempt]:
    """Yield attempts at an all-gather: by symmetry where there is one, else by matching."""
    group = translations_of(topology)
    if group is None:
        yield from _spreads("all-gather", num_bytes, topology, seed, check)
        return
    shifts = shifts_of(topology, group)

    def attempt(parts: int, rng: np.random.Generator, _: float, check: Check) -> ScheduleFound:
        reception = greedy_reception(shifts, num_bytes, parts, rng, check)
        if (shifts.num_channels > 1).any():
            # ranks that take turns on routes wait for each other: only the whole schedule tells how long
            schedule = shifted_schedule(reception, shifts)
            return ScheduleFound(seconds=seconds_of(schedule, topology, num_bytes), schedule=lambda: schedule)
        return ScheduleFound(seconds=reception.seconds, schedule=lambda: shifted_schedule(reception, shifts))

    once = topology.num_ranks * (topology.num_ranks - 1)
    for parts, rng in _chunkings(seed, once):
        make = partial(attempt, parts, rng)
        yield ScheduleAttempt(
            method="symmetry", work=parts, finishing_s=_FINISHING_S * parts * once, make=make
        )


def _spreads(
    collective: str, num_bytes: float, topology: Topology, seed: int, check: Check
) -> Iterator[ScheduleAttempt]:
    """Yield attempts at an all-gather or broadcast: a matching of each size, trees, other matchings."""
    arcs = arcs_of(topology, check)
    matchings = list(_matchings(collective, num_bytes, topology, arcs, seed))
    first = len(matchings) // _RESTARTS
    yield from matchings[:first]
    yield from _packings(collective, num_bytes, topology, arcs)
    yield from matchings[first:]


def _packings(
    collective: str, num_bytes: float, topology: Topology, arcs: list[Arc]
) -> Iterator[ScheduleAttempt]:
    """Yield attempts at an all-gather or broadcast by packing trees."""
    hops = hops_of_arcs(topology, arcs)
    ranks = topology.num_ranks
    gathers = collective == "all-gather"
    roots = tuple(range(ranks)) if gathers else (0,)

    @cache
    def packed(trees: int, check: Check) -> Packing | None:
        bytes_per_s = all_gather_bytes_per_s(topology) if gathers else broadcast_bytes_per_s(topology)
        return packed_trees(topology, arcs, roots, trees, bytes_per_s, check)

    def attempt(trees: int, pieces: int, _: float, check: Check) -> ScheduleFound | None:
        packing = packed(trees, check)
        if packing is None:
            return None
        orders = [
            streamed(packing, hops, num_bytes, pieces, by_piece=by_piece, check=check)
            for by_piece in (True, False)
        ]
        best = min(orders, key=lambda order: order.seconds)
        return ScheduleFound(
            seconds=best.seconds, schedule=lambda: schedule_of_trees(best, packing, hops, arcs, pieces)
        )

    for trees, pieces in _TREES if gathers else _BROADCAST_TREES:
        sends = trees * pieces * len(roots) * (ranks - 1)
        if sends <= MAX_SENDS:
            work = _PACKING_S * ranks * len(topology.vertices)
            make, finishing_s = partial(attempt, trees, pieces), _FINISHING_S * sends
            yield ScheduleAttempt(method="trees", work=work, finishing_s=finishing_s, make=make)


def _matchings(
    collective: str, num_bytes: float, topology: Topology, arcs: list[Arc], seed: int
) -> Iterator[ScheduleAttempt]:
    """Yield attempts at an all-gather or broadcast by greedy matching."""
    ranks = topology.num_ranks

    def attempt(parts: int, rng: np.random.Generator, to_beat_s: float, check: Check) -> ScheduleFound | None:
        chunks = chunks_of(collective, ranks, parts)
        made = greedy_transfers(topology, arcs, chunks, num_bytes, rng, give_up_s=to_beat_s, check=check)
        if made is None:
            return None
        return ScheduleFound(
            seconds=made.seconds,
            schedule=lambda: schedule_of_transfers(made, arcs, collective, chunks, ranks),
        )

    more, items = (ranks, 1) if collective == "broadcast" else (1, ranks)
    for parts, rng in _chunkings(seed, (ranks - 1) * items, more):
        if len(arcs) * items * parts <= _MAX_MATCHED:
            make, finishing_s = partial(attempt, parts, rng), _FINISHING_S * (ranks - 1) * items * parts
            yield ScheduleAttempt(method="matching", work=parts, finishing_s=finishing_s, make=make)


def _routings(
    collective: str, num_bytes: float, topology: Topology, seed: int, bound_s: float, check: Check
) -> Iterator[ScheduleAttempt]:
    """Yield attempts at an all-to-all or send by paths that load links evenly."""
    ranks = topology.num_ranks
    group = translations_of(topology) if collective == "all-to-all" else None
    shifts = shifts_of(topology, group) if group else None
    if shifts and (shifts.num_channels > 1).any() and ranks <= _MAX_RANKS_ROUTED_ALONE:
        # which of several routes a chunk takes matters more than that all ranks do alike
        shifts = None
    arcs = [] if shifts else arcs_of(topology, check)
    hops = hops_of_shifts(shifts) if shifts else hops_of_arcs(topology, arcs)

    def attempt(parts: int, rng: np.random.Generator, _: float, check: Check) -> ScheduleFound:
        paths = min(parts, _MAX_PATHS) if collective == "send" else parts
        demands = demands_of(collective, ranks, paths)
        if shifts:
            demands = demands[: ranks * parts]  # those of rank 0
        chunk_bytes = num_bytes / parts / (1 if collective == "send" else ranks)
        order = routed_order(hops, demands, parts // paths, chunk_bytes, bound_s, rng, check)
        if shifts:
            return ScheduleFound(
                seconds=order.seconds, schedule=lambda: all_to_all_of_shifts(order, hops, shifts, parts)
            )
        return ScheduleFound(
            seconds=order.seconds,
            schedule=lambda: schedule_of_hops(
                order, hops, arcs, collective=collective, algorithm="even paths", parts=parts
            ),
        )

    sends, most = (1, _MAX_PATHS) if collective == "send" else (ranks * (ranks - 1), 1)
    for parts, rng in _chunkings(seed, sends, most):
        make = partial(attempt, parts, rng)
        yield ScheduleAttempt(
            method="even paths", work=parts, finishing_s=_FINISHING_S * parts * sends, make=make
        )


def _chunkings(seed: int, num_sends: int, most: int = 1) -> Iterator[tuple[int, np.random.Generator]]:
    """Yield numbers of chunks, smallest first, with a generator each, for every restart."""
    options = [parts * scale for scale in sorted({1, most}) for parts in _PARTS]
    for restart in range(_RESTARTS):
        for parts in sorted(set(options)):
            if parts == 1 or parts * num_sends <= MAX_SENDS:
                yield parts, np.random.default_rng([seed, restart, parts])
