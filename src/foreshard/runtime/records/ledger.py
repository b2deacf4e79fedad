"""Which samples were trained: written before a step counts, checked to the last one afterwards.

A rank writes the samples it saw through the loss before the vote of the step; whoever comes out of the vote
writes that the step counts. A rank that dies in between leaves the first, its peers write the second. While a
disk takes nothing lines wait in memory, with a copy at the rendezvous, and no checkpoint is made before they
are written: what a run goes on from is always accounted for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from foreshard.errors import ForeshardError
from foreshard.runtime.records.durable_jsonl import DurableJsonl, Tell, not_written, whole_lines

KEPT_BYTES = 64 * 2**20
"""Of lines that wait for a disk, in a rank's memory; beyond it the run stops."""


class Copies(Protocol):
    """Keeps lines that a rank cannot write."""

    def keep(self, data: bytes) -> None:
        """Keep a line."""
        ...

    def clear(self) -> None:
        """Forget all lines."""
        ...

    def left(self) -> list[bytes]:
        """Return the lines that were kept."""
        ...


class Ledger:
    """A rank's lines.

    Parameters
    ----------
    path : Path
    rank : int
    index : callable of position, optional
        Which sample of the dataset is at a position.
    size : int, optional
        Samples of the dataset, of one that has a length.
    tell : callable of (kind, text, **facts), optional
        Called when writing is blocked and when it resumes.
    copies : Copies, optional
        Keeps lines that wait, for the next process of this rank.
    kept_bytes : int
        Of lines that wait.

    Raises
    ------
    ForeshardError
        From every call, when more lines wait than may be kept.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        index: Callable[[int], int] | None = None,
        *,
        size: int | None = None,
        tell: Tell = lambda kind, text, **facts: None,
        copies: Copies | None = None,
        kept_bytes: int = KEPT_BYTES,
    ):
        self.lines = DurableJsonl(path, tell)
        self._rank, self._index, self._size = rank, index, size
        self._copies, self._kept_bytes = copies, kept_bytes
        self._copied = False
        if copies is not None:
            self._take_over(copies)

    def _take_over(self, copies: Copies) -> None:
        """Write what the process of this rank before could not write."""
        left = [json.loads(data) for data in copies.left()]
        there = whole_lines(self.lines.path) if left else []
        self._copied = bool(left)
        for line in left:
            if line not in there:
                self.lines.add(line)
        self._clear_copies()

    def trained(self, step: int, generation: int, spans: Iterable[range]) -> None:
        """Write the samples that this rank saw through the loss of a step, by position."""
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
            self._say(line)

    def commit(self, step: int, generation: int) -> None:
        """Write that a step of a generation counts."""
        self._say({"commit": step, "generation": generation})

    def rollback(self, step: int, generation: int) -> None:
        """Write that training goes on from the beginning of a step: what came after it does not count."""
        self._say({"rollback": step, "generation": generation})

    def flush(self) -> None:
        """Write what waits, so that it is there after a loss of power too.

        Raises
        ------
        OSError
            When the disk does not take it.
        """
        if not self.lines.flush():
            raise OSError(f"{self.lines.waiting} lines of {self.lines.path.name} wait: {self.lines.trouble}")
        self.lines.sync()
        self._clear_copies()

    def close(self) -> None:
        """Write what waits, as far as possible."""
        self.lines.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, line: dict[str, Any]) -> None:
        if self.lines.add(line):
            self._clear_copies()
            return
        if self.lines.waiting_bytes > self._kept_bytes:
            raise self._full()
        if self._copies is not None:
            self._copied = True
            self._copies.keep(json.dumps(line).encode())

    def _clear_copies(self) -> None:
        if self._copied and self._copies is not None and not self.lines.waiting:
            self._copies.clear()
            self._copied = False

    def _full(self) -> ForeshardError:
        steps = [line.get("step", line.get("commit")) for line in map(json.loads, self.lines.unwritten())]
        told = [step for step in steps if step is not None]
        return not_written(
            self.lines,
            f"at most {self._kept_bytes} bytes wait in memory; these are of steps {min(told)} to {max(told)}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the ledgers of a run prove.

    Attributes
    ----------
    steps : int
        That count.
    samples : int
        Trained once in them.
    lost, repeated : tuple of int
        Positions that are missing or trained more than once.
    misread : tuple of int
        Positions where ranks read different samples, or a sample that the same pass has at another position,
        or a dataset of another length than the first rank's.
    """

    steps: int
    samples: int
    lost: tuple[int, ...]
    repeated: tuple[int, ...]
    misread: tuple[int, ...] = ()


def audit(paths: Iterable[Path], *, global_batch: int, steps: int, size: int | None = None) -> Audit:
    """Check that every sample of every step was trained once.

    Parameters
    ----------
    paths : iterable of Path
        Ledgers of all ranks.
    global_batch, steps : int
    size : int, optional
        Samples of the dataset, where ranks have not written it: no sample may come twice in a pass.
    """
    lines = [line for path in paths for line in whole_lines(path)]
    counted = _counting(lines)
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
    """Return positions whose sample differs between lines, or comes at two positions of one pass."""
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


def counting_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of samples whose step counts in the end, by step and rank."""
    return _counting([line for path in paths for line in whole_lines(path)])


def _counting(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
        for line in counting_lines(paths):
            file.write(json.dumps(line) + "\n")
