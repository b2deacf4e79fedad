"""Timed sends of a schedule as a trace: a process per place, a track per peer and channel, arrows between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.errors import SpecError
from foreshard.spec.trace_events import arrow, names, time_slice

MAX_SENDS = 200_000  # about 100 MB of JSON, below what trace viewers open with ease


def send_trace(
    schedule: Schedule,
    start_s: Sequence[float] | np.ndarray,
    end_s: Sequence[float] | np.ndarray,
    *,
    num_bytes: float,
    max_sends: int = MAX_SENDS,
) -> dict[str, Any]:
    """Return the trace of sends as the object its JSON holds; ui.perfetto.dev opens it.

    Parameters
    ----------
    start_s, end_s : array-like of float, shape (sends,)
    num_bytes : float
        Size of the collective.
    max_sends : int
        Later sends are left out; `otherData` says how many.
    """
    starts, ends = np.asarray(start_s, dtype=float), np.asarray(end_s, dtype=float)
    legal = starts.shape == ends.shape == (schedule.num_sends,)
    if not legal or not (np.isfinite(starts) & np.isfinite(ends) & (starts <= ends)).all():
        raise SpecError(
            f"times of {schedule.num_sends} sends",
            key="start_s",
            value=str(starts.shape),
            rule="Each send has a finite start and an end not before it",
        )
    kept = np.argsort(starts, kind="stable")[:max_sends].tolist()
    tracks = _tracks(schedule, kept)
    events = [*_names(schedule, tracks)]
    for number, send in enumerate(kept, start=1):
        events += _events(schedule, send, number, tracks, float(starts[send]), float(ends[send]), num_bytes)
    return {
        "schemaVersion": 1,
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "collective": schedule.collective,
            "algorithm": schedule.algorithm,
            "omitted_sends": schedule.num_sends - len(kept),
        },
    }


_Lane = tuple[int, str]
"""Place, and what its track is called."""


def _lanes(schedule: Schedule, send: int) -> tuple[_Lane, _Lane]:
    """Return the tracks of a send at its source and at its target."""
    a, b, lane = (int(one[send]) for one in (schedule.source, schedule.target, schedule.channel))
    return (a, f"to {_place(schedule, b)}, channel {lane}"), (
        b,
        f"from {_place(schedule, a)}, channel {lane}",
    )


def _place(schedule: Schedule, place: int) -> str:
    ranks = schedule.num_ranks
    return str(place) if place < ranks else f"{schedule.switches[place - ranks]} {place - ranks}"


def _tracks(schedule: Schedule, sends: Sequence[int]) -> dict[_Lane, int]:
    """Return the number of each track at its place: those that send first."""
    found = sorted({lane for send in sends for lane in _lanes(schedule, send)}, key=_order)
    count: dict[int, int] = {}
    numbers = {}
    for lane in found:
        count[lane[0]] = count.get(lane[0], 0) + 1
        numbers[lane] = count[lane[0]]
    return numbers


def _order(lane: _Lane) -> tuple[int, bool, int, str]:
    return lane[0], lane[1].startswith("from"), len(lane[1]), lane[1]


def _names(schedule: Schedule, tracks: dict[_Lane, int]) -> Iterator[dict[str, Any]]:
    """Yield the names of places and tracks."""
    for place in range(schedule.num_places):
        own = {number: name for (where, name), number in tracks.items() if where == place}
        for event in names(place, f"{schedule.collective} {schedule.algorithm}", own):
            if event["name"] == "process_name" and place >= schedule.num_ranks:
                event["args"] = {"name": _place(schedule, place)}
            yield event


def _events(
    schedule: Schedule,
    send: int,
    number: int,
    tracks: dict[_Lane, int],
    start_s: float,
    end_s: float,
    num_bytes: float,
) -> Iterator[dict[str, Any]]:
    """Yield the slices of a send at both ends and the arrow between them."""
    chunk = int(schedule.chunk[send])
    args = {
        "send": send,
        "chunk": chunk,
        "bytes": float(schedule.weight[send]) * num_bytes,
        "reduce": bool(schedule.is_reduced[send]),
    }
    name = f"{'add' if schedule.is_reduced[send] else 'copy'} chunk {chunk}"
    ends = [
        time_slice(name, "kernel", (lane[0], tracks[lane]), start_s, end_s, args)
        for lane in _lanes(schedule, send)
    ]
    yield from ends
    yield from arrow(number, *ends)
