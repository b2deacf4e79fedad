"""Cuts and orders against all cuts and all orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foreshard.control.search.cuts import DeviceClasses, front


def random_kinds(rng, num_kinds, layers, *, tight=False, extra=False):
    work = rng.uniform(0.5, 2.0, layers)
    before = np.concatenate([[0.0], np.cumsum(work)])
    span = before[None, :] - before[:, None]
    speed = rng.uniform(0.5, 4.0, num_kinds)
    seconds = np.where(span > 0, span[None] / speed[:, None, None], np.inf)
    bytes_at = np.concatenate([[0.0], rng.uniform(0.0, 1.0, layers - 1), [0.0]])
    hop = bytes_at[None, None, :] / rng.uniform(0.5, 4.0, (num_kinds, num_kinds))[:, :, None]
    more = hop * rng.uniform(0, 2) if extra else None
    memory = rng.uniform(0.4, 1.2, num_kinds) * before[-1] if tight else np.full(num_kinds, 1e9)

    def room(kind, depth):
        return span * (1 + 0.2 * depth) <= memory[kind]

    return DeviceClasses(seconds=seconds, hop_s=hop, room=room, hop_extra=more)


def stages(kinds, order, cuts):
    times, more = [], 0.0
    for k, kind in enumerate(order):
        fits = kinds.room(kind, len(order) - k)[cuts[k], cuts[k + 1]]
        time = kinds.seconds[kind, cuts[k], cuts[k + 1]] if fits else np.inf
        if k:
            time += kinds.hop_s[order[k - 1], kind, cuts[k]]
            if kinds.hop_extra is not None:
                more += kinds.hop_extra[order[k - 1], kind, cuts[k]]
        times.append(time)
    return times, more


def everything(kinds, counts, layers):
    workers = [kind for kind, count in enumerate(counts) for _ in range(count)]
    for order in set(itertools.permutations(workers)):
        for inner in itertools.combinations(range(1, layers), len(workers) - 1):
            times, more = stages(kinds, order, (0, *inner, layers))
            if np.isfinite(sum(times)):
                yield sum(times), max(times), more


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 1), (2, 1), (1, 1, 1), (2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("tight", [False, True])
def test_front_is_the_best_for_every_number_of_micro_batches(counts, tight):
    rng = np.random.default_rng(len(counts) * 10 + sum(counts))
    for _ in range(6):
        kinds = random_kinds(rng, len(counts), 6, tight=tight)
        options = list(everything(kinds, counts, 6))
        points = front(kinds, counts)
        assert bool(points) == bool(options)
        for n in (1, 2, 5, 16, 1000):
            if options:
                best = min(total + (n - 1) * slowest for total, slowest, _ in options)
                assert min(point.batch_s(n) for point in points) == pytest.approx(best, rel=1e-12)


def test_a_point_is_what_it_says():
    rng = np.random.default_rng(3)
    kinds = random_kinds(rng, 2, 7, tight=True)
    for point in front(kinds, (2, 1)):
        times, _ = stages(kinds, point.order, point.cuts)
        assert (point.fill_s, point.slowest_s) == (pytest.approx(sum(times)), pytest.approx(max(times)))


def test_what_messages_cost_otherwise_is_weighed_in():
    rng = np.random.default_rng(4)
    for _ in range(10):
        kinds = random_kinds(rng, 2, 6, extra=True)
        best = min(total + more for total, _, more in everything(kinds, (2, 1), 6))
        found = []
        for point in front(kinds, (2, 1)):
            times, more = stages(kinds, point.order, point.cuts)
            found.append(sum(times) + more)
        assert min(found) == pytest.approx(best, rel=1e-12)


def test_many_kinds_fall_back_on_orders_by_speed():
    rng = np.random.default_rng(5)
    kinds = random_kinds(rng, 9, 12)
    points = front(kinds, (1,) * 9)
    assert points and all(sorted(point.order) == list(range(9)) for point in points)
    assert front(kinds, (1,) * 9, grain=0.05)[-1].slowest_s <= 1.06 * points[-1].slowest_s


def test_more_stages_than_layers_do_not_fit():
    assert front(random_kinds(np.random.default_rng(0), 1, 3), (4,)) == ()
