"""What other jobs send over the links between racks and the NICs of nodes, and what they leave of them.

Unless its bursts are simulated, a job sends its bytes of an iteration evenly over the time that an iteration
takes without contention. Of a resource that jobs share, each gets what it asks for but at most an equal part,
as max-min fairness has it; what is left is for the run that asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreshard.comm.jobs.demand import iteration_length_s
from foreshard.comm.jobs.job import TrainingJob, Transfer

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster

OUT, IN = 0, 1
Place = tuple[str, int, int]
"""('link', index of ``cluster.links``, 1 against the order of its racks), or ('nic', node, `OUT` or `IN`)."""


def left_by(capacity: float, demands: Sequence[float]) -> float:
    """Return what one that always has something to send gets of a capacity beside demands, max-min fair.

    Examples
    --------
    >>> left_by(12.0, []), left_by(12.0, [3.0]), left_by(12.0, [3.0, 9.0]), left_by(12.0, [99.0])
    (12.0, 9.0, 4.5, 6.0)
    """
    left, others = capacity, len(demands)
    for demand in sorted(demands):
        if demand >= left / (others + 1):
            break
        left, others = left - demand, others - 1
    return left / (others + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLoad:
    """What a phase of a job sends, and how long that takes it alone."""

    num_bytes: dict[Place, float]
    alone_s: float


class BackgroundLoad:
    """The demands of other jobs on a cluster.

    Parameters
    ----------
    cluster : Cluster
    jobs : sequence of TrainingJob
        Their ranks are devices of the cluster.
    """

    def __init__(self, cluster: Cluster, jobs: Sequence[TrainingJob]):
        self._cluster = cluster
        self._nodes, self._nic_bytes_per_s, self._racks = _places(cluster)
        self._demands: dict[Place, list[float]] = {}
        for job in jobs:
            for place, rate in self._rates(job).items():
                self._demands.setdefault(place, []).append(rate)

    def link_share(self, index: int, way: int) -> float:
        """Return the part that is left of a link between racks in one direction, above 0 and at most 1."""
        capacity = self._cluster.links[index].bandwidth_bytes_per_s
        return left_by(capacity, self._demands.get(("link", index, way), ())) / capacity

    def nic_share(self, ranks: Sequence[int], way: int) -> float:
        """Return the least part that is left of the NICs of these ranks' nodes, above 0 and at most 1."""
        shares = [1.0]
        for node in {self._nodes[rank] for rank in ranks}:
            demands = self._demands.get(("nic", node, way))
            if demands:
                shares.append(left_by(self._nic_bytes_per_s[node], demands) / self._nic_bytes_per_s[node])
        return min(shares)

    def _rates(self, job: TrainingJob) -> dict[Place, float]:
        """Return bytes per second of a job on each place, over an iteration without contention."""
        phases = self.phases(job)
        iteration_s = iteration_length_s(job.phases, np.array([own.alone_s for own in phases]))
        totals: dict[Place, float] = {}
        for own in phases:
            for place, size in own.num_bytes.items():
                totals[place] = totals.get(place, 0.0) + size
        return {place: size / iteration_s for place, size in totals.items()} if iteration_s > 0.0 else {}

    def phases(self, job: TrainingJob) -> list[PhaseLoad]:
        """Return what each phase of a job sends over places."""
        found = []
        for phase in job.phases:
            own = self._bytes(phase.transfers)
            alone_s = max((size / self._capacity(place) for place, size in own.items()), default=0.0)
            found.append(PhaseLoad(num_bytes=own, alone_s=alone_s))
        return found

    def nic_load(self, load: PhaseLoad, ranks: Sequence[int], way: int) -> float:
        """Return the seconds for which a phase takes the busiest of the NICs of these ranks' nodes."""
        seconds = [0.0]
        for node in {self._nodes[rank] for rank in ranks}:
            size = load.num_bytes.get(("nic", node, way))
            if size:
                seconds.append(size / self._nic_bytes_per_s[node])
        return max(seconds)

    def _capacity(self, place: Place) -> float:
        kind, index, _ = place
        if kind == "link":
            return float(self._cluster.links[index].bandwidth_bytes_per_s)
        return self._nic_bytes_per_s[index]

    def _bytes(self, transfers: Sequence[Transfer]) -> dict[Place, float]:
        """Return the bytes of transfers on each place that they pass."""
        found: dict[Place, float] = {}
        for one in transfers:
            for place in self._passed(one.source, one.target):
                found[place] = found.get(place, 0.0) + one.num_bytes
        return found

    def _passed(self, source: int, target: int) -> list[Place]:
        ends = self._nodes[source], self._nodes[target]
        if ends[0] == ends[1]:
            return []
        passed: list[Place] = [
            ("nic", node, way)
            for node, way in zip(ends, (OUT, IN), strict=True)
            if self._nic_bytes_per_s[node]
        ]
        racks = self._racks[ends[0]], self._racks[ends[1]]
        for index, link in enumerate(self._cluster.links):
            if racks in (link.between, link.between[::-1]):
                passed.append(("link", index, int(racks != link.between)))
        return passed


def _places(cluster: Cluster) -> tuple[list[int], list[float], list[str | None]]:
    """Return the node of each rank, and the NIC rate and the rack of each node."""
    nodes: list[int] = []
    rates: list[float] = []
    racks: list[str | None] = []
    for group in cluster.nodes:
        for _ in range(group.count):
            nodes += [len(rates)] * group.per_node
            rates.append(float(group.nic_bytes_per_s))
            racks.append(group.rack)
    return nodes, rates, racks
