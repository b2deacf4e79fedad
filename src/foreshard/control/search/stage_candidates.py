"""Stages to look at in a slot: all of few kinds, neighbours of some, built ones, what is left of some.

Stages are in order, each its workers; cuts and splits are found when they are looked at. Workers of one kind
are alike, so that each structure is named once, whichever of them are in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from foreshard.control.moves import spans_of
from foreshard.control.search.cache import Groups
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.stage_cache import StageLandscape
from foreshard.control.slots import Structure

_SMALL, _EXHAUSTIVE, _MANY = 6, 1000, 220
"""Structures up to which all are compared, of so few workers and of more."""


def all_stages(land: StageLandscape) -> list[Groups] | None:
    """Return one structure of every signature; None when there are too many."""
    if land.everything is None:
        pools: dict[int, list[int]] = {}
        for worker in land.alive:
            pools.setdefault(land.kind[worker], []).append(worker)
        most = _EXHAUSTIVE if len(land.alive) <= _SMALL else _MANY
        found = list(itertools.islice(_orders(land, list(pools.values()), ()), most + 1))
        land.everything = found if len(found) <= most else []
    return land.everything or None


def _orders(land: StageLandscape, pools: Sequence[Sequence[int]], before: Groups) -> Iterator[Groups]:
    """Return all further stages of what is left in the pools, and the same without them."""
    if before:
        yield before
    if len(before) == land.max_stages:
        return
    for counts in itertools.product(*(range(len(pool) + 1) for pool in pools)):
        if 0 < sum(counts) <= land.micro_batch:
            stage = tuple(w for pool, n in zip(pools, counts, strict=True) for w in pool[:n])
            left = [pool[n:] for pool, n in zip(pools, counts, strict=True)]
            yield from _orders(land, left, (*before, stage))


def built(land: StageLandscape, weights: Weights) -> Iterator[Groups]:
    """Return equal stages of the workers worth their price, fast ones together or spread, some of them."""
    state, chain = land.state, land.chain
    speed = {w: state.speed[w] / chain.before_s[w, -1] for w in land.alive}
    by_price = sorted(land.alive, key=lambda w: (weights.active[w] / speed[w], -speed[w], w))
    total = len(by_price)
    takes = sorted({-(-total * part // 8) for part in range(1, 9)})
    for count in range(1, min(land.max_stages, total) + 1):
        for take in takes:
            if take < count:
                continue
            near = sorted(by_price[:take])
            fast = sorted(near, key=lambda w: (-speed[w], w))
            for order in (near, fast):
                yield tuple(tuple(int(w) for w in part) for part in np.array_split(order, count))
            yield tuple(tuple(sorted(fast[at::count])) for at in range(count))


def repaired(land: StageLandscape, stages: Groups) -> Groups:
    """Return stages without workers that are gone, and without stages that have none left."""
    alive = set(land.alive)
    kept = [tuple(worker for worker in stage if worker in alive) for stage in stages]
    return tuple(stage for stage in kept if stage)


def renamed(land: StageLandscape, structure: Structure, running: Structure) -> Structure:
    """Return stages with, of workers that are alike, those that already hold most of what they will."""
    held = dict(spans_of(running))
    chosen = [list(group.workers) for group in structure.groups]
    for kind in {land.kind[worker] for worker in structure.workers}:
        places = [
            (k, at)
            for k, group in enumerate(structure.groups)
            for at, worker in enumerate(group.workers)
            if land.kind[worker] == kind
        ]
        pairs = []
        for place, worker in itertools.product(places, [w for w in land.alive if land.kind[w] == kind]):
            (low, high), (start, stop) = held.get(worker, (0, 0)), structure.groups[place[0]].cuts
            kept = max(0, min(high, stop) - max(low, start))
            stays = chosen[place[0]][place[1]] == worker
            pairs.append((-kept, worker not in held, not stays, place, worker))
        free, left = set(places), {w for w in land.alive if land.kind[w] == kind}
        for *_, place, worker in sorted(pairs):
            if place in free and worker in left:
                free.remove(place)
                left.remove(worker)
                chosen[place[0]][place[1]] = worker
    groups = zip(chosen, structure.groups, strict=True)
    return replace(structure, groups=tuple(replace(group, workers=tuple(w)) for w, group in groups))


def neighbours(land: StageLandscape, stages: Groups) -> Iterator[Groups]:
    """Return what one move makes: each kind of move once for workers that are alike."""
    used = {worker for stage in stages for worker in stage}
    idle = _one_each(land, [w for w in land.alive if w not in used])
    for at, stage in enumerate(stages):
        yield from ((*stages[:at], (*stage, worker), *stages[at + 1 :]) for worker in idle)
    for at, stage in enumerate(stages):
        for worker in _one_each(land, stage):
            less = tuple(w for w in stage if w != worker)
            gone = (*stages[:at], less, *stages[at + 1 :])
            yield _kept(gone)
            yield from (_kept((*stages[:at], (*less, other), *stages[at + 1 :])) for other in idle)
            yield from _elsewhere(land, gone, at, worker)
    for at in range(len(stages) - 1):
        yield (*stages[:at], stages[at + 1], stages[at], *stages[at + 2 :])
        yield (*stages[:at], stages[at] + stages[at + 1], *stages[at + 2 :])
    for at, stage in enumerate(stages):
        half = len(stage) // 2
        if half:
            ordered = sorted(stage, key=lambda w: (land.kind[w], w))
            yield (*stages[:at], tuple(ordered[:half]), tuple(ordered[half:]), *stages[at + 1 :])
    for at, worker in itertools.product(range(len(stages) + 1), idle):
        yield (*stages[:at], (worker,), *stages[at:])


def _elsewhere(land: StageLandscape, gone: Groups, at: int, worker: int) -> Iterator[Groups]:
    """Return what comes of giving a worker to another stage, changing it for one there, or a stage to it."""
    for to, stage in enumerate(gone):
        if to == at:
            continue
        grown = [*gone]
        grown[to] = (*stage, worker)
        yield _kept(grown)
        for other in _one_each(land, stage):
            if land.kind[other] != land.kind[worker]:
                changed = [*gone]
                changed[to] = (*(w for w in stage if w != other), worker)
                changed[at] = (*gone[at], other)
                yield tuple(changed)
    if gone[at]:
        yield from ((*gone[:to], (worker,), *gone[to:]) for to in range(len(gone) + 1))


def _kept(stages: Sequence[tuple[int, ...]]) -> Groups:
    return tuple(stage for stage in stages if stage)


def _one_each(land: StageLandscape, workers: Sequence[int]) -> list[int]:
    """Return the first worker of every kind."""
    first: dict[int, int] = {}
    for worker in workers:
        first.setdefault(land.kind[worker], worker)
    return list(first.values())
