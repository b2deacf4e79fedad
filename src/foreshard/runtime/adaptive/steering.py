"""The controller at the wheel of a run: what ranks measured goes in, the next plan comes out.

The least rank that is there has the controller. When it is lost, the next one builds a new controller and
lets it live through the log of the old one: it then knows what that knew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.control.controller import Controller
from foreshard.control.journal import event_of, logged
from foreshard.lab.lab import PROBED_LAYERS, Lab, load_lab
from foreshard.predict.measured.memory import counts_of
from foreshard.runtime.adaptive.baseline_policies import BaselinePolicy
from foreshard.runtime.adaptive.budgets import spent
from foreshard.runtime.adaptive.controller_config import (
    POLICIES,
    ControllerConfig,
    chain_of,
    passes_of,
    wheel_of,
)
from foreshard.runtime.adaptive.stage_balancer import StageBalancer
from foreshard.runtime.records.durable_jsonl import DurableJsonl, Tell
from foreshard.spec.online import Command, DeviceSeen, Event, RankLost, StepMeasured
from foreshard.spec.plan import Plan

__all__ = ["POLICIES", "PROBE_EVERY", "ControllerConfig", "Steering", "chain_of", "wheel_of"]

PROBE_EVERY = 2
"""Steps between measurements of what is idle."""
_SAME_SPEED = 0.05
"""Part by which the speed of an idle rank has to change to be told."""
_KEPT_BYTES = 16 << 20
"""Of the controller's log, while the disk takes none."""


class _Log:
    """What the next to steer lives through: lines that a full disk refuses wait, and none is left out."""

    def __init__(self, path: Path, tell: Tell):
        self.lines, self._tell, self._goes_on = DurableJsonl(path, tell), tell, True

    def write(self, text: str) -> None:
        if not self._goes_on:
            return
        for line in text.splitlines():
            self.lines.add(json.loads(line))
        if self.lines.waiting_bytes > _KEPT_BYTES:
            self._goes_on = False  # a log with a gap would teach the next to steer what never was
            why = f"{self.lines.path.name}: {self.lines.waiting_bytes} bytes wait; later lines are not kept"
            self._tell("log given up", why, file=str(self.lines.path))


class Steering:
    """Feeds a controller and proposes what it orders; one a rank, at work on the rank that conducts.

    Parameters
    ----------
    wheel : ControllerConfig
    propose : callable of Command
    tell : callable of (kind, text, **facts), optional
        The operator's log, told when the disk refuses the controller's.
    """

    def __init__(
        self,
        wheel: ControllerConfig,
        propose: Callable[[Command], None],
        tell: Tell = lambda kind, text, **facts: None,
    ):
        self._wheel, self._propose, self._log = wheel, propose, _Log(wheel.log, tell)
        self._lab: Lab = load_lab(wheel.lab)
        self._controller: Controller | BaselinePolicy | StageBalancer | None = None
        self._there: frozenset[int] = frozenset(range(len(self._lab.slow)))
        self._proposed: tuple[int, Plan] | None = None
        self._clock_s: float | None = None
        self._last, self._orders = "", 0

    @property
    def controller(self) -> Controller | BaselinePolicy | StageBalancer:
        """The controller, brought up to what its log knows."""
        if self._controller is None:
            lived = self._wheel.log.read_text().splitlines() if self._wheel.log.exists() else []
            self._controller = self._wheel.controller()
            for line in lived:
                if '"event"' in line[:12] and line.endswith("}"):
                    self._live(event_of(line))
        return self._controller

    def flush(self) -> None:
        """Write what of the controller's log waits, as far as the disk takes it."""
        self._log.lines.flush()

    def _live(self, event: Event) -> None:
        assert self._controller is not None
        self._controller.on(event)
        if isinstance(event, RankLost):
            self._there -= {event.rank}
        if isinstance(event, DeviceSeen):
            self._there |= {event.rank}

    def stepped(
        self,
        *,
        step: int,
        time_s: float | None,
        running: Plan,
        ranks: Sequence[int],
        stage_s: Mapping[int, float],
        generation: int,
        link_s: Mapping[tuple[int, int], tuple[float, float]] | None = None,
        idle_s: Mapping[int, float] | None = None,
        clock_s: float | None = None,
    ) -> None:
        """Take in a step and who is there, and propose what follows from it.

        Parameters
        ----------
        step : int
        time_s : float or None
            None for a step that a change of ranks cut in two: it measures nothing.
        running : Plan
        ranks : sequence of int
            That are there, idle ones too.
        stage_s : mapping of rank to seconds per sample
        generation : int
        link_s : mapping of (source, target) to (bytes, seconds), optional
            The mean message of links that were timed.
        idle_s : mapping of rank to seconds per sample, optional
            Of the first layers, on ranks without samples.
        clock_s : float, optional
            When the step ended: the change before it is paid for too.
        """
        controller, wheel = self.controller, self._wheel
        # Steps done again after all ranks were lost cost again: to the controller they are further ones.
        step = max(step, controller.step + 1)
        events: list[Event] = [
            RankLost(step=step, rank=rank, reason="left the run") for rank in sorted(self._there - set(ranks))
        ]
        events += [DeviceSeen(step=step, rank=rank) for rank in sorted(set(ranks) - self._there)]
        self._there = frozenset(ranks)
        events += self._idle(step, running, idle_s or {})
        if time_s is not None:
            time_s = self._elapsed(time_s, clock_s)
            events.append(
                StepMeasured(
                    step=step,
                    time_s=time_s,
                    relative_speed=self._relative(running, stage_s),
                    link_s=link_s or {},
                    costs=self._spent(time_s, running, stage_s),
                )
            )
        for event in events:
            for command in logged(controller.on, event, self._log):
                self._order(command, generation)
        wanted = wheel.as_run(controller.plan)
        untouched = controller.step < 0 or _same(running, wheel.plan)
        if not untouched and not _same(running, wanted) and self._proposed != (generation, wanted):
            self._order(
                Command(kind="regroup", plan=controller.plan, reason="ranks have changed"), generation
            )

    def _elapsed(self, time_s: float, clock_s: float | None) -> float:
        """Return the seconds since the step before ended, where both ends are known."""
        before, self._clock_s = self._clock_s, clock_s
        if before is None or clock_s is None:
            return time_s
        return max(time_s, clock_s - before)

    def _idle(self, step: int, running: Plan, idle_s: Mapping[int, float]) -> list[Event]:
        """Return the speeds of idle ranks that have changed."""
        events: list[Event] = []
        passes, size = passes_of(self._wheel.costs, self._wheel.lab), running.groups[0].micro_batch
        for rank, seconds in sorted(idle_s.items()):
            relative = passes.sample_s(rank, (0, PROBED_LAYERS), size, size) / seconds
            before = float(_speeds(self.controller)[rank])
            if abs(relative / before - 1.0) > _SAME_SPEED:
                events.append(DeviceSeen(step=step, rank=rank, relative_speed=relative))
        return events

    def _relative(self, running: Plan, stage_s: Mapping[int, float]) -> dict[int, float]:
        """Return nominal over measured seconds of the layers and micro-batches that each rank ran."""
        passes, found = passes_of(self._wheel.costs, self._wheel.lab), {}
        for group in running.groups:
            for stage in group.stages:
                for rank, size in zip(stage.ranks, counts_of(stage, group.micro_batch), strict=True):
                    if stage_s.get(rank, 0.0) > 0.0 and size:
                        share = group.share if len(stage.ranks) == 1 else size
                        found[rank] = passes.sample_s(rank, stage.layers[0], share, size) / stage_s[rank]
        return found

    def _order(self, command: Command, generation: int) -> None:
        if command.plan is not None:
            plan = self._wheel.as_run(command.plan)
            self._proposed = (generation, plan)
            self._last, self._orders = f"{command.kind}: {command.reason}", self._orders + 1
            self._propose(replace(command, plan=plan))

    def _spent(self, time_s: float, plan: Plan, stage_s: Mapping[int, float]) -> dict[str, float]:
        work_s = {rank: stage_s.get(rank, 0.0) * own for rank, own in own_samples(plan).items()}
        budgets = self.controller.queues.budgets
        return {budget.name: spent(budget, self._lab, plan, time_s, work_s) for budget in budgets}

    def told(self, running: Plan) -> dict[str, Any]:
        """Return what the dashboard shows."""
        controller = self.controller
        queues = controller.queues
        told: dict[str, Any] = {
            "controller/policy": self._wheel.policy,
            "controller/weight": queues.weight,
            "controller/reconfigurations": controller.reconfigurations,
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
            told |= {
                f"budget/{budget.name}/backlog": queue.backlog,
                f"budget/{budget.name}/over": queue.violation,
                f"budget/{budget.name}/limit": budget.limit,
                f"budget/{budget.name}/mean": budget.limit * (1.0 + queue.violation),
            }
        return told

    def _bound_s(self) -> float:
        """Return the step of all ranks that are there if none ever waited: no plan is faster."""
        controller = self.controller
        ranks = sorted(self._there)
        rate = _speeds(controller)[ranks] / controller.chain.before_s[ranks, -1]
        return self._wheel.plan.global_batch / float(rate.sum())


def _speeds(controller: Controller | BaselinePolicy | StageBalancer) -> np.ndarray:
    return controller.speed if isinstance(controller, BaselinePolicy) else controller.estimates.state().speed


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


def _same(one: Plan, other: Plan) -> bool:
    """Return whether two plans give every rank the same layers and samples."""

    def told(plan: Plan) -> set[tuple[Any, ...]]:
        return {
            (group.share, *((stage.ranks, stage.layers, stage.rank_shares) for stage in group.stages))
            for group in plan.groups
        }

    return told(one) == told(other)
