"""Structures to look at in a slot: all of few kinds, neighbours of one, built ones, what is left of one.

A group is its workers; order and cuts are found when it is looked at. Workers of one kind are alike, so that
each structure is named once, whichever of them are in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from foreshard.control.search.cache import Groups
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.state_cache import StateCache

_EXHAUSTIVE = 220
"""Structures up to which all are compared."""


def all_structures(landscape: StateCache) -> list[Groups] | None:
    """Return one structure of every signature that can run; None when there are too many."""
    if landscape.everything is None:
        counts: dict[int, int] = {}
        for worker in landscape.alive:
            counts[landscape.kind[worker]] = counts.get(landscape.kind[worker], 0) + 1
        kinds = sorted(counts)
        if math.prod(count + 1 for count in counts.values()) - 1 > _EXHAUSTIVE:
            # Pipelines of one worker alone are too many.
            landscape.everything = []
            return None
        pools = {kind: [w for w in landscape.alive if landscape.kind[w] == kind] for kind in kinds}
        key = (landscape.max_stages, tuple(counts[k] for k in kinds))
        if key not in landscape.memo.mixes:
            mixes = _mixes(landscape, kinds, key[1])
            landscape.memo.mixes[key] = list(itertools.islice(mixes, _EXHAUSTIVE + 1))
        found = landscape.memo.mixes[key]
        complete = len(found) <= _EXHAUSTIVE
        landscape.everything = [_named(mix, kinds, pools) for mix in found] if complete else []
    return landscape.everything or None


def _mixes(
    landscape: StateCache, kinds: Sequence[int], counts: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Return all sets of groups, a group as its number of workers of each kind, largest first."""
    pools = [[w for w in landscape.alive if landscape.kind[w] == kind] for kind in kinds]
    sizes = itertools.islice(itertools.product(*(range(count + 1) for count in counts)), 4 * _EXHAUSTIVE)
    parts = []
    for part in sizes:
        members = [w for pool, count in zip(pools, part, strict=True) for w in pool[:count]]
        if 0 < len(members) <= landscape.max_stages:
            parts.append((part, members))
    if len(parts) > _EXHAUSTIVE:
        # Every part alone is a structure, so that there are too many in any case.
        yield from ((part,) for part, _ in parts)
        return
    fitting = [part for part, _ in parts]

    def grow(left: tuple[int, ...], first: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        for at in range(first, len(fitting)):
            rest = tuple(have - take for have, take in zip(left, fitting[at], strict=True))
            if min(rest) >= 0:
                yield (fitting[at],)
                yield from ((fitting[at], *more) for more in grow(rest, at))

    yield from grow(counts, 0)


def _named(
    mix: Sequence[tuple[int, ...]], kinds: Sequence[int], pools: Mapping[int, Sequence[int]]
) -> Groups:
    taken = dict.fromkeys(kinds, 0)
    groups = []
    for part in mix:
        group: list[int] = []
        for kind, count in zip(kinds, part, strict=True):
            group += pools[kind][taken[kind] : taken[kind] + count]
            taken[kind] += count
        groups.append(tuple(group))
    return tuple(groups)


def built(landscape: StateCache, weights: Weights) -> Iterator[Groups]:
    """Return structures of equal pipelines: of every length, of the workers worth their price."""
    state, chain = landscape.state, landscape.chain
    speed = {w: state.speed[w] / chain.before_s[w, -1] for w in landscape.alive}
    by_price = sorted(landscape.alive, key=lambda w: (weights.active[w] / speed[w], -speed[w], w))
    total = len(by_price)
    takes = range(1, total + 1) if total <= 16 else sorted({-(-total * part // 16) for part in range(1, 17)})
    for length in range(1, min(landscape.max_stages, total) + 1):
        for take in takes:
            taken = sorted(by_price[:take], key=lambda w: (landscape.kind[w], w))
            whole = take // length
            if whole and (take % length == 0 or take == total):
                yield tuple(tuple(taken[at * length : (at + 1) * length]) for at in range(whole))


def repaired(landscape: StateCache, groups: Groups) -> Groups:
    """Return groups without workers that are gone; what then holds no model is taken apart."""
    alive = set(landscape.alive)
    kept: list[tuple[int, ...]] = []
    loose: list[int] = []
    for group in groups:
        rest = tuple(worker for worker in group if worker in alive)
        if rest and landscape.fits(rest):
            kept.append(rest)
        else:
            loose += rest
    if loose and landscape.fits(loose):
        kept.append(tuple(loose))
    return tuple(kept)


def neighbours(landscape: StateCache, groups: Groups) -> Iterator[Groups]:
    """Return what one move makes: each kind of move once for workers and groups that are alike."""
    kind = landscape.kind
    used = {worker for group in groups for worker in group}
    idle = _one_each([w for w in landscape.alive if w not in used], kind)
    sorts = {tuple(sorted(kind[w] for w in group)): at for at, group in reversed(list(enumerate(groups)))}
    each = sorted(sorts.values())
    for at in each:
        rest = groups[:at] + groups[at + 1 :]
        yield rest
        yield from _parts(landscape, groups[at], rest)
        for worker in _one_each(groups[at], kind):
            less = tuple(w for w in groups[at] if w != worker)
            gone = ((less,) if less else ()) + rest
            yield gone
            yield (*gone, (worker,))
            for other in idle:
                yield ((*less, other), *rest)
            yield from _shifts(landscape, worker, less, rest)
        for other in idle:
            yield ((*groups[at], other), *rest)
    for other in idle:
        free = [w for w in landscape.alive if w not in used and kind[w] == kind[other]]
        for length in range(1, min(len(free), landscape.max_stages) + 1):
            yield (*groups, tuple(free[:length]))


def _parts(landscape: StateCache, group: tuple[int, ...], rest: Groups) -> Iterator[Groups]:
    """Return splits of a group in two, and mergers with others."""
    half = len(group) // 2
    if half:
        ordered = sorted(group, key=lambda w: (landscape.kind[w], w))
        yield (tuple(ordered[:half]), tuple(ordered[half:]), *rest)
        yield (tuple(ordered[::2]), tuple(ordered[1::2]), *rest)
    for at in _one_group_each(rest, landscape.kind):
        if len(group) + len(rest[at]) <= landscape.max_stages:
            yield (group + rest[at], *rest[:at], *rest[at + 1 :])


def _shifts(landscape: StateCache, worker: int, less: tuple[int, ...], rest: Groups) -> Iterator[Groups]:
    """Return what comes of giving a worker to another group, or changing it for one of theirs."""
    kind = landscape.kind
    for at in _one_group_each(rest, kind):
        target, others = rest[at], rest[:at] + rest[at + 1 :]
        if len(target) < landscape.max_stages:
            yield (*((less,) if less else ()), (*target, worker), *others)
        for other in _one_each(target, kind):
            if kind[other] != kind[worker]:
                changed = tuple(w for w in target if w != other)
                yield ((*less, other), (*changed, worker), *others)


def _one_each(workers: Iterable[int], kind: Sequence[int]) -> list[int]:
    """Return the first worker of every kind."""
    first: dict[int, int] = {}
    for worker in workers:
        first.setdefault(kind[worker], worker)
    return list(first.values())


def _one_group_each(groups: Groups, kind: Sequence[int]) -> list[int]:
    first: dict[tuple[int, ...], int] = {}
    for at, group in enumerate(groups):
        first.setdefault(tuple(sorted(kind[worker] for worker in group)), at)
    return list(first.values())
