"""Measured tables of kernels as a cost source: interpolated between sizes, never beyond them.

A table is a grid of sizes: rows, columns and inner sizes of a product, bytes of a kernel that streams.
Between its points the logarithm of the time is linear in the logarithms of the sizes. Points that contradict
each other, a larger kernel that is faster, meet in the middle, so that no time falls as a size grows. A size
outside the grid, or in a cell of it with a corner that was not measured, is not covered: who asks takes the
next source.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.spec.device import Device

Array = NDArray[np.float64]

SIZES = ("m", "n", "k")
ATTENTION = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim")
COLUMNS = {
    "product": SIZES,
    "attention": ATTENTION,
    "attention_backward": ATTENTION,
    "experts": ("experts", *SIZES),
    "stream": ("bytes",),
    "all_reduce": ("ranks", "bytes"),
    "all_gather": ("ranks", "bytes"),
    "all_to_all": ("ranks", "bytes"),
}
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
"""Kinds of kernels that a table may hold (column `op`, products where it is empty), and their sizes.

Attention is causal, of whole sequences. `experts` has so many products of (m, k) by (k, n) in one launch.
Collectives are between devices of one scale-up domain, their bytes as nccl-tests print them.
"""
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
_FIX = "Columns are device, dtype, m, n, k and latency_ms for products; op names other kernels"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeTable:
    """Seconds of kernels on a grid: `axes` are logs of sizes, `log_s` of times, NaN where not measured."""

    axes: tuple[Array, ...]
    log_s: Array

    def seconds(self, *sizes: Any) -> Array:
        """Return the seconds of kernels, NaN where they are not covered."""
        with np.errstate(divide="ignore"):
            logs = np.broadcast_arrays(*(np.log(np.asarray(size, float)) for size in sizes))
        inside = np.ones(logs[0].shape, dtype=bool)
        low, part = [], []
        for axis, size in zip(self.axes, logs, strict=True):
            inside &= (size >= axis[0] - _INSIDE) & (size <= axis[-1] + _INSIDE)
            clipped = np.clip(size, axis[0], axis[-1])
            place = np.clip(np.searchsorted(axis, clipped, side="right") - 1, 0, max(len(axis) - 2, 0))
            low.append(place)
            part.append(
                (clipped - axis[place]) / (axis[place + 1] - axis[place]) if len(axis) > 1 else 0.0 * size
            )
        found = np.zeros(inside.shape)
        for corner in product((0, 1), repeat=len(logs)):
            weight = np.ones(inside.shape)
            for side, share in zip(corner, part, strict=True):
                weight = weight * (share if side else 1.0 - share)
            index = tuple(
                np.minimum(place + side, len(axis) - 1)
                for place, side, axis in zip(low, corner, self.axes, strict=True)
            )
            # A corner without weight is no part of the line, face or point that the size lies on.
            found = found + np.where(weight > 0, weight * self.log_s[index], 0.0)
        return np.exp(np.where(inside, found, np.nan))

    def slower(self, factor: float) -> SizeTable:
        """Return the table of kernels that take so many times as long."""
        return replace(self, log_s=self.log_s + np.log(factor))


def size_table(sizes: Array, seconds: Array, rises: Sequence[int] | None = None) -> SizeTable:
    """Return the table of measured kernels, repeats of a size as their median.

    Parameters
    ----------
    sizes : array, shape (rows, sizes of a kernel)
    seconds : array, shape (rows,)
    rises : sequence of int, optional
        Sizes in which the time never falls; all of them unless given.
    """
    distinct, where = np.unique(sizes, axis=0, return_inverse=True)
    where = where.ravel()
    order = np.argsort(where, kind="stable")
    groups = np.split(np.log(seconds)[order], np.flatnonzero(np.diff(where[order])) + 1)
    axes = tuple(np.unique(column) for column in distinct.T)
    grid = np.full(tuple(map(len, axes)), np.nan)
    index = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, distinct.T, strict=True))
    grid[index] = [np.median(group) for group in groups]
    return SizeTable(axes=tuple(np.log(axis) for axis in axes), log_s=rising(grid, rises))


def rising(grid: Array, axes: Sequence[int] | None = None) -> Array:
    """Return a grid that never falls along axes, all unless given: itself where it does not; NaN stays.

    The middle of the largest value below and the smallest above, in these axes.

    Examples
    --------
    >>> rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    below, above = grid, grid
    for axis in range(grid.ndim) if axes is None else axes:
        below = np.fmax.accumulate(below, axis=axis)
        above = np.flip(np.fmin.accumulate(np.flip(above, axis=axis), axis=axis), axis=axis)
    return np.where(np.isnan(grid), np.nan, (below + above) / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """Seconds of causal attention by its heads (batch times heads) and length, for each form of it.

    A form is the dimension of a head and how many heads share keys and values.
    """

    forms: Mapping[tuple[float, float], SizeTable]

    def seconds(self, batch: Any, heads: Any, kv_heads: Any, length: Any, head_dim: Any) -> Array:
        """Return the seconds, NaN where the form was not measured or the size is not covered."""
        batch, heads, kv_heads, length, head_dim = np.broadcast_arrays(
            *(np.asarray(size, dtype=np.float64) for size in (batch, heads, kv_heads, length, head_dim))
        )
        found = np.full(batch.shape, np.nan)
        for (dim, share), table in self.forms.items():
            mine = (head_dim == dim) & (heads == share * kv_heads)
            found[mine] = table.seconds((batch * heads)[mine], length[mine])
        return found


DeviceTables = Mapping[str, Any]
"""Tables of one device in one width, a `SizeTable` or `AttentionTable` for each kind of `COLUMNS` it has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTables:
    """The tables of a file, by device and width of the kernels."""

    path: str
    devices: Mapping[tuple[str, str], DeviceTables] = field(default_factory=dict)

    def of(self, device: Device, precision: str, wide: str) -> dict[str, Any]:
        """Return the tables of a device as fields of `KernelModel`.

        Products and experts in the precision, those beside them and attention in the wide one. Bytes stream
        as fast in any width.
        """
        own, beside = (self.devices.get((device.name, _WIDTHS[name]), {}) for name in (precision, wide))
        return {
            "gemm_table": own.get("product", 0.0),
            "gemm16_table": beside.get("product", 0.0),
            "grouped_table": own.get("experts", 0.0),
            "attn_table": beside.get("attention", 0.0),
            "attn_back_table": beside.get("attention_backward", 0.0),
            "stream_table": beside.get("stream", self._in_any_width(device, "stream")),
        }

    def collectives(self, device: Device) -> dict[str, Any]:
        """Return the tables of a device as fields of `Fabric`: bytes are as fast in any width."""
        return {f"{name}_table": self._in_any_width(device, name) for name in COLLECTIVES}

    def _in_any_width(self, device: Device, kind: str) -> Any:
        """Return the first table of a kind that a device has, 0 where it has none."""
        own = (tables for (name, _), tables in self.devices.items() if name == device.name)
        return next((tables[kind] for tables in own if kind in tables), 0.0)


def tabled_s(formula_s: Any, tables: Any, sizes: tuple[Any, ...], slower: Any = 1.0) -> Array:
    """Return seconds of kernels by tables times `slower`, by the formula where they cover nothing.

    Parameters
    ----------
    formula_s : array
    tables : table, or array of tables and of 0 where there is none
    sizes : tuple of array
        What the tables are asked for.
    slower : array
    """
    shape = np.broadcast_shapes(*(np.shape(x) for x in (formula_s, tables, slower, *sizes)))
    time_s = np.array(np.broadcast_to(formula_s, shape), dtype=np.float64)
    slower, asked = np.broadcast_to(slower, shape), [np.broadcast_to(size, shape) for size in sizes]
    for table, where in _distinct(tables):
        mine = np.broadcast_to(where, shape)
        found = table.seconds(*(size[mine] for size in asked)) * slower[mine]
        time_s[mine] = np.where(np.isfinite(found), found, time_s[mine])
    return time_s


def tabled(tables: Any, sizes: tuple[Any, ...]) -> NDArray[np.bool_]:
    """Return which kernels the tables cover."""
    return np.isfinite(tabled_s(np.nan, tables, sizes))


def _distinct(tables: Any) -> Iterator[tuple[Any, NDArray[np.bool_]]]:
    """Yield every table of an array, and where it is."""
    place = np.asarray(tables, dtype=object)
    for table in {id(one): one for one in place.ravel() if one}.values():
        yield table, np.array([one is table for one in place.ravel()], dtype=bool).reshape(place.shape)


def load_tables(path: str) -> KernelTables:
    """Return a table of kernels, `.csv` or `.csv.gz`.

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
    if not rows:
        raise SpecError("no row", file=path, key="device", rule="Kernels have sizes and a time", fix=_FIX)
    _check_columns(rows[0], ("device", "dtype", "latency_ms"), path)
    found: dict[tuple[str, str], dict[str, list[tuple[float, ...]]]] = {}
    names: dict[str, str] = {}
    for line, row in enumerate(rows, start=2):
        op, width = row.get("op") or "product", _WIDTHS.get(row["dtype"].lower())
        if op not in COLUMNS:
            rule = f"A kernel is {', '.join(COLUMNS)}, or nothing for a product"
            raise SpecError(
                f"row {line}: unknown op {op!r}", file=path, key="op", value=op, rule=rule, fix=_FIX
            )
        _check_columns(row, COLUMNS[op], path)
        if width is None or row.get("flag"):
            continue
        name = row["device"]
        if name not in names:
            names[name] = _device_name(name)
        of_device = found.setdefault((names[name], width), {})
        of_device.setdefault(op, []).append(_numbers_of(row, COLUMNS[op], line, path))
    if not found:
        rule = f"Kernels are in {', '.join(_WIDTHS)}"
        raise SpecError("no kernel that a step has", file=path, key="dtype", rule=rule, fix=_FIX)
    return KernelTables(
        path=path,
        devices={
            key: {op: _table_of(op, np.array(values)) for op, values in kinds.items()}
            for key, kinds in found.items()
        },
    )


def _check_columns(row: Mapping[str, str], names: tuple[str, ...], path: str) -> None:
    for name in names:
        if name not in row:
            rule = "Kernels have sizes and a time"
            raise SpecError(f"no column {name}", file=path, key=name, rule=rule, fix=_FIX)


def _table_of(op: str, columns: Array) -> Any:
    """Return the table of one kind of kernels from its sizes and seconds."""
    sizes, seconds = columns[:, :-1], columns[:, -1]
    if op.startswith("attention"):
        return attention_table(sizes, seconds)
    # More ranks may be faster: they bring links of their own, and a switch may sum.
    return size_table(sizes, seconds, rises=[1] if op in COLLECTIVES else None)


def attention_table(sizes: Array, seconds: Array) -> AttentionTable:
    """Return the table of attention.

    Parameters
    ----------
    sizes : array, shape (rows, 5)
        Batch, heads, heads of keys and values, length, dimension of a head.
    seconds : array, shape (rows,)
    """
    batch, heads, kv_heads, length, dim = sizes.T
    form = np.stack([dim, heads / kv_heads], axis=1)
    forms = {}
    for one in np.unique(form, axis=0):
        mine = (form == one).all(axis=1)
        grid = np.stack([batch * heads, length], axis=1)[mine]
        forms[float(one[0]), float(one[1])] = size_table(grid, seconds[mine])
    return AttentionTable(forms=forms)


def _device_name(text: str) -> str:
    """Return the catalog's name of a device, or the text: clusters may define devices of their own."""
    try:
        return resolve_device(text).name
    except SpecError:
        return text


def _numbers_of(row: Mapping[str, str], names: tuple[str, ...], line: int, path: str) -> tuple[float, ...]:
    """Return the sizes and the seconds of a row."""
    found = []
    for name in (*names, "latency_ms"):
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = float("nan")
        if not 0 < value < 1e18:
            rule = "Sizes and times are numbers above 0"
            what = f"row {line}: {row[name]!r} is not valid"
            raise SpecError(what, file=path, key=name, value=row[name], rule=rule, fix="Correct or remove it")
        found.append(value)
    return (*found[:-1], found[-1] * 1e-3)
