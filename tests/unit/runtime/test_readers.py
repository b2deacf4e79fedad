"""Samples read by several processes: the same as by one; an error by its line, a dead reader by name."""

import os
import random
import signal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foreshard.errors import SpecError
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.readers import ReaderLost, Readers


class Augmented:
    """Samples with random numbers of all generators that a dataset may use."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        if index == 36:
            raise ValueError("the last one is broken")
        drawn = [*torch.rand(2).tolist(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *drawn])


def feed_of(readers, *, size=37):
    dataset = Augmented()
    readers = Readers(dataset, readers, seed=3) if readers else None
    return Feed(dataset, torch.stack, global_batch=8, seed=3, prefetch=2, readers=readers), readers


def test_any_number_of_readers_gives_the_samples_of_none():
    draw = random.Random(0)
    plain, _ = feed_of(0)
    for count in (1, 2, 5):
        feed, _ = feed_of(count)
        for _ in range(12):
            begin = draw.randrange(100)
            positions = range(begin, begin + draw.randint(1, 9))
            if any(plain.index(position) == 36 for position in positions):
                continue
            feed.prefetch([positions])
            assert torch.equal(feed.batch(positions), plain.batch(positions))
        feed.close()
    plain.close()


def test_an_error_of_the_dataset_is_named_and_reading_goes_on():
    feed, _ = feed_of(2)
    broken = next(position for position in range(37) if feed.index(position) == 36)
    with pytest.raises(SpecError, match=r"ValueError in .*the last one is broken"):
        feed.batch(range(broken, broken + 4))
    other = next(p for p in range(100) if all(feed.index(p + i) != 36 for i in range(4)))
    assert feed.batch(range(other, other + 4)).shape == (4, 5)
    feed.close()


def test_a_killed_reader_is_named():
    feed, readers = feed_of(3)
    feed.batch(range(0, 3))
    process = readers._readers[1][0]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(ReaderLost, match=rf"reader 1 \(process {process.pid}\) died \(signal 9\)"):
        feed.batch(range(8, 14))
    feed.close()


def test_an_iterable_has_one_reader():
    with pytest.raises(SpecError, match="read in its own order"):
        Readers(iter([1, 2]), 2, seed=0)
