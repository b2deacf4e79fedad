"""The ranks of a generation as one of them sees them: statuses, plans and virtual clocks that all share."""

from __future__ import annotations

import json
from typing import Any

import torch

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.gradient_sync import latest
from foreshard.runtime.membership.fixed_membership import Generation, GroupMembership
from foreshard.runtime.membership.recovery import Status, parse_status
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan


class WorldGroup:
    """The process group of all ranks of a generation, in rising order; None for a single rank.

    The lowest rank leads: it speaks for all. Every call raises `PeerLost` when another rank is gone again.
    """

    def __init__(self, membership: GroupMembership, generation: Generation):
        self.number, self.rank, self._store = generation.number, membership.rank, membership.store
        self._progress = membership.progress
        self.ranks = tuple(sorted(generation.ranks))
        self.leads = self.rank == self.ranks[0]
        self.group: Any = membership.group(self.ranks, "world") if len(self.ranks) > 1 else None
        self._plans: dict[int, Plan] = {}
        self._adopted = 0

    def leave(self) -> None:
        """Let go of the group of all ranks."""
        self.group = None

    def statuses(self, mine: Status) -> dict[int, Status]:
        """Return the status of every rank."""
        if self.group is None:
            return {self.rank: mine}
        self._set(f"status/{self.rank}", mine.to_json())
        return {rank: parse_status(self._get(f"status/{rank}")) for rank in self.ranks}

    def any(self, mine: bool) -> bool:
        """Return whether it holds for any rank."""
        flag = torch.tensor([float(mine)])
        if self.group is not None:
            self.group.allreduce([flag]).wait()
        return bool(flag[0] > 0)

    def of_leader(self, value: float) -> float:
        """Return the leader's value, on every rank."""
        given = torch.tensor([value if self.leads else 0.0], dtype=torch.float64)
        if self.group is not None:
            self.group.allreduce([given]).wait()
        return float(given[0])

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)

    def advance(self, clock: Clock) -> None:
        """Bring virtual clocks to the latest: no rank begins a step before the vote of all."""
        if clock.virtual and self.group is not None:
            now = torch.tensor([clock.now()], dtype=torch.float64)
            latest(self.group, now)
            clock.advance_to(float(now[0]) + clock.all_reduce_s(0, self.ranks))

    # -- plans that the leader has announced, until the vote that makes all ranks adopt them ----------------

    @property
    def newest_plan(self) -> int:
        """Number of the plan that this rank proposes in the vote; 0 for none."""
        return max(self._plans, default=0) if self.leads else 0

    def is_new_plan(self, number: int) -> bool:
        """Return whether the plan of a number has not been adopted yet."""
        return number > self._adopted

    def announce_plan(self, plan: Plan) -> int:
        """Publish a plan for all ranks, and return its number."""
        number = max([self._adopted, *self._plans]) + 1
        self._plans[number] = plan
        self._set(f"plan/{number}", json.dumps(plan.to_dict()))
        return number

    def take_plan(self, number: int) -> Plan:
        """Return the plan of a number, to be adopted now."""
        plan = self._plans.pop(number, None)
        if plan is None:
            plan = parse_plan(json.loads(self._get(f"plan/{number}")))
        self._adopted = number
        return plan

    def _set(self, key: str, text: str) -> None:
        if self._store is not None:
            with self._progress.waiting():  # the rendezvous may be slow to answer, or be restarted
                self._store.set(f"g{self.number}/{key}", text)

    def _get(self, key: str) -> bytes:
        assert self._store is not None
        with self._progress.waiting(tuple(rank for rank in self.ranks if rank != self.rank)):
            return bytes(self._store.get(f"g{self.number}/{key}"))
