"""Reading a table of published measurements: what kind it is, its rows, their ids and families.

A table is known by its columns, never by its file name; `.csv` and `.csv.gz` are the same.
"""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError

TRAINING, COLLECTIVE, KERNEL, CLASSIC, MIXED = "training", "collective", "kernel", "classic", "mixed"
MAX_CELL_CHARS = 1_000_000  # csv stops at 131,072, which a cell of notes may pass
_MAX_LINE_CHARS = 16 * MAX_CELL_CHARS
_FAMILY_COLUMNS = ("system", "device", "gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """One file of measurements; `rows` hold text cells by column, blank = not stated."""

    path: str
    kind: str
    layout: str
    rows: tuple[Mapping[str, str], ...]
    ids: tuple[str, ...]
    families: tuple[str, ...]

    @property
    def stem(self) -> str:
        """File name without directory and without `.csv` or `.csv.gz`."""
        return _stem(self.path)


def measured_folder() -> Path:
    """Return the folder of the published measurements: FORESHARD_MEASURED or ../shared/measured/dev."""
    return Path(os.environ.get("FORESHARD_MEASURED", "../shared/measured/dev"))


def _stem(path: str) -> str:
    return Path(path).name.removesuffix(".gz").removesuffix(".csv")


def _records(path: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a CSV file, gzipped or not."""
    opener = gzip.open if str(path).endswith(".gz") else open
    csv.field_size_limit(MAX_CELL_CHARS)
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:
            lines = [line for line in csv.reader(_lines(stream), strict=True) if line]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        what = f"cannot read the table: {why}"
        rule = "A table is a .csv or .csv.gz file, here or in the folder that FORESHARD_MEASURED names"
        raise SpecError(what, file=str(path), rule=rule, fix="Give a readable one") from None
    if len(lines) < 2:
        rule, fix = "A table has a header and at least one row", "Write one row for each measurement"
        raise SpecError("the table is empty", file=str(path), rule=rule, fix=fix)
    return lines[0], lines[1:]


def _lines(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a file, which may have no end (/dev/full)."""
    while line := stream.readline(_MAX_LINE_CHARS):
        if len(line) == _MAX_LINE_CHARS:
            raise csv.Error(f"a line of {_MAX_LINE_CHARS:,} characters or more")
        yield line


def table_rules() -> Mapping[str, Any]:
    """Return ``data/tables.toml``: which tables are known, and how their rows are read."""
    rules: Mapping[str, Any] = shipped("tables.toml", "foreshard.validation")
    return rules


def layout_of(columns: Iterable[str], *, file: str | None = None) -> tuple[str, str]:
    """Return (kind, layout) of a table with these columns."""
    have = set(columns)
    known = table_rules()
    for table in known["tables"]:
        if have.issuperset(table["columns"]):
            return table["kind"], table["layout"]
    for table in known["not_measurements"]:
        if have.issuperset(table["columns"]):
            rule = "Validation needs measured steps, kernels or collectives"
            raise SpecError(f"the table holds {table['holds']}, not measured times", file=file, rule=rule)
    shown = ", ".join(sorted(have)[:8])
    what = f"no known table has the columns {shown[:120]}"
    rule = "A table is known by its columns: one of steps of one's own has model, cluster and step_time_s"
    raise SpecError(what, file=file, rule=rule, fix="See 'foreshard schema measured'")


def _distinct(ids: list[str]) -> tuple[str, ...]:
    """Return the ids, those seen before with the number of their repeat behind a '#'."""
    seen: dict[str, int] = {}
    out = []
    for row_id in ids:
        seen[row_id] = seen.get(row_id, 0) + 1
        out.append(row_id if seen[row_id] == 1 else f"{row_id}#{seen[row_id]}")
    return tuple(out)


def _identity(
    columns: list[str], rows: list[dict[str, str]], stem: str, layout: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return ids and families: of the id column, else stem and row number, and the system or device.

    Networks are of a source and what its rows differ by most: devices, or a benchmark.
    """
    if "id" in columns:
        ids = _distinct([row["id"] or f"{stem}-{i}" for i, row in enumerate(rows, start=1)])
        return ids, tuple(row_id.rpartition("-")[0] or row_id for row_id in ids)
    ids = tuple(f"{stem}-{i}" for i in range(1, len(rows) + 1))
    if layout in (known := table_rules()["families"]):
        source, column = known[layout]
        return ids, tuple(f"{source} {row.get(column, '')}".strip() for row in rows)
    column = next((name for name in _FAMILY_COLUMNS if name in columns), None)
    return ids, tuple((row[column] if column else "") or stem for row in rows)


def read_table(path: str | Path) -> MeasuredTable:
    """Return the table stored in a `.csv` or `.csv.gz` file.

    Raises
    ------
    SpecError
        Naming the file: unreadable, empty, ragged, unknown columns, or not a table of measurements.
    """
    header, lines = _records(str(path))
    if len(set(header)) != len(header):
        raise SpecError("a column is named twice", file=str(path), rule="Column names are distinct")
    kind, layout = layout_of(header, file=str(path))
    for number, line in enumerate(lines, start=1):
        if len(line) != len(header):
            what = f"row {number} has {len(line)} cells, the header {len(header)}"
            rule = "Every row has one cell per column"
            fix = "Check for a truncated file"
            raise SpecError(what, file=str(path), key=f"row {number}", rule=rule, fix=fix)
    rows = [dict(zip(header, (cell.strip() for cell in line), strict=True)) for line in lines]
    ids, families = _identity(header, rows, _stem(str(path)), layout)
    return MeasuredTable(
        path=str(path), kind=kind, layout=layout, rows=tuple(rows), ids=ids, families=families
    )
