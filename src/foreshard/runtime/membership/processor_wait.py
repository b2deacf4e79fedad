"""How long the threads of this process were ready to run while no processor was free for them (Linux)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


class ProcessorWait:
    """Counts the seconds that this process, with the processes it has started, waited for a processor.

    Linux counts for every thread the nanoseconds in which it stood in a run queue (`schedstat`). Of the
    threads the one that waited longest between two calls decides: the others may have waited for it.
    """

    def __init__(self, proc: Path = _PROC):
        self._proc = proc
        self._waited_ns = dict(self._threads())

    @property
    def is_known(self) -> bool:
        """Whether the system says how long threads wait."""
        return bool(self._waited_ns)

    def __call__(self) -> float:
        """Return the seconds since the last call; 0 where the system does not say."""
        before, self._waited_ns = self._waited_ns, dict(self._threads())
        longest_ns = max((ns - before.get(key, 0) for key, ns in self._waited_ns.items()), default=0)
        return max(0, longest_ns) / 1e9

    def _threads(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Give process, thread and the nanoseconds that it has waited so far."""
        own = self._proc / "self"
        readers = {pid for task in _entries(own / "task") for pid in _words(task / "children")}
        for process in ("self", *sorted(readers)):
            for task in _entries(self._proc / process / "task"):
                fields = _words(task / "schedstat")  # ran, waited, times; all zero where it is not counted
                if len(fields) == 3 and fields[0] != "0":
                    yield (process, task.name), int(fields[1])


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _words(file: Path) -> list[str]:
    with contextlib.suppress(OSError):  # the thread has ended, or the system has no such file
        return file.read_text().split()
    return []
