"""Filters follow changes, not outliers and not noise."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard.control.estimates import Estimates, Level


def test_noise_is_averaged_and_seldom_shown():
    rng = np.random.default_rng(0)
    level, shown = Level(1.0), set()
    for _ in range(1000):
        level.see(float(np.exp(0.1 * rng.standard_normal())))
        shown.add(level.shown)
    assert level.value == pytest.approx(1.0, rel=0.07) and level.changes <= 2 and len(shown) <= 6
    assert 0.005 < level.uncertainty < 0.06


def test_a_change_is_found_within_three_steps_and_an_outlier_is_not_one():
    rng = np.random.default_rng(1)
    level = Level(1.0)
    for _ in range(50):
        level.see(float(np.exp(0.05 * rng.standard_normal())))
    level.see(0.1)
    assert level.changes == 0 and level.value > 0.85
    for _ in range(30):
        level.see(1.0)
    found = [level.see(0.25) for _ in range(3)]
    assert any(found) and level.value == pytest.approx(0.25, rel=0.02)


def test_dwell_is_learnt():
    level = Level(1.0)
    for step in range(1000):
        level.see(1.0 if step // 100 % 2 else 0.3)
    assert 70 < level.dwell_steps < 140 and level.change_chance == pytest.approx(1 / level.dwell_steps)


def test_links_lose_their_stated_latency_and_strangers_are_left_out(cases):
    estimates = Estimates(cases.state([1.0, 1.0], latency_s=np.full((2, 2), 1.0)))
    for _ in range(40):
        estimates.see_links({(0, 1): (20.0, 5.0), (0, 9): (1.0, 1.0), (1, 0): (float("nan"), 1.0)})
    rate = estimates.state().bandwidth_bytes_per_s
    assert rate[0, 1] == pytest.approx(5.0, rel=0.05) and rate[1, 0] == 10.0
