"""The parameters every kernel-time formula takes, and the tile shapes they assume."""

from __future__ import annotations

from foreshard.catalog.kernels import KernelModel

__all__ = ["CLOCK_SAG_S", "QUERY_TILE", "TILES", "KernelModel"]

TILES = ((128, 256), (128, 128), (64, 64))
"""Output tiles (rows, columns) a matrix-product library chooses from, largest first.

More shapes, or whole last waves, do not lower the error on measured products (docs/derivations/kernels.md).
"""

QUERY_TILE = 128
"""Query rows of one flash attention tile."""

CLOCK_SAG_S = 1e-3
"""Length of a product at which half of the power-limited slowdown shows."""
