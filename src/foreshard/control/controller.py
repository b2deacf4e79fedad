"""The controller: facts in, commands out, no clock and no files of its own.

Every step: estimates take in what was measured, queues what was spent; a slot is solved for the state as it
seems to be; shares follow at once, layers and groups when what staying has cost is worth the change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from foreshard.control import journal, orders
from foreshard.control.estimates import Estimates
from foreshard.control.grouping import change_s, reshare, solve_slot, worth_of
from foreshard.control.landscape import Memo
from foreshard.control.queues import Queues
from foreshard.control.slots import Budget, Chain, Choice, State, Structure
from foreshard.control.tuning import Tuner
from foreshard.errors import InfeasibleError, SpecError
from foreshard.spec.online import Command, DeviceSeen, Event, PriceChanged, RankLost, StepMeasured
from foreshard.spec.plan import Plan

_DEAD_ZONE = 0.02
"""Part of a slot's worth below which a better structure is not better: estimates are no finer."""
_LONGEST_DWELL = 20.0
_CHECK_EVERY = 25


class Controller:
    """Keeps the plan best and the budgets kept while speeds, links, prices and ranks change.

    Parameters
    ----------
    chain : Chain
        Layers of the plan, ranks as workers.
    stated : State
        The cluster before anything is measured.
    plan : Plan
        That runs: pipelines of one rank per stage.
    budgets : sequence of Budget
    weight : float or None
        V; None finds it for `violation` over `horizon`.
    violation : float
        Wanted excess of mean cost over budget after `horizon` steps.
    horizon : int, steps
    pause_s : float
        What every change of layers or groups costs besides what moves.
    max_stages : int
        Longest pipeline.
    quiet_steps : int
        Without any change seen, layers and groups stay at least so long.
    log : text stream, optional
        Gets every event and command as a line; `journal.replay` reads it.
    """

    def __init__(
        self,
        chain: Chain,
        stated: State,
        plan: Plan,
        *,
        budgets: Sequence[Budget] = (),
        weight: float | None = None,
        violation: float = 0.01,
        horizon: int = 10_000,
        pause_s: float = 0.0,
        max_stages: int = 4,
        quiet_steps: int = 200,
        log: TextIO | None = None,
    ):
        self.chain, self.plan, self._log = chain, plan, log
        self._memo, self._max_stages, self._pause_s = Memo(), max_stages, pause_s
        self._batch, self._micro_batch = plan.global_batch, plan.groups[0].micro_batch
        self.estimates = Estimates(stated)
        self.choice = self._running(orders.structure_of(plan), plan, stated)
        self.tuner = None if weight is not None else Tuner(violation=violation, horizon=horizon)
        fastest = solve_slot(chain, stated, time_weight=1.0, memo=self._memo, **self._asked())
        self.queues = Queues(budgets, weight=1.0 if weight is None else weight, step_s=fastest.time_s)
        self.step, self.regret, self.quiet_steps = -1, 0.0, quiet_steps
        self.counts = dict.fromkeys(orders.KINDS, 0)
        self.ignored = 0
        self._changed_at, self._seen_change = -quiet_steps, True
        self._told = ""

    def _asked(self) -> dict[str, Any]:
        return {"batch": self._batch, "micro_batch": self._micro_batch, "max_stages": self._max_stages}

    def _running(self, structure: Structure, plan: Plan, state: State) -> Choice:
        if max(structure.workers) >= self.chain.num_workers:
            raise SpecError(
                f"rank {max(structure.workers)} of {self.chain.num_workers}", key="plan",
                rule="Ranks of the plan are workers of the chain",
            )  # fmt: skip
        if structure.groups[0].cuts[-1] != self.chain.num_layers:
            raise SpecError(
                f"a plan of {structure.groups[0].cuts[-1]} layers", key="plan",
                rule=f"The chain has {self.chain.num_layers}",
            )  # fmt: skip
        made = reshare(
            self.chain, state, structure, batch=self._batch, micro_batch=self._micro_batch, time_weight=1.0
        )
        return Choice(
            structure=structure, shares=tuple(group.share for group in plan.groups), time_s=made.time_s,
            costs=made.costs,
        )  # fmt: skip

    def on(self, event: Event) -> Sequence[Command]:
        """Take a fact in; return the command for the next step boundary."""
        if self._log is not None:
            self._log.write(journal.event_line(event) + "\n")
        commands = self._decided(event)
        if self._log is not None:
            for command in commands:
                self._log.write(journal.command_line(command) + "\n")
        return commands

    def _decided(self, event: Event) -> Sequence[Command]:
        if event.step < self.step and isinstance(event, StepMeasured):
            self.ignored += 1
            return (Command(kind="keep", reason=f"step {event.step} came after step {self.step}: ignored"),)
        self.step = max(self.step, event.step)
        if isinstance(event, StepMeasured):
            self._measured(event)
            return self._decide(urgent=False)
        if not 0 <= event.rank < self.chain.num_workers:
            self.ignored += 1
            return (Command(kind="keep", reason=f"rank {event.rank} is unknown: ignored"),)
        self._seen_change = True
        if isinstance(event, PriceChanged):
            if 0.0 <= event.usd_per_h < math.inf:
                self.estimates.usd_per_h[event.rank] = event.usd_per_h
            return (Command(kind="keep", reason=f"rank {event.rank} costs {event.usd_per_h:g} $/h"),)
        if isinstance(event, RankLost):
            self.estimates.available[event.rank] = False
            return self._decide(urgent=event.rank in self.choice.structure.workers)
        assert isinstance(event, DeviceSeen)
        self.estimates.available[event.rank] = True
        if event.relative_speed is not None:
            self.estimates.speed[event.rank].set(event.relative_speed)
        running = set(self.choice.structure.workers)
        return self._decide(urgent=not all(self.estimates.available[list(running)]))

    def _measured(self, event: StepMeasured) -> None:
        """Take in speeds, rates, seconds and costs; what is no number is replaced by what was expected."""
        state = self.estimates.state()
        expected = reshare(
            self.chain, state, self.choice.structure, batch=self._batch, micro_batch=self._micro_batch,
            time_weight=1.0, memo=self._memo,
        )  # fmt: skip
        took = event.time_s
        if not 0.0 < took < math.inf:
            self.ignored += 1
            took = expected.time_s if math.isfinite(expected.time_s) else self.queues.step_s
        changed = False
        nominal = self._nominal_s()
        for rank, seconds in sorted(event.stage_s.items()):
            if rank in nominal and 0.0 < seconds < math.inf:
                changed |= self.estimates.see_speed(rank, nominal[rank] / seconds)
            elif rank in nominal:
                self.estimates.speed[rank].refused += 1
        changed |= self.estimates.see_links(event.link_s)
        self._seen_change |= changed
        costs = {}
        for budget in self.queues.budgets:
            cost = event.costs.get(budget.name, math.nan)
            if not 0.0 <= cost < math.inf:
                self.ignored += 1
                cost = (
                    expected.costs[budget.key] * took / expected.time_s if expected.time_s < math.inf else 0.0
                )
            costs[budget.name] = cost
        self.queues.record(took, costs)
        if self.tuner is not None and self.queues.budgets:
            self.queues.weight = self.tuner.observe(max(self.queues.backlog.values()))

    def _nominal_s(self) -> dict[int, float]:
        """Return the seconds per sample of each rank's layers at nominal speed."""
        found = {}
        for group in self.choice.structure.groups:
            for worker, first, stop in zip(group.workers, group.cuts[:-1], group.cuts[1:], strict=True):
                found[worker] = float(self.chain.before_s[worker, stop] - self.chain.before_s[worker, first])
        return found

    def _decide(self, *, urgent: bool) -> Sequence[Command]:
        state = self.estimates.state()
        time_weight, cost_weights = self.queues.weights()
        asked: dict[str, Any] = {
            "batch": self._batch, "micro_batch": self._micro_batch, "time_weight": time_weight,
            "cost_weights": cost_weights, "budgets": self.queues.budgets, "memo": self._memo,
        }  # fmt: skip
        try:
            best = solve_slot(
                self.chain, state, running=self.choice, max_stages=self._max_stages,
                change_weight=max(time_weight, 0.0) / self._dwell(), **asked,
            )  # fmt: skip
        except InfeasibleError as error:
            return (Command(kind="keep", reason=f"no plan: {error}"),)
        stay = reshare(self.chain, state, self.choice.structure, **asked)
        worth = [worth_of(one, time_weight, cost_weights, self.queues.budgets) for one in (stay, best)]
        if urgent or not math.isfinite(worth[0]):
            return self._change(best, state, "the running plan has lost a rank")
        gain = worth[0] - worth[1]
        if best.structure == stay.structure or gain <= _DEAD_ZONE * abs(worth[0]):
            self.regret = 0.0
            return self._follow(stay, state)
        self.regret += gain
        price_s = self._pause_s + change_s(self.chain, state, stay.structure, best.structure)
        due = self.regret >= max(time_weight, 0.0) * price_s / self._dwell()
        if due and (self._seen_change or self.step - self._changed_at >= self.quiet_steps):
            return self._change(best, state, f"staying is worse by {gain / abs(worth[0]):.1%} of a step")
        return self._follow(stay, state)

    def _dwell(self) -> float:
        return min(max(self.estimates.dwell_steps, 1.0), _LONGEST_DWELL)

    def _follow(self, stay: Choice, state: State) -> Sequence[Command]:
        """Keep the structure; let shares follow."""
        kind = orders.change_of(self.choice, stay)
        reason = self._warning(state)
        self.choice = stay
        self.counts[kind] += 1
        if kind == "keep":
            return (Command(kind="keep", reason=reason),)
        self.plan = orders.plan_of(self.plan, stay, micro_batch=self._micro_batch)
        return (Command(kind=kind, plan=self.plan, reason=reason or "shares follow the speeds"),)

    def _change(self, best: Choice, state: State, why: str) -> Sequence[Command]:
        kind = orders.change_of(self.choice, best)
        warning = self._warning(state)
        if kind not in ("keep", "re-share"):
            self._changed_at, self._seen_change, self.regret = self.step, False, 0.0
        self.choice = best
        self.counts[kind] += 1
        self.plan = orders.plan_of(self.plan, best, micro_batch=self._micro_batch)
        reason = f"{why}; {warning}" if warning else why
        return (Command(kind=kind, plan=None if kind == "keep" else self.plan, reason=reason),)

    def _warning(self, state: State) -> str:
        """Return which budget cannot be kept as things are, looked at now and then while it is exceeded."""
        if self.queues.steps % _CHECK_EVERY == 0:
            self._told = ""
            for budget in self.queues.budgets:
                if self.queues[budget.name].violation > 0.0 and self.queues[budget.name].backlog > 1.0:
                    self._told = self._told or self._cannot(budget, state)
        return self._told

    def _cannot(self, budget: Budget, state: State) -> str:
        time_weight = 0.0
        if budget.per != "step":
            time_weight = -budget.allowance(1.0)
        cheapest = solve_slot(
            self.chain, state, time_weight=time_weight, cost_weights={budget.name: 1.0}, budgets=(budget,),
            memo=self._memo, start=self.choice, **self._asked(),
        )  # fmt: skip
        least, allowed = cheapest.costs[budget.key], budget.allowance(cheapest.time_s)
        if least <= allowed:
            return ""
        return f"budget {budget.name!r} cannot be kept: the cheapest plan costs {least:.4g} of {allowed:.4g}"

    @property
    def reconfigurations(self) -> int:
        """Return how often layers, order or groups changed."""
        return sum(self.counts[kind] for kind in ("re-cut", "regroup", "idle", "activate"))

    def check_invariants(self) -> None:
        """Raise AssertionError where what must always hold does not."""
        structure, plan = self.choice.structure, self.plan
        workers = structure.workers
        assert len(set(workers)) == len(workers), "a rank is in two places"
        assert sum(self.choice.shares) == self._batch and min(self.choice.shares) > 0, "samples are lost"
        for group in structure.groups:
            assert group.cuts[0] == 0 and group.cuts[-1] == self.chain.num_layers, "layers are missing"
            assert all(np.diff(group.cuts) > 0), "a stage without layers"
        assert orders.structure_of(plan) == structure, "the plan is not the choice"
        assert tuple(group.share for group in plan.groups) == self.choice.shares, "shares differ"
        assert self.queues.identity_error() <= 1e-9, "the books do not close"
        assert all(backlog >= 0.0 for backlog in self.queues.backlog.values()), "a negative backlog"
