"""Options of `plan` that fix, limit or forbid degrees and options of the plans it searches."""

from __future__ import annotations

import click

from foreshard.cli.options.values import Count, Counts, Level, Words
from foreshard.planner.choices import COUNTS
from foreshard.spec.plan import MAX_BATCH, OFFLOADS, SCHEDULES

MEANING = {
    "dp": "Data-parallel replicas",
    "tp": "Tensor-parallel degree",
    "pp": "Pipeline stages",
    "cp": "Context-parallel degree",
    "ep": "Expert-parallel degree",
    "etp": "Tensor degree of the experts",
    "vpp": "Virtual stages per rank",
    "micro_batch": "Samples per data-parallel rank and pass",
}


def choosing(command: click.Command) -> None:
    """Add the options to a verb; several values of one are joined by commas, and the search chooses."""
    options = [
        click.Option([_flag(name)], type=Counts(Count(1, MAX_BATCH)), help=f"{MEANING[name]}.")
        for name in COUNTS
    ]
    options += [
        click.Option(["--zero"], type=Counts(Level()), help="ZeRO levels."),
        click.Option(["--shard-size"], type=Counts(Count(1, MAX_BATCH)), help="Ranks that share one copy."),
        click.Option(["--sp/--no-sp"], default=None, help="Sequence parallelism."),
        click.Option(["--recompute"], type=Words(), metavar="RULE,RULE", help="Recompute rules."),
        click.Option(["--offload"], type=Words(*OFFLOADS), help="To host memory."),
        click.Option(["--schedule"], type=Words(*SCHEDULES), help="Of pipelines."),
    ]
    for name in COUNTS:
        for side, word in (("min", "least"), ("max", "most")):
            flag, text = f"--{side}{_flag(name)[1:]}", f"The {word} of {_flag(name)}."
            options.append(click.Option([flag], type=Count(), help=text, hidden=name not in ("tp", "pp")))
    options.append(
        click.Option(
            ["--forbid"],
            type=Words(),
            metavar="NAME=VALUE,...",
            help="What no plan may have, as recompute=full or tp=8. Each degree has --min- and --max-.",
        )
    )
    options.append(
        click.Option(["--lora"], metavar="RANK[:TARGETS]", help="Train adapters only, as 16 or 16:q+v.")
    )
    command.params += options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
