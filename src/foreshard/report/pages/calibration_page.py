"""The one-file HTML report of a calibration: its tables, and the curve of error against measured steps."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from foreshard.report.measured_screen import calibration_screen
from foreshard.report.pages.line_chart import Line, chart
from foreshard.report.pages.markup import document, html_table, section, unscripted_style


def calibration_page(made: Mapping[str, Any], path: str | None) -> str:
    """Return the report as one HTML text; it loads nothing and has no script."""
    screen = calibration_screen(made, path)
    title = "Constants calibrated on measured steps"
    sections = [
        f"<h1>{title}</h1>" + "".join(f"<p>{html.escape(line)}</p>" for line in screen.header),
        *(section(shown.title, "", html_table(shown)) for shown in screen.tables),
        section("Error against measured steps, drawn", "", shot_chart(made["curve"])),
        "".join(f"<p>{html.escape(note)}</p>" for note in screen.notes),
    ]
    body = "<main>\n{}\n</main>".format("\n".join(sections))
    return document(f"{title} · foreshard calibrate", body, dict(made), style=unscripted_style())


def shot_chart(curve: list[Mapping[str, Any]]) -> str:
    """Return the curve as SVG: the median over orders, and the range of eight of ten."""
    lines = [
        Line(name=name, points=[(shot["steps"], shot[key]) for shot in curve], dashed=key != "median_ape")
        for name, key in (("median", "median_ape"), ("worse orders", "high"), ("better orders", "low"))
    ]
    return chart(lines, x="measured steps", y="median error of steps not measured", percent=True)
