"""Line charts of a report as SVG text: no script, no library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 280, 64, 170, 14, 44
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points under a name; `dashed` marks what is no measurement but a bound or a formula."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True


def chart(
    lines: Sequence[Line], *, x: str, y: str, percent: bool = False, log_x: bool = False
) -> str:
    """Return a chart of lines over one axis; points that are not finite are left out."""
    lines = [_finite(line, log_x) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return "<p>Nothing to draw.</p>"
    xs = [math.log10(a) if log_x else a for line in lines for a, _ in line.points]
    ys = [b for line in lines for _, b in line.points]
    x0, x1 = min(xs), max(xs)
    y0, y1 = min(0.0, *ys), max(ys) if max(ys) > min(0.0, *ys) else min(0.0, *ys) + 1.0
    y1 += 0.05 * (y1 - y0)
    span = x1 - x0 or 1.0

    def place(a: float, b: float) -> tuple[float, float]:
        across = ((math.log10(a) if log_x else a) - x0) / span
        up = (b - y0) / (y1 - y0)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)
        )  # fmt: skip

    out = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(y)} by {html.escape(x)}">']
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        _, down = place(lines[0].points[0][0], value)
        label = f"{100 * value:.0f} %" if percent else f"{value:.3g}"
        out.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}" stroke="currentColor" '
            f'stroke-opacity="0.15"/><text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end" font-size="11" '
            f'fill="currentColor">{label}</text>'
        )
    out += _x_labels(lines, place)
    for k, line in enumerate(lines):
        out.append(_drawn(line, k, place))
    out.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle" font-size="12" '
        f'fill="currentColor">{html.escape(x)}</text></svg>'
    )
    return "".join(out)


def _finite(line: Line, log_x: bool) -> Line:
    kept = [(a, b) for a, b in line.points if math.isfinite(a) and math.isfinite(b) and (a > 0 or not log_x)]
    return Line(name=line.name, points=kept, dashed=line.dashed, dots=line.dots)


def _x_labels(lines: Sequence[Line], place) -> list[str]:  # type: ignore[no-untyped-def]
    values = sorted({a for line in lines for a, _ in line.points})
    if len(values) > 12:
        values = [values[round(i * (len(values) - 1) / 6)] for i in range(7)]
    return [
        f'<text x="{place(value, 0.0)[0]:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle" font-size="11" '
        f'fill="currentColor">{value:g}</text>'
        for value in values
    ]


def _drawn(line: Line, k: int, place) -> str:  # type: ignore[no-untyped-def]
    colour = _COLOURS[k % len(_COLOURS)]
    spots = [place(a, b) for a, b in line.points]
    track = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    out = f'<polyline points="{track}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
    if line.dots:
        out += "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in spots)
    high = _TOP + 14 + 18 * k
    left = _WIDTH - _RIGHT + 12
    return out + (
        f'<line x1="{left}" x2="{left + 18}" y1="{high - 4}" y2="{high - 4}" stroke="{colour}" stroke-width="2"'
        f'{dash}/><text x="{left + 24}" y="{high}" font-size="11" fill="currentColor">{html.escape(line.name)}</text>'
    )
