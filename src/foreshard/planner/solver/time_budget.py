"""The seconds that a search may take, and parts of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

LEAST_S = 5.0
"""Processor seconds that a search has as long as there is no plan at all, however short its budget."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """When a search has to end.

    Attributes
    ----------
    ends_at : float
        By `time.perf_counter`.
    last_at : float
        When it ends even without a plan, by `time.process_time`: a busy machine leaves it as many seconds.
    """

    ends_at: float
    last_at: float = float("inf")

    @classmethod
    def of(cls, seconds: float, *, last_s: float = float("inf")) -> TimeBudget:
        """Return a budget that starts now, with the processor seconds after which no plan is waited for."""
        return cls(time.perf_counter() + seconds, time.process_time() + last_s)

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
        return time.process_time() >= self.last_at

    def part(self, fraction: float) -> TimeBudget:
        """Return a budget that starts now and takes a fraction of what is left."""
        now = time.perf_counter()
        return TimeBudget(now + fraction * max(0.0, self.ends_at - now), self.last_at)

    def at_least(self, seconds: float) -> TimeBudget:
        """Return a budget of so many seconds at least, as far as a search without a plan may go on."""
        more_s = min(seconds, self.last_at - time.process_time())
        return TimeBudget(max(self.ends_at, time.perf_counter() + more_s), self.last_at)


ENDLESS = TimeBudget(float("inf"))
"""No end."""
