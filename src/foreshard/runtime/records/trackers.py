"""Other tools that show a run's numbers: TensorBoard, and Weights & Biases without its server.

Both are the user's own installations. They are opened at the first number: ranks without any write nothing.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from foreshard.errors import ExtraMissingError


class Tracker(ABC):
    """Takes a run's numbers; it is opened at the first of them, and has to be installed."""

    name: ClassVar[str]

    def __init__(self, out: Path):
        self._out, self._board = out, None
        if find_spec(self.name) is None:
            raise ExtraMissingError(
                f"{self.name} is not installed", key=f"--{self.name}", fix=f"pip install {self.name}"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._board = self._board or self._opened()
        self._write(self._board, step, values)

    def close(self) -> None:
        """Write what is held."""
        if self._board is not None:
            self._finish(self._board)

    @abstractmethod
    def _opened(self) -> Any:
        """Return what numbers are written to."""

    @abstractmethod
    def _write(self, board: Any, step: int, values: Mapping[str, float]) -> None:
        """Write numbers."""

    @abstractmethod
    def _finish(self, board: Any) -> None:
        """Close it."""


class TensorBoard(Tracker):
    """Scalars in OUT/tensorboard."""

    name = "tensorboard"

    def _opened(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._out / self.name))

    def _write(self, board: Any, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, step)
        board.flush()

    def _finish(self, board: Any) -> None:
        board.close()


class WeightsAndBiases(Tracker):
    """A run in OUT/wandb that `wandb sync` uploads; nothing goes over the network here."""

    name = "wandb"

    def _opened(self) -> Any:
        number = hashlib.sha256(str(self._out).encode()).hexdigest()[:12]  # one run, whichever rank writes
        return import_module(self.name).init(
            project="foreshard",
            name=self._out.name,
            id=number,
            dir=str(self._out),
            mode="offline",
            resume="allow",
        )

    def _write(self, board: Any, step: int, values: Mapping[str, float]) -> None:
        board.log(dict(values), step=step)

    def _finish(self, board: Any) -> None:
        board.finish()


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases)}
