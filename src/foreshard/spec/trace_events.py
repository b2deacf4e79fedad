"""The forms of a trace: a process per rank, named tracks, slices on them, and arrows between slices.

Names and categories follow Kineto, so that tools for measured traces read predicted ones: kernels have the
category `kernel` with `stream`, `device` and `correlation`, communication kernels begin with `nccl`, host
launches are `cuda_runtime`, the step is a `user_annotation`. Format: "Trace Event Format" (Google, 2016);
ui.perfetto.dev opens it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from typing import Any

Track = tuple[int, int]
"""(rank, number of its track)."""


def names(rank: int, labels: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank and of its tracks; viewers show both in the order of their numbers."""

    def meta(kind: str, track: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": track, "ts": 0, "args": args}

    yield meta("process_name", 0, name=f"rank {rank}")
    yield meta("process_labels", 0, labels=labels)
    yield meta("process_sort_index", 0, sort_index=rank)
    for track, name in tracks.items():
        yield meta("thread_name", track, name=name)
        yield meta("thread_sort_index", track, sort_index=track)


def time_slice(
    name: str, category: str, track: Track, start_s: float, end_s: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a slice, to the nanosecond; the format counts microseconds."""
    start_ns, end_ns = nanoseconds(start_s), nanoseconds(end_s)
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": track[0], "tid": track[1], **times, "args": args}


def arrow(number: int, source: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield both ends of a transfer from one slice to another; each lies where its slice begins."""
    for ph, ends in (("s", source), ("f", target)):
        place = {key: ends[key] for key in ("pid", "tid", "ts")}
        yield {"ph": ph, "cat": "ac2g", "name": "p2p", "id": number, **place} | (
            {"bp": "e"} if ph == "f" else {}
        )


def nanoseconds(time_s: float) -> int:
    """Return the time on the grid of a trace."""
    return round(time_s * 1e9)


def encoded(trace: Mapping[str, Any], path: str) -> bytes:
    """Return what a file of this name holds: compressed when it ends in .gz."""
    raw = json.dumps(trace, separators=(",", ":")).encode("utf-8")
    return gzip.compress(raw, 6, mtime=0) if path.endswith(".gz") else raw
