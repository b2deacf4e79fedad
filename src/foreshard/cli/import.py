"""`foreshard import FILE MODEL CLUSTER --from TOOL`: the configuration of another tool as a plan file."""

from __future__ import annotations

from typing import Any

import click

from foreshard.cli.options.answer import dump, say, write_text
from foreshard.cli.options.sources import configurable
from foreshard.cli.options.values import Count, FrameworkLabel, Word
from foreshard.interop.importers import SOURCES, stated_tool
from foreshard.spec.codec import read_text
from foreshard.spec.plan import MAX_SEQ_LEN, PRECISIONS


@click.command("import")
@click.argument("configuration", metavar="FILE")
@click.argument("model")
@click.argument("cluster")
@click.option(
    "--from",
    "source",
    type=Word(*SOURCES),
    help="The tool that reads FILE (default: the one whose words are in it).",
)
@click.option(
    "--seq",
    "seq_len",
    type=Count(1, MAX_SEQ_LEN, thousand=1024),
    help="Tokens per sample, where FILE does not say.",
)
@click.option("--micro-batch", type=Count(), help="Samples per data-parallel rank and pass.")
@click.option("--global-batch", type=Count(), help="Samples per step.")
@click.option("--recompute", metavar="RULE", help="As of predict, where FILE does not say.")
@click.option(
    "--dtype", "precision", type=Word(*PRECISIONS), help="Of the matrix products, where FILE does not say."
)
@click.option("--framework", type=FrameworkLabel(), help="Another than FILE says, or another release of it.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan there instead of printing it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the plan and notes.")
def command(
    configuration: str,
    model: str,
    cluster: str,
    source: str | None,
    output: str | None,
    as_json: bool,
    **stated: Any,
) -> None:
    """Read FILE, the configuration that another tool is started with, and print the plan file of that run.

    Megatron: a launch script or a file of arguments. torchtitan: train.toml of releases up to 0.2. DeepSpeed:
    ds_config.json. accelerate (fsdp): the file of accelerate launch --config_file. Options replace what FILE
    states. What a plan cannot express is exit 2; what FILE leaves to the tool takes the tool's default.

    \b
    foreshard import train_llama.sh llama3-8b 2x8xh100-sxm --from megatron -o plan.json
    foreshard import ds_config.json llama3-8b 1x8xa100-sxm-80gb --from deepspeed --seq 8k --recompute full
    foreshard predict llama3-8b 2x8xh100-sxm --plan plan.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api

    source = source or stated_tool(read_text(configuration), configuration)
    plan, notes = api.import_plan(
        configuration,
        source,
        model,
        cluster,
        **{name: value for name, value in stated.items() if value is not None},
    )
    text = dump(plan.to_dict())
    if output:
        write_text(output, text + "\n")
    if as_json:
        click.echo(dump({"schema_version": 1, "tool": source, "plan": plan.to_dict(), "notes": list(notes)}))
    elif not output:
        click.echo(text)
    for note in notes:
        say(f"{source}: {note}")


command = configurable(command)
