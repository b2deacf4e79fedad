"""Time of memory-bound operations: the bytes they move, streamed."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.cost.kernels import KernelModel


def stream_s(num_bytes: Any, kernels: KernelModel, *, num_kernels: Any = 1) -> np.ndarray:
    """Seconds to stream bytes through elementwise kernels: bytes at the achievable bandwidth, plus launch.

    Bytes are those read and written, over `num_kernels` launches; zero gives 0 seconds.

    Source
    ------
    Fitted on NeuSight elementwise kernels; docs/derivations/kernels.md.
    """
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    busy_s = num_bytes / (kernels.stream_eff * kernels.memory_bytes_per_s)
    return np.where(num_bytes > 0, busy_s + kernels.stream_launch_s * np.asarray(num_kernels), 0.0)
