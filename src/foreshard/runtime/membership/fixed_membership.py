"""A membership that never changes: ranks that were started together and end together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from foreshard.runtime.membership.peer_group import PeerGroup, communicating
from foreshard.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Who trains, under which plan.

    Attributes
    ----------
    number : int
        Rises with every change of membership.
    plan : Plan
    ranks : tuple of int
        All that are there, also those the plan leaves idle.
    resume : bool
        Whether to continue from the latest checkpoint.
    pids : dict of rank
        Their processes, where a supervisor knows them.
    """

    number: int
    plan: Plan
    ranks: tuple[int, ...]
    resume: bool = False
    pids: dict[int, int] = field(default_factory=dict)


class GroupMembership(Protocol):
    """What a trainer asks of its membership, fixed or supervised."""

    rank: int
    generation: Generation

    @property
    def store(self) -> dist.Store | None:
        """Keys and values that all ranks share; None for a single rank."""
        ...

    def group(self, ranks: tuple[int, ...], name: str) -> PeerGroup:
        """Return the process group of some ranks, under a name."""
        ...

    def owns_devices(self) -> bool:
        """Return whether every rank of the generation has an accelerator to itself, which NCCL connects."""
        ...

    def next_generation(self, reason: str) -> Generation:
        """Leave the generation and return the next one."""
        ...

    def wanted(self) -> bool:
        """Return whether a change of membership is waiting for the end of the step."""
        ...

    def stopping(self) -> bool:
        """Return whether training is to end after the step."""
        ...

    def plan_adopted(self, plan: dict[str, Any]) -> None:
        """Report that all ranks have adopted a plan."""
        ...


class FixedMembership:
    """Process groups over a store, for ranks without a supervisor.

    Parameters
    ----------
    store : torch.distributed.Store or None
        None for a single rank.
    rank : int
    plan : Plan
    ranks : sequence of int
    timeout_s : float
        After which a peer that does not answer is an error.
    resume : bool
        Continue from the latest checkpoint.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        plan: Plan,
        ranks: Sequence[int],
        *,
        timeout_s: float = 60.0,
        resume: bool = False,
    ):
        self.store, self.rank = store, rank
        self.generation = Generation(number=0, plan=plan, ranks=tuple(ranks), resume=resume)
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[tuple[int, ...], str], PeerGroup] = {}

    def group(self, ranks: tuple[int, ...], name: str) -> PeerGroup:
        """Return the process group of some ranks; made by all of them at the first call."""
        key = (tuple(ranks), name)
        if key not in self._groups:
            assert self.store is not None
            prefix = f"g{self.generation.number}/{name}/{'-'.join(map(str, ranks))}"
            place, store = list(ranks).index(self.rank), dist.PrefixStore(prefix, self.store)
            with communicating():
                made = dist.ProcessGroupGloo(store, place, len(ranks), self._timeout)
            self._groups[key] = PeerGroup(made, ranks, place)
        return self._groups[key]

    def owns_devices(self) -> bool:
        """Return False: messages pass through host memory."""
        return False

    def next_generation(self, reason: str) -> Generation:
        """Raise: there is no next generation."""
        raise RuntimeError(f"the ranks of this run do not change: {reason}")

    def wanted(self) -> bool:
        """Return False: the membership never changes."""
        return False

    def stopping(self) -> bool:
        """Return False: nobody asks."""
        return False

    def plan_adopted(self, plan: dict[str, Any]) -> None:
        """Do nothing: no supervisor makes later generations from the plan."""
