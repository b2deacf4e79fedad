"""JSON lines that survive a full disk: written at once, or kept in order until the disk accepts them again.

A disk that is full, or a file server that is away for a while, delays lines but loses none. Whoever owns a
file bounds how much may wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from foreshard.errors import ForeshardError

OnEvent = Callable[..., None]
"""Writes the operator's log: (kind, text, **facts)."""
_RETRY_S = 0.2
"""Least time between attempts while writing is blocked: every attempt may wait for a file server."""
_LONGEST_LINE_BYTES = 16 * 2**20
"""How far back the end of the last whole line is looked for."""


class DurableJsonl:
    """Appends lines to a file that other processes may append to as well.

    `on_event` is called when writing is blocked, and when all lines are on disk again.
    """

    def __init__(
        self,
        path: Path,
        on_event: OnEvent = lambda kind, text, **facts: None,
        *,
        now: Callable[[], float] = time.monotonic,
    ):
        self.path, self._on_event, self._now = path, on_event, now
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.blocked_by: str | None = None
        """Why the disk does not accept lines; None while it does."""
        self._since_s = self._tried_s = 0.0

    @property
    def waiting(self) -> int:
        """Lines that are not on disk."""
        return len(self._waiting)

    @property
    def blocked_s(self) -> float:
        """Seconds since writing was blocked."""
        return self._now() - self._since_s if self.blocked_by is not None else 0.0

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add a line behind those that wait, and return whether all are on disk."""
        data = json.dumps(line).encode() + b"\n"
        self._waiting.append(data)
        self.waiting_bytes += len(data)
        if self.blocked_by is not None and self._now() - self._tried_s < _RETRY_S:
            return False
        return self.flush()

    def flush(self) -> bool:
        """Write the waiting lines that the disk accepts, and return whether none is left."""
        if not self._waiting:
            return True
        self._tried_s = self._now()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # other processes append too; freed when one is killed
                _drop_torn_line(file)
                while self._waiting:
                    self._write_first(file)
        except OSError as error:
            self._block(error.strerror or str(error))
            return False
        if self.blocked_by is not None:
            self._unblock()
        return True

    def sync(self) -> None:
        """Force written lines from the system's buffers to the disk."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def drop_oldest(self) -> None:
        """Discard the line that waits longest."""
        self.waiting_bytes -= len(self._waiting.popleft())

    def unwritten(self) -> list[bytes]:
        """Return the waiting lines, oldest first."""
        return list(self._waiting)

    def _write_first(self, file: BinaryIO) -> None:
        begin = os.fstat(file.fileno()).st_size
        if file.write(self._waiting[0]) < len(self._waiting[0]):
            file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.drop_oldest()

    def _block(self, reason: str) -> None:
        if self.blocked_by is None:
            self.blocked_by, self._since_s = reason, self._now()
            text = f"{self.path.name}: {reason}; lines wait in memory"
            self._on_event("write blocked", text, file=str(self.path))

    def _unblock(self) -> None:
        blocked_s, self.blocked_by = self.blocked_s, None
        self._on_event(
            "write resumed",
            f"{self.path.name}: all lines are written",
            file=str(self.path),
            after_s=round(blocked_s, 3),
        )


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off a last line that a killed process has left unfinished."""
    size = os.fstat(file.fileno()).st_size
    if not size or os.pread(file.fileno(), 1, size - 1) == b"\n":
        return
    begin = max(0, size - _LONGEST_LINE_BYTES)
    file.truncate(begin + os.pread(file.fileno(), size - begin, begin).rfind(b"\n") + 1)


def flush_all(files: list[DurableJsonl], patience_s: float) -> None:
    """Wait until all lines are written; that the disk does not accept them in time is an error."""
    until = time.monotonic() + patience_s
    while not all([file.flush() for file in files]) and time.monotonic() < until:
        time.sleep(_RETRY_S)
    for file in files:
        if file.waiting:
            raise not_written(file, "a run ends when its lines are on disk")


def not_written(file: DurableJsonl, rule: str) -> ForeshardError:
    """Return the error for lines that the disk does not accept."""
    return ForeshardError(
        f"{file.waiting} lines ({file.waiting_bytes} bytes) are not written after {file.blocked_s:.0f} s: "
        f"{file.blocked_by}",
        file=str(file.path),
        value=file.waiting,
        rule=rule,
        fix="Free space there and start the run again with --resume: it continues from the latest "
        "checkpoint, up to which nothing is missing",
    )


def whole_lines(path: Path, kinds: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the lines of a file, without lines torn by a kill or a full disk.

    With `kinds` only those with these keys and values of these types: damaged JSON may still parse.
    """
    found = parsed_lines(path.read_text(errors="replace")) if path.exists() else iter(())
    return [
        line for line in found if all(_is(line.get(key, ...), kind) for key, kind in (kinds or {}).items())
    ]


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def parsed_lines(text: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects."""
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                yield found
