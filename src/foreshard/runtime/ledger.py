"""Which samples were trained: written before a step counts, checked to the last one afterwards.

A rank writes the samples it saw through the loss before the vote of the step; whoever comes out of the vote writes
that the step counts. A rank that dies in between leaves the first, its peers write the second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        self._file = path.open("a", buffering=1)
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
    """

    steps: int
    samples: int
    lost: tuple[int, ...]
    repeated: tuple[int, ...]


def audit(paths: Iterable[Path], *, global_batch: int, steps: int) -> Audit:
    """Check that every sample of every step was trained once.

    Parameters
    ----------
    paths : iterable of Path
        Ledgers of all ranks.
    global_batch, steps : int
    """
    counted = counting_lines(paths)
    times = dict.fromkeys(range(steps * global_batch), 0)
    for line in counted:
        for lo, hi in line["positions"]:
            for position in range(lo, hi):
                times[position] = times.get(position, 0) + 1
    return Audit(
        steps=len({line["step"] for line in counted}),
        samples=sum(1 for count in times.values() if count == 1),
        lost=tuple(p for p, count in sorted(times.items()) if count == 0),
        repeated=tuple(p for p, count in sorted(times.items()) if count > 1),
    )


def counting_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of samples whose step counts in the end, by step and rank."""
    lines = [line for path in paths for line in _lines(path)]
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
    """Return the lines of a file; the last may be torn by a kill."""
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found
