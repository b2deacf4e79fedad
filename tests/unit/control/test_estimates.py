"""Filters follow changes, not outliers and not noise."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard.control.estimation.estimates import Estimates, FilteredLevel


def test_noise_is_averaged_and_seldom_shown():
    rng = np.random.default_rng(0)
    level, shown = FilteredLevel(1.0), set()
    for _ in range(1000):
        level.see(float(np.exp(0.1 * rng.standard_normal())))
        shown.add(level.shown)
    assert level.value == pytest.approx(1.0, rel=0.07) and level.changes <= 2 and len(shown) <= 6
    assert 0.005 < level.uncertainty < 0.06


def test_a_change_is_found_within_three_steps_and_an_outlier_is_not_one():
    rng = np.random.default_rng(1)
    level = FilteredLevel(1.0)
    for _ in range(50):
        level.see(float(np.exp(0.05 * rng.standard_normal())))
    level.see(0.1)
    assert level.changes == 0 and level.value > 0.85
    for _ in range(30):
        level.see(1.0)
    found = [level.see(0.25) for _ in range(3)]
    assert any(found) and level.value == pytest.approx(0.25, rel=0.02)


def test_links_lose_their_stated_latency_and_strangers_are_left_out(cases):
    estimates = Estimates(cases.state([1.0, 1.0], latency_s=np.full((2, 2), 1.0)))
    for _ in range(40):
        estimates.links.see({(0, 1): (20.0, 5.0), (0, 9): (1.0, 1.0), (1, 0): (float("nan"), 1.0)}, 1)
    rate = estimates.state().bandwidth_bytes_per_s
    assert rate[0, 1] == pytest.approx(5.0, rel=0.05) and rate[1, 0] == rate[0, 1], "links that are alike"


def test_a_link_that_is_far_from_those_like_it_goes_by_its_own_rate(cases):
    estimates = Estimates(cases.state([1.0] * 4))
    everyone = {(a, b): (10.0, 1.0) for a in range(3) for b in range(3) if a != b}
    for _ in range(20):
        estimates.links.see({**everyone, (0, 1): (10.0, 4.0)}, 1)
    rate = estimates.state().bandwidth_bytes_per_s
    assert rate[0, 1] == pytest.approx(2.5, rel=0.05)
    assert rate[2, 3] == rate[1, 2] == pytest.approx(10.0, rel=0.05), "the one never measured is as most are"
    estimates.links.set(0, 1, 20.0)
    assert estimates.state().bandwidth_bytes_per_s[0, 1] == pytest.approx(20.0, rel=0.03)


@pytest.mark.parametrize("known", [False, True], ids=["new", "measured long ago"])
def test_a_link_that_confirms_what_was_expected_of_it_is_believed_at_once(cases, known):
    estimates = Estimates(cases.state([1.0] * 4, bandwidth_bytes_per_s=np.full((4, 4), 100.0)))
    ring = {(0, 1): (10.0, 0.1), (1, 2): (10.0, 0.1), (2, 3): (10.0, 0.1), (3, 0): (10.0, 0.1)}
    for _ in range(20):
        estimates.links.see(ring | ({(2, 0): (10.0, 0.1)} if known else {}), 1)
    for _ in range(20):
        estimates.links.see({pair: (10.0, 2.0) for pair in ring}, 1)
    assert estimates.state().bandwidth_bytes_per_s[2, 0] == pytest.approx(5.0, rel=0.05)
    estimates.links.see({(2, 0): (10.0, 2.0)}, 1)
    assert estimates.state().bandwidth_bytes_per_s[2, 0] == pytest.approx(5.0, rel=0.05)


def test_slow_links_that_meet_at_one_rank_are_that_ranks(cases):
    estimates = Estimates(cases.state([1.0] * 4, bandwidth_bytes_per_s=np.full((4, 4), 100.0)))
    for _ in range(4):
        estimates.links.see({(0, 1): (10.0, 2.0), (1, 3): (10.0, 2.0), (3, 0): (10.0, 0.1)}, 1)
    rate = estimates.state().bandwidth_bytes_per_s
    assert rate[0, 2] == rate[2, 3] == rate[0, 3] == pytest.approx(100.0, rel=0.05)
    assert (rate[1, [0, 2, 3]] < 6.0).all() and (rate[[0, 2, 3], 1] < 6.0).all()


def test_a_rank_that_comes_back_with_slow_links_is_news(cases):
    estimates = Estimates(cases.state([1.0] * 4, bandwidth_bytes_per_s=np.full((4, 4), 100.0)))
    ring = dict.fromkeys(((0, 1), (1, 2), (2, 3), (3, 0)), (10.0, 0.1))
    without = dict.fromkeys(((1, 2), (2, 3), (3, 1)), (10.0, 0.1))
    slow = ring | dict.fromkeys(((0, 1), (3, 0)), (10.0, 2.0))
    assert not any(estimates.links.see(ring, 1) for _ in range(10))
    assert any(estimates.links.see(slow, 1) for _ in range(4))
    for _ in range(20):
        estimates.links.see(without, 1)
    assert estimates.state().bandwidth_bytes_per_s[0, 1] > 10.0, "forgotten: as the others"
    assert estimates.links.see(slow, 1)
    assert estimates.state().bandwidth_bytes_per_s[0, 1] == pytest.approx(5.0, rel=0.05)
    assert not estimates.links.see(slow, 1)


def test_means_of_several_steps_count_as_several():
    level = FilteredLevel(1.0)
    for _ in range(30):
        level.see(1.0)
    assert not level.see(0.25) and level.see(0.25)
    at_once = FilteredLevel(1.0)
    for _ in range(30):
        at_once.see(1.0)
    assert at_once.see(0.25, times=9) and at_once.value == pytest.approx(0.25, rel=1e-6)
    assert at_once.steps == 39


def test_the_state_is_one_object_while_nothing_changes(cases):
    estimates = Estimates(cases.state([1.0, 0.5]))
    first = estimates.state()
    estimates.see_speed(0, 1.01)
    assert estimates.state() is first and estimates.finest() is not first
    estimates.usd_per_h[1] = 99.0
    assert estimates.state() is not first and first.usd_per_h[1] != 99.0
