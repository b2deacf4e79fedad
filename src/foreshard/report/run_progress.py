"""A run as it goes: on a terminal a line, or a board where a controller steers; nothing in a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreshard.report.run_board import Board, shown_loss
from foreshard.units import format_seconds

_EVERY_S = 0.5
Draw = Callable[[list[dict[str, Any]]], None]


class Follow:
    """Reads the metrics of a run as they are written."""

    def __init__(self) -> None:
        self._read_bytes = 0

    def lines(self, metrics: Path) -> list[dict[str, Any]]:
        """Return the whole lines that came since the last look."""
        if not metrics.exists():
            return []
        with metrics.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def told(line: dict[str, Any], predicted_s: float | None = None) -> str:
    """Return what is said of a step: loss, its time, the predicted one if there is one, tokens per second."""
    words = [f"loss {shown_loss(line)}"]
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
    follow, looked_s = Follow(), [0.0]
    draw: list[Draw] = []

    def look(metrics: Path) -> None:
        now = time.monotonic()
        if now - looked_s[0] < _EVERY_S:
            return
        looked_s[0] = now
        lines = follow.lines(metrics)
        if lines and not draw:
            draw.append(_board(steps) if "controller/policy" in lines[-1] else _bar(steps, predicted_s))
        if lines:
            draw[0](lines)

    return look


def _bar(steps: int, predicted_s: float | None) -> Draw:
    """Return what draws a line with a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"), transient=True, console=Console(stderr=True),
    )  # fmt: skip
    task = bar.add_task("run", total=steps, told="")

    def draw(lines: list[dict[str, Any]]) -> None:
        bar.start()
        bar.update(task, completed=lines[-1]["step"] + 1, told=told(lines[-1], predicted_s))
        if lines[-1]["step"] + 1 >= steps:
            bar.stop()

    return draw


def _board(steps: int) -> Draw:
    """Return what draws the board of a controller; the last one stays on the screen."""
    from rich.console import Console
    from rich.live import Live

    board = Board(steps)
    live = Live(console=Console(stderr=True), auto_refresh=False)

    def draw(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            board.take(line)
        live.start()
        live.update(board.render(), refresh=True)
        if lines[-1]["step"] + 1 >= steps:
            live.stop()

    return draw
