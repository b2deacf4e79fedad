"""What the HTML reports share: the frame of a page with its data, tables and sections."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from foreshard.report.screen import Table

# Characters from which a cell gets a column wide enough for sentences.
_SENTENCE_CHARS = 28


def static(name: str) -> str:
    """Return the text of a file beside the pages: a template, style or script."""
    return files("foreshard.report.pages").joinpath("static", name).read_text(encoding="utf-8")


def unscripted_style() -> str:
    """Return the style of all reports; without a script the theme is the system's."""
    style = static("report.css")
    _, _, rest = style.partition(':root[data-theme="dark"] {')
    dark, _, _ = rest.partition("}")
    return f"{style}\n@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}\n{static('simulation.css')}"


def document(title: str, body: str, data: Any, *, style: str, script: str = "") -> str:
    """Return a report as one HTML text that loads nothing, with its data as JSON inside.

    Without a script the page is not allowed to run any.
    """
    parts = {
        "title": html.escape(title),
        "body": body,
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # cannot end its element
        "style": style,
        "script": f"\n<script>\n{script}</script>" if script else "",
        "scripts": "; script-src 'unsafe-inline'; img-src data:" if script else "",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], static("page.html"))


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of words, each beside the colour of its name."""
    items = "".join(
        f'<li><span class="swatch" style="background-color:var(--{colour})"></span>{html.escape(words)}</li>'
        for colour, words in entries
    )
    return f'<ul class="legend">{items}</ul>'


def section(title: str, lead: str, *body: str) -> str:
    """Return a section under its heading, with a sentence that introduces it (or none)."""
    name = html.escape(title)
    intro = f'<p class="lead">{html.escape(lead)}</p>' if lead else ""
    return f'<section aria-label="{name}"><h2>{name}</h2>{intro}{"".join(body)}</section>'


def html_table(table: Table, *, marked: bool = False) -> str:
    """Return a Table as HTML without its title; `marked` sets the first row apart."""
    longest = [max((len(row[i]) for row in table.rows), default=0) for i in range(len(table.columns))]
    kinds = [
        ' class="n"' if column.startswith(">") else ' class="words"' if chars >= _SENTENCE_CHARS else ""
        for column, chars in zip(table.columns, longest, strict=True)
    ]
    heads = "".join(
        f'<th scope="col"{kind}>{html.escape(column.removeprefix(">"))}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "".join(
        f"<tr{' class=chosen' if marked and i == 0 else ''}>"
        + "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for i, row in enumerate(table.rows)
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
