"""Time of convolutions in 32 bit: products of patches, or of Winograd's transforms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s


@dataclass(frozen=True, slots=True)
class _Slower:
    """How many times as long as their products convolutions in 32 bit take.

    Source
    ------
    Fitted by scripts/fit_layers.py on the convolutions of DeepBench in fp32, which prints errors on
    devices left out.
    """

    pointwise_weights: float  # gradients of weights of filters of one position
    spread: float  # gradients of images under such filters with a stride, which reach few of the positions


SLOWER = _Slower(pointwise_weights=2.1, spread=2.4)
_FEW_FILTERS = 32.0
"""Filters that a tile of half the width holds: kernels of cuDNN for 32 bit have 128 x 32 beside 128 x 64."""
_SIDE = 128.0
"""Least side of a tile of Winograd's products for weights, which few channels leave empty: with 64 channels
the libraries of DeepBench take as long as by products of patches."""
_TAPS, _PRODUCTS = 9.0, 36.0  # of a filter of 3 x 3, and for a tile of 4 x 4 positions in place of 144
_TRANSFORMED_IMAGE, _TRANSFORMED_FILTERS = 36.0 / 16.0, 36.0 / 9.0


def convolution_s(
    sizes: np.ndarray, moved_bytes: np.ndarray, of_weights: np.ndarray, kernels: KernelModel
) -> np.ndarray:
    """Seconds of convolutions without matrix units, by the faster algorithm, as libraries choose it.

    Parameters
    ----------
    sizes : ndarray, shape (9, convolutions)
        As `spec.traced_module.Operation` has them.
    moved_bytes : ndarray, shape (convolutions,), bytes
        Of image, filters and output.
    of_weights : ndarray of bool, shape (convolutions,)
        Whether they are gradients of weights.
    kernels : KernelModel
        In 32 bit.

    Source
    ------
    Products of patches: Chetlur et al. 2014 (arXiv 1410.0759); Winograd: Lavin and Gray 2015 (arXiv
    1509.09308).
    """
    patches_s = _patches_s(sizes, moved_bytes, of_weights, kernels)
    return np.minimum(patches_s, _winograd_s(sizes, moved_bytes, of_weights, kernels))


def _patches_s(
    sizes: np.ndarray, moved_bytes: np.ndarray, of_weights: np.ndarray, kernels: KernelModel
) -> np.ndarray:
    rows, columns, inner, count, taps, spread, *_ = sizes
    few = columns <= _FEW_FILTERS
    rows, columns = np.where(few, rows / 2.0, rows), np.where(few, 2.0 * columns, columns)
    products_s = gemm_s(rows, columns, inner, kernels, batch=count, moved_bytes=moved_bytes)
    of_images = np.where(spread > 1, SLOWER.spread, 1.0)
    slower = np.where(of_weights, SLOWER.pointwise_weights, of_images)
    return products_s * np.where(taps == 1, slower, 1.0)


def _winograd_s(
    sizes: np.ndarray, moved_bytes: np.ndarray, of_weights: np.ndarray, kernels: KernelModel
) -> np.ndarray:
    """Return the seconds by Winograd's algorithm, infinite where libraries do not have it.

    Tiles of 4 x 4 positions take 36 products of channels between kernels that transform images and filters.
    Smaller tiles, which one kernel transforms and multiplies, are no better on DeepBench's rows.
    """
    m, n, k = sizes[-3:]
    filters = 4.0 * _TAPS * n * np.where(of_weights, m, k)
    streamed = (1.0 + _TRANSFORMED_IMAGE) * (moved_bytes - filters) + (1.0 + _TRANSFORMED_FILTERS) * filters
    down, across = (np.where(of_weights, np.maximum(side, _SIDE), side) for side in (m, n))
    products_s = gemm_s(down, across, k, kernels, bytes_per_element=4, batch=_PRODUCTS)
    return np.where(m > 0, products_s + stream_s(streamed, kernels, num_kernels=3), np.inf)
