"""The one-file HTML report of a search: the chosen plan drawn, the others, the bounds, what would help."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreshard import quantity
from foreshard.report.pages.markup import document, html_table, legend, section, static
from foreshard.report.pages.plan_drawing import drawing, scatter
from foreshard.report.plan_screen import drawn, front_table, gains_table, others_table, ranked_table
from foreshard.report.plan_words import counted, degrees, priced
from foreshard.report.screen import Screen
from foreshard.report.target_table import target_table
from foreshard.spec.cluster import Cluster
from foreshard.spec.prediction import TIME_LABELS, Prediction
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.advise.baseline_comparison import ComparedPlanner
    from foreshard.advise.sensitivity import Gain
    from foreshard.advise.to_target import TargetRuns
    from foreshard.planner.result import PlanResult, Ranked


def plan_page(
    result: PlanResult,
    cluster: Cluster,
    screen: Screen,
    gains: Sequence[Gain] = (),
    others: Sequence[ComparedPlanner] = (),
    runs: TargetRuns[Any] | None = None,
) -> str:
    """Return the report of a result with at least one plan; `screen` is what the command shows.

    `runs` are those to a target at several batches, of which the result is the best.
    """
    chosen = result.plans[0]
    sections = [
        _head(screen),
        section(
            "The chosen plan",
            "One row for each kind of group: a pipeline that holds one replica.",
            drawing(chosen.plan, cluster),
            html_table(drawn(chosen.plan, cluster)),
        ),
        section(
            "Where the time goes",
            "Exposed time on the critical rank of the chosen plan.",
            _time(chosen.prediction),
        ),
        section(
            "Plans, best first",
            "What decides between each plan and the chosen one.",
            html_table(ranked_table(result.plans), marked=True),
        ),
        section("How good it is", _proof_words(result), _ladder(result)),
    ]
    if runs is not None:
        sections.insert(1, section("To the target", " ".join(runs.notes()), html_table(target_table(runs))))
    if len(result.front) > 1:
        sections.append(_front(result.front))
    if others:
        lead = "Planners as published, on the same prices of stages, their plans timed by the same engine."
        sections.append(section("Other planners", lead, html_table(others_table(others))))
    if gains:
        lead = "The search again on a cluster changed in one thing, with the same engine."
        changed = html_table(gains_table(gains, counted(chosen.plan)))
        sections.append(section("What other hardware would gain", lead, changed))
    sections.append(_rests(chosen))
    return document(
        f"{screen.header[0]} · foreshard plan",
        "<main>\n{}\n</main>".format("\n".join(sections)),
        result.to_dict(),
        style=static("report.css") + static("plan.css"),
        script=static("plan.js"),
    )


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


def _time(prediction: Prediction) -> str:
    parts = [(part, prediction.time_breakdown_s[part]) for part in TIME_LABELS]
    parts = [(part, value) for part, value in parts if value > 0]
    whole = prediction.step_time_s
    stack = "".join(
        f'<span style="width:{100 * value / whole:.3f}%;background-color:var(--{part})" '
        f'title="{html.escape(TIME_LABELS[part])}: {quantity.seconds(value)}"></span>'
        for part, value in parts
    )
    words = (
        (part, f"{TIME_LABELS[part]} {quantity.seconds(value)}, {quantity.percent(value / whole)}")
        for part, value in parts
    )
    return f'<div class="stack" role="img" aria-label="Parts of the step">{stack}</div>{legend(words)}'


def _proof_words(result: PlanResult) -> str:
    gap = result.gap_to_bound
    if gap is None:
        return "No bound is known in this objective."
    if gap <= 1e-9:
        return "No plan of the space is better: every other one was timed, or excluded by a bound."
    above = quantity.percent(gap)
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
    terms = "".join(f"<li>{html.escape(term)}</li>" for term in result.space.split("; ") if term)
    space = f"<details><summary>The space that the bound speaks of</summary><ul>{terms}</ul></details>"
    lead = f'<p class="lead">{html.escape(searched)}</p>'
    return f'<div class="ladder">{rows}</div>{lead}{space if terms else ""}'


def _front(plans: Sequence[Ranked]) -> str:
    points = [
        (
            ranked.prediction.step_time_s,
            priced(ranked.plan, ranked.prediction.cost.usd_per_1b_tokens)[0],
            degrees(ranked.plan),
        )
        for ranked in plans
    ]
    known = [(seconds, usd, words) for seconds, usd, words in points if usd is not None]
    of = priced(plans[0].plan, None)[1]
    picture = scatter(known, "step time, s (fastest in red)", f"$ per {of}") if len(known) > 1 else ""
    lead = "Plans that no other found beats in time, cost or energy without losing in another."
    return section("The trade-off", lead, picture, html_table(front_table(plans)))


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
        section("Assumptions", "What was not stated and took a default.", f"<ol>{assumed}</ol>")
        + f'<details><summary>Plan file</summary><pre tabindex="0">{plan}</pre></details>'
        '<p><button type="button" id="save">Save plan.json</button></p>'
        f"<footer>{html.escape(footer)}</footer>"
    )
