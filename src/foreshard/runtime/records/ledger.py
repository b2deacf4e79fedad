"""Which samples were trained: written before a step counts, and checked to the last sample afterwards.

Before the vote of a step a rank writes the samples whose loss it computed; every rank that comes out of the
vote writes that the step counts. If a rank dies in between, its samples are written and its peers write that
they count. While a disk is full, lines wait in memory, with a copy at the rendezvous, and no checkpoint is
made before they are written: every sample behind a checkpoint is accounted for.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.errors import ForeshardError
from foreshard.runtime.membership.store import Client
from foreshard.runtime.records.durable_jsonl import DurableJsonl, OnEvent, not_written, whole_lines

KEPT_BYTES = 64 * 2**20
"""Of lines that wait for a disk, in a rank's memory; beyond it the run stops."""
_PATIENCE_S = 1.0
"""A step waits at most so long for a copy; a line without one is only in the rank's memory."""


class LedgerBackup:
    """Copies of a rank's waiting lines at the rendezvous, under numbered keys: they survive its death."""

    def __init__(self, client: Client, rank: int):
        self._client, self._prefix = client, f"ledger/{rank}"
        self._count, self._kept = 0, list[int]()

    def keep(self, data: bytes) -> None:
        """Keep a line."""
        with contextlib.suppress(RuntimeError):
            number = self._count + 1
            for key, value in ((str(number), data), ("count", str(number).encode())):
                self._ask("set", key, value=base64.b64encode(value).decode())
            self._count = number
            self._kept.append(number)

    def clear(self) -> None:
        """Delete the kept lines: they are on disk."""
        with contextlib.suppress(RuntimeError):
            while self._kept:
                self._ask("delete", str(self._kept[-1]))
                self._kept.pop()

    def left(self) -> list[bytes]:
        """Return the lines that an earlier process of this rank kept, oldest first; `clear` deletes them."""
        found = []
        with contextlib.suppress(RuntimeError):
            count = self._ask("get", "count")
            self._count = int(base64.b64decode(count)) if count else 0
            for number in range(1, self._count + 1):
                data = self._ask("get", str(number))
                if data is not None:
                    self._kept.append(number)
                    found.append(base64.b64decode(data))
        return found

    def _ask(self, ask: str, key: str, **more: str) -> Any:
        question = {"ask": ask, "key": f"{self._prefix}/{key}", **more}
        return self._client.ask(question, patience_s=_PATIENCE_S).get("value")


_MARKS = ("commit", "rollback")


class Ledger:
    """The ledger of a rank.

    `index` says which sample of the dataset is at a position, `size` how many the dataset has, if it has a
    length. `on_event` is called when writing is blocked and when it resumes. At most `kept_bytes` of lines
    wait: every call raises when there are more.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        index: Callable[[int], int] | None = None,
        *,
        size: int | None = None,
        on_event: OnEvent = lambda kind, text, **facts: None,
        backup: LedgerBackup | None = None,
        kept_bytes: int = KEPT_BYTES,
    ):
        self.file = DurableJsonl(path, on_event)
        self._rank, self._index, self._size = rank, index, size
        self._backup, self._kept_bytes = backup, kept_bytes
        self._backed_up = False
        if backup is not None:
            self._take_over(backup)

    def _take_over(self, backup: LedgerBackup) -> None:
        """Write the lines that an earlier process of this rank could not write."""
        left = [json.loads(data) for data in backup.left()]
        there = whole_lines(self.file.path) if left else []
        self._backed_up = bool(left)
        for line in left:
            if line not in there:
                self.file.add(line)
        self._clear_backup()

    def trained(self, step: int, generation: int, spans: Iterable[range]) -> None:
        """Write the samples whose loss this rank computed in a step, by position."""
        spans = [span for span in spans if len(span)]
        if spans:
            line: dict[str, Any] = {
                "step": step,
                "generation": generation,
                "rank": self._rank,
                "positions": [[span.start, span.stop] for span in spans],
            }
            if self._index is not None:
                line["samples"] = [self._index(position) for span in spans for position in span]
            if self._size is not None:
                line["of"] = self._size
            self._write(line)

    def commit(self, step: int, generation: int) -> None:
        """Write that a step of a generation counts."""
        self._write({"commit": step, "generation": generation})

    def rollback(self, step: int, generation: int) -> None:
        """Write that training restarts at the beginning of a step: later steps do not count."""
        self._write({"rollback": step, "generation": generation})

    def flush(self) -> None:
        """Write all waiting lines, so that they survive a loss of power too, or raise OSError."""
        if not self.file.flush():
            raise OSError(f"{self.file.waiting} lines of {self.file.path.name} wait: {self.file.blocked_by}")
        self.file.sync()
        self._clear_backup()

    def _write(self, line: dict[str, Any]) -> None:
        if self.file.add(line):
            self._clear_backup()
            return
        if self.file.waiting_bytes > self._kept_bytes:
            raise self._full()
        if self._backup is not None:
            self._backed_up = True
            self._backup.keep(json.dumps(line).encode())

    def _clear_backup(self) -> None:
        if self._backed_up and self._backup is not None and not self.file.waiting:
            self._backup.clear()
            self._backed_up = False

    def _full(self) -> ForeshardError:
        waiting = [json.loads(line) for line in self.file.unwritten()]
        steps = [line.get("step", line.get("commit")) for line in waiting if "rollback" not in line]
        of = f"these are of steps {min(steps)} to {max(steps)}"
        return not_written(self.file, f"at most {self._kept_bytes} bytes wait in memory; {of}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The samples of the steps that count, checked by a run's ledgers.

    `samples` were trained exactly once; positions are `lost`, or `repeated`, or `misread`: there ranks read
    different samples, a sample that the same epoch has at another position, or a dataset of another length
    than the first rank's.
    """

    steps: int
    samples: int
    lost: tuple[int, ...]
    repeated: tuple[int, ...]
    misread: tuple[int, ...] = ()


def audit(paths: Iterable[Path], *, global_batch: int, steps: int, size: int | None = None) -> Audit:
    """Check that every sample of every step was trained once, by the ledgers of all ranks.

    No sample may come twice in an epoch of `size`, which is given where ranks have not written it.
    """
    lines = ledger_lines(paths)
    counted = counting_lines(lines)
    spans = [(lo, hi) for line in counted for lo, hi in line["positions"]]
    times = np.zeros(max([steps * global_batch, *(hi for _, hi in spans)]), dtype=np.int64)
    for lo, hi in spans:
        times[lo:hi] += 1
    return Audit(
        steps=len({line["step"] for line in counted}),
        samples=int((times == 1).sum()),
        lost=tuple(np.flatnonzero(times[: steps * global_batch] == 0).tolist()),
        repeated=tuple(np.flatnonzero(times > 1).tolist()),
        misread=_misread([line for line in lines if "samples" in line], size),
    )


def _misread(lines: Iterable[dict[str, Any]], size: int | None) -> tuple[int, ...]:
    """Return positions whose sample differs between lines, or comes at two positions of one epoch."""
    first: dict[int, int] = {}
    place: dict[tuple[int, int], int] = {}
    odd: set[int] = set()
    for line in lines:
        size = size or line.get("of")
        positions = [position for lo, hi in line["positions"] for position in range(lo, hi)]
        if len(positions) != len(line["samples"]) or line.get("of", size) != size:
            odd.update(positions)
            continue
        for position, sample in zip(positions, line["samples"], strict=True):
            if first.setdefault(position, sample) != sample:
                odd.add(position)
            if size and place.setdefault((position // size, sample), position) != position:
                odd.add(position)
    return tuple(sorted(odd))


def ledger_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of ledgers that say which samples a step trained, or whether it counts.

    A damaged line says nothing: its samples are lost, unless another rank trained them.
    """
    lines = [line for path in paths for line in whole_lines(path, {"generation": int})]
    return [line for line in lines if _is_span(line) or any(type(line.get(key)) is int for key in _MARKS)]


def _is_span(line: dict[str, Any]) -> bool:
    spans, samples = line.get("positions"), line.get("samples", [])
    if type(line.get("step")) is not int or not isinstance(spans, list) or not isinstance(samples, list):
        return False
    pairs = [span for span in spans if isinstance(span, list) and len(span) == 2]
    numbers = [*(number for span in pairs for number in span), *samples]
    return len(pairs) == len(spans) and all(type(number) is int and number >= 0 for number in numbers)


def counting_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of samples whose step counts in the end, by step and position."""
    commits = {(line["commit"], line["generation"]) for line in lines if "commit" in line}
    rollbacks = {(line["rollback"], line["generation"]) for line in lines if "rollback" in line}

    def counts(step: int, generation: int) -> bool:
        undone = any(to <= step and later > generation for to, later in rollbacks)
        return (step, generation) in commits and not undone

    found = [line for line in lines if "step" in line and counts(line["step"], line["generation"])]
    return sorted(found, key=lambda line: (line["step"], line["positions"]))


def merge(paths: Iterable[Path], out: Path) -> None:
    """Write the lines that count into one file, in order."""
    with out.open("w") as file:
        for line in counting_lines(ledger_lines(paths)):
            file.write(json.dumps(line) + "\n")
