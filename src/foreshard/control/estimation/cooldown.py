"""Change detection and cooldown.

Decides whether the cluster has changed since the running plan was chosen and, if it has not, how long to wait
before layers or groups change again.
"""

from __future__ import annotations

import numpy as np

from foreshard.control.slots import State

_LASTS = 4
"""Mean times between changes of the cluster that it may be expected to stay as it is."""
_CHANGED = 0.2
"""Logarithm by which a speed or a rate must have moved: noise moves estimates by less."""


class Cooldown:
    """Keeps changes that only the budgets ask for apart from each other.

    A change of the cluster may be answered at any time, once. What noise and budgets ask for while nothing is
    seen to change comes no sooner than `steps` steps after the last change of its kind.

    Parameters
    ----------
    steps : int
    """

    def __init__(self, steps: int):
        self.steps = steps
        self._until, self._answers, self._informed = 0, 0, False
        self._answered: State | None = None
        self._last: tuple[State, bool] | None = None

    def inform(self) -> None:
        """Take in that a price or who is there has changed, which no noise does."""
        self._informed = True

    def is_new(self, state: State) -> bool:
        """Return whether something has changed that no decision has answered; so it has before the first."""
        if self._informed or self._answered is None:
            return True
        if self._last is None or self._last[0] is not state:
            self._last = state, _differs(state, self._answered)
        return self._last[1]

    def accept(self, state: State) -> None:
        """Take the first state as known if the plan is right in it."""
        if self._answered is None:
            self._answered = state

    def answer(self, state: State, step: int) -> None:
        """Take a state as known, since a plan was chosen in it; count what nothing has called for."""
        if not self.is_new(state):
            self._until = step + self.steps
        elif self._answered is not None:
            self._answers += 1
        self._answered, self._last, self._informed = state, None, False

    def may_last(self, left: int, step: int) -> bool:
        """Return whether the cluster may stay as it is for the steps left, by how often it did not."""
        return left * self._answers <= _LASTS * step

    def is_open(self, step: int) -> bool:
        """Return whether a plan may be changed though nothing was seen to change."""
        return step >= self._until


def _differs(state: State, other: State) -> bool:
    there = np.flatnonzero(state.available)
    links = np.ix_(there, there)
    return _moved(state.speed[there], other.speed[there]) or _moved(
        state.bandwidth_bytes_per_s[links], other.bandwidth_bytes_per_s[links]
    )


def _moved(new: np.ndarray, old: np.ndarray) -> bool:
    if np.array_equal(new, old):
        return False
    high, low = np.maximum(new, old), np.minimum(new, old)
    return bool((high > low * np.exp(_CHANGED)).any())
