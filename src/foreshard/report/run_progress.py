"""Progress of a run on a terminal: a line, or a board where a controller decides; nothing in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foreshard.quantity import count, seconds
from foreshard.report.run_board import Board, shown_loss
from foreshard.runtime.records.durable_jsonl import parsed_lines

_EVERY_S = 0.5  # between two looks at the metrics
_NEWS = {
    "supervisor.jsonl": ("generation", "waiting", "stopping", "ended"),
    "events.jsonl": (
        *("checkpoint failed", "checkpoint saved at last", "restored", "loss not finite"),
        *("rank_slow", "rank_recovered", "write blocked", "write resumed", "adopted by request"),
        *("collective", "compression"),
    ),
}
"""Kinds of lines that are shown at once, by file."""
Draw = Callable[[list[dict[str, Any]]], None]


class RunFollower:
    """Reads JSON lines as they are written; what was there before is skipped if `path` is given."""

    def __init__(self, path: Path | None = None) -> None:
        self._read_bytes = path.stat().st_size if path is not None and path.exists() else 0

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """Return the whole lines that came since the last look, without torn ones."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return list(parsed_lines(whole.decode(errors="replace")))


class RunUpdate:
    """What happens in a run, in words, for the terminal: losses and returns of ranks, faults of the disk."""

    def __init__(self, folder: Path) -> None:
        self._follow = {path: RunFollower(path) for path in (folder / name for name in _NEWS)}

    def words(self) -> list[str]:
        """Return what has happened since the last look."""
        lines = [(path.name, line) for path, follow in self._follow.items() for line in follow.lines(path)]
        return [line["text"] for name, line in lines if line.get("text") and line["kind"] in _NEWS[name]]


def step_words(line: dict[str, Any], predicted_s: float | None = None) -> str:
    """Return a step in words: loss, its time, the predicted time if there is one, tokens per second."""
    words = [f"loss {shown_loss(line)}"]
    step_s = line["time_metrics/end_to_end(s)"]
    if step_s:  # none for a step that a change of ranks cut in two
        against = "" if predicted_s is None else f" ({seconds(predicted_s)} predicted)"
        words += [f"{seconds(step_s)} a step{against}", f"{count(line['n_tokens'] / step_s)} tokens/s"]
    return ", ".join(words)


@contextmanager
def progress(steps: int, predicted_s: float | None = None) -> Iterator[Callable[[Path], None] | None]:
    """Run the body with what draws the progress of a run from its metrics, or None without a terminal.

    However the body ends, the rest is drawn and the terminal is as before: the next line starts on its own.
    """
    if not sys.stderr.isatty():
        yield None
        return
    drawing = _Drawing(steps, predicted_s)
    try:
        yield drawing.look
    finally:
        drawing.end()


class _Drawing:
    """A bar or a board, chosen by the first lines of the metrics."""

    def __init__(self, steps: int, predicted_s: float | None) -> None:
        self._steps, self._predicted_s = steps, predicted_s
        self._follow, self._looked_s = RunFollower(), 0.0
        self._metrics: Path | None = None
        self._shown: tuple[Draw, Callable[[], None]] | None = None

    def look(self, metrics: Path) -> None:
        """Draw what came, twice a second at most."""
        now = time.monotonic()
        if now - self._looked_s < _EVERY_S:
            return
        self._looked_s, self._metrics = now, metrics
        self._draw(self._follow.lines(metrics))

    def end(self) -> None:
        """Draw what came since the last look, and give the terminal back."""
        if self._metrics is None:
            return
        self._draw(self._follow.lines(self._metrics))
        if self._shown is not None:
            self._shown[1]()

    def _draw(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        if self._shown is None:
            steered = "controller/policy" in lines[-1]
            self._shown = _board(self._steps) if steered else _bar(self._steps, self._predicted_s)
        self._shown[0](lines)


def _bar(steps: int, predicted_s: float | None) -> tuple[Draw, Callable[[], None]]:
    """Return what draws a line with a bar, and what takes it away."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
        transient=True,
        console=Console(stderr=True),
    )
    task = bar.add_task("run", total=steps, words="")

    def draw(lines: list[dict[str, Any]]) -> None:
        bar.start()
        bar.update(task, completed=lines[-1]["step"] + 1, words=step_words(lines[-1], predicted_s))

    return draw, bar.stop


def _board(steps: int) -> tuple[Draw, Callable[[], None]]:
    """Return what draws the board of a controller, and what ends it; the last one stays on the screen."""
    from rich.console import Console
    from rich.live import Live

    board = Board(steps)
    live = Live(console=Console(stderr=True), auto_refresh=False)

    def draw(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            board.take(line)
        live.start()
        live.update(board.render(), refresh=True)

    return draw, live.stop
