"""Several pipelines with stages of several ranks: samples inside stages follow the speeds, all else stays.

The micro-batches of a stage are split anew when the slowest of its ranks would gain by it. Layers and groups
are those of the run's plan; the part of a lost rank goes to the others until it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreshard.control.budgets.queues import Queues
from foreshard.control.estimation.estimates import Estimates
from foreshard.control.search.joint_stage import fastest_split
from foreshard.control.search.shares import counted, whole_shares
from foreshard.control.slots import Chain, State
from foreshard.errors import InfeasibleError
from foreshard.runtime.membership.plan_repair import repaired
from foreshard.spec.online import Command, DeviceSeen, Event, RankLost, StepMeasured
from foreshard.spec.plan import Plan, Stage

_DEAD_ZONE = 0.02
"""Part of a stage's time below which other shares are not better: estimates are no finer."""


class StageBalancer:
    """Splits micro-batches over the ranks of each stage; ranks are the workers of the chain."""

    def __init__(self, chain: Chain, stated: State, plan: Plan):
        self.chain, self.plan, self._first = chain, plan, plan
        self.estimates, self.queues = Estimates(stated), Queues((), weight=1.0, step_s=1.0)
        self.step, self.reconfigurations, self.reshares = -1, 0, 0
        self._there = frozenset(plan.ranks)

    def on(self, event: Event) -> Sequence[Command]:
        """Take a fact in; return the command for the next step boundary."""
        self.step = max(self.step, event.step)
        before = self.plan
        if isinstance(event, RankLost | DeviceSeen):
            there, one = self._there, {event.rank}
            self._there = there | one if isinstance(event, DeviceSeen) else there - one
            try:
                self.plan = repaired(self._first, self._there)
            except InfeasibleError as error:
                return (Command(kind="keep", reason=str(error)),)
        if isinstance(event, StepMeasured):
            self.queues.record(max(event.time_s, 0.0), {})
            for rank, relative in event.relative_speed.items():
                self.estimates.see_speed(rank, relative)
        groups = [
            replace(group, stages=tuple(self._stage(stage, group.micro_batch) for stage in group.stages))
            for group in self.plan.groups
        ]
        self.plan = replace(self.plan, groups=tuple(groups))
        if self.plan == before:
            return (Command(kind="keep"),)
        regrouped = self.plan.ranks != before.ranks
        self.reconfigurations += regrouped
        self.reshares += not regrouped
        kind = "regroup" if regrouped else "re-share"
        return (Command(kind=kind, plan=self.plan, reason="samples inside stages follow the speeds"),)

    def _nominal_s(self, rank: int, stage: Stage) -> float:
        return sum(
            float(self.chain.before_s[rank, hi] - self.chain.before_s[rank, lo]) for lo, hi in stage.layers
        )

    def _stage(self, stage: Stage, micro_batch: int) -> Stage:
        """Return a stage with the shares that its slowest rank ends soonest with, if they are worth it."""
        if len(stage.ranks) == 1:
            return stage
        speed = self.estimates.state().speed
        rate = np.array([self._nominal_s(rank, stage) / float(speed[rank]) for rank in stage.ranks])
        if micro_batch < len(rate):
            best = whole_shares(np.zeros(len(rate)), rate, micro_batch, 1).shares
        else:  # without a sample nobody is measured
            best = fastest_split(rate, micro_batch)
        now = np.array(stage.rank_shares or (micro_batch / len(rate),) * len(rate), float)
        if (rate * best).max() >= (1.0 - _DEAD_ZONE) * (rate * now).max():
            return stage
        return replace(stage, rank_shares=counted(best))
