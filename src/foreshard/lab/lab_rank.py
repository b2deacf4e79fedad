"""One rank of a run in a lab: its clock, its memory and its losses are those that the lab states.

A rank kills itself and joins at stated steps, so that a run with losses can be repeated.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

from foreshard.lab.lab import Lab, load_lab
from foreshard.runtime import worker
from foreshard.runtime.device_memory import DeviceMemory
from foreshard.runtime.hardware import Hardware
from foreshard.runtime.membership.member import Membership
from foreshard.runtime.run_settings import RunSettings
from foreshard.runtime.state.rank_state import RankState

_LOOK_S = 0.05
"""Between looks at the end of the metrics, each a small read."""
PATIENCE_S = 60.0
"""How long a step waits for who is due at the next: loading torch takes seconds, tens on a busy machine."""
_TAIL_BYTES = 65536
"""Of metrics: more than the longest line."""


class LabHardware(Hardware):
    """The device that a rank of a lab, which a file states, stands for."""

    def __init__(self, lab: Lab, rank: int, file: str):
        self._lab, self._rank, self._step = lab, rank, [0]
        self.clock, self.cluster = lab.make_clock(self._step), lab.cluster()
        limit_bytes = self.memory_bytes()
        self._memory = None if limit_bytes is None else DeviceMemory(rank, limit_bytes, file)

    def memory_bytes(self) -> float | None:
        """Return the memory that the lab states for the rank."""
        return self._lab.stated("memory_bytes", self._rank)

    def within_memory(self, state: RankState) -> AbstractContextManager[None]:
        """End the run where the rank holds more than the lab states."""
        return nullcontext() if self._memory is None else self._memory.within(state)

    def await_turn(self, metrics: Path, steps: int) -> None:
        """Stay away while the lab says so; come to the door during the step before this rank is there.

        The process ends when all steps are done without it.
        """
        while self._lab.has_absences:
            step = steps_told(metrics)
            if self._lab.there_at(step + (step > 0), self._rank):
                return
            if step >= steps:
                raise SystemExit(0)
            time.sleep(_LOOK_S)

    def before_step(self, step: int, membership: Membership) -> bool:
        """Set clock and speed of the step; die, or wait for who is due at the next, where the lab says so."""
        lab, self._step[0], come = self._lab, step, True
        if lab.has_absences:
            if not lab.there_at(step, self._rank):
                os.kill(os.getpid(), signal.SIGKILL)
            come = self._all_come(step, membership)
        if hasattr(self.clock, "slow"):
            self.clock.slow = lab.slow_at(step, self._rank)
        return come

    def _all_come(self, step: int, membership: Membership) -> bool:
        """Wait until who is due at the next step is at the door, where time is virtual; return whether."""
        there, ranks = self._lab.there_at, range(len(self._lab.slow))
        due = any(there(step + 1, other) and not there(step, other) for other in ranks)
        until = time.monotonic() + PATIENCE_S
        while step > 0 and due and self.clock.virtual and not membership.wanted():
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


def start() -> NoReturn:
    """Be the rank that the environment describes, to the end of the process."""
    worker.exit_with(worker.main(_hardware))


def _hardware(settings: RunSettings, rank: int) -> LabHardware:
    assert settings.emulated is not None
    return LabHardware(load_lab(settings.emulated), rank, settings.emulated)


if __name__ == "__main__":
    start()
