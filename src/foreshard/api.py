"""The public names: load a model, a cluster and a plan, predict, ask what if, write what people look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from foreshard import __all__ as PUBLIC_NAMES
from foreshard.advise import traced_request
from foreshard.advise.arguments import (
    NamedCluster,
    NamedModel,
    NamedPlan,
    named_cluster,
    named_model,
    named_plan,
    plain,
)
from foreshard.advise.change import Effect, effects_of
from foreshard.advise.request import ASKED, DEGREES, Request, unstated_precision
from foreshard.advise.traced_request import Asked, TracedRequest
from foreshard.catalog.frameworks import load_framework
from foreshard.errors import SpecError, unknown
from foreshard.file_replacement import replace_file
from foreshard.interop.exporters.exported import Exported
from foreshard.option_names import option_name, switch
from foreshard.planner.result import PlanResult
from foreshard.predict.measured.traced_step import plan_of, predict_traced
from foreshard.profile.networks.catalog import is_traced, near_networks, network_name
from foreshard.profile.networks.traced_network import trace_network
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import AUTO, Plan
from foreshard.spec.plan_file import load_plan as _load_plan
from foreshard.spec.prediction import Prediction
from foreshard.spec.shown import show_with
from foreshard.spec.timeline import Timeline
from foreshard.spec.variation import Noise, Reliability
from foreshard.units import amount, count, num_tokens, parse
from foreshard.words import zero_level

if TYPE_CHECKING:
    from foreshard.catalog.prices import Prices
    from foreshard.catalog.training import Calibration
    from foreshard.planner.rental import RentResult
    from foreshard.profile.step_table import StepRow
    from foreshard.profile.traced_calibration import TimedModule
    from foreshard.simulate.evaluation import Evaluation
    from foreshard.spec.scenario import Scenario
    from foreshard.spec.traced_module import TracedModule

ESTIMATED = ("slurm", "skypilot")  # exports that state how long the run takes
__all__ = [name for name in PUBLIC_NAMES if name != "__version__"]


def load_model(text: str) -> Model:
    """Return the model a catalog name, the path of an HF ``config.json`` or ``module.py:factory`` names.

    Raises
    ------
    SpecError
        For an unknown name or architecture, with what is known, and for a network that is traced.
    """
    from foreshard.catalog.models import TRACED_FIX, WHERE_TRACED, load_model

    try:
        return load_model(text)
    except SpecError as error:
        near = near_networks(str(text))
        if error.fix and error.fix.startswith("See ") and near:
            error.fix = f"Did you mean {' or '.join(map(repr, near))}?"
        if not network_name(str(text)):
            raise
        what = f"{text} is a network that is traced"
        raise SpecError(what, key="model", value=str(text), rule=WHERE_TRACED, fix=TRACED_FIX) from None


def load_cluster(text: str) -> Cluster:
    """Return the cluster a catalog name, a TOML path or a shorthand such as ``8x8xh100-sxm`` names."""
    from foreshard.catalog.clusters import load_cluster

    return load_cluster(text)


def _view(kind: str, result: Any) -> Any:
    """Return how a result shows itself in a session."""
    from foreshard.report.notebook import view

    return view(kind, result)


show_with(_view)


def _loaded(model: NamedModel, cluster: NamedCluster) -> tuple[Model, Cluster]:
    """Return a model and a cluster, those that were named loaded."""
    named = named_model(model)
    return load_model(named) if isinstance(named, str) else named, named_cluster(cluster)


def _prices(prices: Prices | str | os.PathLike[str]) -> Prices:
    from foreshard.catalog.prices import load_prices

    return load_prices(os.fspath(prices)) if isinstance(prices, str | os.PathLike) else prices


BY_FLAG = {
    "dtype": "precision",
    "seq": "seq_len",
    "set": "overrides",
    "checkpoint_every": "checkpoint_every_s",
    "checkpoint_bandwidth": "checkpoint_bytes_per_s",
}
"""Options that the command line names otherwise; Python takes both names, and those of other tools."""


_COUNTED = (
    *(*DEGREES, *(f"max_{name}" for name in DEGREES)),
    *("zero", "shard_size", "micro_batch", "global_batch", "max_devices", "top"),
)
_PARTS = ("jitter", "memory_margin")
_AMOUNTS = {
    "tokens": ("tokens", None),
    "max_usd": ("usd", "USD"),
    "usd_per_device_hour": ("usd_per_h", "USD/h"),
    **dict.fromkeys(("max_hours", "mtbf_h", "node_mtbf_h"), ("s", "h")),
    **dict.fromkeys(("budget_s", "observed_step_s", "restart_s"), ("s", "s")),
    **dict.fromkeys(("checkpoint_s", "checkpoint_every_s"), ("s", "s")),
    "checkpoint_bytes_per_s": ("bytes_per_s", "B/s"),
    "loader_tokens_per_s": ("tokens", None),
}
"""Dimension of options that are no whole numbers, and what a number of one is in."""


def _of_text(name: str, value: Any) -> Any:
    """Return the number that a text of an option means, as the command line reads it; else the value.

    Adapters are a text, of which a number is the rank.
    """
    if name == "forbid" and isinstance(value, str):
        return (value,)
    if not isinstance(value, str):
        return str(value) if name == "lora" and isinstance(value, int) else value
    if name in _PARTS and value.strip().endswith("%"):
        part = count(value.strip()[:-1], thousand=1000)
        return value if part is None else part / 100.0
    if name == "buckets" and value.strip().lower() != AUTO:
        return int(parse(value, "bytes"))
    if name in _AMOUNTS:
        read = amount(value, *_AMOUNTS[name])
        return value if read is None else read
    level = zero_level(value) if name == "zero" else None
    if level is not None or name not in (*_COUNTED, "seq_len"):
        return value if level is None else level
    number = num_tokens(value, thousand=1024) if name == "seq_len" else count(value)
    return value if number is None or number != int(number) else int(number)


def _named(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their names in Python, numbers written as on the command line as numbers."""
    found: dict[str, Any] = {}
    stated: dict[str, str] = {}
    for name, value in choices.items():
        word, value = switch(option_name(name), plain(value))
        word = word.replace("-", "_")
        ours = BY_FLAG.get(word, word)
        if ours in found:
            what = f"{' and '.join(sorted((stated[ours], name)))} together"
            rule, fix = "They are two names of one option", "Leave out one"
            raise SpecError(what, key=name, value=value, rule=rule, fix=fix)
        found[ours], stated[ours] = _of_text(ours, value), name
    return found


def request(
    model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None = None, **choices: Any
) -> Request:
    """Return the request that `predict` and the other verbs take apart.

    Parameters
    ----------
    model : Model, str or mapping
        As for `load_model`, or what a ``config.json`` holds.
    cluster : Cluster or str
        As for `load_cluster`.
    plan : Plan or str, optional
        Excludes degrees and options; a text is the path of a plan file.
    **choices
        Degrees and options (tp, pp, zero, micro_batch, dtype, seq, tp_overlap, ...), lora, engine, costs,
        fidelity, tokens, usd_per_device_hour, observed_step_s, prices (a file of them); plan_file names the
        plan in errors. The fields of `spec.variation.Noise` (jitter=0.03, slow={12: 1.5}, seeds=64) and of
        `spec.variation.Reliability` (mtbf_h, restart_s, checkpoint_bytes_per_s) by their names.
    """
    stated = {name: value for name, value in _named(choices).items() if value is not None}
    stated |= _cost_source(stated.pop("costs", None))
    asked = {name: stated.pop(name) for name in (*ASKED, "lora", "plan_file") if name in stated}
    noise, reliability = (
        {one.name: stated.pop(one.name) for one in fields(kind) if one.name in stated}
        for kind in (Noise, Reliability)
    )
    if noise:
        asked["noise"] = Noise.stated(noise)
    if reliability:
        asked["reliability"] = Reliability(**reliability)
    stated_plan, file = (None, None) if plan is None else named_plan(plan, load_plan)
    if file is not None:
        asked = {"plan_file": file, **asked}
    source, target = _loaded(model, cluster)
    if "prices" in stated:
        asked["prices"] = _prices(stated.pop("prices"))
        target = asked["prices"].on(target)
    return Request(model=source, cluster=target, plan=stated_plan, choices=stated, **asked)


_TABLES = (".csv", ".csv.gz")


def is_costs_file(costs: str | None) -> bool:
    """Return whether a cost source is a file rather than a name."""
    return costs is not None and ("/" in costs or costs.endswith((".json", *_TABLES)))


def costs_kind(path: str) -> str:
    """Return what a costs file says that it is, empty where it says nothing."""
    if path.endswith(_TABLES):
        return KERNEL_TABLE
    from foreshard.spec.codec import parse_json, read_text

    data = parse_json(read_text(path), file=path)
    return str(data.get("kind", "")) if isinstance(data, dict) else ""


KERNEL_TABLE = "kernel table"


def _cost_source(costs: Any) -> dict[str, Any]:
    """Return the options of a prediction that a cost source means: a name, or what its file holds."""
    if costs is None:
        return {}
    if not isinstance(costs, str) or not is_costs_file(costs):
        return {"costs": costs}
    from foreshard.catalog.training import CALIBRATED, load_calibration

    kind = costs_kind(costs)
    if kind == KERNEL_TABLE:
        from foreshard.cost.tables import load_tables

        return {"costs": load_tables(costs)}
    if kind == CALIBRATED:
        return {"calibration": load_calibration(costs)}
    what = f"a file of {kind or 'no stated kind'}"
    rule = f"Models of the catalog take {CALIBRATED} and tables of kernels; layers price their own job"
    fix = "Make it with foreshard calibrate --steps, or use predict_measured"
    raise SpecError(what, file=costs, key="costs", value=costs, rule=rule, fix=fix)


def load_plan(path: str) -> Plan:
    """Return the plan stored in a JSON file: a plan, or an answer of `predict` or `plan` that holds one.

    A bare `selective` as recompute rule means what the plan's framework means by the word.

    Raises
    ------
    SpecError
        When the file cannot be read, is no JSON, or describes no plan.
    """
    try:
        return _load_plan(path, selective=_selective_under)
    except SpecError as error:
        error.fix = _how_to_import(path) or error.fix
        raise


def _how_to_import(path: str) -> str | None:
    """Return how the configuration of another tool becomes a plan, None where a file is none."""
    from foreshard.interop.importers import tool_of
    from foreshard.spec.codec import read_text

    try:
        tool = tool_of(read_text(path))
    except SpecError:
        return None
    how = f"'foreshard import {path} MODEL CLUSTER --from {tool} -o plan.json' makes a plan of it"
    return None if tool is None else f"It configures {tool}: {how}"


def _selective_under(framework: str) -> str:
    """Return what a framework means by selective; one that is not known is told of with the plan's rules."""
    try:
        return load_framework(framework).recompute("selective")
    except SpecError:
        return "selective"


def make_plan(model: NamedModel, cluster: NamedCluster, **choices: Any) -> Plan:
    """Return the plan that degrees and options spell for the model on the cluster."""
    return request(model, cluster, **choices).to_plan()


def predict(
    model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None = None, **choices: Any
) -> Prediction:
    """Return the predicted training step: time, memory, money, each in parts that sum to the whole.

    Parameters
    ----------
    model : Model or str
        Also what is traced: the name of a network, or ``module.py:factory`` (:func:`trace`).
    cluster : Cluster or str
    plan : Plan or str, optional
        Excludes degrees and options.
    **choices
        As in `request`.

    Returns
    -------
    Prediction
        It prints as a short text, in notebooks as tables; `to_dict`, `to_pandas` and `plot` give the rest.

    Raises
    ------
    SpecError
        When the plan does not fit the model or the cluster.

    Examples
    --------
    >>> prediction = predict("llama3-8b", "8xh100", tp=2)
    >>> prediction.plan.groups[0].stages[0].tp
    2
    """
    return _asked(model, cluster, plan, choices).predict()


def request_traced(
    model: str, cluster: NamedCluster, plan: Plan | None, stated: Mapping[str, Any]
) -> TracedRequest | None:
    """Return a request for a traced module, None for a model that is not traced.

    Parameters
    ----------
    model : str
        As for :func:`trace`, which is asked once for each precision and set of degrees.
    cluster : Cluster or str
    plan : Plan or None
        Excludes degrees and options in `stated`.
    stated : mapping
        Degrees and options by the names of `advise.traced_request.PREDICTS`.
    """
    if not is_traced(model):
        return None
    training = not stated.get("forward_only")
    made: dict[tuple[str, tuple[int, ...]], TracedModule | None] = {}

    def traced(precision: str, degrees: tuple[int, ...]) -> Any:
        if (precision, degrees) not in made:
            made[precision, degrees] = trace(model, precision=precision, degrees=degrees, training=training)
        return made[precision, degrees]

    stated = _with_calibration(stated)
    on = named_cluster(cluster)
    as_stated = traced_request.traced_as(plan, on, stated)
    if traced(as_stated["precision"], tuple(sorted(as_stated["degrees"]))) is None:
        return None
    prices = None if stated.get("prices") is None else _prices(stated["prices"])
    return TracedRequest(
        trace=traced,
        predicted=predict_trace,
        cluster=on if prices is None else prices.on(on),
        choices={name: value for name, value in stated.items() if name != "prices"},
        plan=plan,
        prices=prices,
    )


def _with_calibration(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stated of a traced module, with a file of calibrated constants read."""
    from foreshard.catalog.training import CALIBRATED, load_calibration

    costs = stated.get("costs")
    if not isinstance(costs, str) or not is_costs_file(costs) or costs_kind(costs) != CALIBRATED:
        return dict(stated)
    return {**stated, "costs": None, "calibration": load_calibration(costs)}


def _asked(
    model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None, choices: Mapping[str, Any]
) -> Asked:
    """Return a request for what is traced or a model, of arguments as users of Python write them."""
    named, traced = named_model(model), None
    if isinstance(named, str) and is_traced(named):
        given = None if plan is None else named_plan(plan, load_plan)[0]
        traced = request_traced(named, cluster, given, _named(choices))
    return traced or request(model, cluster, plan, **choices)


def predict_trace(
    module: TracedModule, cluster: NamedCluster, plan: Plan | None, stated: Mapping[str, Any]
) -> Prediction:
    """Return the prediction of a traced module under a plan, or else under stated degrees and options."""
    traced_request.check_predicts(stated)
    on = named_cluster(cluster)
    on = on.at_usd_per_device_hour(stated.get("usd_per_device_hour"))
    made = predict_traced(
        module,
        on,
        plan or plan_of(module, on, stated),
        fidelity=stated.get("fidelity") or "zero-shot",
        engine=stated.get("engine") or "graph",
        noise=Noise.stated(stated),
        **{name: stated.get(name) for name in ("tokens", "speeds", "observed_step_s", "calibration")},
    )
    defaults = unstated_precision(made.plan, stated) if plan is None else ()
    return replace(made, assumptions=(*made.assumptions, *defaults))


def predict_timeline(
    model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None = None, **choices: Any
) -> tuple[Prediction, Timeline | None]:
    """Return the prediction and when each task of its step runs (None from the analytical engine)."""
    return _asked(model, cluster, plan, choices).predict_timeline()


def compare(
    model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None = None, **choices: Any
) -> tuple[Prediction, ...]:
    """Return the same run under every engine and cost source."""
    return _asked(model, cluster, plan, choices).compare()


def whatif(
    model: NamedModel,
    cluster: NamedCluster,
    changes: Iterable[str] | str,
    plan: NamedPlan | None = None,
    **choices: Any,
) -> tuple[Prediction, tuple[Effect, ...]]:
    """Return the base prediction and the effect of each ``KEY=VALUE`` change on it, best first."""
    return effects_of(_asked(model, cluster, plan, choices), changes)


def advise(
    model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None = None, *, top: int = 5, **choices: Any
) -> tuple[Effect, ...]:
    """Return the single changes that would win the most time."""
    from foreshard.advise.advice import improvements

    asked = _asked(model, cluster, plan, choices)
    return improvements(asked, asked.predict(), top=top)


def report(
    path: str, model: NamedModel, cluster: NamedCluster, plan: NamedPlan | None = None, **choices: Any
) -> Prediction:
    """Predict, write the one-file HTML report, and return the prediction."""
    from foreshard.advise.advice import improvements
    from foreshard.advise.nearest_fit import nearest_fit
    from foreshard.report.pages.prediction_page import page, page_data

    asked = _asked(model, cluster, plan, choices)
    prediction, timeline = asked.predict_timeline()
    fits = prediction.memory.fits
    advice = improvements(asked, prediction) if fits else ()
    fit = None if fits else nearest_fit(asked, prediction)
    replace_file(path, page(page_data(asked, prediction, timeline, advice, fit)))
    return prediction


def write_trace(path: str, prediction: Prediction, timeline: Timeline) -> int:
    """Write the step as a Chrome/Perfetto trace (gzip) and return its size in bytes."""
    from foreshard.report.trace import write_trace

    return write_trace(path, prediction, timeline)


def export(
    plan: NamedPlan,
    target: str,
    *,
    model: Model | TracedModule | str | os.PathLike[str] | None = None,
    cluster: NamedCluster | None = None,
    tokens: float | None = None,
    plan_file: str | None = None,
) -> Exported:
    """Return the plan as files of another tool, with notes on what they do not state.

    Parameters
    ----------
    plan : Plan or str
        A text is the path of a plan file.
    target : str
        megatron, torchtitan@0.2, torchtitan@0.3, deepspeed, fsdp, nccl, msccl, slurm or skypilot.
    model : Model, TracedModule or str, optional
        The plan is checked against it, and against the cluster when there is one. A traced module goes to
        fsdp, which writes Python for it.
    cluster : Cluster or str, optional
        Needed by slurm, skypilot and nccl.
    tokens : float, optional
        Of the whole run; with model and cluster the run is predicted for time limit and price.
    plan_file : str, optional
        Names the plan in errors.

    Raises
    ------
    SpecError
        When the target cannot express the plan, with every reason.
    """
    from foreshard.interop.exporters import export
    from foreshard.spec.checks import check_cut, check_plan

    stated, file = named_plan(plan, load_plan)
    plan_file = plan_file or file
    if isinstance(model, str | os.PathLike):
        name, degrees = str(model), {stage.tp for group in stated.groups for stage in group.stages}
        model = trace(name, precision=stated.precision, degrees=degrees) or load_model(name)
    on = None if cluster is None else named_cluster(cluster)
    prediction = None
    if not (model is None or isinstance(model, Model)):
        if on is not None:
            prediction = predict_traced(model, on, stated, tokens=tokens)
        return export(stated, target, traced=model, cluster=on, prediction=prediction)
    if model is not None and on is None:
        check_cut(stated, model, file=plan_file)
    if model is not None and on is not None:
        check_plan(stated, model, on, file=plan_file)
        if target in ESTIMATED:
            prediction = predict(model, on, stated, tokens=tokens)
    return export(stated, target, model=model, cluster=on, prediction=prediction)


def import_plan(
    file: str, source: str | None, model: NamedModel, cluster: NamedCluster, **stated: Any
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of the run that another tool's configuration states, and notes on it.

    Parameters
    ----------
    file : str
        Path of the configuration.
    source : str, optional
        megatron, torchtitan, deepspeed, accelerate or fsdp; None: the one whose words the file has.
    model : Model or str
    cluster : Cluster or str
    **stated
        Degrees and options as in `request`; they replace those of the file.

    Raises
    ------
    SpecError
        When the file is not one of the tool's, or sets what a plan cannot express.
    """
    from foreshard.interop.importers import read_run, stated_tool
    from foreshard.interop.importers.planned import plan_of
    from foreshard.spec.codec import read_text

    known_model, known_cluster = _loaded(model, cluster)
    text = read_text(file)
    run = read_run(text, source or stated_tool(text, str(file)), str(file))
    return plan_of(run, known_model, known_cluster, stated, str(file))


@overload
def plan(model: NamedModel, cluster: NamedCluster, **asked: Any) -> PlanResult: ...


@overload
def plan(model: NamedModel, *, rent: str | Sequence[str], **asked: Any) -> RentResult: ...


def plan(
    model: NamedModel,
    cluster: NamedCluster | None = None,
    *,
    rent: str | Sequence[str] | None = None,
    **asked: Any,
) -> PlanResult | RentResult:
    """Return the best plans for a model on a cluster, and how far they can be from the best possible.

    Parameters
    ----------
    model : Model or str
    cluster : Cluster or str
    rent : str or sequence of str, optional
        In place of `cluster`: ``all``, or vendors whose instances are compared, for a run of `tokens`.
    asked
        global_batch (required), seq_len, objective, max_usd, max_hours, tokens, max_devices, framework,
        precision, optimizer, engine, top, budget_s, usd_per_device_hour, lora, and degrees or options as a
        value or several (tp=4, recompute="none", max_pp=2, forbid=["tp=8"]). to names the tool that shall
        train the plan, as `export` does; then only plans that it trains as predicted are searched.

    Returns
    -------
    PlanResult or RentResult
        Plans best first, a lower bound and the gap; without plans, `infeasible` says why. With `rent` offers,
        each an instance, a number of nodes and the best plan on them.

    Raises
    ------
    SpecError
        For bad input.
    """
    from foreshard.planner.search import plan

    asked = _named(asked)
    if rent is not None:
        return _rented(model, cluster, rent, asked)
    if cluster is None:
        rule = "A plan is for a cluster, or for one to be rented"
        fix = "Name a cluster after the model, or give --rent"
        raise SpecError("no cluster", key="CLUSTER", rule=rule, fix=fix)
    named = named_model(model)
    if isinstance(named, str) and is_traced(named):
        on = named_cluster(cluster)
        module = trace(named, **traced_request.searched_as(on, asked))
        if module is not None:
            return plan_trace(module, on, asked)
    source, target = _loaded(model, cluster)
    tool = asked.pop("to", None)
    if tool is not None:
        asked = _for_tool(tool, asked, source, target)
    asked |= _cost_source(asked.pop("costs", None))
    prices = asked.pop("prices", None)
    result = plan(source, target if prices is None else _prices(prices).on(target), **asked)
    return _with_gaps(result, source, target) if tool is None else result


def _rented(
    model: NamedModel, cluster: NamedCluster | None, vendors: str | Sequence[str], asked: dict[str, Any]
) -> RentResult:
    """Return which instances of some vendors, or of all, to rent."""
    from foreshard.planner.rental import rent

    if cluster is not None:
        rule, fix = "Renting compares clusters, CLUSTER is one", "Leave out the cluster, or --rent"
        raise SpecError("--rent together with CLUSTER", key="CLUSTER", rule=rule, fix=fix)
    if asked.get("tokens") is None:
        what = "renting without the length of the run"
        raise SpecError(
            what, key="--tokens", rule="Time and price of the run follow from its tokens", fix="Give --tokens"
        )
    named = vendors.split(",") if isinstance(vendors, str) else list(vendors)
    if named != ["all"]:
        asked["vendors"] = [name.strip() for name in named]
    if asked.get("prices") is not None:
        asked["usd_per_h"] = _prices(asked.pop("prices")).of_rental()
    source = named_model(model)
    return rent(load_model(source) if isinstance(source, str) else source, **asked)


def plan_trace(module: TracedModule, cluster: Cluster, asked: Mapping[str, Any]) -> PlanResult:
    """Return the best plans for a traced module, by options as of `plan`: `plan_measured` on its costs."""
    from functools import partial

    from foreshard.planner.measured.plans import plan_measured as planned
    from foreshard.predict.measured.traced import traced_costs
    from foreshard.spec.codec import whole

    asked = _with_calibration(asked)
    traced_request.check_plans(asked)
    kept = {name: asked[name] for name in ("optimizer", "top", "budget_s") if asked.get(name) is not None}
    batch = whole(asked.get("global_batch"), key="--global-batch", name="global-batch")
    on = cluster if asked.get("prices") is None else _prices(asked["prices"]).on(cluster)
    on = on.at_usd_per_device_hour(asked.get("usd_per_device_hour"))
    calibration: Calibration | None = asked.get("calibration")
    costs = traced_costs(
        module,
        [nodes.device for nodes in on.nodes],
        micro_batches=(1, max(2, min(batch, 128))),
        optimizer=kept.get("optimizer", "adamw"),
        slower=None if calibration is None else calibration.of_operations,
    )
    return planned(
        costs,
        on,
        global_batch=batch,
        seq_len=1,
        precision=module.precision,
        predicted=partial(predict_traced, module, on, calibration=calibration),
        **kept,
    )


def _for_tool(tool: str, asked: Mapping[str, Any], model: Model, cluster: Cluster) -> dict[str, Any]:
    """Return what is asked of a search for plans that a tool trains: its degrees, and why it refuses one."""
    from functools import partial

    from foreshard.interop.exporters import (
        TRAINERS,
        model_refusals,
        refusals,
        settings_instead,
        target_of,
        trains,
    )
    from foreshard.interop.exporters.exported import InexpressibleError
    from foreshard.spec.framework import checked_overrides

    target = target_of(tool)
    if target not in TRAINERS:
        raise unknown("tool", tool, TRAINERS, key="--to", rule="Tools that train a plan are")
    if asked.get("framework") is not None and not trains(target, asked["framework"]):
        what = f"a plan of {asked['framework']} for {tool}"
        rule = f"{tool} trains in the time and memory of {TRAINERS[target].runs or 'megatron-core'}"
        fix = "Leave --framework out, or --to"
        raise SpecError(what, key="--framework", value=asked["framework"], rule=rule, fix=fix)
    reasons = model_refusals(model, target)
    if asked.get("lora") is not None:
        reasons = (*reasons, f"adapters (lora {asked['lora']})")
    if reasons:
        fix = "Leave --to out, or name another tool"
        raise InexpressibleError(target, reasons, fix=fix)
    runs = TRAINERS[target].runs
    framework = {} if runs is None else {"framework": runs}
    refuses = partial(refusals, target=target, model=model, cluster=cluster)
    stated = checked_overrides(asked.get("overrides")).stated()
    overrides = settings_instead(target, asked.get("framework")) | stated
    found = {**TRAINERS[target].choices, **framework, **asked, "tool": tool, "refusals": refuses}
    return found | ({"overrides": overrides} if overrides else {})


def _with_gaps(result: PlanResult, model: Model, cluster: Cluster) -> PlanResult:
    """Return the result with a note where the tool of its framework cannot train the chosen plan."""
    from foreshard.interop.exporters import model_refusals, refusals, target_for, target_of

    chosen = result.plans[0].plan if result.plans else None
    target = None if chosen is None else target_for(chosen.framework)
    if chosen is None or target is None or chosen.lora is not None:
        return result
    reasons = refusals(chosen, target, model=model, cluster=cluster)
    if not reasons:
        return result
    note = f"{target} cannot train the chosen plan: {'; '.join(reasons)}. foreshard run can"
    if len(cluster.nodes) == 1 and not model_refusals(model, target_of(target)):
        note += f", and plan --to {target} finds the best that {target} can"
    return replace(result, notes=(*result.notes, note))


def simulate(
    scenario: str | os.PathLike[str] | Scenario,
    *,
    policies: Iterable[str] | None = None,
    policy: str | None = None,
    seeds: int = 1,
    slots: int | None = None,
) -> Evaluation:
    """Return how policies fare against a changing cluster, beside the clairvoyant bound.

    Parameters
    ----------
    scenario : str or Scenario
        Path of a TOML file (`foreshard schema scenario`).
    policies : iterable of str, optional
        Of `simulate.evaluation.POLICIES`; all by default.
    policy : str, optional
        The same as the flag states it, with commas between them.
    seeds, slots : int
        Paths, and slots of each; the scenario's slots by default.
    """
    from foreshard.simulate.evaluation import evaluate_policies
    from foreshard.spec.scenario import load_scenario

    found = load_scenario(os.fspath(scenario)) if isinstance(scenario, str | os.PathLike) else scenario
    chosen = policies if policy is None else policy.split(",")
    return evaluate_policies(
        found, policies=None if chosen is None else tuple(chosen), seeds=seeds, slots=slots
    )


def is_lab(path: str) -> bool:
    """Return whether a TOML file describes a lab rather than a cluster or a scenario."""
    from foreshard.spec.codec import parse_toml, read_text

    return "ranks" in parse_toml(read_text(path), file=path)


def _lab_or_cluster(text: str) -> Cluster:
    """Return the cluster of a file or name; a lab's TOML is one too."""
    if text.endswith(".toml") and is_lab(text):
        from foreshard.lab.lab import load_lab

        return load_lab(text).cluster()
    return load_cluster(text)


def profile(
    job: str,
    out: str,
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    tp: Sequence[int] = (),
    **options: Any,
) -> dict[str, Any] | None:
    """Time a job's layers here, and the links between ranks; write the profile to `out` and return it.

    Parameters
    ----------
    job : str
        Path of the job's file.
    out : str
        An unfinished profile there is continued.
    seed : int
    tell : callable of text
        Progress.
    tp : sequence of int
        Degrees of tensor parallelism: a rank's part of the layers is timed too.
    **options
        As of :func:`foreshard.profile.record.record`: device, samples, repeats, local, links, threads.

    Returns
    -------
    dict or None
        None for those ranks of torchrun that wrote nothing.
    """
    from functools import partial

    from foreshard.profile.record import record
    from foreshard.runtime.engine.executor import through
    from foreshard.runtime.job.job import load_job
    from foreshard.runtime.tensor.single_rank import TensorPart

    made = load_job(job, seed=seed)
    parts = {degree: partial(TensorPart, made, degree, options.get("device", "cpu")) for degree in tp}
    return record(made, out=Path(out), through=through, tell=tell, parts=parts, **options)


def profile_kernels(
    out: str,
    *,
    device: str = "cpu",
    dtype: str = "fp32",
    kernels: Sequence[str] = (),
    sizes: Sequence[int] = (),
    repeats: int = 15,
    threads: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time kernels here into a table that ``--costs`` takes; one that was begun here goes on.

    Parameters
    ----------
    out : str
        A `.csv` file.
    device : {'cpu', 'cuda'}
    dtype : {'fp32', 'bf16', 'fp16', 'fp8'}
    kernels : sequence of {'product', 'experts', 'attention', 'stream'}
        Which kinds; all of them by default, in fp8 products.
    sizes : sequence of int
        Rows, columns and inner sizes of products; those of `profile.kernel_times.SIZES` by default.
    repeats, threads : int
    tell : callable of text
        Progress.
    """
    from foreshard.profile.kernel_times import bench_on, kernels_of, time_kernels

    bench, asked = bench_on(device, dtype, threads), kernels_of(kernels, device, sizes, dtype)
    timed = time_kernels(bench, Path(out), asked, dtype=dtype, repeats=repeats, tell=tell)
    return {
        "schema_version": 1,
        "device": bench.name,
        "dtype": dtype,
        "timed": timed,
        "rows": len(asked),
        "file": out,
    }


def calibrate(
    profiles: Mapping[str, str],
    *,
    lab: str | None = None,
    devices: Mapping[str, float] | None = None,
    clock: str | None = None,
) -> dict[str, Any]:
    """Return costs fitted to profiles: the object that a costs file holds.

    Parameters
    ----------
    profiles : mapping of device name to path
        The same job on each device; the name may be empty for the first.
    lab : str, optional
        Test bed whose devices are the first profile's, slower, on links of its own.
    devices : mapping of name to factor, optional
        Further names of the first profile's device, and how many times as slow they are.
    clock : {'cpu', 'wall'}, optional
        Whose seconds; the lab's, else the wall's.
    """
    from foreshard.profile.calibration import calibrate as fitted
    from foreshard.profile.profile_file import load_profile

    (name, first), *others = profiles.items()
    slow, table_s = dict(devices or {}) | ({name: 1.0} if name else {}), None
    if lab is not None:
        from foreshard.lab.lab import load_lab

        bed = load_lab(lab)
        slow |= dict(zip(bed.devices, bed.slow, strict=True))
        table_s = bed.table_s if bed.clock == "table" and clock is None else None
        clock = clock or ("wall" if bed.clock == "wall" else "cpu")
    return fitted(
        load_profile(first),
        clock=clock or "wall",
        slow=slow,
        links=lab is None,
        others={other: load_profile(file) for other, file in others},
        table_s=table_s,
    )


def calibrate_steps(
    files: Iterable[str],
    *,
    family: str | None = None,
    exclude_calibration: str | None = None,
    seeds: int = 20,
) -> dict[str, Any]:
    """Return constants moved to measured steps: the object of a costs file, with error bars and their curve.

    Parameters
    ----------
    files : iterable of str
        Tables of training steps as `validate` reads them, or of steps of networks and modules that are
        traced (`profile.step_table`).
    family : str, optional
        Of whose rows; all must be of one. Tables of traced modules have none.
    exclude_calibration : str, optional
        Start from the constants that were fitted without this family.
    seeds : int
        Orders of the steps that the curve of error against their number is the median of.
    """
    from foreshard.catalog.training import training_constants
    from foreshard.predict.batch import PlannedRun
    from foreshard.profile.step_calibration import TimedStep
    from foreshard.profile.step_calibration import calibrate_steps as calibrated
    from foreshard.profile.step_table import is_step_table
    from foreshard.validation.validate import timed_rows

    files = list(files)
    of_traces = [is_step_table(file) for file in files]
    if any(of_traces):
        _of_traces_alone(of_traces, {"--family": family, "--exclude-calibration": exclude_calibration})
        from foreshard.profile.traced_calibration import calibrate_modules

        return calibrate_modules(_timed_modules(files), seeds=seeds)
    steps = [
        TimedStep(
            name=row.id,
            run=PlannedRun(model=row.model, cluster=row.cluster, plan=row.plan, framework=row.framework),
            measured_s=row.measured_s or 0.0,
        )
        for row in timed_rows(files, family)
    ]
    return calibrated(steps, start=training_constants(exclude_calibration), seeds=seeds)


def _of_traces_alone(of_traces: Sequence[bool], others: Mapping[str, str | None]) -> None:
    """Raise for tables of both kinds, and for options that steps of traced modules do not take."""
    rule = "Steps of traced modules calibrate operations, those of models of layers constants of training"
    if not all(of_traces):
        fix = "Calibrate each by itself"
        raise SpecError("tables of both kinds", key="--steps", rule=rule, fix=fix)
    for key, value in others.items():
        if value is not None:
            what = f"{key} is not taken for steps of traced modules"
            raise SpecError(what, key=key, value=value, rule=rule, fix="Leave it out")


def _timed_modules(files: Iterable[str]) -> list[Any]:
    """Return the steps of tables; errors of a row name its line."""
    from foreshard.profile.step_table import read_step_table

    known: dict[Any, TracedModule | None] = {}
    steps = []
    for row in (row for file in files for row in read_step_table(file)):
        try:
            steps.append(_timed_module(row, known))
        except SpecError as error:
            error.file = error.file or row.place
            raise
    return steps


def _timed_module(row: StepRow, known: dict[Any, TracedModule | None]) -> TimedModule:
    """Return the step of a row; `known` are modules traced before, by precision and degrees."""
    from foreshard.profile.traced_calibration import TimedModule

    given = _named(row.options)
    plan = load_plan(given.pop("plan")) if "plan" in given else None
    traced_request.check_predicts(given)
    on = load_cluster(row.cluster)
    traced = traced_request.traced_as(plan, on, given)
    key = row.model, traced["precision"], tuple(sorted(traced["degrees"]))
    if key not in known:
        known[key] = trace(row.model, precision=key[1], degrees=key[2])
    module = known[key]
    if module is None:
        rule = "A table with these columns has networks, or factories of modules that are traced"
        fix = "Steps of language models go into a training table: see 'foreshard schema measured'"
        raise SpecError("not traced", key="model", value=row.model, rule=rule, fix=fix)
    plan = plan or traced_request.plan_of(module, on, given)
    return TimedModule(name=row.place, module=module, cluster=on, plan=plan, measured_s=row.step_time_s)


def predict_measured(
    costs: str,
    cluster: str,
    plan: Plan,
    *,
    tokens: float | None = None,
    engine: str = "graph",
    noise: Noise | None = None,
) -> Prediction:
    """Return the prediction of a step by measured costs.

    Parameters
    ----------
    costs : str
        File that ``foreshard calibrate`` writes.
    cluster : str
        As for :func:`load_cluster`, or the TOML file of a lab.
    plan : Plan
    tokens : float, optional
    engine : {'graph', 'event'}
    noise : Noise, optional
        How ranks differ (event engine).
    """
    from foreshard.predict.measured.costs import load_costs
    from foreshard.predict.measured.engine import predict_measured as predicted

    target = _lab_or_cluster(cluster)
    return predicted(load_costs(costs), target, plan, tokens=tokens, engine=engine, noise=noise)


def plan_measured(costs: str, cluster: str, **asked: Any) -> tuple[PlanResult, Cluster]:
    """Return the best plans by measured costs, and the cluster: `planner.measured.plans.plan_measured`."""
    from foreshard.planner.measured.plans import plan_measured as planned
    from foreshard.predict.measured.costs import load_costs

    target = _lab_or_cluster(cluster)
    return planned(load_costs(costs), target, **asked), target


def trace(
    model: str, *, precision: str = "bf16", degrees: Iterable[int] = (), training: bool = True
) -> TracedModule | None:
    """Return a module traced on the meta device; None for a model that is not traced.

    Parameters
    ----------
    model : str
        ``module.py:factory``, where the factory returns ``(module, example inputs)`` or ``(module, example
        inputs, loss)``, or the name of a network (`profile.networks.catalog.network_name`).
    precision : str
        fp32, tf32, fp16 or bf16.
    degrees : iterable of int
        Tensor parallelism that predictions and plans may ask for, besides 1.
    training : bool
        Whether it is trained, or runs forward alone, in evaluation.

    Raises
    ------
    ExtraMissingError
        If torch is not installed.
    SpecError
        If the module cannot be traced.
    """
    if not is_traced(model):
        return None
    parts = tuple(sorted({*degrees} - {1}))
    how: dict[str, Any] = {"precision": precision, "degrees": parts, "training": training}
    if (name := network_name(model)) is not None:
        return trace_network(name, where=model, **how)
    with ExitStack() as loaded:  # what the module imports as it runs is found too
        made = _module_of(model, loaded)
        if made is None:
            return None
        from foreshard.profile.tracing.trace import trace_module

        module, inputs, loss = made
        return trace_module(module, inputs, loss=loss, name=model.rpartition(":")[2], where=model, **how)


def _module_of(model: str, loaded: ExitStack) -> Any:
    from foreshard.catalog.models import load_module

    if find_spec("torch") is None:  # the factory may give a model that needs none
        return loaded.enter_context(load_module(model))
    from foreshard.profile.tracing.autocast import regions_of_cuda

    with regions_of_cuda():  # a decorator's region is made where the module is defined
        return loaded.enter_context(load_module(model))


def validate(
    files: Iterable[str],
    *,
    engine: str = "graph",
    costs: str = "formula",
    exclude_calibration: str | None = None,
    workers: int = 1,
    told: Callable[[str], None] | None = None,
    max_networks: int | None = None,
) -> dict[str, Any]:
    """Return measured runs beside their predictions, and how good these are.

    Parameters
    ----------
    files : iterable of str
        Tables of measurements, ``.csv`` or ``.csv.gz``; ``foreshard schema measured`` lists
        their columns.
    exclude_calibration : str, optional
        Use the constants that were fitted without this family.
    workers : int
        Processes that trace networks; above 1 the calling program guards its start by ``__main__``.
    told : callable, optional
        Is given a line now and then of how far that is.
    max_networks : int, optional
        Networks of a table that are traced, spread evenly over their names; all unless given.
    """
    from foreshard.catalog.training import training_constants
    from foreshard.validation.networks.predicted import Tracing
    from foreshard.validation.predictors import predict_run
    from foreshard.validation.rows import TrainingRow
    from foreshard.validation.validate import validate

    constants, source = training_constants(exclude_calibration), _cost_source(costs)

    def predicted(row: TrainingRow) -> Any:
        return predict_run(row, constants=constants, engine=engine, **source)

    def predicted_step(row: StepRow) -> Any:
        if exclude_calibration is not None:
            what, rule = "not taken for steps of one's own", "Its families are those of published tables"
            raise SpecError(what, key="--exclude-calibration", value=exclude_calibration, rule=rule)
        return predict(row.model, row.cluster, engine=engine, costs=costs, **row.options)

    tracing = Tracing(workers=workers, told=told, most=max_networks)
    return validate(
        files,
        exclude_calibration=exclude_calibration,
        predictor=predicted,
        step_predictor=predicted_step,
        tracing=tracing,
    )
