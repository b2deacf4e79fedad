"""`foreshard predict MODEL CLUSTER`: one prediction, its report and its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard.cli.options import measured
from foreshard.cli.options.answer import answering, give, save, save_page, say, wants_json
from foreshard.cli.options.request import describing_a_run, to_request
from foreshard.cli.options.sources import configurable
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.advise.change import Effect
    from foreshard.advise.fit import Fit
    from foreshard.advise.request import Request
    from foreshard.report.screen import Screen
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.timeline import Timeline

NOTHING_FITS = 3


@click.command("predict")
@click.option("--trace", metavar="OUT.json.gz", help="Write a Chrome/Perfetto trace of the step.")
@click.option("--report", metavar="OUT.html", help="Write a one-file HTML report.")
@click.option("--explain", is_flag=True, help="Show formula and source of each number, and every assumption.")
@click.pass_context
def command(
    ctx: click.Context, /, trace: str | None, report: str | None, explain: bool, **values: Any
) -> None:
    """Predict one training step of MODEL on CLUSTER: time, memory, cost, each in parts that sum.

    \b
    foreshard predict llama3-8b 2x8xh100-sxm --tp 2 --pp 2 --global-batch 512
    foreshard predict config.json cluster.toml --plan plan.json --report report.html
    foreshard predict job.py lab.toml --costs costs.json --plan plan.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    if measured.is_file(values.get("costs")):
        measured.predict(ctx, values, {"trace": trace, "report": report, "explain": explain})
        return
    request = to_request(values)
    timeline = None
    if trace or report:
        prediction, timeline = request.predict_timeline()
    else:
        prediction = request.predict()
    fits = prediction.memory.fits
    advice = _advice(request, prediction) if fits and (report or not wants_json()) else None
    fit = None if fits else _nearest(request, prediction)
    if trace:
        _write_trace(trace, prediction, timeline)
    if report:
        _write_report(report, request, prediction, timeline, advice or (), fit)
    explained = _explained(request, prediction) if explain else None
    give(_object(prediction, fit, explained), lambda: _screen(request, prediction, advice, explained))
    if fit is not None:
        say(f"foreshard: {_verdict(prediction, fit)}")
        ctx.exit(NOTHING_FITS)


def _advice(request: Request, prediction: Prediction) -> tuple[Effect, ...]:
    from foreshard.advise.advice import improvements

    return improvements(request, prediction)


def _nearest(request: Request, prediction: Prediction) -> Fit:
    from foreshard.advise.fit import nearest_fit

    return nearest_fit(request, prediction)


def _verdict(prediction: Prediction, fit: Fit) -> str:
    from foreshard.advise.fit import verdict

    return verdict(prediction, fit)


def _explained(request: Request, prediction: Prediction) -> dict[str, str]:
    from foreshard.report.explain import explanations

    return explanations(request, prediction)


def _screen(
    request: Request,
    prediction: Prediction,
    advice: tuple[Effect, ...] | None,
    explained: dict[str, str] | None,
) -> Screen:
    from foreshard.advise.group_times import group_times
    from foreshard.report.summary import prediction_screen

    return prediction_screen(prediction, advice, explained, group_times(request, prediction.plan))


def _object(prediction: Prediction, fit: Fit | None, explained: dict[str, str] | None) -> dict[str, Any]:
    """Return the contract's object; a run that does not fit also says by how much and what would."""
    data = {"schema_version": prediction.schema_version} | prediction.to_dict()
    if explained is not None:
        data["explain"] = explained
    if fit is not None:
        memory = prediction.memory
        change = fit.effect
        data["infeasible"] = {
            "binding": "memory",
            "rank": memory.peak_rank,
            "over_bytes": memory.peak_bytes - memory.capacity_bytes,
            "nearest_change": change.change if change else None,
            "nearest_peak_bytes": change.prediction.memory.peak_bytes
            if change and change.prediction
            else None,
            "nearest_gain": change.gain if change else None,
            "changes": [
                {"change": one.change, "gain": one.gain, "peak_bytes": one.prediction.memory.peak_bytes}
                for one in fit.effects
                if one.prediction
            ],
            "largest": fit.binding,
            "tried": fit.num_tried,
        }
    return data


def _write_trace(path: str, prediction: Prediction, timeline: Timeline | None) -> None:
    from foreshard.report.trace import write_trace

    if timeline is None:
        raise SpecError(
            f"the {prediction.engine} engine has no tasks to trace",
            key="--trace",
            rule="A trace shows tasks",
            fix="Use --engine graph",
        )
    save(path, "trace", lambda: write_trace(path, prediction, timeline))


def _write_report(
    path: str,
    request: Request,
    prediction: Prediction,
    timeline: Timeline | None,
    advice: tuple[Effect, ...],
    fit: Fit | None,
) -> None:
    from foreshard.report.pages.prediction_page import page, page_data

    save_page(path, page(page_data(request, prediction, timeline, advice, fit)))


command = configurable(answering(describing_a_run(command)))
