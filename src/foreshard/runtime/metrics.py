"""What a run tells: a line of numbers per step under torchtitan's names, and the operator's log.

The names are those of torchtitan's MetricsProcessor (components/metrics.py, 2026-08-21), so that what reads
its logs reads these. What is not measured is left out. A disk that is full costs lines, never the run.
"""

from __future__ import annotations

import errno
import json
import resource
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foreshard.errors import ExtraMissingError

GIB = 2**30


class Metrics:
    """Writes `metrics.jsonl` and `events.jsonl` of a run, and TensorBoard's files if asked.

    Parameters
    ----------
    out : Path
    rank : int
    tensorboard : bool

    Raises
    ------
    ExtraMissingError
        When TensorBoard is asked for and not installed.
    """

    def __init__(self, out: Path, rank: int, *, tensorboard: bool = False):
        out.mkdir(parents=True, exist_ok=True)
        self._metrics, self._events = out / "metrics.jsonl", out / "events.jsonl"
        self._rank, self._board_folder = rank, out / "tensorboard" if tensorboard else None
        self._board: Any = None
        self._tokens: dict[int, float] = {}
        self._size_bytes = -1
        self._missed = 0
        if tensorboard and find_spec("tensorboard") is None:
            raise ExtraMissingError("tensorboard is not installed", key="--tensorboard",
                                    fix="pip install tensorboard")  # fmt: skip

    def step(
        self, *, step: int, loss: float, count: float, gradient_norm: float | None, time_s: float | None,
        clock: str, devices: int, samples: int, **more: Any,
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
        more
            Further numbers, written as they are.
        """  # fmt: skip
        line = {
            "step": step,
            "loss_metrics/global_avg_loss": loss,
            "grad_norm": gradient_norm,
            "throughput(tps)": count / time_s / devices if time_s and time_s > 0 else None,
            "time_metrics/end_to_end(s)": time_s,
            **_memory(),
            "n_tokens": count,
            "n_tokens_seen": self._seen(step, count),
            "n_samples": samples,
            "clock": clock,
            "time": time.time(),
            **more,
        }
        if self._append(self._metrics, line):
            self._size_bytes = self._metrics.stat().st_size
        self._show(line)

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Write a line of the operator's log."""
        told = {"missed_lines": self._missed} if self._missed else {}
        line = {"time": time.time(), "rank": self._rank, "kind": kind, "text": text, **facts, **told}
        self._append(self._events, line)

    def _append(self, path: Path, line: dict[str, Any]) -> bool:
        """Add a line and return whether it fitted; one that does not is taken back and counted."""
        try:
            _add_line(path, json.dumps(line).encode() + b"\n")
        except OSError:
            self._missed += 1
            return False
        return True

    def _seen(self, step: int, count: float) -> float:
        """Return the tokens up to and with a step, also those of before this process wrote."""
        if not self._metrics.exists() or self._metrics.stat().st_size != self._size_bytes:
            self._tokens = _tokens_of(self._metrics)
        self._tokens = {s: n for s, n in self._tokens.items() if s < step}
        base = sum(self._tokens.values())
        self._tokens = {step: base + count}
        return base + count

    def _show(self, line: dict[str, Any]) -> None:
        if self._board_folder is None:
            return
        if self._board is None:
            self._board = _board(self._board_folder)
        for name, value in line.items():
            if isinstance(value, float) and name != "time":
                self._board.add_scalar(name, value, line["step"])
        self._board.flush()


def _add_line(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            whole = file.write(data) == len(data)
        except OSError:
            file.truncate(begin)
            raise
        if not whole:
            file.truncate(begin)
            raise OSError(errno.ENOSPC, "the line did not fit", str(path))


def _tokens_of(path: Path) -> dict[int, float]:
    """Return the tokens of each step that a run's metrics tell of; of a step trained twice the last."""
    found: dict[int, float] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        found[int(line["step"])] = float(line["n_tokens"])
    return found


def _memory() -> dict[str, float]:
    """Return the most memory this process has had: of the GPU where there is one, else of the host."""
    import torch

    if torch.cuda.is_available():
        told = torch.cuda.memory_stats()
        return {
            "memory/max_active(GiB)": told.get("active_bytes.all.peak", 0) / GIB,
            "memory/max_reserved(GiB)": told.get("reserved_bytes.all.peak", 0) / GIB,
        }
    return {"memory/max_reserved(GiB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 / GIB}


def _board(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
