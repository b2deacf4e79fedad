"""`foreshard predict MODEL CLUSTER`: one prediction, its report and its trace."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from foreshard.advise.request import Request
from foreshard.cli.options import measured, target
from foreshard.cli.options.answer import NOTHING_FITS, give, save, save_page, say, wants_json
from foreshard.cli.options.request import describing_a_run, to_request, traced_request_of, warn_of_offers
from foreshard.cli.options.sources import verb_command
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.advise.nearest_fit import Fit
    from foreshard.advise.to_target import TargetRuns
    from foreshard.advise.traced_request import Asked
    from foreshard.report.screen import Screen
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.timeline import Timeline


@verb_command("predict", describing_a_run)
@click.option("--trace", metavar="OUT.json.gz", help="Write a Chrome/Perfetto trace of the step.")
@click.option("--report", metavar="OUT.html", help="Write a one-file HTML report.")
@click.option(
    "--other-jobs",
    metavar="FILE",
    help="With --network flow: jobs on other ranks that share links and NICs, as 'comm jobs' takes them.",
)
@click.option(
    "--bursts", is_flag=True, help="With --other-jobs, --engine event: they send in bursts, not evenly."
)
@click.option(
    "--forward-only", is_flag=True, help="Of a traced module: a forward in evaluation, without an update."
)
@click.option("--explain", is_flag=True, help="Show formula and source of each number, and every assumption.")
@target.to_target
@click.pass_context
def command(
    ctx: click.Context,
    /,
    trace: str | None,
    report: str | None,
    explain: bool,
    to_target: str | None,
    other_jobs: str | None,
    bursts: bool,
    **values: Any,
) -> None:
    """Predict one training step of MODEL on CLUSTER: time, memory, cost, each in parts that sum.

    \b
    foreshard predict llama3-8b 2x8xh100-sxm --tp 2 --pp 2 --global-batch 512
    foreshard predict config.json cluster.toml --plan plan.json --report report.html
    foreshard predict job.py lab.toml --costs costs.json --plan plan.json
    foreshard predict llama3-8b 2x8xh100-sxm --tp 2 --to-target kaplan-lm:2.4
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    if measured.is_file(values.get("costs")):
        others = {name: path for name, path in (("trace", trace), ("report", report)) if path}
        _refuse_other_jobs(other_jobs, bursts, "measured costs")
        _answer_measured(ctx, values, to_target, others, explain)
        return
    request, runs = _request_of(values, other_jobs, bursts), None
    if to_target is not None:
        runs = target.predicted_request(to_target, request)
        request = runs.answer
    timeline, advice, fit, explained = None, None, None, None
    if trace or report:
        prediction, timeline = request.predict_timeline()
    else:
        prediction = request.predict()
    if isinstance(request, Request):
        warn_of_offers(request, prediction.plan)
    if not prediction.memory.fits:
        from foreshard.advise.nearest_fit import nearest_fit

        fit = nearest_fit(request, prediction)
    elif report or (isinstance(request, Request) and not wants_json() and other_jobs is None):
        from foreshard.advise.advice import improvements

        advice = improvements(request, prediction)
    if trace:
        _write_trace(trace, prediction, timeline)
    if report:
        from foreshard.report.pages.prediction_page import page, page_data

        save_page(report, page(page_data(request, prediction, timeline, advice or (), fit)))
    if explain:
        from foreshard.report.explain_screen import explanations

        explained = explanations(request, prediction)

    def screen() -> Screen:
        from foreshard.advise.group_times import group_times
        from foreshard.report.summary import prediction_screen
        from foreshard.report.target_table import with_target

        times = group_times(request, prediction.plan)
        return with_target(prediction_screen(prediction, advice, explained, times), runs)

    give(_object(prediction, fit, explained) | _target_object(runs), screen)
    if fit is not None:
        from foreshard.advise.nearest_fit import verdict

        say(f"foreshard: {verdict(prediction, fit)}")
        ctx.exit(NOTHING_FITS)


def _request_of(values: dict[str, Any], other_jobs: str | None, bursts: bool) -> Asked:
    """Return what is asked of a traced module or a model of the catalog, with the jobs beside it."""
    traced = traced_request_of(values)
    if traced is not None:
        _refuse_other_jobs(other_jobs, bursts, "a traced module")
        return traced
    if values.pop("forward_only"):
        rule = "A forward alone is of operations as they are traced"
        fix = "Leave it out, or name a network ('foreshard models') or module.py:factory"
        raise SpecError("a forward alone of a model of layers", key="--forward-only", rule=rule, fix=fix)
    request = to_request(values)
    if other_jobs is not None:
        from foreshard.cli.comm.jobs import jobs_beside

        request = replace(request, other_jobs=jobs_beside(other_jobs, request.cluster))
    return replace(request, bursts=bursts)


def _answer_measured(
    ctx: click.Context, values: dict[str, Any], to_target: str | None, others: dict[str, str], explain: bool
) -> None:
    """Answer from measured costs, of which there is no advice, and no formula."""
    from foreshard.report.summary import prediction_screen
    from foreshard.report.target_table import with_target

    def predict(stated: dict[str, Any]) -> Prediction:
        return measured.predict(stated, others)

    runs = None if to_target is None else target.predicted(to_target, values, predict)
    prediction = predict(values) if runs is None else runs.answer
    data = {"schema_version": 1} | prediction.to_dict() | _target_object(runs)
    explained: dict[str, str] | None = {} if explain else None
    give(data, lambda: with_target(prediction_screen(prediction, None, explained, ()), runs))
    if not prediction.memory.fits:
        ctx.exit(NOTHING_FITS)


def _target_object(runs: TargetRuns[Any] | None) -> dict[str, Any]:
    return {} if runs is None else {"to_target": runs.to_dict()}


def _object(prediction: Prediction, fit: Fit | None, explained: dict[str, str] | None) -> dict[str, Any]:
    """Return the contract's object; a run that does not fit also says by how much and what would."""
    data = {"schema_version": prediction.schema_version} | prediction.to_dict()
    if explained is not None:
        data["explain"] = explained
    if fit is not None:
        memory = prediction.memory
        changes = [
            {"change": effect.change, "gain": effect.gain, "peak_bytes": effect.prediction.memory.peak_bytes}
            for effect in fit.effects
            if effect.prediction
        ]
        data["infeasible"] = {
            "binding": "memory",
            "rank": memory.peak_rank,
            "over_bytes": memory.peak_bytes - memory.capacity_bytes,
            "nearest_change": changes[0]["change"] if changes else None,
            "nearest_peak_bytes": changes[0]["peak_bytes"] if changes else None,
            "nearest_gain": changes[0]["gain"] if changes else None,
            "changes": changes,
            "largest": fit.binding,
            "tried": fit.num_tried,
        }
    return data


def _refuse_other_jobs(file: str | None, bursts: bool, what: str) -> None:
    if file is not None or bursts:
        key = "--bursts" if file is None else "--other-jobs"
        rule = "Jobs share the network of a step whose transfers are tasks with bytes"
        fix = "Leave it out, or predict a model of the catalog with --network flow"
        raise SpecError(f"other jobs beside {what}", key=key, value=file, rule=rule, fix=fix)


def _write_trace(path: str, prediction: Prediction, timeline: Timeline | None) -> None:
    from foreshard.report.trace import write_trace

    if timeline is None:
        what = f"the {prediction.engine} engine has no tasks to trace"
        raise SpecError(what, key="--trace", rule="A trace shows tasks", fix="Use --engine graph")
    save(path, "trace", lambda: write_trace(path, prediction, timeline))
