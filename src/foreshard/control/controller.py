"""The controller: facts in, commands out, no clock and no files of its own.

Every step: estimates take in what was measured, queues what was spent; a slot is solved for the state as it
seems to be; shares follow at once, layers and groups when what staying has cost is worth the change.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TextIO

import numpy as np

from foreshard.control import journal, orders
from foreshard.control.budgets.dual import allowances
from foreshard.control.budgets.dual_learning import DualLearning, weight_for
from foreshard.control.budgets.objective import Objective
from foreshard.control.budgets.queues import Queues
from foreshard.control.estimation.estimates import Estimates
from foreshard.control.estimation.modes import Modes
from foreshard.control.estimation.plausibility import MOST_KG_PER_KWH, MOST_USD_PER_H, is_cost, is_time
from foreshard.control.experts import PRICED, WINDOW, WRONG, Experts, Fixed
from foreshard.control.guard import BudgetGuard
from foreshard.control.moves import move, move_costs
from foreshard.control.options import DEFAULTS, ControllerOptions
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.shortlist import Shortlist, Timed
from foreshard.control.search.slot_search import reshare, slots_of
from foreshard.control.slots import J_PER_KWH, MP_OVER_DP, Budget, Chain, Choice, State, Structure
from foreshard.control.sums import change_of_sums, with_best_sums
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

_CHECK_EVERY = 25
"""Steps between looks at whether shares, or budgets, can be kept as they are while no estimate moves."""


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
    timed : callable, optional
        Times the shortlist more closely than the search: what it finds, the running structure, and the best
        replicas, which are then looked at too.
    log : text stream, optional
        Gets every event and command as a line; `journal.replay` reads it.
    options : ControllerOptions, optional
        Rules that can be switched off.
    steers_sums : bool
        Whether buckets and algorithm of sums follow the links, where the plan states them.
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
        timed: Timed | None = None,
        log: TextIO | None = None,
        options: ControllerOptions = DEFAULTS,
        steers_sums: bool = False,
    ):
        self._steers_sums = steers_sums
        self._summed: tuple[bytes, Plan] | None = None
        self.chain, self.plan, self._log = chain, plan, log
        self.budgets = tuple(budgets)
        self._pause_s, self._options = pause_s, options
        self._asked: dict[str, Any] = {"batch": plan.global_batch, "micro_batch": plan.groups[0].micro_batch}
        self.reading = orders.reading_of(plan) if reading is None else reading
        self._slots = slots_of(self.reading, chain, budgets, max_stages=max_stages, **self._asked)
        plain = max_stages > 1 and self.reading != MP_OVER_DP
        self._shortlist = Shortlist(self._slots, timed=timed, plain=plain, **self._asked)
        self.estimates = Estimates(stated, grid=options.grid, trusts_first_sight=options.trusts_first_sight)
        self.choice = self._forecast = self._running(orders.structure_of(plan, self.reading), plan, stated)
        self.modes = Modes()
        self._foreseen: tuple[Fixed, Fixed] | None = None
        self.experts = Experts(budgets, self._priced)
        self._fixed: Fixed | None = None
        self._guarded: Fixed | None = None
        self._unpaid = np.zeros(1 + len(self.budgets))
        free = Objective(time=1.0, costs={}, budgets=self.budgets)
        fastest = self._slots.compare(self.estimates.state(), free, None).best
        step_s = reshare(chain, stated, fastest, free, **self._asked).time_s
        if weight is None:
            weight = weight_for(violation, horizon)
        self.queues = Queues(budgets, weight=weight, step_s=step_s)
        self.guard = BudgetGuard()
        self.learning = DualLearning(budgets, horizon)
        self.step, self.regret = -1, 0.0
        self.counts = dict.fromkeys(orders.KINDS, 0)
        self.ignored = 0
        self._warned = ""
        self._shared: tuple[State | None, Structure | None, int] = (None, None, 0)
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
        free = Objective(time=1.0, costs={})
        made = reshare(self.chain, state, structure, free, **self._asked)
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
        ignored = [self._received(fact) for fact in facts]
        steps = sum(max(fact.steps, 1) for fact in facts if isinstance(fact, StepMeasured))
        reasons = [reason for reason in ignored if reason]
        if len(reasons) == len(facts):
            return (Command(kind="keep", reason="; ".join(reasons)),)
        return self._decide(steps)

    def _received(self, event: Event) -> str:
        """Take a fact in; return why it is ignored, or nothing."""
        if isinstance(event, StepMeasured):
            self._measured(event)
            return ""
        refused = self._refused(event)
        self.ignored += bool(refused)
        return f"{refused}: ignored" if refused else ""

    def _refused(self, event: Event) -> str:
        """Take in a fact that is not of a step; return what of it is not believed, or nothing."""
        assert not isinstance(event, StepMeasured | Together)
        ends = (event.source, event.target) if isinstance(event, LinkSeen) else (event.rank,)
        for rank in ends:
            if not 0 <= rank < self.chain.num_workers:
                return f"rank {rank} is unknown"
        if isinstance(event, LinkSeen):
            if not self.estimates.links.set(event.source, event.target, event.bytes_per_s):
                return f"link {event.source}-{event.target} at {event.bytes_per_s} B/s"
        elif isinstance(event, DeviceSeen):
            if not self.estimates.available[event.rank]:
                self._members_changed()
            self.estimates.available[event.rank] = True
            if event.relative_speed is not None:
                self.ignored += not self.estimates.set_speed(event.rank, event.relative_speed)
        elif isinstance(event, PriceChanged):
            if not is_cost(event.usd_per_h, MOST_USD_PER_H):
                return f"rank {event.rank} at {event.usd_per_h} $/h"
            self.estimates.usd_per_h[event.rank] = event.usd_per_h
        elif isinstance(event, CarbonChanged):
            if not is_cost(event.kg_per_kwh, MOST_KG_PER_KWH):
                return f"rank {event.rank} at {event.kg_per_kwh} kg/kWh"
            self.estimates.kg_per_j[event.rank] = event.kg_per_kwh / J_PER_KWH
        else:
            self.estimates.available[event.rank] = False
            self._members_changed()
        return ""

    def _members_changed(self) -> None:
        """Judge plans anew, and follow forecasts until some were: others can run now."""
        self.experts.forget()
        self._fixed = None

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
        self.estimates.confirm(event.relative_speed)
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
        if self._options.experts or self._options.guard:
            self._judge(took, costs, times, event.relative_speed.keys())

    def _judge(self, took: float, costs: Mapping[str, float], steps: int, seen: Set[int]) -> None:
        """Let experts know what the plan of the forecast came to: as measured, or by the state that was."""
        measured = np.array([took, *(costs[budget.name] for budget in self.budgets)])
        state, plan = self.estimates.seen(), self._forecast
        self.experts.measured(state, self.choice, measured, steps)
        state = self.experts.saw(state, seen, steps)
        if self._foreseen is not None:
            stays, moves = (self.experts.corrected(state, *fixed) for fixed in self._foreseen)
            self.experts.foresight.add(steps, np.array([stays, stays, moves]))
        if not math.isfinite(plan.time_s):
            return
        forecast = self._row(plan) * self.experts.ratio(plan.structure)
        if self._stays is not None:
            measured = self.experts.corrected(state, plan.structure, plan.shares) + self._unpaid / steps
            self._unpaid = np.zeros(1 + len(self.budgets))
        self.experts.judge(state, seen, steps, forecast=forecast, real=measured)

    def _row(self, choice: Choice) -> np.ndarray:
        """Return seconds and costs of a choice."""
        return np.array([choice.time_s, *(choice.costs[budget.key] for budget in self.budgets)])

    def _priced(self, state: State, structure: Structure, shares: Sequence[int]) -> np.ndarray:
        return self._row(evaluate(self.chain, state, structure, shares, **self._asked))

    def _learn(self, state: State, steps: int) -> None:
        """Count a state, and when it is due place the queues by what all states seen make of the budgets."""
        if not self._options.learns_dual:
            return
        key, learning = state.key(), self.learning
        if learning.needs(key):
            rows = self._slots.rows(state)
            if not len(rows[0]):
                return  # nothing runs in it
            learning.rows(key, *rows)
        learning.saw(key, steps)
        if learning.due and self._stays is None:
            learning.place(self.queues, self.experts.common, self.experts.lateness())

    def _decide(self, steps: int) -> Sequence[Command]:
        state = self.estimates.state()
        counted = bool(self.budgets and steps and math.isfinite(self.choice.time_s))
        known = counted and self.learning.knows(state.key())
        if known:
            self._learn(state, steps)
        if self.budgets and steps:
            self._secure(state)
        last = state
        if self._options.foresees:
            self._foresee(steps)
            state = self.estimates.expected()
        try:
            why = self._follow_forecast(state, steps)
        except InfeasibleError as error:
            return (Command(kind="keep", reason=f"no plan: {error}"),)
        if counted and not known:
            # What runs in a new state is known when it was searched.
            self._learn(last, steps)
        if self._options.experts and self.experts.is_due():
            why = self._advised(state) or why
        is_lost = self._guarded is not None and not self._can_run(self._guarded)
        if self.budgets and (steps or is_lost) and self._options.guard:
            why = self._guards(state) or why
        chosen = self._forecast if self._stays is None else self._run_as(*self._stays)
        return self._ordered(chosen, state, why)

    @property
    def _stays(self) -> Fixed | None:
        """Return the plan that stays and runs now: the guard's, or else the best of late."""
        return self._fixed if self._guarded is None else self._guarded

    def _guards(self, state: State) -> str:
        """Run the plan of the guard while the excess over a budget is too large; return why it changed."""
        queues = [self.queues[budget.name] for budget in self.budgets]
        # That budgets cannot be kept is believed of the model when plans that ran have shown it.
        is_shown = self.guard.refuted > 0
        excess = np.array([queue.excess if is_shown else queue.stated_excess for queue in queues])
        before = self._guarded

        def plans() -> list[Fixed]:
            return [*self.experts.within(self.budgets), *self._cheapest()]

        bet = self.learning.bet(self.queues, self.experts.are_needed)
        self._guarded = self.guard.decide(excess, bet, plans, self._can_run)
        if self._guarded == before:
            return ""
        if self._guarded is None:
            return "the excess over the budgets is worked off"
        return f"the excess is {excess.max():.0f} budgets of a step: a plan that keeps them runs"

    def _can_run(self, plan: Fixed) -> bool:
        """Return whether a plan that stays has all its ranks, and they hold it."""
        return math.isfinite(evaluate(self.chain, self.estimates.finest(), *plan, **self._asked).time_s)

    def _foresee(self, steps: int) -> None:
        """Expect the speeds that are likely to come next, where shares for them pay in the mean.

        Until what was foreseen has paid, by what was measured afterwards, it is judged and not followed.
        """
        self.estimates.expect(None)
        self._foreseen = None
        if steps:
            self.modes.see(self.estimates.latest(), steps)
        found = self.modes.following()
        if found is None:
            return
        chance, speeds = found
        objective, now = self._objective(), self.estimates.finest()
        then = replace(now, speed=np.array(speeds))
        structure, worth = self._forecast.structure, []
        stays, moves = (
            reshare(self.chain, state, structure, objective, **self._asked) for state in (now, then)
        )
        for shares in (stays.shares, moves.shares):
            taken = [evaluate(self.chain, state, structure, shares, **self._asked) for state in (now, then)]
            worth.append((1.0 - chance) * objective.of(taken[0]) + chance * objective.of(taken[1]))
        if worth[1] < worth[0]:
            self._foreseen = (structure, stays.shares), (structure, moves.shares)
            if self.experts.trusts_foresight(self._weighed):
                self.estimates.expect(speeds)

    def _secure(self, state: State) -> None:
        """Let excess weigh as much as the present slot takes to keep the budgets."""
        rows = self.experts.outcomes()
        judged = [(rows[:, 0], rows[:, 1:])] if self.experts.are_needed else None
        ratio = self.experts.common * self.experts.lateness()
        self.learning.secure(self.queues, state.key(), ratio, judged)

    def _follow_forecast(self, state: State, steps: int) -> str:
        """Make the plan of the forecast that of the state; return why it changed."""
        old = self._forecast.structure
        found = self._shortlist.compare(state, self._objective(), old)
        if not math.isfinite(found.stay_worth):
            return self._forecast_changes(found.best, state, "the running plan has lost a rank")
        gain = found.stay_worth - found.best_worth
        step = abs(self.queues.second_weight()) * self._forecast.time_s
        better = found.best != old and gain > self._options.dead_zone * step
        # The step to come counts: a change that one step earns back is not put off.
        self.regret = self.regret + gain * steps if better else 0.0
        if better and self.regret + gain >= self._options.patience * self._price(old, found.best, state):
            why = f"staying is worse by {gain / step:.1%} of a step"
            return self._forecast_changes(found.best, state, why)
        return self._forecast_shares()

    def _forecast_changes(self, best: Structure, state: State, why: str) -> str:
        old, self._forecast = self._forecast, self._with_best_shares(best)
        if orders.change_of(old, self._forecast) not in ("keep", "re-share"):
            self.regret = 0.0
            time_s, costs = self._change_of(old.structure, best, state)
            self._unpaid += np.array([time_s, *(costs.get(budget.key, 0.0) for budget in self.budgets)])
        return why

    def _forecast_shares(self) -> str:
        """Let shares of the plan of the forecast follow the estimates as they are."""
        old, fine = self._forecast, self.estimates.finest()
        state_then, structure_then, until = self._shared
        if fine is state_then and old.structure is structure_then and self.queues.steps < until:
            return ""
        self._shared = fine, old.structure, self.queues.steps + _CHECK_EVERY
        new, objective = self._with_best_shares(old.structure), self._objective()
        kept = new
        if new.shares != old.shares:
            kept = evaluate(self.chain, fine, old.structure, old.shares, **self._asked)
        stays, gain = objective.of(kept), objective.of(kept) - objective.of(new)
        is_kept = new.shares == old.shares or gain <= self._options.share_dead_zone * abs(stays)
        self._forecast = kept if is_kept else new
        return "" if is_kept else "shares follow the speeds"

    def _advised(self, state: State) -> str:
        """Let the plan run that did best of late: that of the forecast, or one that stays; return why."""
        records = self.experts.mature(self._weighed, self._fixed)
        if self.experts.wants(self._weighed):
            self.experts.propose(self._proposals(self.experts.recalled()))
        # The guard counts in one unit from its beginning to its end.
        is_placed = self._fixed is not None and self._guarded is None
        if is_placed and self.budgets and self._options.learns_dual:
            rows = self.experts.outcomes()
            self.learning.place_by(self.queues, rows[:, 0], rows[:, 1:])
        gains: dict[Fixed | None, float] = {None: 0.0}
        for fixed, record in records.items():
            if self._fixed is not None:
                gains[fixed] = record.gain(self._weighed)
            elif record.error(self._weighed) > WRONG:
                gains[fixed] = record.sure_gain(self._weighed)
        best = max(gains, key=lambda fixed: gains[fixed])
        to = self._forecast.structure if best is None else best[0]
        price = self._price(self.choice.structure, to, state)
        gain, (_, gross) = gains[best] - gains[self._fixed], self._weighed(self.experts.recent.rows[1])
        if gain <= max(self._options.dead_zone, price / (gross * WINDOW)):
            return ""
        self._fixed = best
        if best is None:
            return "forecasts did better of late"
        return f"forecasts were wrong: this plan would have been better by {gain:.1%}"

    def _proposals(self, state: State) -> list[Fixed]:
        """Return plans that may be worth staying with, from fast to cheap.

        What runs best in the mean of late, in the worst of it, or in a state of late, each with shares for
        all of these: a step waits for its slowest rank, so shares for mean speeds need not be the best in
        the mean, where ranks are slow by turns.
        """
        objective, found = self._objective(), []
        typical = self.experts.typical(state)
        for factor, now in itertools.product(PRICED if self.budgets else PRICED[:1], (*typical, state)):
            costs = {name: factor * weight for name, weight in objective.costs.items()}
            priced = replace(objective, costs=costs)
            with contextlib.suppress(InfeasibleError):
                best = self._slots.compare(now, priced, self.choice.structure).best
                for then in (*typical, state):
                    found.append((best, self._slots.kept(then, best, priced).shares))
        return found

    def _cheapest(self) -> list[Fixed]:
        """Return the plans that are best at high costs: as stated, of late in the mean, at worst, now."""
        objective, found, seen = self._objective(), [], self.estimates.seen()
        # A queue may be empty where a budget was taken for unmeetable: its costs count nevertheless.
        step = abs(self.queues.second_weight()) * self.queues.step_s
        costs = {
            name: PRICED[-1] * max(weight, step / self.queues[name].unit)
            for name, weight in objective.costs.items()
        }
        priced = replace(objective, costs=costs)
        for state in (self.estimates.stated(), *self.experts.typical(seen), seen):
            with contextlib.suppress(InfeasibleError):
                best = self._slots.compare(state, priced, self.choice.structure).best
                found.append((best, self._slots.kept(state, best, priced).shares))
        return found

    def _weighed(self, row: np.ndarray) -> tuple[float, float]:
        """Return the objective of seconds and costs, and the sum without what budgets per time allow."""
        if not np.isfinite(row).all():
            return math.inf, math.inf
        time_weight, costs = self.queues.weights()
        spent = sum(costs[budget.name] * row[1 + i] for i, budget in enumerate(self.budgets))
        gross = abs(self.queues.second_weight()) * row[0] + spent
        return float(time_weight * row[0] + spent), float(gross)

    def _run_as(self, structure: Structure, shares: tuple[int, ...]) -> Choice:
        """Return a plan that stays, as it runs by the estimates."""
        if self.choice.structure == structure and self.choice.shares == shares:
            return self.choice
        return evaluate(self.chain, self.estimates.finest(), structure, shares, **self._asked)

    def _objective(self) -> Objective:
        """Return what the slot minimises."""
        time_weight, cost_weights = self.queues.weights()
        return Objective(time=time_weight, costs=cost_weights, budgets=self.budgets)

    def _change_of(self, old: Structure, new: Structure, state: State) -> tuple[float, dict[str, float]]:
        """Return the seconds of a change, and its costs."""
        done = move(self.chain, state, old, new)
        return self._pause_s + done.time_s, move_costs(state, new, done, pause_s=self._pause_s)

    def _price(self, old: Structure, new: Structure, state: State) -> float:
        """Return what a change costs, in the units of what a slot minimises.

        It is paid at once: what it adds to a backlog counts whole, and not as the first of it does.
        """
        time_weight, cost_weights = self.queues.weights()
        time_s, costs = self._change_of(old, new, state)
        spent = 0.0
        for budget in self.budgets:
            cost = costs.get(budget.key, 0.0)
            spent += cost_weights[budget.name] * cost + 0.5 * (cost / self.queues[budget.name].unit) ** 2
        return max(time_weight * time_s + spent, 0.0)

    def _with_best_shares(self, structure: Structure) -> Choice:
        """Return a structure with the best shares by the estimates as they are."""
        return reshare(self.chain, self.estimates.finest(), structure, self._objective(), **self._asked)

    def _ordered(self, chosen: Choice, state: State, why: str) -> Sequence[Command]:
        """Run a choice; return the command for it."""
        kind, warning = orders.change_of(self.choice, chosen), self._warning(state)
        self.choice = chosen
        if kind != "keep":
            self.plan = orders.plan_of(self.plan, chosen, micro_batch=self._asked["micro_batch"])
        sums = self._change_sums(state, chosen.time_s)
        if kind == "keep" and sums:
            kind, why = sums, "sums of gradients follow the links"
        self.counts[kind] += 1
        if kind == "keep":
            return (Command(kind=kind, reason=warning),)
        return (Command(kind=kind, plan=self.plan, reason="; ".join(filter(None, (why, warning)))),)

    def _change_sums(self, state: State, step_s: float) -> str:
        """Let the plan sum as suits the links, and return what that changes, or nothing."""
        before, seen = self.plan, (state.key(), self.plan)
        if self._steers_sums and math.isfinite(step_s) and seen != self._summed:
            self.plan = with_best_sums(before, self.chain, state, step_s)
            self._summed = (state.key(), self.plan)
        return change_of_sums(before, self.plan)

    def _warning(self, state: State) -> str:
        """Return which budget cannot be kept as things are, looked at now and then while it is exceeded."""
        if self.queues.steps % _CHECK_EVERY == 0:
            self._warned = ""
            for budget in self.budgets:
                if self.queues[budget.name].violation > 0.0 and self.queues[budget.name].backlog > 1.0:
                    self._warned = self._warned or self._cannot(budget, state)
        return self._warned

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
