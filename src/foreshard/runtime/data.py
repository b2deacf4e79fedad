"""Samples by their place in the training: which sample is the p-th does not depend on who trains it.

Each pass over the data has its own order, computed for one place at a time, so that nothing is stored and training
goes on anywhere exactly where it stopped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from foreshard.errors import SpecError

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """Return 64 well-mixed bits (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def shuffled(place: int, size: int, seed: int) -> int:
    """Return the place-th element of a permutation of 0..size-1.

    A Feistel network of four rounds over the next even power of two, walked until it falls inside.

    Source
    ------
    Black and Rogaway 2002, cycle walking.

    Examples
    --------
    >>> sorted(shuffled(i, 10, seed=3) for i in range(10)) == list(range(10))
    True
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    value = place
    while True:
        left, right = value >> half, value & low
        for turn in range(4):
            left, right = right, left ^ (_mixed(right ^ _mixed(seed * 4 + turn)) & low)
        value = left << half | right
        if value < size:
            return value


class Feed:
    """Batches of a dataset by position.

    Parameters
    ----------
    dataset : map or iterable dataset
        Of an iterable the p-th sample is the p-th that it yields; every pass starts it anew.
    collate : callable of a list of samples
    global_batch : int
    seed : int
    prefetch : int
        Batches to read ahead.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], *, global_batch: int, seed: int = 0, prefetch: int = 2
    ):
        self.dataset, self.collate, self.global_batch, self.seed = dataset, collate, global_batch, seed
        self._is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        self._size = len(dataset) if self._is_map else None
        if self._size == 0:
            raise SpecError("the dataset is empty", key="dataset", rule="A dataset has at least one sample")
        self._stream: Iterator[Any] | None = None
        self._next = 0
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foreshard-feed") if prefetch else None
        self._ahead: dict[range, Future[Any]] = {}
        self._lock = threading.Lock()

    def index(self, position: int) -> int:
        """Return which sample of the dataset is at a position of the training."""
        if self._size is None:
            return position
        turn, place = divmod(position, self._size)
        return shuffled(place, self._size, _mixed(self.seed) ^ turn)

    def batch(self, positions: range) -> Any:
        """Return the samples at the positions, collated."""
        ahead = self._ahead.pop(positions, None)
        return ahead.result() if ahead is not None else self._read(positions)

    def prefetch(self, wanted: Sequence[range]) -> None:
        """Read these batches ahead, in this order; what was read ahead and not taken is dropped."""
        if self._pool is None:
            return
        for positions in [p for p in self._ahead if p not in wanted]:
            self._ahead.pop(positions).cancel()
        for positions in wanted:
            if positions not in self._ahead:
                self._ahead[positions] = self._pool.submit(self._read, positions)

    def _read(self, positions: range) -> Any:
        with self._lock:
            return self.collate([self._sample(position) for position in positions])

    def _sample(self, position: int) -> Any:
        return self.dataset[self.index(position)] if self._is_map else self._streamed(position)

    def _streamed(self, position: int) -> Any:
        """Return the p-th sample of an iterable; samples passed over are kept while they may be asked for."""
        if position in self._kept:
            return self._kept[position]
        if self._stream is None or position < self._next:
            self._stream, self._next = self._forever(), 0
            self._kept.clear()
        while self._next <= position:
            sample = next(self._stream)
            if self._next > position - 4 * self.global_batch:
                self._kept[self._next] = sample
            self._next += 1
        while len(self._kept) > 4 * self.global_batch:
            self._kept.popitem(last=False)
        return sample

    def _forever(self) -> Iterator[Any]:
        while True:
            count = 0
            for sample in self.dataset:
                count += 1
                yield sample
            if not count:
                raise SpecError("the dataset yields nothing", key="dataset", rule="A dataset has at least one sample")
