"""Measured steps as a CSV: each row a `foreshard predict` command and its seconds."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.codec import check_amount, read_text

_SECONDS = "step_time_s"
_NEEDED = ("model", "cluster", _SECONDS)
_COUNTS = ("tp", "dp", "pp", "cp", "ep", "zero", "micro_batch", "global_batch", "seq")
_WORDS = ("dtype", "optimizer", "schedule", "recompute", "framework", "plan")
COLUMNS = (*_NEEDED, *_COUNTS, *_WORDS)
"""Columns that a table may have; an empty field is an option that is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One measured step."""

    place: str  # file and line
    # model and cluster: as on the command line
    model: str
    cluster: str
    options: dict[str, Any]  # degrees and options that are given; `plan` is the path of a file
    step_time_s: float


_MOST_CHARS = 65_536
"""Of a header: a file may have no end."""


def is_step_table(path: str) -> bool:
    """Return whether a table has the columns that every step table has.

    What cannot be read, and compressed tables, are no step tables: who reads other tables says why.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            header = next(csv.reader([file.readline(_MOST_CHARS)]), [])
    except (OSError, ValueError, csv.Error):
        return False
    return set(_NEEDED) <= set(header)


def read_step_table(path: str) -> list[StepRow]:
    """Return the steps of a table.

    Raises
    ------
    SpecError
        For a column that is not known, a row of another length, or a field that is no number, by line.
    """
    rows = csv.DictReader(io.StringIO(read_text(path)), strict=True)
    odd = [name for name in rows.fieldnames or () if name not in COLUMNS]
    if odd:
        rule = f"Columns are {', '.join(COLUMNS)}"
        raise SpecError("a column that is not known", file=path, key=odd[0], value=odd[0], rule=rule)
    try:
        return [_row(row, path, rows.line_num) for row in rows]
    except csv.Error as error:
        rule = "A table is CSV"
        raise SpecError(str(error), file=path, key=f"line {rows.line_num}", rule=rule) from None


def _row(row: dict[str | Any, Any], path: str, line: int) -> StepRow:
    place = f"{path}:{line}"
    if None in row or None in row.values():
        rule = "A row has a field for each column"
        raise SpecError("a row of another length", file=path, key=f"line {line}", rule=rule)
    given = {name: text.strip() for name, text in row.items() if text.strip()}
    for name in ("model", "cluster"):
        if name not in given:
            rule = "A row names what was trained, and where"
            fix = f"Fill the column {name}"
            raise SpecError(f"no {name}", file=path, key=f"line {line}", rule=rule, fix=fix)
    options: dict[str, Any] = {name: given[name] for name in _WORDS if name in given}
    options |= {name: _number(given[name], int, name, place) for name in _COUNTS if name in given}
    seconds = _number(given.get(_SECONDS, ""), float, _SECONDS, place)
    check_amount(f"{place}: {_SECONDS}", seconds, optional=False)
    return StepRow(
        place=place,
        model=given["model"],
        cluster=given["cluster"],
        options=options,
        step_time_s=seconds,
    )


def _number(text: str, kind: type, name: str, place: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = f"{text!r} is no {'whole number' if kind is int else 'number'}"
        rule = "Degrees and batches are whole numbers, steps are in seconds"
        fix = "Write 8 for eight, or 0.25 for a quarter of a second"
        raise SpecError(what, file=place, key=name, value=text, rule=rule, fix=fix) from None
