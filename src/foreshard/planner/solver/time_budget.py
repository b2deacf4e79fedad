"""The seconds that a search may take, and parts of them."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """When a search has to end, in seconds of `time.perf_counter`."""

    ends_at: float

    @classmethod
    def of(cls, seconds: float) -> TimeBudget:
        """Return a budget that starts now."""
        return cls(time.perf_counter() + seconds)

    @property
    def left_s(self) -> float:
        """Return the seconds until the end; negative after it."""
        return self.ends_at - time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Return whether the end has come."""
        return self.left_s <= 0.0

    def part(self, fraction: float) -> TimeBudget:
        """Return a budget that starts now and takes a fraction of what is left."""
        now = time.perf_counter()
        return TimeBudget(now + fraction * max(0.0, self.ends_at - now))


ENDLESS = TimeBudget(float("inf"))
"""No end."""
