"""Ranks that a lab kills and lets join at stated steps, so that a run with losses can be repeated."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from foreshard.lab.lab import Lab
from foreshard.runtime.membership.member import Membership

_LOOK_S = 0.05
PATIENCE_S = 60.0
"""How long a step waits for who is due at the next."""
_TAIL_BYTES = 65536
"""Of metrics: more than the longest line."""


def await_turn(lab: Lab | None, rank: int, metrics: Path, steps: int) -> None:
    """Stay away while the lab says so; come to the door during the step before this rank is there.

    The process ends when all steps are done without it.
    """
    while lab is not None and lab.has_absences:
        step = steps_told(metrics)
        if lab.there_at(step + (step > 0), rank):
            return
        if step >= steps:
            raise SystemExit(0)
        time.sleep(_LOOK_S)


def come_and_go(lab: Lab, rank: int, step: int, membership: Membership, *, waits: bool) -> bool:
    """Die where the lab says so; if asked, wait until who is due at the next step is at the door.

    Returns whether everybody who is due has come.
    """
    if not lab.there_at(step, rank):
        os.kill(os.getpid(), signal.SIGKILL)
    ranks = range(len(lab.slow))
    due = any(lab.there_at(step + 1, other) and not lab.there_at(step, other) for other in ranks)
    until = time.monotonic() + PATIENCE_S
    while step > 0 and due and waits and not membership.wanted():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def steps_told(metrics: Path) -> int:
    """Return how many steps a run has done, by its metrics."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    return int(json.loads(lines[-1])["step"]) + 1 if lines else 0
