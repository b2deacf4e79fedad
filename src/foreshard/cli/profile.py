"""`foreshard profile JOB.py -o profile.json`: time a job's layers on this machine."""

from __future__ import annotations

from typing import Any

import click

from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.training import needs_torch
from foreshard.cli.options.values import Count, Counts
from foreshard.errors import SpecError

SIZES = Counts(65536)


@verb_command("profile")
@click.argument("job", metavar="JOB.py")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    help="Precision of the run, by autocast.",
)
@click.option("--samples", type=SIZES, default="1,2,4,8", help="Micro-batches to time.")
@click.option(
    "--tp", type=SIZES, default=(), help="Also a rank's part of layers that so many compute together."
)
@click.option("--repeats", type=Count(1, 10**7), default=15, help="Passes of each.")
@click.option("--local", type=Count(1, 1024), default=1, help="Ranks that will share this machine.")
@click.option("--links/--no-links", default=True, help="Time links, where ranks are several.")
@click.option("--threads", type=Count(1, 1024), default=1, help="Threads of torch, as the run will have.")
@click.option("--seed", type=Count(0, 2**63 - 1), default=0, help="Of first values.")
def command(job: str, **options: Any) -> None:
    """Time the layers of JOB.py here and the links between ranks; `foreshard calibrate` makes costs of it.

    An interrupted profile goes on where it stopped. With --local N the machine is kept as busy as N ranks
    will keep it, and links are timed between as many. Under torchrun its ranks are measured; the first of
    each host writes a file.

    \b
    foreshard profile examples/jobs/gpt_job.py -o profile.json
    foreshard profile job.py --local 4 -o profile.json
    torchrun --nproc-per-node 8 --no-python foreshard profile job.py --device cuda -o profile.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    needs_torch("profile", "Profiling")
    from foreshard import api
    from foreshard.report.measured_screen import profile_screen

    meta = click.get_current_context().meta
    out = meta.pop("foreshard.output", None) or "profile.json"
    if 1 in options["tp"]:
        rule = "Whole layers are timed without --tp"
        raise SpecError("1 is not valid", key="--tp", value=1, rule=rule, fix="Name degrees from 2 on")
    made = api.profile(job, out, tell=say, **options)
    if made is not None:
        give(made, lambda: profile_screen(made, out))
