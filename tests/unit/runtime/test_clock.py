"""The virtual clock: an action takes the median of its kind over some seconds, times the slow factor."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from foreshard.runtime.engine import clock as clocks


@pytest.fixture
def host(monkeypatch):
    """A host whose wall and processor time the test moves."""

    class Host:
        wall_s = processor_s = 0.0

    now = Host()
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now.wall_s)
    monkeypatch.setattr(clocks.time, "thread_time", lambda: now.processor_s)
    return now


def took(clock, host, seconds, *, after_s=0.0, samples=4):
    """Return the virtual seconds of an action of so many of the processor's."""
    host.wall_s += after_s
    before = clock.now()
    clock.begin()
    host.processor_s += seconds
    clock.end("forward", samples, 2)
    return clock.now() - before


def test_an_action_takes_the_median_of_its_kind_over_the_last_seconds(host):
    clock = clocks.VirtualClock(lambda source, target: (1e9, 0.0))
    assert took(clock, host, 3.0) == pytest.approx(3.0)
    assert took(clock, host, 1.0, after_s=1.0) == pytest.approx(1.0), "of two the less"
    assert took(clock, host, 2.0, after_s=1.0) == pytest.approx(2.0)
    assert took(clock, host, 9.0, samples=5) == pytest.approx(9.0), "other samples are another kind"
    assert took(clock, host, 5.0, after_s=100.0) == pytest.approx(5.0), "what is long ago no longer counts"


def test_how_slow_a_rank_is_said_to_be_counts_at_once(host):
    clock = clocks.VirtualClock(lambda source, target: (1e9, 0.0))
    for _ in range(5):
        took(clock, host, 1.0)
    clock.slow = 4.0
    assert took(clock, host, 1.0) == pytest.approx(4.0)
