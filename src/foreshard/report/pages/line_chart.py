"""Line charts of a report as SVG text: no script, no library."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 800, 280, 64, 210, 14, 44
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#be185d", "#65a30d", "#0891b2")
_LABEL_WIDTH = 30  # of a short number on the axis

Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points under a name; `dashed` marks what is no measurement but a bound or a formula."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True


def chart(lines: Sequence[Line], *, x: str, y: str, percent: bool = False, log_x: bool = False) -> str:
    """Return a chart of lines over one axis; points that are not finite are left out."""
    lines = [_finite(line, log_x) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return "<p>Nothing to draw.</p>"
    xs = [math.log10(a) if log_x else a for line in lines for a, _ in line.points]
    ys = [b for line in lines for _, b in line.points]
    x0, x1 = min(xs), max(xs)
    marks = marks_of(min(0.0, *ys), max(ys))
    y0, y1 = marks[0], marks[-1]
    span = x1 - x0 or 1.0

    def place(a: float, b: float) -> tuple[float, float]:
        across = ((math.log10(a) if log_x else a) - x0) / span
        up = (b - y0) / (y1 - y0)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    out = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(y)} by {html.escape(x)}">'
    ]
    for value in marks:
        down = place(lines[0].points[0][0], value)[1]
        out.append(_stroke(_LEFT, _WIDTH - _RIGHT, down, "currentColor", ' stroke-opacity="0.15"'))
        label = f"{number_words(100 * value)} %" if percent else number_words(value)
        out.append(_text(_LEFT - 6, down + 4, label, "end"))
    out += _x_labels(lines, place)
    for k, line in enumerate(lines):
        out.append(_drawn(line, k, place))
    out.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x, "middle"))
    return "".join(out) + "</svg>"


def marks_of(low: float, high: float) -> list[float]:
    """Return four to seven round numbers at equal steps, from `low` or below to `high` or above."""
    span = high - low or 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * times for times in (1.0, 2.0, 2.5, 5.0, 10.0) if span / (size * times) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number_words(value: float) -> str:
    """Return a number as an axis shows it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(across: float, down: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}" font-size="11" '
        f'fill="currentColor">{html.escape(text)}</text>'
    )


def _stroke(left: float, right: float, down: float, colour: str, more: str) -> str:
    return f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{down:.1f}" y2="{down:.1f}" stroke="{colour}"{more}/>'


def _finite(line: Line, log_x: bool) -> Line:
    kept = [(a, b) for a, b in line.points if math.isfinite(a) and math.isfinite(b) and (a > 0 or not log_x)]
    return Line(name=line.name, points=kept, dashed=line.dashed, dots=line.dots)


def _x_labels(lines: Sequence[Line], place: Place) -> list[str]:
    values = sorted({a for line in lines for a, _ in line.points})
    if len(values) > 12:
        values = [values[round(i * (len(values) - 1) / 6)] for i in range(7)]
    labels, free = [], -math.inf
    for value in values:
        across = place(value, 0.0)[0]
        if across >= free:  # a label that would lie on the one before is left out
            labels.append(_text(across, _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
            free = across + _LABEL_WIDTH
    return labels


def _drawn(line: Line, k: int, place: Place) -> str:
    """Return a line with its entry in the legend."""
    colour = _COLOURS[k % len(_COLOURS)]
    spots = [place(a, b) for a, b in line.points]
    track = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
    dash = ' stroke-width="1.8"' + (' stroke-dasharray="5 4"' if line.dashed else "")
    out = f'<polyline points="{track}" fill="none" stroke="{colour}"{dash}/>'
    if line.dots:
        out += "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in spots)
    left, down = _WIDTH - _RIGHT + 12, _TOP + 14 + 18 * k
    return out + _stroke(left, left + 18, down - 4, colour, dash) + _text(left + 24, down, line.name, "start")
