"""Other tools that show a run's numbers: TensorBoard, and Weights & Biases without its server.

Both are the user's own installations. They are opened at the first number: ranks without any write nothing.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from foreshard.errors import ExtraMissingError
from foreshard.runtime.records.durable_jsonl import whole_lines

Write = Callable[[int, Mapping[str, float]], None]
"""Writes the numbers of a step, by name."""


class Tracker(ABC):
    """Takes a run's numbers; it is opened at the first of them, and has to be installed."""

    name: ClassVar[str]

    def __init__(self, out: Path):
        self._out = out
        self._write: Write | None = None
        self.close: Callable[[], None] = lambda: None
        """Writes what is held."""
        if find_spec(self.name) is None:
            raise ExtraMissingError(
                f"{self.name} is not installed", key=f"--{self.name}", fix=f"pip install {self.name}"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        if self._write is None:
            self._write, self.close = self._open(step)
        self._write(step, values)

    @abstractmethod
    def _open(self, step: int) -> tuple[Write, Callable[[], None]]:
        """Return what writes the numbers of steps, from this one on, and what ends it."""


class TensorBoard(Tracker):
    """Scalars in OUT/tensorboard."""

    name = "tensorboard"

    def _open(self, step: int) -> tuple[Write, Callable[[], None]]:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(self._out / self.name))

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()

        return write, board.close


class WeightsAndBiases(Tracker):
    """A run in OUT/wandb that `wandb sync` uploads; nothing goes over the network here.

    Each process that leads writes a run with all steps so far: the package writes in blocks of 32 KiB, and
    a process that is killed loses its last one. Steps are values of their own, since those of the package
    must not go back, as they do after a return to a checkpoint.
    """

    name = "wandb"

    def _open(self, step: int) -> tuple[Write, Callable[[], None]]:
        board = import_module(self.name).init(
            project="foreshard",
            name=self._out.name,
            id=hashlib.sha256(str(self._out).encode()).hexdigest()[:12],  # one run, whichever rank writes
            dir=str(self._out),
            mode="offline",
        )
        board.define_metric("*", step_metric="step")

        def write(step: int, values: Mapping[str, float]) -> None:
            board.log({"step": step, **values})

        for file in ("metrics.jsonl", "evaluations.jsonl"):
            there = whole_lines(self._out / file, {"step": int})
            lines = {line["step"]: line for line in there if line["step"] < step}
            for before in sorted(lines):
                write(before, numbers(lines[before]))
        return write, board.finish


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what trackers take of a line."""
    return {name: value for name, value in line.items() if isinstance(value, float) and name != "time"}


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases)}
