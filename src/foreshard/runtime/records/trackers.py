"""Other tools that show a run's numbers: TensorBoard, and Weights & Biases without its server.

Both are the user's own installations. They are opened at the first number: ranks without any write nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from foreshard.errors import ExtraMissingError


class TensorBoard:
    """Scalars in OUT/tensorboard.

    Raises
    ------
    ExtraMissingError
        When it is not installed.
    """

    name: ClassVar[str] = "tensorboard"

    def __init__(self, out: Path):
        self._out, self._open = out, None
        if find_spec(self.name) is None:
            raise ExtraMissingError(
                f"{self.name} is not installed", key=f"--{self.name}", fix=f"pip install {self.name}"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._open = self._open or self._opened()
        self._write(self._open, step, values)

    def close(self) -> None:
        """Write what is held."""
        if self._open is not None:
            self._finish(self._open)

    def _opened(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._out / self.name))

    def _write(self, board: Any, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, step)
        board.flush()

    def _finish(self, board: Any) -> None:
        board.close()


class WeightsAndBiases(TensorBoard):
    """A run in OUT/wandb that `wandb sync` uploads; nothing goes over the network here."""

    name: ClassVar[str] = "wandb"

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


TRACKERS = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases)}
