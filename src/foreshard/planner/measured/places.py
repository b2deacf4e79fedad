"""Which devices may compute layers together, and which of them stages of a plan get.

Ranks of a tensor-parallel stage are of one kind and of one node; nodes of a single device, as the ranks of a
lab, count as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.spec.cluster import Cluster


class Places:
    """The devices of a cluster by kind, alike in name and memory, and by node."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        kinds: dict[tuple[str, float], list[int]] = defaultdict(list)
        for rank in range(cluster.num_devices):
            device = cluster.device_of(rank)
            kinds[device.name, device.capacity_bytes].append(rank)
        self.kinds = list(kinds.values())
        self._nodes = [self._by_node(ranks) for ranks in self.kinds]

    def _by_node(self, ranks: Sequence[int]) -> list[list[int]]:
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            alone = self.cluster.node_group_of(rank).per_node == 1
            nodes[-1 if alone else self.cluster.node_of(rank)].append(rank)
        return list(nodes.values())

    def blocks(self, kind: int, size: int) -> Iterator[tuple[int, ...]]:
        """Yield the ranks of a kind in as many blocks of a size as there are."""
        for ranks in self._nodes[kind]:
            for lo in range(0, len(ranks) - size + 1, size):
                yield tuple(ranks[lo : lo + size])

    def given(self, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, ...]] | None:
        """Return ranks for stages of (kind, number of ranks), largest first; None where they do not fit."""
        free = [[list(ranks) for ranks in nodes] for nodes in self._nodes]
        found: dict[int, tuple[int, ...]] = {}
        for place in sorted(range(len(wanted)), key=lambda i: -wanted[i][1]):
            kind, size = wanted[place]
            node = next((ranks for ranks in free[kind] if len(ranks) >= size), None)
            if node is None:
                return None
            found[place] = tuple(node[:size])
            del node[:size]
        return [found[place] for place in range(len(wanted))]

    def degrees(self, costs: MeasuredCosts, kind: int) -> tuple[int, ...]:
        """Return the tp above 1 that a kind's devices can have: measured, and enough of them on a node."""
        device = self.cluster.device_of(self._nodes[kind][0][0]).name
        own = costs.parts.get(device if device in costs.tables else "", {})
        known = set(own) & set(costs.parts.get("", {}))  # sums and bytes are those of the first device
        return tuple(sorted(tp for tp in known if next(self.blocks(kind, tp), None) is not None))
