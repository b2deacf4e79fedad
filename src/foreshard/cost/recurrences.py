"""Time of the steps of recurrent layers, which wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.spec.traced_module import Operation

_FEW_ROWS = 64.0
"""Samples up to which cuBLAS has kernels that leave no rows of a tile empty."""
_TILE_SAMPLES = 16.0
_TILE_S = (1.6e-6, 2.7e-6)
"""Seconds of a step of as many samples in a persistent kernel, forward and backward.

Source: bench/device_recurrent.csv, ampere_lstm_tile16 and ampere_lstm_bp of cuDNN 9 on an H200: 1.4 us for 16
samples and 1.3 for each 16 of 64 with 512 channels, 1.9 and 1.8 with 1,024; 3.1, 2.0, 4.4 and 2.6 backward.
"""
_KERNELS = (2, 3)
"""Of a step, forward and backward: the product, the gates, and backward the sum of the parts of a split
product or zeros to add them to (bench/device_recurrent.csv, most layers that are no single kernel)."""


@dataclass(frozen=True, slots=True)
class RecurrentKernels:
    """How a library runs recurrent layers on a device.

    One kernel may keep the weights on the processors for all steps, in fp16: by torch's rule for V100
    (`volta`), or by that for A100 and later devices with 98 processors or more (`later`).

    Source
    ------
    torch 2.11, aten/src/ATen/native/cudnn/RNN.cpp, use_persist_common_heuristics and
    use_persist_device_heuristics.
    """

    volta: bool = False
    later: bool = False
    full_tiles: bool = True  # products of few samples leave no rows of a tile empty
    waiting_s: float = 0.0  # that a step of other layers takes beyond its kernels

    def keeps(self, operations: Sequence[Operation], samples: float) -> np.ndarray:
        """Return whether each recurrence runs so, shape (operations,)."""
        return np.array([self._keeps(operation, samples) for operation in operations], dtype=bool)

    def _keeps(self, operation: Operation, samples: float) -> bool:
        rows, wide, width, _, alone, steps = (size.at(samples) for size in operation.sizes)
        if not alone:
            return False
        if self.volta:
            enough = any(steps >= least and rows <= most for least, most in ((40, 128), (20, 96), (10, 32)))
            return enough and (rows == 8 or (rows % 16 == 0 and rows not in (80, 112)))
        gates = wide / width
        return (
            self.later
            and gates != 3
            and rows % 8 == 0
            and (rows < 96 or width < 896 or gates == 4)
            and (rows <= 128)
        )


def recurrence_s(
    sizes: np.ndarray,
    cell_bytes: np.ndarray,
    kernels: KernelModel,
    *,
    library: RecurrentKernels,
    backward: np.ndarray,
    kept: np.ndarray,
) -> np.ndarray:
    """Seconds of all steps of recurrences on the device; each is a product and a kernel of the gates.

    A product of few samples is bound by its weights, which every step reads.

    Parameters
    ----------
    sizes : ndarray, shape (6, recurrences)
        As `spec.traced_module.Operation` has them.
    cell_bytes : ndarray, shape (recurrences,), bytes
        That the gates of all steps stream.
    kernels : KernelModel
    library : RecurrentKernels
    backward, kept : ndarray of bool, shape (recurrences,)
        Whether they are gradients, and whether one kernel runs all steps.

    Source
    ------
    Judged on DeepBench's recurrent layers and on kernels of an H200 (docs/traced_modules.md).
    """
    rows, wide, width, element_bytes, _, steps = sizes
    product_s = gemm_s(rows, wide, width, kernels, bytes_per_element=element_bytes)
    multiplied_s = 2.0 * rows * wide * width / (kernels.peak_flops_per_s * kernels.gemm_eff)
    read_s = element_bytes * wide * width / (kernels.stream_eff * kernels.memory_bytes_per_s)
    few_s = np.maximum(multiplied_s, read_s) + kernels.gemm_launch_s
    full = (rows <= _FEW_ROWS) & library.full_tiles
    product_s = np.where(full, np.minimum(product_s, few_s), product_s)
    more = np.where(backward, _KERNELS[1], _KERNELS[0]) - _KERNELS[0]
    gates_s = stream_s(cell_bytes / steps, kernels) + more * kernels.stream_launch_s
    apart_s = steps * (product_s + gates_s + library.waiting_s)
    kept_s = steps * np.ceil(rows / _TILE_SAMPLES) * np.where(backward, _TILE_S[1], _TILE_S[0])
    return np.where(kept, kept_s, apart_s)


def recurrence_kernels(operation: Operation, samples: float, library: RecurrentKernels) -> float:
    """Return how many kernels a library launches for an operation of a recurrent layer."""
    if operation.kind != "recurrence" or library.keeps((operation,), samples)[0]:
        return 1.0
    return _KERNELS[operation.name.endswith("backward")] * operation.sizes[-1].fixed
