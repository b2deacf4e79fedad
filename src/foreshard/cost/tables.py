"""Measured tables of matrix products as a cost source: interpolated between sizes, never beyond them.

A table is a grid of rows, columns and inner sizes. Between its points the logarithm of the time is linear in
the logarithms of the sizes. Points that contradict each other, a larger product that is faster, meet in the
middle, so that no time falls as a size grows. A size outside the grid, or in a cell of it with a corner that
was not measured, is not covered: who asks takes the next source.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.spec.device import Device

Array = NDArray[np.float64]

SIZES = ("m", "n", "k")
_WIDTHS = {
    "bf16": "16bit",
    "bfloat16": "16bit",
    "fp16": "16bit",
    "float16": "16bit",
    "half": "16bit",
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "tf32",
    "fp8": "fp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
_INSIDE = 1e-9  # of a logarithm: rounding of a size at the edge
_FIX = "Columns are device, dtype, m, n, k and latency_ms, as foreshard validate reads products"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductTable:
    """Seconds of products on a grid: `axes` are logs of sizes, `log_s` of times, NaN where not measured."""

    axes: tuple[Array, Array, Array]
    log_s: Array

    def covered(self, m: Any, n: Any, k: Any) -> NDArray[np.bool_]:
        """Return which sizes lie in cells whose corners were all measured."""
        return np.isfinite(self._log_time(m, n, k))

    def seconds(self, m: Any, n: Any, k: Any) -> Array:
        """Return the seconds of products, NaN where they are not covered."""
        return np.exp(self._log_time(m, n, k))

    def _log_time(self, m: Any, n: Any, k: Any) -> Array:
        with np.errstate(divide="ignore"):
            sizes = np.broadcast_arrays(*(np.log(np.asarray(size, float)) for size in (m, n, k)))
        inside = np.ones(sizes[0].shape, dtype=bool)
        low, part = [], []
        for axis, size in zip(self.axes, sizes, strict=True):
            inside &= (size >= axis[0] - _INSIDE) & (size <= axis[-1] + _INSIDE)
            clipped = np.clip(size, axis[0], axis[-1])
            place = np.clip(np.searchsorted(axis, clipped, side="right") - 1, 0, max(len(axis) - 2, 0))
            low.append(place)
            part.append(
                (clipped - axis[place]) / (axis[place + 1] - axis[place]) if len(axis) > 1 else 0.0 * size
            )
        found = np.zeros(sizes[0].shape)
        for corner in product((0, 1), repeat=3):
            weight = np.ones(sizes[0].shape)
            for side, share in zip(corner, part, strict=True):
                weight = weight * (share if side else 1.0 - share)
            index = tuple(
                np.minimum(place + side, len(axis) - 1)
                for place, side, axis in zip(low, corner, self.axes, strict=True)
            )
            # A corner without weight is no part of the line, face or point that the size lies on.
            found = found + np.where(weight > 0, weight * self.log_s[index], 0.0)
        return np.where(inside, found, np.nan)


def product_table(sizes: Array, seconds: Array) -> ProductTable:
    """Return the table of measured products, repeats of a size as their median.

    Parameters
    ----------
    sizes : array, shape (rows, 3)
    seconds : array, shape (rows,)
    """
    distinct, where = np.unique(sizes, axis=0, return_inverse=True)
    where = where.ravel()
    order = np.argsort(where, kind="stable")
    groups = np.split(np.log(seconds)[order], np.flatnonzero(np.diff(where[order])) + 1)
    axes = tuple(np.unique(column) for column in distinct.T)
    grid = np.full(tuple(map(len, axes)), np.nan)
    index = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, distinct.T, strict=True))
    grid[index] = [np.median(group) for group in groups]
    a, b, c = (np.log(axis) for axis in axes)
    return ProductTable(axes=(a, b, c), log_s=rising(grid))


def rising(grid: Array) -> Array:
    """Return a grid that never falls along an axis: itself where it does not; NaN stays.

    The middle of the largest value below and the smallest above, in every axis.

    Examples
    --------
    >>> rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    below, above = grid, grid
    for axis in range(grid.ndim):
        below = np.fmax.accumulate(below, axis=axis)
        above = np.flip(np.fmin.accumulate(np.flip(above, axis=axis), axis=axis), axis=axis)
    return np.where(np.isnan(grid), np.nan, (below + above) / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTables:
    """The tables of a file, by device and width of the products."""

    path: str
    products: Mapping[tuple[str, str], ProductTable]

    def number(self, device: Device, precision: str) -> float:
        """Return the number by which arrays name the table of a device and precision; 0 without one."""
        table = self.products.get((device.name, _WIDTHS[precision]))
        if table is None:
            return 0.0
        known = [number for number, other in enumerate(_IN_USE, start=1) if other is table]
        if not known:
            _IN_USE.append(table)
        return float(known[0] if known else len(_IN_USE))


_IN_USE: list[ProductTable] = []
"""Tables by number less 1: arrays of kernels hold numbers. Each process numbers its own."""


def tabled_s(formula_s: Any, numbers: Any, sizes: tuple[Any, Any, Any], slower: Any = 1.0) -> Array:
    """Return seconds of products by the tables that `numbers` name, times `slower`, else by the formula."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in (formula_s, numbers, slower, *sizes)))
    time_s = np.array(np.broadcast_to(formula_s, shape), dtype=np.float64)
    numbers, slower = np.broadcast_to(numbers, shape), np.broadcast_to(slower, shape)
    m, n, k = (np.broadcast_to(size, shape) for size in sizes)
    for number in np.unique(numbers[numbers > 0]):
        mine = numbers == number
        found = _IN_USE[int(number) - 1].seconds(m[mine], n[mine], k[mine]) * slower[mine]
        time_s[mine] = np.where(np.isfinite(found), found, time_s[mine])
    return time_s


def tabled(numbers: Any, sizes: tuple[Any, Any, Any]) -> NDArray[np.bool_]:
    """Return which products the tables cover."""
    return np.isfinite(tabled_s(np.nan, numbers, sizes))


def load_tables(path: str) -> KernelTables:
    """Return the products of a table of kernels, `.csv` or `.csv.gz`.

    Raises
    ------
    SpecError
        For what is no such table, naming file and column.
    """
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"cannot read the table: {why}", file=path, key="--costs", fix=_FIX) from None
    missing = [name for name in ("device", "dtype", *SIZES, "latency_ms") if not rows or name not in rows[0]]
    if missing:
        what = f"no column {missing[0]}" if rows else "no row"
        raise SpecError(what, file=path, key=missing[0], rule="Products have sizes and a time", fix=_FIX)
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    names: dict[str, str] = {}
    for line, row in enumerate(rows, start=2):
        width = _WIDTHS.get(row["dtype"].lower())
        if width is None or row.get("flag"):
            continue
        name = row["device"]
        if name not in names:
            names[name] = _device_name(name)
        found.setdefault((names[name], width), []).append(_numbers_of(row, line, path))
    if not found:
        rule = f"Products are in {', '.join(_WIDTHS)}"
        raise SpecError("no product that a step has", file=path, key="dtype", rule=rule, fix=_FIX)
    tables = {}
    for key, values in found.items():
        columns = np.array(values)
        tables[key] = product_table(columns[:, :3], columns[:, 3])
    return KernelTables(path=path, products=tables)


def _device_name(text: str) -> str:
    """Return the catalog's name of a device, or the text: clusters may define devices of their own."""
    try:
        return resolve_device(text).name
    except SpecError:
        return text


def _numbers_of(row: Mapping[str, str], line: int, path: str) -> tuple[float, ...]:
    """Return (m, n, k, seconds) of a row."""
    found = []
    for name in (*SIZES, "latency_ms"):
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = float("nan")
        if not 0 < value < 1e15:
            rule = "Sizes and times are numbers above 0"
            what = f"row {line}: {row[name]!r} is not valid"
            raise SpecError(what, file=path, key=name, value=row[name], rule=rule, fix="Correct or remove it")
        found.append(value)
    return (*found[:3], found[3] * 1e-3)
