"""A schedule as a JSON file of foreshard's own, and back.

Sets of ranks that chunks share are written once (`groups`). Columns of sends are those of `Schedule`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from foreshard.comm.schedules.schedule import Chunk, Schedule
from foreshard.comm.schedules.verify import malformed, verify
from foreshard.errors import SpecError
from foreshard.file_replacement import replace_file
from foreshard.spec.codec import Range, Size, decode, parse_json, read_text

SCHEMA_VERSION = 1
_Name = Annotated[str, Size(1, 80)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFile:
    """What the file holds; `sources` and `targets` of chunks are indices of `groups`."""

    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)]
    collective: Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send"]
    algorithm: _Name
    num_ranks: Annotated[int, Range(2, 2**20)]
    groups: tuple[tuple[int, ...], ...]
    weight: tuple[Annotated[float, Range(0.0)], ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    chunk: tuple[int, ...]
    is_reduced: tuple[Annotated[int, Range(0, 1)], ...]
    channel: tuple[Annotated[int, Range(0, 2**20)], ...]
    indptr: tuple[int, ...]
    indices: tuple[int, ...]
    switches: tuple[_Name, ...] = ()
    overlaps: bool = False


def schedule_object(schedule: Schedule) -> dict[str, Any]:
    """Return the object that the JSON of a schedule holds."""
    groups: dict[tuple[int, ...], int] = {}
    ends = [
        [groups.setdefault(ranks, len(groups)) for ranks in some]
        for some in zip(*((chunk.sources, chunk.targets) for chunk in schedule.chunks), strict=True)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "num_ranks": schedule.num_ranks,
        "switches": list(schedule.switches),
        "overlaps": schedule.overlaps,
        "groups": [list(ranks) for ranks in groups],
        "weight": [chunk.weight for chunk in schedule.chunks],
        "sources": ends[0],
        "targets": ends[1],
        "source": schedule.source.tolist(),
        "target": schedule.target.tolist(),
        "chunk": schedule.chunk.tolist(),
        "is_reduced": schedule.is_reduced.astype(int).tolist(),
        "channel": schedule.channel.tolist(),
        "indptr": schedule.indptr.tolist(),
        "indices": schedule.indices.tolist(),
    }


def save_schedule(schedule: Schedule, path: str | Path) -> int:
    """Write a schedule as JSON, and return its bytes."""
    text = json.dumps(schedule_object(schedule), separators=(",", ":"))
    return replace_file(path, text + "\n")


def load_schedule(path: str | Path) -> Schedule:
    """Return the schedule of a JSON file.

    Raises
    ------
    SpecError
        For what is no schedule, and for one that computes something else than its collective.
    """
    return schedule_from(parse_json(read_text(path), file=str(path)), file=str(path))


def schedule_from(data: Any, *, file: str | None = None) -> Schedule:
    """Return the schedule of a JSON object, checked as `load_schedule` does."""
    read = decode(ScheduleFile, data, file=file)
    schedule = Schedule(
        collective=read.collective,
        algorithm=read.algorithm,
        num_ranks=read.num_ranks,
        chunks=_chunks(read, file),
        source=_column(read.source, "source", file),
        target=_column(read.target, "target", file),
        chunk=_column(read.chunk, "chunk", file),
        is_reduced=np.array(read.is_reduced, dtype=bool),
        channel=_column(read.channel, "channel", file),
        indptr=_column(read.indptr, "indptr", file),
        indices=_column(read.indices, "indices", file),
        switches=read.switches,
        overlaps=read.overlaps,
    )
    for what in malformed(schedule):
        raise SpecError(
            what, file=file, key="sends", value=what, rule="Columns describe sends between places"
        )
    for what in verify(schedule):
        rule = "A schedule computes what its collective promises"
        raise SpecError(what, file=file, key="sends", value=what, rule=rule)
    return schedule


def _column(values: tuple[int, ...], key: str, file: str | None) -> np.ndarray:
    """Return a column of whole numbers that fit 32 bits."""
    if values and not -(2**31) <= min(values) <= max(values) < 2**31:
        rule = "Numbers are below two thousand million"
        raise SpecError(f"{key} has {max(values)}", file=file, key=key, value=max(values), rule=rule)
    return np.array(values, dtype=np.int64)


def _chunks(read: ScheduleFile, file: str | None) -> tuple[Chunk, ...]:
    """Return the chunks of a file."""
    if not len(read.weight) == len(read.sources) == len(read.targets):
        rule = "Each chunk has a weight, sources and targets"
        raise SpecError("columns of chunks", file=file, key="weight", value=len(read.weight), rule=rule)
    for key, column in (("sources", read.sources), ("targets", read.targets)):
        if column and not 0 <= min(column) <= max(column) < len(read.groups):
            rule = f"It is an index of the {len(read.groups)} groups"
            raise SpecError(f"{key} has {max(column)}", file=file, key=key, value=max(column), rule=rule)
    return tuple(
        Chunk(weight=float(weight), sources=read.groups[a], targets=read.groups[b])
        for weight, a, b in zip(read.weight, read.sources, read.targets, strict=True)
    )
