"""The longest path of pipelines whose schedule has no closed form: that through their order of work.

Chunks of a stage take equal time here, and their weights and gradients what `end_of_step` says of a chunk;
`predict.graph` has the time of each, bucket by bucket.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from foreshard.graph.pace import PipelineRows, PipelineSpan
from foreshard.graph.pipeline import PipelineShape, add_pipeline, pipeline_durations, pipeline_shape
from foreshard.graph.pipeline_schedules import BY_ORDER, FOLDED
from foreshard.graph.program import Kind, ProgramBuilder
from foreshard.predict.analytical.end_of_step import EndOfStep
from foreshard.predict.analytical.stage import StageTimes
from foreshard.predict.batch import Batch, Boundaries
from foreshard.sim import critical_path
from foreshard.spec.plan import TURNING


def span_by_order(
    batch: Batch, stage: StageTimes, end: EndOfStep, rows: PipelineRows, span: PipelineSpan
) -> PipelineSpan:
    """Return the span with the pipelines in it that go by their order of work."""
    seconds, run, data_s = (np.array(values) for values in span)
    by_order = np.broadcast_to(batch.pipeline.by_order, rows.rounds[None].shape)[0]
    for column in np.flatnonzero(by_order * (rows.stages > 1)).tolist():
        path = _Order(batch, stage, end, rows, column, BY_ORDER[int(by_order[column]) - 1]).path()
        seconds[column], run[column], data_s[column] = path
    return PipelineSpan(seconds=seconds, run=run, data_s=data_s)


class _Order:
    """One pipeline, stage by stage."""

    def __init__(
        self, batch: Batch, stage: StageTimes, end: EndOfStep, rows: PipelineRows, column: int, schedule: str
    ):
        self.rows, self.column, self.end = rows, column, end
        count = rows.count[:, column].astype(int)
        self.run = np.repeat(np.arange(len(count)), count)  # of each stage
        self.num_chunks = 2 if schedule in FOLDED else 1
        self.ends = 2 if schedule == "dualpipe" else 1  # of the pipeline that micro-batches enter at
        passes = math.ceil(rows.rounds[column] / self.num_chunks - 1e-9)
        self.op_s = self._of_chunks(batch, stage, schedule)
        places, messages = batch.boundaries, stage.messages
        self.is_far = self._far_boundaries(count, places)
        near_s, far_s, after_s = (
            self._of_stages(seconds) for seconds in (messages.near, messages.far, messages.after)
        )
        is_last = np.append(self.run[1:] != self.run[:-1], True)
        send_s = np.where(is_last, after_s, np.where(self.is_far, far_s, near_s))
        self.send_s = send_s[: len(send_s) - (self.num_chunks == 1)]
        shape = pipeline_shape(
            schedule,
            num_stages=len(self.run),
            num_micro_batches=self.ends * passes,
            num_chunks=self.num_chunks,
            overlap_p2p=True,
        )
        self.shape = self._with_ports(shape)

    def _of_stages(self, values: object) -> np.ndarray:
        """Return a field of runs and pipelines for each stage of this one."""
        whole = np.broadcast_to(np.asarray(values), self.rows.count.shape)
        return np.asarray(whole[self.run, self.column])

    def _of_chunks(self, batch: Batch, stage: StageTimes, schedule: str) -> list[np.ndarray]:
        """Return seconds of forward, gradients of inputs and gradients of weights, shape (stages, chunks).

        Of an odd number of layers the first chunk has one more. The head is in the last chunk of the model;
        under dualpipe the second chunks of stages are those of the other end.
        """
        layers, count = np.maximum(self._of_stages(sum(batch.counts)), 1.0), len(self.run)
        first = np.ceil(layers / 2.0) / layers if schedule in TURNING else np.full(count, 0.5)
        shares = np.stack([first, 1.0 - first], axis=1) if self.num_chunks > 1 else np.ones((count, 1))
        with_head = np.full(count, self.num_chunks - 1)
        if schedule == "dualpipe":
            with_head[count // 2 :] = 0
        found = []
        rows, chunks = self.rows, self.num_chunks
        for whole, head in zip(
            (rows.forward_s * chunks, rows.backward_s * chunks, rows.late_s), stage.head, strict=True
        ):
            whole_s, head_s = self._of_stages(whole), self._of_stages(head)
            head_s = np.minimum(head_s, whole_s)
            seconds = shares * (whole_s - head_s)[:, None]
            seconds[np.arange(count), with_head] += head_s
            found.append(seconds)
        return found

    def _of_micro_batches(self, seconds: np.ndarray) -> np.ndarray:
        """Return seconds of chunks for each micro-batch, of which the last may be short.

        Where they enter at both ends, rows count the last two as one: each chunk has half of them.
        """
        each = np.repeat(seconds[..., None], self.shape.ops.shape[3], axis=-1)
        missing = self.ends * (1.0 - self._of_stages(self.rows.last_share))
        each[..., -1] *= 1.0 - missing[:, None]
        return each

    def _far_boundaries(self, count: np.ndarray, places: Boundaries) -> np.ndarray:
        """Return whether the boundary after each stage leaves a link domain."""
        found: list[bool] = []
        inside, last = (
            np.broadcast_to(values, self.rows.count.shape)[:, self.column]
            for values in (places.far_inside, places.far_last)
        )
        for r in np.flatnonzero(count):
            found += [*_far_inside(len(found), count[r] - 1, int(inside[r])), bool(last[r] > 0)]
        return np.array(found, dtype=bool)

    def _with_ports(self, shape: PipelineShape) -> PipelineShape:
        """Return the shape with one port to the network and one to the link domain of each stage."""
        names, count = list(shape.resource_names), len(self.run)
        for stage in range(count):
            for stream, boundary in ((1, stage), (2, stage - 1)):
                if 0 <= boundary < count - 1:
                    port = "network" if self.is_far[boundary] else "link"
                    names[stream * count + stage] = f"stage{stage}.send_{port}"
        return replace(shape, resource_names=tuple(names))

    def path(self) -> tuple[float, int, float]:
        """Return seconds, the run of stages that sets the pace, and what weights and gradients take of it."""
        rows, shape = self.rows, self.shape
        forward_s, given_s, weight_s = map(self._of_micro_batches, self.op_s)
        durations_s = pipeline_durations(
            shape,
            forward_s=forward_s,
            backward_s=given_s + weight_s,
            backward_input_s=given_s,
            backward_weight_s=weight_s,
            send_forward_s=self.send_s,
            send_backward_s=self.send_s,
        )
        is_op = shape.kind <= Kind.BACKWARD_WEIGHT
        busy_s = np.bincount(shape.stage[is_op], weights=durations_s[is_op], minlength=len(self.run))
        first, last = _ends(shape)
        durations_s[first] += self._of_stages(rows.wait_s)[:, None]
        builder = ProgramBuilder()
        ops = add_pipeline(builder, shape, durations_s)
        self._add_waits(builder)
        self._add_weights(builder, first)
        ends = self._add_gradients(builder, last)
        times = critical_path.run(builder.build())
        compute_s = [times.end_s[tasks].max() for tasks in ops.last]
        ends_s = np.maximum(times.end_s[ends], compute_s) + self._of_stages(self.end.sums)
        slowest = int(busy_s.argmax())
        exposed_s = ends_s[slowest] - compute_s[slowest] + self._of_stages(self.end.ready)[slowest]
        return float(ends_s.max()), int(self.run[slowest]), float(exposed_s)

    def _add_waits(self, builder: ProgramBuilder) -> None:
        """Let ops that follow each other wait for sharded weights; a stage that is idle has them before."""
        after_s, behind_s = (
            self._of_stages(values) for values in (self.rows.after_forward_s, self.rows.behind_s)
        )
        if not (after_s.any() or behind_s.any()):
            return
        stage, is_forward = self.shape.stage, self.shape.kind == Kind.FORWARD
        ops = np.flatnonzero(self.shape.kind <= Kind.BACKWARD_WEIGHT)[:-1]
        ops = ops[stage[ops] == stage[ops + 1]]
        is_behind = ~is_forward[ops] & is_forward[ops + 1]
        seconds = np.where(is_forward[ops], after_s[stage[ops]], is_behind * behind_s[stage[ops]])
        names = np.array([builder.resource(f"stage{i}.waits") for i in range(len(self.run))])
        tasks = builder.add_many(names[stage[ops]], seconds)
        builder.depend(tasks, ops)
        builder.depend(ops + 1, tasks)

    def _add_weights(self, builder: ProgramBuilder, first: np.ndarray) -> None:
        """Gather the weights of each chunk before its first forward, one chunk after the other."""
        # What other chunks of several buckets wait for is in their first forwards.
        next_s = self._of_stages(np.where(self.end.cut, 0.0, self.end.next_chunk))
        ready_s = self._of_stages(self.end.ready)
        for stage in range(len(self.run)):
            for place, task in enumerate(np.sort(first[stage]).tolist()):
                seconds = float(next_s[stage] if place else ready_s[stage])
                builder.depend(task, builder.add(f"stage{stage}.data", seconds))

    def _add_gradients(self, builder: ProgramBuilder, last: np.ndarray) -> np.ndarray:
        """Reduce gradients of each chunk from its last backward on; return the last task of each stage."""
        beside_s, exposed_s, cut, last_of_all = (
            self._of_stages(values)
            for values in (self.end.beside, self.end.exposed, self.end.cut, self.end.last_of_all)
        )
        ends = np.zeros(len(self.run), dtype=np.int64)
        for stage in range(len(self.run)):
            of_all = int(last[stage].max())
            for chunk in np.argsort(last[stage]).tolist():
                # Tasks of a stage follow each other: the one before ends when this one may begin.
                task, is_cut = int(last[stage, chunk]), cut[stage] or stage + chunk == 0
                hidden_s = float(beside_s[stage]) if is_cut else 0.0
                builder.add(f"stage{stage}.data", hidden_s, [max(task - 1, 0)])
                left_s = float(beside_s[stage] + exposed_s[stage]) - hidden_s
                after = of_all if last_of_all[stage] else task
                ends[stage] = builder.add(f"stage{stage}.data", left_s, [after])
        return ends


def _far_inside(first: int, number: int, far: int) -> np.ndarray:
    """Return which of so many boundaries that follow each other leave a link domain.

    Domains hold as many stages each, from the first stage of the pipeline on; where that is not so, the
    boundaries are at equal distances.
    """
    stages = np.arange(first, first + number) + 1
    for size in range(1, first + number + 2):
        leaves = stages % size == 0
        if np.count_nonzero(leaves) == far:
            return leaves
    return np.diff(np.arange(number + 1) * far // max(number, 1)) > 0


def _ends(shape: PipelineShape) -> tuple[np.ndarray, np.ndarray]:
    """Return the first forward of each chunk of each stage, and its last backward: shape (stages, chunks)."""
    forwards = shape.ops[Kind.FORWARD]
    first = np.where(forwards >= 0, forwards, len(shape.kind)).min(-1)
    return first, shape.ops[[Kind.BACKWARD, Kind.BACKWARD_WEIGHT]].max((0, -1))
