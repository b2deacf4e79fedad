"""`foreshard plan MODEL CLUSTER --global-batch N --seq S`: the best plans, with a bound on all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from foreshard.advise.request import flag_of
from foreshard.cli.options import request, target
from foreshard.cli.options.answer import dump, give, must_be_writable, save_page, say, write_text
from foreshard.cli.options.choices import choosing
from foreshard.cli.options.measured import is_file
from foreshard.cli.options.progress import watched
from foreshard.cli.options.request import named_cluster, warn_of_batch, warn_of_stack
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Amount, BucketSize, Count, FrameworkLabel, Margin, Word, Words
from foreshard.errors import ForeshardError, SpecError
from foreshard.interop.exporters import TRAINERS, target_of
from foreshard.spec.plan import ALGORITHMS, COMM_OPTIONS, PRECISIONS

if TYPE_CHECKING:
    from foreshard.advise.baseline_comparison import ComparedPlanner
    from foreshard.advise.sensitivity import Gain
    from foreshard.advise.to_target import TargetRuns
    from foreshard.planner.result import PlanResult
    from foreshard.report.screen import Screen
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.model import Model
    from foreshard.spec.plan import Plan

    Search = Callable[[dict[str, Any]], tuple[PlanResult, Cluster]]
    SearchOn = Callable[[Cluster, dict[str, Any]], PlanResult]

# Exit code after Ctrl-C, as shells give it.
INTERRUPTED = 130
ALL = "all"
# Seconds of each search on changed hardware, of which --explain makes several.
_EXPLAIN_S = 5.0
OBJECTIVES = ("time", "cost", "energy")


def _other_planners() -> tuple[str, ...]:
    from foreshard.planner.baselines import BASELINES

    return tuple(BASELINES)


def _vendors() -> tuple[str, ...]:
    from foreshard.catalog.instances import sellers

    return sellers()


@verb_command("plan", choosing, output="Write the chosen plan to a file.")
@click.argument("model")
@click.argument("cluster", required=False)
@click.option(
    "--rent",
    is_flag=False,
    flag_value=ALL,
    type=Words(alone=(ALL,), load=_vendors),
    help="Instead of CLUSTER: rank the instances that clouds sell, all or of these vendors.",
)
@click.option("--global-batch", type=Count(), help="Samples per step (required without --to-target).")
@target.to_target
@request.seq_len
@click.option("--objective", type=Words(*OBJECTIVES), default="time", help="What to minimise.")
@click.option(
    "--max-usd",
    type=Amount(dimension="usd", unit="USD"),
    help="Limit on the price of the run (with --tokens).",
)
@click.option(
    "--max-hours", type=Amount(dimension="s", unit="h"), help="Limit on the time of the run (with --tokens)."
)
@click.option("--tokens", type=Amount(dimension="tokens"), help="Tokens of the whole run.")
@click.option("--max-devices", type=Count(), help="Devices to use at most.")
@click.option(
    "--memory-margin",
    type=Margin(),
    help="Least probability of fitting the memory (default 0.95); off lets plans fill it.",
)
@click.option("--framework", type=FrameworkLabel(), help="Default megatron-core, or what --to runs.")
@click.option(
    "--to",
    type=Word(*TRAINERS, "torchtitan"),
    help="Only plans that this tool trains as predicted; export writes them for it.",
)
@request.attention
@request.fp8_recipe
@request.dispatcher
@request.overrides
@request.compiles
@click.option(
    "--dtype",
    "precision",
    type=Words(*PRECISIONS, single=True),
    metavar="WORD,WORD",
    help="Of the matrix products; of several the search chooses (default bf16, else fp16).",
)
@click.option(
    "--comm",
    type=Words(*COMM_OPTIONS, alone=("framework", ALL), single=True),
    help="Communication options the search may set (default framework: none).",
)
@click.option(
    "--collectives",
    type=Word(*ALGORITHMS),
    help="Algorithm of all-reduces (default auto: of each the faster).",
)
@click.option(
    "--buckets",
    type=BucketSize(),
    help="Size of a bucket of gradients, as 25MiB, or auto: the best of each plan (default: the framework).",
)
@request.optimizer
@click.option(
    "--engine", type=Word("analytical", "graph", "event"), help="Times the best plans found; default graph."
)
@click.option(
    "--network",
    type=Word("closed-form", "flow"),
    help="Of these times: transfers each by itself, or sharing links and NICs (default of event).",
)
@click.option("--top", type=Count(1, 1000), help="Plans to show (default 5).")
@click.option("--budget-s", type=Amount(dimension="s"), help="Seconds to search (default 60).")
@click.option("--executor", metavar="local|ray[:ADDRESS]", help="Where to search (default local).")
@click.option(
    "--usd-per-device-hour",
    type=Amount(dimension="usd_per_h", unit="USD/h"),
    help="Price instead of the catalog's.",
)
@request.prices
@request.costs
@click.option(
    "--compare-with",
    type=Words(alone=(ALL,), load=_other_planners),
    help="Compare with other planners: all, or these.",
)
@click.option("--report", metavar="OUT.html", help="Write a one-file HTML report.")
@click.option(
    "--explain",
    is_flag=True,
    help="Show every assumption, and search again on changed hardware: what each would gain.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    cluster: str | None,
    rent: str | tuple[str, ...] | None,
    report: str | None,
    explain: bool,
    compare_with: str | tuple[str, ...] | None,
    to_target: str | None,
    **values: Any,
) -> None:
    """Find the best plans for MODEL on CLUSTER, and prove how far they can be from the best possible.

    Stops at a proven gap of 1 %, or at the budget. Ctrl-C prints the best plan so far. -o writes the chosen
    plan as a file that predict --plan and export read. --rent in place of CLUSTER searches the instances
    that clouds sell, for a run of --tokens.

    \b
    foreshard plan llama3-8b 2x8xh100-sxm --global-batch 512 --seq 8192 -o plan.json
    foreshard plan llama3-8b 2x8xa100-sxm-80gb+1x8xh100-sxm --global-batch 512 --report plan.html
    foreshard plan llama3-8b --rent --global-batch 512 --tokens 1e12 --max-hours 1000
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api

    _length_is_known(values, to_target)
    if report:
        must_be_writable(report)
    asked = {name: value for name, value in values.items() if value is not None}
    of_one_cluster = {"report": report, "explain": explain, "compare_with": compare_with}
    of_one_cluster = {name: value for name, value in of_one_cluster.items() if value}
    if rent is not None:
        _only_where_one_cluster_is_planned(cluster, asked, of_one_cluster | {"to_target": to_target})
        _rent(ctx, model, asked, rent)
        return
    if cluster is None:
        rule = "A plan is for a cluster, or for one to be rented"
        fix = "Name a cluster after the model, or give --rent"
        raise SpecError("no cluster", key="CLUSTER", rule=rule, fix=fix)
    source: Model | None = None
    search: Search
    search_on: SearchOn | None = None
    if is_file(asked.get("costs")):
        from foreshard.cli.options import measured

        search = partial(measured.plan, model, cluster, others=of_one_cluster)
    elif (of_trace := _planning_trace(model, cluster, asked, compare_with)) is not None:
        known, search_on = named_cluster(cluster), of_trace
        search = partial(_planned, search_on, known)
    else:
        source, known = api.load_model(model), named_cluster(cluster)
        from foreshard.catalog.offers import running_level, switched
        from foreshard.catalog.prices import load_prices

        prices = asked.pop("prices", None)
        known = known if prices is None else load_prices(prices).on(known)
        default = TRAINERS[target_of(asked["to"])].runs if "to" in asked else None
        stated = asked.get("framework") or default or "megatron-core"
        if other := switched(stated, asked.get("zero")):
            say(f"foreshard: warning: {other}")
        warn_of_stack(running_level(stated, asked.get("zero")), known)
        warn_of_batch(asked.get("global_batch"), asked.get("seq_len") or source.max_seq_len)
        search_on = partial(_planning_model, source)
        search = partial(_planned, search_on, known)
    runs: TargetRuns[tuple[PlanResult, Cluster]] | None = None
    with watched(asked.get("budget_s")) as pressed:
        if to_target is None:
            result, planned_on = search(asked)
        else:
            length = asked.get("seq_len") or (None if source is None else source.max_seq_len)
            curve = target.curve_for(to_target, source, length, asked.get("tokens"))
            runs = target.planned(curve, search, asked, seq_len=length, stop=lambda: bool(pressed))
            result, planned_on = runs.answer
            asked["global_batch"] = runs.chosen.global_batch
    gains: tuple[Gain, ...] = ()
    others: tuple[ComparedPlanner, ...] = ()
    if search_on is not None and explain and result.plans and not pressed:
        gains = _gains(search_on, planned_on, asked, result)
    if source is not None and not pressed:
        result, others = _compared(source, planned_on, asked, result, compare_with or ())

    def screen() -> Screen:
        from foreshard.report.plan_screen import plan_screen
        from foreshard.report.target_table import with_target

        name = model if source is None else source.name
        made = plan_screen(
            result, name, planned_on, gains=gains, others=others, pressed=bool(pressed), explained=explain
        )
        return with_target(made, runs)

    _write_plan(ctx, [ranked.plan for ranked in result.plans[:1]])
    if report and result.plans:
        from foreshard.report.pages.plan_page import plan_page

        save_page(report, plan_page(result, planned_on, screen(), gains, others, runs))
    elif report:
        say(f"report: no plan to draw, {report} not written")
    more: dict[str, Any] = {"explain": [gain.to_dict() for gain in gains]} if explain else {}
    if compare_with:
        more["against"] = [planner.to_dict() for planner in others]
    if runs is not None:
        more["to_target"] = runs.to_dict()
    give(result.to_dict() | more, screen)
    _leave(ctx, result.plans, result.infeasible, bool(pressed))


def _planned(search: SearchOn, cluster: Cluster, asked: dict[str, Any]) -> tuple[PlanResult, Cluster]:
    return search(cluster, asked), cluster


def _planning_model(model: Model, cluster: Cluster, asked: dict[str, Any]) -> PlanResult:
    from foreshard import api

    return api.plan(model, cluster, **asked)


def _planning_trace(
    model: str, cluster: str, asked: dict[str, Any], compare_with: str | tuple[str, ...] | None
) -> SearchOn | None:
    """Return what plans the traced module that MODEL names, None for a model that is not traced."""
    from foreshard import api
    from foreshard.advise.traced_request import searched_as

    if not api.is_traced(model):
        return None
    on = api.load_cluster(cluster)
    module = api.trace(model, **searched_as(on, asked))
    if module is None:
        return None
    return lambda on, stated: api.plan_trace(module, on, stated | {"compare_with": compare_with})


def _length_is_known(values: dict[str, Any], to_target: str | None) -> None:
    """Raise without a batch or a target, and for limits on a run of unknown length."""
    if to_target is not None:
        return
    if values["global_batch"] is None:
        rule = "Plans are for a number of samples per step, or for a target that chooses it"
        fix = "Give it, for example --global-batch 512, or --to-target"
        raise SpecError("not given", key="--global-batch", rule=rule, fix=fix)
    for name in ("max_usd", "max_hours"):
        if values[name] is not None and values["tokens"] is None:
            what = "a limit on the run without its length"
            rule = "Time and price of the run follow from its tokens"
            raise SpecError(what, key=flag_of(name), value=values[name], rule=rule, fix="Give --tokens")


def _gains(search: SearchOn, cluster: Cluster, asked: dict[str, Any], result: PlanResult) -> tuple[Gain, ...]:
    """Return what other hardware would gain, each searched with a part of the budget."""
    from foreshard.advise.sensitivity import sensitivity

    budget_s = min(_EXPLAIN_S, asked.get("budget_s") or _EXPLAIN_S)
    again = {**asked, "top": 1, "budget_s": budget_s}
    return sensitivity(lambda changed: search(changed, again), cluster, result)


def _compared(
    model: Model, cluster: Cluster, asked: dict[str, Any], result: PlanResult, names: str | tuple[str, ...]
) -> tuple[PlanResult, tuple[ComparedPlanner, ...]]:
    """Return the result with the best plan of other planners if it is better, and what each reaches."""
    if not names:
        return result, ()
    from foreshard.advise.baseline_comparison import compared
    from foreshard.planner.baselines import beside_others

    named = (names,) if isinstance(names, str) else names
    result, judged = beside_others(model, cluster, result, named, **asked)
    ours_s = result.plans[0].prediction.step_time_s if result.plans else None
    return result, tuple(compared(planner, ours_s) for planner in judged)


def _only_where_one_cluster_is_planned(
    cluster: str | None, asked: dict[str, Any], of_one_cluster: dict[str, Any]
) -> None:
    named = {"cluster": cluster, "costs": asked.get("costs"), "to": asked.get("to")}
    for name, value in {**named, **of_one_cluster}.items():
        if value:
            flag = "CLUSTER" if name == "cluster" else flag_of(name)
            raise SpecError(
                f"--rent together with {flag}",
                key=flag,
                value=value if isinstance(value, str) else None,
                rule=f"--rent compares clusters, {flag} is about one",
                fix="Leave out --rent, or plan on the cluster that it chooses",
            )


def _rent(ctx: click.Context, model: str, asked: dict[str, Any], vendors: str | tuple[str, ...]) -> None:
    """Answer which instances to rent."""
    from foreshard import api
    from foreshard.report.rental_table import rental_screen

    if ctx.get_parameter_source("objective") is click.core.ParameterSource.DEFAULT:
        del asked["objective"]
    with watched(asked.get("budget_s")) as pressed:
        result = api.plan(model, rent=vendors, **asked)
    plans = [offer.ranked.plan for offer in result.offers[:1]]
    _write_plan(ctx, plans)
    give(result.to_dict(), lambda: rental_screen(result, pressed=bool(pressed)))
    _leave(ctx, plans, result.infeasible, bool(pressed))


def _write_plan(ctx: click.Context, plans: Sequence[Plan]) -> None:
    """Write the chosen plan where -o says."""
    output = ctx.meta.pop("foreshard.output", None)
    if output and plans:
        write_text(output, dump(plans[0].to_dict()) + "\n")
        say(f"plan: {output}")


def _leave(
    ctx: click.Context, plans: Sequence[Any], infeasible: ForeshardError | None, pressed: bool
) -> None:
    """Exit with what the result means: interrupted, nothing fits or meets the limits, or found."""
    if pressed:
        say("foreshard: interrupted" + ("" if plans else " before a plan was found"))
        ctx.exit(INTERRUPTED)
    if infeasible is not None:
        say(f"foreshard: {infeasible}")
        ctx.exit(infeasible.exit_code)
