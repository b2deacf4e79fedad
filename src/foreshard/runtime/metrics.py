"""What a run tells: a line of numbers per step under the names that torchtitan uses, and the operator's log."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

GIB = 2**30


class Metrics:
    """Writes `metrics.jsonl` and `events.jsonl` of a run, and TensorBoard's files if asked.

    Parameters
    ----------
    out : Path
    rank : int
    tensorboard : bool
    """

    def __init__(self, out: Path, rank: int, *, tensorboard: bool = False):
        out.mkdir(parents=True, exist_ok=True)
        self._metrics, self._events = out / "metrics.jsonl", out / "events.jsonl"
        self._rank, self._board = rank, _board(out) if tensorboard else None

    def step(
        self, *, step: int, loss: float, count: float, gradient_norm: float | None, time_s: float | None, clock: str,
        devices: int, samples: int, **more: Any,
    ) -> None:
        """Write a step's line.

        Parameters
        ----------
        step : int
        loss : float
            Mean over what is counted.
        count : float
            What is counted, tokens mostly.
        gradient_norm : float or None
        time_s : float or None
            On the run's clock; None for a step that a change of ranks cut in two.
        clock : str
        devices : int
            That the plan uses.
        samples : int
        """  # fmt: skip
        line = {
            "step": step,
            "loss_metrics/global_avg_loss": loss,
            "grad_norm": gradient_norm,
            "throughput(tps)": count / time_s / devices if time_s and time_s > 0 else None,
            "time_metrics/end_to_end(s)": time_s,
            "memory/max_reserved(GiB)": _peak_bytes() / GIB,
            "n_tokens": count,
            "n_samples": samples,
            "clock": clock,
            "time": time.time(),
            **more,
        }
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, step)

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Write a line of the operator's log."""
        line = {"time": time.time(), "rank": self._rank, "kind": kind, "text": text, **facts}
        with self._events.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _peak_bytes() -> float:
    """Return the most memory this process has had: of the GPU where there is one, else of the host."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _board(out: Path) -> Any:
    from foreshard.errors import ExtraMissingError

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ExtraMissingError("tensorboard is not installed", key="--tensorboard",
                                fix="pip install tensorboard") from None  # fmt: skip
    return SummaryWriter(str(out / "tensorboard"))
