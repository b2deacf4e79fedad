"""When each task of a predicted step runs: what the Gantt chart and the trace draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One task on one stream of one rank; `part` is a time part of the Prediction."""

    rank: int
    group: int
    stage: int
    stream: str
    name: str
    part: str
    start_s: float
    end_s: float
    micro_batch: int = -1
    chunk: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of one step, one representative rank per stage, in order of start."""

    events: tuple[Event, ...]
    step_time_s: float
