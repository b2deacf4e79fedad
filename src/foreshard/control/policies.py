"""Policies beside the controller: shares by the speeds last measured, and the greedy plan.

A new policy goes here. They receive the controller's events and order plans as it does. A budget of money
they keep by renting no more than it allows at any time, at stated prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foreshard.control import orders
from foreshard.control.budgets.queues import Queues
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.slot_search import solve_slot
from foreshard.control.search.subsets import balanced_shares, data_parallel
from foreshard.control.slots import Budget, Chain, Choice, State, Structure
from foreshard.errors import InfeasibleError, SpecError
from foreshard.spec.online import Command, DeviceSeen, Event, RankLost, StepMeasured, Together
from foreshard.spec.plan import Plan

_MOST_RANKS = 12
"""Ranks up to which all subsets within a budget are compared (4,096); of more the best value is rented."""
_LEAST_MOVING = 0.01
"""Part of a transfer that counts as bytes on the move at least, whatever the stated latency."""


def replicas_by_speed(
    chain: Chain, workers: Sequence[int], sample_s: np.ndarray, batch: int
) -> tuple[Structure, tuple[int, ...]]:
    """Return a replica on every worker, with the shares by which all end together; who gets none is left out.

    Parameters
    ----------
    chain : Chain
    workers : sequence of int
    sample_s : ndarray, shape (W,), seconds per sample
        Of all layers on every worker of the chain.
    batch : int, samples

    Source
    ------
    Chen, Weng, Wang, Li, Li 2018 (LB-BSP, arXiv 1806.02508): shares in proportion to speed.
    """
    shares = balanced_shares(sample_s[list(workers)], batch)
    used = [(worker, int(share)) for worker, share in zip(workers, shares, strict=True) if share]
    return data_parallel([worker for worker, _ in used], chain), tuple(share for _, share in used)


class LastMeasured:
    """Estimates without memory: the cluster is as it was last measured."""

    def __init__(self, stated: State):
        self._stated = stated
        self.speed, self._rate = stated.speed.copy(), stated.bandwidth_bytes_per_s.copy()
        self.available = np.array(stated.available, bool)

    def see(self, event: Event) -> None:
        """Take a fact in."""
        if isinstance(event, RankLost | DeviceSeen):
            self.available[event.rank] = isinstance(event, DeviceSeen)
        if isinstance(event, DeviceSeen) and event.relative_speed is not None:
            self.speed[event.rank] = event.relative_speed
        if not isinstance(event, StepMeasured):
            return
        for rank, relative in event.relative_speed.items():
            self.speed[rank] = relative
        for (source, target), (size, seconds) in event.link_s.items():
            moving = max(seconds - float(self._stated.latency_s[source, target]), _LEAST_MOVING * seconds)
            self._rate[source, target] = size / moving

    def state(self, ranks: Sequence[int] | None = None) -> State:
        """Return the cluster, with no other ranks than these if they are given."""
        available = self.available
        if ranks is not None:
            available = np.zeros_like(available)
            available[list(ranks)] = True
        return replace(self._stated, speed=self.speed, bandwidth_bytes_per_s=self._rate, available=available)


class BaselinePolicy:
    """Takes events and orders the plan that `decide` finds best for what was last measured.

    Parameters
    ----------
    chain : Chain
    stated : State
    plan : Plan
    budgets : sequence of Budget
        Of money per hour only.
    max_stages : int
    """

    def __init__(
        self, chain: Chain, stated: State, plan: Plan, *, budgets: Sequence[Budget] = (), max_stages: int = 4
    ):
        for budget in budgets:
            if budget.kind != "usd" or budget.per != "hour":
                raise SpecError(
                    f"a policy that does not know {budget.name}",
                    key="--budget",
                    value=budget.name,
                    rule="Only --policy lyapunov keeps budgets other than usd_per_h",
                )
        self.chain, self.stated, self.plan, self.max_stages = chain, stated, plan, max_stages
        self.queues = Queues(budgets, weight=1.0, step_s=1.0)
        self.step, self.reconfigurations, self.reshares = -1, 0, 0
        self.estimates = LastMeasured(stated)
        self._batch, self._micro_batch = plan.global_batch, plan.groups[0].micro_batch
        self.choice = Choice(
            structure=orders.structure_of(plan),
            shares=tuple(group.share for group in plan.groups),
            time_s=0.0,
            costs={},
        )

    def on(self, event: Event) -> Sequence[Command]:
        """Take a fact in; return the command for the next step boundary."""
        self.step = max(self.step, event.step)
        for fact in event.events if isinstance(event, Together) else (event,):
            self.estimates.see(fact)
            if isinstance(fact, StepMeasured):
                costs = {budget.name: fact.costs[budget.name] for budget in self.queues.budgets}
                self.queues.record(fact.time_s, costs, max(fact.steps, 1))
        return self._decided()

    def _decided(self) -> Sequence[Command]:
        try:
            choice = self.decide(self._allowed())
        except InfeasibleError as error:
            return (Command(kind="keep", reason=f"no plan: {error}"),)
        kind = orders.change_of(self.choice, choice)
        self.choice = choice
        if kind == "keep":
            return (Command(kind=kind),)
        self.reshares += kind == "re-share"
        self.reconfigurations += kind != "re-share"
        self.plan = orders.plan_of(self.plan, choice, micro_batch=self._micro_batch)
        return (Command(kind=kind, plan=self.plan, reason="by what was last measured"),)

    def _allowed(self) -> list[tuple[int, ...]]:
        """Return the sets of ranks that may be rented at once, none part of another."""
        there = tuple(int(rank) for rank in np.flatnonzero(self.estimates.available))
        limit = min([budget.limit for budget in self.queues.budgets], default=np.inf)
        price = self.stated.usd_per_h
        if price[list(there)].sum() <= limit:
            return [there]
        if len(there) > _MOST_RANKS:
            value = sorted(there, key=lambda rank: price[rank] / self.stated.speed[rank])
            paid = np.cumsum(price[value]) <= limit
            return [tuple(sorted(itertools.compress(value, paid)))]
        found: list[tuple[int, ...]] = []
        for count in range(len(there), 0, -1):
            for chosen in itertools.combinations(there, count):
                if price[list(chosen)].sum() <= limit and not any(
                    set(chosen) < set(other) for other in found
                ):
                    found.append(chosen)
        return found

    def decide(self, allowed: Sequence[tuple[int, ...]]) -> Choice:
        """Return what to run.

        Raises
        ------
        InfeasibleError
            When none of the sets of ranks can run the model.
        """
        raise NotImplementedError


class LbBsp(BaselinePolicy):
    """LB-BSP: a replica on every rank, shares by the speeds last seen as the forecast."""

    def decide(self, allowed: Sequence[tuple[int, ...]]) -> Choice:
        """Return replicas on the ranks that are fastest together by what is stated."""
        if not any(allowed):
            raise InfeasibleError("no rank is within the budget", rule="A run needs a rank")
        whole = self.chain.before_s[:, -1]
        ranks = max(allowed, key=lambda ranks: (self.stated.speed[list(ranks)] / whole[list(ranks)]).sum())
        structure, shares = replicas_by_speed(self.chain, ranks, whole / self.estimates.speed, self._batch)
        return Choice(structure=structure, shares=shares, time_s=0.0, costs={})


class GreedyReplanning(BaselinePolicy):
    """The fastest plan for what was last seen, at once, whatever the change costs."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self._cache = SearchCache()

    def decide(self, allowed: Sequence[tuple[int, ...]]) -> Choice:
        """Return the fastest of the best plans on each set of ranks."""
        choices = [
            solve_slot(
                self.chain,
                self.estimates.state(ranks),
                batch=self._batch,
                micro_batch=self._micro_batch,
                time_weight=1.0,
                max_stages=self.max_stages,
                cache=self._cache,
            )
            for ranks in allowed
            if ranks
        ]
        if not choices:
            raise InfeasibleError("no rank is within the budget", rule="A run needs a rank")
        return min(choices, key=lambda choice: choice.time_s)


BASELINE_POLICIES: dict[str, type[BaselinePolicy]] = {"lb-bsp": LbBsp, "greedy": GreedyReplanning}
