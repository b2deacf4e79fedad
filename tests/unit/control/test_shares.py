"""Shares against a linear program of scipy and against all whole splits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from foreshard.control.search.shares import linear_shares, water_filling, whole_shares


def groups(rng, num=None):
    num = num or int(rng.integers(1, 6))
    return rng.uniform(0.0, 5.0, num), rng.uniform(0.1, 2.0, num)


def lp(start, rate, batch, weight, cost):
    """Return the optimum over all sets of groups that may take part."""
    best = np.inf
    num = len(start)
    for size in range(1, num + 1):
        for used in itertools.combinations(range(num), size):
            used = list(used)
            found = linprog(
                [weight, *cost[used]],
                A_ub=np.column_stack([-np.ones(size), np.diag(rate[used])]),
                b_ub=-start[used],
                A_eq=[[0.0, *np.ones(size)]],
                b_eq=[batch],
                bounds=[(0, None)] * (1 + size),
            )
            if found.status == 0:
                best = min(best, found.fun)
    return best


def test_water_filling_ends_all_groups_in_use_together():
    rng = np.random.default_rng(0)
    for _ in range(200):
        start, rate = groups(rng)
        split = water_filling(start, rate, 20.0)
        used = split.shares > 0
        assert split.shares.sum() == pytest.approx(20.0)
        assert (start + rate * split.shares)[used] == pytest.approx(split.time_s)
        assert (start[~used] >= split.time_s - 1e-12).all()
        assert linear_shares(start, rate, 20.0).time_s == pytest.approx(split.time_s, rel=1e-12)


def test_scan_of_breakpoints_is_the_linear_program():
    rng = np.random.default_rng(1)
    for _ in range(60):
        start, rate = groups(rng)
        cost = rng.uniform(0.0, 1.0, len(start)) * rng.integers(0, 2)
        weight = float(rng.choice([0.0, 0.3, 1.0]))
        split = linear_shares(start, rate, 20.0, time_weight=weight, sample_weight=cost)
        assert split.worth == pytest.approx(lp(start, rate, 20.0, weight, cost), rel=1e-9, abs=1e-9)
        assert split.shares.sum() == pytest.approx(20.0)


def splits(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


@pytest.mark.parametrize("batch", [12, 13, 14, 3])
@pytest.mark.parametrize("priced", [False, True])
def test_whole_shares_are_the_best_of_all(batch, priced):
    rng = np.random.default_rng(batch)
    for _ in range(40):
        start, rate = groups(rng, int(rng.integers(1, 4)))
        cost = rng.uniform(0.0, 1.0, len(start)) if priced else None
        weight = float(rng.choice([0.1, 1.0]))
        split = whole_shares(start, rate, batch, 3, time_weight=weight, sample_weight=cost)
        best = np.inf
        for pieces in splits(batch // 3, len(start)):
            for odd in range(len(start)):
                shares = 3.0 * np.array(pieces)
                shares[odd] += batch % 3
                used = shares > 0
                time_s = (start + rate * shares)[used].max()
                best = min(best, weight * time_s + (0.0 if cost is None else shares @ cost))
        assert split.worth == pytest.approx(best, rel=1e-12)
        assert split.shares.sum() == batch


def test_equal_groups_get_equal_shares():
    assert whole_shares(np.zeros(4), np.ones(4), 64, 4).shares.tolist() == [16, 16, 16, 16]


def test_whole_shares_end_at_most_one_micro_batch_later():
    rng = np.random.default_rng(2)
    for _ in range(100):
        start, rate = groups(rng)
        assert (
            whole_shares(start, rate, 64, 4).time_s <= water_filling(start, rate, 64).time_s + 4 * rate.max()
        )
