"""Engine `event`: a whole step simulated from event to event; its parts are read off the critical rank.

Tasks, their seconds and their dependencies are those of the graph engine. Without contention both engines
find the same times, by different algorithms: the longest path there, a queue of events here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.graph.engine import ranks_wait_s, slowdown_beside, step_parts
from foreshard.predict.graph.lowering import Step, lower
from foreshard.predict.graph.prices import group_prices
from foreshard.predict.graph.timeline import timeline_of
from foreshard.predict.graph.transfers import SharedPorts, SharedStep
from foreshard.sim import contention
from foreshard.sim.contention import Phases, SharedNetwork
from foreshard.sim.critical_path import TaskTimes
from foreshard.spec.prediction import CollectiveTimes
from foreshard.spec.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventStep:
    """A step that was simulated: its program, when tasks ran, and what sharing added (None without)."""

    step: Step
    times: TaskTimes
    shared: SharedStep | None


def event_times(
    case: PlannedRun, batch: Batch, *, network: str, timeline: bool, compiled: bool | None = None
) -> tuple[dict[str, float], Timeline | None, tuple[CollectiveTimes, ...]]:
    """Return the exposed seconds of a step by part, when each task runs if asked, and shared transfers.

    Parameters
    ----------
    case, batch
    network : {'flow', 'closed-form'}
        Whether transfers share links and NICs, or each takes its own time.
    timeline : bool
    compiled : bool, optional
        As in `sim.contention.run`.
    """
    run = simulated(case, batch, network=network, compiled=compiled)
    parts, totals = step_parts(run.step, run.times, run.shared)
    makespan_s = sum(parts.values())
    parts["straggler"] = ranks_wait_s(batch, makespan_s)
    step_s = sum(parts.values())
    events = None
    if timeline:
        events = timeline_of(case, run.step, run.times, run.times.makespan_s * step_s / makespan_s)
    return parts, events, () if totals is None else totals.by_class(step_s)


def simulated(case: PlannedRun, batch: Batch, *, network: str, compiled: bool | None = None) -> EventStep:
    """Return the step of a plan, every micro-batch of it simulated."""
    step = lower(group_prices(case, batch), slowdown_beside(batch))
    if network == "flow":
        shared = SharedPorts.of(case, batch).run(step, compiled=compiled)
        return EventStep(step=step, times=shared.run.times, shared=shared)
    alone = contention.run(step.program, _alone(step), SharedNetwork(), compiled=compiled)
    return EventStep(step=step, times=alone.times, shared=None)


def _alone(step: Step) -> Phases:
    """Return one phase without bytes for each task: its seconds by the closed forms."""
    count = step.program.num_tasks
    return Phases(
        task=np.arange(count),
        delay_s=step.program.duration_s,
        num_bytes=np.zeros(count),
        route=np.full(count, -1),
        beside=np.zeros(count, dtype=bool),
    )
