"""A Screen as plain text: what pipes, files and logs get. No colour, no truncation, ASCII rules only."""

from __future__ import annotations

from foreshard.report.screen import Screen, Table


def render(screen: Screen) -> str:
    """Return the screen as text that ends in a newline."""
    parts = ["\n".join(screen.header)] if screen.header else []
    if screen.boxes:
        width = max(len(box.title) for box in screen.boxes)
        parts.append(
            "\n".join(
                f"{box.title:<{width}}  {box.value}" + (f"  ({box.note})" if box.note else "")
                for box in screen.boxes
            )
        )
    parts += [_render_table(table) for table in screen.tables]
    parts += ["\n".join(lines) for lines in (screen.notes, screen.footer) if lines]
    return "\n\n".join(parts) + "\n"


def _render_table(table: Table) -> str:
    names = [column.removeprefix(">") for column in table.columns]
    right = [column.startswith(">") for column in table.columns]
    rows = [*table.rows, *([table.total] if table.total else [])]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]

    def line(cells: tuple[str, ...] | list[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    lines = [table.title] if table.title else []
    if any(names):
        lines.append(line(names))
    lines += [line(row) for row in table.rows]
    if table.total:
        lines += ["-" * (sum(widths) + 2 * (len(widths) - 1)), line(table.total)]
    return "\n".join(lines)
