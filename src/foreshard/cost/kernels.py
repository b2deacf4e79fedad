"""The parameters every kernel-time formula takes, and the tile shapes they assume."""

from __future__ import annotations

from foreshard.catalog.kernels import KernelModel

__all__ = ["TILES", "KernelModel"]

TILES = ((256, 128), (128, 256), (128, 128), (64, 64))
"""Output tiles (rows, columns) a matrix-product library chooses from, largest first."""
