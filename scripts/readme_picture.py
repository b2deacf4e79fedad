"""Draw the picture of the README: a plan for unequal devices, and what other planners come to.

``make picture`` makes the plan and calls this. All that is drawn comes from the answer of that command.
"""

from __future__ import annotations

import html
import json
import re
import sys
from importlib.resources import files
from pathlib import Path

from foreshard.catalog.clusters import load_cluster
from foreshard.report.pages.plan_drawing import colours, drawing
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan_file import load_plan

MARGIN, TITLE, BAR, LABEL, VALUE = 24, 70, 26, 210, 240
COMPARED = "Predicted step of each plan, timed by the same engine (other planners rebuilt from their papers)"
FONT = "system-ui, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
ANOTHER = {"even": "equal shares", "random": "best of 200 random plans"}  # others have their published names


def palette() -> dict[str, str]:
    """Return the colours of the report by name, those of its light theme."""
    css = files("foreshard.report.pages").joinpath("static/report.css").read_text("utf-8")
    return dict(re.findall(r"--(\w+): (#\w+)", css[: css.index("}")]))


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{html.escape(words)}</text>'


def devices_of(cluster: Cluster) -> str:
    """Return how many devices of which kind, in words."""
    counts: dict[str, int] = {}
    for nodes in cluster.nodes:
        counts[nodes.device.name] = counts.get(nodes.device.name, 0) + nodes.count * nodes.per_node
    return " and ".join(f"{count} {name}" for name, count in counts.items())


def legend(cluster: Cluster, y: float, right: float) -> list[str]:
    """Return a swatch and a name for each kind of device, ending at the right margin."""
    out, x = [], right
    for name, colour in reversed(colours(cluster).items()):
        x -= 7.2 * len(name)
        out.append(text(x, y, name, "soft"))
        x -= 20
        out.append(
            f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="3" fill="var(--{colour})" '
            f'fill-opacity="0.28" stroke="var(--{colour})" stroke-width="1.5"/>'
        )
        x -= 22
    return out


def bars(answer: dict, y: float, width: float) -> list[str]:
    """Return a bar for the step of every planner, and a line at the bound."""
    ours, bound = answer["plans"][0]["prediction"]["step_time_s"], answer["lower_bound_step_time_s"]
    steps = [
        (ANOTHER.get(found["name"], found["name"]), found["step_time_s"])
        for found in answer["against"]
        if found["step_time_s"]
    ]
    steps = [("foreshard", ours), *sorted(steps, key=lambda step: step[1])]
    room = width - LABEL - VALUE
    scale = room / max(seconds for _, seconds in steps)
    out = [text(0, y, COMPARED, "head")]
    for i, (name, seconds) in enumerate(steps):
        top = y + 16 + i * BAR
        shade = "--data_comm" if i == 0 else "--bubble"
        out.append(text(0, top + 13, name, "" if i == 0 else "soft"))
        size = f'x="{LABEL}" y="{top}" width="{seconds * scale:.1f}" height="18"'
        out.append(f'<rect {size} rx="3" fill="var({shade})"/>')
        more = "" if i == 0 else f"  (+{seconds / ours - 1:.0%})"
        out.append(text(LABEL + seconds * scale + 10, top + 13, f"{seconds:.1f} s{more}"))
    at, low = LABEL + bound * scale, y + 16 + len(steps) * BAR
    out.append(
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y + 10}" y2="{low + 4}" '
        'stroke="var(--alarm)" stroke-width="1.5" stroke-dasharray="4 3"/>'
    )
    words = f"no plan of the searched space is faster than {bound:.1f} s"
    out.append(text(at - 6.2 * len(words), low + 18, words, "soft"))
    return out


def picture(answer: dict, plan_file: Path, cluster_text: str) -> str:
    """Return the SVG: title, the plan drawn, the planners compared."""
    cluster, plan = load_cluster(cluster_text), load_plan(str(plan_file))
    prediction = answer["plans"][0]["prediction"]
    drawn = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', drawing(plan, cluster), re.DOTALL)
    assert drawn is not None
    width, height = int(drawn[1]), int(drawn[2])
    step = prediction["step_time_s"]
    low, high = prediction["step_time_interval_s"]
    compared = bars(answer, 0, width)
    below = TITLE + height + 50
    total = below + 16 + BAR * (1 + sum(line.startswith("<rect") for line in compared)) + 10
    body = [
        text(
            0,
            20,
            f"{prediction['model']}, {plan.global_batch} samples a step on {devices_of(cluster)}",
            "title",
        ),
        text(0, 44, f"predicted step {step:.1f} s ({low:.1f}-{high:.1f} s, 90 %)", "soft"),
        *legend(cluster, 44, width),
        f'<g transform="translate(0 {TITLE})">{drawn[3]}</g>',
        f'<g transform="translate(0 {below})">{"".join(compared)}</g>',
    ]
    style = (
        f"text {{ fill: var(--ink); font: 12px {FONT}; }} .soft {{ fill: var(--soft); }} "
        f".title {{ font-size: 19px; font-weight: 600; }} .head {{ font-size: 14px; font-weight: 600; }} "
        ".lane { fill: var(--track); }"
    )
    shades = palette()
    made = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * MARGIN} {total + 2 * MARGIN}" '
        f'role="img" aria-label="A plan for {html.escape(devices_of(cluster))}">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" rx="10" fill="var(--card)"/>\n'
        f'<g transform="translate({MARGIN} {MARGIN})">\n' + "\n".join(body) + "\n</g>\n</svg>\n"
    )
    return re.sub(r"var\(--(\w+)\)", lambda found: shades[found[1]], made)


if __name__ == "__main__":
    answer_file, plan_path, cluster_name, out = sys.argv[1:5]
    Path(out).write_text(
        picture(json.loads(Path(answer_file).read_text()), Path(plan_path), cluster_name), encoding="utf-8"
    )
    print(f"picture: {out}")
