"""What a rank does and since when, by which a rank that hangs is told from one that is slow or waits.

A heartbeat shows that a process lives; only turning to another activity shows that it gets on. How long an
activity may take is learned from the same activity in earlier steps of the run, of any rank. Only time counts
in which the rank could have run: on a loaded machine it waits for a processor, and does not hang.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LEARNED_FACTOR = 10.0
"""An activity may take so many times its longest time so far; one that is new, so many times the limit."""
WALL_FACTOR = 10.0
"""Of all time, also without a processor, so many times as much: else who starves would hide who hangs."""
START_FACTOR = 60.0
"""The same for loading the job, which may prepare its data."""
START = "loading the job"
_SENT_BYTES = 65536
"""Bytes sent since the last look that show a transfer under way: more than heartbeats and log lines."""


class Progress:
    """The activity of a rank's main thread, read by the thread of its heartbeat.

    An activity of less than `limit_s` never counts as hanging. `count` rises whenever the rank turns to
    another activity, begins to wait or has waited; `waits_for` are the ranks that it waits for, None while it
    is busy itself; `step` is the one that it trains, -1 before the first. `waited_s` gives the seconds since
    its last call in which the process waited for a processor: they do not count, up to nine tenths of the
    time in an activity.
    """

    def __init__(
        self,
        limit_s: float = 60.0,
        *,
        now: Callable[[], float] = time.monotonic,
        waited_s: Callable[[], float] = lambda: 0.0,
    ):
        self._limit_s, self._now = limit_s, now
        self._newly_waited_s, self._waited_s = waited_s, 0.0
        self.count, self.doing, self.step = 0, START, -1
        self.waits_for: tuple[int, ...] | None = None
        self._since_s, self._began_s = self._usable_s(), now()
        self._warm, self._longest_s = False, dict[str, float]()
        self._sent_bytes = 0
        self._thread = threading.get_ident()

    def turn_to(self, activity: str) -> None:
        """Note that the rank turns to another activity."""
        self._note()
        self.doing = activity

    def begin_step(self, step: int) -> None:
        """Note a step; activities in the first one of a process or a plan are learned apart."""
        self._note()
        self._warm, self.step = 0 <= self.step < step, step

    @contextmanager
    def waiting(self, ranks: Sequence[int] = ()) -> Iterator[None]:
        """Note that the rank waits for others in the body: it does not hang, whatever they do."""
        self._note()
        before, self.waits_for = self.waits_for, tuple(ranks)
        try:
            yield
        finally:
            self._note()
            self.waits_for = before

    def learned(self, longest_s: Mapping[str, float]) -> None:
        """Take over the longest times that other ranks have seen."""
        for key, seconds in longest_s.items():
            self._longest_s[key] = max(seconds, self._longest_s.get(key, 0.0))

    def to_dict(self) -> dict[str, object]:
        """Return what a heartbeat says of it."""
        sent = _sent_bytes()
        if self.waits_for is not None and sent - self._sent_bytes > _SENT_BYTES:
            self.count += 1  # a large transfer is one long wait
        self._sent_bytes = sent
        return {
            "count": self.count,
            "waits_for": self.waits_for,
            "step": self.step,
            "longest_s": dict(self._longest_s),
            "waited_s": self._waited_s,
        }

    @property
    def limit_s(self) -> float:
        """How long the present activity may take, of the time in which the rank can run."""
        if self.doing == START and self.waits_for is None:
            return START_FACTOR * self._limit_s
        known = (self._longest_s.get(key) for key in (self._key, self._first_key))
        longest_s = next((seconds for seconds in known if seconds is not None), self._limit_s)
        return max(self._limit_s, LEARNED_FACTOR * longest_s)

    def arm(self, margin_s: float = 1.0) -> None:
        """End the process, with its stacks on stderr, if nothing calls this again: it is stuck inside C.

        The timer counts all time: it runs where no code of Python does.
        """
        faulthandler.dump_traceback_later(self.limit_s + margin_s, exit=True)

    def hang(self, job: str | None = None) -> str | None:
        """Return where the rank hangs and for how long, as 'loss in job.py, line 12, for 61 s'; else None."""
        self._waited_s += self._newly_waited_s()
        busy_s = self._usable_s() - self._since_s
        lasted_s = self._now() - self._began_s
        if self.waits_for is not None or max(busy_s, lasted_s / WALL_FACTOR) <= self.limit_s:
            return None
        waited = f" (and {lasted_s - busy_s:.0f} s without a processor)" if lasted_s - busy_s > 1.0 else ""
        return f"{self.doing}{self._place(job)}, for {busy_s:.0f} s{waited}"

    def _usable_s(self) -> float:
        """Return a time that stands still while the process waits for a processor, as far as was looked."""
        return self._now() - self._waited_s

    @property
    def _key(self) -> str:
        return self.doing if self._warm else self._first_key

    @property
    def _first_key(self) -> str:
        return f"{self.doing}/first"

    def _note(self) -> None:
        usable_s = self._usable_s()
        if self.waits_for is None and self.doing != START:
            key = self._key
            self._longest_s[key] = max(usable_s - self._since_s, self._longest_s.get(key, 0.0))
        self._since_s, self._began_s = usable_s, self._now()
        self.count += 1

    def _place(self, job: str | None) -> str:
        """Return the innermost line of the job that runs: of the main thread, or of one that it waits for."""
        stacks = sys._current_frames()
        order = sorted(stacks, key=lambda thread: thread != self._thread)
        frames = [frame for thread in order for frame in reversed(traceback.extract_stack(stacks[thread]))]
        own = [frame for frame in frames if job is not None and frame.filename == job]
        found = own or [frame for frame in frames[:1] if stacks.get(self._thread) is not None]
        return "".join(f", {f.name} in {Path(f.filename).name}, line {f.lineno}" for f in found[:1])


def _sent_bytes() -> int:
    """Return the bytes that this process has written, to connections too; 0 where the system does not say."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["wchar"])
    except (OSError, ValueError, KeyError):
        return 0
