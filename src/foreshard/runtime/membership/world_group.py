"""The ranks of a generation as one of them sees them."""

from __future__ import annotations

from typing import Any

import torch

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.gradient_sync import latest
from foreshard.runtime.membership.fixed_membership import Generation
from foreshard.runtime.membership.recovery import Status, heard_status


class WorldGroup:
    """Who trains together, and what all do at once.

    Parameters
    ----------
    membership : FixedMembership or Membership
    generation : Generation

    Attributes
    ----------
    ranks : tuple of int
        Rising.
    conducts : bool
        Whether this is the least of them: it speaks for all.
    world : ProcessGroup or None
        Of all ranks; None for a rank alone.

    Raises
    ------
    RuntimeError
        When one of them is gone again.
    """

    def __init__(self, membership: Any, generation: Generation):
        self.membership, self.number = membership, generation.number
        self.rank: int = membership.rank
        self.ranks = tuple(sorted(generation.ranks))
        self.conducts = self.rank == self.ranks[0]
        self.world: Any = membership.group(self.ranks, "world") if len(self.ranks) > 1 else None

    def leave(self) -> None:
        """Let go of the group of all."""
        self.world = None

    def statuses(self, mine: Status) -> dict[int, Status]:
        """Return the status of every rank."""
        if self.world is None:
            return {self.rank: mine}
        store = self.membership.store
        store.set(f"g{self.number}/status/{self.rank}", mine.to_json())
        return {rank: heard_status(bytes(store.get(f"g{self.number}/status/{rank}"))) for rank in self.ranks}

    def any(self, mine: bool) -> bool:
        """Return whether it is so for any rank."""
        told = torch.tensor([float(mine)])
        if self.world is not None:
            self.world.allreduce([told]).wait()
        return bool(told[0] > 0)

    def wait_for_all(self) -> None:
        """Wait until every rank is here."""
        if self.world is not None:
            self.world.allreduce([torch.zeros(1, dtype=torch.float64)]).wait()

    def advance(self, clock: Clock) -> None:
        """Bring virtual clocks to the latest: nobody begins a step before the vote of all."""
        if clock.virtual and self.world is not None:
            now = torch.tensor([clock.now()], dtype=torch.float64)
            latest(self.world, now)
            clock.received(float(now[0]) + clock.reduced_s(0, self.ranks))
