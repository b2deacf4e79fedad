"""Any `spec.online.Policy` as a rule of the simulator: told events, ordering plans, as in the runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.control import orders
from foreshard.control.arena import Arena
from foreshard.control.controller import Controller
from foreshard.control.policies import Decision
from foreshard.control.slots import Budget, Structure
from foreshard.control.subsets import balanced_shares
from foreshard.sim.online import Happened, Seen
from foreshard.spec.online import DeviceSeen, Event, Policy, PriceChanged, RankLost, StepMeasured
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.scenario import Scenario


class Told:
    """Tells a policy what changed before a slot and what was measured in it, and follows its last plan.

    Losses and returns of devices are told when they happen; prices, and speeds of idle devices, when they are
    seen; a step with the seconds per sample of every device in use, the slowest transfer of the ring, and the
    costs. A plan that still names a device that is gone is a fault of the policy.
    """

    def __init__(self, arena: Arena, policy: Policy, plan: Plan, budgets: Sequence[Budget]):
        self.arena, self.policy, self.budgets = arena, policy, budgets
        self._there = np.ones(arena.work.num_devices, dtype=bool)
        self._price = arena.work.state.usd_per_h.copy()
        self._speed = np.ones(arena.work.num_devices)
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        self._structure: Structure = orders.structure_of(plan)
        self._shares = tuple(group.share for group in plan.groups)

    def _tell(self, event: Event) -> None:
        for command in self.policy.on(event):
            if command.plan is not None:
                self._follow(command.plan)

    def decide(self, seen: Seen) -> Decision:
        """Tell what changed; return the structure and the shares that are ordered."""
        path, work = self.arena.path, self.arena.work
        prices = work.state.usd_per_h * path.price[seen.condition]
        for rank in np.flatnonzero(prices != self._price).tolist():
            self._tell(PriceChanged(step=seen.slot, rank=rank, usd_per_h=float(prices[rank])))
        self._price = prices
        there = path.available[seen.pattern]
        # Returns first, so that a policy never has to do with fewer devices than there are.
        for rank in np.flatnonzero(there & ~self._there).tolist():
            self._tell(DeviceSeen(step=seen.slot, rank=rank))
        for rank in np.flatnonzero(~there & self._there).tolist():
            self._tell(RankLost(step=seen.slot, rank=rank, reason="taken away"))
        self._there = there
        speed = path.speed[seen.condition]
        idle = np.setdiff1d(np.flatnonzero(there & (speed != self._speed)), self._structure.workers)
        for rank in idle.tolist():
            self._tell(DeviceSeen(step=seen.slot, rank=rank, relative_speed=float(speed[rank])))
        self._speed = speed
        return self._structure, self._shares

    def learn(self, happened: Happened) -> None:
        """Tell what was measured."""
        state = self.arena.state(happened.condition, happened.pattern)
        stages, links = {}, {}
        for group in self._structure.groups:
            for worker, first, stop in zip(group.workers, group.cuts[:-1], group.cuts[1:], strict=True):
                nominal = self.arena.work.chain.before_s[worker]
                stages[worker] = float((nominal[stop] - nominal[first]) / state.speed[worker])
        ring = sorted(self._structure.workers)
        for u, v in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            if u != v:
                # One gibibyte each way, so that rates, not delays, are what is seen.
                size = 2.0**30
                links[u, v] = (size, size / float(state.bandwidth_bytes_per_s[u, v]))
        costs = {one.name: happened.costs[one.kind] for one in self.budgets}
        self._tell(
            StepMeasured(
                step=happened.slot, time_s=happened.time_s, stage_s=stages, link_s=links, costs=costs
            )
        )


def first_plan(arena: Arena, scenario: Scenario) -> Plan:
    """Return the plan that a run starts with: every device a replica, shares by stated speeds."""
    work = arena.work
    shares = balanced_shares(work.chain.before_s[:, -1], work.batch)
    groups = tuple(
        Group(
            share=int(share),
            stages=(Stage(ranks=(rank,), layers=((0, work.chain.num_layers),)),),
            micro_batch=work.micro_batch,
        )
        for rank, share in enumerate(shares)
    )
    return Plan(
        global_batch=work.batch, seq_len=scenario.seq_len or 1, groups=groups, precision=scenario.precision,
        optimizer=scenario.optimizer, framework=scenario.framework,
    )  # fmt: skip


def controller_rule(arena: Arena, budgets: Sequence[Budget], scenario: Scenario) -> Told:
    """Return the controller of the runtime, kept to data-parallel plans."""
    plan = first_plan(arena, scenario)
    controller = Controller(
        arena.work.chain, arena.work.state, plan, budgets=budgets, horizon=arena.path.num_slots,
        pause_s=arena.pause_s, max_stages=1, quiet_steps=0,
    )  # fmt: skip
    return Told(arena, controller, plan, budgets)
