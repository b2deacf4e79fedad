"""`foreshard lab LAB.toml [JOB.py --plan FILE]`: a mixed cluster on one machine, shown or trained on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from foreshard.cli import run
from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.training import needs_torch
from foreshard.errors import SpecError
from foreshard.report.lab_screen import lab_screen

if TYPE_CHECKING:
    from foreshard.lab.lab import Lab

_LIKE_RUN = (
    "steps",
    "out",
    "seed",
    "clip_norm",
    "checkpoint_every",
    "save_last",
    "save_async",
    "keep",
    "stop_on_nan",
    "resume",
    "detect_s",
    "progress_s",
    "max_starts",
    "max_starts_per_hour",
    "threads",
    "tensorboard",
    "wandb",
    "trace",
    "costs",
    "collectives",
    "compress",
    "compress_after",
    "bucket_bytes",
    "bucket_order",
    "stage_messages",
)


def _options_of_run(command: click.Command) -> None:
    command.params += [param for param in run.command.params if param.name in _LIKE_RUN]


@verb_command("lab", _options_of_run)
@click.argument("lab_file", metavar="LAB.toml")
@click.argument("job", metavar="[JOB.py]", required=False)
@click.option("--plan", "plan_file", metavar="FILE", help="The plan to run.")
def command(lab_file: str, job: str | None, plan_file: str | None, **options: Any) -> None:
    """Train JOB.py on a lab: ranks and links of stated speeds on this machine; without a job, show the lab.

    With the clocks cpu and table time is virtual and anybody may run it. With the clock wall ranks live in
    network namespaces with links of the lab's rates and get their portions of the cores, which needs root.

    \b
    foreshard lab examples/labs/mixed4.toml
    foreshard lab examples/labs/mixed4.toml --plan plan.json examples/jobs/gpt_job.py
    """  # noqa: D301 - a lone backslash-b keeps lines apart
    from foreshard.lab.lab import load_lab

    lab = load_lab(lab_file)
    if job is None and plan_file is None:
        show(lab)
    elif job is None or plan_file is None:
        rule = "A lab is shown, or a job is trained on it under a plan"
        fix = "foreshard lab LAB.toml --plan FILE JOB.py"
        raise SpecError("a job and a plan go together", key="--plan" if job else "JOB.py", rule=rule, fix=fix)
    else:
        train(lab, lab_file, job, plan_file, options)


def show(lab: Lab) -> None:
    """Print what the lab is, and whether this machine can enforce it."""
    from foreshard.lab.network import missing

    lacks = missing() if lab.clock == "wall" else None
    data = {"schema_version": 1, "lab": lab.to_dict(), "missing": lacks}
    give(data, lambda: lab_screen(lab.to_dict(), lacks))


def train(lab: Lab, lab_file: str, job: str, plan_file: str, options: dict[str, Any]) -> None:
    """Run the job on the lab and print what came of it."""
    needs_torch("lab", "Training")
    from foreshard.lab.emulation import emulation_of
    from foreshard.lab.network import LabNetwork, missing
    from foreshard.runtime.launch import launch

    run.check(options)
    lacks = missing() if lab.clock == "wall" else None
    if lacks is not None:
        what = f"no lab in the wall clock here: {lacks}"
        rule = "The machine itself slows ranks and links then"
        fix = 'Run as root on Linux with iproute2, or use clock = "cpu"'
        raise SpecError(what, file=lab_file, key="clock", value="wall", rule=rule, fix=fix)
    predicted_s = run.predicted(options.pop("costs"), lab_file, plan_file, changes=bool(lab.changes))
    with LabNetwork(lab) if lab.clock == "wall" else nullcontext() as network:
        if network is not None and not lab.is_even:
            say(f"rank of slow factor 1: {network.unit_cores:.2f} of a core")
        emulation = emulation_of(lab_file, ranks=len(lab.slow), network=network)
        start = partial(launch, job, plan_file, local=len(lab.slow), emulation=emulation, **options)
        run.train(start, options, predicted_s, lab_file)
