"""A Screen on a terminal, drawn with rich: boxes, bars, colour unless NO_COLOR, as wide as the window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreshard.report.screen import Box, Screen, Table, only_columns

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24  # cells
_NARROW = 88  # columns below which boxes stack and bars are left out
_LONGEST_NAME = 30  # longer cells with spaces are sentences, which may wrap
_GAP = 3  # between columns: a space of padding on both sides of the rule


def show(screen: Screen, console: Console | None = None) -> None:
    """Print the screen to a terminal (standard output unless a console is given)."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = console or Console(highlight=False)
    for i, line in enumerate(screen.header):
        console.print(Text(line, style="bold" if i == 0 else "dim"))
    if screen.boxes:
        console.print(_boxes(screen.boxes, console.width))
    for table in screen.tables:
        console.print(Padding(_table(table, console.width), (1, 0, 0, 0)))
    if screen.notes:
        console.print()
    for line in screen.notes:
        console.print(Text(line))
    if screen.footer:
        console.print()
    for line in screen.footer:
        console.print(Text(line, style="dim"))


def _boxes(boxes: tuple[Box, ...], width: int) -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table as Grid
    from rich.text import Text

    panels = [
        Panel(
            Text.assemble((box.value, "bold red" if box.alarm else "bold"), "\n", (box.note, "dim")),
            title=box.title,
            title_align="left",
            border_style="red" if box.alarm else "cyan",
        )
        for box in boxes
    ]
    if width < _NARROW:
        return Group(*panels)
    grid = Grid.grid(expand=True, padding=(0, 1, 0, 0))
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _table(table: Table, width: int) -> Any:
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    table, left_out = fitted(table, width)
    drawn = Drawn(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(table.columns),
        show_footer=table.total is not None,
        pad_edge=False,
        show_edge=False,
        header_style="dim",
        footer_style="bold",
    )
    for i, name in enumerate(table.columns):
        drawn.add_column(
            name.removeprefix(">"),
            footer=table.total[i] if table.total else "",
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=not is_prose(table, i),
        )
    if left_out:
        drawn.caption = Text(f"too narrow for {', '.join(left_out)}; widen, pipe or use --json", style="dim")
        drawn.caption_justify = "left"
    with_bars = table.bars is not None and width >= _NARROW
    if with_bars:
        drawn.add_column("", no_wrap=True)
    for i, row in enumerate(table.rows):
        cells: list[Any] = [Text(cell) for cell in row]
        if with_bars and table.bars is not None:
            cells.append(Text(bar(table.bars[i]), style="cyan"))
        drawn.add_row(*cells)
    return drawn


def is_prose(table: Table, column: int) -> bool:
    """Return whether a column holds sentences, which may wrap; names and numbers may not."""
    cells = [row[column] for row in table.rows]
    return any(len(cell) > _LONGEST_NAME and " " in cell for cell in cells)


def fitted(table: Table, width: int) -> tuple[Table, tuple[str, ...]]:
    """Return the table without the spare columns that the width has no room for, and their names."""
    left_out: list[str] = []
    for name in table.spare:
        if _least_width(table) <= width:
            break
        left_out.append(name.removeprefix(">"))
        table = only_columns(table, [i for i, column in enumerate(table.columns) if column != name])
    return table, tuple(left_out)


def _least_width(table: Table) -> int:
    """Return the cells a table takes when only its sentences wrap."""
    width = 0
    for i, name in enumerate(table.columns):
        longest = max((len(row[i]) for row in table.rows), default=0)
        shown = min(longest, _LONGEST_NAME) if is_prose(table, i) else longest
        width += max(shown, len(name.removeprefix(">"))) + _GAP
    return width - _GAP


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
    """Return a bar of eighth blocks, `width` cells long at 1."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
