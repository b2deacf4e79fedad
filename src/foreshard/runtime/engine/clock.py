"""What time it is: of the wall, or on a virtual machine that is slower than this one.

A virtual rank computes for real and waits for nobody's sake: its clock adds what its own work would have
cost on the device it stands for, messages carry the time at which they would have arrived. Many ranks on
few cores then tell the step time of a cluster that is not there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Protocol

_WINDOW_S, _MOST_SEEN = 10.0, 512
"""Seconds, and actions of a kind at most, whose median is its time.

The host's speed swings by a tenth within seconds. Ranks that have done work at other moments would meet
other hosts; over the same seconds they meet the same. How slow a rank is said to be is a factor on it and
never lags.
"""
LinkRate = Callable[[int, int], tuple[float, float]]
"""(source, target) -> (bytes/s, latency in seconds)."""
Carried = dict[tuple[int, int], tuple[float, float, float]]
"""(source, target) -> messages, their bytes and the seconds that they were on the link."""


class Clock(Protocol):
    """Time as a rank sees it, in seconds."""

    name: str
    virtual: bool

    def now(self) -> float:
        """Return the time."""
        ...

    def begin(self) -> None:
        """Start to count work of this rank."""
        ...

    def end(self, action: str, samples: int, layers: int) -> None:
        """Stop to count work, and add it."""
        ...

    def sent(self, num_bytes: int, source: int, target: int) -> float:
        """Return when a message that leaves now arrives."""
        ...

    def received(self, stamp: float) -> None:
        """Wait for a message that arrives at `stamp`."""
        ...

    def reduced_s(self, num_bytes: int, owners: tuple[int, ...]) -> float:
        """Return how long an all-reduce among the owners takes, once all are there."""
        ...

    def carried(self) -> Carried:
        """Return what the links have carried since the last time this was asked, as far as it was timed."""
        ...


class WallClock:
    """The time of the machine."""

    name = "wall"
    virtual = False

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.perf_counter()

    def begin(self) -> None:
        """Do nothing: time passes by itself."""

    def end(self, action: str, samples: int, layers: int) -> None:
        """Do nothing."""

    def sent(self, num_bytes: int, source: int, target: int) -> float:
        """Return now: the network takes its own time."""
        return self.now()

    def received(self, stamp: float) -> None:
        """Do nothing: who receives has waited."""

    def reduced_s(self, num_bytes: int, owners: tuple[int, ...]) -> float:
        """Return nothing: it has taken its time."""
        return 0.0

    def carried(self) -> Carried:
        """Return nothing: who waits for a message does not know how long it was on its way."""
        return {}


class VirtualClock:
    """The time of a device that takes `slow` times as long, on links of given rates.

    Parameters
    ----------
    link : callable of (source, target)
        Bytes/s and latency.
    work_s : callable of (action, samples, layers), optional
        Seconds of an action from a table; without one, the processor time that this thread used for the
        action, the median of its kind over some seconds: what other processes do to the caches is not the
        device's.

    Source
    ------
    Transfers: latency + bytes/rate after the link is free. All-reduce: a ring over the slowest link of its
    owners, 2 (m - 1) latencies and 2 (m - 1)/m of the bytes (Thakur et al. 2005).
    """

    virtual = True

    def __init__(self, link: LinkRate, work_s: Callable[[str, int, int], float] | None = None):
        self.name = "cpu" if work_s is None else "table"
        self.slow = 1.0
        self.link, self._work_s = link, work_s
        self._time_s = 0.0
        self._began_s = 0.0
        self._seen: dict[tuple[str, int, int], deque[tuple[float, float]]] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        self._carried: Carried = {}

    def now(self) -> float:
        """Return the virtual time."""
        return self._time_s

    def begin(self) -> None:
        """Note the processor time."""
        self._began_s = time.thread_time()

    def end(self, action: str, samples: int, layers: int) -> None:
        """Add what the work costs on the device this rank stands for."""
        if self._work_s is not None:
            self._time_s += self.slow * self._work_s(action, samples, layers)
            return
        seen = self._seen.setdefault((action, samples, layers), deque(maxlen=_MOST_SEEN))
        now_s = time.monotonic()
        seen.append((now_s, time.thread_time() - self._began_s))
        while seen[0][0] < now_s - _WINDOW_S:
            seen.popleft()
        # of two the less: the first of all finds memory that nobody has touched yet
        self._time_s += self.slow * median_low(took_s for _, took_s in seen)

    def sent(self, num_bytes: int, source: int, target: int) -> float:
        """Return the arrival; messages of one link follow each other."""
        bytes_per_s, latency_s = self.link(source, target)
        leaves_s = max(self._time_s, self._free_s.get((source, target), 0.0)) + num_bytes / bytes_per_s
        self._free_s[source, target] = leaves_s
        self._note(source, target, 1, num_bytes, latency_s + num_bytes / bytes_per_s)
        return leaves_s + latency_s

    def received(self, stamp: float) -> None:
        """Move on to the arrival."""
        self._time_s = max(self._time_s, stamp)

    def reduced_s(self, num_bytes: int, owners: tuple[int, ...]) -> float:
        """Return the seconds of a ring all-reduce."""
        m = len(owners)
        if m < 2:
            return 0.0
        pairs = list(zip(owners, owners[1:] + owners[:1], strict=True))
        links = [self.link(a, b) for a, b in pairs]
        messages, size = 2 * (m - 1), num_bytes / m
        for (a, b), (rate, own_s) in zip(pairs, links, strict=True):
            self._note(a, b, messages, messages * size, messages * (own_s + size / rate))
        slowest = min(rate for rate, _ in links)
        latency_s = max(latency for _, latency in links)
        return 2 * (m - 1) * latency_s + 2 * (m - 1) / m * num_bytes / slowest

    def _note(self, source: int, target: int, messages: int, num_bytes: float, seconds: float) -> None:
        if num_bytes > 0:
            before = self._carried.get((source, target), (0.0, 0.0, 0.0))
            self._carried[source, target] = (before[0] + messages, before[1] + num_bytes, before[2] + seconds)

    def carried(self) -> Carried:
        """Return what the links have carried since the last time this was asked.

        A part of a ring counts as long as it was on its own link, not as long as the ring's slowest.
        """
        told, self._carried = self._carried, {}
        return told
