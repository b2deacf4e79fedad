"""Progress of a long search: its seconds on a terminal, and whether Ctrl-C ended it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_QUIET_S = 1.0  # shorter searches show nothing
_TICK_S = 0.5  # between two drawings of the line
_DEFAULT_BUDGET_S = 60.0  # of a search that was given none


@contextmanager
def watched(budget_s: float | None = None) -> Iterator[list[float]]:
    """Run a search that answers KeyboardInterrupt with what it has.

    The body gets a list that is empty until Ctrl-C is pressed; `budget_s` is what the search may take, to be
    shown.
    """
    pressed: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(time.monotonic())
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, note) if ours else None
    done = threading.Event()
    ticker = None
    if sys.stderr.isatty():
        ticker = threading.Thread(target=_tick, args=(done, budget_s or _DEFAULT_BUDGET_S), daemon=True)
        ticker.start()
    try:
        yield pressed
    finally:
        done.set()
        if ticker is not None:
            ticker.join()
        if ours:
            signal.signal(signal.SIGINT, before)


def _tick(done: threading.Event, budget_s: float) -> None:
    """Write the seconds over each other, and wipe them in the end."""
    started = time.monotonic()
    width = 0
    pause_s = _QUIET_S
    while not done.wait(pause_s):
        pause_s = _TICK_S
        text = (
            f"searching, {time.monotonic() - started:.0f} of at most {budget_s:g} s (Ctrl-C: the best so far)"
        )
        width = len(text)
        sys.stderr.write("\r" + text)
        sys.stderr.flush()
    if width:
        sys.stderr.write("\r" + " " * width + "\r")
        sys.stderr.flush()
