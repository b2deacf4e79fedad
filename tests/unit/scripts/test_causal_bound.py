"""The mean of a slot's first batch over the law, against a linear program over all outcomes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from bench_causal import first_batch_s, subsets_of

SPEEDS = np.array([1.0, 0.6, 0.3, 0.056])


def least_mean_s(now_s, next_s, chance):
    """Return the least mean of the last device over all shares, and the mean at balanced shares."""
    devices = len(now_s)
    outcomes = list(itertools.product(range(next_s.shape[1]), repeat=devices))
    chances = [np.prod([chance[at, level] for at, level in enumerate(levels)]) for levels in outcomes]
    rows = []
    for number, levels in enumerate(outcomes):
        for at, level in enumerate(levels):
            row = np.zeros(devices + len(outcomes))
            row[at], row[devices + number] = next_s[at, level], -1.0
            rows.append(row)
    whole = np.append(np.ones(devices), np.zeros(len(outcomes)))[None, :]
    cost = np.append(np.zeros(devices), chances)
    found = linprog(cost, A_ub=np.array(rows), b_ub=np.zeros(len(rows)), A_eq=whole, b_eq=[1.0])
    shares = 1.0 / now_s / (1.0 / now_s).sum()
    last = [max(shares[at] * next_s[at, level] for at, level in enumerate(levels)) for levels in outcomes]
    return found.fun, float(np.dot(chances, last))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stay", [0.9, 0.4])
def test_no_shares_are_below_the_bound_of_the_first_batch(seed, stay):
    rng = np.random.default_rng(seed)
    whole_s = rng.uniform(1.0, 1.0 + seed % 2, 3)
    levels = rng.integers(len(SPEEDS), size=3)
    next_s, chance = whole_s[:, None] / SPEEDS, np.full((3, len(SPEEDS)), (1.0 - stay) / 3.0)
    chance[np.arange(3), levels] = stay
    now_s, used = next_s[np.arange(3), levels], subsets_of(3)
    bound, balanced = first_batch_s(used, now_s, next_s, chance)
    for row, least, mean in zip(used, bound, balanced, strict=True):
        exact, exact_balanced = least_mean_s(now_s[row], next_s[row], chance[row])
        assert mean == pytest.approx(exact_balanced, rel=1e-9)
        assert least <= exact * (1.0 + 1e-9)
        if stay == 0.9:
            assert least == pytest.approx(exact, rel=1e-6), "balanced shares are the best"
