"""What the next step will be like: how long the cluster stays in a mode, and which mode follows.

A semi-Markov chain, learned: a mode is the speeds of all devices as they were met before. A stay ends with
the chance with which earlier stays of this mode ended at this age.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_NEAR = 0.25
"""Logarithm of a speed up to which two modes are one: several times the noise of a step."""
_STAYS = 16
"""Stays of a mode that are remembered."""
_MOST_MODES = 64
"""Modes that are remembered: with more, devices change by themselves and no mode comes back."""
_FEWEST = 4
"""Stays that must have lasted this long before anything is said."""


@dataclass(slots=True, kw_only=True, eq=False)
class Mode:
    """Speeds that were met together.

    Attributes
    ----------
    log_speed : ndarray, shape (devices,)
        Mean over the steps.
    steps : int
        That the mean is over.
    stays : deque of int
        Lengths of the last stays, in steps.
    followed : Counter
        Modes that came next.
    """

    log_speed: np.ndarray
    steps: int = 0
    stays: deque[int] = field(default_factory=lambda: deque(maxlen=_STAYS))
    followed: Counter[int] = field(default_factory=Counter)


class Modes:
    """Learns modes from the speeds of every step, and says what comes next."""

    def __init__(self) -> None:
        self._modes: list[Mode] = []
        self._now, self._age, self._before = -1, 0, -1

    def see(self, speeds: Sequence[float], steps: int) -> None:
        """Take in the speeds of some steps."""
        seen = np.log(np.asarray(speeds))
        at = self._nearest(seen)
        mode = self._modes[at]
        mode.steps += steps
        mode.log_speed = mode.log_speed + min(steps / mode.steps, 1.0) * (seen - mode.log_speed)
        if at == self._now or self._now < 0:
            self._now, self._age = at, self._age + steps
            return
        if self._age > 1 or self._before < 0:
            self._modes[self._now].stays.append(self._age)
            self._modes[self._now].followed[at] += 1
            self._before, self._age = self._now, steps
        else:
            # A mode of one step is a change that was seen in part: devices in use come first.
            last = self._modes[self._before].followed
            last[self._now] -= 1
            last[at] += 1
            self._age += steps
        self._now = at

    def _nearest(self, seen: np.ndarray) -> int:
        """Return the mode of some speeds, a new one where none is near."""
        apart = [float(np.abs(mode.log_speed - seen).max()) for mode in self._modes]
        at = int(np.argmin(apart)) if apart else -1
        if at >= 0 and apart[at] <= _NEAR:
            return at
        if len(self._modes) == _MOST_MODES:
            self.__init__()  # type: ignore[misc]
        self._modes.append(Mode(log_speed=seen))
        return len(self._modes) - 1

    def following(self) -> tuple[float, list[float]] | None:
        """Return the chance that the next step is of another mode, and its speeds; None if nothing is known.

        The chance is the part of the stays in this mode, of those that lasted as long as this one, that ended
        then; one more counts as not ended.
        """
        if self._now < 0:
            return None
        mode = self._modes[self._now]
        long = [stay for stay in mode.stays if stay >= self._age]
        if len(long) < _FEWEST:
            return None
        to, times = mode.followed.most_common(1)[0]
        chance = long.count(self._age) / (len(long) + 1.0) * times / max(sum(mode.followed.values()), 1)
        if chance <= 0.0 or to == self._now:
            return None
        return chance, [math.exp(log) for log in self._modes[to].log_speed.tolist()]
