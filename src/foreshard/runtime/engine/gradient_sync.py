"""Sums the gradients of a step over all ranks that hold a parameter, bucket by bucket.

The sum of a bucket starts as soon as the last backward of the step has made its last gradient, so that
it overlaps with the backward of the layers before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foreshard.runtime.engine.bucket_sums import BackendSum, BucketSum
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.state.buckets import Bucket

GroupOf = Callable[[tuple[int, ...], str], Any]
"""(ranks, name) -> process group of those ranks."""


class GradientSync:
    """A sum per bucket, in place, started as soon as the bucket is complete.

    All ranks ask `group_of` for process groups in one order, or they would wait for each other. For the same
    reason the buckets of a group start in their order, also where a later one is complete first, unless their
    sum agrees on an order itself. `sum_of` connects the ranks of a group. Without `overlap` sums start after
    the whole backward.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group_of: GroupOf,
        clock: Clock,
        sum_of: Callable[[Any, Sequence[Bucket]], BucketSum] = lambda group, buckets: BackendSum(group),
        *,
        overlap: bool = True,
    ):
        self._buckets, self._clock, self._overlap = list(buckets), clock, overlap
        owners = sorted({b.owners for b in buckets if len(b.owners) > 1})
        self._sums = {
            ranks: sum_of(group_of(ranks, "sync"), [b for b in buckets if b.owners == ranks])
            for ranks in owners
        }
        self._clock_groups = {ranks: group_of(ranks, "clock") for ranks in owners if clock.virtual}
        self._missing: list[set[int]] = []
        self._waiting: dict[tuple[int, ...], deque[int]] = {}
        self._works: list[Any] = []
        self._ready_s: list[float] = []
        self._free_s = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._missing = [set(bucket.layers) for bucket in self._buckets]
        self._waiting = {bucket.owners: deque() for bucket in self._buckets}
        for number, bucket in enumerate(self._buckets):
            self._waiting[bucket.owners].append(number)
        self._works = [None] * len(self._buckets)
        self._ready_s = [0.0] * len(self._buckets)

    @contextmanager
    def last_backward(self, layers: frozenset[int]) -> Iterator[None]:
        """Start buckets in the body, the last backward of these layers, as soon as their gradients are made.

        Where the backward makes no gradient of a parameter, `layers_done` starts its bucket.
        """
        handles: list[Any] = []
        for number, missing in enumerate(self._missing if self._overlap else ()):
            if missing and missing <= layers:
                handles += self._watched(number)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watched(self, number: int) -> list[Any]:
        """Return the handles of hooks that start a bucket when they have seen all of its gradients."""
        awaited = {gradient.parameter for gradient in self._buckets[number].gradients}

        def made(parameter: nn.Parameter) -> None:
            awaited.discard(parameter)
            if not awaited:
                self._complete(number)

        return [parameter.register_post_accumulate_grad_hook(made) for parameter in awaited]

    def layers_done(self, layers: frozenset[int]) -> None:
        """Note layers whose gradients are complete, and start the buckets that they complete."""
        for number, missing in enumerate(self._missing if self._overlap else ()):
            if missing:
                missing -= layers
                if not missing:
                    self._complete(number)

    def finish(self) -> None:
        """Return when every bucket holds the sum; layers without samples on this rank are started now."""
        for number, missing in enumerate(self._missing):
            if missing:
                self._complete(number)
        for number, work in enumerate(self._works):
            if work is not None:
                work.wait()
                if self._clock.virtual:
                    self._advance_clock(number)

    def release(self) -> None:
        """Break off sums under way."""
        for one in self._sums.values():
            one.close()

    def _complete(self, number: int) -> None:
        """Start a bucket, and those that waited for it, unless it waits for one before it."""
        self._missing[number].clear()
        owners = self._buckets[number].owners
        if owners in self._sums and self._sums[owners].agrees:
            self._start(number)
            return
        waiting = self._waiting[owners]
        while waiting and not self._missing[waiting[0]]:
            self._start(waiting.popleft())

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.fill()
        self._ready_s[number] = self._clock.now()
        owners = bucket.owners
        if len(owners) > 1:
            self._works[number] = self._sums[owners].begin(bucket)

    def _advance_clock(self, number: int) -> None:
        """Move the virtual clock to where the slowest owner and the links let the all-reduce end."""
        bucket = self._buckets[number]
        owners = bucket.owners
        start = torch.tensor([max(self._ready_s[number], self._free_s)], dtype=torch.float64)
        latest(self._clock_groups[owners], start)
        size = bucket.flat.numel() * bucket.flat.element_size()
        self._free_s = float(start[0]) + self._clock.all_reduce_s(size, owners)
        self._clock.advance_to(self._free_s)


def latest(group: Any, times: torch.Tensor) -> None:
    """Replace times by the latest in the group, in place."""
    group.allreduce([times], dist.ReduceOp.MAX).wait()
