"""`foreshard export PLAN [MODEL [CLUSTER]] --to TARGET`: a plan as files of another tool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from foreshard.catalog.models import hub_model
from foreshard.cli.options.answer import cannot_write, dump, say, write_text
from foreshard.cli.options.sources import configurable
from foreshard.cli.options.training import needs_torch
from foreshard.cli.options.values import Amount, Count, Word
from foreshard.errors import SpecError
from foreshard.interop.exporters import TARGETS

FORMATS = ("safetensors", "dcp")
"""What a run is exported to; the other targets take a plan."""

if TYPE_CHECKING:
    from foreshard.interop.exporters.exported import Exported


@click.command("export")
@click.argument("plan")
@click.argument("model", required=False)
@click.argument("cluster", required=False)
@click.option(
    "--to",
    "target",
    required=True,
    type=Word(*TARGETS, "torchtitan", *FORMATS),
    help="The tool that shall read it.",
)
@click.option("--step", type=Count(), help="Of a run's checkpoint; the newest if not given.")
@click.option(
    "--tokens",
    type=Amount(dimension="tokens"),
    help="Tokens of the whole run: time limit and price (slurm, skypilot).",
)
@click.option("-o", "--output", metavar="DIR", help="Write the files there instead of printing them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(plan: str, model: str | None, cluster: str | None, target: str, **options: Any) -> None:
    """Write the plan file PLAN for another tool, or what a run has trained (PLAN is its folder then).

    What the tool cannot express is said, and is exit 2 where the run would not be the plan. MODEL adds the
    flags of its sizes (megatron) or is needed (torchtitan); slurm, skypilot and nccl need CLUSTER. A MODEL
    that is traced (module.py:factory, resnet50) goes to fsdp, as Python that wraps the module.

    nccl writes the CSV of NCCL's tuner for the plan's communicators, msccl an XML for each collective.

    With --to safetensors or dcp the newest checkpoint of a run is written: for transformers and others, or
    for torch.distributed.checkpoint.

    \b
    foreshard export run --to safetensors -o model
    foreshard export plan.json llama3-8b --to megatron
    foreshard export plan.json llama3-8b 2x8xh100-sxm --to slurm --tokens 1e12 -o launch
    foreshard export plan.json llama3-8b 2x8xh100-sxm --to nccl -o launch
    foreshard export plan.json net.py:net --to fsdp -o .
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    if os.path.isdir(plan) or target in FORMATS:
        _export_run(plan, target, options["output"], options["step"], options["as_json"])
        return
    from foreshard import api

    if not os.path.exists(plan) and hub_model(plan) is not None:
        what, rule = f"{plan[:100]!r} is a model", "The first argument is a plan file; a model comes after it"
        fix = f"Write one: foreshard plan {plan[:100]} CLUSTER --global-batch N -o plan.json"
        raise SpecError(what, key="PLAN", value=plan, rule=rule, fix=fix)
    made = api.export(
        api.load_plan(plan),
        target,
        model=model,
        cluster=api.load_cluster(cluster) if cluster else None,
        tokens=options["tokens"],
        plan_file=plan,
    )
    paths = _write(made, options["output"]) if options["output"] else []
    if options["as_json"]:
        click.echo(dump(made.to_dict()))
    else:
        click.echo("\n".join(paths) or made.text, nl=bool(paths))
    for note in made.notes:
        say(f"{made.target}: {note}")


def _export_run(run: str, target: str, output: str | None, step: int | None, as_json: bool) -> None:
    """Write a checkpoint of a run for another program."""
    if not os.path.isdir(run):
        what = "is a file" if os.path.exists(run) else "no such folder"
        rule = f"{target} is what a run has trained: PLAN is its folder then"
        fix = "Give the --out of foreshard run; a plan goes to another --to"
        raise SpecError(what, file=run, key="PLAN", rule=rule, fix=fix)
    if target not in FORMATS or output is None:
        what = f"{run} to {target}" if output is not None else "no folder to write to"
        rule = f"The folder of a run is exported to {' or '.join(FORMATS)}, a plan to the other tools"
        fix = f"foreshard export RUN --to {FORMATS[0]} -o DIR"
        raise SpecError(what, key="-o" if output is None else "--to", value=target, rule=rule, fix=fix)
    needs_torch("export", "Reading a checkpoint")
    from pathlib import Path

    from foreshard.runtime.checkpoint.other_formats import export_run

    try:
        found = export_run(Path(run), target, Path(output), step)
    except OSError as error:
        raise cannot_write(output, error) from None
    if as_json:
        click.echo(dump({"schema_version": 1, "target": target, "step": found, "folder": output}))
    say(f"the checkpoint of step {found} is written to {output}/")


def _write(made: Exported, folder: str) -> list[str]:
    """Write the files and return their paths."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    paths = [os.path.join(folder, name) for name, _ in made.files]
    for path, (_, text) in zip(paths, made.files, strict=True):
        write_text(path, text)
    return paths


command = configurable(command)
