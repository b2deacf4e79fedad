"""A run as it goes: a line on a terminal, nothing in a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from foreshard.units import format_seconds

_EVERY_S = 0.5


def progress(steps: int) -> Callable[[Path], None] | None:
    """Return what draws the progress of a run from its metrics, or None where nobody looks."""
    if not sys.stderr.isatty():
        return None
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"), transient=True,
    )  # fmt: skip
    task = bar.add_task("run", total=steps, told="")
    bar.start()
    seen = {"at": 0, "looked_s": 0.0}

    def look(metrics: Path) -> None:
        now = time.monotonic()
        if now - seen["looked_s"] < _EVERY_S or not metrics.exists():
            return
        seen["looked_s"] = now
        lines = metrics.read_text().splitlines()[seen["at"] :]
        if not lines:
            return
        seen["at"] += len(lines)
        last = json.loads(lines[-1])
        step_s, tokens = last["time_metrics/end_to_end(s)"], last["n_tokens"]
        told = f"loss {last['loss_metrics/global_avg_loss']:.4g}, {format_seconds(step_s)} a step, {tokens / step_s:.3g} tokens/s"
        bar.update(task, completed=last["step"] + 1, told=told)
        if last["step"] + 1 >= steps:
            bar.stop()

    return look
