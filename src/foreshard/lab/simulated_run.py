"""A run in a lab, simulated: policies meet its changes, steps are timed by measured costs.

The policy is that of a run, behind the same `Steering`; a plan that is ordered after a step runs two steps
later, as in a run, if every rank has memory for its part. Nothing is trained, and seconds are those that
`predict --costs` gives.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.control.nominal import cluster_state
from foreshard.control.slots import Budget
from foreshard.errors import InfeasibleError, SpecError, unknown
from foreshard.lab.lab import load_lab
from foreshard.lab.lab_simulator import LabSimulator
from foreshard.predict.measured.costs import load_costs
from foreshard.predict.measured.engine import RankTimes, rank_times
from foreshard.runtime.adaptive.budgets import budget_of, spent
from foreshard.runtime.adaptive.controller_config import ControllerConfig
from foreshard.runtime.adaptive.idle_probe import PROBE_EVERY
from foreshard.runtime.adaptive.steering import Steering, SteppedRun, own_samples
from foreshard.runtime.membership.plan_repair import repaired
from foreshard.spec.online import RUN_POLICIES, Command
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import load_plan

_DELAY = 2
"""Steps from the one that an order follows to the first that runs it: it is announced in the next vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A policy's run.

    Times of steps are with the change before each; `change_s` is what changes have taken of them: layers on
    the move, work on a step that a loss has cut off. Reconfigurations change layers or groups, a lost rank's
    too; reshares change shares alone. Orders that did not fit in the memory of some rank are `refused`: the
    plan before ran on. Plans are with the first step that runs each.
    """

    time_s: np.ndarray
    change_s: np.ndarray
    spent: Mapping[str, np.ndarray]
    budgets: tuple[Budget, ...]
    reconfigurations: int
    reshares: int
    refused: int
    plans: Sequence[tuple[int, Plan]]

    @property
    def violation(self) -> float:
        """Return the largest excess of a mean over its budget, at least 0."""
        mean_s = float(self.time_s.mean())
        over = [float(self.spent[b.name].mean()) / b.allowance(mean_s) - 1.0 for b in self.budgets]
        return max([0.0, *over])

    def to_dict(self) -> dict[str, Any]:
        """Return the policy's part of the object of `simulate --json`."""
        return {
            "mean_step_time_s": float(self.time_s.mean()),
            "mean_cost": {name: float(each.mean()) for name, each in self.spent.items()},
            "budget": {budget.name: budget.limit for budget in self.budgets},
            "violation": self.violation,
            "reconfigurations": self.reconfigurations,
            "reshares": self.reshares,
            "refused": self.refused,
            "change_share": float(self.change_s.sum() / self.time_s.sum()),
            "steps": len(self.time_s),
            "series": {"step_time_s": [float(seconds) for seconds in self.time_s]},
        }


def simulate_lab(
    lab: str,
    *,
    costs: str,
    plan: str,
    steps: int = 120,
    policies: Sequence[str] = ("lyapunov", "static"),
    budgets: Sequence[str] = (),
) -> dict[str, SimulatedRun]:
    """Return how policies fare in a lab, by name.

    The files are the lab's TOML, measured costs of the job on it, and the plan that the run starts with;
    budgets are as ``foreshard run --budget`` takes them.
    """
    if steps < 1:
        raise SpecError(f"{steps} steps", key="--steps", value=steps, rule="A run has a step at least")
    world = LabSimulator(load_lab(lab), load_costs(costs))
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name in dict.fromkeys(policies):
            if name not in RUN_POLICIES:
                raise unknown("policy", name, RUN_POLICIES, key="--policy", rule="In a lab policies are")
            config = ControllerConfig(
                plan=load_plan(plan),
                cluster=world.cluster,
                costs=costs,
                budgets=tuple(budgets),
                steps=steps,
                log=Path(folder) / f"{name}.jsonl",
                policy="lyapunov" if name == "static" else name,
            )
            found[name] = _Play(world, config, steered=name != "static").run(steps)
        return found


class _Play:
    """One policy's run."""

    def __init__(self, world: LabSimulator, config: ControllerConfig, *, steered: bool):
        config.check()
        self._world, self._config = world, config
        self._state = cluster_state(world.cluster)[0]
        self._orders: list[Command] = []
        self._steering = Steering(config, self._orders.append) if steered else None
        self._due: dict[int, Plan] = {}
        self._refused = 0
        self._decided, self._number, self._there = config.plan, 0, tuple(range(len(world.lab.slow)))

    def run(self, steps: int) -> SimulatedRun:
        """Play all steps."""
        budgets = tuple(budget_of(text) for text in self._config.budgets)
        time_s, costs = np.zeros(steps), {budget.name: np.zeros(steps) for budget in budgets}
        running, plans = self._config.plan, [(0, self._config.plan)]
        counts, change_s, clock_s = {"reconfigurations": 0, "reshares": 0}, np.zeros(steps), 0.0
        for step in range(steps):
            before = self._there
            now = self._plan_of(step, running)
            lost = frozenset(before) - frozenset(self._there)
            if not step or now != running:
                self._world.check_memory(now, step)
            if not step:
                plans = [(0, now)]
            elif now != running:
                change_s[step] = self._change_s(step, running, now, lost)
                counts["reshares" if _structure(now) == _structure(running) else "reconfigurations"] += 1
                plans.append((step, now))
            elif lost:
                change_s[step] = self._world.in_vain_s(step, running, lost)
            running = now
            at, cluster = self._world.at(step)
            ranks = rank_times(at, cluster, running)
            vote_s = at.ring_s(cluster, self._there, 0.0)  # idle ranks vote too
            time_s[step] = max(rank.end_s for rank in ranks) + vote_s + change_s[step]
            clock_s += float(time_s[step])
            work_s = {times.rank: times.compute_s + times.recompute_s for times in ranks}
            for budget in budgets:
                costs[budget.name][step] = spent(budget, self._state, running, float(time_s[step]), work_s)
            self._tell(step, float(time_s[step] - change_s[step]), clock_s, running, ranks)
        return SimulatedRun(
            time_s=time_s,
            change_s=change_s,
            spent=costs,
            budgets=budgets,
            plans=plans,
            refused=self._refused,
            **counts,
        )

    def _change_s(self, step: int, running: Plan, now: Plan, lost: frozenset[int]) -> float:
        """Return what a change takes: layers move when a step has ended, or when one has lost a rank."""
        moved_s = self._world.move_s(step if lost else step - 1, running, now)
        return moved_s + (self._world.in_vain_s(step, running, lost) if lost else 0.0)

    def _plan_of(self, step: int, running: Plan) -> Plan:
        """Return the plan of a step: what was ordered, or what is left of it where ranks came or went."""
        there = self._world.there(step)
        if not there:
            raise InfeasibleError(f"at step {step} no rank is there", rule="A step needs a rank")
        due = self._due.pop(step, None)
        if due is not None and self._world.holds(due):
            running = self._decided = due
        elif due is not None:
            self._refused += 1
        if there != self._there:
            # A new generation: what was announced is forgotten, the last plan adopted is repaired.
            self._there, self._number = there, self._number + 1
            self._due.clear()
            running = repaired(self._decided, there)
        return running

    def _tell(
        self, step: int, time_s: float, clock_s: float, running: Plan, ranks: Sequence[RankTimes]
    ) -> None:
        if self._steering is None:
            return
        own = own_samples(running)
        done = SteppedRun(
            step=step,
            time_s=time_s,
            running=running,
            ranks=self._there,
            stage_s={
                times.rank: (times.compute_s + times.recompute_s) / own[times.rank]
                for times in ranks
                if own[times.rank]
            },
            generation=self._number,
            link_s=self._world.links(step, running),
            idle_s={} if step % PROBE_EVERY else self._world.idle_s(step, running),
            clock_s=clock_s,
        )
        self._steering.stepped(done)
        for command in self._orders:
            if command.plan is not None:
                self._due[step + _DELAY] = command.plan
        self._orders.clear()


def _structure(plan: Plan) -> list[Any]:
    return sorted([(stage.ranks, stage.layers) for stage in group.stages] for group in plan.groups)
