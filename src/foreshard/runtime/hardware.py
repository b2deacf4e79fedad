"""The hardware of a rank: this machine, or a test bed that emulates other devices.

A test bed starts its own worker module, whose ranks get their clock, memory and faults from a `Hardware` of
its own; the runtime knows nothing else about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.membership.member import Membership
from foreshard.spec.cluster import Cluster


class Hardware:
    """The machine that a rank runs on.

    Attributes
    ----------
    clock : Clock
    cluster : Cluster or None
        That is emulated; None where the options of the run name it.
    """

    cluster: Cluster | None = None

    def __init__(self) -> None:
        self.clock: Clock = Clock()

    def memory_bytes(self, device: torch.device) -> float | None:
        """Return the memory of a rank's device; None for the host's, which ranks share."""
        if device.type != "cuda":
            return None
        return float(torch.cuda.get_device_properties(device).total_memory)

    def await_turn(self, metrics: Path, steps: int) -> None:
        """Wait until the rank may join the run: at once, unless it is emulated."""

    def before_step(self, step: int, membership: Membership) -> bool:
        """Prepare a step; return whether all ranks that should be there are."""
        return True


def no_words(rank: int) -> list[str]:
    """Return nothing to put before a rank's command line."""
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How a test bed starts ranks.

    Attributes
    ----------
    worker : str
        Module that a rank is started from.
    file : str
        Of the test bed, read by the worker.
    cluster : Cluster
    expected : sequence of int
        Ranks that are there at first.
    address : str or None
        Of the rendezvous.
    command : callable of rank
        Words put before a rank's command line.
    watch : callable of Path, optional
        Called with the run's metrics file again and again.
    """

    worker: str
    file: str
    cluster: Cluster
    expected: Sequence[int]
    address: str | None = None
    command: Callable[[int], list[str]] = no_words
    watch: Callable[[Path], None] | None = None
