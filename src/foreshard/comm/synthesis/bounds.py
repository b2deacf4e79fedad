"""Seconds that no schedule of a collective takes fewer of on a topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from foreshard.comm.synthesis.arcs import reversed_topology
from foreshard.comm.synthesis.cuts import (
    crossing_bytes_per_s,
    device_partitions,
    single_devices,
    whole_nodes,
)
from foreshard.comm.synthesis.flow_bounds import all_to_all_bytes_per_s, distances
from foreshard.comm.synthesis.symmetry import translations_of
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError, unknown

_FLOW_SCALE = 2**30
"""Integer that the flow of a maximum-flow problem is scaled to: scipy's flows are 32 bit."""
_TOLERANCE = 1e-7
"""Relative shortfall of a flow below which its cut is taken for tight; three digits above the rounding."""
_MAX_SINKS = 160
"""Sinks tried on topologies without symmetry; fewer leave a bound valid, and perhaps looser."""


def lower_bound_s(collective: str, num_bytes: float, topology: Topology, *, limit_s: float = np.inf) -> float:
    """Return seconds that no schedule of a collective takes fewer of.

    The larger of two: the latency between the farthest ranks, and the bound by bandwidth, behind the least
    latency of a way between two ranks, since what comes last over any link or cut starts and ends at a rank.
    The bound by bandwidth is, of an all-gather or
    reduce-scatter, the worst cut (see `all_gather_bytes_per_s`); of an all-reduce, the smallest cut, and
    without switches that reduce or multicast, the messages that a reduction and its spread need; of an
    all-to-all, a multicommodity flow; of a broadcast or send, the smallest cut between its ends.

    Parameters
    ----------
    collective : str
        One of `COLLECTIVES`.
    num_bytes : float, bytes
        Size of the collective, as `Chunk.weight` is a part of it.
    topology : Topology
    limit_s : float, seconds
        That the flow problem of an all-to-all may take; a looser bound needs none.

    Returns
    -------
    float, seconds

    Raises
    ------
    SpecError
        For an unknown collective, a single device, or a topology whose devices do not all reach each other.
    """
    rate_of: dict[str, Callable[[Topology], float]] = {
        "all-gather": all_gather_bytes_per_s,
        "reduce-scatter": reduce_scatter_bytes_per_s,
        "all-reduce": all_reduce_bytes_per_s,
        "all-to-all": partial(all_to_all_bytes_per_s, limit_s=limit_s),
        "broadcast": broadcast_bytes_per_s,
        "send": send_bytes_per_s,
    }
    if collective not in rate_of:
        raise unknown("collective", collective, rate_of, key="collective")
    _check(topology)
    least_s, most_s = latencies_s(collective, topology)
    return max(num_bytes / rate_of[collective](topology) + least_s, most_s)


def latencies_s(collective: str, topology: Topology) -> tuple[float, float]:
    """Return the latency between the nearest two ranks that must exchange data, and the farthest two."""
    devices = topology.devices
    starts = devices[:1] if collective in ("broadcast", "send") else devices
    ends = devices[-1:] if collective == "send" else devices
    # scipy takes a stored zero for no link at all
    distance = distances(topology, np.maximum(topology.latency_s, 1e-30), starts)[:, ends]
    apart = distance[starts[:, None] != ends[None, :]]
    if not np.isfinite(apart).all():
        raise SpecError(
            "some devices do not reach each other",
            key="links",
            value=topology.name,
            rule="Every device reaches every other",
        )
    least_s, most_s = (float(one) if one > 1e-25 else 0.0 for one in (apart.min(), apart.max()))
    return least_s, most_s


def all_gather_bytes_per_s(topology: Topology) -> float:
    """Return the bytes of an all-gather over its seconds that no schedule exceeds.

    `T >= (M/N) max |S n V_c| / B+(S)` over cuts S that leave a device out: what the devices of S hold must
    leave S. Found by Newton's method on the rate x per device: as long as the maximum flow to some sink, x
    from each device, falls short, its minimum cut gives a smaller x. Switches may copy and reduce.

    Source
    ------
    Zhao et al., ForestColl, arXiv 2402.06787; Newton's method for ratios: Dinkelbach 1967.
    """
    ranks = topology.num_ranks
    return ranks * _worst_cut_rate(topology, _sinks(topology))


def reduce_scatter_bytes_per_s(topology: Topology) -> float:
    """Return the bytes of a reduce-scatter over its seconds that no schedule exceeds: links turned round."""
    return all_gather_bytes_per_s(reversed_topology(topology))


def all_reduce_bytes_per_s(topology: Topology) -> float:
    """Return the bytes of an all-reduce over its seconds that no schedule exceeds.

    Across any cut between devices, as many bytes as are reduced must pass each way, whoever adds them. Where
    only devices add and copy, the partial sums of n groups of vertices take n - 1 messages to one group and
    the sum n - 1 messages back, each of which leaves a group and enters one: `2 (n - 1) M` bytes over the sum
    of the groups' bandwidths. Groups are single devices, and nodes.
    """
    ranks = range(topology.num_ranks)
    sinks = list(_sinks(topology))
    pairs = [(0, v) for v in ranks if v != 0] + [(v, 0) for v in ranks if v != 0]
    if len(sinks) == 1:
        # a cut that separates devices separates rank 0 from one of them; by symmetry either way round
        pairs = [(0, v) for v in ranks if v != 0]
    rate = min(_min_cut(topology, pairs), _narrowest_group(topology))
    if not any(vertex.can_reduce or vertex.can_multicast for vertex in topology.vertices):
        for groups in device_partitions(topology):
            ways = [[crossing_bytes_per_s(topology, one, inward) for one in groups] for inward in (0, 1)]
            rate = min(rate, min(map(sum, ways)) / (2 * (len(groups) - 1)))
    return rate


def broadcast_bytes_per_s(topology: Topology) -> float:
    """Return the bytes of a broadcast over its seconds that no schedule exceeds: the smallest cut.

    Of many ranks, cuts to some, and what enters every device and node.
    """
    others = _spaced(range(1, topology.num_ranks))
    rate = _min_cut(topology, [(0, rank) for rank in others])
    if len(others) < topology.num_ranks - 1:
        start = topology.devices[0]
        groups = [group for some in device_partitions(topology) for group in some if not group[start]]
        rate = min(rate, *(crossing_bytes_per_s(topology, group, inward=True) for group in groups))
    return rate


def send_bytes_per_s(topology: Topology) -> float:
    """Return the rate at which rank 0 can send to the last rank: the smallest cut between them."""
    return _min_cut(topology, [(0, topology.num_ranks - 1)])


def _check(topology: Topology) -> None:
    if topology.num_ranks < 2:
        raise SpecError(
            "one device alone" if topology.num_ranks else "no devices",
            key="topology",
            value=topology.num_ranks,
            rule="A collective is one of at least 2 devices",
            fix="Name a cluster of more devices",
        )


def _sinks(topology: Topology) -> Iterable[int]:
    """Return the ranks whose cuts are tried: one where shifts make all ranks alike, else up to a limit."""
    if translations_of(topology) is not None:
        return [0]
    return _spaced(range(topology.num_ranks))


def _spaced(ranks: Sequence[int]) -> Sequence[int]:
    """Return all ranks up to a limit, of more so many that are spaced evenly."""
    if len(ranks) <= _MAX_SINKS:
        return ranks
    return [ranks[i] for i in np.unique(np.linspace(0, len(ranks) - 1, _MAX_SINKS).astype(int)).tolist()]


def _worst_cut_rate(topology: Topology, sinks: Iterable[int]) -> float:
    """Return the smallest `B+(S) / |S n V_c|` over cuts that leave a sink out."""
    ranks = topology.num_ranks
    rate = min(_ratio(topology, group) for group in _likely_cuts(topology))
    network = _FlowNetwork(topology)
    for sink in sinks:
        while True:
            inside = network.side_of_ranks(np.full(ranks, rate), sink)
            if inside is None:
                break
            found = _ratio(topology, inside)
            if found >= rate * (1 - _TOLERANCE):
                break
            rate = found
    return rate


def _likely_cuts(topology: Topology) -> Iterator[np.ndarray]:
    """Yield the sides of cuts that often bind: all but a device or a node, and a node."""
    for group in single_devices(topology):
        yield ~group
    for group in whole_nodes(topology):
        yield group
        yield ~group


def _ratio(topology: Topology, inside: np.ndarray) -> float:
    """Return a cut's bandwidth over the devices on its source side."""
    return crossing_bytes_per_s(topology, inside) / int(inside[topology.devices].sum())


def _narrowest_group(topology: Topology) -> float:
    """Return the smallest bandwidth into or out of a device or a node, shared resources considered."""
    groups = [group for partition in device_partitions(topology) for group in partition]
    return min(crossing_bytes_per_s(topology, group, inward) for group in groups for inward in (False, True))


def _min_cut(topology: Topology, pairs: list[tuple[int, int]]) -> float:
    """Return the smallest cut between the ranks of any pair, found by maximum flows of growing tightness."""
    network = _FlowNetwork(topology)
    rate = np.inf
    for source, sink in pairs:
        supply = np.zeros(topology.num_ranks)
        inside = np.arange(len(topology.vertices)) == topology.devices[source]
        rate = min(rate, crossing_bytes_per_s(topology, inside))
        while True:
            supply[source] = rate
            side = network.side_of_ranks(supply, sink)
            if side is None or (found := crossing_bytes_per_s(topology, side)) >= rate * (1 - _TOLERANCE):
                break
            rate = found
    return float(rate)


class _FlowNetwork:
    """Maximum flows from all ranks at once to one of them, by scipy on integers.

    Rounding never makes a bound wrong: flows only choose the cut, whose bandwidth is added up exactly.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        wide: dict[tuple[int, int], float] = {}
        for link in topology.links:
            key = link.source, link.target
            wide[key] = wide.get(key, 0.0) + link.bytes_per_s
        self.ends = np.array(list(wide), dtype=np.int64)
        self.rates = np.array(list(wide.values()))

    def side_of_ranks(self, supply: np.ndarray, sink: int) -> np.ndarray | None:
        """Return the source side of a minimum cut that stops some supplies, None if all reach the sink.

        Parameters
        ----------
        supply : ndarray of float, shape (ranks,), bytes/s
            What a super-source offers to each rank.
        sink : int
            A rank.

        Returns
        -------
        ndarray of bool, shape (vertices,), or None
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(self.topology.vertices)
        devices = self.topology.devices
        offered = np.flatnonzero(supply)
        needed = float(supply.sum())
        # no link carries more than all that is wanted, so that no capacity leaves 32 bits
        capacity = np.concatenate([self.rates, supply[offered]]).clip(max=needed) * (_FLOW_SCALE / needed)
        # links are rounded up: a cut that is tight must not look as if it stopped something
        whole = np.concatenate([np.ceil(capacity[: len(self.rates)]), np.floor(capacity[len(self.rates) :])])
        rows = np.concatenate([self.ends[:, 0], np.full(len(offered), count)])
        columns = np.concatenate([self.ends[:, 1], devices[offered]])
        graph = csr_matrix((whole.astype(np.int32), (rows, columns)), shape=(count + 1, count + 1))
        result = maximum_flow(graph, count, int(devices[sink]))
        if result.flow_value >= int(whole[len(self.rates) :].sum()):
            return None
        left = (graph - result.flow).tocsr()
        left.eliminate_zeros()
        reached = breadth_first_order(left, count, return_predecessors=False)
        inside = np.zeros(count + 1, dtype=bool)
        inside[reached] = True
        return inside[:count]
