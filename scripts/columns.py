"""CSV tables as columns: numbers as float64 (an empty cell is nan), everything else as text."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Table:
    """Columns of equal length."""

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = dict(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, rows: Any) -> Table:
        """Return the rows of a mask, a slice or indices."""
        return Table({name: column[rows] for name, column in self.columns.items()})

    def plus(self, **columns: np.ndarray) -> Table:
        """Return the table with more columns."""
        return Table({**self.columns, **columns})

    def order(self, *names: str) -> np.ndarray:
        """Return the indices that sort the rows by columns, the first one first; stable."""
        return np.lexsort([np.unique(self[name], return_inverse=True)[1] for name in reversed(names)])

    def groups(self, *names: str) -> Iterator[tuple[tuple[Any, ...], Table]]:
        """Yield the values of columns, sorted, with the rows that have them in their order."""
        order = self.order(*names)
        keys = [self[name][order] for name in names]
        changed = np.any([key[1:] != key[:-1] for key in keys], axis=0)
        for rows in np.split(order, np.flatnonzero(changed) + 1) if len(order) else ():
            yield tuple(self[name][rows[0]].item() for name in names), self.take(rows)


def read_columns(path: Path) -> Table:
    """Return a CSV file, compressed or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return Table({name: _column(cells) for name, cells in zip(header, zip(*rows, strict=True), strict=True)})


def _column(cells: tuple[str, ...]) -> np.ndarray:
    """Return numbers where every cell that is not empty is one, and any is."""
    if any(cells):
        try:
            return np.array([float(cell) if cell else np.nan for cell in cells])
        except ValueError:
            pass
    return np.array(cells)
