"""Small pictures of the benchmarks as SVG, readable on a light and on a dark page."""

from __future__ import annotations

import html
from collections.abc import Sequence

Value = tuple[float, float | None] | None
"""A part, and half the width of its interval if it has one; None where there is nothing to compare."""
CELL_W, CELL_H, LEFT, TOP, GAP = 62, 30, 46, 78, 22
FULL = 0.4
"""Part at which a colour is full."""
GAIN, LOSS, NOTHING = (26, 140, 80), (205, 70, 60), "#9aa0a6"
STYLE = (
    "text{font-family:system-ui,'Segoe UI','Liberation Sans',Arial,sans-serif;font-size:11px;fill:#1f2328}"
    ".title{font-weight:600}.soft{fill:#59636e}"
)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def colour(part: float) -> str:
    """Return green for what is gained and red for what is lost, white for nothing."""
    depth = min(abs(part) / FULL, 1.0)
    goal = GAIN if part > 0 else LOSS
    return "#" + "".join(f"{round(255 + depth * 0.75 * (one - 255)):02x}" for one in goal)


def document(width: float, height: float, parts: Sequence[str]) -> str:
    """Return the whole picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>\n"])


def heat_map(
    grids: Sequence[tuple[str, str, Sequence[Sequence[Value]]]],
    *,
    columns: int,
    across: tuple[str, Sequence[str]],
    down: tuple[str, Sequence[str]],
) -> str:
    """Return grids of gains in per cent, side by side.

    Parameters
    ----------
    grids : sequence of (title, second title, rows of values)
    columns : int
        Grids in a row.
    across, down : (axis, labels)
    """
    wide = LEFT + len(across[1]) * CELL_W + GAP
    high = TOP + len(down[1]) * CELL_H + GAP
    out = []
    for place, (title, second, rows) in enumerate(grids):
        x, y = place % columns * wide, place // columns * high
        out += [text(x + LEFT, y + 18, second, "title"), text(x + LEFT, y + 34, title, "soft")]
        out.append(text(x + LEFT, y + 52, across[0], "soft"))
        for i, label in enumerate(across[1]):
            out.append(text(x + LEFT + (i + 0.5) * CELL_W, y + TOP - 8, label, "soft", "middle"))
        for j, (label, row) in enumerate(zip(down[1], rows, strict=True)):
            middle = y + TOP + (j + 0.5) * CELL_H + 4
            out.append(text(x + LEFT - 8, middle, f"h {label}", "soft", "end"))
            for i, value in enumerate(row):
                left = x + LEFT + i * CELL_W
                fill = "#eceff1" if value is None else colour(value[0])
                out.append(
                    f'<rect x="{left}" y="{y + TOP + j * CELL_H}" width="{CELL_W - 2}" height="{CELL_H - 2}" '
                    f'rx="3" fill="{fill}"/>'
                )
                words = "-" if value is None else f"{100 * value[0]:+.0f} %"
                out.append(text(left + CELL_W / 2 - 1, middle, words, "", "middle"))
    width, height = columns * wide, -(-len(grids) // columns) * high + 24
    legend = (
        f"h: {down[0]}. Per cent by which a step is shorter than the rival's; "
        "- : one of the two is above the budget on some path, or the rival cannot run."
    )
    out.append(text(LEFT, height - 8, legend, "soft"))
    return document(width, height, out)


def gain_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, Value]]]], legend: str, *, scale: float = 900.0
) -> str:
    """Return a bar, with its 95 % interval where there is one, for every regime and rival.

    Parameters
    ----------
    rows : sequence of (regime, gains by rival)
    legend : str
    scale : float
        Width of a bar for the whole.
    """
    names, high = 300, 20  # bars of losses begin right of the names
    parts = [value[0] for _, gains in rows for _, value in gains if value is not None]
    left = names + scale * max([0.0, *(-part for part in parts)])
    ends = [value[0] + (value[1] or 0.0) for _, gains in rows for _, value in gains if value is not None]
    width = max(800.0, left + scale * max([0.0, *ends]) + 130)
    out, y = [], 24.0
    for regime, gains in rows:
        out.append(text(8, y + high * len(gains) / 2, regime, "title"))
        for rival, value in gains:
            out.append(text(names - 10, y + 12, rival, "soft", "end"))
            if value is None:
                out.append(text(left + 4, y + 12, "does not fit, or a budget is broken", "soft"))
            else:
                part, half = value[0], value[1] or 0.0
                start = left + min(part, 0.0) * scale
                out.append(
                    f'<rect x="{start:.1f}" y="{y}" width="{abs(part) * scale:.1f}" height="{high - 5}" '
                    f'rx="2" fill="{colour(part)}"/>'
                )
                reach, middle = [left + (part + sign * half) * scale for sign in (-1, 1)], y + (high - 5) / 2
                words = f"{100 * part:+.1f} ± {100 * half:.1f} %" if value[1] else f"{100 * part:+.1f} %"
                if value[1]:
                    out.append(
                        f'<path d="M{reach[0]:.1f} {middle}H{reach[1]:.1f}" stroke="#1f2328" '
                        'stroke-width="1.5"/>'
                    )
                out.append(text(max(*reach, left) + 6, y + 12, words))
            y += high
        y += 14
    out.append(f'<path d="M{left:.1f} 16V{y - 10}" stroke="#59636e"/>')
    out.append(text(8, y + 8, legend, "soft"))
    return document(width, y + 20, out)
