"""The controller: facts in, commands out, no clock and no files of its own.

Every step: estimates take in what was measured, queues what was spent; a slot is solved for the state as it
seems to be; shares follow at once, layers and groups when what staying has cost is worth the change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from foreshard.control import journal, orders
from foreshard.control.budgets.dual import allowances
from foreshard.control.budgets.dual_learning import DualLearning, weight_for
from foreshard.control.budgets.end_of_horizon import EndOfHorizon, Partner
from foreshard.control.budgets.objective import reshare, worth_of
from foreshard.control.budgets.queues import Queues
from foreshard.control.estimation.cooldown import Cooldown
from foreshard.control.estimation.cost_correction import CostCorrection
from foreshard.control.estimation.estimates import Estimates
from foreshard.control.estimation.plausibility import MOST_KG_PER_KWH, MOST_USD_PER_H, is_cost, is_time
from foreshard.control.moves import move, move_costs
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.shortlist import Shortlist, Timed
from foreshard.control.search.slot_search import Compared, slots_of
from foreshard.control.slots import J_PER_KWH, MP_OVER_DP, Budget, Chain, Choice, State, Structure
from foreshard.errors import InfeasibleError, SpecError
from foreshard.spec.online import (
    CarbonChanged,
    Command,
    DeviceSeen,
    Event,
    LinkSeen,
    PriceChanged,
    StepMeasured,
    Together,
)
from foreshard.spec.plan import Plan

_DEAD_ZONE = 0.02
"""Part of a slot's worth below which a better structure is not better: estimates are no finer."""
_SAME_SHARES = 0.005
"""Part of a step that new shares must gain."""
_LONGEST_DWELL = 20.0
_LEAST_DWELLS = 10.0
"""V in such dwells: a structure that stays for one moves what a budget is worth by no more than a part."""
_CHECK_EVERY = 25
_NEAR = 5
"""Quiet times before the end of a run from which on it is looked for what spends the rest of the budgets."""


class Controller:
    """Keeps the plan best and the budgets kept while speeds, links, prices and ranks change.

    Parameters
    ----------
    chain : Chain
        Layers of the plan, ranks as workers.
    stated : State
        The cluster before anything is measured.
    plan : Plan
        That runs: pipelines of one rank per stage, or one pipeline with stages of several.
    budgets : sequence of Budget
    weight : float or None
        V; None takes it from `violation` and `horizon`.
    violation : float
        Wanted excess of mean cost over budget after `horizon` steps.
    horizon : int, steps
    pause_s : float
        What every change of layers or groups costs besides what moves.
    max_stages : int
        Longest pipeline; with 1 all subsets of replicas are compared.
    reading : {'dp_over_mp', 'mp_over_dp'}, optional
        What is searched: pipelines, or one whose stages split micro-batches; by default what the plan is.
    quiet_steps : int
        While the cluster is as it was, layers and groups stay at least so long (`calm`).
    late_steps : int
        That still run the old plan after a change is ordered.
    patience : float
        Part of what a change costs that staying must have lost before it is made. With all of it, of two
        plans never more than twice the best possible is lost (ski rental).
    timed : callable, optional
        Times finalists more closely than the search: what it finds, the running structure, and the best
        replicas, which are then looked at too.
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
        reading: str | None = None,
        quiet_steps: int = 200,
        late_steps: int = 0,
        patience: float = 0.3,
        timed: Timed | None = None,
        log: TextIO | None = None,
    ):
        self.chain, self.plan, self._log = chain, plan, log
        self.budgets = tuple(budgets)
        self._pause_s, self._patience = pause_s, patience
        self._horizon, self._late = horizon, late_steps
        self._calm, self._partner, self._ran = Cooldown(quiet_steps), Partner(), CostCorrection(late_steps)
        self._asked: dict[str, Any] = {"batch": plan.global_batch, "micro_batch": plan.groups[0].micro_batch}
        self.reading = orders.reading_of(plan) if reading is None else reading
        self._slots = slots_of(self.reading, chain, budgets, max_stages=max_stages, **self._asked)
        plain = max_stages > 1 and self.reading != MP_OVER_DP
        self._finalists = Shortlist(self._slots, budgets, timed=timed, plain=plain, **self._asked)
        self.estimates = Estimates(stated)
        self.choice = self._running(orders.structure_of(plan, self.reading), plan, stated)
        free = dict.fromkeys((one.name for one in budgets), 0.0)
        fastest = self._slots.compare(self.estimates.state(), 1.0, free, None).best
        step_s = reshare(chain, stated, fastest, time_weight=1.0, **self._asked).time_s
        if weight is None:
            weight = max(weight_for(violation, horizon), _LEAST_DWELLS * _LONGEST_DWELL)
        self.queues = Queues(budgets, weight=weight, step_s=step_s)
        self.lessons = DualLearning(budgets, horizon)
        self.step, self.regret = -1, 0.0
        self.counts = dict.fromkeys(orders.KINDS, 0)
        self.ignored = 0
        self._told = ""
        self._settled: tuple[State | None, Structure | None, int] = (None, None, 0)
        if budgets:
            self._learn(self.estimates.state(), 0)

    def _running(self, structure: Structure, plan: Plan, state: State) -> Choice:
        if max(structure.workers) >= self.chain.num_workers:
            raise SpecError(
                f"rank {max(structure.workers)} of {self.chain.num_workers}",
                key="plan",
                rule="Ranks of the plan are workers of the chain",
            )
        if structure.groups[-1].cuts[-1] != self.chain.num_layers:
            raise SpecError(
                f"a plan of {structure.groups[-1].cuts[-1]} layers",
                key="plan",
                rule=f"The chain has {self.chain.num_layers}",
            )
        made = reshare(self.chain, state, structure, time_weight=1.0, **self._asked)
        return Choice(
            structure=structure,
            shares=orders.shares_of(plan, self.reading),
            time_s=made.time_s,
            costs=made.costs,
        )

    def on(self, event: Event) -> Sequence[Command]:
        """Take a fact in; return the command for the next step boundary."""
        return journal.logged(self._decided, event, self._log)

    def _decided(self, event: Event) -> Sequence[Command]:
        if event.step < self.step and isinstance(event, StepMeasured):
            self.ignored += 1
            return (Command(kind="keep", reason=f"step {event.step} came after step {self.step}: ignored"),)
        self.step = max(self.step, event.step)
        facts = event.events if isinstance(event, Together) else (event,)
        told = [self._heard(one) for one in facts]
        running = list(self.choice.structure.workers)
        steps = sum(max(one.steps, 1) for one in facts if isinstance(one, StepMeasured))
        unknown = [reason for reason in told if reason]
        if len(unknown) == len(told):
            return (Command(kind="keep", reason="; ".join(unknown)),)
        return self._decide(steps, urgent=not self.estimates.available[running].all())

    def _heard(self, event: Event) -> str:
        """Take a fact in; return why it is ignored, or nothing."""
        if isinstance(event, StepMeasured):
            self._measured(event)
            return ""
        assert not isinstance(event, Together)
        ends = (event.source, event.target) if isinstance(event, LinkSeen) else (event.rank,)
        for rank in ends:
            if not 0 <= rank < self.chain.num_workers:
                self.ignored += 1
                return f"rank {rank} is unknown: ignored"
        if isinstance(event, LinkSeen):
            if not self.estimates.links.set(event.source, event.target, event.bytes_per_s):
                self.ignored += 1
                return f"link {event.source}-{event.target} at {event.bytes_per_s} B/s: ignored"
            return ""
        if isinstance(event, DeviceSeen):
            if not self.estimates.available[event.rank]:
                self._calm.told()
            self.estimates.available[event.rank] = True
            if event.relative_speed is not None:
                self.ignored += not self.estimates.set_speed(event.rank, event.relative_speed)
            return ""
        if isinstance(event, PriceChanged):
            if not is_cost(event.usd_per_h, MOST_USD_PER_H):
                self.ignored += 1
                return f"rank {event.rank} at {event.usd_per_h} $/h: ignored"
            self.estimates.usd_per_h[event.rank] = event.usd_per_h
        elif isinstance(event, CarbonChanged):
            if not is_cost(event.kg_per_kwh, MOST_KG_PER_KWH):
                self.ignored += 1
                return f"rank {event.rank} at {event.kg_per_kwh} kg/kWh: ignored"
            self.estimates.kg_per_j[event.rank] = event.kg_per_kwh / J_PER_KWH
        else:
            self.estimates.available[event.rank] = False
        self._calm.told()
        return ""

    def _measured(self, event: StepMeasured) -> None:
        """Take in speeds, rates, seconds and costs; what is no number is replaced by what was expected."""
        expected = self.choice
        took, times = event.time_s, max(event.steps, 1)
        if not is_time(took):
            self.ignored += 1
            took = expected.time_s if math.isfinite(expected.time_s) else self.queues.step_s
        for rank, relative in sorted(event.relative_speed.items()):
            if 0 <= rank < self.chain.num_workers:
                self.estimates.see_speed(rank, relative, times)
        self.estimates.links.see(event.link_s, times)
        costs = {}
        for budget in self.budgets:
            cost = event.costs.get(budget.name, math.nan)
            if not is_cost(cost):
                self.ignored += 1
                cost = (
                    expected.costs[budget.key] * took / expected.time_s if expected.time_s < math.inf else 0.0
                )
            costs[budget.name] = cost
        self.queues.record(took, costs, times)
        self._ran.record(expected.structure, took, costs, times)

    def _learn(self, state: State, steps: int) -> None:
        """Count a state, and when a lesson is due place the queues by what is known of all."""
        key = state.key()
        if self.lessons.needs(key):
            rows = self._slots.rows(state)
            if not len(rows[0]):
                return  # nothing runs in it
            self.lessons.rows(key, *rows)
        self.lessons.saw(key, steps)
        if self.lessons.due:
            self.lessons.teach(self.queues)

    def _decide(self, steps: int, *, urgent: bool) -> Sequence[Command]:
        state = self.estimates.state()
        counted = bool(self.budgets and steps and math.isfinite(self.choice.time_s))
        known = counted and self.lessons.knows(state.key())
        if known:
            self._learn(state, steps)
        running = self.choice.structure
        try:
            found = self._compared(state)
        except InfeasibleError as error:
            return (Command(kind="keep", reason=f"no plan: {error}"),)
        if counted and not known:
            # What runs in a new state is known when it was searched.
            self._learn(state, steps)
        if urgent or not math.isfinite(found.stay_worth):
            return self._change(found.best, state, "the running plan has lost a rank")
        gain = found.stay_worth - found.best_worth
        better = found.best != running and gain > _DEAD_ZONE * abs(found.stay_worth)
        # The step to come counts: a change that one step earns back is not put off.
        self.regret = self.regret + gain * steps if better else 0.0
        due = better and self.regret + gain >= self._patience * self._price(found.best, state)
        best = found.best if due else None
        why = f"staying is worse by {gain / abs(found.stay_worth):.1%} of a step"
        if not self._calm.is_new(state):
            best, why = self._in_calm(best, state, why)
        else:
            self._ran.forget()
            if not better:
                self._calm.kept(state)
        return self._follow(state) if best is None else self._change(best, state, why)

    def _compared(self, state: State) -> Compared:
        weights, dwell = self.queues.weights(), self._dwell()
        moved = max(weights[0], 0.0) / dwell
        running = self.choice.structure
        return self._finalists.compare(state, *weights, running, moved, self.queues.curve(dwell))

    def _in_calm(self, best: Structure | None, state: State, why: str) -> tuple[Structure | None, str]:
        """Return what to change to, and why, though nothing has changed.

        Parameters
        ----------
        best : Structure or None
            What queues ask for.
        """
        if not self._calm.is_open(self.queues.steps):
            return None, why
        rest = EndOfHorizon.of(self.queues, self._horizon)
        if rest is None or not self._calm.may_last(rest.steps, self.queues.steps):
            return best, why
        if best is None and rest.steps > _NEAR * self._calm.quiet_steps:
            return None, why
        weights = self.queues.weights()

        def see(one: Structure) -> Choice:
            return self._ran.corrected(self._finalists.seen(state, one, *weights), self.budgets)

        def ask(time_weight: float, cost_weights: Mapping[str, float]) -> Structure:
            asked = (state, time_weight, cost_weights, self.choice.structure)
            return self._finalists.compare(*asked).best

        running = see(self.choice.structure)
        other = self._partner.of(rest, running, state, ask, see)
        if other is not None and self._is_last(rest, other, running, state):
            return other.structure, "from here to the end the budgets are spent by it"
        if best is not None and rest.steps_of(see(best), running) >= min(self._calm.quiet_steps, rest.steps):
            return best, why
        return None, why

    def _is_last(self, rest: EndOfHorizon, other: Choice, running: Choice, state: State) -> bool:
        """Return whether it is time for the plan that runs to the end."""
        time_s, costs = self._change_of(other.structure, state)
        left = rest.less(time_s, {one.name: costs.get(one.key, 0.0) for one in self.budgets})
        if left.is_kept(running) and (running.time_s - other.time_s) * left.steps <= time_s:
            return False
        return left.steps_of(other, running) >= left.steps - self._late - 0.5

    def _change_of(self, best: Structure, state: State) -> tuple[float, dict[str, float]]:
        """Return the seconds of a change, and its costs."""
        done = move(self.chain, state, self.choice.structure, best)
        return self._pause_s + done.time_s, move_costs(state, best, done, pause_s=self._pause_s)

    def _price(self, best: Structure, state: State) -> float:
        """Return what a change costs, in the units of what a slot minimises.

        It is paid at once: what it adds to a backlog counts whole, and not as the first of it does.
        """
        time_weight, cost_weights = self.queues.weights()
        time_s, costs = self._change_of(best, state)
        spent = 0.0
        for one in self.budgets:
            cost = costs.get(one.key, 0.0)
            spent += cost_weights[one.name] * cost + 0.5 * (cost / self.queues[one.name].unit) ** 2
        return max(time_weight, 0.0) * time_s + spent

    def _shared(self, structure: Structure) -> Choice:
        """Return a structure with the best shares by the estimates as they are."""
        time_weight, cost_weights = self.queues.weights()
        return reshare(
            self.chain,
            self.estimates.finest(),
            structure,
            time_weight=time_weight,
            cost_weights=cost_weights,
            budgets=self.budgets,
            **self._asked,
        )

    def _dwell(self) -> float:
        return min(max(self.estimates.dwell_steps, 1.0), _LONGEST_DWELL)

    def _follow(self, state: State) -> Sequence[Command]:
        """Keep the structure; let shares follow."""
        old, reason = self.choice, self._warning(state)
        fine = self.estimates.finest()
        state_then, structure_then, until = self._settled
        if fine is state_then and old.structure is structure_then and self.queues.steps < until:
            self.counts["keep"] += 1
            return (Command(kind="keep", reason=reason),)
        self._settled = fine, old.structure, self.queues.steps + _CHECK_EVERY
        kept = evaluate(self.chain, fine, old.structure, old.shares, **self._asked)
        new = self._shared(old.structure)
        weights = self.queues.weights()
        worth = [worth_of(one, *weights, self.budgets) for one in (kept, new)]
        if new.shares == old.shares or worth[0] - worth[1] <= _SAME_SHARES * abs(worth[0]):
            self.choice = kept
            self.counts["keep"] += 1
            return (Command(kind="keep", reason=reason),)
        self.choice = new
        self.counts["re-share"] += 1
        self.plan = orders.plan_of(self.plan, new, micro_batch=self._asked["micro_batch"])
        return (Command(kind="re-share", plan=self.plan, reason=reason or "shares follow the speeds"),)

    def _change(self, best: Structure, state: State, why: str) -> Sequence[Command]:
        made = self._shared(best)
        kind = orders.change_of(self.choice, made)
        warning = self._warning(state)
        if kind not in ("keep", "re-share"):
            self._calm.changed(state, self.queues.steps)
            self.regret = 0.0
        self.choice = made
        self.counts[kind] += 1
        self.plan = orders.plan_of(self.plan, made, micro_batch=self._asked["micro_batch"])
        reason = f"{why}; {warning}" if warning else why
        return (Command(kind=kind, plan=None if kind == "keep" else self.plan, reason=reason),)

    def _warning(self, state: State) -> str:
        """Return which budget cannot be kept as things are, looked at now and then while it is exceeded."""
        if self.queues.steps % _CHECK_EVERY == 0:
            self._told = ""
            for budget in self.budgets:
                if self.queues[budget.name].violation > 0.0 and self.queues[budget.name].backlog > 1.0:
                    self._told = self._told or self._cannot(budget, state)
        return self._told

    def _cannot(self, budget: Budget, state: State) -> str:
        time_s, costs = self._slots.rows(state)
        spent = costs[:, self.budgets.index(budget)]
        allowed = allowances(budget, time_s)
        at = int(np.argmin(spent - allowed))
        if spent[at] <= allowed[at]:
            return ""
        least = f"{spent[at]:.4g} of {allowed[at]:.4g}"
        return f"budget {budget.name!r} cannot be kept: the cheapest plan costs {least}"

    @property
    def reconfigurations(self) -> int:
        """Return how often layers, order or groups changed."""
        return sum(self.counts[kind] for kind in ("re-cut", "regroup", "idle", "activate"))

    def check_invariants(self) -> None:
        """Raise AssertionError where what must always hold does not."""
        structure, plan = self.choice.structure, self.plan
        workers = structure.workers
        assert len(set(workers)) == len(workers), "a rank is in two places"
        orders.check_shares(self.choice, **self._asked)
        assert structure.groups[0].cuts[0] == 0, "layers are missing"
        assert structure.groups[-1].cuts[-1] == self.chain.num_layers, "layers are missing"
        assert all((np.diff(group.cuts) > 0).all() for group in structure.groups), "a stage without layers"
        assert orders.structure_of(plan, structure.reading) == structure, "the plan is not the choice"
        assert orders.shares_of(plan, structure.reading) == self.choice.shares, "shares differ"
        assert self.queues.identity_error() <= 1e-9, "the books do not close"
        assert all(backlog >= 0.0 for backlog in self.queues.backlog.values()), "a negative backlog"
