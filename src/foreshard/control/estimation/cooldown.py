"""Whether the cluster is as it was when the running plan was chosen, and when a calm one may be changed."""

from __future__ import annotations

import numpy as np

from foreshard.control.slots import State

_LASTS = 4
"""Mean times between changes of the cluster that a calm may last."""
_NEW = 0.2
"""Logarithm by which a speed or a rate must have moved: noise moves estimates by less."""


class Cooldown:
    """Keeps changes that only the budgets ask for apart from each other.

    A change of the cluster may be answered at any time, once. What noise and budgets ask for while the
    cluster is as it was comes no sooner than `quiet_steps` steps after the last change of its kind.

    Parameters
    ----------
    quiet_steps : int
    """

    def __init__(self, quiet_steps: int):
        self.quiet_steps = quiet_steps
        self._until, self._answers, self._told = 0, 0, False
        self._answered: State | None = None
        self._last: tuple[State, bool] | None = None

    def told(self) -> None:
        """Take in that a price or who is there has changed, which no noise does."""
        self._told = True

    def is_new(self, state: State) -> bool:
        """Return whether something has changed that no decision has answered; so it has before the first."""
        if self._told or self._answered is None:
            return True
        if self._last is None or self._last[0] is not state:
            self._last = state, _differs(state, self._answered)
        return self._last[1]

    def kept(self, state: State) -> None:
        """Take the first state as known if the plan is right in it."""
        if self._answered is None:
            self._answered = state

    def changed(self, state: State, step: int) -> None:
        """Take a state as known, since a plan was chosen in it; count what nothing has called for."""
        if not self.is_new(state):
            self._until = step + self.quiet_steps
        elif self._answered is not None:
            self._answers += 1
        self._answered, self._last, self._told = state, None, False

    def may_last(self, left: int, step: int) -> bool:
        """Return whether the cluster may stay as it is for the steps left, by how often it did not."""
        return left * self._answers <= _LASTS * step

    def is_open(self, step: int) -> bool:
        """Return whether a plan may be changed though the cluster is as it was."""
        return step >= self._until


def _differs(one: State, other: State) -> bool:
    there = np.flatnonzero(one.available)
    links = np.ix_(there, there)
    pairs = (
        (one.speed[there], other.speed[there]),
        (one.bandwidth_bytes_per_s[links], other.bandwidth_bytes_per_s[links]),
    )
    return any(_moved(new, old) for new, old in pairs)


def _moved(new: np.ndarray, old: np.ndarray) -> bool:
    if np.array_equal(new, old):
        return False
    high, low = np.maximum(new, old), np.minimum(new, old)
    return bool((high > low * np.exp(_NEW)).any())
