"""Which bucket of gradients is summed next, where several wait: an order that all owners agree on."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Annotated, Any

import torch

from foreshard.errors import SpecError, unknown
from foreshard.runtime.state.buckets import Bucket
from foreshard.spec.codec import Range, decode, parse_json, read_text

KEY = "--bucket-order"
BACKWARD, FORWARD = "backward", "forward"
_TAG = (1 << 30) - 1  # of no send of a schedule
Urgency = Callable[[Bucket], int]
"""Of a bucket: the lowest goes first, of equal ones the first to be complete in a backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOrderFile:
    """What the file of an order holds: layers, the most urgent first; those left out come after them."""

    schema_version: Annotated[int, Range(1, 1)]
    layers: tuple[Annotated[int, Range(0)], ...]


def bucket_urgency(text: str) -> Urgency | None:
    """Return the urgency of buckets that a text means; None for the order of the backward.

    Parameters
    ----------
    text : str
        ``backward``, ``forward`` (what the next forward needs first), or the path of a `LayerOrderFile`.

    Raises
    ------
    SpecError
    """
    if text == BACKWARD:
        return None
    if text == FORWARD:
        return lambda bucket: min(bucket.layers)
    if Path(text).suffix.lower() != ".json":
        rule = f"It is {BACKWARD}, {FORWARD}, or a file of layers that ends in .json"
        raise unknown("order", text, (BACKWARD, FORWARD), key=KEY, rule=rule)
    layers = decode(LayerOrderFile, parse_json(read_text(text), file=text), file=text).layers
    if len(set(layers)) < len(layers):
        twice = next(layer for at, layer in enumerate(layers) if layer in layers[:at])
        rule = "Each layer has one place in the order"
        raise SpecError(f"layer {twice} twice", file=text, key="layers", value=twice, rule=rule)
    place = {layer: at for at, layer in enumerate(layers)}
    return lambda bucket: min(place.get(layer, len(layers)) for layer in bucket.layers)


class AgreedOrder:
    """The next bucket to sum, on all owners the same: the most urgent that waits on the first of them.

    The first owner tells the others its choice, in a message for each bucket; they sum that bucket as soon as
    it is complete with them, too. Buckets are known by their place among those of the owners.

    Parameters
    ----------
    group : process group
        With `send` and `recv`, used by the thread that sums alone.
    place : int
        Of this rank in the group.
    size : int
    buckets : sequence of Bucket
        Of the owners, in the order in which a backward completes them.
    urgency : Urgency
    """

    def __init__(self, group: Any, place: int, size: int, buckets: Sequence[Bucket], urgency: Urgency):
        self._group, self._place, self._size = group, place, size
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
        if self._place:
            told = torch.empty(1, dtype=torch.int64)
            self._group.recv([told], 0, _TAG).wait()
            number = int(told)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._failure is not None)
                self._check_open()
                number = heapq.heappop(self._waiting)[1]
            told = torch.tensor([number])
            for work in [self._group.send([told], other, _TAG) for other in range(1, self._size)]:
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
