"""Which numbers are taken for measurements: what is no number, or beyond all reason, is not believed.

The limits are far outside of what any cluster does. They are there so that no sum of what is believed, over
any number of steps, runs out of floating point numbers.
"""

from __future__ import annotations

LEAST_S, MOST_S = 1e-12, 1e12
"""Seconds of a step or of a sample."""
MOST_COST = 1e15
"""What a step costs, in any unit."""
MOST_USD_PER_H = 1e12
"""Price of a device."""
MOST_KG_PER_KWH = 1e6
"""Carbon of electricity."""
MOST_SPEED, LEAST_SPEED = 2.0, 1e-6
"""A device so much faster or slower than stated is not believed."""
MOST_FACTOR = 1e6
"""Nor is a link that is so many times faster or slower than stated."""


def is_time(seconds: float) -> bool:
    """Return whether a step or a sample can take so long.

    Examples
    --------
    >>> is_time(0.1), is_time(0.0), is_time(float("nan"))
    (True, False, False)
    """
    return LEAST_S <= seconds <= MOST_S


def is_cost(cost: float, most: float = MOST_COST) -> bool:
    """Return whether a cost or a price can be so high."""
    return 0.0 <= cost <= most


def is_speed(relative: float, stated: float) -> bool:
    """Return whether a device of that stated speed can have that one."""
    return LEAST_SPEED <= relative <= MOST_SPEED * max(stated, 1.0)


def is_rate(bytes_per_s: float, stated: float) -> bool:
    """Return whether a link of that stated rate, infinite if none is stated, can have that one."""
    if 0.0 < stated < float("inf"):
        return stated / MOST_FACTOR <= bytes_per_s <= stated * MOST_FACTOR
    return 1.0 / MOST_FACTOR <= bytes_per_s <= MOST_FACTOR**3
