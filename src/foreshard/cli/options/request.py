"""The options that describe a run, for predict, compare and whatif, some for plan; the Request they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.decorators import FC

from foreshard import quantity
from foreshard.advise.request import ASKED, CPU, DEGREES, OPTIONS, Request
from foreshard.cli.options.answer import say
from foreshard.cli.options.choices import MEANING
from foreshard.cli.options.values import Amount, BucketSize, Count, FrameworkLabel, Level, Word, Wrap
from foreshard.cli.options.varying import VARYING, VARYING_OPTIONS
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import OVERRIDES
from foreshard.spec.plan import (
    ALGORITHMS,
    ATTENTIONS,
    COMM_OPTIONS,
    DISPATCHERS,
    FP8_RECIPES,
    MAX_SEQ_LEN,
    MAX_UNITS,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    Plan,
)

if TYPE_CHECKING:
    from foreshard.advise.traced_request import TracedRequest

_DETAIL = {"dp": " (default: what the others leave)", "vpp": " (interleaved schedule)"}
_COMM_HELP = {
    "tp_overlap": "hide tensor-parallel collectives behind products (with sp)",
    "grad_overlap": "reduce gradients during the backward",
    "param_gather_overlap": "gather updated weights during the forward",
    "p2p_overlap": "send between stages beside computation",
    "expert_overlap": "send tokens to experts beside computation",
    "context_gather": "gather keys and values before attention instead of a ring",
    "shared_overlap": "run shared experts beside the exchange of tokens",
    "narrow_gather": "gather sharded weights in 8 bit (fp8)",
}


def _unstated_is_none(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...] | None:
    return value or None


def _comm_option(name: str) -> Callable[[FC], FC]:
    flag = name.replace("_", "-")
    text = f"{_COMM_HELP[name]} (default: the framework's)"
    return click.option(f"--{flag}/--no-{flag}", default=None, help=text)


micro_batch = click.option(
    "--micro-batch", type=Count(), help="Samples per data-parallel rank and pass (default 1)."
)
seq_len = click.option(
    "--seq",
    "seq_len",
    type=Count(1, MAX_SEQ_LEN, thousand=1024),
    help="Tokens per sample (default: the model's).",
)
precision = click.option(
    "--dtype",
    "precision",
    type=Word(*PRECISIONS),
    help="Of the matrix products (default bf16, fp16 where devices have none).",
)
optimizer = click.option("--optimizer", type=Word(*OPTIMIZERS), help="Default adamw.")
attention = click.option(
    "--attention",
    type=Word(*ATTENTIONS),
    help="Kernel of attention (default: the framework's, or the one that the devices have).",
)
fp8_recipe = click.option(
    "--fp8-recipe",
    type=Word(*FP8_RECIPES),
    help="With --dtype fp8: what shares a scale (default the framework's; mxfp8 is a dtype).",
)
dispatcher = click.option(
    "--dispatcher",
    type=Word(*DISPATCHERS),
    help="What sends tokens to experts on other ranks (default: the framework's).",
)
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    callback=_unstated_is_none,
    metavar="KEY=VALUE",
    help=f"Of the framework, as --set grad_bytes=bf16; repeat it: {', '.join(OVERRIDES)}.",
)
compiles = click.option(
    "--compile/--no-compile",
    default=None,
    help="Whether torch.compile makes the kernels (default: the framework's).",
)
costs = click.option(
    "--costs",
    metavar="auto|formula|learned|FILE",
    help="Where kernel times come from (default auto): a name, or a file of calibrate or profile.",
)
prices = click.option("--prices", metavar="FILE", help="Prices of your own ('foreshard schema prices').")

# Every default is None, so that unstated is known.
_RUN = (
    click.option("--plan", metavar="FILE", help="Plan file instead of degrees and options."),
    *(
        click.option(f"--{name}", type=Count(), help=f"{MEANING[name]}{_DETAIL.get(name, '')}.")
        for name in DEGREES
    ),
    click.option(
        "--sp/--no-sp", default=None, help="Sequence parallelism (default: where the framework has it)."
    ),
    click.option("--zero", type=Level(), help="ZeRO level 0-3 (default: the framework's, 1)."),
    click.option("--shard-size", type=Count(), help="Ranks that share one copy (hybrid sharding)."),
    micro_batch,
    click.option(
        "--global-batch", type=Count(), help="Samples per step (default dp x pp in whole micro-batches)."
    ),
    seq_len,
    click.option(
        "--recompute", metavar="RULE", help="none, selective[:MODULES], full[:uniform:N|:block:N], every-N."
    ),
    click.option(
        "--offload",
        type=Word(*OFFLOADS, CPU),
        help="To host memory; cpu is what the framework offloads under that name.",
    ),
    click.option("--schedule", type=Word(*SCHEDULES), help="Of the pipeline (default 1f1b)."),
    precision,
    optimizer,
    click.option(
        "--framework",
        type=FrameworkLabel(),
        help="Default megatron-core; 'foreshard schema frameworks' lists them.",
    ),
    attention,
    fp8_recipe,
    dispatcher,
    overrides,
    compiles,
    *map(_comm_option, COMM_OPTIONS),
    click.option(
        "--collectives",
        type=Word(*ALGORITHMS),
        help="Algorithm of all-reduces (default auto: the library's choice, the faster).",
    ),
    click.option(
        "--buckets",
        type=BucketSize(),
        help="Size of a bucket of gradients, as 25MiB, or auto: the best (default: the framework's).",
    ),
    click.option(
        "--prefetch",
        type=Count(0, MAX_UNITS),
        help="Units of PyTorch's FSDP gathered ahead (default 1; 0: in turn with computation).",
    ),
    click.option(
        "--wrap",
        type=Wrap(),
        help="Blocks that PyTorch's FSDP gathers as one unit, or model: all (default 1).",
    ),
    click.option(
        "--lora", metavar="RANK[:TARGETS]", help="Train adapters only, as 16 or 16:q+v (default q+k+v+o)."
    ),
)
_ENGINE = (
    click.option("--engine", type=Word("analytical", "graph", "event"), help="Default graph."),
    click.option(
        "--network",
        type=Word("closed-form", "flow"),
        help="How transfers take time: each by itself, or sharing links and NICs (default of event).",
    ),
    costs,
    click.option(
        "--host-thread",
        is_flag=True,
        default=None,
        help="Launches run ahead of the device on a thread of the host (event engine).",
    ),
    *VARYING_OPTIONS,
)
_DOUBTFUL_TOKENS = 2**30
"""Of a step: sixteen times as many as have been trained (`advise.advice.MAX_STEP_TOKENS`)."""
_QUESTION = (
    click.option("--fidelity", type=Word("datasheet", "zero-shot"), help="Default zero-shot."),
    click.option(
        "--tokens", type=Amount(dimension="tokens"), help="Tokens of the whole run, for its time and cost."
    ),
    click.option(
        "--usd-per-device-hour", type=Amount(dimension="usd_per_h", unit="USD/h"), help="Your price."
    ),
    prices,
    click.option(
        "--observed-step-s",
        type=Amount(dimension="s"),
        help="One measured step to correct the prediction by.",
    ),
)


def describing_a_run(command: click.Command, *, with_engine: bool = True) -> None:
    """Add MODEL, CLUSTER and the options of a run to a verb."""
    command.params[:0] = [click.Argument(["model"]), click.Argument(["cluster"])]
    for option in (*_RUN, *(_ENGINE if with_engine else ()), *_QUESTION):
        option(command)


def warn_of_stack(label: str, cluster: Cluster) -> None:
    """Say where a framework does not run on the devices of a cluster, and what does."""
    from foreshard.catalog.frameworks import load_framework
    from foreshard.catalog.stacks import stack_warnings

    try:
        framework = load_framework(label)
    except SpecError:
        return  # the verb refuses it, with the file that names it
    for warning in stack_warnings(framework, cluster.devices):
        say(f"foreshard: warning: {warning}")


def warn_of_batch(samples: int | None, seq_len: int) -> None:
    """Say where a global batch has so many tokens that it was likely stated in tokens."""
    tokens = (samples or 0) * seq_len
    if seq_len > 1 and samples is not None and tokens >= _DOUBTFUL_TOKENS:
        meant = (
            f"for {quantity.count(samples)} tokens write --global-batch {max(1, round(samples / seq_len))}"
        )
        say(f"foreshard: warning: a step of {quantity.count(tokens)} tokens; a batch counts samples, {meant}")


def warn_of_offers(request: Request, plan: Plan) -> None:
    """Say which choices of a plan its framework does not let its user make, or switch to another."""
    from foreshard.catalog.frameworks import load_framework
    from foreshard.catalog.offers import not_offered

    if request.switched:
        say(f"foreshard: warning: {request.switched}")
    for missing in not_offered(plan, load_framework(plan.framework)):
        say(f"foreshard: warning: {missing}; the numbers are those of its kernels with it")


def named_cluster(text: str) -> Cluster:
    """Return the cluster that an argument names; what is doubtful in it is said."""
    from foreshard import api

    cluster = api.load_cluster(text)
    for warning in cluster.warnings:
        say(f"foreshard: warning: {warning}")
    return cluster


def traced_request_of(values: Mapping[str, Any]) -> TracedRequest | None:
    """Return the request for the traced module that MODEL names, None for a model that is not traced."""
    from foreshard import api

    if not api.is_traced(values["model"]):
        return None
    plan = api.load_plan(values["plan"]) if values.get("plan") else None
    cluster = named_cluster(values["cluster"])
    return api.request_traced(values["model"], cluster, plan, values)


def to_request(values: Mapping[str, Any]) -> Request:
    """Return the request a verb's parsed options make; catalog names and files are read here."""
    from foreshard import api

    request = api.request(
        api.load_model(values["model"]),
        named_cluster(values["cluster"]),
        api.load_plan(values["plan"]) if values.get("plan") else None,
        plan_file=values.get("plan"),
        **{name: values.get(name) for name in (*DEGREES, *OPTIONS, *ASKED, *VARYING, "lora", "prices")},
    )
    label = request.choices.get("framework") if request.plan is None else request.plan.framework
    warn_of_stack(label or "megatron-core", request.cluster)
    warn_of_batch(values.get("global_batch"), values.get("seq_len") or request.model.max_seq_len)
    return request
