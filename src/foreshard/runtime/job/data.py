"""Samples by their position in the training: which sample is at a position depends on the seed only.

Each epoch has its own order, computed for one position at a time, so that nothing is stored and training
continues anywhere exactly where it stopped. Random numbers of a dataset (augmentation) depend on the position
too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from foreshard.errors import SpecError
from foreshard.runtime.engine.counter_rng import key_of
from foreshard.runtime.job.layer_builders import SEEDING
from foreshard.runtime.job.readers import Readers
from foreshard.runtime.job.seeding import generators_kept, seed_generators
from foreshard.runtime.job.user_code import user_code

_NOT_EMPTY = "A dataset has at least one sample"
_KEPT_STEPS = 4
"""Steps of an iterable's samples that are kept: a step may be trained again, in other micro-batches."""


def shuffled(index: int, size: int, seed: int) -> int:
    """Return the index-th element of a permutation of 0..size-1.

    A Feistel network of four rounds over the next even power of two, repeated until the result is inside.

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
    value = index
    while True:
        left, right = value >> half, value & low
        for turn in range(4):
            left, right = right, left ^ (key_of(seed * 4 + turn, right) & low)
        value = left << half | right
        if value < size:
            return value


class Feed:
    """Batches of a dataset by position; the dataset is not empty, and can be read more than once.

    `size` is its number of samples, None for an iterable, whose p-th sample is the p-th that it yields; every
    epoch restarts it. So many batches are read ahead in another thread (`prefetch`, 0 for none); samples are
    read by `readers` if there are any.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        global_batch: int,
        seed: int = 0,
        prefetch: int = 2,
        path: str | None = None,
        readers: Readers | None = None,
    ):
        self.dataset, self.collate, self.readers = dataset, collate, readers
        self.global_batch, self.seed = global_batch, seed
        self._path, self._depth = path, prefetch
        self.size = size_of(dataset, path)
        self._stream: Iterator[Any] | None = None
        self._next = 0
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foreshard-feed") if prefetch else None
        self._ahead: dict[range, Future[Any]] = {}
        self._coming: deque[range] = deque()
        self._lock = threading.Lock()

    def index(self, position: int) -> int:
        """Return which sample of the dataset is at a position; for an iterable the position itself."""
        if self.size is None:
            return position
        epoch, place = divmod(position, self.size)
        return shuffled(place, self.size, key_of(self.seed) ^ epoch)

    def batch(self, positions: range) -> Any:
        """Return the samples at the positions, collated."""
        ahead = self._ahead.pop(positions, None)
        if ahead is None and positions in self._coming:
            self._coming.remove(positions)
        try:
            return ahead.result() if ahead is not None else self._read(positions)
        finally:
            self._read_ahead()

    def prefetch(self, wanted: Sequence[range]) -> None:
        """Read these batches ahead, in this order, and after them the same batches of the next step.

        Batches that were read ahead and are not among them are dropped.
        """
        if self._pool is None:
            return
        later = [range(p.start + self.global_batch, p.stop + self.global_batch) for p in wanted]
        coming = [*wanted, *later]
        for positions in [p for p in self._ahead if p not in coming]:
            self._ahead.pop(positions).cancel()
        self._coming = deque(p for p in coming if p not in self._ahead)
        self._read_ahead()

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Let the body draw random numbers that depend on the step alone: nothing is read meanwhile."""
        with self._lock, generators_kept():
            seed_generators(self.seed, step, 2)
            yield

    def close(self) -> None:
        """Stop reading ahead."""
        self._coming.clear()
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _read_ahead(self) -> None:
        while self._pool is not None and self._coming and len(self._ahead) < self._depth:
            positions = self._coming.popleft()
            self._ahead[positions] = self._pool.submit(self._read, positions)

    def _read(self, positions: range) -> Any:
        with self._lock, SEEDING, generators_kept():
            with user_code("dataset", self._path, rule="Every sample can be read at any time"):
                samples = (
                    [self._sample(position) for position in positions]
                    if self.readers is None
                    else self.readers.samples([(position, self.index(position)) for position in positions])
                )
            with user_code("collate", self._path, rule="It makes a batch of a list of samples"):
                seed_generators(self.seed, positions.start, 1)
                return self.collate(samples)

    def _sample(self, position: int) -> Any:
        if self.size is None:
            return self._streamed(position)
        seed_generators(self.seed, position, 0)
        return self.dataset[self.index(position)]

    def _streamed(self, position: int) -> Any:
        """Return the p-th sample of an iterable; skipped samples are kept while they may be asked for."""
        if position in self._kept:
            return self._kept[position]
        if self._stream is None or position < self._next:
            self._stream, self._next = self._forever(), 0
            self._kept.clear()
        while self._next <= position:
            seed_generators(self.seed, self._next, 0)
            self._kept[self._next] = next(self._stream)
            self._next += 1
            while len(self._kept) > _KEPT_STEPS * self.global_batch:
                self._kept.popitem(last=False)
        return self._kept[position]

    def _forever(self) -> Iterator[Any]:
        while True:
            count = 0
            for sample in self.dataset:
                count += 1
                yield sample
            if not count:
                raise _refused(
                    "yields nothing", _NOT_EMPTY, "Let its __iter__ restart every time", self._path
                )


def size_of(dataset: Any, path: str | None) -> int | None:
    """Return the number of samples of a map dataset, None for an iterable."""
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if is_map and not isinstance(dataset, IterableDataset):
        with user_code("dataset", path):
            size = len(dataset)
        if size == 0:
            raise _refused("is empty", _NOT_EMPTY, "See what dataset() reads", path)
        return size
    if isinstance(dataset, Iterator):
        what = f"is a {type(dataset).__name__}, which can be read once"
        rule = "A dataset gives the same samples every time it is read"
        raise _refused(what, rule, "Return an object whose __iter__ restarts", path)
    return None


def _refused(what: str, rule: str, fix: str, path: str | None) -> SpecError:
    return SpecError(f"the dataset {what}", file=path, key="dataset", rule=rule, fix=fix)
