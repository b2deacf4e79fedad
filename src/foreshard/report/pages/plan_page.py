"""The one-file HTML report of a search: the chosen plan drawn, the others, the bounds, what would help."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from foreshard import quantity
from foreshard.report.pages.plan_drawing import drawing, scatter
from foreshard.report.plan_table import degrees, drawn, front_table, gains_table, others_table, ranked_table
from foreshard.report.screen import Screen, Table
from foreshard.report.summary import PART_NAMES
from foreshard.spec.cluster import Cluster
from foreshard.spec.prediction import TIME_PARTS, Prediction
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.advise.baseline_comparison import ComparedPlanner
    from foreshard.advise.sensitivity import Gain
    from foreshard.planner.result import PlanResult, Ranked

_SENTENCE = 28  # letters of a cell that would be broken into a column of words on a narrow page


def plan_page(
    result: PlanResult,
    cluster: Cluster,
    screen: Screen,
    gains: Sequence[Gain] = (),
    others: Sequence[ComparedPlanner] = (),
) -> str:
    """Return the report as one HTML text.

    Parameters
    ----------
    result : PlanResult
        With at least one plan.
    cluster : Cluster
    screen : Screen
        What the command shows; its header, boxes and notes head the page.
    gains : sequence of Gain
    others : sequence of ComparedPlanner
    """
    chosen = result.plans[0]
    sections = [
        _head(screen),
        _section(
            "The chosen plan",
            "One row for each kind of group: a pipeline that holds one replica.",
            drawing(chosen.plan, cluster),
            _table(drawn(chosen.plan, cluster), caption=False),
        ),
        _section(
            "Where the time goes",
            "Exposed time on the critical rank of the chosen plan.",
            _time(chosen.prediction),
        ),
        _section(
            "Plans, best first",
            "What decides between each plan and the chosen one.",
            _table(ranked_table(result.plans), caption=False, marked=True),
        ),
        _section("How good it is", _proof_words(result), _ladder(result)),
    ]
    if len(result.front) > 1:
        sections.append(_front(result.front))
    if others:
        lead = "Planners as published, on the same prices of stages, their plans timed by the same engine."
        sections.append(_section("Other planners", lead, _table(others_table(others), caption=False)))
    if gains:
        lead = "The search again on a cluster changed in one thing, with the same engine."
        sections.append(
            _section("What other hardware would gain", lead, _table(gains_table(gains), caption=False))
        )
    sections.append(_rests(chosen))
    folder = files("foreshard.report.pages").joinpath("static")
    parts = {
        "title": html.escape(screen.header[0]),
        "style": folder.joinpath("report.css").read_text(encoding="utf-8"),
        "body": "\n".join(sections),
        "data": json.dumps(result.to_dict(), separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = folder.joinpath("plan.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], template)


def _head(screen: Screen) -> str:
    model, _, cluster = screen.header[0].partition(" on ")
    boxes = "".join(
        f'<div class="box{" alarm" if box.alarm else ""}"><h3>{html.escape(box.title)}</h3>'
        f'<div class="value">{html.escape(box.value)}</div>'
        f'<div class="note">{html.escape(box.note)}</div></div>'
        for box in screen.boxes
    )
    notes = "".join(f'<p class="speed">{html.escape(note)}</p>' for note in screen.notes)
    return (
        f'<header class="top"><h1>{html.escape(model)}<span class="on"> on </span>{html.escape(cluster)}</h1>'
        f'<button type="button" id="theme">Theme</button></header><div class="boxes">{boxes}</div>{notes}'
    )


def _section(title: str, lead: str, *body: str) -> str:
    name = html.escape(title)
    return (
        f'<section aria-label="{name}"><h2>{name}</h2><p class="lead">{html.escape(lead)}</p>'
        f"{''.join(body)}</section>"
    )


def _table(table: Table, *, caption: bool = True, marked: bool = False) -> str:
    """Return a Table as HTML; `marked` sets the first row apart."""
    kinds = [' class="n"' if column.startswith(">") else "" for column in table.columns]
    longest = [max((len(row[i]) for row in table.rows), default=0) for i in range(len(kinds))]
    kinds = [
        kind or (' class="words"' if n >= _SENTENCE else "") for kind, n in zip(kinds, longest, strict=True)
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
    title = f"<caption>{html.escape(table.title)}</caption>" if caption and table.title else ""
    return (
        f'<div class="wide"><table>{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _time(prediction: Prediction) -> str:
    parts = [(part, prediction.time_breakdown_s[part]) for part in TIME_PARTS]
    parts = [(part, value) for part, value in parts if value > 0]
    whole = prediction.step_time_s
    stack = "".join(
        f'<span style="width:{100 * value / whole:.3f}%;background-color:var(--{part})" '
        f'title="{html.escape(PART_NAMES.get(part, part))}: {quantity.seconds(value)}"></span>'
        for part, value in parts
    )
    items = "".join(
        f'<li><span class="swatch" style="background-color:var(--{part})"></span>'
        f"{html.escape(PART_NAMES.get(part, part))} {quantity.seconds(value)}, "
        f"{quantity.percent(value / whole)}</li>"
        for part, value in parts
    )
    bar = f'<div class="stack" role="img" aria-label="Parts of the step">{stack}</div>'
    return f'{bar}<ul class="legend">{items}</ul>'


def _proof_words(result: PlanResult) -> str:
    if result.gap <= 1e-9:
        return "No plan of the space is faster: every other one was timed, or excluded by a bound."
    above = quantity.percent(result.gap)
    return f"The chosen plan is at most {above} above what any plan of the space can reach."


def _ladder(result: PlanResult) -> str:
    """Return the bounds and the chosen step as bars from zero, and what the bound speaks of."""
    step = result.plans[0].prediction.step_time_s
    steps = [
        *((f"bound: {name}", value, "pipeline_comm") for name, value in result.ladder.items()),
        ("the chosen plan", step, "compute"),
    ]
    rows = "".join(
        f'<div class="label">{html.escape(name)}</div><div class="stack"><span style="width:'
        f'{100 * value / step:.2f}%;background-color:var(--{part})"></span></div>'
        f'<div class="label n">{quantity.seconds(value)}</div>'
        for name, value, part in steps
    )
    took = quantity.seconds(result.wall_s)
    searched = (
        f"{number_of(result.evaluated, 'plan')} timed, {result.pruned:,} excluded by a bound, in {took}."
    )
    space = f" The space: {result.space}." if result.space else ""
    return f'<div class="ladder">{rows}</div><p class="lead">{html.escape(searched + space)}</p>'


def _front(plans: Sequence[Ranked]) -> str:
    points = [
        (one.prediction.step_time_s, one.prediction.cost.usd_per_1b_tokens, degrees(one.plan))
        for one in plans
        if one.prediction.cost.usd_per_1b_tokens is not None
    ]
    known = [(seconds, usd, words) for seconds, usd, words in points if usd is not None]
    picture = scatter(known, "step time, s (fastest in red)", "$ per 1B tokens") if len(known) > 1 else ""
    lead = "Plans that no other found beats in time, cost or energy without losing in another."
    return _section("The trade-off", lead, picture, _table(front_table(plans), caption=False))


def _rests(chosen: Ranked) -> str:
    made = chosen.prediction
    assumed = "".join(f"<li>{html.escape(text)}</li>" for text in made.assumptions)
    plan = html.escape(json.dumps(chosen.plan.to_dict(), indent=1))
    plan = re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda found: re.sub(r"\s+", "", found[0]), plan)
    footer = (
        f"Predicted by foreshard, nothing was run: {made.engine} engine, {made.costs} costs, "
        f"{made.fidelity}. "
        f"Framework {made.framework}, catalog {made.catalog_version or 'unversioned'}."
    )
    return (
        _section("Assumptions", "What was not stated and took a default.", f"<ol>{assumed}</ol>")
        + f'<details><summary>Plan file</summary><pre tabindex="0">{plan}</pre></details>'
        '<p><button type="button" id="save">Save plan.json</button></p>'
        f"<footer>{html.escape(footer)}</footer>"
    )
