"""Which samples were trained: written before a step counts, checked to the last one afterwards.

A rank writes the samples it saw through the loss before the vote of the step; whoever comes out of the vote
writes that the step counts. A rank that dies in between leaves the first, its peers write the second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np


class Ledger:
    """A rank's lines.

    Parameters
    ----------
    path : Path
    rank : int
    index : callable of position, optional
        Which sample of the dataset is at a position.
    """

    def __init__(self, path: Path, rank: int, index: Callable[[int], int] | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(path)
        self._file = path.open("a", buffering=1)
        if torn:
            self._file.write("\n")  # or the next line would be lost with the torn one
        self._rank, self._index = rank, index

    def trained(self, step: int, generation: int, spans: Iterable[range]) -> None:
        """Write the samples that this rank saw through the loss of a step, by position."""
        spans = [span for span in spans if len(span)]
        if spans:
            line: dict[str, Any] = {
                "step": step, "generation": generation, "rank": self._rank,
                "positions": [[span.start, span.stop] for span in spans],
            }  # fmt: skip
            if self._index is not None:
                line["samples"] = [self._index(position) for span in spans for position in span]
            self._say(line)

    def commit(self, step: int, generation: int) -> None:
        """Write that a step of a generation counts."""
        self._say({"commit": step, "generation": generation})

    def rollback(self, step: int, generation: int) -> None:
        """Write that training goes on from the beginning of a step: what came after it does not count."""
        self._say({"rollback": step, "generation": generation})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


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
        Positions where ranks read different samples, or a sample that the same pass has at another position.
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
        Samples of the dataset: then no sample may come twice in a pass.
    """
    lines = [line for path in paths for line in _lines(path)]
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
        positions = [position for lo, hi in line["positions"] for position in range(lo, hi)]
        if len(positions) != len(line["samples"]):
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
    return _counting([line for path in paths for line in _lines(path)])


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


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; those torn by a kill say nothing: what they would prove is then missing."""
    found = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def _is_torn(path: Path) -> bool:
    """Return whether a file ends in the middle of a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
