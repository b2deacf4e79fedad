"""What a command shows, before anyone decides how: lines, boxes, tables, notes.

`report.plain` writes a Screen as text for pipes, `report.terminal` draws it with colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A headline number with its name and what qualifies it; `alarm` marks a broken limit."""

    title: str
    value: str
    note: str = ""
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under column names; columns starting with `>` are numbers, set right.

    `bars` gives each row a length in [0, 1] that a terminal may draw; text ignores it. `spare` names the
    columns, the least needed first, that a terminal too narrow for all of them leaves out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] | None = None
    bars: tuple[float, ...] | None = None
    spare: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """One answer: headline, boxes, tables and notes in reading order, and a footer."""

    header: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    footer: tuple[str, ...] = ()


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, spare: Sequence[str] = ()
) -> Table:
    """Return a Table of anything that prints; None becomes a dash."""
    cells = tuple(tuple("-" if cell is None else str(cell) for cell in row) for row in rows)
    return Table(title=title, columns=tuple(columns), rows=cells, spare=tuple(spare))


def listing(
    title: str,
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], object]],
    *,
    spare: Sequence[str] = (),
) -> Table:
    """Return a Table of a row per item; every column has the function that gives its cell."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return table(title, tuple(columns), rows, spare=spare)


def spans(numbers: Sequence[int]) -> str:
    """Return whole numbers as ranges: 0-3, 8, 10-11."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in out)


def without_empty(made: Table) -> Table:
    """Return a table without the columns that say nothing in any row."""
    kept = [i for i in range(len(made.columns)) if any(row[i] not in ("", "-") for row in made.rows)]
    return only_columns(made, kept)


def only_columns(made: Table, kept: Sequence[int]) -> Table:
    """Return a table of these columns of another."""
    columns = tuple(made.columns[i] for i in kept)
    return replace(
        made,
        columns=columns,
        rows=tuple(tuple(row[i] for i in kept) for row in made.rows),
        total=None if made.total is None else tuple(made.total[i] for i in kept),
        spare=tuple(name for name in made.spare if name in columns),
    )
