"""Time of a matrix product: tiles, waves of tiles over the processors, memory roof, launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.cost.kernels import TILES, KernelModel

_LARGEST_TILE = max(rows * columns for rows, columns in TILES)


def gemm_s(
    m: Any,
    n: Any,
    k: Any,
    kernels: KernelModel,
    *,
    bytes_per_element: Any = 2,
    sixteen_bit: bool = False,
    batch: Any = 1,
) -> np.ndarray:
    """Seconds of `batch` products of (m, k) with (k, n): 2 m n k FLOP each.

    The output is cut in tiles; the tiles fill the processors in waves; a tile costs k plus a fixed
    k0 multiply-adds per output. The fastest of a few tile shapes is taken, as the library would.
    The result never falls when m, n, k or batch grows, nor when a peak or the bandwidth falls.

    Parameters
    ----------
    m, n, k : array_like
        Sizes; any zero gives 0 seconds.
    kernels : KernelModel
        Fields broadcast against the sizes.
    bytes_per_element : array_like, bytes
        Of operands and result, for the memory roof.
    sixteen_bit : bool
        Use the 16-bit rate and curve although the matrix precision is narrower.
    batch : array_like
        Independent products in one launch.

    Returns
    -------
    ndarray of float64, seconds

    Source
    ------
    Derived in docs/derivations/kernels.md; fitted on aiconfigurator, NeuSight and MAMF tables.
    """
    m, n, k, batch = (np.asarray(a, dtype=np.float64) for a in (m, n, k, batch))
    compute_s = _waves(m, n, batch, kernels) * _wave_s(k, kernels, sixteen_bit)
    moved = (m * k + k * n + m * n) * (batch * bytes_per_element)
    memory_s = moved / (kernels.gemm_memory_eff * kernels.memory_bytes_per_s)
    busy_s = np.maximum(compute_s, memory_s)
    return np.where(m * n * k * batch > 0, busy_s + kernels.gemm_launch_s, 0.0)


def _waves(m: np.ndarray, n: np.ndarray, batch: np.ndarray, kernels: KernelModel) -> np.ndarray:
    """Return waves in units of the largest tile at full speed, of the best tile shape."""
    penalty = np.asarray(kernels.gemm_tile_penalty, dtype=np.float64)
    per_processor = batch / kernels.num_sms
    best: np.ndarray | None = None
    for rows, columns in TILES:
        tiles = np.ceil(m * (1.0 / rows))
        tiles *= np.ceil(n * (1.0 / columns))
        waves = tiles * per_processor
        if np.any(kernels.gemm_wave):
            waves += kernels.gemm_wave * (np.ceil(waves) - waves)
        area = rows * columns / _LARGEST_TILE
        waves = np.maximum(waves, 1.0) * area ** (1.0 - penalty)
        best = waves if best is None else np.minimum(best, waves)
    assert best is not None
    return best


def _wave_s(k: np.ndarray, kernels: KernelModel, sixteen_bit: bool) -> np.ndarray:
    """Return the seconds of one wave of the largest tile."""
    if sixteen_bit:
        rate, k0 = kernels.bf16_peak_flops_per_s * kernels.gemm16_eff, kernels.gemm16_k0
    else:
        rate, k0 = kernels.peak_flops_per_s * kernels.gemm_eff, kernels.gemm_k0
    return (k + k0) * (2.0 * _LARGEST_TILE * kernels.num_sms / rate)
