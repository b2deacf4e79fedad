"""Seconds that no schedule of a collective takes fewer of on a topology."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from foreshard.comm.synthesis.arcs import reversed_topology
from foreshard.comm.synthesis.flow_bounds import all_to_all_bytes_per_s
from foreshard.comm.synthesis.symmetry import translations_of
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError, unknown

_FLOW_SCALE = 2**30
"""Integer that the flow of a maximum-flow problem is scaled to: scipy's flows are 32 bit."""
_TOLERANCE = 1e-7
"""Relative shortfall of a flow below which its cut is taken for tight; three digits above the rounding."""
_MAX_SINKS = 160
"""Sinks tried on topologies without symmetry; fewer leave a bound valid, and perhaps looser."""


def lower_bound_s(collective: str, num_bytes: float, topology: Topology) -> float:
    """Return seconds that no schedule of a collective takes fewer of.

    The larger of the bound by latency and the bound by bandwidth. The latter is, of an all-gather or
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

    Returns
    -------
    float, seconds

    Raises
    ------
    SpecError
        For an unknown collective, a single device, or a topology whose devices do not all reach each other.
    """
    rate_of = {
        "all-gather": all_gather_bytes_per_s,
        "reduce-scatter": reduce_scatter_bytes_per_s,
        "all-reduce": all_reduce_bytes_per_s,
        "all-to-all": all_to_all_bytes_per_s,
        "broadcast": broadcast_bytes_per_s,
        "send": send_bytes_per_s,
    }
    if collective not in rate_of:
        raise unknown("collective", collective, rate_of, key="collective")
    _check(topology)
    return max(num_bytes / rate_of[collective](topology), latency_bound_s(collective, topology))


def latency_bound_s(collective: str, topology: Topology) -> float:
    """Return the latency of the shortest route between the farthest two ranks that must exchange data."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import dijkstra

    _check(topology)
    devices = topology.devices
    starts = devices[:1] if collective in ("broadcast", "send") else devices
    ends = devices[-1:] if collective == "send" else devices
    quickest: dict[tuple[int, int], float] = {}
    for link in topology.links:
        key = link.source, link.target
        # scipy takes a stored zero for no link at all
        quickest[key] = min(quickest.get(key, np.inf), max(link.latency_s, 1e-30))
    rows, columns = np.array(list(quickest)).T
    graph = csr_matrix((list(quickest.values()), (rows, columns)), shape=(len(topology.vertices),) * 2)
    distance = dijkstra(graph, indices=starts)[:, ends]
    found = float(distance.max())
    if not np.isfinite(found):
        raise SpecError(
            "some devices do not reach each other",
            key="links",
            value=topology.name,
            rule="Every device reaches every other",
        )
    return found if found > 1e-25 else 0.0


def all_gather_bytes_per_s(topology: Topology) -> float:
    """Return the bytes of an all-gather over its seconds that no schedule exceeds.

    `T >= (M/N) max |S n V_c| / B+(S)` over cuts S that leave a device out: what the devices of S hold must
    leave S. Found by Newton's method on the rate x per device: as long as the maximum flow to some sink, x
    from each device, falls short, its minimum cut gives a smaller x. Switches may copy and reduce.

    Source
    ------
    Zhao et al., ForestColl, arXiv 2402.06787; Newton's method for ratios: Dinkelbach 1967.
    """
    _check(topology)
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
    _check(topology)
    ranks = range(topology.num_ranks)
    sinks = list(_sinks(topology))
    pairs = [(0, v) for v in ranks if v != 0] + [(v, 0) for v in ranks if v != 0]
    if len(sinks) == 1:
        # a cut that separates devices separates rank 0 from one of them; by symmetry either way round
        pairs = [(0, v) for v in ranks if v != 0]
    rate = min(_min_cut(topology, pairs), _narrowest_group(topology))
    if not any(vertex.can_reduce or vertex.can_multicast for vertex in topology.vertices):
        for groups in _partitions(topology):
            out, into = (sum(_crossing(topology, group, inward) for group in groups) for inward in (0, 1))
            rate = min(rate, min(out, into) / (2 * (len(groups) - 1)))
    return rate


def broadcast_bytes_per_s(topology: Topology, root: int = 0) -> float:
    """Return the bytes of a broadcast over its seconds that no schedule exceeds: the smallest cut.

    Of many ranks, cuts to some, and what enters every device and node.
    """
    _check(topology)
    others = _spaced([rank for rank in range(topology.num_ranks) if rank != root])
    rate = _min_cut(topology, [(root, rank) for rank in others])
    if len(others) < topology.num_ranks - 1:
        start = topology.devices[root]
        groups = [group for partition in _partitions(topology) for group in partition if not group[start]]
        rate = min(rate, *(_crossing(topology, group, inward=True) for group in groups))
    return rate


def send_bytes_per_s(topology: Topology) -> float:
    """Return the rate at which rank 0 can send to the last rank: the smallest cut between them."""
    _check(topology)
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
    for group in _singles(topology):
        yield ~group
    for group in _nodes(topology):
        yield group
        yield ~group


def _singles(topology: Topology) -> list[np.ndarray]:
    return [np.arange(len(topology.vertices)) == v for v in topology.devices.tolist()]


def _nodes(topology: Topology) -> list[np.ndarray]:
    """Return the vertices of each node, where every device has a node and there are two nodes at least."""
    node = np.array([vertex.node for vertex in topology.vertices])
    owned = np.unique(node[topology.devices])
    if owned.min() < 0 or len(owned) < 2:
        return []
    return [node == one for one in owned.tolist()]


def _partitions(topology: Topology) -> list[list[np.ndarray]]:
    return [groups for groups in (_singles(topology), _nodes(topology)) if groups]


def _crossing(topology: Topology, inside: np.ndarray, inward: bool | int = False) -> float:
    """Return the bytes/s that leave (or enter) a set of vertices, shared resources considered."""
    side = ~inside if inward else inside
    out = side[topology.link_ends[:, 0]] & ~side[topology.link_ends[:, 1]]
    links_bytes_per_s, shared_bytes_per_s = np.split(topology.capacity_bytes_per_s, [len(topology.links)])
    shared, rate = topology.tightest_shared[out], links_bytes_per_s[out]
    offered = np.bincount(shared[shared >= 0], rate[shared >= 0], minlength=len(shared_bytes_per_s))
    return float(rate[shared < 0].sum() + np.minimum(offered, shared_bytes_per_s).sum())


def _ratio(topology: Topology, inside: np.ndarray) -> float:
    """Return a cut's bandwidth over the devices on its source side."""
    return _crossing(topology, inside) / int(inside[topology.devices].sum())


def _narrowest_group(topology: Topology) -> float:
    """Return the smallest bandwidth into or out of a device or a node, shared resources considered."""
    groups = [group for partition in _partitions(topology) for group in partition]
    return min(_crossing(topology, group, inward) for group in groups for inward in (False, True))


def _min_cut(topology: Topology, pairs: list[tuple[int, int]]) -> float:
    """Return the smallest cut between the ranks of any pair, found by maximum flows of growing tightness."""
    network = _FlowNetwork(topology)
    rate = np.inf
    for source, sink in pairs:
        supply = np.zeros(topology.num_ranks)
        inside = np.arange(len(topology.vertices)) == topology.devices[source]
        rate = min(rate, _crossing(topology, inside))
        while True:
            supply[source] = rate
            side = network.side_of_ranks(supply, sink)
            if side is None or (found := _crossing(topology, side)) >= rate * (1 - _TOLERANCE):
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
