"""`--to-target TASK|FILE` of `plan` and `predict`: whole runs to a loss or accuracy, over global batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.advise.request import Request
    from foreshard.advise.to_target import TargetRuns
    from foreshard.advise.traced_request import Asked
    from foreshard.catalog.targets import TargetCurve
    from foreshard.planner.result import PlanResult
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.model import Model
    from foreshard.spec.prediction import Prediction

to_target = click.option(
    "--to-target",
    metavar="TASK|FILE",
    help="Compare whole runs to a loss or accuracy over global batches (all, or the stated one): a task such "
    "as mlperf-resnet50, kaplan-lm:LOSS, or a file ('foreshard schema target').",
)


def curve_for(text: str, model: Model | None, seq_len: int | None, tokens: float | None) -> TargetCurve:
    """Return the curve of a task or file for samples of this length; `model` is None for a traced one."""
    from foreshard.catalog.targets import load_target

    if tokens is not None:
        rule, fix = "The target says how many samples the run needs", "Leave out one of the two"
        raise SpecError("--tokens together with --to-target", key="--tokens", rule=rule, fix=fix)
    blocks = None if model is None else float(sum(n * b.active_params for b, n in model.block_kinds()))
    return load_target(text, parameters=blocks).for_sequences(seq_len)


def batches_of(curve: TargetCurve, stated: int | None) -> tuple[int, ...]:
    """Return the stated batch alone, or those that the curve is known for."""
    return curve.candidates() if stated is None else (stated,)


def planned(
    curve: TargetCurve,
    search: Callable[[dict[str, Any]], tuple[PlanResult, Cluster]],
    asked: dict[str, Any],
    *,
    seq_len: int | None,
    stop: Callable[[], bool],
) -> TargetRuns[tuple[PlanResult, Cluster]]:
    """Return the best plans of each batch; the seconds of the search are shared evenly."""
    from foreshard.advise.to_target import over_batches

    batches = batches_of(curve, asked.get("global_batch"))
    share = {"budget_s": asked.get("budget_s", 60.0) / len(batches)}

    def ask(batch: int) -> tuple[Prediction | None, str, tuple[PlanResult, Cluster]]:
        tokens = {} if seq_len is None else {"tokens": float(curve.steps(batch) * batch * seq_len)}
        result, cluster = search({**asked, **share, **tokens, "global_batch": batch})
        why = "" if result.infeasible is None else str(result.infeasible)
        return result.plans[0].prediction if result.plans else None, why, (result, cluster)

    objective = asked.get("objective", ("time",))[0]
    return over_batches(curve, batches, ask, objective=objective, stop=stop)


def predicted_request(text: str, request: Asked) -> TargetRuns[Asked]:
    """Return the runs of a request at each batch; the answer is the request at the best one."""
    from foreshard.advise.request import Request
    from foreshard.advise.to_target import over_batches

    stated = request.choices.get("global_batch") if request.plan is None else request.plan.global_batch
    if isinstance(request, Request):
        curve, length = _curve_of(text, request)
    else:
        curve, length = curve_for(text, None, None, request.choices.get("tokens")), None

    def ask(batch: int) -> tuple[Prediction | None, str, Asked]:
        asked = request if request.plan is not None else request.with_choice("global_batch", batch)
        if isinstance(asked, Request):
            asked = replace(asked, tokens=float(curve.steps(batch) * batch * (length or 1)))
        return asked.predict(), "", asked

    return over_batches(curve, batches_of(curve, stated), ask)


def _curve_of(text: str, request: Request) -> tuple[TargetCurve, int]:
    """Return the curve of a task or file, and tokens of a sample."""
    length = request.choices.get("seq_len") if request.plan is None else request.plan.seq_len
    length = length or request.model.max_seq_len
    return curve_for(text, request.trained, length, request.tokens), length


def predicted(
    text: str, values: dict[str, Any], predict: Callable[[dict[str, Any]], Prediction]
) -> TargetRuns[Prediction]:
    """Return the predictions from measured costs at each batch."""
    from foreshard import api
    from foreshard.advise.to_target import over_batches

    curve = curve_for(text, None, values.get("seq_len"), values.get("tokens"))
    plan = values.get("plan")
    stated = api.load_plan(plan).global_batch if plan else values.get("global_batch")

    def ask(batch: int) -> tuple[Prediction | None, str, Prediction]:
        made = predict(values if plan else {**values, "global_batch": batch})
        return made, "", made

    return over_batches(curve, batches_of(curve, stated), ask)
