"""`foreshard run --plan FILE JOB.py`: train for real, here or as one rank of torchrun."""

from __future__ import annotations

import errno
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from foreshard.cli.options.answer import answering, cannot_write, give, say, wants_json
from foreshard.cli.options.sources import configurable
from foreshard.cli.options.training import needs_torch, resumable
from foreshard.cli.options.values import Word
from foreshard.errors import ForeshardError, SpecError
from foreshard.units import format_seconds

if TYPE_CHECKING:
    from foreshard.runtime.records.outcome import RunOutcome


@answering
@configurable
@click.command("run")
@click.argument("job", metavar="JOB.py")
@click.option("--plan", "plan_file", metavar="FILE", required=True, help="The plan to run.")
@click.option(
    "--local", type=int, metavar="N", help="Start N ranks on this machine; else be a rank of torchrun."
)
@click.option("--steps", type=int, default=100, show_default=True, help="Steps to train.")
@click.option("--out", metavar="DIR", default="run", show_default=True, help="Where the run writes.")
@click.option(
    "--dtype",
    type=Word("fp32", "bf16", "fp64"),
    help="Instead of the plan's precision; bf16 by autocast, fp64 builds the layers in it.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of first values, order of samples, dropout."
)
@click.option("--clip-norm", type=float, help="Largest norm of the gradient.")
@click.option("--checkpoint-every", type=int, default=0, show_default=True, help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Go on from the latest checkpoint in DIR.")
@click.option("--lab", metavar="LAB.toml", help="Test bed: speeds, links and clock of the ranks.")
@click.option("--cluster", metavar="CLUSTER", help="What the ranks are: devices, links, prices, power.")
@click.option(
    "--detect-s", type=float, default=30.0, show_default=True, help="Silence after which a rank is lost."
)
@click.option("--interface", metavar="ADDRESS", help="Address of this host that ranks meet on.")
@click.option("--port", type=int, default=0, show_default=True, help="Of the rendezvous; 0 for any free one.")
@click.option("--secret-file", metavar="FILE", help="Secret that all hosts share; made in DIR if not given.")
@click.option(
    "--max-starts", type=int, default=4, show_default=True, help="Times a rank that dies is started."
)
@click.option("--threads", type=int, default=1, show_default=True, help="Threads of torch in a rank.")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard files.")
@click.option(
    "--costs", metavar="FILE", help="Measured costs: what a policy starts from, and a predicted step."
)
@click.option(
    "--model", metavar="MODEL", help="What the job trains: its prediction stands in for missing costs."
)
@click.option(
    "--policy",
    type=Word("static", "lyapunov", "lb-bsp", "greedy"),
    default="static",
    show_default=True,
    help="Keep the plan, let the controller change it, or a policy to compare it with.",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Long-term mean: usd_per_h, energy_j_per_h, carbon_kg_per_h, the same per_step, or duty:RANK.",
)
@click.option("--trace", metavar="OUT.json.gz", help="Write a Chrome/Perfetto trace of what every rank did.")
def command(job: str, plan_file: str, **options: Any) -> None:
    """Train JOB.py under a plan, and survive what happens to the ranks.

    JOB.py defines model(), dataset(), loss(output, batch) and optimizer(params). DIR gets metrics.jsonl,
    events.jsonl, samples.jsonl and ckpt/.

    \b
    foreshard run --plan plan.json --local 4 examples/jobs/gpt_job.py
    torchrun --nproc-per-node 8 --no-python foreshard run --plan plan.json job.py
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    needs_torch("run", "Training")
    from foreshard.runtime.launch import launch

    check(options)
    if options["resume"] and not os.path.isdir(os.path.join(options["out"], "ckpt")):
        others = ", unless other hosts train on" if "RANK" in os.environ else ""
        say(f"no checkpoint in {options['out']}/: the run starts at its first step{others}")
    lab = options.pop("lab")
    if lab is not None and options["cluster"] is not None:
        raise SpecError(
            "--cluster with --lab",
            key="--cluster",
            value=options["cluster"],
            rule="A lab states what its ranks are",
            fix="Leave one of them out",
        )
    predicted_s = predicted(options["costs"], lab or options["cluster"], plan_file, changes=changes_of(lab))
    emulation = None
    if lab is not None:
        from foreshard.lab.emulation import emulation_of

        local = options["local"]
        ranks = int(os.environ["WORLD_SIZE"]) if local is None else local
        emulation = emulation_of(lab, ranks=ranks)
    with resumable(options["out"]), progress_of(options["steps"], predicted_s) as progress:
        outcome = launch(job, plan_file, progress=progress, emulation=emulation, **options)
    if outcome is None:
        return  # a rank of torchrun that does not lead; the first one answers
    tell(outcome, predicted_s, lab)
    say(f"written to {options['out']}/")
    if outcome.lost or outcome.repeated or outcome.misread:
        raise ForeshardError(
            f"{outcome.lost} samples lost, {outcome.repeated} repeated, {outcome.misread} unlike among ranks",
            file=f"{options['out']}/samples.jsonl",
            rule="Every sample of a step is trained once",
            fix="Report it with the folder of the run",
        )


def check(options: dict[str, Any]) -> None:
    """Raise for options out of range."""
    for name in ("steps", "max_starts", "threads"):
        _refuse_unless(options[name] >= 1, name, options[name], "Must be a whole number of at least 1")
    told = options["detect_s"]
    _refuse_unless(0.2 <= told <= 86400, "detect_s", told, "Must be from 0.2 to 86400 seconds")
    told = options["checkpoint_every"]
    _refuse_unless(told >= 0, "checkpoint_every", told, "Must be 0 or more steps")
    told = options["clip_norm"]
    if told is not None:
        _refuse_unless(0 < told < math.inf, "clip_norm", told, "Must be a finite number above zero")
    told = options.get("port", 0)
    _refuse_unless(0 <= told <= 65535, "port", told, "Must be a port, 0 to 65535")
    _refuse_unless(-(2**63) <= options["seed"] < 2**63, "seed", options["seed"], "Must be a 64-bit integer")
    if not os.path.isdir(_existing(options["out"])):
        raise cannot_write(options["out"], OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if options.get("secret_file") and options.get("local") is not None:
        raise SpecError(
            "--secret-file with --local",
            key="--secret-file",
            value=options["secret_file"],
            rule="Ranks of one machine get their secret from the folder of the run",
            fix="Leave it out, or start with torchrun",
        )
    if options.get("local", 0) is None and "RANK" not in os.environ:
        raise SpecError(
            "neither --local nor torchrun",
            key="--local",
            rule="Ranks are started here or by torchrun",
            fix="Add --local N, or start with torchrun --no-python foreshard run ...",
        )


def _existing(path: str) -> str:
    """Return the path, or the nearest above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _refuse_unless(valid: bool, name: str, value: float, rule: str) -> None:
    if not valid:
        raise SpecError(f"{value} is not valid", key=f"--{name.replace('_', '-')}", value=value, rule=rule)


def predicted(
    costs: str | None, cluster: str | None, plan_file: str, *, changes: bool = False
) -> float | None:
    """Return the step time of the plan on a cluster or a lab by measured costs, if there are any.

    Devices without costs, and plans that costs cannot time, have no prediction: the run needs none.
    """
    if costs is None:
        return None
    if cluster is None:
        raise SpecError(
            "costs without a cluster",
            key="--costs",
            value=costs,
            rule="A prediction needs the cluster",
            fix="Add --cluster CLUSTER or --lab LAB.toml",
        )
    from foreshard import api

    plan = api.load_plan(plan_file)
    try:
        step_s = api.predict_measured(costs, cluster, plan).step_time_s
    except SpecError as error:
        unmeasured = error.key == "devices"
        if not unmeasured and all(stage.tp == 1 for group in plan.groups for stage in group.stages):
            raise
        say(f"no predicted step: {error.what}")
        return None
    if changes:
        say(f"predicted: {format_seconds(step_s)} a step of the lab as stated at first, without its changes")
    return step_s


def changes_of(lab: str | None) -> bool:
    """Return whether a lab changes during a run: predictions are of what it is at first."""
    from foreshard.lab.lab import load_lab

    return lab is not None and bool(load_lab(lab).changes)


def progress_of(steps: int, predicted_s: float | None) -> AbstractContextManager[Any]:
    """Return the context of a run with what draws its progress, None where nobody looks."""
    from foreshard.report.run_progress import progress

    return nullcontext() if wants_json() else progress(steps, predicted_s)


def tell(outcome: RunOutcome, predicted_s: float | None, lab: str | None) -> None:
    """Print what came of a run, beside what was predicted."""
    from foreshard.report.run_screen import run_screen

    changes = changes_of(lab)
    told = {"predicted_step_s": predicted_s, "predicted_without_changes": changes}
    told = {} if predicted_s is None else told
    give(outcome.to_dict() | told, lambda: run_screen(outcome, predicted_s, changes=changes))
