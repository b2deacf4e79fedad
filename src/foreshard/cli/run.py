"""`foreshard run --plan FILE JOB.py`: train for real, here or as one rank of torchrun."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foreshard.cli.options.answer import cannot_write, give, say, wants_json
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.training import how_to_resume, needs_torch, resumable
from foreshard.cli.options.values import Amount, ByteCount, Count, Word
from foreshard.errors import ForeshardError, SpecError
from foreshard.quantity import seconds
from foreshard.spec.online import RUN_POLICIES

if TYPE_CHECKING:
    from foreshard.runtime.records.outcome import RunOutcome

SEED = Count(-(2**63), 2**63 - 1)
"""What torch takes as a seed."""


@verb_command("run")
@click.argument("job", metavar="JOB.py")
@click.option("--plan", "plan_file", metavar="FILE", required=True, help="The plan to run.")
@click.option(
    "--local",
    type=Count(1, 1024),
    metavar="N",
    help="Start N ranks on this machine; else be a rank of torchrun.",
)
@click.option("--steps", type=Count(), default=100, help="Steps to train.")
@click.option("--out", metavar="DIR", default="run", help="Where the run writes.")
@click.option(
    "--dtype",
    type=Word("fp32", "tf32", "bf16", "fp16", "fp64"),
    help="Instead of the plan's precision; bf16 and fp16 by autocast, fp64 builds the layers in it.",
)
@click.option("--seed", type=SEED, default=0, help="Of first values, order of samples, dropout.")
@click.option("--clip-norm", type=Amount(), help="Largest norm of the gradient.")
@click.option("--checkpoint-every", type=Count(0), default=0, help="Steps between checkpoints.")
@click.option(
    "--save-last/--no-save-last",
    default=True,
    help="A checkpoint at the end, and on Ctrl-C or SIGTERM after the present step.",
)
@click.option(
    "--save-async", is_flag=True, help="Train on while a checkpoint is written, from a copy in host memory."
)
@click.option("--keep", type=Count(1), default=2, help="Checkpoints to keep.")
@click.option(
    "--stop-on-nan/--no-stop-on-nan",
    default=True,
    help="End before a gradient is applied that is not finite.",
)
@click.option("--resume", is_flag=True, help="Go on from the latest checkpoint in DIR.")
@click.option("--lab", metavar="LAB.toml", help="Test bed: speeds, links and clock of the ranks.")
@click.option("--cluster", metavar="CLUSTER", help="What the ranks are: devices, links, prices, power.")
@click.option(
    "--detect-s",
    type=Amount(0.2, 86400, dimension="s"),
    default=30.0,
    help="Silence after which a rank is lost.",
)
@click.option(
    "--progress-s",
    type=Amount(1, 86400, dimension="s"),
    default=60.0,
    help="Least time at one activity after which a rank hangs, waits for a processor left out; ten times as "
    "long as ever before, at least.",
)
@click.option(
    "--interface", metavar="ADDRESS", help="Address, or network interface, of this host that ranks meet on."
)
@click.option("--port", type=Count(0, 65535), default=0, help="Of the rendezvous; 0 for any free one.")
@click.option("--secret-file", metavar="FILE", help="Secret that all hosts share; made in DIR if not given.")
@click.option(
    "--max-starts", type=Count(), help="Times a rank that dies is started; 4 if no rate is given either."
)
@click.option("--max-starts-per-hour", type=Count(), help="The same within an hour, then it waits.")
@click.option(
    "--device",
    type=Word("auto", "cpu", "cuda"),
    default="auto",
    help="Where ranks compute; auto takes GPUs if there are any.",
)
@click.option("--threads", type=Count(), default=1, help="Threads of torch in a rank.")
@click.option("--eval-every", type=Count(0), default=0, help="Steps between calls of evaluate().")
@click.option(
    "--readers", type=Count(0, 256), default=0, help="Processes of a rank that read samples; 0 for a thread."
)
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard files.")
@click.option("--wandb", is_flag=True, help="Also write a run of Weights & Biases, offline.")
@click.option(
    "--costs", metavar="FILE", help="Measured costs: what a policy starts from, and a predicted step."
)
@click.option(
    "--model", metavar="MODEL", help="What the job trains: its prediction stands in for missing costs."
)
@click.option(
    "--policy",
    type=Word(*RUN_POLICIES),
    default="static",
    help="Keep the plan, let the controller change it, or a policy to compare it with.",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Long-term mean: usd_per_h, energy_j_per_h, carbon_kg_per_h, the same per_step, or duty:RANK.",
)
@click.option(
    "--collectives",
    metavar="NAME|FILE",
    help="How gradients are summed: an algorithm as hierarchical:per_node=4, or a schedule's JSON file; "
    "if not given by the plan's collectives, else by the backend.",
)
@click.option(
    "--compress",
    metavar="METHOD",
    help="Sum gradients approximately: powersgd:RANK, topk:FRACTION, onebit, int8 or fp8.",
)
@click.option(
    "--compress-after",
    type=Count(0),
    default=0,
    metavar="STEPS",
    help="Sum the gradients of the first steps whole; Adam keeps the second moments that it has then.",
)
@click.option(
    "--buckets",
    "bucket_bytes",
    type=ByteCount(),
    metavar="SIZE",
    help="From which on a bucket of gradients is full and summed (default: the plan's buckets, else 25 MiB).",
)
@click.option(
    "--bucket-order",
    metavar="ORDER|FILE",
    help="Which bucket is summed next where several wait, with --collectives or --compress: backward "
    "(default: as they are made), forward (what the next forward needs first), or a JSON file of layers.",
)
@click.option(
    "--stage-messages",
    metavar="NAME|FILE",
    help="How pipeline stages send: a broadcast's algorithm as ring:parts=4, or a schedule's JSON file; "
    "if not given, by messages of the backend.",
)
@click.option("--trace", metavar="OUT.json.gz", help="Write a Chrome/Perfetto trace of what every rank did.")
def command(job: str, plan_file: str, **options: Any) -> None:
    """Train JOB.py under a plan, and continue when ranks fail, leave or join.

    JOB.py defines model(), dataset(), loss(output, batch) and optimizer(params). DIR gets metrics.jsonl,
    events.jsonl, samples.jsonl and ckpt/.

    \b
    foreshard run --plan plan.json --local 4 examples/jobs/gpt_job.py
    torchrun --nproc-per-node 8 --no-python foreshard run --plan plan.json job.py
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    needs_torch("run", "Training")
    from foreshard.runtime.launch import launch, of_torchrun

    check(options)
    if options["resume"] and not os.path.isdir(os.path.join(options["out"], "ckpt")):
        others = ", unless other hosts train on" if "RANK" in os.environ else ""
        say(f"no checkpoint in {options['out']}/: the run starts at its first step{others}")
    lab = options.pop("lab")
    if lab is not None and options["cluster"] is not None:
        rule = "A lab states what its ranks are"
        fix = "Leave one of them out"
        raise SpecError("--cluster with --lab", key="--cluster", value=options["cluster"], rule=rule, fix=fix)
    predicted_s = predicted(options["costs"], lab or options["cluster"], plan_file, changes=changes_of(lab))
    emulation = None
    if lab is not None:
        from foreshard.lab.emulation import emulation_of

        local = options["local"]
        ranks = of_torchrun("WORLD_SIZE") if local is None else local
        emulation = emulation_of(lab, ranks=ranks)
    if options["local"] is not None:
        _say_idle(plan_file, options["local"], policy=options["policy"])
    start = partial(launch, job, plan_file, emulation=emulation, **options)
    train(start, options, predicted_s, lab)


def train(
    start: Callable[..., RunOutcome | None],
    options: dict[str, Any],
    predicted_s: float | None,
    lab: str | None,
) -> None:
    """Start a run, show its progress, print its outcome, and leave with its exit code."""
    out = options["out"]
    with resumable(out), progress_of(out, options["steps"], predicted_s) as progress:
        outcome = start(progress=progress)
    if outcome is None:
        return  # a rank of torchrun that does not lead; the first one answers
    print_outcome(outcome, predicted_s, lab)
    say(f"written to {out}/")
    if outcome.stopped_by:
        say(f"ended after step {outcome.steps - 1}, as asked; {how_to_resume(out)}")
        raise SystemExit(128 + outcome.stopped_by)
    if outcome.lost or outcome.repeated or outcome.misread:
        raise ForeshardError(
            f"{outcome.lost} samples lost, {outcome.repeated} repeated, {outcome.misread} differ among ranks",
            file=f"{out}/samples.jsonl",
            rule="Every sample of a step is trained once",
            fix="Report it with the folder of the run",
        )


def check(options: dict[str, Any]) -> None:
    """Raise for a folder that cannot be made, and for options that do not go together."""
    for place, is_file in ((options["out"], False), (options.get("trace"), True)):
        if place is not None and (code := _obstacle(place, is_file)):
            raise cannot_write(place, OSError(code, os.strerror(code)))
    if options.get("policy") == "static" and options.get("costs") is None:
        _check_unused(options)
    if options.get("secret_file") and options.get("local") is not None:
        what = "--secret-file with --local"
        rule = "Ranks of one machine get their secret from the folder of the run"
        fix = "Leave it out, or start with torchrun"
        raise SpecError(what, key="--secret-file", value=options["secret_file"], rule=rule, fix=fix)
    if options.get("local", 0) is None and "RANK" not in os.environ:
        rule = "Ranks are started here or by torchrun"
        fix = "Add --local N, or start with torchrun --no-python foreshard run ..."
        raise SpecError("neither --local nor torchrun", key="--local", rule=rule, fix=fix)


def _obstacle(path: str, is_file: bool) -> int:
    """Return the number of the error for which a folder, or a file, could not be made; 0 where it could."""
    if not path:
        return errno.ENOENT
    if is_file and os.path.isdir(path):
        return errno.EISDIR
    above = _existing(os.path.dirname(os.path.abspath(path)) if is_file else path)
    if not os.path.isdir(above):
        return errno.ENOTDIR
    return 0 if os.access(above, os.W_OK | os.X_OK) else errno.EACCES


def _check_unused(options: dict[str, Any]) -> None:
    """Check what only a policy reads, and say that nothing reads it."""
    from foreshard.api import load_cluster, load_model

    for name, load in (("cluster", load_cluster), ("model", load_model)):
        if options.get(name) is not None:
            load(options[name])
            say(f"--{name} is of no use without --policy" + (" or --costs" if name == "cluster" else ""))


def _existing(path: str) -> str:
    """Return the path, or the nearest above it that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def predicted(
    costs: str | None, cluster: str | None, plan_file: str, *, changes: bool = False
) -> float | None:
    """Return the step time of the plan on a cluster or a lab by measured costs, if there are any.

    Devices without costs, and plans that costs cannot time, have no prediction: the run needs none.
    """
    if costs is None:
        return None
    if cluster is None:
        rule = "A prediction needs the cluster"
        fix = "Add --cluster CLUSTER or --lab LAB.toml"
        raise SpecError("costs without a cluster", key="--costs", value=costs, rule=rule, fix=fix)
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
        say(f"predicted: {seconds(step_s)} a step in the initial state of the lab, without its changes")
    return step_s


def _say_idle(plan_file: str, local: int, *, policy: str | None) -> None:
    """Say which of the ranks started here have no part in the plan."""
    from foreshard import api

    try:
        used = api.load_plan(plan_file).ranks
    except SpecError:  # told where the ranks read it
        return
    idle = sorted(set(range(local)) - set(used))
    if not idle or policy not in (None, "static"):
        return
    which = f"rank {idle[0]} is" if len(idle) == 1 else f"ranks {', '.join(map(str, idle))} are"
    say(f"{which} idle: the plan trains on {local - len(idle)} of the {local} ranks of --local")


def changes_of(lab: str | None) -> bool:
    """Return whether a lab changes during a run: predictions are of what it is at first."""
    from foreshard.lab.lab import load_lab

    return lab is not None and bool(load_lab(lab).changes)


@contextmanager
def progress_of(out: str, steps: int, predicted_s: float | None) -> Iterator[Callable[[Path], None]]:
    """Give what is called again and again: it draws progress on a terminal, and says what happens at once."""
    from foreshard.report.run_progress import RunUpdate, progress

    news = RunUpdate(Path(out))

    def say_news() -> None:
        for words in news.words():
            say(words)

    with nullcontext() if wants_json() else progress(steps, predicted_s) as draw:

        def look(metrics: Path) -> None:
            say_news()
            if draw is not None:
                draw(metrics)

        try:
            yield look
        finally:
            say_news()


def print_outcome(outcome: RunOutcome, predicted_s: float | None, lab: str | None) -> None:
    """Print the outcome of a run beside its prediction."""
    from foreshard.report.run_screen import run_screen

    changes = changes_of(lab)
    more = {"predicted_step_s": predicted_s, "predicted_without_changes": changes}
    more = {} if predicted_s is None else more
    give(outcome.to_dict() | more, lambda: run_screen(outcome, predicted_s, changes=changes))
