"""The goals of accuracy, each with what was measured whether it is met: first table of accuracy.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accuracy_intervals import LARGE
from accuracy_kernels import KernelScores
from accuracy_rows import SUBSETS, Run, counted, markdown, number, percent
from accuracy_tables import MemoryScores, Sets, order_line

from foreshard.validation.scoring import summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One line: what, over which rows, measured, the goal, and whether it is met (None: not measured)."""

    title: str
    rows: int | None
    measured: str
    goal: str
    met: bool | None

    def cells(self) -> tuple[str, ...]:
        """Return the line of the table."""
        verdict = {True: "met", False: "**not met**", None: "-"}[self.met]
        return (self.title, "-" if self.rows is None else str(self.rows), self.measured, self.goal, verdict)


def below(title: str, value: float | None, limit: float, rows: int | None = None) -> Goal:
    """Return a goal on one figure, a fraction."""
    met = None if value is None else value <= limit
    return Goal(title=title, rows=rows, measured=percent(value), goal=f"<= {percent(limit, 0)}", met=met)


def errors_below(title: str, scores: Mapping[str, Any], limits: Sequence[float], rows: int) -> Goal:
    """Return a goal on the median error, and on the 90th percentile when there is a second limit."""
    values = [scores["median_ape"], scores["p90_ape"]]
    known = [value for value in values if value is not None]
    return Goal(
        title=title,
        rows=rows,
        measured=" / ".join(percent(value) for value in values),
        goal="<= " + " / ".join(percent(limit, 0) for limit in limits),
        met=all(v <= limit for v, limit in zip(known, limits, strict=False)) if known else None,
    )


LEFT_OUT = (
    ("dense pooled, without vTrain", (0.06, 0.18)),
    ("Korthikanti and SC21", (0.05,)),
    ("llm-foundry A100", (0.05,)),
    ("InternEvo", (0.05,)),
    ("NVIDIA trio, dense", (0.08,)),
    ("MLPerf LoRA", (0.09,)),
)
REPORTED = ("NVIDIA trio, experts", "vTrain")


def left_out_goals(sets: Sets) -> list[Goal]:
    """Return the lines on families left out of every fit."""
    out = []
    for title, limits in LEFT_OUT:
        scores = _subset(sets["out"], title)
        out.append(errors_below(f"{title}: left out", scores, limits, scores["rows"]))
    for title in REPORTED:
        scores = _subset(sets["out"], title)
        text = f"{percent(scores['median_ape'])} / {percent(scores['p90_ape'])}"
        out.append(
            Goal(title=f"{title}: left out", rows=scores["rows"], measured=text, goal="reported", met=None)
        )
    return out


def _subset(runs: Sequence[Run], title: str) -> dict[str, Any]:
    return summarise([run.outcome for run in runs if SUBSETS[title](run.row)])


def cross_goals(crossed: Mapping[str, Any]) -> list[Goal]:
    """Return the lines that `scripts/cross_validate.py` computed."""
    trio, vtrain, few = crossed["trio"], crossed["vtrain"], crossed["vtrain_after_10_rows"]
    by_cell = vtrain["cross_validated"]
    groups, larger = by_cell["groups_of_2"], by_cell["groups_of_3"]
    return [
        errors_below(
            "NVIDIA trio, dense: cross-validated by configuration",
            trio["dense"],
            (0.05, 0.13),
            trio["dense"]["rows"],
        ),
        errors_below(
            "NVIDIA trio, experts, release in the fit: cross-validated",
            trio["experts"],
            (0.12, 0.30),
            trio["experts"]["rows"],
        ),
        errors_below("vTrain: 5-fold by cell", by_cell, (0.06, 0.17), by_cell["rows"]),
        below(f"vTrain: after 10 rows, median over {few['seeds']} seeds", few["median_ape"], 0.09),
        below("vTrain: mean regret, groups of >= 2", groups["regret_mean"], 0.04, groups["groups"]),
        replace(
            below("vTrain: mean regret, groups of >= 3", larger["regret_mean"], 0.04, larger["groups"]),
            goal="reported",
            met=None,
        ),
        _tau("vTrain: Kendall tau, cross-validated", by_cell["kendall_tau"], larger["groups"]),
    ]


def _tau(title: str, value: float | None, groups: int) -> Goal:
    met = None if value is None else value >= 0.8
    return Goal(title=title, rows=groups, measured=number(value), goal=">= 0.80", met=met)


def order_goals(sets: Sets) -> list[Goal]:
    """Return the lines on the order of all other families; the second without pairs as close as repeats."""
    out, fit = (order_line([r for r in sets[name] if counted(r.row)]) for name in ("out", "fit"))
    apart = Goal(
        title="the same, pairs more than 5 % apart (repeats differ by up to that)",
        rows=out["groups"],
        measured=f"{number(out['tau_apart'])}, in the fit {number(fit['tau_apart'])}",
        goal="reported",
        met=None,
    )
    most = Goal(
        title=f"the same, the most that predictions can reach which are equal where ours are "
        f"({out['equal']} of {out['pairs']} pairs: one configuration, two releases or submitters)",
        rows=out["groups"],
        measured=number(out["most"]),
        goal="reported",
        met=None,
    )
    plain = _tau("all other families: Kendall tau, left out", out["tau"], out["groups"])
    return [replace(plain, measured=f"{plain.measured}, in the fit {number(fit['tau'])}"), apart, most]


def interval_goals(classes: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Return the lines on intervals: coverage of every class of at least 40 runs, width for dense models.

    The goal is on the cross-fitted coverage; that of classes judged by other families stands beside it.
    """
    large = {name: s for name, s in classes.items() if s["rows"] >= LARGE}
    shares = [s["folds"] for s in large.values()]
    others = [s["others"] for s in large.values() if s["others"] is not None]
    dense = classes["dense"]
    return [
        Goal(
            title=f"90 % intervals: coverage of {len(large)} classes of {LARGE} runs and more",
            rows=classes["all"]["rows"],
            measured=f"cross-fitted {_span(shares)}; judged by other families {_span(others)}",
            goal="85 to 95 cross-fitted",
            met=all(0.85 <= share <= 0.95 for share in shares),
        ),
        below("90 % intervals: median half width, dense", dense["half"], 0.20, dense["rows"]),
    ]


def _span(shares: Sequence[float]) -> str:
    return f"{percent(min(shares), 0)} to {percent(max(shares), 0)}" if shares else "-"


def memory_goals(scores: MemoryScores) -> list[Goal]:
    """Return the lines on memory and feasibility."""
    c = scores.confusion
    return [
        below("peak memory, where allocated bytes are stated", scores.allocated, 0.03, scores.allocated_rows),
        below("peak memory elsewhere", scores.elsewhere, 0.10, scores.elsewhere_rows),
        below("rows labelled OOM that were said to fit", scores.wrong_oom, 0.10, c["tp"] + c["fn"]),
        below("rows that ran and were said not to fit", scores.wrong_ran, 0.10, c["tn"] + c["fp"]),
    ]


def kernel_goals(scores: KernelScores) -> list[Goal]:
    """Return the lines on kernels and collectives."""
    return [
        below("collectives, systems of the fit", scores.collectives, 0.10),
        below("collectives, system left out", scores.collectives_left_out, 0.15),
        below("bf16 products (median over frameworks), in the fit", scores.gemm, 0.08),
        below("bf16 products, row by row", scores.gemm_rows, 0.08),
        below("bf16 products, device left out", scores.gemm_left_out, 0.15),
        below("attention forward, usable subset, in the fit", scores.attention, 0.12),
    ]


def goal_table(goals: Sequence[Goal]) -> list[str]:
    """Return the table, and a line that counts."""
    judged = [goal for goal in goals if goal.met is not None]
    met = sum(bool(goal.met) for goal in judged)
    lines = markdown(("what", "rows", "measured (%)", "goal (%)", ""), [goal.cells() for goal in goals])
    return [f"{met} of {len(judged)} goals are met.", "", *lines]
