"""The time that a search for a schedule may take, looked at in the loops of every method."""

from __future__ import annotations

import time
from collections.abc import Callable

Check = Callable[[], None]
"""Raises `BudgetSpent` where a search is out of time."""


class BudgetSpent(Exception):
    """The time of a search is over."""


def unlimited() -> None:
    """Let a search take as long as it needs."""


class SynthesisBudget:
    """Seconds of a search, of which a part is kept to finish the schedule that it finds.

    Work is counted in seconds of a free core. On a busy machine it takes longer: by the ratio of the seconds
    of the search so far to those in which its core worked.

    Parameters
    ----------
    seconds : float
        From now.
    clock, core : callable, optional
        Seconds on any scale, and those of them in which a core worked; tests count work instead.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
        core: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._core = clock, core
        self._start_s, self._core_start_s = clock(), core()
        self._seconds = seconds
        self.kept_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(self._seconds - self.spent_s, 0.0)

    @property
    def worked_s(self) -> float:
        """Those of them in which a core worked."""
        return self._core() - self._core_start_s

    def allows(self, core_s: float) -> bool:
        """Return whether so much work can be done beside what is kept."""
        spent_s, worked_s = self.spent_s, self.worked_s
        slowdown = max(1.0, spent_s / worked_s) if worked_s > 0.0 else 1.0
        return spent_s + (core_s + self.kept_s) * slowdown <= self._seconds

    def check(self) -> None:
        """Raise where no time is left beside what is kept."""
        if not self.allows(0.0):
            raise BudgetSpent
