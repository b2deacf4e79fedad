"""A stage of several workers, on every span of layers: how they may split a micro-batch, and what that takes.

Everything is free of links between stages, of prices and of weights, so that a stage met again is a look-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from foreshard.control.search.costs import ring_s, slowest_link
from foreshard.control.search.shares import whole_shares
from foreshard.control.slots import Chain, State

_ALL_SPLITS = 24
"""Ways to split a micro-batch up to which all are looked at; each is a table of all spans of layers."""
_SLOWER = (1.1, 1.25, 1.5, 2.0, 3.0)
"""Of more ways: those that give the workers that are cheap when busy most, so many times slower."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointStage:
    """Workers that hold the same layers and split every micro-batch.

    Attributes
    ----------
    splits : ndarray of int, shape (splits, workers)
        Samples of a micro-batch, one at least each.
    passing_s : ndarray, shape (splits, L + 1, L + 1)
        Of a micro-batch through layers [start, stop), by the slowest; inf where stop <= start.
    busy_s : ndarray, shape (splits, workers, L + 1, L + 1)
        Of each worker; means nothing where stop <= start.
    sync_s : ndarray, shape (L + 1, L + 1)
        In which gradients are summed, after the last micro-batch.
    """

    splits: np.ndarray
    passing_s: np.ndarray
    busy_s: np.ndarray
    sync_s: np.ndarray
    _states: np.ndarray
    _saved: np.ndarray
    _memory: np.ndarray
    _rooms: dict[int, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(chain: Chain, state: State, workers: Sequence[int], splits: np.ndarray) -> JointStage:
        """Return the stage of some workers, each way to split a micro-batch a row of `splits`."""
        at = list(workers)
        before = chain.before_s[at] / state.speed[at][:, None]
        busy_s = splits[:, :, None, None] * _spans(before)
        passing_s = busy_s.max(1)
        passing_s[:, np.tri(passing_s.shape[1], dtype=bool)] = math.inf
        return JointStage(
            splits=splits,
            passing_s=passing_s,
            busy_s=busy_s,
            sync_s=_sync_s(chain, state, at),
            _states=_spans(chain.before_state),
            _saved=_spans(chain.before_saved),
            _memory=np.asarray(chain.memory_bytes[at], float),
        )

    def fits(self, depth: int) -> np.ndarray:
        """Return whether splits fit with activations of so many micro-batches, shape as `passing_s`."""
        if depth not in self._rooms:
            most = self._states[0, -1] + depth * self._saved[0, -1] * self.splits
            if (most <= self._memory).all():
                self._rooms[depth] = np.ones(self.passing_s.shape, bool)
            else:
                kept = depth * self.splits[:, :, None, None] * self._saved
                self._rooms[depth] = (self._states + kept <= self._memory[:, None, None]).all(1)
        return self._rooms[depth]


def _spans(before: np.ndarray) -> np.ndarray:
    """Return sums over [start, stop) from sums before each layer, two axes for the last."""
    return np.asarray(before[..., None, :] - before[..., :, None])


def _sync_s(chain: Chain, state: State, workers: Sequence[int]) -> np.ndarray:
    """Return the seconds of a ring among the workers for layers [start, stop)."""
    num, size = len(workers), chain.num_layers + 1
    if num == 1:
        return np.zeros((size, size))
    spans, sizes = _spans(np.arange(size)), _spans(chain.before_sync)
    return np.asarray(ring_s(num, spans, sizes, *slowest_link(state, workers)))


def splits_of(
    sample_s: np.ndarray, memory_bytes: np.ndarray, micro_batch: int, busy_weight: np.ndarray | None = None
) -> np.ndarray:
    """Return ways in which workers split a micro-batch, shape (splits, workers), one sample at least each.

    Parameters
    ----------
    sample_s : ndarray, shape (workers,)
        Seconds per sample of all layers.
    memory_bytes : ndarray, shape (workers,)
    micro_batch : int, samples
    busy_weight : ndarray, shape (workers,), optional
        Of a busy second: where it counts, slower ways that spare dear workers are among them.
    """
    workers, spare = len(sample_s), micro_batch - len(sample_s)
    if spare < 0:
        return np.zeros((0, workers), dtype=int)
    if math.comb(micro_batch - 1, workers - 1) <= _ALL_SPLITS:
        return _all_splits(micro_batch, workers)
    fastest = fastest_split(sample_s, micro_batch)
    room = memory_bytes / memory_bytes.sum()
    found = [fastest, _parts(spare, room), _parts(spare, np.full(workers, 1.0 / workers))]
    if busy_weight is not None:
        end = float((fastest * sample_s).max())
        found += [_cheapest(sample_s, busy_weight * sample_s, spare, end * part) for part in _SLOWER]
    return np.unique(np.array(found, dtype=float).round().astype(int), axis=0)


def fastest_split(sample_s: np.ndarray, micro_batch: int) -> np.ndarray:
    """Return the samples with which the last of some workers ends soonest, one at least each."""
    spare = micro_batch - len(sample_s)
    return 1.0 + whole_shares(sample_s, sample_s, spare, 1).shares if spare else np.ones(len(sample_s))


@cache
def _all_splits(samples: int, workers: int) -> np.ndarray:
    inner = itertools.combinations(range(1, samples), workers - 1)
    return np.diff([(0, *each, samples) for each in inner]).reshape(-1, workers)


def _parts(spare: int, part: np.ndarray) -> np.ndarray:
    """Return one sample each and the others in some proportion."""
    ends = np.concatenate([[0.0], np.cumsum(part)]) * spare
    return np.asarray(1.0 + np.diff(ends.round()))


def _cheapest(sample_s: np.ndarray, cost: np.ndarray, spare: int, end_s: float) -> np.ndarray:
    """Return the cheapest split that ends in time: cheap workers take all that they can."""
    shares = np.ones(len(sample_s))
    for at in np.argsort(cost, kind="stable"):
        more = min(max(math.floor(end_s / sample_s[at] * (1 + 1e-12)) - 1, 0), spare)
        shares[at] += more
        spare -= more
    return shares
