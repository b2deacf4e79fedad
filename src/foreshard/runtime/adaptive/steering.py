"""The one way from a policy into the trainer: measured steps go in as events, plans come out as proposals.

The least rank that is there has the policy. When it is lost, the next one builds a new policy and replays the
log of the old one: it then knows what that knew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from foreshard.control.journal import event_of, logged
from foreshard.predict.measured.memory import counts_of
from foreshard.runtime.adaptive.budgets import spent
from foreshard.runtime.adaptive.controller_config import ControllerConfig, RunPolicy
from foreshard.runtime.adaptive.idle_probe import PROBED_LAYERS
from foreshard.runtime.records.durable_jsonl import DurableJsonl, OnEvent
from foreshard.spec.online import Command, DeviceSeen, Event, RankLost, StepMeasured
from foreshard.spec.plan import Plan

LEARNED_STEPS = 4
"""Steps after the first that unmeasured ranks are learned from: their median leaves one hiccup out."""
_SAME_SPEED = 0.05
"""Part by which the speed of an idle rank has to change for an event: the grid of the estimates."""
_LEARNED = '{"learned"'
"""How the line of the log begins that holds the relative speeds of the first steps."""
_KEPT_BYTES = 16 << 20
"""Of the policy's log, while writing is blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedRun:
    """A step as the ranks measured it.

    `ranks` are all that are there.
    `stage_s` are seconds per sample by rank, `idle_s` those of the first layers on ranks without samples;
    `link_s` is the mean message (bytes, seconds) of links that were timed. `clock_s` is when the step ended:
    the change before it is paid for too.
    """

    step: int
    time_s: float
    running: Plan
    ranks: Sequence[int]
    stage_s: Mapping[int, float]
    generation: int
    link_s: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    idle_s: Mapping[int, float] = field(default_factory=dict)
    clock_s: float | None = None


class _Log:
    """What a successor replays: lines wait while writing is blocked, and none is left out."""

    def __init__(self, path: Path, tell: OnEvent):
        self.lines, self._tell, self._goes_on = DurableJsonl(path, tell), tell, True

    def write(self, text: str) -> None:
        if not self._goes_on:
            return
        for line in text.splitlines():
            self.lines.add(json.loads(line))
        if self.lines.waiting_bytes > _KEPT_BYTES:
            self._goes_on = False  # a log with a gap would teach the successor what never was
            why = f"{self.lines.path.name}: {self.lines.waiting_bytes} bytes wait; later lines are not kept"
            self._tell("log given up", why, file=str(self.lines.path))


class Steering:
    """Feeds a policy and proposes what it orders; one a rank, at work on the rank that conducts.

    `propose` is `Trainer.propose`; `tell` writes the operator's log, when writing the policy's log is
    blocked.
    """

    def __init__(
        self,
        config: ControllerConfig,
        propose: Callable[[Command], None],
        tell: OnEvent = lambda kind, text, **facts: None,
    ):
        self._config, self._propose, self._log = config, propose, _Log(config.log, tell)
        self._known = config.starting_costs()
        self._policy: RunPolicy | None = None
        self._learning: list[SteppedRun] = []
        self._probed: dict[int, float] = {}
        self._there: frozenset[int] = frozenset(range(config.cluster.num_devices))
        self._proposed: tuple[int, Plan] | None = None
        self._clock_s: float | None = None
        self._last, self._orders = "", 0

    @property
    def policy(self) -> RunPolicy:
        """The policy, brought up to what its log knows."""
        if self._policy is None:
            lines = self._config.log.read_text().splitlines() if self._config.log.exists() else []
            for line in lines:
                if line.startswith(_LEARNED) and line.endswith("}"):
                    speeds = json.loads(line)["learned"].items()
                    self._known = self._known.learned({int(rank): speed for rank, speed in speeds})
            self._policy = self._config.make_policy(self._known)
            for line in lines:
                if '"event"' in line[:12] and line.endswith("}"):
                    self._replay(event_of(line))
        return self._policy

    def flush(self) -> None:
        """Write what of the policy's log waits, unless writing is still blocked."""
        self._log.lines.flush()

    def _replay(self, event: Event) -> None:
        assert self._policy is not None
        self._policy.on(event)
        if isinstance(event, RankLost):
            self._there -= {event.rank}
        if isinstance(event, DeviceSeen):
            self._there |= {event.rank}

    def stepped(self, done: SteppedRun) -> None:
        """Take in a step and who is there, and propose what follows from it."""
        policy = self.policy
        if self._known.unmeasured and not self._learn(done):
            return
        pending, self._learning = [*self._learning, done], []
        policy = self.policy
        orders = [command for step in pending for command in self._received(step)]
        for command in [command for command in orders if command.plan is not None][-1:]:
            self._order(command, done.generation)
        wanted = self._config.as_run(policy.plan, self._known)
        untouched = policy.step < 0 or _same(done.running, self._config.plan)
        if not untouched and not _same(done.running, wanted) and self._proposed != (done.generation, wanted):
            command = Command(kind="regroup", plan=policy.plan, reason="ranks have changed")
            self._order(command, done.generation)

    def _learn(self, done: SteppedRun) -> bool:
        """Keep one of the first steps; return whether enough is known to begin.

        The first of all steps warms up: it finds memory that nobody has touched and code not yet compiled.
        """
        measured = [self._relative(step) for step in self._learning][1:]
        if len(measured) < LEARNED_STEPS:
            self._learning.append(done)
            return False
        ranks = sorted({rank for step in measured for rank in step})
        speeds = {rank: median(step[rank] for step in measured if rank in step) for rank in ranks}
        self._log.write(json.dumps({"learned": speeds}))
        self._known = self._known.learned(speeds)
        self._policy = self._config.make_policy(self._known)
        return True

    def _received(self, done: SteppedRun) -> list[Command]:
        """Return what a policy orders on the facts of a step."""
        policy = self.policy
        # Steps done again after all ranks were lost cost again: to the policy they are further ones.
        step = max(done.step, policy.step + 1)
        events: list[Event] = [
            RankLost(step=step, rank=rank, reason="left the run")
            for rank in sorted(self._there - set(done.ranks))
        ]
        events += [DeviceSeen(step=step, rank=rank) for rank in sorted(set(done.ranks) - self._there)]
        self._there = frozenset(done.ranks)
        events += self._idle(step, done)
        time_s = self._elapsed(done.time_s, done.clock_s)
        work_s = {rank: done.stage_s.get(rank, 0.0) * own for rank, own in own_samples(done.running).items()}
        costs = {
            budget.name: spent(budget, self._known.cluster, done.running, time_s, work_s)
            for budget in policy.queues.budgets
        }
        speeds = self._relative(done)
        events.append(
            StepMeasured(step=step, time_s=time_s, relative_speed=speeds, link_s=done.link_s, costs=costs)
        )
        return [command for event in events for command in logged(policy.on, event, self._log)]

    def _elapsed(self, time_s: float, clock_s: float | None) -> float:
        """Return the time since the step before ended: the step, and the change that came before it."""
        before, self._clock_s = self._clock_s, clock_s
        return time_s if before is None or clock_s is None else max(time_s, clock_s - before)

    def _idle(self, step: int, done: SteppedRun) -> list[Event]:
        """Return the speeds of idle ranks that have changed.

        Where layers are not told apart the first of them say nothing about speed: the first probe of a rank
        counts as the speed that it had, and later ones are compared with it.
        """
        events: list[Event] = []
        size, speeds = done.running.groups[0].micro_batch, self.policy.estimates.state().speed
        for rank, seconds in sorted(done.idle_s.items()):
            relative = self._known.passes.sample_s(rank, (0, PROBED_LAYERS), size, size) / seconds
            if not self._known.knows_layers:
                relative = self._probed.setdefault(rank, seconds * float(speeds[rank])) / seconds
            if abs(relative / float(speeds[rank]) - 1.0) > _SAME_SPEED:
                events.append(DeviceSeen(step=step, rank=rank, relative_speed=relative))
        for rank in done.running.ranks:
            self._probed.pop(rank, None)
        return events

    def _relative(self, done: SteppedRun) -> dict[int, float]:
        """Return nominal over measured seconds of the layers and micro-batches that each rank ran."""
        found = {}
        for group in done.running.groups:
            for stage in group.stages:
                for rank, size in zip(stage.ranks, counts_of(stage, group.micro_batch), strict=True):
                    if done.stage_s.get(rank, 0.0) > 0.0 and size:
                        share = group.share if len(stage.ranks) == 1 else size
                        nominal_s = self._known.passes.sample_s(rank, stage.layers[0], share, size)
                        found[rank] = nominal_s / done.stage_s[rank]
        return found

    def _order(self, command: Command, generation: int) -> None:
        assert command.plan is not None
        plan = self._config.as_run(command.plan, self._known)
        self._proposed = (generation, plan)
        self._last, self._orders = f"{command.kind}: {command.reason}", self._orders + 1
        self._propose(replace(command, plan=plan))

    def metrics(self, running: Plan) -> dict[str, Any]:
        """Return what a line of metrics says of the policy."""
        policy = self.policy
        queues = policy.queues
        found: dict[str, Any] = {
            "controller/policy": self._config.policy,
            "controller/weight": queues.weight,
            "controller/reconfigurations": policy.reconfigurations,
            "controller/order": self._last,
            "controller/orders": self._orders,
            "controller/bound_s": self._bound_s(),
            "shares": [group.share for group in running.groups],
            "pipelines": [
                [[*stage.ranks, *stage.layers[0]] for stage in group.stages] for group in running.groups
            ],
        }
        for budget in queues.budgets:
            queue = queues[budget.name]
            found |= {
                f"budget/{budget.name}/backlog": queue.backlog,
                f"budget/{budget.name}/over": queue.violation,
                f"budget/{budget.name}/limit": budget.limit,
                f"budget/{budget.name}/mean": budget.limit * (1.0 + queue.violation),
            }
        return found

    def _bound_s(self) -> float:
        """Return the step of all ranks that are there if none ever waited: no plan is faster."""
        ranks = sorted(self._there)
        rate = self.policy.estimates.state().speed[ranks] / self.policy.chain.before_s[ranks, -1]
        return self._config.plan.global_batch / float(rate.sum())


def own_samples(plan: Plan) -> dict[int, int]:
    """Return the samples of a step that each rank computes."""
    found = {}
    for group in plan.groups:
        whole, rest = divmod(group.share, group.micro_batch)
        for stage in group.stages:
            last = counts_of(stage, rest)
            for place, size in enumerate(counts_of(stage, group.micro_batch)):
                for rank in stage.ranks[place * stage.tp : (place + 1) * stage.tp]:
                    found[rank] = whole * size + last[place]
    return found


def _same(plan: Plan, other: Plan) -> bool:
    """Return whether two plans give every rank the same layers and samples, and sum alike."""

    def placed(plan: Plan) -> set[tuple[Any, ...]]:
        return {
            (group.share, *((stage.ranks, stage.layers, stage.rank_shares) for stage in group.stages))
            for group in plan.groups
        }

    sums = [(one.collectives, one.buckets) for one in (plan, other)]
    return placed(plan) == placed(other) and sums[0] == sums[1]
