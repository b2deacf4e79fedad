"""Engine `event`: a whole step simulated from event to event; its parts are read off the critical rank.

Tasks, their seconds and their dependencies are those of the graph engine. Without contention both engines
find the same times, by different algorithms: the longest path there, a queue of events here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreshard.errors import SpecError
from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.event.noise import NoisyStep
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
from foreshard.spec.variation import Noise, StepDistribution


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventStep:
    """A step that was simulated: its program, when tasks ran, and what sharing added (None without)."""

    step: Step
    times: TaskTimes
    shared: SharedStep | None


def event_times(
    case: PlannedRun,
    batch: Batch,
    *,
    network: str,
    timeline: bool,
    noise: Noise | None = None,
    host_thread: bool = False,
    compiled: bool | None = None,
) -> tuple[dict[str, float], Timeline | None, tuple[CollectiveTimes, ...], StepDistribution | None]:
    """Return the parts of a step, when its tasks run, what sharing does to transfers, and how it varies.

    The parts sum to the (mean) step; the timeline has all ranks alike.

    Parameters
    ----------
    case, batch
    network : {'flow', 'closed-form'}
        Whether transfers share links and NICs, or each takes its own time.
    timeline : bool
        Whether to list when each task runs.
    noise : Noise, optional
        How ranks differ.
    host_thread : bool
        Whether launches are tasks of a thread that runs ahead of the device, or parts of each pass.
    compiled : bool, optional
        As in `sim.contention.run`.

    Raises
    ------
    SpecError
        If the noise names ranks that are not in the plan, or slow links where none are shared.
    """
    run = simulated(case, batch, network=network, host_thread=host_thread, compiled=compiled)
    parts, totals = step_parts(run.step, run.times, run.shared)
    alike_s = sum(parts.values())
    parts["straggler"], distribution = ranks_wait_s(batch, alike_s), None
    if noise is not None:
        distribution = _distribution(
            case, batch, run, noise, network=network, host_thread=host_thread, compiled=compiled
        )
        parts["straggler"] = distribution.mean_s - alike_s
    step_s = sum(parts.values())
    events = None
    if timeline:
        events = timeline_of(case, run.step, run.times, run.times.makespan_s * step_s / alike_s)
    classes = () if totals is None else totals.by_class(step_s)
    return parts, events, classes, distribution


def _distribution(
    case: PlannedRun,
    batch: Batch,
    alike: EventStep,
    noise: Noise,
    *,
    network: str,
    host_thread: bool,
    compiled: bool | None,
) -> StepDistribution:
    """Return the seconds of a step over many draws, and what each kind of noise adds.

    Stated jitter replaces the wait for the slowest rank that the constants of training know.
    """
    noise.check_ranks(case.plan.ranks)
    run, alike_s = alike, alike.times.makespan_s
    if noise.slow_link:
        run = simulated(
            case,
            batch,
            network=network,
            host_thread=host_thread,
            compiled=compiled,
            slow_link=noise.slow_link,
        )
    links_s = run.times.makespan_s - alike_s
    step = NoisyStep.of(case, run.step, run.times, run.shared, compiled=compiled)
    all_s, jitter_s = step.seconds(noise), 0.0
    if noise.jitter > 0.0:
        even = step.seconds(noise.without_slow_ranks()) if noise.slow else all_s
        jitter_s = float(even.mean()) - run.times.makespan_s
    else:
        usual_s = ranks_wait_s(batch, alike_s)
        alike_s, all_s = alike_s + usual_s, all_s + usual_s
    return StepDistribution.of(
        all_s.tolist(),
        alike_s=alike_s,
        jitter_s=jitter_s,
        slow_links_s=links_s,
        seed=noise.seed,
        contention=step.contention(noise),
    )


def simulated(
    case: PlannedRun,
    batch: Batch,
    *,
    network: str,
    host_thread: bool = False,
    compiled: bool | None = None,
    slow_link: Mapping[int, float] | None = None,
) -> EventStep:
    """Return the step of a plan, every micro-batch of it simulated with all ranks alike.

    Links and NIC of the ranks of `slow_link` carry so many times less.

    Raises
    ------
    SpecError
        If links are slow where transfers share none.
    """
    if slow_link and network != "flow":
        raise SpecError(
            "slow links where transfers share no links",
            key="--slow-link",
            value=next(iter(slow_link)),
            rule="The closed forms know links by kind, the flow network those of each stage",
            fix="Leave out --network, or use --network flow",
        )
    prices = group_prices(case, batch)
    if host_thread:
        prices = [price.on_host_thread() for price in prices]
    step = lower(prices, slowdown_beside(batch))
    if network == "flow":
        shared = SharedPorts.of(case, batch, slow_link).run(step, compiled=compiled)
        return EventStep(step=step, times=shared.run.times, shared=shared)
    alone = contention.run(step.program, Phases.alone(step.program), SharedNetwork(), compiled=compiled)
    return EventStep(step=step, times=alone.times, shared=None)
