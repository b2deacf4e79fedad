"""What a job asks of a topology: the paths it may take, bytes on resources, and times without other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.jobs.job import IterationPhase, TrainingJob
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.routing import Routing
from foreshard.errors import SpecError

Choice = tuple[int, ...]
"""For each transfer of an iteration, the number of the path it takes."""

MAX_PATHS = 4096
"""Equal-cost paths between two ranks; more would be a wrong topology."""


@dataclass(frozen=True, slots=True)
class PathOption:
    """One of the equal-cost paths of a transfer: its resources and its latency."""

    resources: tuple[int, ...]
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobDemand:
    """A job with its paths over a topology."""

    job: TrainingJob
    phase_of: np.ndarray  # int, shape (transfers,); phase of each transfer, in order
    num_bytes: np.ndarray  # shape (transfers,)
    options: tuple[tuple[PathOption, ...], ...]  # equal-cost paths of each transfer
    hashed: Choice  # the paths that the hash of the flow takes
    capacity_bytes_per_s: np.ndarray  # shape (resources,)

    def paths(self, choice: Choice) -> list[PathOption]:
        """Return the path of each transfer."""
        return [some[number] for some, number in zip(self.options, choice, strict=True)]

    def phase_loads(self, choice: Choice) -> np.ndarray:
        """Return the bytes of each phase on each resource, shape (phases, resources)."""
        loads = np.zeros((len(self.job.phases), len(self.capacity_bytes_per_s)))
        for phase, size, path in zip(self.phase_of, self.num_bytes, self.paths(choice), strict=True):
            loads[phase, list(path.resources)] += size
        return loads

    def phase_times_s(self, choice: Choice) -> np.ndarray:
        """Return how long the transfers of each phase take at least on these paths, shape (phases,)."""
        busy_s = (self.phase_loads(choice) / self.capacity_bytes_per_s).max(axis=1, initial=0.0)
        latency_s = np.zeros(len(self.job.phases))
        for phase, path in zip(self.phase_of, self.paths(choice), strict=True):
            latency_s[phase] = max(latency_s[phase], path.latency_s)
        return busy_s + latency_s

    def transfer_s(self, choice: Choice) -> float:
        """Return bytes over capacity of the resource where an iteration's transfers take longest."""
        loads = self.phase_loads(choice).sum(axis=0)
        return float((loads / self.capacity_bytes_per_s).max(initial=0.0))

    def iteration_s(self, choice: Choice) -> float:
        """Return an iteration on these paths without other jobs, its flows in step."""
        return iteration_length_s(self.job.phases, self.phase_times_s(choice))

    def bound_s(self) -> float:
        """Return a time that no iteration beats, on any paths and beside any jobs.

        Only resources that every equal-cost path of a transfer takes are counted.
        """
        phases = len(self.job.phases)
        loads = np.zeros((phases, len(self.capacity_bytes_per_s)))
        alone_s = np.zeros(phases)
        for phase, size, some in zip(self.phase_of, self.num_bytes, self.options, strict=True):
            always = set.intersection(*(set(path.resources) for path in some))
            loads[phase, list(always)] += size
            own_s = min(self._alone_s(path, size) for path in some)
            alone_s[phase] = max(alone_s[phase], own_s)
        busy_s = (loads / self.capacity_bytes_per_s).max(axis=1, initial=0.0)
        return iteration_length_s(self.job.phases, np.maximum(busy_s, alone_s))

    def _alone_s(self, path: PathOption, num_bytes: float) -> float:
        rate = self.capacity_bytes_per_s[list(path.resources)].min(initial=np.inf)
        return path.latency_s + num_bytes / float(rate)


def iteration_length_s(phases: Sequence[IterationPhase], transfer_s: np.ndarray) -> float:
    """Return an iteration whose transfers of each phase take given seconds.

    Examples
    --------
    >>> phase = IterationPhase(compute_s=2.0, overlaps=True)
    >>> iteration_length_s([phase, IterationPhase(compute_s=1.0)], np.array([3.0, 0.0]))
    5.0
    """
    return phase_spans_s(phases, transfer_s)[1]


def phase_spans_s(phases: Sequence[IterationPhase], transfer_s: np.ndarray) -> tuple[np.ndarray, float]:
    """Return when a lone iteration sends in each phase, shape (phases, 2), and when it ends.

    Transfers of a phase follow those of the phases before; a phase that sends nothing waits for none.
    """
    spans = np.zeros((len(phases), 2))
    computed_s = sent_s = 0.0
    for i, (phase, seconds) in enumerate(zip(phases, transfer_s.tolist(), strict=True)):
        computed_s += phase.compute_s
        begin_s = max(sent_s, computed_s)
        spans[i] = begin_s, begin_s + seconds
        sent_s = begin_s + seconds
        if phase.transfers and not phase.overlaps:
            computed_s = sent_s
    return spans, max(computed_s, sent_s)


def demands_of(topology: Topology, jobs: Sequence[TrainingJob]) -> tuple[JobDemand, ...]:
    """Return what each job asks of the topology.

    Raises
    ------
    SpecError
        If a rank is no device of the topology, or no path joins two that communicate.
    """
    routes = _Paths(topology)
    found = []
    for job in jobs:
        transfers = [(i, one) for i, phase in enumerate(job.phases) for one in phase.transfers]
        known = [routes.between(one.source, one.target, one.flow) for _, one in transfers]
        found.append(
            JobDemand(
                job=job,
                phase_of=np.array([phase for phase, _ in transfers], dtype=np.int64),
                num_bytes=np.array([one.num_bytes for _, one in transfers]),
                options=tuple(options for options, _ in known),
                hashed=tuple(number for _, number in known),
                capacity_bytes_per_s=topology.capacity_bytes_per_s,
            )
        )
    return tuple(found)


class _Paths:
    """Equal-cost paths between ranks, looked up once for each pair."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.routing = topology, Routing(topology)
        self._known: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def between(self, source: int, target: int, flow: int) -> tuple[tuple[PathOption, ...], int]:
        """Return the equal-cost paths of a pair, and the number of the one that a flow's hash takes."""
        for rank in (source, target):
            if not 0 <= rank < self.topology.num_ranks:
                raise SpecError(
                    f"rank {rank}",
                    key="ranks",
                    value=rank,
                    rule=f"Ranks of this topology are 0 to {self.topology.num_ranks - 1}",
                )
        ends = (int(self.topology.devices[source]), int(self.topology.devices[target]))
        if ends not in self._known:
            number = self.routing.num_paths(*ends)
            if number > MAX_PATHS:
                raise SpecError(
                    f"{number:,} equal-cost paths between ranks {source} and {target}",
                    key="cluster",
                    value=number,
                    rule=f"Jobs choose among {MAX_PATHS:,} at most",
                    fix="Give the fabric fewer spines",
                )
            self._known[ends] = tuple(route for route, _ in self.routing.spray(*ends, limit=MAX_PATHS))
        routes = self._known[ends]
        options = tuple(
            PathOption(self.topology.resources_of(route), float(self.topology.latency_s[list(route)].sum()))
            for route in routes
        )
        return options, routes.index(self.routing.ecmp(*ends, flow=flow))
