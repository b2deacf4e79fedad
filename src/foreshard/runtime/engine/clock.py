"""Time as a rank sees it: of the machine, or of a virtual device that is slower than this machine.

A virtual rank really computes, but never waits for time to pass: its clock adds what its own work would have
cost on the device it stands for, and messages carry the time at which they would have arrived. Many ranks on
few cores then report the step time of a cluster that is not there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Any

_WINDOW_S, _MAX_SAMPLES = 10.0, 512
"""Seconds, and actions of a kind at most, over which the median time of an action is taken.

The speed of a shared host varies by a tenth within seconds. Ranks that work at different moments would be
timed on different hosts; over the same seconds they are timed on the same one. The slowness of a rank is a
factor on the median, so it takes effect at once.
"""
LinkRate = Callable[[int, int], tuple[float, float]]
"""(source, target) -> (bytes/s, latency in seconds)."""
LinkTraffic = dict[int, tuple[float, float, float]]
"""Target -> messages, their bytes and the seconds that they were on the link."""


class Clock:
    """The machine's own clock: time passes by itself, and work and messages take the time they take."""

    name = "wall"
    virtual = False

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.perf_counter()

    def start_step(self) -> None:
        """Note that a step begins: `seconds` of its marks is asked before the next one."""

    def mark(self) -> Any:
        """Return this moment, whose `seconds` are asked later."""
        return self.now()

    def seconds(self, mark: Any) -> float:
        """Return a marked moment on the scale of `now`."""
        return float(mark)

    def begin(self) -> None:
        """Start to count work of this rank."""

    def end(self, action: str, samples: int, layers: int) -> None:
        """Stop to count work, and add its time."""

    def sent(self, num_bytes: int, source: int, target: int) -> float:
        """Return the time at which a message that is sent now arrives."""
        return self.now()

    def advance_to(self, time_s: float) -> None:
        """Move on to a moment, such as the arrival of a message."""

    def all_reduce_s(self, num_bytes: int, owners: tuple[int, ...]) -> float:
        """Return the seconds of an all-reduce among the owners after the last of them has come."""
        return 0.0

    def traffic_from(self, source: int) -> LinkTraffic | None:
        """Return what a rank has sent since the last call; None, since a wall clock cannot time links."""
        return None


class VirtualClock(Clock):
    """The time of a device that takes `slow` times as long, on links of given rates.

    Parameters
    ----------
    link : callable of (source, target)
        Bytes/s and latency.
    work_s : callable of (action, samples, layers), optional
        Seconds of an action from a table. Without one an action takes the processor time of this thread, the
        median over recent actions of its kind: what other processes do to the caches is not the device's.

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
        self._recent: dict[tuple[str, int, int], deque[tuple[float, float]]] = {}
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._traffic: dict[tuple[int, int], tuple[float, float, float]] = {}

    def now(self) -> float:
        """Return the virtual time."""
        return self._time_s

    def begin(self) -> None:
        """Start to count work of this rank."""
        self._began_s = time.thread_time()

    def end(self, action: str, samples: int, layers: int) -> None:
        """Add what the work costs on the device this rank stands for."""
        if self._work_s is not None:
            self._time_s += self.slow * self._work_s(action, samples, layers)
            return
        recent = self._recent.setdefault((action, samples, layers), deque(maxlen=_MAX_SAMPLES))
        now_s = time.monotonic()
        recent.append((now_s, time.thread_time() - self._began_s))
        while recent[0][0] < now_s - _WINDOW_S:
            recent.popleft()
        # the low median: of two actions the first pays for memory that was never touched before
        self._time_s += self.slow * median_low(took_s for _, took_s in recent)

    def sent(self, num_bytes: int, source: int, target: int) -> float:
        """Return the arrival of a message; messages on one link follow each other."""
        bytes_per_s, latency_s = self.link(source, target)
        free_s = max(self._time_s, self._link_free_s.get((source, target), 0.0)) + num_bytes / bytes_per_s
        self._link_free_s[source, target] = free_s
        self._count(source, target, 1, num_bytes, latency_s + num_bytes / bytes_per_s)
        return free_s + latency_s

    def advance_to(self, time_s: float) -> None:
        """Move on to a moment, if it has not passed."""
        self._time_s = max(self._time_s, time_s)

    def all_reduce_s(self, num_bytes: int, owners: tuple[int, ...]) -> float:
        """Return the seconds of a ring all-reduce."""
        m = len(owners)
        if m < 2:
            return 0.0
        pairs = list(zip(owners, owners[1:] + owners[:1], strict=True))
        links = [self.link(a, b) for a, b in pairs]
        messages, size = 2 * (m - 1), num_bytes / m
        for (a, b), (rate, own_s) in zip(pairs, links, strict=True):
            self._count(a, b, messages, messages * size, messages * (own_s + size / rate))
        slowest = min(rate for rate, _ in links)
        latency_s = max(latency for _, latency in links)
        return 2 * (m - 1) * latency_s + 2 * (m - 1) / m * num_bytes / slowest

    def _count(self, source: int, target: int, messages: int, num_bytes: float, seconds: float) -> None:
        if num_bytes > 0:
            before = self._traffic.get((source, target), (0.0, 0.0, 0.0))
            self._traffic[source, target] = (before[0] + messages, before[1] + num_bytes, before[2] + seconds)

    def traffic_from(self, source: int) -> LinkTraffic:
        """Return what a rank has sent since the last call.

        A part of a ring counts for the time on its own link, not for that of the ring's slowest link.
        """
        traffic, self._traffic = self._traffic, {}
        return {target: amounts for (start, target), amounts in traffic.items() if start == source}
