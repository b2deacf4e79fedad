"""Records when each rank did what, in a ring buffer of spans, and writes it as a trace in Kineto's format.

Spans have the names and categories of the predicted trace (`foreshard predict --trace`), so that both open in
the same viewers: a process per rank, a track of compute, a track of the phases in between.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshard.errors import SpecError
from foreshard.file_replacement import replace_file
from foreshard.spec.plan import Plan
from foreshard.spec.trace_events import arrow, encoded, names, time_slice

CAPACITY = 200_000  # spans, about 40 MB
_STEP, _COMPUTE, _PHASES = 0, 1, 2
_TRACKS = {_STEP: "step", _COMPUTE: "stream 1 compute", _PHASES: "phases"}
_NO_SPAN = frozenset(("forward", "backward"))
"""Phases whose actions are spans of their own."""
Span = tuple[int, str, int, int, float, float, int, int]
"""(track, name, chunk, micro-batch, start_s, end_s, step, index of the place)."""


class TraceRecorder:
    """The latest spans of a rank, up to `capacity`; newer ones replace older ones.

    All times are of one clock, which has a name; with `epoch_s` added they are seconds since 1970 (0 for a
    virtual clock).
    """

    def __init__(self, rank: int, *, clock: str = "wall", epoch_s: float = 0.0, capacity: int = CAPACITY):
        self.rank, self.clock, self.epoch_s = rank, clock, epoch_s
        self._ring: list[Span | None] = [None] * capacity
        self._capacity, self._count = capacity, 0
        self._step, self._place = 0, 0
        self._places: list[_Place] = [_Place()]
        self._plan: Plan | None = None
        self._phase: tuple[str, float] | None = None
        self._began_s: float | None = None

    @property
    def omitted(self) -> int:
        """Spans that were replaced by later ones."""
        return max(0, self._count - self._capacity)

    def add(self, name: str, chunk: int, batch: int, start_s: float, end_s: float) -> None:
        """Add an action of the schedule; called by the executor."""
        self._put(_COMPUTE, name, chunk, batch, start_s, end_s)

    def begin_step(self, step: int, plan: Plan, now_s: float) -> None:
        """Begin a step under a plan."""
        self.close(now_s)
        self._step, self._began_s = step, now_s
        if plan is not self._plan:
            self._plan = plan
            self._place = len(self._places)
            self._places.append(_place_of(plan, self.rank))

    def phase(self, name: str, now_s: float) -> None:
        """Begin a phase between the actions: gradients, vote, update, migration, rebuild."""
        if self._phase is not None:
            before, began_s = self._phase
            if now_s > began_s:
                self._put(_PHASES, before, -1, -1, began_s, now_s)
        self._phase = None if name in _NO_SPAN else (name, now_s)

    def close(self, now_s: float) -> None:
        """End the phase and the step that have begun."""
        self.phase("forward", now_s)
        if self._began_s is not None:
            self._put(_STEP, f"ProfilerStep#{self._step}", -1, -1, self._began_s, now_s)
        self._began_s = None

    def _put(self, track: int, name: str, chunk: int, batch: int, start_s: float, end_s: float) -> None:
        span = (track, name, chunk, batch, start_s, end_s, self._step, self._place)
        self._ring[self._count % self._capacity] = span
        self._count += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the trace of this rank as the object its JSON holds."""
        seats = dict.fromkeys(f"group {p.group}, stage {p.stage}" for p in self._places if p.group >= 0)
        return _trace(
            [*names(self.rank, "; ".join(seats) or "idle", _TRACKS), *self._spans()],
            clock=self.clock,
            ranks=1,
            first=self.rank,
            omitted=self.omitted,
            epoch_s=self.epoch_s,
        )

    def write(self, path: str | Path) -> int:
        """Write the trace of this rank, compressed where the path ends in .gz; return its bytes."""
        return _write(path, self.to_dict())

    def _spans(self) -> Iterator[dict[str, Any]]:
        kept = [span for span in self._ring if span is not None]
        for number, span in enumerate(sorted(kept, key=lambda s: s[4]), start=1):
            track, name, chunk, batch, start_s, end_s, step, place = span
            args: dict[str, Any] = {"step": step}
            category = "user_annotation"
            if track == _COMPUTE:
                category = "kernel"
                args |= {"stream": track, "device": self.rank, "correlation": number, "part": "compute"}
                args |= {"chunk": chunk, "micro_batch": batch, **self._places[place].of_chunk(chunk)}
            yield time_slice(name, category, (self.rank, track), start_s, end_s, args)


def wall_epoch_s() -> float:
    """Return the seconds since 1970 at which the wall clock of a run is 0: it aligns hosts in one trace."""
    return time.time() - time.perf_counter()


def merge(paths: Iterable[str | Path], out: str | Path) -> int:
    """Join the traces of ranks into one, with arrows from stage to stage, and return its bytes.

    Times are counted from the earliest span of all ranks. Traces are whole, and of one clock.
    """
    found = [_read(Path(path)) for path in paths]
    if not found:
        raise SpecError("no trace of any rank", file=str(out), key="trace", fix="Run with --trace")
    clocks = sorted({trace["otherData"]["clock"] for trace in found})
    if len(clocks) > 1:
        what, rule = "traces of different clocks", "The ranks of a run share a clock"
        raise SpecError(what, file=str(out), key="clock", value=", ".join(clocks), rule=rule)
    timed = ((event, trace) for trace in found for event in trace["traceEvents"] if event["ph"] != "M")
    begin_us = min((event["ts"] + trace["baseTimeNanoseconds"] / 1e3 for event, trace in timed), default=0.0)
    events = [_shifted(event, trace, begin_us) for trace in found for event in trace["traceEvents"]]
    events.sort(key=lambda e: (e["ph"] != "M", e["ts"], e["pid"]))
    events += list(_arrows(events))
    joined = _trace(
        events,
        clock=clocks[0],
        ranks=len(found),
        epoch_s=begin_us / 1e6,
        first=min(trace["distributedInfo"]["rank"] for trace in found),
        omitted=sum(int(trace["otherData"]["omitted_events"]) for trace in found),
    )
    return _write(out, joined)


def _trace(
    events: list[dict[str, Any]], *, clock: str, ranks: int, first: int, omitted: int, epoch_s: float
) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": "foreshard run",
        "distributedInfo": {"rank": first, "world_size": ranks},
        "baseTimeNanoseconds": round(epoch_s * 1e9),
        "otherData": {"measured": "true", "clock": clock, "omitted_events": str(omitted)},
        "traceEvents": events,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place of a rank in a plan; -1 for an idle rank."""

    group: int = -1
    stage: int = -1
    stages: int = 0
    layers: tuple[tuple[int, int], ...] = ()

    def of_chunk(self, chunk: int) -> dict[str, Any]:
        """Return the arguments of a chunk's spans."""
        args: dict[str, Any] = {"group": self.group, "stage": self.stage}
        if chunk < len(self.layers):
            args["layers"] = list(self.layers[chunk])
        return args | {"virtual_stage": chunk * self.stages + self.stage}


def _place_of(plan: Plan, rank: int) -> _Place:
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            if rank in stage.ranks:
                return _Place(group=g, stage=s, stages=len(group.stages), layers=stage.layers)
    return _Place()


def _shifted(event: dict[str, Any], trace: dict[str, Any], begin_us: float) -> dict[str, Any]:
    if event["ph"] == "M":
        return event
    return event | {"ts": round(event["ts"] + trace["baseTimeNanoseconds"] / 1e3 - begin_us, 3)}


def _arrows(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield both ends of each transfer between stages: forwards go up a pipeline, backwards down."""
    directions = {"forward": 1, "backward": -1, "backward_input": -1}
    ends: dict[tuple[int, int, int, int, int], list[dict[str, Any]]] = {}
    for event in events:
        direction = directions.get(event["name"]) if event.get("cat") == "kernel" else None
        if direction is not None:
            args = event["args"]
            key = (args["step"], args["group"], args["micro_batch"], args["virtual_stage"], direction)
            ends.setdefault(key, []).append(event)
    number = 0
    for (step, group, batch, virtual, direction), sources in ends.items():
        for source in sources:
            for target in ends.get((step, group, batch, virtual + direction, direction), ()):
                if target["pid"] != source["pid"]:
                    number += 1
                    yield from arrow(number, source, target)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        trace["otherData"]["clock"], trace["traceEvents"], trace["baseTimeNanoseconds"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"not the trace of a rank: {error}", file=str(path), key="trace") from None
    return dict(trace)


def _write(path: str | Path, trace: dict[str, Any]) -> int:
    raw, final = encoded(trace, str(path)), Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    return replace_file(final, raw)
