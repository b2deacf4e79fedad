"""`foreshard compare`: one run, or all measured ones, under every engine, cost source and tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import give, must_be_writable, save_page, say, write_text
from foreshard.cli.options.request import describing_a_run, to_request, traced_request_of, warn_of_offers
from foreshard.cli.options.sources import verb_command
from foreshard.errors import ForeshardError, SpecError
from foreshard.report.screen import Screen, Table, table
from foreshard.spec.prediction import TIME_LABELS

if TYPE_CHECKING:
    from foreshard.advise.request import Request
    from foreshard.spec.prediction import Prediction
    from foreshard.validation.predictors import StepPredictor

ALL = "all"


def _run_or_measured(command: click.Command) -> None:
    """Add a run's options; MODEL and CLUSTER may be missing where measured runs are compared."""
    describing_a_run(command, with_engine=False)
    for param in command.params:
        if isinstance(param, click.Argument):
            param.required = False


@verb_command("compare", _run_or_measured)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=PATH",
    help="Also another tool from its checkout: calculon, llm-analysis. Repeat it.",
)
@click.option(
    "--predictor",
    "predictors",
    multiple=True,
    metavar="FILE.py",
    help="Also a predictor of your own: NAME and predict(run). Repeat it.",
)
@click.option(
    "--tables",
    multiple=True,
    metavar="TABLE",
    help="Instead of MODEL CLUSTER: the measured steps of a table, or all of FORESHARD_MEASURED. Repeat it.",
)
@click.option("--report", metavar="OUT.md", help="With --tables: write tables and a picture (OUT.svg).")
def command(
    peers: tuple[str, ...],
    predictors: tuple[str, ...],
    tables: tuple[str, ...],
    report: str | None,
    **values: Any,
) -> None:
    """Predict the same run under every engine, cost source and tool, side by side, or all measured runs.

    \b
    foreshard compare llama3-8b 2x8xh100-sxm --tp 2 --peer calculon=../calculon
    foreshard compare --tables all --peer calculon=../calculon --predictor mine.py --report benchmark.md
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    others = _others(peers, predictors)
    if tables:
        _benchmark(tables, others, report, values)
        return
    if report:
        rule, fix = "The report is of measured runs", "Give --tables all, or leave it out"
        raise SpecError("a report of one run", key="--report", value=report, rule=rule, fix=fix)
    for name in ("model", "cluster"):
        if values[name] is None:
            rule, fix = "A run has a model and a cluster", "Give both, or --tables all"
            raise SpecError("not given", key=name.upper(), rule=rule, fix=fix)
    traced = traced_request_of(values)
    if traced is not None:
        _refuse_others(values["model"], peers, predictors)
        predictions, answers = traced.compare(), []
    else:
        request = to_request(values)
        warn_of_offers(request, request.to_plan())
        predictions, answers = request.compare(), [_answer(other, request) for other in others]
    data = {"schema_version": 1, "predictions": [prediction.to_dict() for prediction in predictions]}
    if others:
        data["others"] = answers
    give(data, lambda: _screen(predictions, answers))


def _refuse_others(model: str, peers: tuple[str, ...], predictors: tuple[str, ...]) -> None:
    if peers or predictors:
        key, value = ("--peer", peers[0]) if peers else ("--predictor", predictors[0])
        rule, fix = "Other predictors are asked about models of layers", "Leave it out"
        raise SpecError(f"{model} is traced", key=key, value=value, rule=rule, fix=fix)


def _others(peers: Iterable[str], predictors: Iterable[str]) -> list[StepPredictor]:
    from foreshard.interop.peers import load_peer
    from foreshard.validation.predictors import load_predictor

    return [*map(load_peer, peers), *map(load_predictor, predictors)]


def _answer(other: StepPredictor, request: Request) -> dict[str, Any]:
    """Return what another predictor says of a run, or why it says nothing."""
    from foreshard.catalog.frameworks import load_framework
    from foreshard.validation.predictors import RunInputs

    plan = request.to_plan()
    run = RunInputs(
        model=request.trained, cluster=request.cluster, plan=plan, framework=load_framework(plan.framework)
    )
    made: dict[str, Any] = {"name": other.name, "step_time_s": None, "peak_bytes": None, "refused": None}
    try:
        found = other(run)
    except ForeshardError as error:
        return made | {"refused": error.what}
    except Exception as error:  # another's code: whatever it raises is its answer
        return made | {"refused": f"{type(error).__name__}: {error}"}
    return made | {"step_time_s": found.step_time_s, "peak_bytes": found.allocated_bytes}


def _benchmark(
    tables: tuple[str, ...], others: list[StepPredictor], report: str | None, values: dict[str, Any]
) -> None:
    """Answer for measured runs."""
    from foreshard.report.benchmark_page import benchmark_document, benchmark_picture, benchmark_screen
    from foreshard.validation.benchmark import benchmark
    from foreshard.validation.predictors import engine_predictors

    stated = next((name for name, value in values.items() if value is not None), None)
    if stated is not None:
        key = stated.upper() if stated in ("model", "cluster") else f"--{stated.replace('_', '-')}"
        rule, fix = "Measured runs state models, clusters and plans themselves", "Leave it out"
        raise SpecError(f"{key} together with --tables", key=key, rule=rule, fix=fix)
    if report:
        must_be_writable(report)
    found = benchmark(_tables(tables), [*engine_predictors(), *others], tell=say)
    if report:
        path = Path(report)
        picture = path.with_suffix(".svg")
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        write_text(str(picture), benchmark_picture(found))
        text = benchmark_document(found, old, picture.name)
        save_page(report, text)
    give(found.to_dict(), lambda: benchmark_screen(found))


def _tables(names: Iterable[str]) -> Iterable[Any]:
    """Yield the tables that are named; of all those of the folder only what holds measured times."""
    from foreshard.cli.validate import find
    from foreshard.validation.tables import measured_folder, read_table

    for name in names:
        if name != ALL:
            yield read_table(find(name))
            continue
        folder = Path(measured_folder())
        paths = sorted(folder.glob("*.csv*"))
        if not paths:
            rule, fix = "The folder is FORESHARD_MEASURED", "Set it, or name tables"
            raise SpecError("no tables", file=str(folder), key="--tables", rule=rule, fix=fix)
        for path in paths:
            try:
                yield read_table(path)
            except SpecError:
                continue  # constants, traces and lists of hardware beside the measurements


def _screen(predictions: tuple[Prediction, ...], answers: list[dict[str, Any]]) -> Screen:
    from foreshard.report.plan_words import plan_line

    first = predictions[0]
    numbers: dict[str, Callable[[Prediction], str]] = {
        "step": lambda prediction: quantity.seconds(prediction.step_time_s),
        "interval": lambda prediction: quantity.seconds_range(*prediction.step_time_interval_s),
        "MFU": lambda prediction: quantity.percent(prediction.mfu),
        "peak GiB": lambda prediction: quantity.gib(prediction.memory.peak_bytes),
        "predicted in": lambda prediction: quantity.seconds(prediction.predict_s),
    }
    parts = [
        part for part in TIME_LABELS if any(prediction.time_breakdown_s[part] for prediction in predictions)
    ]
    headline = [_folded(name, map(write, predictions)) for name, write in numbers.items()]
    times = [
        _folded(
            TIME_LABELS[part],
            (quantity.seconds(prediction.time_breakdown_s[part]) for prediction in predictions),
        )
        for part in parts
    ]
    columns = ("", *(f">{prediction.engine}/{prediction.costs}" for prediction in predictions))
    return Screen(
        header=(f"{first.model} on {first.cluster}", plan_line(first.plan)),
        tables=(
            table("", columns, headline),
            table("Where the time goes", columns, times),
            *([_others_table(predictions, answers)] if answers else []),
        ),
    )


def _others_table(predictions: tuple[Prediction, ...], answers: list[dict[str, Any]]) -> Table:
    """Return the steps of other predictors, against that of the engine graph."""
    ours_s = next(made.step_time_s for made in predictions if made.engine == "graph")
    rows = []
    for answer in answers:
        step_s = answer["step_time_s"]
        against = None if step_s is None else quantity.gain(step_s / ours_s - 1)
        peak = None if answer["peak_bytes"] is None else quantity.gib(answer["peak_bytes"])
        why = answer["refused"] or ""
        rows.append((answer["name"], step_s and quantity.seconds(step_s), against, peak, why))
    return table("Other predictors", ("", ">step", ">against graph", ">peak GiB", "refused"), rows)


def _folded(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return a row in which every value that repeats the first is written as `equal`."""
    first, *others = values
    return name, first, *("equal" if value == first else value for value in others)
