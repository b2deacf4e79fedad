"""A slow rank is told once, with since when; noise, busy machines and other plans are none."""

import random

import pytest

from foreshard.runtime.adaptive.straggler_detector import WINDOW_STEPS, StragglerDetector, slow_in

SAMPLES = {0: 4.0, 1: 2.0, 2: 1.0, 3: 0.0}
WELL_S = {0: 0.4, 1: 0.6, 2: 0.5, 3: 0.0}


def work(noise=lambda: 1.0, **times):
    """Seconds of each rank; rank 3 has no samples."""
    return {rank: s * times.get(f"r{rank}", 1.0) * noise() for rank, s in WELL_S.items()}


def told(pace, steps, under="plan", **more):
    found = []
    for step in steps:
        found += pace.stepped(step, under, work(**more), SAMPLES)
    return found


@pytest.fixture
def pace():
    made = StragglerDetector()
    assert told(made, range(30)) == []
    return made


def test_a_rank_that_becomes_slow_is_told_once_and_again_when_it_has_recovered(pace):
    (slow,) = told(pace, range(30, 100), r1=2.0)
    assert (slow.rank, slow.slow, slow.since_step) == (1, True, 30)
    assert slow.factor == pytest.approx(2.0)
    assert slow.text == "rank 1 takes 2.00 times as long a sample since step 30"
    (well,) = told(pace, range(100, 200))
    assert (well.rank, well.slow, well.since_step) == (1, False, 100)


def test_it_is_told_soon(pace):
    assert told(pace, range(30, 30 + WINDOW_STEPS // 2), r2=3.0) == []
    assert told(pace, range(30 + WINDOW_STEPS // 2, 30 + WINDOW_STEPS), r2=3.0)[0].rank == 2


def test_hiccups_are_no_slow_rank(pace):
    for begin in range(30, 300, 10):
        assert told(pace, range(begin, begin + 3), r0=20.0) == []
        assert told(pace, range(begin + 3, begin + 10)) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_slow_rank(seed):
    """Each step of each rank takes up to twice as long, now and then ten times."""
    drawn = random.Random(seed)
    noise = lambda: drawn.uniform(1.0, 2.0) * (10.0 if drawn.random() < 0.05 else 1.0)  # noqa: E731
    assert told(StragglerDetector(), range(400), noise=noise) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_found_in_noise(seed):
    drawn = random.Random(seed)
    noise = lambda: drawn.uniform(1.0, 1.6)  # noqa: E731
    pace = StragglerDetector()
    assert told(pace, range(50), noise=noise) == []
    found = told(pace, range(50, 150), noise=noise, r2=2.5)
    assert [(change.rank, change.slow) for change in found] == [(2, True)]
    assert 50 <= found[0].since_step < 60 + 6


def test_one_at_the_bound_is_told_once(pace):
    found = []
    for step in range(30, 300):
        found += pace.stepped(step, "plan", work(r0=1.55 if step // 10 % 2 else 1.4), SAMPLES)
    assert len(found) == 1


def test_a_busy_machine_slows_all(pace):
    assert told(pace, range(30, 100), r0=3.0, r1=3.0, r2=3.0) == []


def test_another_plan_is_learned_anew_and_a_slow_rank_stays_slow(pace):
    assert len(told(pace, range(30, 60), r1=2.0)) == 1
    assert told(pace, range(60, 120), under="other", r0=0.5, r1=8.0, r2=2.0) == []
    (well,) = told(pace, range(120, 160), under="other", r0=0.5, r1=4.0, r2=2.0)
    assert (well.rank, well.slow) == (1, False)


def test_who_begins_to_conduct_goes_on_from_the_log():
    events = [
        {"kind": "rank_slow", "who": 1, "pid": 11, "factor": 2.0},
        {"kind": "rank_slow", "who": 2, "pid": 12, "factor": 3.0},
        {"kind": "peer gone"},
        {"kind": "rank_recovered", "who": 2, "pid": 12},
        {"kind": "rank_slow", "who": 0, "pid": 10, "factor": 4.0},
    ]
    assert slow_in(events, {0: 99, 1: 11, 2: 12}) == {1: 2.0}
    pace = StragglerDetector({1: 2.0})
    assert told(pace, range(30), r1=2.0) == []
    (well,) = told(pace, range(30, 60))
    assert (well.rank, well.slow) == (1, False)


def test_of_two_ranks_one_may_become_slow_and_recover():
    pace, samples = StragglerDetector(), {0: 1.0, 1: 1.0}
    found = []
    for step in range(120):
        found += pace.stepped(step, "plan", {0: 1.0, 1: 3.0 if 40 <= step < 80 else 1.0}, samples)
    assert [(change.rank, change.slow, change.since_step) for change in found] == [
        (1, True, 40),
        (1, False, 80),
    ]
