"""What a trainer asks of its membership, and one that never changes: ranks that start and end together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from foreshard.runtime.membership.peer_group import PeerGroup, communicating
from foreshard.runtime.membership.progress import Progress
from foreshard.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Who trains, under which plan.

    The number rises with every change of membership. `ranks` are all that are there, also those the plan
    leaves idle, `pids` their processes, where a supervisor knows them. With `resume` they continue from the
    latest checkpoint.
    """

    number: int
    plan: Plan
    ranks: tuple[int, ...]
    resume: bool = False
    pids: dict[int, int] = field(default_factory=dict)


class GroupMembership(ABC):
    """The ranks that train together, as one of them sees them; as it stands they never change.

    `store` has keys and values that all ranks share; None for a single rank.
    """

    generation: Generation

    def __init__(self, rank: int, store: dist.Store | None, progress: Progress | None = None):
        self.rank, self.store, self.progress = rank, store, progress or Progress()
        self._groups: dict[tuple[tuple[int, ...], str], PeerGroup] = {}

    def group(self, ranks: tuple[int, ...], name: str) -> PeerGroup:
        """Return the process group of some ranks in this generation.

        All of them must ask, and in one order if they ask for several. When one of them leaves instead,
        PeerLost is raised.
        """
        key = (tuple(ranks), name)
        if key not in self._groups:
            assert self.store is not None
            prefix = f"g{self.generation.number}/{name}/{'-'.join(map(str, ranks))}"
            made = self._connect(dist.PrefixStore(prefix, self.store), ranks, name)
            self._groups[key] = PeerGroup(made, ranks, ranks.index(self.rank), self.progress)
        return self._groups[key]

    @abstractmethod
    def _connect(self, store: dist.Store, ranks: tuple[int, ...], name: str) -> Any:
        """Return a backend that connects some ranks."""

    def owns_devices(self) -> bool:
        """Return whether every rank of the generation has an accelerator to itself, which NCCL connects."""
        return False

    def next_generation(self, reason: str) -> Generation:
        """Leave the generation and return the next one."""
        raise RuntimeError(f"the ranks of this run do not change: {reason}")

    def wanted(self) -> bool:
        """Return whether a change of membership is waiting for the end of the step."""
        return False

    def stopping(self) -> bool:
        """Return whether the run is to end after the step, with a checkpoint."""
        return False

    def plan_adopted(self, plan: dict[str, Any]) -> None:  # noqa: B027 - nobody else has to know
        """Report that all ranks have adopted a plan: those of later generations are made from it."""


class FixedMembership(GroupMembership):
    """Process groups over a store, for ranks without a supervisor.

    Without a store there is a single rank. A peer that does not answer for `timeout_s` is an error. `resume`
    continues from the latest checkpoint.
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
        super().__init__(rank, store)
        self.generation = Generation(number=0, plan=plan, ranks=tuple(ranks), resume=resume)
        self._timeout = timedelta(seconds=timeout_s)

    def _connect(self, store: dist.Store, ranks: tuple[int, ...], name: str) -> Any:
        with communicating():
            return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), self._timeout)
