"""Lines of JSON on their way to a file: written at once, or kept in order while writing is blocked.

A disk that is full, or a server of files that is away for a while, delays lines; it takes none of them. What
waits is bounded by who owns the lines.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foreshard.errors import ForeshardError

Tell = Callable[..., None]
"""(kind, text, **facts): the operator's log."""
_AGAIN_S = 0.2


class DurableJsonl:
    """Appends lines to a file that other processes may append to as well.

    Parameters
    ----------
    path : Path
    tell : callable of (kind, text, **facts), optional
        Told when the disk begins to refuse lines, and when it has taken all of them.
    now : callable
        Seconds; another clock in tests.
    """

    def __init__(
        self,
        path: Path,
        tell: Tell = lambda kind, text, **facts: None,
        *,
        now: Callable[[], float] = time.monotonic,
    ):
        self.path, self._tell, self._now = path, tell, now
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.trouble: str | None = None
        self._since_s = self._tried_s = 0.0

    @property
    def waiting(self) -> int:
        """Lines that are not on disk."""
        return len(self._waiting)

    @property
    def waited_s(self) -> float:
        """Seconds since the disk began to refuse lines."""
        return self._now() - self._since_s if self.trouble is not None else 0.0

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add a line behind those that wait, and return whether all are on disk."""
        data = json.dumps(line).encode() + b"\n"
        self._waiting.append(data)
        self.waiting_bytes += len(data)
        if self.trouble is not None and self._now() - self._tried_s < _AGAIN_S:
            return False
        return self.flush()

    def flush(self) -> bool:
        """Write what waits, as far as possible, and return whether nothing waits."""
        if not self._waiting:
            return True
        self._tried_s = self._now()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                while self._waiting:
                    self._write_first(file)
        except OSError as error:
            self._blocked(error.strerror or str(error))
            return False
        if self.trouble is not None:
            self._resumed()
        return True

    def sync(self) -> None:
        """Have what was written on the disk itself."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def drop_oldest(self) -> None:
        """Give up the line that waits longest."""
        self.waiting_bytes -= len(self._waiting.popleft())

    def unwritten(self) -> list[bytes]:
        """Return what waits, oldest first."""
        return list(self._waiting)

    def _write_first(self, file: Any) -> None:
        begin = os.fstat(file.fileno()).st_size
        torn = begin > 0 and os.pread(file.fileno(), 1, begin - 1) != b"\n"
        data = b"\n" * torn + self._waiting[0]  # or the line would be lost with a torn one
        written = file.write(data)
        if written < len(data):
            with contextlib.suppress(OSError):
                if os.fstat(file.fileno()).st_size == begin + written:  # nobody has written behind it
                    file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.drop_oldest()

    def _blocked(self, why: str) -> None:
        if self.trouble is not None:
            return
        self.trouble, self._since_s = why, self._now()
        self._tell("write blocked", f"{self.path.name}: {why}; lines wait in memory", file=str(self.path))

    def _resumed(self) -> None:
        waited_s, self.trouble = self.waited_s, None
        self._tell(
            "write resumed",
            f"{self.path.name}: all lines are written",
            file=str(self.path),
            after_s=round(waited_s, 3),
        )


def settle(all_lines: list[DurableJsonl], patience_s: float) -> None:
    """Wait until everything is written.

    Raises
    ------
    ForeshardError
        When lines still wait after that time.
    """
    until = time.monotonic() + patience_s
    while not all([lines.flush() for lines in all_lines]) and time.monotonic() < until:
        time.sleep(_AGAIN_S)
    for lines in all_lines:
        if lines.waiting:
            raise not_written(lines, "a run ends when its lines are on disk")


def not_written(lines: DurableJsonl, rule: str) -> ForeshardError:
    """Return the fault of lines that the disk does not take."""
    return ForeshardError(
        f"{lines.waiting} lines ({lines.waiting_bytes} bytes) are not written after {lines.waited_s:.0f} s: "
        f"{lines.trouble}",
        file=str(lines.path),
        value=lines.waiting,
        rule=rule,
        fix="Make room there and start the run again with --resume: it goes on from the latest checkpoint, "
        "before which nothing is missing",
    )


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; one torn by a kill or a full disk says nothing."""
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
