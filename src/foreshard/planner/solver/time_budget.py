"""The seconds that a search may take, and parts of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

LEAST_S = 2.0
"""Seconds that a search has as long as there is no plan at all, however short its budget."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """When a search has to end, in seconds of `time.perf_counter`.

    Attributes
    ----------
    ends_at : float
    last_at : float
        When it ends even without a plan.
    """

    ends_at: float
    last_at: float = float("inf")

    @classmethod
    def of(cls, seconds: float, *, last_s: float = float("inf")) -> TimeBudget:
        """Return a budget that starts now, with the seconds until a search without a plan ends too."""
        now = time.perf_counter()
        return cls(now + seconds, now + last_s)

    @property
    def left_s(self) -> float:
        """Return the seconds until the end; negative after it."""
        return self.ends_at - time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Return whether the end has come."""
        return self.left_s <= 0.0

    @property
    def is_past(self) -> bool:
        """Return whether a search ends even without a plan."""
        return time.perf_counter() >= self.last_at

    def part(self, fraction: float) -> TimeBudget:
        """Return a budget that starts now and takes a fraction of what is left."""
        now = time.perf_counter()
        return TimeBudget(now + fraction * max(0.0, self.ends_at - now), self.last_at)

    def at_least(self, seconds: float) -> TimeBudget:
        """Return a budget of so many seconds at least, as far as a search without a plan may go on."""
        return TimeBudget(min(max(self.ends_at, time.perf_counter() + seconds), self.last_at), self.last_at)


ENDLESS = TimeBudget(float("inf"))
"""No end."""
