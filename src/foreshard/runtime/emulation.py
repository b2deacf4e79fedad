"""How a test bed starts the ranks of a run; read without torch, before any rank starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foreshard.runtime.membership.agent import WORKER
from foreshard.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How a test bed starts ranks; by default as on this machine.

    A rank is started from the module `worker`, which reads the `file` of the test bed, with the words of
    `command` before its command line. `cluster` is what is emulated, `expected` are the ranks that are there
    at first (all if not given), `address` is that of the rendezvous. `watch` is called with the run's metrics
    file again and again.
    """

    worker: str = WORKER
    file: str | None = None
    cluster: Cluster | None = None
    expected: Sequence[int] | None = None
    address: str | None = None
    command: Callable[[int], list[str]] = lambda rank: []
    watch: Callable[[Path], None] | None = None

    @property
    def is_virtual(self) -> bool:
        """Whether ranks reckon with virtual time: a test bed that enforces time has a network of its own."""
        return self.file is not None and self.address is None
