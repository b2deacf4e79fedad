"""Engine `graph`: a step as a program of tasks, executed; the answer is read off the critical rank.

Single tasks come from `predict.tasks`; everything above them is order and dependency. One rank stands
for all ranks of a stage, one group for all equal groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foreshard.graph.program import Kind
from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.graph.edits import of_kernels, sped_up
from foreshard.predict.graph.launches import launch_wait_s
from foreshard.predict.graph.lowering import LoweredGroup, Step, lower
from foreshard.predict.graph.prices import GroupPrices, group_prices
from foreshard.predict.graph.transfers import SharedPorts, SharedStep, TransferTotals
from foreshard.predict.tasks.collectives import contention
from foreshard.sim import critical_path
from foreshard.sim.critical_path import TaskTimes
from foreshard.spec.prediction import TIME_PARTS, CollectiveTimes
from foreshard.spec.timeline import Timeline

MAX_TASKS = 20_000  # a few hundredths of a second in plain Python
_ROUNDS = (12, 18, 24)
_ROUNDING = 1e-12  # part of a step that sums of its times are off by at most


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A step whose tasks are priced, so that edits of them (`edits`) are executed without pricing again.

    Transfers run each by itself, or on `ports` that they share.
    """

    batch: Batch
    prices: list[GroupPrices]
    compiled: bool | None = False
    ports: SharedPorts | None = None

    @classmethod
    def of(
        cls,
        case: PlannedRun,
        batch: Batch,
        speeds: Mapping[str, float] | None = None,
        *,
        compiled: bool | None = False,
        ports: SharedPorts | None = None,
    ) -> PricedStep:
        """Return the step of a plan; `speeds` of classes of kernels are priced, the others are edits."""
        speeds = speeds or {}
        prices = sped_up(group_prices(case, batch, of_kernels(speeds)), speeds)
        return cls(batch, prices, compiled, ports)

    def parts(self, prices: list[GroupPrices] | None = None) -> dict[str, float]:
        """Return the exposed seconds by part, of the step or of an edit of its prices."""
        parts, _ = self.folded(self.prices if prices is None else prices)
        parts["straggler"] = ranks_wait_s(self.batch, sum(parts.values()))
        return parts

    def executed(self, prices: list[GroupPrices] | None = None) -> tuple[Step, TaskTimes, SharedStep | None]:
        """Return the program of the step, or of an edit, and when its tasks run; third, on shared ports."""
        step = lower(self.prices if prices is None else prices, slowdown_beside(self.batch))
        if self.ports is None:
            return step, critical_path.run(step.program, compiled=bool(self.compiled)), None
        shared = self.ports.run(step, compiled=self.compiled)
        return step, shared.run.times, shared

    def folded(self, prices: list[GroupPrices]) -> tuple[dict[str, float], TransferTotals | None]:
        """Return parts and totals of a step with ranks alike, folding the steady state of a very large one.

        Past the warm-up every round of as many micro-batches as there are stages takes the same time, so
        shorter runs tell a round's parts; where three of them are not in line, the whole is run. Several
        groups are never folded: they meet at their ends.
        """
        first = prices[0]
        rounds = first.num_micro_batches // first.num_stages
        if len(prices) > 1 or rounds <= 2 * _ROUNDS[2] or first.num_tasks <= MAX_TASKS:
            return step_parts(*self.executed(prices))
        runs = [step_parts(*self.executed([first.without(rounds - kept)])) for kept in _ROUNDS]
        few_s, some_s, more_s = (sum(parts.values()) for parts, _ in runs)
        if abs((more_s - some_s) - (some_s - few_s)) > 1e-9 * more_s:
            return step_parts(*self.executed(prices))
        times = (rounds - _ROUNDS[2]) / (_ROUNDS[2] - _ROUNDS[1])
        (some, before), (more, after) = runs[1:]
        parts = {name: max(0.0, float(v + times * (v - some[name]))) for name, v in more.items()}
        parts["compute"] += more_s + times * (more_s - some_s) - sum(parts.values())
        return parts, None if before is None or after is None else after.beyond(before, times)


def graph_times(
    case: PlannedRun,
    batch: Batch,
    *,
    timeline: bool,
    compiled: bool = False,
    speeds: Mapping[str, float] | None = None,
) -> tuple[dict[str, float], Timeline | None]:
    """Return the exposed seconds of a step by part on the critical rank, and when each task runs if asked.

    The parts are all of `TIME_PARTS` and sum to the step. Numba (`compiled`) gives the same result. `speeds`
    makes classes of tasks so many times as fast (`edits`).

    Source
    ------
    docs/derivations/step.md.
    """
    return _times(PricedStep.of(case, batch, speeds, compiled=compiled), case, timeline)[:2]


def shared_times(
    case: PlannedRun, batch: Batch, *, timeline: bool, compiled: bool | None = None
) -> tuple[dict[str, float], Timeline | None, tuple[CollectiveTimes, ...]]:
    """Return the same where all transfers share the network, and what that does to each class of them.

    The slowdown of computation beside collectives is that of `graph_times`; `compiled` as in
    `comm.flow.simulation.simulate`.
    """
    priced = PricedStep.of(case, batch, compiled=compiled, ports=SharedPorts.of(case, batch))
    parts, events, totals = _times(priced, case, timeline)
    return parts, events, () if totals is None else totals.by_class(sum(parts.values()))


def _times(
    priced: PricedStep, case: PlannedRun, timeline: bool
) -> tuple[dict[str, float], Timeline | None, TransferTotals | None]:
    """Return the parts of a step, when each task runs if asked, and what was measured of shared transfers."""
    parts, totals = priced.folded(priced.prices)
    makespan_s = sum(parts.values())
    parts["straggler"] = ranks_wait_s(priced.batch, makespan_s)
    if not timeline:
        return parts, None, totals
    from foreshard.predict.graph.timeline import timeline_of

    step, times, _ = priced.executed()
    until_s = times.makespan_s * (sum(parts.values()) / makespan_s)
    return parts, timeline_of(case, step, times, until_s), totals


def slowdown_beside(batch: Batch) -> float:
    """Return what a second of collectives beside computation adds to it, seconds."""
    return float(np.max(contention(batch.machine)))


def ranks_wait_s(batch: Batch, makespan_s: float) -> float:
    """Return how long a step of so many seconds waits for its slowest rank, by the number of devices."""
    num_devices = float(np.asarray(batch.pipeline.num_devices).flat[0])
    doublings = max(0.0, float(np.log2(max(num_devices, 1.0) / 8.0)))
    return float(batch.machine.constants.jitter) * doublings * makespan_s


def step_parts(
    step: Step, times: TaskTimes, shared: SharedStep | None
) -> tuple[dict[str, float], TransferTotals | None]:
    """Assign every second of the critical rank to one part; total its transfers where they shared ports."""
    lowered, stage = _critical(step, times)
    prices = lowered.prices
    parts = dict.fromkeys(TIME_PARTS, 0.0)
    repeats = lowered.repeats(stage)
    for name, seconds in prices.parts.items():
        parts[name] += float((seconds[:, stage] * repeats).sum())
    on_rank = _on_rank(step, lowered, stage)
    sharding = prices.sharding_part(stage)
    parts[sharding] += float(step.data_s[on_rank].sum())
    parts["optimizer"] += float(prices.optimizer_s[stage])
    if shared is not None:
        for name, added_s in shared.added_s(on_rank).items():
            parts[name] += added_s
    busy_until_s = np.append(0.0, times.end_s[on_rank])
    gaps = np.stack([busy_until_s, np.append(times.start_s[on_rank], times.makespan_s)], axis=1)
    messages = _messages(lowered, stage)
    data = np.array(lowered.data[stage], dtype=np.int64)
    hidden = _covered(gaps, times, messages)
    either = _covered(gaps, times, np.concatenate([messages, data]))
    parts["pipeline_comm"] += hidden
    parts[sharding] += either - hidden
    idle_s = float((gaps[:, 1] - gaps[:, 0]).sum()) - either
    parts["bubble"] = idle_s if idle_s > _ROUNDING * times.makespan_s else 0.0
    if lowered.launches:
        launching_s = launch_wait_s(step.program, times, on_rank, lowered.launches[stage][1])
        launching_s = min(launching_s, parts["bubble"])
        parts["host"] += launching_s
        parts["bubble"] -= launching_s
    # Sums of a million terms differ in their last bits; the largest part takes the difference.
    parts["compute"] += times.makespan_s - sum(parts.values())
    return parts, None if shared is None else shared.totals(step, prices.index, stage)


def _critical(step: Step, times: TaskTimes) -> tuple[LoweredGroup, int]:
    """Return the group whose gradients are ready last, and its stage that computes longest."""
    ready_s = [
        max(
            float(times.end_s[lowered.last[lowered.last_gradient(s, 0)]])
            for s in range(lowered.prices.num_stages)
        )
        for lowered in step.groups
    ]
    slowest = step.groups[int(np.argmax(ready_s))]
    stages = range(slowest.prices.num_stages)
    return slowest, max(
        stages, key=lambda s: float(step.program.duration_s[_on_rank(step, slowest, s)].sum())
    )


def _on_rank(step: Step, lowered: LoweredGroup, stage: int) -> np.ndarray:
    """Return the tasks of a stage's compute stream, in order."""
    program = step.program
    stream = program.resource_names.index(f"group{lowered.prices.index}.stage{stage}.compute")
    return program.resource_tasks[program.resource_indptr[stream] : program.resource_indptr[stream + 1]]


def _messages(lowered: LoweredGroup, stage: int) -> np.ndarray:
    """Return the transfers a stage takes part in; only those it receives where they overlap compute."""
    shape, count = lowered.shape, lowered.prices.num_stages
    to = np.where(shape.to_next, shape.stage + 1, shape.stage - 1) % count
    is_send = (shape.kind == Kind.SEND_FORWARD) | (shape.kind == Kind.SEND_BACKWARD)
    mine = (to == stage) | ((shape.stage == stage) & (not lowered.prices.overlap_p2p))
    return lowered.first[is_send & mine]


def _covered(gaps: np.ndarray, times: TaskTimes, tasks: np.ndarray) -> float:
    """Return how many seconds of the gaps lie under the tasks."""
    if len(tasks) == 0:
        return 0.0
    order = np.argsort(times.start_s[tasks], kind="stable")
    start, end = times.start_s[tasks][order], np.maximum.accumulate(times.end_s[tasks][order])
    # Union of intervals: each begins where those before it have ended.
    start = np.maximum(start, np.append(-np.inf, end[:-1]))
    length = np.maximum(end - start, 0.0)
    keep = length > 0.0
    if not keep.any():
        return 0.0
    edges = np.stack([start[keep], end[keep]], axis=1).ravel()
    filled = np.stack([np.cumsum(length[keep]) - length[keep], np.cumsum(length[keep])], axis=1).ravel()
    inside = np.interp(gaps, edges, filled)
    return float((inside[:, 1] - inside[:, 0]).sum())
