"""The benchmark of predictors as a screen, as Markdown in a document, and as a picture."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from foreshard import quantity
from foreshard.report.screen import Screen, Table, table
from foreshard.validation.benchmark import Benchmark, PredictorScore

_MARKED = re.compile(r"(?<=<!-- benchmark -->\n).*?(?=<!-- /benchmark -->)", re.S)
_REASONS = 6  # of a predictor that are shown
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 380, 70, 160, 20, 50
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#be185d", "#65a30d", "#0891b2")
_LABELS = ((-4, -10), (-4, 22), (9, 4))
"""Places of names beside their points, in turn, so that those of neighbours do not cover each other."""

Scores = Callable[[PredictorScore], dict[str, Any]]


def benchmark_tables(found: Benchmark) -> tuple[Table, ...]:
    """Return answers and errors over own rows, over common rows, by family, and why rows are refused."""
    own = [
        (score.name, score.answered, score.refused + score.failed, *_cells(score.own), _took(score))
        for score in found.predictors
    ]
    names = (">median", ">mean", ">p90", ">bias", ">tau", ">regret", ">coverage", ">memory")
    made = [
        table(
            f"Each on the rows it answers, of {found.rows}",
            ("predictor", ">answered", ">refused", *names, ">CPU ms"),
            own,
        )
    ]
    if found.common:
        common = [(score.name, *_cells(score.common)) for score in found.predictors]
        made.append(table(f"On the {found.common} rows that all answer", ("predictor", *names), common))
    families = sorted({name for score in found.predictors for name in score.by_family})
    by_family = [(name, *(_family(score, name) for score in found.predictors)) for name in families]
    columns = ("set", *(f">{score.name}" for score in found.predictors))
    made.append(table("Median error by measured set (rows)", columns, by_family))
    reasons = [
        (score.name, count, reason)
        for score in found.predictors
        for reason, count in list(score.reasons.items())[:_REASONS]
    ]
    if reasons:
        made.append(table("Refused most for", ("predictor", ">rows", "reason"), reasons))
    return tuple(made)


def _cells(scores: dict[str, Any]) -> tuple[str | None, ...]:
    errors = [quantity.percent(scores[key]) for key in ("median_ape", "mape", "p90_ape", "bias")]
    tau = scores["kendall_tau"]
    rest = [quantity.percent(scores[key]) for key in ("regret_mean", "coverage", "memory_median_ape")]
    return (*errors, None if tau is None else f"{tau:.2f}", *rest)


def _took(score: PredictorScore) -> str | None:
    return None if score.cpu_s is None else quantity.digits(1e3 * score.cpu_s, 2)


def _family(score: PredictorScore, name: str) -> str | None:
    rows, error = score.by_family.get(name, (0, None))
    return None if error is None else f"{quantity.percent(error)} ({rows})"


def benchmark_screen(found: Benchmark) -> Screen:
    """Return the benchmark for a terminal."""
    notes = tuple(f"{score.name}: {score.note}." for score in found.predictors if score.note)
    unread = sum(found.left.values())
    more = (f"{unread} rows state too little to be read as a run.",) if unread else ()
    return Screen(
        header=(f"{found.rows} measured steps of {len(found.tables)} tables",),
        tables=benchmark_tables(found),
        notes=(*notes, *more),
    )


def benchmark_document(found: Benchmark, text: str, picture: str) -> str:
    """Return a document with the benchmark between its markers, a new one where `text` has none."""
    screen = benchmark_screen(found)
    parts = [f"{screen.header[0]}.\n", f"![Error and time of each predictor]({picture})\n"]
    parts += [_markdown(made) for made in screen.tables]
    parts.append("\n".join(f"- {note}" for note in screen.notes) + "\n")
    body = "\n".join(parts) + "\n"
    if _MARKED.search(text):
        return _MARKED.sub(lambda match: f"\n{body}", text)
    return f"# Benchmark\n\n<!-- benchmark -->\n\n{body}<!-- /benchmark -->\n"


def _markdown(made: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    names = [name.lstrip(">") for name in made.columns]
    rules = ["---:" if name.startswith(">") else "---" for name in made.columns]
    return "\n".join([f"**{made.title}**\n", line(names), line(rules), *map(line, made.rows)]) + "\n"


def benchmark_picture(found: Benchmark) -> str:
    """Return the error of each predictor over the time of an answer, both axes in powers of ten, as SVG.

    Errors are over the rows that all answer, or over its own where there are none.
    """
    scores: Scores = (lambda score: score.common) if found.common else (lambda score: score.own)
    points = [
        (score.name, 1e3 * score.cpu_s, 100 * scores(score)["median_ape"])
        for score in found.predictors
        if score.cpu_s and scores(score)["median_ape"]
    ]
    of = f"the {found.common} rows that all answer" if found.common else "the rows it answers"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12" fill="#1f2328">'
    )
    out = [head, '<rect width="100%" height="100%" fill="#ffffff"/>']
    if points:
        x = _axis([a for _, a, _ in points], _LEFT, _WIDTH - _RIGHT)
        y = _axis([b for _, _, b in points], _HEIGHT - _BOTTOM, _TOP)
        for value in x[1]:
            out.append(_line(x[0](value), _TOP, x[0](value), _HEIGHT - _BOTTOM))
            out.append(_text(x[0](value), _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
        for value in y[1]:
            out.append(_line(_LEFT, y[0](value), _WIDTH - _RIGHT, y[0](value)))
            out.append(_text(_LEFT - 6, y[0](value) + 4, f"{value:g} %", "end"))
        for i, (name, across, up) in enumerate(points):
            colour = _COLOURS[i % len(_COLOURS)]
            out.append(f'<circle cx="{x[0](across):.1f}" cy="{y[0](up):.1f}" r="5" fill="{colour}"/>')
            right, down = _LABELS[i % len(_LABELS)]
            out.append(_text(x[0](across) + right, y[0](up) + down, f"{name}, {up:.1f} %", "start"))
    out.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "CPU ms of a prediction", "middle"))
    out.append(_text(_LEFT, 14, f"median error on {of}", "start"))
    return "\n".join([*out, "</svg>\n"])


def _axis(values: Sequence[float], first: float, last: float) -> tuple[Callable[[float], float], list[float]]:
    """Return where a value lies on an axis of whole decades that hold all values, and the decades."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    marks = [10.0**i for i in range(low, high + 1)]
    return lambda value: first + (math.log10(value) - low) / (high - low) * (last - first), marks


def _line(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#1f2328" stroke-opacity="0.15"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'
