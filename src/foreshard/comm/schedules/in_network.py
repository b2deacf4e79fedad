"""Switches that add up and multicast: NVLS inside a node, a tree of switches (SHARP) across nodes.

A switch place holds one buffer for each chunk. Ranks add into it; it sends the sum, or what one rank gave it,
to all. Source: NVIDIA NVLink SHARP and Graham et al. 2016 (SHARP).
"""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.schedules.hierarchical import two_level
from foreshard.comm.schedules.schedule import Chunk, Schedule, chunks_of
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.comm.schedules.trees import double_tree, equal_chunks


def through_switches(
    algorithm: str,
    collective: str,
    num_ranks: int,
    *,
    per_node: int | None = None,
    channels: int = 1,
    parts: int | None = None,
    weights: Sequence[float] | None = None,
    root: int = 0,
) -> Schedule:
    """Return a collective through a leaf switch for each `per_node` ranks and, above several, a root switch.

    Examples
    --------
    >>> through_switches("nvls", "all-reduce", 8).num_sends
    16
    >>> through_switches("sharp", "all-reduce", 8, per_node=4).switches
    ('switch', 'switch', 'switch')
    """
    size = num_ranks if per_node is None else per_node
    leaves = -(-num_ranks // size)
    levels = [[num_ranks + rank // size for rank in range(num_ranks)]]
    if leaves > 1:
        levels.append([num_ranks + leaves] * leaves)
    pieces = channels if parts is None else parts
    if collective in ("all-reduce", "broadcast") and weights is None:
        chunks = equal_chunks(collective, num_ranks, pieces, root=root)
    else:
        chunks = chunks_of(collective, num_ranks, pieces, weights=weights)
    return _through(levels, collective, algorithm, num_ranks, chunks, channels)


def nvls_tree(num_ranks: int, *, per_node: int, channels: int = 1, parts: int | None = None) -> Schedule:
    """Return an all-reduce: added up in each node's switch, across nodes on two trees, multicast in the node.

    Examples
    --------
    >>> len(nvls_tree(8, per_node=4).switches)
    2
    """
    inner = [through_switches("nvls", one, per_node) for one in ("reduce-scatter", "all-gather")]
    outer = double_tree("all-reduce", num_ranks // per_node)
    pieces = channels * (1 if parts is None else parts)
    return two_level("all-reduce", inner, outer, parts=pieces, channels=channels, algorithm="nvls-tree")


def _through(
    levels: Sequence[Sequence[int]],
    collective: str,
    algorithm: str,
    num_ranks: int,
    chunks: Sequence[Chunk],
    channels: int,
) -> Schedule:
    """Return a collective through a tree of switches, `levels` the switch above each place of a level."""
    above = [switch for level in levels for switch in level]  # by place: ranks, then switches by level
    num_switches = max(above) + 1 - num_ranks
    build = SequentialBuilder(collective, algorithm, num_ranks, chunks, ["switch"] * num_switches)
    last: dict[tuple[int, int, int], int] = {}  # send on each (source, target, channel)
    for number, chunk in enumerate(chunks):
        channel = number % channels
        for source, target, reduce in [*_ways_up(chunk, above), *_ways_down(chunk, above)]:
            edge = (source, target, channel)
            before = [last[edge]] if edge in last else []
            last[edge] = build.send(source, target, number, reduce=reduce, channel=channel, after=before)
    return build.schedule()


def _ways_up(chunk: Chunk, above: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Return the sends by which what sources hold reaches the top switch, added up if there are several."""
    carries = dict.fromkeys(chunk.sources)
    ways = []
    for place, switch in enumerate(above):
        if place in carries:
            ways.append((place, switch, len(chunk.sources) > 1))
            carries[switch] = None
    return ways


def _ways_down(chunk: Chunk, above: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Return the sends from the top switch to the targets that do not hold the result from the start."""
    done = chunk.sources if len(chunk.sources) == 1 else ()
    wanted = {rank for rank in chunk.targets if rank not in done}
    ways = []
    for place, switch in enumerate(above):  # switches come after what is below them
        if place in wanted:
            ways.append((switch, place, False))
            wanted.add(switch)
    return ways[::-1]
