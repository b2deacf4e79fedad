"""Time as the stream of a CUDA device sees it."""

from __future__ import annotations

import torch

from foreshard.runtime.engine.clock import Clock


class CudaClock(Clock):
    """The machine's clock, where work is timed on the stream of a CUDA device that does it later.

    A mark is an event of the stream, so that marks between kernels cost the host nothing; `seconds` waits for
    the device. Events count from the start of the step: their resolution falls with the time between them.
    """

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        """Take the moment that the marks of a step count from."""
        self._origin = self.mark()
        self._origin_s = self.now()

    def mark(self) -> torch.cuda.Event:
        """Return an event on the present stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return when the stream came to the mark."""
        mark.synchronize()
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3
