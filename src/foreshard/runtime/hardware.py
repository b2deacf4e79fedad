"""The hardware of a rank: this machine, or a test bed that emulates other devices.

A test bed starts its own worker module, whose ranks get their clock, memory and faults from a `Hardware` of
its own; the runtime knows nothing else about it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.cuda_clock import CudaClock
from foreshard.runtime.membership.member import Membership
from foreshard.runtime.state.rank_state import RankState
from foreshard.spec.cluster import Cluster


class Hardware:
    """The machine that a rank runs on.

    `cluster` is the one that is emulated; None where the options of the run name it. A rank that
    `owns_device` has an accelerator that no other rank uses: NCCL connects no others.
    """

    cluster: Cluster | None = None
    device = torch.device("cpu")
    owns_device = False

    def __init__(self) -> None:
        self.clock: Clock = Clock()

    def use_device(self, kind: str, local_rank: int, local_ranks: int) -> None:
        """Take the rank's device; ranks of a host that has fewer GPUs share them in turn.

        `kind` is 'auto', 'cpu' or 'cuda', which is an error where there is no such device. The rank is the
        `local_rank`-th of `local_ranks` on its host.
        """
        count = torch.cuda.device_count() if kind != "cpu" else 0
        if kind == "cuda" and not count:
            raise SpecError(
                "no CUDA device",
                key="--device",
                value=kind,
                rule="torch finds a CUDA device on every host",
                fix="Install torch for CUDA, or use --device cpu",
            )
        if count:
            self.device, self.owns_device = torch.device("cuda", local_rank % count), local_ranks <= count
            torch.cuda.set_device(self.device)
            self.clock = CudaClock()

    def memory_bytes(self) -> float | None:
        """Return the memory of the rank's device; None for one that ranks share, as they do the host's."""
        if not self.owns_device:
            return None
        return float(torch.cuda.get_device_properties(self.device).total_memory)

    def within_memory(self, state: RankState) -> AbstractContextManager[None]:
        """Return the context of a rank's part of a step; a real device refuses by itself what is too much."""
        return nullcontext()

    def await_turn(self, metrics: Path, steps: int) -> None:
        """Wait until the rank may join the run: at once, unless it is emulated."""

    def before_step(self, step: int, membership: Membership) -> bool:
        """Prepare a step; return whether all ranks that should be there are."""
        return True
