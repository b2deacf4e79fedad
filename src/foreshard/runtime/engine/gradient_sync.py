"""Gradients of a step summed over everybody who holds a parameter, by a collective that has a name.

One bucket a segment; a bucket starts on its way when its last layer has passed its last backward. Another
algorithm, order or compressor is another class under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.state.buckets import Bucket

GroupOf = Callable[[tuple[int, ...], str], Any]
"""(ranks, name) -> process group of those ranks."""


class GradientSync(Protocol):
    """Sums the buckets of a step over their owners, in place."""

    def begin(self) -> None:
        """Start a step."""
        ...

    def passed(self, layers: frozenset[int]) -> None:
        """Note that layers have their gradients complete."""
        ...

    def finish(self) -> None:
        """Return when every bucket holds the sum."""
        ...


class AllReduceSync:
    """An all-reduce per bucket, started as soon as the bucket is complete.

    Parameters
    ----------
    buckets : sequence of Bucket
    group_of : callable of (ranks, name)
    clock : Clock
    """

    def __init__(self, buckets: Sequence[Bucket], group_of: GroupOf, clock: Clock):
        self._buckets, self._clock = list(buckets), clock
        self._groups = _groups(buckets, group_of, "sync")
        self._clocks = _groups(buckets, group_of, "clock") if clock.virtual else {}
        self._missing: list[set[int]] = []
        self._works: list[Any] = []
        self._ready_s: list[float] = []
        self._free_s = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._missing = [set(bucket.layers) for bucket in self._buckets]
        self._works = [None] * len(self._buckets)
        self._ready_s = [0.0] * len(self._buckets)

    def passed(self, layers: frozenset[int]) -> None:
        """Start the buckets that these layers complete."""
        for number, missing in enumerate(self._missing):
            if missing:
                missing -= layers
                if not missing:
                    self._start(number)

    def finish(self) -> None:
        """Wait for all buckets; those whose layers this rank had no samples for start now."""
        for number, missing in enumerate(self._missing):
            if missing:
                missing.clear()
                self._start(number)
        for number, work in enumerate(self._works):
            if work is not None:
                work.wait()
                if self._clock.virtual:
                    self._advance(number)

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.fill()
        self._ready_s[number] = self._clock.now()
        owners = bucket.segment.owners
        if len(owners) > 1:
            self._works[number] = self._groups[owners].allreduce([bucket.flat])

    def _advance(self, number: int) -> None:
        """Move the virtual clock to where the slowest owner and the links let the bucket end."""
        bucket = self._buckets[number]
        owners = bucket.segment.owners
        start = torch.tensor([max(self._ready_s[number], self._free_s)], dtype=torch.float64)
        latest(self._clocks[owners], start)
        size = bucket.flat.numel() * bucket.flat.element_size()
        self._free_s = float(start[0]) + self._clock.reduced_s(size, owners)
        self._clock.received(self._free_s)


def _groups(buckets: Sequence[Bucket], group_of: GroupOf, name: str) -> dict[tuple[int, ...], Any]:
    """Return a group per set of owners.

    All ranks make them in one order, or they would wait for each other.
    """
    owners = sorted({bucket.segment.owners for bucket in buckets if len(bucket.segment.owners) > 1})
    return {ranks: group_of(ranks, name) for ranks in owners}


def latest(group: Any, times: torch.Tensor) -> None:
    """Replace times by the latest in the group."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    group.allreduce([times], options).wait()


SYNCS: dict[str, Callable[[Sequence[Bucket], GroupOf, Clock], GradientSync]] = {"all-reduce": AllReduceSync}


def gradient_sync(name: str, buckets: Sequence[Bucket], group_of: GroupOf, clock: Clock) -> GradientSync:
    """Return a gradient synchronisation by name.

    Raises
    ------
    SpecError
    """
    if name not in SYNCS:
        raise SpecError(
            f"unknown gradient synchronisation {name!r}",
            key="sync",
            value=name,
            rule=f"Known: {', '.join(sorted(SYNCS))}",
        )
    return SYNCS[name](buckets, group_of, clock)
