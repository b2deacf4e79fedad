"""Frames: while nothing is seen to change, layers and groups change once in so many steps.

A change of the cluster may be answered at any time, once. What noise and budgets ask for comes no sooner than
a frame after the last change of its kind.
"""

from __future__ import annotations

import numpy as np

from foreshard.control.slots import State

_CHANGED = 0.2
"""Logarithm by which a speed or a rate must have moved for a change: noise moves estimates by less."""
_DRIFTED = 0.1
"""Logarithm by which one may move while the cluster counts as calm: two steps of the grid of estimates."""
_LASTS = 4
"""Mean times between changes that the cluster is expected to stay as it is."""
_FIRST = 10
"""Steps in which a run learns speeds and adopts a plan."""


class Frames:
    """Keeps changes apart that only noise and budgets ask for.

    Parameters
    ----------
    steps : int
        Of a frame.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self._until, self._informed = 0, False
        self._answered: State | None = None
        self._calm: State | None = None
        self._drifts = 0

    def inform(self) -> None:
        """Take in that a price or who is there has changed, which no noise does."""
        self._informed = True
        self._drifts += 1

    def see(self, state: State, step: int) -> None:
        """Take in the state of a step."""
        if self._calm is None or self.is_settling(step):
            self._calm = state
        elif _moved(state, self._calm, _DRIFTED):
            self._calm, self._drifts = state, self._drifts + 1

    def is_settling(self, step: int) -> bool:
        """Return whether the run is still to adopt its first plan."""
        return step < _FIRST

    def is_new(self, state: State) -> bool:
        """Return whether something has changed that no decision has answered; so it has before the first."""
        return self._informed or self._answered is None or _moved(state, self._answered, _CHANGED)

    def accept(self, state: State) -> None:
        """Take the first state as known if the plan is right in it."""
        if self._answered is None:
            self._answered = state

    def answer(self, state: State, step: int) -> None:
        """Take a state as known, since a plan was chosen in it; plans of the first steps begin no frame."""
        if not self.is_settling(step) and not self.is_new(state):
            self._until = step + self.steps
        self._answered, self._informed = state, False

    def is_open(self, step: int) -> bool:
        """Return whether a plan may be changed though nothing was seen to change."""
        return step >= self._until

    def may_last(self, left: int, step: int) -> bool:
        """Return whether the cluster may stay as it is for the steps left, by how often it did not."""
        return left * self._drifts <= _LASTS * step


def _moved(state: State, other: State, least: float) -> bool:
    """Return whether a speed, or a rate between workers that are there, differs by that much."""
    if state is other:
        return False
    there = np.flatnonzero(state.available)
    links = np.ix_(there, there)
    pairs = (
        (state.speed[there], other.speed[there]),
        (state.bandwidth_bytes_per_s[links], other.bandwidth_bytes_per_s[links]),
    )
    return any(bool((np.maximum(a, b) > np.minimum(a, b) * np.exp(least)).any()) for a, b in pairs)
