"""Any `spec.online.Policy` as a rule of the simulator: it receives events and orders plans, as in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreshard.control import orders
from foreshard.control.controller import Controller
from foreshard.control.search.slot_search import solve_slot
from foreshard.control.search.subsets import SubsetClasses, balanced_shares
from foreshard.control.slots import DP_OVER_MP, J_PER_KWH, MP_OVER_DP, Budget, Structure
from foreshard.simulate.environment import Environment
from foreshard.simulate.reference_policies import Decision
from foreshard.simulate.slot_loop import Observation, SlotOutcome
from foreshard.spec.online import (
    CarbonChanged,
    DeviceSeen,
    Event,
    Fact,
    LinkSeen,
    Policy,
    PriceChanged,
    RankLost,
    StepMeasured,
    Together,
)
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.scenario import Scenario

MOST_STAGES = 4
"""Stages of a pipeline in scenarios: those of the controller's default."""

FIRST_EXCESS = 0.05
"""Part of a run's budget that its first batch may exceed its own by: what the controller works off."""


class PolicyAdapter:
    """Gives a policy the events before a slot and the measurements in it, and follows its last plan.

    Losses and returns of devices are events when they happen; prices, and speeds of idle devices, when they
    are seen; a measured step has the relative speed of every device in use, a transfer over each link between
    racks, and the costs. With `sees_now` speeds and rates are events before the step instead. A plan that
    still names a device that is gone is a fault of the policy.
    """

    def __init__(
        self,
        environment: Environment,
        policy: Policy,
        plan: Plan,
        budgets: Sequence[Budget],
        *,
        sees_now: bool = False,
        reading: str = DP_OVER_MP,
    ):
        self.environment, self.policy, self.budgets, self._sees_now = environment, policy, budgets, sees_now
        self._reading = reading
        self._there = np.ones(environment.work.num_devices, dtype=bool)
        self._price = environment.work.state.usd_per_h.copy()
        self._carbon = environment.work.state.kg_per_j.copy()
        self._told = np.ones(environment.work.num_devices)
        self._batches = 0
        self._probed = _probed(environment)
        self._rate: dict[tuple[int, int], float] = {}
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        self._structure: Structure = orders.structure_of(plan, self._reading)
        self._shares = orders.shares_of(plan, self._reading)

    def _tell(self, event: Event) -> None:
        for command in self.policy.on(event):
            if command.plan is not None:
                self._follow(command.plan)

    def decide(self, seen: Observation) -> Decision:
        """Tell what changed; return the structure and the shares that are ordered."""
        path, work = self.environment.path, self.environment.work
        facts: list[Fact] = []
        step = self._batches
        prices = work.state.usd_per_h * path.price[seen.condition]
        for rank in np.flatnonzero(prices != self._price).tolist():
            facts.append(PriceChanged(step=step, rank=rank, usd_per_h=float(prices[rank])))
        self._price = prices
        carbon = work.state.kg_per_j * path.carbon[seen.condition]
        for rank in np.flatnonzero(carbon != self._carbon).tolist():
            facts.append(CarbonChanged(step=step, rank=rank, kg_per_kwh=float(carbon[rank]) * J_PER_KWH))
        self._carbon = carbon
        there, speed = path.available[seen.pattern], path.speed[seen.condition]
        used = list(self._structure.workers)
        for rank in np.flatnonzero(~there & self._there).tolist():
            facts.append(RankLost(step=step, rank=rank, reason="taken away"))
        fresh = there & ~self._there
        # One value measured in use is not believed yet: out of use a device is told anew.
        moved = there & (speed != self._told)
        if not self._sees_now:
            self._told[used], moved[used] = np.nan, False
        for rank in np.flatnonzero(fresh | moved).tolist():
            facts.append(DeviceSeen(step=step, rank=rank, relative_speed=float(speed[rank])))
            self._told[rank] = speed[rank]
        self._there = there
        if self._sees_now:
            rate = self.environment.state(seen.condition, seen.pattern).bandwidth_bytes_per_s
            links = [pair for pair in self._probed if self._rate.get(pair) != rate[pair]]
            self._rate |= {pair: float(rate[pair]) for pair in links}
            facts += [
                LinkSeen(step=step, source=u, target=v, bytes_per_s=float(rate[u, v])) for u, v in links
            ]
        if facts:
            self._tell(Together(step=step, events=tuple(facts)))
        return self._structure, self._shares

    def learn(self, happened: SlotOutcome) -> None:
        """Tell what was measured."""
        state = self.environment.state(happened.condition, happened.pattern)
        links = {}
        for u, v in self._probed:
            # A gibibyte: the rate, not the delay, is what is seen.
            size = 2.0**30
            links[u, v] = (
                size,
                size / float(state.bandwidth_bytes_per_s[u, v]) + float(state.latency_s[u, v]),
            )
        costs = {budget.name: happened.costs[budget.key] for budget in self.budgets}
        self._batches += happened.batches
        self._tell(
            StepMeasured(
                step=self._batches - 1,
                time_s=happened.time_s,
                relative_speed={worker: float(state.speed[worker]) for worker in self._structure.workers},
                link_s=links,
                costs=costs,
                steps=happened.batches,
            )
        )


def _probed(environment: Environment) -> tuple[tuple[int, int], ...]:
    """Return a pair of devices at the ends of every link between racks."""
    link_of = environment.work.link_of
    return tuple(tuple(np.argwhere(link_of == k)[0].tolist()) for k in range(environment.path.link.shape[1]))  # type: ignore[return-value]


def first_plan(environment: Environment, scenario: Scenario, budgets: Sequence[Budget] = ()) -> Plan:
    """Return the plan that a run starts with, by stated speeds, prices and rates.

    Replicas on the fastest devices whose batch leaves the run's budgets whole, but for `FIRST_EXCESS`; or on
    those that exceed them least. What runs is measured, so that a dear start tells more than a cheap one.
    """
    work = environment.work
    subsets = SubsetClasses.of(
        work.chain, work.state, work.batch, micro_batch=work.micro_batch, apart=environment.apart
    )
    over = subsets.over(budgets, np.zeros(len(budgets)))
    kept = over <= FIRST_EXCESS * environment.path.num_slots * scenario.batches
    chosen = np.argmin(np.where(kept, subsets.time_s, np.inf) if kept.any() else over)
    ranks = np.array(subsets.devices(int(chosen)))
    shares = balanced_shares(work.chain.before_s[ranks, -1], work.batch)
    groups = tuple(
        Group(
            share=int(share),
            stages=(Stage(ranks=(rank,), layers=((0, work.chain.num_layers),)),),
            micro_batch=work.micro_batch,
        )
        for rank, share in zip(ranks.tolist(), shares, strict=True)
        if share
    )
    return Plan(
        global_batch=work.batch,
        seq_len=scenario.seq_len or 1,
        groups=groups,
        precision=scenario.precision,
        optimizer=scenario.optimizer,
        framework=scenario.framework,
    )


def staged_plan(environment: Environment, scenario: Scenario, reading: str) -> Plan:
    """Return the fastest plan of a reading by stated speeds.

    Raises
    ------
    InfeasibleError
        When no stages hold the model.
    """
    work = environment.work
    choice = solve_slot(
        work.chain,
        work.state,
        batch=work.batch,
        micro_batch=work.micro_batch,
        time_weight=1.0,
        reading=reading,
        max_stages=MOST_STAGES,
    )
    return orders.plan_of(
        first_plan(environment, scenario), choice, batch=work.batch, micro_batch=work.micro_batch
    )


def controller_rule(
    environment: Environment,
    budgets: Sequence[Budget],
    scenario: Scenario,
    *,
    reading: str = DP_OVER_MP,
    max_stages: int = 1,
    **asked: Any,
) -> PolicyAdapter:
    """Return the controller of the runtime on data-parallel plans, pipelines or stages; more is its own."""
    max_stages = MOST_STAGES if reading == MP_OVER_DP else max_stages
    is_cut = max_stages > 1
    plan = (
        staged_plan(environment, scenario, reading) if is_cut else first_plan(environment, scenario, budgets)
    )
    controller = Controller(
        environment.work.chain,
        environment.work.state,
        plan,
        budgets=budgets,
        horizon=environment.path.num_slots * scenario.batches,
        pause_s=environment.pause_s,
        max_stages=max_stages,
        reading=reading,
        **asked,
    )
    return PolicyAdapter(environment, controller, plan, budgets, sees_now=scenario.sees_now, reading=reading)
