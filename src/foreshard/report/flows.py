"""Which task hands its result to which: the transfers between pipeline stages, as pairs of events."""

from __future__ import annotations

from foreshard.spec.timeline import Event, Timeline

# (kind of op, kind of its transfer, direction along the pipeline)
_DIRECTIONS = (("forward", "send_forward", 1), ("backward", "send_backward", -1))

_Place = tuple[str, int, int, int, int]  # kind, group, stage, chunk, micro-batch


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
