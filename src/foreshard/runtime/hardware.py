"""What ranks run on: this machine, or a test bed that lets them stand for other devices.

A test bed starts its own worker module, whose ranks get their clock, memory and losses from a `Hardware` of
its own; the runtime knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foreshard.runtime.engine.clock import Clock, WallClock
from foreshard.runtime.membership.member import Membership
from foreshard.spec.cluster import Cluster


class Hardware:
    """The machine that a rank runs on.

    Attributes
    ----------
    clock : Clock
    cluster : Cluster or None
        What ranks stand for; None where the options of the run say it.
    """

    cluster: Cluster | None = None

    def __init__(self) -> None:
        self.clock: Clock = WallClock()

    def memory_bytes(self, device: torch.device) -> float | None:
        """Return the memory of a rank's device; None where it has none of its own."""
        if device.type != "cuda":
            return None
        return float(torch.cuda.get_device_properties(device).total_memory)

    def await_turn(self, metrics: Path, steps: int) -> None:
        """Wait before the rank joins the run: no longer than it takes to start."""

    def before_step(self, step: int, membership: Membership) -> bool:
        """Prepare a step; return whether all ranks that are due have come."""
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
        What the worker reads of the test bed.
    cluster : Cluster
    expected : sequence of int
        Ranks that are there at first.
    address : str or None
        That ranks meet on.
    command : callable of rank
        Words put before a rank's command line.
    watch : callable of Path, optional
        Called with the run's metrics while it goes on.
    """

    worker: str
    file: str
    cluster: Cluster
    expected: Sequence[int]
    address: str | None = None
    command: Callable[[int], list[str]] = no_words
    watch: Callable[[Path], None] | None = None
