"""Metrics of a run: a line per step under torchtitan's names, and the operator's log.

The names are those of torchtitan's MetricsProcessor (components/metrics.py, 2026-08-21), so that programs
that read its logs read these. Lines wait in memory while the disk is full; beyond a bound the oldest are
discarded and counted in the log: metrics never stop a run.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreshard.runtime.records.durable_jsonl import DurableJsonl, whole_lines
from foreshard.runtime.records.trackers import TRACKERS, numbers

GIB = 2**30
STEP_LINE: Mapping[str, Any] = {
    "step": int,
    "generation": int,
    "loss_metrics/global_avg_loss": int | float | None,
    "time_metrics/end_to_end(s)": int | float | None,
    "n_tokens": int | float,
    "clock": str,
}
"""What is read back of a step's line: keys with the types of their values."""
_COUNTED = {key: STEP_LINE[key] for key in ("step", "n_tokens")}
KEPT_BYTES = 16 * 2**20
"""Of lines that wait for a disk, in each of the files."""


class Metrics:
    """Writes `metrics.jsonl`, `evaluations.jsonl` and `events.jsonl` of a run, and the files of trackers."""

    def __init__(self, out: Path, rank: int, *, trackers: Sequence[str] = ()):
        out.mkdir(parents=True, exist_ok=True)
        self._events = DurableJsonl(out / "events.jsonl", self.event)
        self._metrics = DurableJsonl(out / "metrics.jsonl", self.event)
        self._evaluations = DurableJsonl(out / "evaluations.jsonl", self.event)
        self._rank, self._trackers = rank, [TRACKERS[name](out) for name in trackers]
        self._tokens: dict[int, float] = {}
        self._size_bytes = -1
        self._missed = 0
        self._lost_loss = False

    def step(
        self,
        *,
        step: int,
        loss: float,
        count: float,
        gradient_norm: float | None,
        time_s: float | None,
        clock: str,
        devices: int,
        samples: int,
        **more: Any,
    ) -> dict[str, Any]:
        """Write a step's line, and return it.

        `loss` is the mean over what is counted (tokens mostly): null in the line, and an event, where it is
        not finite. `time_s` is on the run's clock; None for a step that a change of ranks cut in two.
        `devices` are those that the plan uses. Further numbers are written as they are.
        """
        line: dict[str, Any] = {
            "step": step,
            "loss_metrics/global_avg_loss": _finite(loss),
            "grad_norm": _finite(gradient_norm),
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
        self._add(self._metrics, line)
        self._warn_of_loss(step, loss)
        if not self._metrics.waiting:
            self._size_bytes = self._metrics.path.stat().st_size
        self._show(step, line)
        return line

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Write a line of the operator's log."""
        line = {"time": time.time(), "rank": self._rank, "kind": kind, "text": text, **facts}
        self._add(self._events, line | ({"missed_lines": self._missed} if self._missed else {}))

    @property
    def events_path(self) -> Path:
        """The operator's log."""
        return self._events.path

    def flush(self) -> None:
        """Write the waiting lines that the disk accepts; events last, since they report on the other file."""
        self._metrics.flush()
        self._evaluations.flush()
        self._events.flush()

    def _warn_of_loss(self, step: int, loss: float) -> None:
        """Log the first step of a row of steps whose loss is not finite."""
        lost = not math.isfinite(loss)
        if lost and not self._lost_loss:
            self.event(
                "loss not finite", f"The loss is {loss} from this step on; training goes on.", step=step
            )
        self._lost_loss = lost

    def _add(self, file: DurableJsonl, line: dict[str, Any]) -> None:
        file.add(line)
        while file.waiting_bytes > KEPT_BYTES:
            file.drop_oldest()
            self._missed += 1

    def _seen(self, step: int, count: float) -> float:
        """Return the tokens up to and including a step, also those of other processes that wrote before."""
        path = self._metrics.path
        others = not path.exists() or path.stat().st_size != self._size_bytes
        if others and not self._metrics.waiting:
            self._tokens = {line["step"]: line["n_tokens"] for line in whole_lines(path, _COUNTED)}
        self._tokens = {s: n for s, n in self._tokens.items() if s < step}
        base = sum(self._tokens.values())
        self._tokens = {step: base + count}
        return base + count

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what an evaluation after so many steps gave."""
        line = {f"eval/{name}": _finite(value) for name, value in values.items()}
        self._add(self._evaluations, {"step": step, **line, "time": time.time()})
        self._show(step, line)

    def _show(self, step: int, line: Mapping[str, Any]) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers(line))
            except OSError as error:
                self._trackers.remove(tracker)
                text = f"the files of {tracker.name} end here: {error.strerror or error}"
                self.event("tracker given up", text, step=step)

    def close(self) -> None:
        """Let trackers write what they hold."""
        for tracker in self._trackers:
            with contextlib.suppress(OSError):
                tracker.close()


def _finite(value: float | None) -> float | None:
    """Return the number, or None where it is not finite: JSON has no such number."""
    return value if value is not None and math.isfinite(value) else None


def _memory() -> dict[str, float]:
    """Return the peak memory of this process: of the GPU where there is one, else of the host."""
    import torch

    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        return {
            "memory/max_active(GiB)": stats.get("active_bytes.all.peak", 0) / GIB,
            "memory/max_reserved(GiB)": stats.get("reserved_bytes.all.peak", 0) / GIB,
        }
    return {"memory/max_reserved(GiB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 / GIB}
