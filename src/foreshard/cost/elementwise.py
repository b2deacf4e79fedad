"""Time of memory-bound operations: the bytes they move, streamed."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.tables import tabled_s


def stream_s(num_bytes: Any, kernels: KernelModel, *, num_kernels: Any = 1) -> np.ndarray:
    """Seconds to stream bytes through elementwise kernels: bytes at the achievable bandwidth, plus launch.

    Bytes are those read and written, over `num_kernels` launches; zero gives 0 seconds. A measured table
    (`cost.tables`) gives the time of one kernel within its sizes.

    Source
    ------
    Fitted on NeuSight elementwise kernels; docs/derivations/kernels.md.
    """
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    busy_s = num_bytes / (kernels.stream_eff * kernels.memory_bytes_per_s)
    time_s = busy_s + kernels.stream_launch_s * np.asarray(num_kernels)
    if np.count_nonzero(kernels.stream_table):
        single = np.where(np.asarray(num_kernels) == 1, num_bytes, 0.0)
        time_s = tabled_s(time_s, kernels.stream_table, (single,))
    return np.where(num_bytes > 0, time_s, 0.0)


def stream_rate(num_bytes: Any, kernels: KernelModel) -> Any:
    """Return bytes per second of memory-bound kernels that move so many bytes each, launches aside.

    By a measured table where it covers the size, launches in it, else the achievable bandwidth.
    """
    rate = kernels.stream_eff * kernels.memory_bytes_per_s
    if not np.count_nonzero(kernels.stream_table):
        return rate
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    return num_bytes / tabled_s(num_bytes / rate, kernels.stream_table, (num_bytes,))
