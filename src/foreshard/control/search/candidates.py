"""Structures to look at in a slot: all of few device classes, neighbours of one, built ones, repaired ones.

A candidate is its cells, each a set of workers: pipelines side by side in any order, or the stages of one
pipeline in theirs. Order inside a pipeline, cuts and splits are found when a candidate is looked at. Workers
of one class are alike, so that each structure is named once, whichever of them are in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from foreshard.control.moves import spans_of
from foreshard.control.search.cache import Cells, Counts
from foreshard.control.slots import Structure

if TYPE_CHECKING:
    from foreshard.control.budgets.objective import Weights
    from foreshard.control.search.state_cache import StateCache

_BUILT_SIZES = 16
"""Numbers of workers that structures are built of, spread evenly: more take time from the moves."""


def every_structure(state: StateCache) -> Sequence[Cells]:
    """Return one structure of every signature; none when they are more than the state has time for."""
    if state.everything is None:
        pools = state.pools()
        counts = tuple(len(pool) for pool in pools.values())
        key = (state.shape, counts)
        if key not in state.cache.mixes:
            found = list(itertools.islice(_mixes(state, counts, state.exhaustive), state.exhaustive + 1))
            state.cache.mixes[key] = found if len(found) <= state.exhaustive else []
        state.everything = [_named(mix, list(pools.values())) for mix in state.cache.mixes[key]]
    return state.everything


def first_structures(state: StateCache, most: int) -> list[Cells]:
    """Return structures of different signatures, up to so many."""
    pools = state.pools()
    counts = tuple(len(pool) for pool in pools.values())
    return [_named(mix, list(pools.values())) for mix in itertools.islice(_mixes(state, counts, most), most)]


def _mixes(state: StateCache, counts: Counts, most: int) -> Iterator[tuple[Counts, ...]]:
    """Return all rows of cells, a cell as its number of workers of each class."""
    sizes = itertools.product(*(range(count + 1) for count in counts))
    few = itertools.islice(sizes, 4 * most)
    parts = [part for part in few if 0 < sum(part) <= state.widest]
    if len(parts) > most:
        # Every cell alone is a structure, so that there are too many in any case.
        yield from ((part,) for part in parts)
        return

    def grow(left: Counts, first: int, before: tuple[Counts, ...]) -> Iterator[tuple[Counts, ...]]:
        if len(before) == state.most_cells:
            return
        for at in range(first, len(parts)):
            rest = tuple(have - take for have, take in zip(left, parts[at], strict=True))
            if min(rest) >= 0:
                mix = (*before, parts[at])
                yield mix
                yield from grow(rest, 0 if state.is_ordered else at, mix)

    yield from grow(counts, 0, ())


def _named(mix: Sequence[Counts], pools: Sequence[Sequence[int]]) -> Cells:
    taken, cells = [0] * len(pools), []
    for part in mix:
        cell: list[int] = []
        for at, count in enumerate(part):
            cell += pools[at][taken[at] : taken[at] + count]
            taken[at] += count
        cells.append(tuple(cell))
    return tuple(cells)


def built(state: StateCache, weights: Weights) -> Iterator[Cells]:
    """Return equal cells of the workers worth their price: near each other, alike, or spread by speed."""
    now, whole_s = state.state, state.chain.before_s[:, -1]
    speed = {w: now.speed[w] / whole_s[w] for w in state.alive}
    by_price = sorted(state.alive, key=lambda w: (weights.active[w] / speed[w], -speed[w], w))
    total = len(by_price)
    parts = range(1, min(total, _BUILT_SIZES) + 1)
    takes = sorted({-(-total * part // len(parts)) for part in parts})
    for count, take in state.cell_counts(takes, total):
        some = by_price[:take]
        alike = sorted(some, key=lambda w: (state.device_class[w], w))
        orders = [sorted(some), sorted(some, key=lambda w: (-speed[w], w))] if state.is_ordered else [alike]
        for order in orders:
            yield tuple(tuple(int(w) for w in part) for part in np.array_split(order, count))
        if state.is_ordered:
            yield tuple(tuple(sorted(orders[-1][at::count])) for at in range(count))


def repaired(state: StateCache, cells: Cells) -> Cells:
    """Return cells without workers that are gone; what then holds no model is taken apart."""
    alive = set(state.alive)
    kept: list[tuple[int, ...]] = []
    loose: list[int] = []
    for cell in cells:
        rest = tuple(worker for worker in cell if worker in alive)
        if rest and state.holds(rest):
            kept.append(rest)
        else:
            loose += rest
    if loose and state.holds(loose):
        kept.append(tuple(loose))
    return tuple(kept)


def renamed(state: StateCache, structure: Structure, running: Structure) -> Structure:
    """Return a structure with, of workers that are alike, those that already hold most of what they will."""
    held, spans = dict(spans_of(running)), list(spans_of(structure))
    chosen = [worker for worker, _ in spans]
    for device_class in {state.device_class[worker] for worker in chosen}:
        alike = [worker for worker in state.alive if state.device_class[worker] == device_class]
        places = [at for at, (worker, _) in enumerate(spans) if state.device_class[worker] == device_class]
        pairs = []
        for at, worker in itertools.product(places, alike):
            (low, high), (start, stop) = held.get(worker, (0, 0)), spans[at][1]
            kept = max(0, min(high, stop) - max(low, start))
            pairs.append((-kept, worker not in held, spans[at][0] != worker, at, worker))
        free, left = set(places), set(alike)
        for *_, at, worker in sorted(pairs):
            if at in free and worker in left:
                free.remove(at)
                left.remove(worker)
                chosen[at] = worker
    names = iter(chosen)
    groups = (replace(g, workers=tuple(itertools.islice(names, len(g.workers)))) for g in structure.groups)
    return replace(structure, groups=tuple(groups))


def neighbours(state: StateCache, cells: Cells) -> Iterator[Cells]:
    """Return what one move makes: each kind of move once for workers and cells that are alike."""
    used = {worker for cell in cells for worker in cell}
    idle = _one_each(state, [w for w in state.alive if w not in used])
    for at, cell in _cells_of(state, cells):
        before, after = cells[:at], cells[at + 1 :]
        yield before + after
        yield from ((*before, (*cell, other), *after) for other in idle)
        yield from _halves(state, before, cell, after)
        yield from _mergers(state, cells, at)
        for worker in _one_each(state, cell):
            less = tuple(w for w in cell if w != worker)
            gone = (*before, less, *after)
            yield _kept(gone)
            yield from ((*before, (*less, other), *after) for other in idle)
            yield from _elsewhere(state, gone, at, worker)
    for other in idle:
        free = [
            w for w in state.alive if w not in used and state.device_class[w] == state.device_class[other]
        ]
        for length in (1,) if state.is_ordered else range(1, min(len(free), state.widest) + 1):
            yield from _inserted(state, cells, tuple(free[:length]))


def _cells_of(state: StateCache, cells: Cells, but: int = -1) -> list[tuple[int, tuple[int, ...]]]:
    """Return the cells with their places; of those that are alike and in no order the first."""
    if state.is_ordered:
        return [(at, cell) for at, cell in enumerate(cells) if at != but]
    first: dict[tuple[int, ...], int] = {}
    for at, cell in enumerate(cells):
        if at != but:
            first.setdefault(tuple(sorted(state.device_class[w] for w in cell)), at)
    return [(at, cells[at]) for at in first.values()]


def _halves(state: StateCache, before: Cells, cell: tuple[int, ...], after: Cells) -> Iterator[Cells]:
    half = len(cell) // 2
    if half:
        ordered = sorted(cell, key=lambda w: (state.device_class[w], w))
        yield (*before, tuple(ordered[:half]), tuple(ordered[half:]), *after)
        if not state.is_ordered:
            yield (*before, tuple(ordered[::2]), tuple(ordered[1::2]), *after)


def _mergers(state: StateCache, cells: Cells, at: int) -> Iterator[Cells]:
    """Return a cell with another in one, and where they are in order, in the place of its neighbour."""
    if state.is_ordered:
        if at + 1 < len(cells):
            yield (*cells[:at], cells[at + 1], cells[at], *cells[at + 2 :])
            yield (*cells[:at], cells[at] + cells[at + 1], *cells[at + 2 :])
        return
    for other, cell in _cells_of(state, cells, but=at):
        if len(cells[at]) + len(cell) <= state.widest:
            yield (*(c for k, c in enumerate(cells) if k not in (at, other)), cells[at] + cell)


def _elsewhere(state: StateCache, gone: Cells, at: int, worker: int) -> Iterator[Cells]:
    """Return what comes of giving a worker to another cell, changing it for one there, or a cell to it."""
    for to, cell in _cells_of(state, gone, but=at):
        if not cell:
            continue
        grown = [*gone]
        grown[to] = (*cell, worker)
        if len(grown[to]) <= state.widest:
            yield _kept(grown)
        for other in _one_each(state, cell):
            if state.device_class[other] != state.device_class[worker]:
                changed = [*gone]
                changed[to] = (*(w for w in cell if w != other), worker)
                changed[at] = (*gone[at], other)
                yield tuple(changed)
    if gone[at]:
        yield from _inserted(state, gone, (worker,))


def _inserted(state: StateCache, cells: Cells, cell: tuple[int, ...]) -> Iterator[Cells]:
    """Return cells with one more, in every place where they are in order."""
    for at in range(len(cells) + 1) if state.is_ordered else (len(cells),):
        yield (*cells[:at], cell, *cells[at:])


def _kept(cells: Sequence[tuple[int, ...]]) -> Cells:
    return tuple(cell for cell in cells if cell)


def _one_each(state: StateCache, workers: Iterable[int]) -> list[int]:
    """Return the first worker of every class."""
    first: dict[int, int] = {}
    for worker in workers:
        first.setdefault(state.device_class[worker], worker)
    return list(first.values())
