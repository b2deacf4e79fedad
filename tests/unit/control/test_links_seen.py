"""Rates of links that were not measured, from those that were."""

import numpy as np
import pytest

from foreshard.control.estimation.estimates import Links
from foreshard.control.slots import State

FAST, SLOW = 1e8, 5e6
RING = ((0, 1), (1, 2), (2, 3), (3, 0))


def links():
    nobody, apart = np.zeros(4), np.zeros((4, 4))
    return Links(
        State(
            speed=np.ones(4),
            available=np.ones(4, bool),
            bandwidth_bytes_per_s=np.full((4, 4), FAST),
            latency_s=apart,
            usd_per_h=nobody,
            busy_w=nobody,
            idle_w=nobody,
            usd_per_byte=apart,
            kg_per_j=nobody,
        )
    )


def see(seen, rates, times=20):
    """Measure links so often at these rates."""
    for _ in range(times):
        seen.see({pair: (1e6, 1e6 / rate) for pair, rate in rates.items()}, 1)


def test_a_link_that_was_fast_long_ago_fades_with_all_others():
    seen = links()
    see(seen, dict.fromkeys((*RING, (1, 3)), FAST))
    see(seen, dict.fromkeys(RING, SLOW))
    assert seen.rates()[1, 3] == pytest.approx(SLOW, rel=0.1)
    see(seen, dict.fromkeys(RING, FAST))
    assert seen.rates()[1, 3] == pytest.approx(FAST, rel=0.1)


def test_all_links_of_a_rank_are_slow_when_those_measured_are():
    seen = links()
    see(seen, dict.fromkeys((*RING, (1, 3)), FAST))
    see(seen, {pair: SLOW if 1 in pair else FAST for pair in RING})
    rate = seen.rates()
    for other in (0, 2, 3):
        assert rate[1, other] == pytest.approx(SLOW, rel=0.1) == rate[other, 1]
    assert rate[0, 2] == pytest.approx(FAST, rel=0.1) and rate[2, 3] == pytest.approx(FAST, rel=0.1)


def test_one_slow_link_says_nothing_of_its_ends():
    seen = links()
    see(seen, {pair: SLOW if pair == (0, 1) else FAST for pair in RING})
    rate = seen.rates()
    assert rate[0, 1] == pytest.approx(SLOW, rel=0.1)
    assert rate[0, 2] == pytest.approx(FAST, rel=0.1) and rate[1, 3] == pytest.approx(FAST, rel=0.1)


def test_a_link_last_seen_as_it_began_to_fade_is_not_trusted():
    seen = links()
    see(seen, dict.fromkeys((*RING, (1, 3)), FAST))
    see(seen, dict.fromkeys((*RING, (1, 3)), SLOW), times=1)
    see(seen, dict.fromkeys(RING, SLOW))
    assert seen.rates()[1, 3] == pytest.approx(SLOW, rel=0.1)
