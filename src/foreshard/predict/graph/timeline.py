"""When each task of a predicted step runs, as events that the Gantt chart and the trace draw.

An op holds many layers; its parts are drawn one after another, each as long as in all layers together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from foreshard.graph.pipeline_schedules import Op
from foreshard.graph.program import Kind
from foreshard.predict.batch import PlannedRun
from foreshard.predict.graph.lowering import LoweredGroup, Step
from foreshard.sim.critical_path import TaskTimes
from foreshard.spec.timeline import Event, Timeline

# (part, stream, name); None is the name of the op itself
_PARTS = (
    ("recompute", "compute", "recompute"),
    ("compute", "compute", None),
    ("tensor_comm", "tensor", "tensor"),
    ("context_comm", "context", "context"),
    ("expert_comm", "expert", "expert"),
    ("host", "host", "launch"),
)
# Of each (op, stage, chunk, last micro-batch): (part, stream, name, share of the op)
_Table = dict[tuple[int, int, int, bool], list[tuple[str, str, str | None, float]]]
_NAMES = [kind.name.lower() for kind in Kind]
_SENDS = (int(Kind.SEND_FORWARD), int(Kind.SEND_BACKWARD))


def timeline_of(case: PlannedRun, step: Step, times: TaskTimes, step_time_s: float) -> Timeline:
    """Return the events of one rank per stage of every distinct group, in order of start.

    What follows the last task up to `step_time_s` is waiting for stragglers.
    """
    events: list[Event] = []
    places: dict[tuple[int, int], int] = {}
    for lowered in step.groups:
        stages = case.plan.groups[lowered.prices.index].stages
        ranks = [stage.ranks[0] for stage in stages]
        events += _pipeline_events(step, lowered, times, ranks)
        events += _once_events(step, lowered, times, ranks)
        places |= {(lowered.prices.index, s): rank for s, rank in enumerate(ranks)}
    return whole_timeline(events, places, times.makespan_s, step_time_s)


def whole_timeline(
    events: list[Event], ranks: Mapping[tuple[int, int], int], makespan_s: float, step_time_s: float
) -> Timeline:
    """Return a step in order of start; from its last task on, the rank of each (group, stage) waits."""
    if step_time_s > makespan_s:
        for (group, stage), rank in ranks.items():
            place: dict[str, Any] = {"rank": rank, "group": group, "stage": stage, "stream": "compute"}
            span: dict[str, Any] = {"start_s": makespan_s, "end_s": step_time_s}
            events.append(Event(name="wait for stragglers", part="straggler", **place, **span))
    events.sort(key=lambda event: (event.start_s, event.rank))
    return Timeline(events=tuple(events), step_time_s=step_time_s)


def _pipeline_events(
    step: Step, lowered: LoweredGroup, times: TaskTimes, ranks: list[int]
) -> Iterator[Event]:
    """Yield ops by part and transfers."""
    program, group = step.program, lowered.prices.index
    shares = _shares(lowered)
    last_batch = lowered.prices.num_micro_batches - 1
    tasks = np.arange(lowered.first[0], lowered.last[-1] + 1)
    labels = (program.kind, program.stage, program.chunk, program.micro_batch)
    columns = (*labels, times.start_s, times.end_s, step.data_s)
    for kind, stage, chunk, micro_batch, start_s, end_s, data_s in zip(
        *(column[tasks].tolist() for column in columns), strict=True
    ):
        if end_s <= start_s:
            continue
        place: dict[str, Any] = {"rank": ranks[stage], "group": group, "stage": stage}
        place |= {"micro_batch": micro_batch, "chunk": chunk}
        name = _NAMES[kind]
        if kind in _SENDS:
            yield Event(stream=name, name=name, part="pipeline_comm", start_s=start_s, end_s=end_s, **place)
            continue
        at, length = start_s, end_s - data_s - start_s
        for part, stream, label, share in shares[kind, stage, chunk, micro_batch == last_batch]:
            until = at + share * length
            yield Event(stream=stream, name=label or name, part=part, start_s=at, end_s=until, **place)
            at = until
        if data_s > 0.0:
            part = lowered.prices.sharding_part(stage)
            name = "shared" if part == "data_comm" else "copied"
            yield Event(stream="compute", name=name, part=part, start_s=at, end_s=end_s, **place)


def _shares(lowered: LoweredGroup) -> _Table:
    """Return the parts of every op and the share each has of it."""
    prices = lowered.prices
    op_s = prices.op_s
    table: _Table = {}
    for op in Op:
        for s in range(prices.num_stages):
            for c in range(prices.num_chunks):
                for last in (False, True):
                    place = (op, s, c, int(last))
                    total = max(float(op_s[place]), 1e-30)
                    row = [(*drawn, float(prices.parts[drawn[0]][place]) / total) for drawn in _PARTS]
                    table[int(op), s, c, last] = [entry for entry in row if entry[3] > 0.0]
    return table


def _once_events(step: Step, lowered: LoweredGroup, times: TaskTimes, ranks: list[int]) -> Iterator[Event]:
    """Yield collectives of gradients and weights, the optimizer, and launches on a thread of their own."""
    program, group = step.program, lowered.prices.index
    streams = [("optimizer", "compute", [task]) for task in lowered.optimizer]
    streams += [(lowered.prices.sharding_part(s), "", tasks) for s, tasks in enumerate(lowered.data)]
    streams += [("host", "host", tasks.tolist()) for _, tasks in lowered.launches]
    for part, stream, tasks in streams:
        for task in tasks:
            start_s, end_s = float(times.start_s[task]), float(times.end_s[task])
            if end_s <= start_s:
                continue
            stage, kind = int(program.stage[task]), Kind(int(program.kind[task]))
            yield Event(
                rank=ranks[stage],
                group=group,
                stage=stage,
                stream=stream or kind.name.lower(),
                name=kind.name.lower(),
                part=part,
                start_s=start_s,
                end_s=end_s,
                micro_batch=int(program.micro_batch[task]),
                chunk=int(program.chunk[task]),
            )
