"""The longest path of pipelines whose schedule has no closed form: that through their order of work.

Chunks of a stage take equal time here; `predict.graph` has the time of each.
"""

from __future__ import annotations

import math

import numpy as np

from foreshard.graph.pace import PipelineRows, PipelineSpan
from foreshard.graph.pipeline import pipeline_durations, pipeline_shape, program_of
from foreshard.graph.pipeline_schedules import BY_ORDER, FOLDED
from foreshard.graph.program import Kind
from foreshard.sim import critical_path


def span_by_order(rows: PipelineRows, span: PipelineSpan, by_order: np.ndarray) -> PipelineSpan:
    """Return the span with the pipelines in it that go by their order of work.

    `by_order` is 1 + the place of their schedule in `BY_ORDER`, 0 for all others, shape (pipelines,).
    """
    seconds, run, data_s = (np.array(values) for values in span)
    for column in np.flatnonzero(by_order).tolist():
        schedule = BY_ORDER[int(by_order[column]) - 1]
        if rows.stages[column] > 1:
            seconds[column], run[column], data_s[column] = _path(rows, column, schedule)
    return PipelineSpan(seconds=seconds, run=run, data_s=data_s)


def _path(rows: PipelineRows, column: int, schedule: str) -> tuple[float, int, float]:
    """Return seconds, the run of stages that sets the pace, and seconds of weights and gradients on it."""
    count = rows.count[:, column].astype(int)
    stages = np.repeat(np.arange(len(count)), count)  # the run of each stage
    chunks = 2 if schedule in FOLDED else 1
    passes = math.ceil(rows.rounds[column] / chunks - 1e-9)
    shape = pipeline_shape(
        schedule,
        num_stages=len(stages),
        num_micro_batches=2 * passes if schedule == "dualpipe" else passes,
        num_chunks=chunks,
        overlap_p2p=True,
    )
    forward_s, given_s, weight_s = (
        np.repeat(values[stages, column][:, None], chunks, axis=1)
        for values in (rows.forward_s, rows.backward_s, rows.late_s / chunks)
    )
    inside_s = rows.inside_s[:, column] / np.maximum(count - 1, 1)
    is_last = np.append(stages[1:] != stages[:-1], True)
    send_s = np.where(is_last, rows.after_s[stages, column], inside_s[stages])[: len(stages) - (chunks == 1)]
    durations_s = pipeline_durations(
        shape,
        forward_s=forward_s,
        backward_s=given_s + weight_s,
        backward_input_s=given_s,
        backward_weight_s=weight_s,
        send_forward_s=send_s,
        send_backward_s=send_s,
    )
    times = critical_path.run(program_of(shape, durations_s))
    ends_s = np.array([times.end_s[last].max() for last in shape.last]) + rows.tail_s[stages, column]
    ready_s = rows.ready_s[0, column]
    is_op = shape.kind <= Kind.BACKWARD_WEIGHT
    busy_s = np.bincount(shape.stage[is_op], weights=durations_s[is_op], minlength=len(stages))
    slowest = int(busy_s.argmax())
    return (
        float(ends_s.max() + ready_s),
        int(stages[slowest]),
        float(rows.tail_s[stages[slowest], column] + ready_s),
    )
