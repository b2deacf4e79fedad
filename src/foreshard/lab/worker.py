"""One rank of a run in a lab: its clock, its memory and its losses are those that the lab states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from foreshard.lab.fault_schedule import await_turn, come_and_go
from foreshard.lab.lab import load_lab
from foreshard.runtime import worker
from foreshard.runtime.device_memory import DeviceMemory
from foreshard.runtime.hardware import Hardware
from foreshard.runtime.membership.member import Membership
from foreshard.runtime.run_settings import RunSettings
from foreshard.runtime.state.rank_state import RankState


class LabHardware(Hardware):
    """The device that a rank of a lab stands for."""

    def __init__(self, settings: RunSettings, rank: int):
        assert settings.emulated is not None
        self._lab, self._rank, self._step = load_lab(settings.emulated), rank, [0]
        self.clock = self._lab.make_clock(self._step)
        self.cluster = self._lab.cluster()
        limit_bytes = self.memory_bytes()
        self._memory = None if limit_bytes is None else DeviceMemory(rank, limit_bytes, settings.emulated)

    def memory_bytes(self) -> float | None:
        """Return the memory that the lab states for the rank."""
        return self._lab.stated("memory_bytes", self._rank)

    def within_memory(self, state: RankState) -> AbstractContextManager[None]:
        """End the run where the rank holds more than the lab states."""
        return nullcontext() if self._memory is None else self._memory.within(state)

    def await_turn(self, metrics: Path, steps: int) -> None:
        """Stay away until the lab lets the rank join."""
        await_turn(self._lab, self._rank, metrics, steps)

    def before_step(self, step: int, membership: Membership) -> bool:
        """Set clock and speed of the step; die, or wait for who is due, where the lab says so."""
        self._step[0], come = step, True
        if self._lab.has_absences:
            come = come_and_go(self._lab, self._rank, step, membership, waits=self.clock.virtual)
        if hasattr(self.clock, "slow"):
            self.clock.slow = self._lab.slow_at(step, self._rank)
        return come


if __name__ == "__main__":
    worker.exit_with(worker.main(LabHardware))
