"""Which task hands its result to which: the transfers between pipeline stages, as pairs of events."""

from __future__ import annotations

from foreshard.spec.timeline import Event, Timeline

# (kind of op, kind of its transfer, direction along the pipeline)
_DIRECTIONS = (("forward", "send_forward", 1), ("backward", "send_backward", -1))


def kind_of(event: Event) -> str:
    """Return the leading word of an event's name: forward, backward, send_forward, ..."""
    return event.name.split(" ", 1)[0].split(":", 1)[0].lower()


def pipeline_flows(timeline: Timeline) -> list[tuple[Event, Event]]:
    """Return (producer, consumer) for each micro-batch that passes from one virtual stage to the next.

    The producer is the transfer where the timeline has one, else the op itself; the consumer is the op on
    the neighbouring virtual stage. Pairs whose consumer starts before the producer are left out.
    """
    by_place: dict[tuple[str, int, int, int, int], Event] = {}
    shape: dict[int, tuple[int, int]] = {}
    for event in timeline.events:
        if event.micro_batch < 0:
            continue
        chunk = max(event.chunk, 0)
        by_place.setdefault((kind_of(event), event.group, event.stage, chunk, event.micro_batch), event)
        stages, chunks = shape.get(event.group, (0, 0))
        shape[event.group] = max(stages, event.stage + 1), max(chunks, chunk + 1)
    flows = []
    for (kind, group, stage, chunk, micro_batch), event in by_place.items():
        for op, send, direction in _DIRECTIONS:
            if kind != op and not (op == "backward" and kind == "backward_input"):
                continue
            place = _neighbour(stage, chunk, direction, shape[group])
            if place is None:
                continue
            target = by_place.get((kind, group, *place, micro_batch))
            source = by_place.get((send, group, stage, chunk, micro_batch), event)
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
