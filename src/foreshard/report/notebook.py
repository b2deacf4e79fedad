"""Results in a Python session: short text in blocks, HTML for notebooks, frames and drawings."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import import_module
from typing import Any

from foreshard import quantity
from foreshard.errors import ExtraMissingError
from foreshard.planner.rental import RentResult
from foreshard.planner.result import PlanResult
from foreshard.report.plain import render
from foreshard.report.plan_screen import bound_box, ranked_table, searched_box
from foreshard.report.plan_words import distinct_names, plan_line
from foreshard.report.screen import Screen, Table
from foreshard.report.summary import boxes, memory_table, speed_line, step_box, time_table
from foreshard.simulate.evaluation import Evaluation
from foreshard.spec.prediction import MEMORY_LABELS, TIME_LABELS, Prediction


def view(kind: str, result: Any) -> Any:
    """Return a result as 'text', 'html', 'pandas' or 'plot'."""
    if kind == "text":
        return render(screen_of(result))
    if kind == "html":
        return html(screen_of(result))
    return frame(result) if kind == "pandas" else plot(result)


def screen_of(result: Any) -> Screen:
    """Return the blocks of a prediction, of plans, of offers to rent or of a simulation."""
    if isinstance(result, PlanResult):
        return _of_plans(result)
    if isinstance(result, RentResult):
        from foreshard.report.rental_table import rental_screen

        return rental_screen(result)
    if isinstance(result, Evaluation):
        from foreshard.report.simulation_table import online_screen

        return online_screen(result)
    return Screen(
        header=(f"{result.model} on {result.cluster}", plan_line(result.plan)),
        boxes=boxes(result),
        tables=(time_table(result), memory_table(result.memory)),
        notes=(speed_line(result),),
    )


def _of_plans(result: PlanResult) -> Screen:
    if not result.plans:
        return Screen(header=(f"No plan: {result.infeasible}",), boxes=(searched_box(result),))
    best = result.plans[0].prediction
    return Screen(
        header=(f"{best.model} on {best.cluster}",),
        boxes=(step_box(best), bound_box(result), searched_box(result)),
        tables=(ranked_table(result.plans),),
        notes=result.notes,
    )


def html(screen: Screen) -> str:
    """Return a screen as an HTML fragment without styles of its own."""
    parts = [f"<p><b>{escape(line)}</b></p>" for line in screen.header[:1]]
    parts += [f"<p>{escape(line)}</p>" for line in screen.header[1:]]
    rows = (
        f"<tr><th>{escape(box.title)}</th><td>{escape(box.value)}</td><td>{escape(box.note)}</td></tr>"
        for box in screen.boxes
    )
    parts.append(f"<table>{''.join(rows)}</table>")
    parts += [_table(table) for table in screen.tables]
    parts += [f"<p>{escape(line)}</p>" for line in (*screen.notes, *screen.footer)]
    return "\n".join(parts)


def _table(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    names = tuple(column.removeprefix(">") for column in table.columns)
    body = "".join(row(cells, "td") for cells in (*table.rows, *([table.total] if table.total else [])))
    return f"<table><caption>{escape(table.title)}</caption>{row(names, 'th')}{body}</table>"


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        fix = "The extra foreshard[notebook] brings it"
        raise ExtraMissingError(f"needs {top}", key=top, fix=fix) from error


def frame(result: Any) -> Any:
    """Return a pandas DataFrame with SI units in the names of its columns."""
    pandas = _library("pandas")
    if isinstance(result, Prediction):
        return pandas.DataFrame([_row(result)])
    if isinstance(result, PlanResult):
        names = distinct_names([one.plan for one in result.plans])
        rows = [
            {"plan": name, **_row(one.prediction), "why": one.why}
            for name, one in zip(names, result.plans, strict=True)
        ]
        return pandas.DataFrame(rows)
    if isinstance(result, RentResult):
        return pandas.DataFrame(
            [
                {
                    "rent": one.cluster,
                    "usd_per_h": one.usd_per_h,
                    "usd_of_run": one.ranked.prediction.cost.usd_total,
                    **_row(one.ranked.prediction),
                }
                for one in result.offers
            ]
        )
    policies: Mapping[str, Any] = result.to_dict()["policies"]
    kept = {
        name: {key: value for key, value in one.items() if not isinstance(value, dict | list)}
        for name, one in policies.items()
    }
    return pandas.DataFrame([{"policy": name, **values} for name, values in kept.items()])


def _row(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as one flat row."""
    low, high = prediction.step_time_interval_s
    memory, cost = prediction.memory, prediction.cost
    return {
        "model": prediction.model,
        "cluster": prediction.cluster,
        "devices": len(prediction.plan.ranks),
        "global_batch": prediction.plan.global_batch,
        "seq_len": prediction.plan.seq_len,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "peak_bytes": memory.peak_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "fits": memory.fits,
        "usd_per_step": cost.usd_per_step,
        "usd_per_1b_tokens": cost.usd_per_1b_tokens,
        "energy_j_per_step": prediction.energy_j_per_step,
        "run_time_s": prediction.run_time_s,
        "usd_total": cost.usd_total,
        "energy_j_total": prediction.energy_j_total,
        **{f"{name}_s": value for name, value in prediction.time_breakdown_s.items()},
        **{f"{name}_bytes": value for name, value in memory.breakdown_bytes.items()},
    }


def plot(result: Any) -> Any:
    """Return a matplotlib Figure, not shown and known to no window."""
    figure = _library("matplotlib.figure").Figure(figsize=(9, 4), layout="constrained")
    if isinstance(result, Prediction):
        left, right = figure.subplots(1, 2)
        times = {TIME_LABELS[name]: 1e3 * value for name, value in result.time_breakdown_s.items() if value}
        _bars(left, times, f"Step {quantity.seconds(result.step_time_s)}", "ms")
        parts = {
            MEMORY_LABELS[name]: value / 2**30
            for name, value in result.memory.breakdown_bytes.items()
            if value
        }
        _bars(right, parts, f"Peak {quantity.memory(result.memory.peak_bytes)}", "GiB")
        return figure
    axes = figure.subplots()
    if isinstance(result, RentResult):
        prices = {one.cluster: one.ranked.prediction.cost.usd_total or 0.0 for one in result.offers}
        _bars(axes, prices, "Offers, best first", "$ of the run")
        return figure
    if isinstance(result, PlanResult):
        names = distinct_names([one.plan for one in result.plans])
        steps = [one.prediction.step_time_s for one in result.plans]
        _bars(axes, dict(zip(names, steps, strict=True)), "Plans, best first", "s a step")
        bound_s = result.lower_bound_step_time_s if result.bounds_time else None
    else:
        _bars(
            axes, {name: float(result.times(name).mean()) for name in result.policies}, "Policies", "s a step"
        )
        bound_s = float(result.times("bound").mean())
    if bound_s:
        axes.axvline(bound_s, linestyle="--", color="black", label="lower bound")
        axes.legend()
    return figure


def _bars(axes: Any, values: Mapping[str, float], title: str, unit: str) -> None:
    axes.barh(list(values), list(values.values()))
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit)
