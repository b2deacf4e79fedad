"""Time of a matrix product: tiles, tiles shared over the processors, memory, clock, launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.learned import corrected_s, gemm_features
from foreshard.cost.tables import tabled_s

TILES = ((128, 256), (128, 128), (64, 64))
"""Output tiles (rows, columns) a matrix-product library chooses from, largest first.

More shapes, or whole last waves, do not lower the error on measured products (docs/derivations/kernels.md).
"""
_LARGEST_TILE = max(rows * columns for rows, columns in TILES)
_CLOCK_SAG_S = 1e-3  # length of a product at which half of the power-limited slowdown shows


def gemm_s(
    m: Any,
    n: Any,
    k: Any,
    kernels: KernelModel,
    *,
    bytes_per_element: Any = 2,
    sixteen_bit: bool = False,
    batch: Any = 1,
    moved_bytes: Any = None,
) -> np.ndarray:
    """Seconds of `batch` products of (m, k) with (k, n) in one launch: 2 m n k FLOP each; any zero gives 0.

    The output is cut in tiles that share the processors; a tile costs k plus a fixed k0 multiply-adds per
    output, and never less than its longest unsplit run. The best of a few tile shapes is taken, as the
    library would. Computing and moving overlap up to `gemm_exposed` of the shorter. The result never falls
    when m, n, k or batch grows, nor when a peak or the bandwidth falls. `bytes_per_element` of operands and
    result count for the memory roof, or `moved_bytes` where given: a convolution never forms its patches.
    `sixteen_bit` takes that rate and curve although the precision is narrower. Learned kernels correct the
    time by trees (`cost.learned`); a measured table (`cost.tables`) gives that of the sizes that it covers.

    Source
    ------
    Derived in docs/derivations/kernels.md; fitted on aiconfigurator, NeuSight and MAMF tables.
    """
    m, n, k, batch = (np.asarray(size, dtype=np.float64) for size in (m, n, k, batch))
    compute_s = _compute_s(m, n, k, batch, kernels, sixteen_bit)
    if np.count_nonzero(kernels.gemm_sag):
        compute_s = compute_s * (1.0 + kernels.gemm_sag * (compute_s / (compute_s + _CLOCK_SAG_S)))
    if moved_bytes is None:
        moved = (k * (m + n) + m * n) * batch
        memory_s = moved * (bytes_per_element / (kernels.gemm_memory_eff * kernels.memory_bytes_per_s))
    else:
        memory_s = moved_bytes / (kernels.gemm_memory_eff * kernels.memory_bytes_per_s)
    time_s = np.maximum(compute_s, memory_s) + kernels.gemm_exposed * np.minimum(compute_s, memory_s)
    time_s = time_s + kernels.gemm_launch_s
    learned = kernels.gemm16_learned if sixteen_bit else kernels.gemm_learned
    if np.count_nonzero(learned):
        with np.errstate(divide="ignore"):
            features = gemm_features(m, n, k, batch, kernels.num_sms)
        time_s = corrected_s("gemm_16bit", time_s, features, learned)
    table = kernels.gemm16_table if sixteen_bit else kernels.gemm_table
    if np.count_nonzero(table) and moved_bytes is None:
        slower = kernels.gemm16_slower if sixteen_bit else kernels.gemm_slower
        time_s = tabled_s(time_s, np.where(batch == 1, table, 0.0), (m, n, k), slower)
    if all(np.count_nonzero(size) == size.size for size in (m, n, k, batch)):
        return np.asarray(time_s)
    return np.where((m > 0) & (n > 0) & (k > 0) & (batch > 0), time_s, 0.0)


def _compute_s(
    m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray, kernels: KernelModel, sixteen_bit: bool
) -> np.ndarray:
    """Return the seconds in the arithmetic units, of the best tile shape."""
    if sixteen_bit:
        rate = kernels.bf16_peak_flops_per_s * kernels.gemm16_eff
        k0, split_k = kernels.gemm16_k0, kernels.gemm16_split_k
    else:
        rate = kernels.peak_flops_per_s * kernels.gemm_eff
        k0, split_k = kernels.gemm_k0, kernels.gemm_split_k
    tile_s = 2.0 * _LARGEST_TILE * kernels.num_sms / rate  # of one multiply-add per output on one processor
    run_s = (k + k0) * (batch * (tile_s / kernels.num_sms))
    longest_s = (np.minimum(k, split_k) + k0) * tile_s
    shape_loss = 1.0 - np.asarray(kernels.gemm_tile_penalty, dtype=np.float64)
    down = {rows: np.ceil(m * (1.0 / rows)) for rows in {rows for rows, _ in TILES}}
    across = {columns: np.ceil(n * (1.0 / columns)) for columns in {columns for _, columns in TILES}}
    best_s: np.ndarray | None = None
    for rows, columns in TILES:
        time_s = np.maximum(down[rows] * across[columns] * run_s, longest_s)
        area = rows * columns / _LARGEST_TILE
        if area < 1.0:
            time_s = time_s * area**shape_loss
        best_s = time_s if best_s is None else np.minimum(best_s, time_s)
    assert best_s is not None
    return best_s
