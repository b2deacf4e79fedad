"""The critical path of a step: the chain of tasks, each of which starts when the one before it ends.

Making any task on it faster makes the step faster until another chain is the longest; tasks beside it can
take longer without the step doing so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from foreshard.graph.pipeline_schedules import Op
from foreshard.graph.program import Kind, Program
from foreshard.predict.graph.lowering import Step
from foreshard.sim.critical_path import TaskTimes

_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_DATA = (Kind.PARAMETER_GATHER, Kind.GRADIENT_REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive tasks of one kind and place on the critical path."""

    kind: str  # of `graph.program.Kind` in small letters; wait where a task waits without another running
    group: int
    stage: int
    micro_batches: tuple[int, int]  # first and last, (-1, -1) where a task is of none
    parts_s: dict[str, float]  # its seconds by part of the step

    @property
    def seconds(self) -> float:
        """All its seconds."""
        return sum(self.parts_s.values())


def critical_tasks(program: Program, times: TaskTimes) -> list[int]:
    """Return the tasks of one longest chain, first to last; of equal ones, that of the lowest numbers.

    The end of each is the start of the next.
    """
    before_on_resource = np.full(program.num_tasks, -1)
    for r in range(len(program.resource_names)):
        tasks = program.resource_tasks[program.resource_indptr[r] : program.resource_indptr[r + 1]]
        before_on_resource[tasks[1:]] = tasks[:-1]
    task = int(times.end_s.argmax())
    chain = [task]
    while True:
        low, high = int(program.indptr[task]), int(program.indptr[task + 1])
        before = program.indices[low:high]
        candidates = list(zip(times.end_s[before].tolist(), before.tolist(), strict=True))
        if before_on_resource[task] >= 0:
            last = int(before_on_resource[task])
            candidates.append((float(times.end_s[last]), last))
        if not candidates:
            return chain[::-1]
        latest = max(ready_s for ready_s, _ in candidates)
        task = min(number for ready_s, number in candidates if ready_s == latest)
        chain.append(task)


def critical_path(step: Step, times: TaskTimes) -> tuple[Stretch, ...]:
    """Return the critical path as stretches; their seconds sum to the end of the last task."""
    return stretches(step.program, times, partial(_parts, step))


def stretches(
    program: Program, times: TaskTimes, parts: Callable[[int, float], dict[str, float]]
) -> tuple[Stretch, ...]:
    """Return the critical path of a program; `parts` gives the seconds of a task by part of the step."""
    made: list[Stretch] = []
    at = 0.0
    for task in critical_tasks(program, times):
        start_s, end_s = float(times.start_s[task]), float(times.end_s[task])
        if start_s > at:
            _append(made, program, task, {"bubble": start_s - at}, "wait")
        if end_s > start_s:
            seconds = parts(task, end_s - start_s)
            _append(made, program, task, seconds, Kind(int(program.kind[task])).name.lower())
        at = end_s
    return tuple(made)


def _append(made: list[Stretch], program: Program, task: int, parts_s: dict[str, float], kind: str) -> None:
    """Append a task, to the last stretch where that is of the same kind and place."""
    group, stage, batch = (int(label[task]) for label in (program.group, program.stage, program.micro_batch))
    last = made[-1] if made else None
    if last is not None and (last.kind, last.group, last.stage) == (kind, group, stage):
        sums = {
            name: last.parts_s.get(name, 0.0) + parts_s.get(name, 0.0) for name in {**last.parts_s, **parts_s}
        }
        batches = (min(last.micro_batches[0], batch), max(last.micro_batches[1], batch))
        made[-1] = Stretch(kind=kind, group=group, stage=stage, micro_batches=batches, parts_s=sums)
        return
    made.append(Stretch(kind=kind, group=group, stage=stage, micro_batches=(batch, batch), parts_s=parts_s))


def _parts(step: Step, task: int, seconds: float) -> dict[str, float]:
    """Return the seconds of a task by part of the step."""
    program = step.program
    kind = Kind(int(program.kind[task]))
    if kind in _SENDS:
        return {"pipeline_comm": seconds}
    lowered = next(group for group in step.groups if group.prices.index == program.group[task])
    sharding = lowered.prices.sharding_part(int(program.stage[task]))
    if kind in _DATA:
        return {sharding: seconds}
    if kind == Kind.OPTIMIZER:
        return {"optimizer": seconds}
    if kind > Kind.BACKWARD_WEIGHT:
        return {"bubble": seconds}
    prices = lowered.prices
    last = int(program.micro_batch[task] == prices.num_micro_batches - 1)
    place = (Op(int(kind)), int(program.stage[task]), int(program.chunk[task]), last)
    beside = float(step.data_s[task])
    whole = {name: float(value[place]) for name, value in prices.parts.items()}
    total = sum(whole.values())
    made = {name: (seconds - beside) * value / total for name, value in whole.items() if value > 0.0}
    if beside > 0.0:
        made[sharding] = made.get(sharding, 0.0) + beside
    return made
