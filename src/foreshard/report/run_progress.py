"""A run as it goes: a line on a terminal, nothing in a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreshard.units import format_seconds

_EVERY_S = 0.5


class Follow:
    """Reads the metrics of a run as they are written."""

    def __init__(self) -> None:
        self._read_bytes = 0

    def latest(self, metrics: Path) -> dict[str, Any] | None:
        """Return the newest whole line that came since the last look."""
        if not metrics.exists():
            return None
        with metrics.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        lines = whole.splitlines()
        return dict(json.loads(lines[-1])) if lines else None


def told(line: dict[str, Any], predicted_s: float | None = None) -> str:
    """Return what is said of a step: loss, its time, the predicted one if there is one, tokens per second."""
    words = [f"loss {line['loss_metrics/global_avg_loss']:.4g}"]
    step_s = line["time_metrics/end_to_end(s)"]
    if step_s:  # none for a step that a change of ranks cut in two
        against = "" if predicted_s is None else f" ({format_seconds(predicted_s)} predicted)"
        words += [f"{format_seconds(step_s)} a step{against}", f"{line['n_tokens'] / step_s:.3g} tokens/s"]
    return ", ".join(words)


def progress(steps: int, predicted_s: float | None = None) -> Callable[[Path], None] | None:
    """Return what draws the progress of a run from its metrics, or None where nobody looks.

    Parameters
    ----------
    steps : int
        Of the whole run.
    predicted_s : float, optional
        Of a step.
    """
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"), transient=True, console=Console(stderr=True),
    )  # fmt: skip
    task = bar.add_task("run", total=steps, told="")
    follow, looked_s = Follow(), [0.0]

    def look(metrics: Path) -> None:
        now = time.monotonic()
        if now - looked_s[0] < _EVERY_S:
            return
        looked_s[0] = now
        line = follow.latest(metrics)
        if line is None:
            return
        bar.start()
        bar.update(task, completed=line["step"] + 1, told=told(line, predicted_s))
        if line["step"] + 1 >= steps:
            bar.stop()

    return look
