"""The one-file HTML report of a simulation: the policies side by side, and the figures of a paper."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from foreshard.report.pages.line_chart import Line, chart
from foreshard.report.pages.markup import document, html_table, section, unscripted_style
from foreshard.report.screen import Table
from foreshard.report.simulation_table import online_screen

if TYPE_CHECKING:
    from foreshard.simulate.evaluation import Evaluation
    from foreshard.simulate.sweeps import Sweeps

_SHOWN = ("lyapunov", "static-best", "lb-bsp", "equal-share", "greedy-fastest")


def online_page(found: Evaluation, swept: Sweeps) -> str:
    """Return the report as one HTML text; it loads nothing and has no script."""
    screen = online_screen(found)
    title = f"{found.scenario.name}: policies on a changing cluster"
    sections = [
        f"<h1>{html.escape(title)}</h1>" + "".join(f"<p>{html.escape(line)}</p>" for line in screen.header),
        f"<p>{html.escape(' '.join(found.scenario.doc.split()))}</p>",
        *(
            section("Policies, those that keep the budgets first", "", html_table(table))
            for table in screen.tables
        ),
        "".join(f"<p>{html.escape(note)}</p>" for note in screen.notes),
        section("Gain against heterogeneity", "", _uneven(swept)),
        section("Rate of change", "", _rates(swept)),
        section("Cost and time over V", "", _front(swept)),
        section("Over the run, first path", "", _series(found)),
        section("Regret to the bound, first path", "", _regret(found)),
    ]
    return document(
        f"{title} · foreshard simulate",
        "<main>\n{}\n</main>".format("\n".join(sections)),
        found.to_dict() | {"sweeps": _data(swept)},
        style=unscripted_style(),
    )


def _data(swept: Sweeps) -> dict[str, object]:
    return {
        "slots": swept.slots,
        "uneven": list(swept.uneven),
        "rates": list(swept.rates),
        "front": list(swept.front),
    }


def _words(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _uneven(swept: Sweeps) -> str:
    from foreshard.simulate.sweeps import PAPER_CUT, PAPER_FACTOR

    if not swept.uneven:
        return _words("No point of this scenario could be played.")
    axis = "factor" if "factor" in swept.uneven[0] else "power"
    names = {"ours": "ours, budgeted", "ideal": "bound, in budget", "free": "balanced, no budget"}
    lines = [
        Line(name=text, points=[(row[axis], row[name]) for row in swept.uneven], dashed=name == "ideal")
        for name, text in names.items()
    ]
    words = f"Cut of mean batch time against equal shares on all devices, over {swept.slots} slots. "
    if any(row["ours"] > row["ideal"] for row in swept.uneven):
        # Nothing that keeps the budget is above the bound.
        words += "Where ours is above the bound it spent more than its budget, which so few slots allow. "
    if axis == "power":
        return _words(words + "All factors of the scenario to a power: 0 is constant.") + chart(
            lines, x="power of all factors", y="cut", percent=True
        )
    lines.append(
        Line(name="formula, all devices", points=[(r[axis], r["formula"]) for r in swept.uneven], dashed=True)
    )
    lines.append(
        Line(
            name="one in four: 1-4/(3s+1)",
            points=[(r[axis], 1 - 4 / (3 * r[axis] + 1)) for r in swept.uneven],
            dashed=True,
        )
    )
    lines.append(Line(name=f"paper: {100 * PAPER_CUT:.2f} %", points=[(PAPER_FACTOR, PAPER_CUT)]))
    words += (
        f"Ling et al. report a cut of up to {100 * PAPER_CUT:.2f} %; one straggler among four that "
        f"is {PAPER_FACTOR} times slower gives as much."
    )
    rows = [
        (f"{r[axis]:g}", *(f"{100 * r[name]:.2f} %" for name in ("ours", "ideal", "free", "formula")))
        for r in swept.uneven
    ]
    columns = ("straggler factor", ">ours, budgeted", ">bound, in budget", ">balanced, no budget", ">formula")
    return (
        _words(words)
        + chart(lines, x="how many times slower the straggler is", y="cut", percent=True)
        + html_table(Table(title="", columns=columns, rows=tuple(rows)))
    )


def _rates(swept: Sweeps) -> str:
    lines = [
        Line(name=name, points=[(row["rate"], row[name]) for row in swept.rates])
        for name in ("lyapunov", "static-best")
    ]
    words = (
        "Time over the bound when everything changes so many times as fast; reconfigurations per 1000 slots."
    )
    moves = [Line(name="lyapunov", points=[(row["rate"], row["reconfigurations"]) for row in swept.rates])]
    return (
        _words(words)
        + chart(lines, x="rate of change", y="time over the bound", percent=True, log_x=True)
        + chart(moves, x="rate of change", y="reconfigurations", log_x=True)
    )


def _front(swept: Sweeps) -> str:
    lines = [
        Line(name="time over the bound", points=[(row["weight"], row["over_bound"]) for row in swept.front]),
        Line(name="cost over the budget", points=[(row["weight"], row["excess"]) for row in swept.front]),
    ]
    words = (
        f"Over {swept.slots} slots: a larger V leans to time, and leaves more of the budget's excess unpaid."
    )
    return _words(words) + chart(lines, x="V", y="part", percent=True, log_x=True)


def _series(found: Evaluation) -> str:
    policies = found.to_dict()["policies"]
    assert isinstance(policies, dict)
    out = []
    for key, text in (
        ("step_time_s", "seconds a batch"),
        ("usd", "dollars a batch"),
        ("devices", "devices in use"),
    ):
        lines = []
        for name in (known for known in _SHOWN if known in policies):
            values = policies[name]["series"][key]
            step = found.slots / len(values)
            points = [(int((i + 0.5) * step) + 1, value) for i, value in enumerate(values)]
            lines.append(Line(name=name, points=points, dots=False))
        out.append(_words(text) + chart(lines, x="slot", y=text))
    return "".join(out)


def _regret(found: Evaluation) -> str:
    first = found.rounds[0]
    lines = []
    for name in (known for known in ("lyapunov", "greedy-banked", "static-best") if known in first.runs):
        over = first.runs[name].time_s - first.bound.mean_step_time_s
        at = [round((i + 1) * len(over) / 100) for i in range(100)] if len(over) >= 100 else [len(over)]
        total = over.cumsum()
        lines.append(Line(name=name, points=[(k, float(total[k - 1])) for k in at], dots=False))
    words = "Seconds above the bound's mean so far, slot by slot; falling stretches are slots that are easy."
    return _words(words) + chart(lines, x="slot", y="seconds")
