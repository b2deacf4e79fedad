"""The clock of a bench that plans with a budget: by the processor, so that other work does not count."""

from __future__ import annotations

import time


def use_processor_clock(busy_processes: int = 0) -> None:
    """Let budgets run by the processor time of this process instead of by the clock on the wall.

    With busy processes beside it a core gives this process its share: the clock runs as many times faster.
    """
    time.perf_counter = lambda: (1.0 + busy_processes) * time.process_time()
