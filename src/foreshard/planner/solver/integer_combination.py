"""Combinations of whole pipelines: whether any that fits the devices processes the batch.

A dynamic program adds one pipeline at a time, up to half of a plan. Of the sets of equal demand for devices
it keeps the one that processes most, and it drops sets whose reduced cost all pipelines still to come cannot
make up for. The other half of a plan is looked up: the best set for the devices that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_PAIRS = 600_000
"""Most sets extended by one more pipeline: about a second."""
_CELLS = 8_000_000
"""Most demands for devices that are distinguished: 64 MB an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerMix:
    """The best combinations.

    proven : no set that processes the batch processes more than the best here
    samples : of the best sets, the most first
    sets : rows of the pipelines in each
    """

    proven: bool
    samples: tuple[float, ...] = ()
    sets: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Sets of so many pipelines, the best of each demand; `before` and `row` say how they came to be."""

    used: np.ndarray
    samples: np.ndarray
    reduced_cost: np.ndarray
    before: np.ndarray
    row: np.ndarray


@dataclass(slots=True, kw_only=True)
class _Sets:
    """Sets of a few pipelines, and the best of them for any devices.

    Pipelines are in the order of their reduced cost.
    """

    takes: np.ndarray
    samples: np.ndarray
    reduced_cost: np.ndarray
    counts: np.ndarray
    most: int
    levels: list[_Level] = field(default_factory=list)
    _best: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the set of none."""
        none, zero = np.zeros((1, len(self.counts)), dtype=np.int64), np.zeros(1)
        nowhere = np.zeros(0, dtype=np.int64)
        self.levels = [_Level(used=none, samples=zero, reduced_cost=zero, before=nowhere, row=nowhere)]

    def extend(self, number: int) -> bool:
        """Make the sets of up to so many pipelines; return False when there are too many."""
        least_cost = min(float(self.reduced_cost[0]), 0.0)
        while len(self.levels) <= number:
            last = self.levels[-1]
            allowed = -last.reduced_cost - (self.most - len(self.levels)) * least_cost
            ahead = np.searchsorted(self.reduced_cost, allowed + 1e-6, side="right")
            if ahead.sum() > _PAIRS:
                return False
            before = np.repeat(np.arange(len(ahead)), ahead)
            row = np.arange(len(before)) - np.repeat(np.cumsum(ahead) - ahead, ahead)
            used = last.used[before] + self.takes[row]
            fits = np.flatnonzero(np.all(used <= self.counts, axis=1))
            before, row, used = before[fits], row[fits], used[fits]
            samples = last.samples[before] + self.samples[row]
            chosen = firsts(self._codes(used), samples)
            self.levels.append(
                _Level(
                    used=used[chosen],
                    samples=samples[chosen],
                    before=before[chosen],
                    row=row[chosen],
                    reduced_cost=(last.reduced_cost[before] + self.reduced_cost[row])[chosen],
                )
            )
        return True

    def _codes(self, used: np.ndarray) -> np.ndarray:
        """Return places in the grid of all demands, the last kind varying fastest."""
        return np.ravel_multi_index(tuple(used.T), tuple(self.counts + 1))

    def best_within(self, number: int, left: np.ndarray) -> np.ndarray:
        """Return which set of so many pipelines processes most on some devices, -1 for none; by row."""
        if number not in self._best:
            level = self.levels[number]
            grid = np.full(int(np.prod(self.counts + 1)), -1, dtype=np.int64)
            # Sets ranked by samples: the greatest rank that fits is the best.
            rank = np.argsort(np.argsort(level.samples, kind="stable"), kind="stable")
            grid[self._codes(level.used)] = rank
            shaped = grid.reshape(tuple(self.counts + 1))
            for axis in range(shaped.ndim):
                np.maximum.accumulate(shaped, axis=axis, out=shaped)
            self._best[number] = grid
        found = self._best[number][self._codes(left)]
        order = np.append(np.argsort(self.levels[number].samples, kind="stable"), -1)
        return np.asarray(order[found])

    def rows(self, number: int, at: int) -> list[int]:
        """Return the pipelines of a set."""
        found = []
        for level in reversed(self.levels[1 : number + 1]):
            found.append(int(level.row[at]))
            at = int(level.before[at])
        return found


def combine(
    takes: np.ndarray,
    samples: np.ndarray,
    reduced_cost: np.ndarray,
    counts: Sequence[int],
    pipelines: tuple[int, int],
    *,
    keep: int = 4,
) -> IntegerMix:
    """Return the sets of pipelines that process most, among those that may process the batch.

    Parameters
    ----------
    takes : ndarray of int, shape (rows, kinds)
        Devices of each pipeline.
    samples, reduced_cost : ndarray, shape (rows,)
        What each processes, and its reduced cost: those of a set that processes the batch sum to no more
        than 0.
    counts : sequence of int
        Devices of each kind.
    pipelines : (fewest, most)
        In a set.
    keep : int
        Sets to return.
    """
    if not len(takes):
        return IntegerMix(proven=True)
    unit = np.maximum(np.gcd.reduce(takes, axis=0), 1)
    limits = np.array(counts) // unit
    if float(np.prod(limits + 1.0)) > _CELLS:
        return IntegerMix(proven=False)
    order = np.argsort(reduced_cost, kind="stable")
    sets = _Sets(
        takes=takes[order] // unit,
        samples=samples[order],
        reduced_cost=reduced_cost[order],
        counts=limits,
        most=pipelines[1],
    )
    found: list[tuple[float, tuple[int, ...]]] = []
    for number in range(pipelines[0], pipelines[1] + 1):
        half = (number + 1) // 2
        if not sets.extend(half):
            return IntegerMix(proven=False)
        level, rest = sets.levels[half], number - half
        if not len(level.used):
            break
        other = sets.best_within(rest, limits - level.used)
        total = np.where(other >= 0, level.samples + sets.levels[rest].samples[other], -1.0)
        for at in np.argsort(-total, kind="stable")[:keep]:
            if total[at] > 0.0:
                rows = sets.rows(half, int(at)) + sets.rows(rest, int(other[at]))
                found.append((float(total[at]), tuple(sorted(int(order[row]) for row in rows))))
    best = sorted(dict.fromkeys(found), key=lambda one: -one[0])[:keep]
    return IntegerMix(
        proven=True,
        samples=tuple(found_set[0] for found_set in best),
        sets=tuple(found_set[1] for found_set in best),
    )


def firsts(codes: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return where the first of the most samples stands for each code."""
    order = np.lexsort((-samples, codes))
    distinct = np.ones(len(order), dtype=bool)
    distinct[1:] = np.diff(codes[order]) > 0
    return order[distinct]
