"""The predicted step as a trace: a process per rank, a track per stream, arrows for transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from foreshard.file_replacement import replace_file
from foreshard.report.plan_words import place_of, plan_line
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction
from foreshard.spec.timeline import Event, Timeline
from foreshard.spec.trace_events import arrow, encoded, names, nanoseconds, time_slice

MAX_EVENTS = 400_000  # about 100 MB of JSON, below what trace viewers open with ease
_NCCL = {
    "tensor_comm": "ncclDevKernel_AllReduce",
    "context_comm": "ncclDevKernel_SendRecv",
    "expert_comm": "ncclDevKernel_SendRecv",
    "pipeline_comm": "ncclDevKernel_SendRecv",
    "data_comm": "ncclDevKernel_ReduceScatter",
}
_NO_KERNEL = {"host": "cuda_runtime", "straggler": "user_annotation"}
_ANNOTATIONS = 0  # track of the step's own span; streams follow
# (kind of op, kind of its transfer, direction along the pipeline)
_DIRECTIONS = (("forward", "send_forward", 1), ("backward", "send_backward", -1))

_Place = tuple[str, int, int, int, int]  # kind, group, stage, chunk, micro-batch


def trace_object(
    prediction: Prediction, timeline: Timeline, *, max_events: int = MAX_EVENTS
) -> dict[str, Any]:
    """Return the trace as the object its JSON holds.

    Tasks beyond `max_events`, the latest, are left out; `otherData` says how many, and how long the drawn
    step takes, which a measured step does not scale.
    """
    kept = [event for event in timeline.events if event.end_s > event.start_s][:max_events]
    omitted = max(0, len(timeline.events) - max_events)
    tracks = _tracks(kept)
    events = [*_names(prediction.plan, tracks), *_steps(timeline, tracks)]
    slices = {
        event: _slice(event, track, i, prediction.plan)
        for i, (event, track) in enumerate(tracks.items(), start=1)
    }
    events += slices.values()
    flows = [pair for pair in pipeline_flows(timeline) if pair[0] in slices and pair[1] in slices]
    for number, (source, target) in enumerate(flows, start=1):
        events += arrow(number, slices[source], slices[target])
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": f"{prediction.model} on {prediction.cluster}",
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": len(prediction.plan.ranks)},
        "otherData": {
            "predicted": "true",
            "plan": plan_line(prediction.plan),
            "step_time_s": str(prediction.step_time_s),
            "drawn_step_time_s": str(timeline.step_time_s),
            "omitted_events": str(omitted),
        },
        "traceEvents": events,
    }


def write_trace(path: str, prediction: Prediction, timeline: Timeline) -> int:
    """Write the trace, compressed when the path ends in .gz, and return how many bytes it takes."""
    raw = encoded(trace_object(prediction, timeline), path)
    return replace_file(path, raw)


class _Tracks(dict[Event, tuple[int, int]]):
    """(rank, track) of each event, and the name of each track."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[tuple[int, int], str] = {}


def _tracks(events: Sequence[Event]) -> _Tracks:
    """Give each stream of each rank a track, and a further lane where tasks of a stream overlap.

    Viewers do not support overlapping slices on one track.
    """
    tracks = _Tracks()
    lanes: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.start_s, e.end_s)):
        start, end = nanoseconds(event.start_s), nanoseconds(event.end_s)
        free = lanes.setdefault((event.rank, event.stream), [])
        for lane, (track, busy_until) in enumerate(free):
            if busy_until <= start:
                free[lane] = track, end
                break
        else:
            track = 1 + sum(rank == event.rank for rank, _ in tracks.names)
            tracks.names[event.rank, track] = event.stream + (f" ({len(free) + 1})" if free else "")
            free.append((track, end))
        tracks[event] = event.rank, track
    return tracks


def _names(plan: Plan, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    """Yield the names of processes and threads, in order of rank."""
    for rank in sorted({rank for rank, _ in tracks.names}):
        group, stage = place_of(plan, rank)
        same = len(plan.groups[group].stages[stage].ranks)
        like = f", as the other {same - 1} ranks of its stage" if same > 1 else ""
        streams = {
            track: f"stream {track} {name}" for (of, track), name in tracks.names.items() if of == rank
        }
        yield from names(rank, f"group {group}, stage {stage}{like}", {_ANNOTATIONS: "step", **streams})


def _steps(timeline: Timeline, tracks: _Tracks) -> Iterator[dict[str, Any]]:
    for rank in sorted({rank for rank, _ in tracks.names}):
        track, end_s = (rank, _ANNOTATIONS), timeline.step_time_s
        yield time_slice("ProfilerStep#0", "user_annotation", track, 0.0, end_s, {})


def _kernel_name(event: Event, sequence_parallel: bool) -> str:
    """Return the name a measured trace would show, and what the task is in ours."""
    nccl = _NCCL.get(event.part)
    if (
        nccl is None or event.stream == "compute"
    ):  # compute that a collective beside it slows is no collective
        return event.name
    if event.part == "tensor_comm" and sequence_parallel:
        nccl = "ncclDevKernel_AllGather_ReduceScatter"
    if event.part == "data_comm" and "gather" in event.name.lower():
        nccl = "ncclDevKernel_AllGather"
    return f"{nccl} {event.name}"


def _slice(event: Event, track: tuple[int, int], number: int, plan: Plan) -> dict[str, Any]:
    args = {
        "stream": track[1],
        "device": event.rank,
        "correlation": number,
        "part": event.part,
        "stage": event.stage,
    }
    if event.micro_batch >= 0:
        args["micro_batch"] = event.micro_batch
    if event.chunk >= 0:
        args["chunk"] = event.chunk
    name, category = _kernel_name(event, plan.groups[event.group].sp), _NO_KERNEL.get(event.part, "kernel")
    return time_slice(name, category, track, event.start_s, event.end_s, args)


def kind_of(event: Event) -> str:
    """Return the leading word of an event's name: forward, backward, send_forward, ..."""
    return event.name.split(" ", 1)[0].split(":", 1)[0].lower()


def pipeline_flows(timeline: Timeline) -> list[tuple[Event, Event]]:
    """Return (producer, consumer) for each micro-batch that passes from one virtual stage to the next.

    The producer is the transfer where the timeline has one, else the op itself; the consumer is the op on
    the neighbouring virtual stage. Where an op is cut into pieces, the last produces and the first consumes.
    Pairs whose consumer starts before the producer are left out.
    """
    first: dict[_Place, Event] = {}
    last: dict[_Place, Event] = {}
    shape: dict[int, tuple[int, int]] = {}
    for event in timeline.events:
        if event.micro_batch < 0:
            continue
        place = (kind_of(event), event.group, event.stage, max(event.chunk, 0), event.micro_batch)
        first.setdefault(place, event)
        last[place] = event
        stages, chunks = shape.get(event.group, (0, 0))
        shape[event.group] = max(stages, event.stage + 1), max(chunks, event.chunk + 1, 1)
    flows = []
    for (kind, group, stage, chunk, micro_batch), event in last.items():
        for op, send, direction in _DIRECTIONS:
            to = _neighbour(stage, chunk, direction, shape[group]) if kind in (op, f"{op}_input") else None
            if to is None:
                continue
            target = first.get((kind, group, *to, micro_batch))
            source = first.get((send, group, stage, chunk, micro_batch), event)
            if target is not None and target.start_s >= source.start_s and target.rank != source.rank:
                flows.append((source, target))
    return flows


def _neighbour(stage: int, chunk: int, direction: int, shape: tuple[int, int]) -> tuple[int, int] | None:
    """Return the virtual stage after (before) this one: chunks wrap round the pipeline."""
    stages, chunks = shape
    virtual = chunk * stages + stage + direction
    if not 0 <= virtual < stages * chunks:
        return None
    return virtual % stages, virtual // stages
