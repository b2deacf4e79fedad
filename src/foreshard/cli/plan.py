"""`foreshard plan MODEL CLUSTER --global-batch N --seq S`: the best plans, and how far from the best possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from foreshard.cli.answer import answering, dump, give, say, write_text
from foreshard.cli.options import Amount, Count, Word
from foreshard.cli.settings import configurable
from foreshard.errors import SpecError
from foreshard.spec.plan import MAX_SEQ_LEN, OPTIMIZERS, PRECISIONS

if TYPE_CHECKING:
    from foreshard.planner.result import PlanResult

INTERRUPTED = 130
OBJECTIVES = ("time", "cost", "energy")


class Objectives(click.ParamType):  # type: ignore[type-arg]
    """Words of what to make small, the first deciding, joined by commas."""

    name = "time,cost,energy"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Return the objectives in order, or fail naming the known ones."""
        if isinstance(value, tuple):
            return value
        words = tuple(str(value).split(","))
        for word in words:
            Word(*OBJECTIVES).convert(word, param, ctx)
        if len(set(words)) < len(words):
            self.fail(f"{str(value)[:40]!r} names an objective twice", param, ctx)
        return words


@click.command("plan")
@click.argument("model")
@click.argument("cluster")
@click.option("--global-batch", type=Count(), required=True, help="samples per step")
@click.option("--seq", "seq_len", type=Count(1, MAX_SEQ_LEN), help="tokens per sample (default: the model's)")
@click.option("--objective", type=Objectives(), default="time", show_default=True, help="what to make small")
@click.option("--max-usd", type=Amount(), help="limit on the price of the run (with --tokens)")
@click.option("--max-hours", type=Amount(), help="limit on the time of the run (with --tokens)")
@click.option("--tokens", type=Amount(), help="tokens of the whole run")
@click.option("--max-devices", type=Count(), help="use at most so many")
@click.option("--framework", metavar="NAME[@RELEASE]", help="default megatron-core")
@click.option("--dtype", "precision", type=Word(*PRECISIONS), help="of the matrix products (default bf16)")
@click.option("--optimizer", type=Word(*OPTIMIZERS), help="default adamw")
@click.option("--engine", type=Word("analytical", "graph"), help="default analytical")
@click.option("--top", type=Count(1, 1000), help="plans to show (default 5)")
@click.option("--budget-s", type=Amount(), help="seconds to search (default 60)")
@click.pass_context
def command(ctx: click.Context, /, model: str, cluster: str, **values: Any) -> None:
    """Find the best plans for MODEL on CLUSTER, and prove how far they can be from the best possible.

    Stops at a proven gap of 1 %, or at the budget. Ctrl-C prints the best plan so far. -o writes the chosen plan
    as a file that predict --plan and export read.

    \b
    foreshard plan llama3-8b 2x8xh100-sxm --global-batch 512 --seq 8192 -o plan.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api

    _limits_need_tokens(values)
    asked = {name: value for name, value in values.items() if value is not None}
    target = api.load_cluster(cluster)
    source = api.load_model(model)
    result = api.plan(source, target, **asked)
    output = ctx.meta.pop("foreshard.output", None)
    if output and result.plans:
        write_text(output, dump(result.plans[0].plan.to_dict()) + "\n")
        say(f"plan: {output}")
    give(result.to_dict(), _screen(result, source.name, target))
    _leave(ctx, result)


def _limits_need_tokens(values: dict[str, Any]) -> None:
    for name in ("max_usd", "max_hours"):
        if values[name] is not None and values["tokens"] is None:
            raise SpecError(
                "a limit on the run without its length",
                key=f"--{name.replace('_', '-')}",
                value=values[name],
                rule="Time and price of the run follow from its tokens",
                fix="Give --tokens",
            )


def _screen(result: PlanResult, model: str, cluster: Any) -> Callable[[], Any]:
    def made() -> Any:
        from foreshard.report.plan_table import plan_screen

        return plan_screen(result, model, cluster)

    return made


def _leave(ctx: click.Context, result: PlanResult) -> None:
    """Exit with what the result means: nothing fits or meets the limits, interrupted, or found."""
    if result.infeasible is not None:
        say(f"foreshard: {result.infeasible}")
        ctx.exit(result.infeasible.exit_code)
    if result.interrupted:
        ctx.exit(INTERRUPTED)


command = answering(command)
for _option in command.params:
    if _option.name == "output" and isinstance(_option, click.Option):
        _option.help = "Write the chosen plan to a file."
command = configurable(command)
