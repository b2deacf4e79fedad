"""A plan as a picture: groups are rows, stages are boxes as wide as their layers, shares are bars."""

from __future__ import annotations

import html
from collections.abc import Sequence

from foreshard.report.pages.line_chart import marks_of, number_words
from foreshard.report.pages.markup import legend
from foreshard.report.screen import spans
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.units import number_of

# Names of colours in report.css, one for each kind of device.
COLOURS = (
    "compute",
    "tensor_comm",
    "data_comm",
    "pipeline_comm",
    "optimizer",
    "context_comm",
    "expert_comm",
    "host",
)
_MAX_ROWS = 48  # kinds of groups drawn: three screens
_LABEL, _PIPE, _SHARE, _ROW, _GAP, _TOP = 150, 780, 190, 64, 10, 24
_WIDTH = _LABEL + _PIPE + _SHARE
_CHAR = 7.2  # of 12 px text: names of devices in DejaVu Sans, the widest that browsers take for the page


def colours(cluster: Cluster) -> dict[str, str]:
    """Return the colour of each kind of device, in cluster order."""
    names = dict.fromkeys(nodes.device.name for nodes in cluster.nodes)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def drawing(plan: Plan, cluster: Cluster) -> str:
    """Return the plan as SVG, groups that differ only in their ranks drawn once."""
    rows = folded(plan, cluster)
    shown = rows[:_MAX_ROWS]
    height = _TOP + len(shown) * (_ROW + _GAP)
    most = max(group.share for _, group in shown)
    body = [
        _text(_LABEL, 14, "layers from the embedding to the head", "soft"),
        _text(_LABEL + _PIPE + 14, 14, "samples of each step", "soft"),
    ]
    for i, (numbers, group) in enumerate(shown):
        body += _row(_TOP + i * (_ROW + _GAP), numbers, group, cluster, most, plan.global_batch)
    if len(rows) > len(shown):
        height += 22
        body.append(_text(0, height - 8, f"and {len(rows) - len(shown)} more kinds of groups", "soft"))
    label = f"The plan: {number_of(len(plan.groups), 'group')} on {number_of(len(plan.ranks), 'device')}"
    return (
        f'<div class="drawn"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(body)}</svg></div>{_legend(plan, cluster)}'
    )


def folded(plan: Plan, cluster: Cluster) -> list[tuple[list[int], Group]]:
    """Return each kind of group once, with the numbers of the groups it stands for."""
    found: dict[tuple[object, ...], tuple[list[int], Group]] = {}
    for g, group in enumerate(plan.groups):
        key = (group.share, group.micro_batch, *(_shape(stage, cluster) for stage in group.stages))
        found.setdefault(key, ([], group))[0].append(g)
    return list(found.values())


def _shape(stage: Stage, cluster: Cluster) -> tuple[object, ...]:
    return (
        *cluster.device_counts(stage.ranks).items(),
        stage.layers,
        stage.tp,
        stage.cp,
        stage.ep,
        stage.rank_shares,
        stage.zero,
        stage.recompute,
    )


def _row(y: int, numbers: list[int], group: Group, cluster: Cluster, most: int, batch: int) -> list[str]:
    each = f"{len(numbers)} groups, each" if len(numbers) > 1 else f"group {numbers[0]}"
    out = [
        _text(0, y + 18, each),
        _text(0, y + 36, f"{group.num_micro_batches} micro-batches of {group.micro_batch}", "soft"),
        _text(0, y + 54, group.schedule, "soft"),
    ]
    pieces = sorted((span, s) for s, stage in enumerate(group.stages) for span in stage.layers)
    layers = max(stop for (_, stop), _ in pieces)
    for (start, stop), s in pieces:
        x, width = _LABEL + _PIPE * start / layers, _PIPE * (stop - start) / layers - 2
        out.append(_box(x, y, max(1.5, width), s, (start, stop), group.stages[s], cluster))
    x, width = _LABEL + _PIPE + 14, (_SHARE - 90) * group.share / most
    out.append(f'<rect class="lane" x="{x}" y="{y + 22}" width="{_SHARE - 90}" height="18" rx="3"/>')
    bar = f'x="{x}" y="{y + 22}" width="{max(1.0, width):.1f}" height="18" rx="3"'
    out.append(f'<rect {bar} fill="var(--data_comm)"><title>{group.share} of {batch} samples</title></rect>')
    out.append(_text(x + _SHARE - 84, y + 36, f"{group.share}"))
    return out


def _box(
    x: float, y: int, width: float, s: int, span: tuple[int, int], stage: Stage, cluster: Cluster
) -> str:
    """Return one box: its colours the kinds of devices, its words as many as it has room for."""
    counts, shades = cluster.device_counts(stage.ranks), colours(cluster)
    devices = " + ".join(f"{count} {name}" for name, count in counts.items())
    layers = f"layers {span[0]}-{span[1] - 1}" if span[1] - span[0] > 1 else f"layer {span[0]}"
    degrees = (
        " ".join(
            f"{name} {value}"
            for name, value in (("tp", stage.tp), ("cp", stage.cp), ("dp", stage.inner_dp), ("ep", stage.ep))
            if value > 1
        )
        or "one device"
    )
    recompute = "" if stage.recompute == "none" else f", recompute {stage.recompute}"
    details = [f"stage {s}: {layers}", devices, degrees + recompute, f"ranks {spans(sorted(stage.ranks))}"]
    if stage.rank_shares is not None:
        details.append(f"samples {':'.join(map(str, stage.rank_shares))} over its ranks")
    out = [f"<g><title>{html.escape(chr(10).join(details))}</title>"]
    at, total = x, len(stage.ranks)
    for name, count in counts.items():
        part = width * count / total
        shade = f"var(--{shades[name]})"
        out.append(
            f'<rect x="{at:.1f}" y="{y}" width="{part:.1f}" height="{_ROW}" rx="4" fill="{shade}" '
            f'fill-opacity="0.28" stroke="{shade}" stroke-width="1.5"/>'
        )
        at += part
    short = f"{span[0]}-{span[1] - 1}" if span[1] - span[0] > 1 else f"{span[0]}"
    lines = (
        (f"stage {s} · {layers}", f"{s}: {short}", str(s)),
        (devices, f"x{total}"),
        (degrees + recompute, degrees),
    )
    for i, choices in enumerate(lines):
        words = next((choice for choice in choices if len(choice) * _CHAR <= width - 10), "")
        if words:
            out.append(_text(x + 7, y + 19 + 18 * i, words, "" if i == 0 else "soft"))
    return "".join([*out, "</g>"])


def _legend(plan: Plan, cluster: Cluster) -> str:
    shades, used = colours(cluster), cluster.device_counts(plan.ranks)
    return legend((shades[name], f"{name}: {count} used") for name, count in used.items())


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    kind += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:g}"{kind}>{html.escape(words)}</text>'


def _inside(values: Sequence[float]) -> list[float]:
    """Return round numbers between the least and the largest value, or what all are."""
    least, most = min(values), max(values)
    return [mark for mark in marks_of(least, most) if least <= mark <= most] or [least]


def scatter(points: Sequence[tuple[float, float, str]], x_name: str, y_name: str) -> str:
    """Return points as SVG, the first one marked; axes start at the least values, not at zero."""
    width, height, left, low = 560, 260, 76, 40
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x0, dx = min(xs), (max(xs) - min(xs)) or 1.0
    y0, dy = min(ys), (max(ys) - min(ys)) or 1.0
    out = [
        f'<line class="rule" x1="{left}" x2="{left}" y1="10" y2="{height - low}"/>',
        f'<line class="rule" x1="{left}" x2="{width}" y1="{height - low}" y2="{height - low}"/>',
        _text(left, height - 8, x_name, "soft"),
        _text(0, 12, y_name, "soft"),
    ]

    def across(x: float) -> float:
        return left + 16 + (x - x0) / dx * (width - left - 40)

    def down(y: float) -> float:
        return height - low - 16 - (y - y0) / dy * (height - low - 46)

    for value in _inside(xs):
        out.append(_text(across(value), height - low + 16, number_words(value), "soft", "middle"))
    for value in _inside(ys):
        out.append(_text(left - 6, down(value) + 4, number_words(value), "soft", "end"))
    for i, (x, y, words) in enumerate(points):
        at = across(x), down(y)
        shade = "var(--alarm)" if i == 0 else "var(--compute)"
        title = f"<title>{html.escape(words)}</title>"
        out.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="5" fill="{shade}">{title}</circle>')
    label = html.escape(f"{y_name} against {x_name}")
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{label}"'
    return f'<svg {box} style="max-width:{width}px">{"".join(out)}</svg>'
