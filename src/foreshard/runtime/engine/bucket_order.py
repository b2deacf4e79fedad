"""Which bucket of gradients is summed next, where several wait: an order that all owners agree on."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Condition

import torch

from foreshard.runtime.engine.bucket_urgency import Urgency
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.state.buckets import Bucket

_TAG = (1 << 30) - 1  # of no send of a schedule


class AgreedOrder:
    """The next bucket to sum, on all owners the same: the most urgent that waits on the first of them.

    The first owner tells the others its choice, in a message for each bucket; they sum that bucket as soon as
    it is complete with them, too. Buckets are known by their place among those of the owners.

    Parameters
    ----------
    group : PeerGroup
        Of the owners, used by the thread that sums alone.
    buckets : sequence of Bucket
        Of the owners, in the order in which a backward completes them.
    urgency : Urgency
    """

    def __init__(self, group: PeerGroup, buckets: Sequence[Bucket], urgency: Urgency):
        self._group = group
        self._number = {id(bucket): number for number, bucket in enumerate(buckets)}
        self._urgency = [urgency(bucket) for bucket in buckets]
        self._buckets = list(buckets)
        self._changed = Condition()
        self._waiting: list[tuple[int, int]] = []
        self._ready: dict[int, Future[None]] = {}
        self._failure: BaseException | None = None

    def add(self, bucket: Bucket) -> Future[None]:
        """Note a bucket that is complete here; return what is done when it has been summed."""
        number, done = self._number[id(bucket)], Future[None]()
        with self._changed:
            if self._failure is not None:
                done.set_exception(self._failure)
                return done
            heapq.heappush(self._waiting, (self._urgency[number], number))
            self._ready[number] = done
            self._changed.notify_all()
        return done

    def next(self) -> tuple[Bucket, Future[None]]:
        """Return the bucket to sum now; at most as often as buckets are added.

        Raises
        ------
        PeerLost
            When the first owner is gone, or the sums are broken off.
        """
        if self._group.place:
            told = torch.empty(1, dtype=torch.int64)
            self._group.recv([told], 0, _TAG).wait()
            number = int(told)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._failure is not None)
                self._check_open()
                number = heapq.heappop(self._waiting)[1]
            told = torch.tensor([number])
            for work in [self._group.send([told], other, _TAG) for other in range(1, len(self._group.ranks))]:
                work.wait()
        with self._changed:
            self._changed.wait_for(lambda: number in self._ready or self._failure is not None)
            self._check_open()
            return self._buckets[number], self._ready.pop(number)

    def fail(self, error: BaseException) -> None:
        """End all waiting: nothing is summed any more."""
        with self._changed:
            self._failure = self._failure or error
            for done in self._ready.values():
                done.set_exception(self._failure)
            self._ready.clear()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
