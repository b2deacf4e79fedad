"""A training job as its network sees it: phases of computation, and what ranks send after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of, usual_algorithm
from foreshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one rank sends another in a phase."""

    # source, target: ranks of the topology
    source: int
    target: int
    num_bytes: float
    flow: int = 0  # of several equal-cost paths the hash of source, target and this number takes one


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPhase:
    """Computation, then transfers that start together."""

    compute_s: float
    # they start when the computation and the transfers of the phase before have ended
    transfers: tuple[Transfer, ...] = ()
    overlaps: bool = False  # whether the computation of the next phase runs beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A job that repeats an iteration on its ranks.

    It starts when it has arrived and the jobs before it on any of its ranks have ended.
    """

    name: str
    ranks: tuple[int, ...]
    phases: tuple[IterationPhase, ...]
    num_iterations: int
    arrival_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Computation of an iteration."""
        return sum(phase.compute_s for phase in self.phases)

    @property
    def work_device_s(self) -> float:
        """Device seconds of computation of an iteration."""
        return self.compute_s * len(self.ranks)


def collective_transfers(
    collective: str, size_bytes: float, ranks: Sequence[int], *, algorithm: str | None = None
) -> tuple[Transfer, ...]:
    """Return what a collective sends between ranks in all, pair by pair, unless named by a ring or directly.

    All pairs send at once: rounds of a schedule, which neighbours keep in step, are left out, as are the
    latencies of all rounds but one.

    Raises
    ------
    SpecError
        For an unknown algorithm, or one that needs switches or nodes.

    Examples
    --------
    >>> [transfer.num_bytes for transfer in collective_transfers("all-reduce", 3e6, [4, 9, 2])]
    [4000000.0, 4000000.0, 4000000.0]
    """
    algorithm = algorithm or usual_algorithm(collective)
    known = ALGORITHMS.get(algorithm)
    made = None
    if known is None or not known.needs_nodes:
        made = schedule_of(collective, algorithm, len(ranks))
    if made is None or made.switches:
        raise SpecError(
            f"{algorithm} needs nodes or switches",
            key="algorithm",
            value=algorithm,
            rule="A job's collective is one between ranks",
            fix="Use ring, double-tree, halving-doubling or direct, or state transfers",
        )
    ends = np.stack([made.source, made.target, made.channel])
    pairs, place = np.unique(ends, axis=1, return_inverse=True)
    sums = np.bincount(place.ravel(), made.weight) * size_bytes
    return tuple(
        Transfer(source=ranks[source], target=ranks[target], num_bytes=float(total), flow=channel)
        for (source, target, channel), total in zip(pairs.T.tolist(), sums, strict=True)
        if total > 0.0
    )
