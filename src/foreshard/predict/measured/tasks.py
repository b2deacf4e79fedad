"""The tasks of a step by part of it: its critical path, and its timeline of one rank a stage."""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.graph.program import Kind
from foreshard.predict.graph.critical import Stretch, stretches
from foreshard.predict.graph.timeline import whole_timeline
from foreshard.predict.measured.lowering import MeasuredStep, RankTasks
from foreshard.sim.critical_path import TaskTimes
from foreshard.spec.plan import Plan
from foreshard.spec.timeline import Event, Timeline
from foreshard.spec.variation import StepDistribution

_PARTS = {
    "recompute_s": ("recompute", "compute", "recompute"),
    "compute_s": ("compute", "compute", None),
    "tensor_s": ("tensor_comm", "tensor", "tensor"),
    "host_s": ("host", "host", "launch"),
}
"""By the work of a rank: part of the step, stream and name of a task, None for that of the task itself."""
_WHOLE = {
    Kind.SEND_FORWARD: "pipeline_comm",
    Kind.SEND_BACKWARD: "pipeline_comm",
    Kind.PARAMETER_GATHER: "data_comm",
    Kind.GRADIENT_REDUCE: "data_comm",
    Kind.OPTIMIZER: "optimizer",
}
"""Kinds of tasks that are of one part."""


def critical_path(step: MeasuredStep, times: TaskTimes) -> tuple[Stretch, ...]:
    """Return the critical path as stretches; their seconds sum to the end of the last task."""
    busiest = _busiest(step)

    def parts(task: int, seconds: float) -> dict[str, float]:
        return {part: length for part, _, _, length in _parts(step, busiest, task, seconds)}

    return stretches(step.program, times, parts)


def timeline(
    step: MeasuredStep, plan: Plan, times: TaskTimes, distribution: StepDistribution | None = None
) -> Timeline:
    """Return when the tasks of the first rank of each stage run, in order of start.

    The step ends with its last task. Where ranks differ it is as long as their `distribution` has it on
    average, and what follows the last task is waiting for stragglers. A measured step moves nothing.
    """
    step_time_s = times.makespan_s if distribution is None else distribution.mean_s
    first = {
        (g, s): stage.ranks[0] for g, group in enumerate(plan.groups) for s, stage in enumerate(group.stages)
    }
    return whole_timeline(list(_events(step, first, times)), first, times.makespan_s, step_time_s)


def _events(step: MeasuredStep, first: dict[tuple[int, int], int], times: TaskTimes) -> Iterator[Event]:
    program, busiest = step.program, _busiest(step)
    shown = {step.ranks[rank].optimizer for rank in first.values()}
    for task in range(program.num_tasks):
        start_s, end_s = float(times.start_s[task]), float(times.end_s[task])
        kind, where = Kind(int(program.kind[task])), (int(program.group[task]), int(program.stage[task]))
        if end_s <= start_s or where not in first or (kind is Kind.OPTIMIZER and task not in shown):
            continue
        at = start_s
        for part, stream, name, seconds in _parts(step, busiest, task, end_s - start_s):
            yield Event(
                rank=first[where],
                group=where[0],
                stage=where[1],
                stream=stream,
                name=name,
                part=part,
                start_s=at,
                end_s=at + seconds,
                micro_batch=int(program.micro_batch[task]),
                chunk=int(program.chunk[task]),
            )
            at += seconds


def _busiest(step: MeasuredStep) -> dict[tuple[int, int], RankTasks]:
    """Return the rank of each stage that its passes wait for."""
    found: dict[tuple[int, int], RankTasks] = {}
    for tasks in step.ranks.values():
        where = tasks.group, tasks.place
        if where not in found or sum(tasks.work_s.values()) > sum(found[where].work_s.values()):
            found[where] = tasks
    return found


def _parts(
    step: MeasuredStep, busiest: dict[tuple[int, int], RankTasks], task: int, seconds: float
) -> Iterator[tuple[str, str, str, float]]:
    """Yield (part, stream, name, seconds) of a task; of a pass, in the shares of all passes of its stage."""
    program = step.program
    kind = Kind(int(program.kind[task]))
    name = kind.name.lower()
    if kind in _WHOLE:
        part = _WHOLE[kind]
        yield part, "compute" if part == "optimizer" else name, name, seconds
        return
    tasks = busiest.get((int(program.group[task]), int(program.stage[task])))
    if tasks is None:  # all ranks agree on how to go on
        yield "bubble", "compute", name, seconds
        return
    total = sum(tasks.work_s.values()) or 1.0
    for work, (part, stream, label) in _PARTS.items():
        if tasks.work_s[work] > 0.0:
            yield part, stream, label or name, seconds * tasks.work_s[work] / total
