"""Engine `analytical`: closed formulas over a batch of pipelines.

What one micro-batch takes on every stage, and the longest path through the pipeline: down the stages, the
steady state on one of them, up again, with the gradient and weight collectives that nothing hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from foreshard.graph.pace import PipelineRows, PipelineSpan, pipeline_span
from foreshard.predict.analytical.by_order import span_by_order
from foreshard.predict.analytical.end_of_step import EndOfStep, end_of_step, way_of
from foreshard.predict.analytical.stage import StageTimes, stage_times
from foreshard.predict.batch import Batch
from foreshard.spec.prediction import TIME_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step for each pipeline, shape (pipelines,); parts sum to `total`."""

    total: np.ndarray
    parts: dict[str, np.ndarray]
    update_s: np.ndarray  # from the last gradient on: the optimizer, gathering weights behind it


def _of_run(run: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return what picks one run of each pipeline from an array (runs, pipelines)."""
    flat = run * run.size + np.arange(run.size)
    return lambda values: np.broadcast_to(values, (values.shape[0], run.size)).take(flat)


def _rows(batch: Batch, stage: StageTimes, end: EndOfStep) -> PipelineRows:
    """Return the runs of stages as `pipeline_span` takes them."""
    p, places, count = batch.pipeline, batch.boundaries, batch.multiplicity
    shape, messages, chunks = count.shape, stage.messages, p.num_chunks
    behind = p.num_stages - 1.0 - places.first
    is_cut = chunks > 1
    is_beside = is_cut | (p.zero_bubble > 0)
    warm_up = np.where(is_cut, 2.0 * behind + (chunks - 1.0) * p.num_stages, behind)
    after_last = messages.after
    after_first = np.where(count > 1, np.where(places.far_first > 0, messages.far, messages.near), after_last)
    is_last = places.first + count >= p.num_stages
    way = way_of(batch, stage)
    forward, backward = stage.forward / chunks, (stage.backward - stage.later) / chunks
    after_forward = after_backward = behind = np.zeros(shape)
    if stage.waits is not None:
        after_forward, after_backward = (
            stage.waits.after_forward / chunks,
            stage.waits.after_backward / chunks,
        )
        behind = stage.waits.behind_backward / chunks
    layers = np.broadcast_to(sum(batch.counts), shape) * 1.0
    each = np.maximum(layers, 1.0)
    rounds = p.num_micro_batches
    whole = np.ceil(rounds - 1e-9)

    def full(values: Any) -> np.ndarray:
        return np.broadcast_to(values, shape) * 1.0

    return PipelineRows(
        count=count,
        forward_s=full(forward - after_forward - behind),
        backward_s=full(backward - after_backward),
        after_forward_s=full(after_forward),
        after_backward_s=full(after_backward),
        behind_s=full(behind),
        inside_s=full(way.inside),
        after_s=way.after,
        wrap_s=way.wrap,
        beside_s=full(np.where(is_cut, messages.widest, np.where(is_beside, 0.0, messages.each))),
        widest_s=full(messages.widest),
        period_s=full(stage.total / chunks),
        call_first_s=np.where(is_beside | (is_last & (count <= 1)), 0.0, after_first),
        call_s=np.where(is_beside, 0.0, way.after),
        late_s=full(stage.later),
        warm_up=full(np.where(p.all_forward > 0, whole, warm_up)),
        per_stage=full(np.where(p.all_forward > 0, 0.0, 1.0 + is_cut)),
        ready_s=full(end.first_s),
        wait_s=full(end.wait / chunks),
        tail_s=full(end.tail_s),
        slowed_s=full(end.slowed),
        last_share=full(stage.last_share),
        layers=full(layers / chunks),
        layer_forward_s=full((stage.forward - stage.head[0]) / each),
        layer_backward_s=full((stage.backward - stage.head[1] - stage.head[2]) / each),
        rounds=full(whole * chunks)[0],
        chunks=full(chunks)[0],
        stages=full(p.num_stages)[0],
    )


def _unequal_chunks_s(batch: Batch, rows: PipelineRows) -> np.ndarray:
    """Return seconds that stages wait for each other where chunks differ by a layer, shape (pipelines,).

    The way down and up passes the larger chunks. In the steady state every stage comes from a larger chunk to
    a smaller one once in a turn of as many micro-batches as stages, one after the other, and waits in part;
    where one stage sets the pace, the others wait anyway. The first two turns have waits of their own.
    """
    layers = np.broadcast_to(sum(batch.counts), rows.count.shape)
    chunks, present = rows.chunks, rows.count > 0
    if not np.count_nonzero((chunks > 1.0) & present & (np.mod(layers, chunks) > 0.0)):
        return np.zeros_like(chunks)
    each = chunks * (rows.forward_s + rows.backward_s) / np.maximum(layers, 1.0)
    layer_s = np.where(present & (layers > 0.0), each, np.inf).min(0)
    layer_s = np.where((chunks > 1.0) & (rows.stages > 1.0) & np.isfinite(layer_s), layer_s, 0.0)
    larger, smaller = np.ceil(layers / chunks), np.floor(layers / chunks)
    over, gap = (np.where(present, n, 0.0) for n in (larger - layers / chunks, larger - smaller))
    fill = (rows.count * over).sum(0) - over.max(0)
    least = np.where(present, smaller, np.inf).min(0)
    turn = (rows.count * gap).sum(0) - 2.0 * gap.max(0) - least
    turns = np.maximum(rows.rounds / chunks / np.maximum(rows.stages, 1.0) - 2.0, 0.0)
    pair_s = rows.forward_s + rows.backward_s
    idle_s = np.where(present, pair_s, 0.0).max(0) - np.where(present, pair_s, np.inf).min(0)
    return layer_s * fill + turns * np.maximum(layer_s * turn - rows.stages * chunks * idle_s, 0.0)


def step_times(batch: Batch, *, joined: bool = False) -> StepTimes:
    """Return the step time of every pipeline and its parts on the rank that sets the pace.

    Pipelines of one plan that are `joined` have no gradients before the slowest of them.

    Source
    ------
    docs/derivations/step.md.
    """
    stage = stage_times(batch)
    end = end_of_step(batch, stage)
    rows = _rows(batch, stage, end)
    span = pipeline_span(rows)
    span = span._replace(seconds=span.seconds + _unequal_chunks_s(batch, rows))
    if np.count_nonzero(batch.pipeline.by_order):
        span = span_by_order(batch, stage, end, rows, span)
    waits = _waits(batch, rows, span) if joined and any(count > 1 for count in batch.num_groups) else 0.0
    pace = _of_run(span.run)
    num_devices, m = np.asarray(batch.pipeline.num_devices)[0], batch.pipeline.num_micro_batches
    parts = {name: pace(m * value) for name, value in stage.parts.items()}
    extra = np.ceil(m - 1e-9) - 1.0 + stage.last_share - m
    more = pace(extra * (stage.forward + stage.backward) - stage.reduce_once)
    parts["host"] = np.maximum(parts["host"] + more, 0.0)  # where it is none, rounding
    parts["data_comm"] = parts["data_comm"] + pace(stage.reduce_once)
    parts["data_comm"] = parts["data_comm"] + span.data_s
    # Collectives and messages of other stages run beside the last work of the one that sets the pace.
    for name in ("data_comm", "pipeline_comm"):
        beside_s = np.maximum(sum(parts.values()) - span.seconds, 0.0)
        parts[name] = np.maximum(parts[name] - beside_s, 0.0)
    busy = sum(parts.values())
    parts["bubble"] = np.maximum(span.seconds - busy, 0.0) + waits
    update_s = np.where(batch.multiplicity > 0, end.update_s, 0.0)
    updates_last = _of_run(update_s.argmax(0))
    parts["optimizer"] = updates_last(end.optimizer)
    parts["data_comm"] = parts["data_comm"] + updates_last(end.late_gather)
    busy = busy + parts["bubble"] + updates_last(update_s)
    doublings = np.maximum(0.0, np.log2(np.maximum(num_devices, 1.0) / 8.0))
    parts["straggler"] = batch.machine.constants.jitter * doublings * busy
    return StepTimes(total=busy + parts["straggler"], parts=parts, update_s=updates_last(update_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastGradients:
    """The stages of one group, each with the layers whose gradients it has last; shape (stages,)."""

    start: np.ndarray
    stop: np.ndarray
    ready_s: np.ndarray
    tail_s: np.ndarray


def _last_gradients(batch: Batch, rows: PipelineRows) -> list[_LastGradients]:
    """Return of each pipeline when its stages have their last gradients, the first stage last of all."""
    ends_s = pipeline_span(replace(rows, tail_s=np.zeros_like(rows.tail_s))).seconds
    layers = np.broadcast_to(sum(batch.counts) / batch.pipeline.num_chunks, rows.count.shape)
    found = []
    for g, end_s in enumerate(ends_s.tolist()):
        count = rows.count[:, g].astype(int)
        run = np.repeat(np.arange(len(count)), count)
        stop = layers[run, g].cumsum()
        start = stop - layers[run, g]
        start[0], stop[-1] = start[0] - 1.0, stop[-1] + 1.0  # the tables of both ends
        message_s = rows.inside_s[run, g] / np.maximum(count[run] - 1, 1)
        message_s[count.cumsum()[count > 0] - 1] = rows.after_s[count > 0, g]
        passed_s = rows.last_share[run, g] * rows.backward_s[run, g] + message_s
        found.append(
            _LastGradients(
                start=start,
                stop=stop,
                ready_s=end_s - (passed_s.cumsum() - passed_s),
                tail_s=rows.tail_s[run, g],
            )
        )
    return found


def _waits(batch: Batch, rows: PipelineRows, span: PipelineSpan) -> np.ndarray:
    """Return how long each pipeline has to wait for gradients of the others, seconds.

    The gradients of a stage are summed when every pipeline has those of its layers.
    """
    every, ends_s = iter(_last_gradients(batch, rows)), span.seconds.tolist()
    at = 0
    for count in batch.num_groups:
        groups = list(islice(every, count))
        for place, own in enumerate(groups if count > 1 else (), at):
            ready_s = np.full(len(own.start), -np.inf)
            for other in groups:
                shared = (own.start[:, None] < other.stop) & (other.start < own.stop[:, None])
                ready_s = np.maximum(ready_s, np.where(shared, other.ready_s, -np.inf).max(1))
            ends_s[place] = (ready_s + own.tail_s).max()
        at += count
    return np.maximum(0.0, np.array(ends_s) - span.seconds)


def slowest_parts(step: StepTimes, first: int = 0, count: int | None = None) -> dict[str, float]:
    """Return the parts of the group that the others wait for, of so many groups of one plan from the first.

    Gradients join all groups, so every optimizer starts after the slowest group; the slowest of them ends
    the step.
    """
    own = slice(first, None if count is None else first + count)
    last = step.update_s[own]
    slowest = int((step.total[own] - last).argmax())
    parts = {name: float(step.parts[name][first + slowest]) for name in TIME_PARTS}
    parts["bubble"] += float(last.max() - last[slowest])
    return parts
