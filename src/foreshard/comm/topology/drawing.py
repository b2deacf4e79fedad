"""A topology as an SVG: devices below, what joins them above, wider lines for more bandwidth."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreshard import quantity
from foreshard.comm.topology.graph import Kind, Topology, Vertex
from foreshard.comm.topology.tiers import summarised, tiers

_MAX_DEVICES = 64  # more are drawn as one box for each machine
_STEP, _ROW, _MARGIN = 34.0, 74.0, 24.0
_CHARACTER, _MAX_LABEL = 4.6, 24
_LEGEND_ROW, _MAX_LEGEND = 14.0, 8
_FILL: Mapping[Kind, str] = {"device": "#2563eb", "switch": "#d97706", "nic": "#059669", "cpu": "#7c3aed"}
_STYLE = (
    "text{font:8px sans-serif;text-anchor:middle}.k{text-anchor:start}.t{font-size:11px;text-anchor:start}"
    "path{fill:none;stroke:#64748b;stroke-opacity:.55}"
)

_Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Line:
    """Links between two vertices: one for both directions if these are equal, else dashed."""

    one: int
    other: int
    bytes_per_s: float
    dashed: bool


def drawing(topology: Topology) -> str:
    """Return a topology as an SVG of at most some 200 kB.

    Every machine is a group of devices with its switches, CPUs and NICs in rows above, and the switches of
    the fabric are above all, by distance. Devices without any switch are on a circle. Of more than 64
    devices, machines are drawn as boxes. A dashed line has another bandwidth, or nothing, in the other
    direction.
    """
    title = topology.name or "topology"
    counts = f"{title}: {topology.num_ranks:,} devices, {len(topology.links):,} links"
    if topology.num_ranks > _MAX_DEVICES:
        topology = summarised(topology)
    places, width, height = _places(topology)
    lines = _lines(topology)
    legend = _legend(lines, height)
    whole = height + _LEGEND_ROW * (1 + len(legend)) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {whole:.0f}" role="img" '
        f'aria-label="{html.escape(counts)}"><style>{_STYLE}</style>',
        f'<text class="t" x="8" y="14">{html.escape(counts)}</text>',
        *_drawn_lines(lines, places, topology),
        *(_drawn_vertex(vertex, place) for vertex, place in zip(topology.vertices, places, strict=True)),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts)


def _places(topology: Topology) -> tuple[list[_Point], float, float]:
    """Return where each vertex is, and the width and height they take."""
    if all(vertex.kind == "device" for vertex in topology.vertices) and topology.links:
        return _circle(len(topology.vertices))
    levels = tiers(topology)
    rows = {level: i for i, level in enumerate(sorted(set(levels), reverse=True))}
    starts, width = _starts(topology)
    inside: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (level, vertex) in enumerate(zip(levels, topology.vertices, strict=True)):
        inside[level, vertex.node].append(i)
    places: list[_Point] = [(0.0, 0.0)] * len(levels)
    for (level, node), some in inside.items():
        left, span = starts[node]
        for i, index in enumerate(some):
            places[index] = (left + span * (i + 0.5) / len(some), _MARGIN + _ROW * (rows[level] + 0.5))
    return places, width, _MARGIN + _ROW * len(rows)


def _starts(topology: Topology) -> tuple[dict[int, _Point], float]:
    """Return the left end and the width of each machine; those of no machine share the whole width."""
    crowd: dict[int, dict[Kind, int]] = defaultdict(lambda: defaultdict(int))
    for vertex in topology.vertices:
        crowd[vertex.node][vertex.kind] += 1
    starts, left = {}, _MARGIN
    for node in sorted(node for node in crowd if node >= 0):
        span = _STEP * max(crowd[node].values())
        starts[node] = (left, span)
        left += span + _STEP / 2
    longest = max((len(_label(vertex)) for vertex in topology.vertices if vertex.node < 0), default=0)
    row = max(_STEP, _CHARACTER * longest + 6) * max(crowd[-1].values(), default=0)
    width = max(left, _MARGIN + row, 240.0)
    starts[-1] = (_MARGIN, width - _MARGIN)
    return starts, width + _MARGIN


def _circle(size: int) -> tuple[list[_Point], float, float]:
    radius = max(80.0, size * _STEP / (2 * math.pi))
    center = _MARGIN * 2 + radius
    turns = [2 * math.pi * i / size - math.pi / 2 for i in range(size)]
    places = [(center + radius * math.cos(turn), center + radius * math.sin(turn)) for turn in turns]
    return places, 2 * center, 2 * center


def _lines(topology: Topology) -> list[_Line]:
    """Return one line for the links between two vertices."""
    rates: dict[tuple[int, int], float] = defaultdict(float)
    for link in topology.links:
        rates[link.source, link.target] += link.bytes_per_s
    found = []
    for (one, other), rate in sorted(rates.items()):
        back = rates.get((other, one))
        if back is None or one < other:
            found.append(_Line(one, other, max(rate, back or 0.0), back != rate))
    return found


def _width(rate: float, least: float) -> float:
    """Return the width of a line: one more for each fourfold bandwidth."""
    return min(0.6 + 0.5 * math.log2(max(1.0, rate / least)), 5.0)


def _drawn_lines(lines: Sequence[_Line], places: Sequence[_Point], topology: Topology) -> list[str]:
    """Return one path for all lines of a bandwidth, with the bandwidth as its title."""
    least = min((line.bytes_per_s for line in lines), default=1.0)
    classes: dict[tuple[float, bool], list[str]] = defaultdict(list)
    for line in lines:
        (x, y), (u, v) = places[line.one], places[line.other]
        step = f"M{x:.0f} {y:.0f}"
        # Vertices of one row are joined by a bow below it.
        bow = topology.vertices[line.one].kind == topology.vertices[line.other].kind and y == v
        step += (
            f"Q{(x + u) / 2:.0f} {y + 12 + abs(u - x) / 8:.0f} {u:.0f} {v:.0f}"
            if bow
            else f"L{u:.0f} {v:.0f}"
        )
        classes[line.bytes_per_s, line.dashed].append(step)
    dash = ' stroke-dasharray="4 3"'
    return [
        f'<path stroke-width="{_width(rate, least):.1f}"{dash if dashed else ""} '
        f'd="{"".join(steps)}"><title>{quantity.rate(rate)}</title></path>'
        for (rate, dashed), steps in sorted(classes.items())
    ]


def _drawn_vertex(vertex: Vertex, place: _Point) -> str:
    """Return a square with the last part of the name below it."""
    x, y = place
    fill = f'fill="{_FILL[vertex.kind]}"'
    mark = f'<rect x="{x - 8:.0f}" y="{y - 5:.0f}" width="16" height="10" rx="2" {fill}/>'
    if vertex.kind == "device":
        mark = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="6" {fill}/>'
    name, label = html.escape(vertex.name[:200]), html.escape(_label(vertex))
    text = f'<text x="{x:.0f}" y="{y + 15:.0f}">{label}</text>'
    return f"<g>{mark}{text}<title>{name}</title></g>"


def _label(vertex: Vertex) -> str:
    """Return the name of a vertex, without that of its machine."""
    label = vertex.name.rsplit(".", 1)[-1] if vertex.node >= 0 else vertex.name
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"


def _legend(lines: Sequence[_Line], top: float) -> list[str]:
    """Return the widths and bandwidths of the lines, the fastest first."""
    rates = sorted({line.bytes_per_s for line in lines}, reverse=True)
    least = rates[-1] if rates else 1.0
    rows = []
    for i, rate in enumerate(rates[:_MAX_LEGEND]):
        y = top + _LEGEND_ROW * (i + 1)
        rows.append(
            f'<path stroke-width="{_width(rate, least):.1f}" d="M8 {y:.0f}H40"/>'
            f'<text class="k" x="46" y="{y + 3:.0f}">{quantity.rate(rate)}</text>'
        )
    return rows
