"""`foreshard profile`: time a job's layers on this machine, or without a job its matrix products."""

from __future__ import annotations

from typing import Any

import click

from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.training import needs_torch
from foreshard.cli.options.values import Count, Counts
from foreshard.errors import SpecError
from foreshard.report.screen import Screen

SIZES = Counts(65536)


@verb_command("profile")
@click.argument("job", metavar="[JOB.py]", required=False)
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
@click.option(
    "--sizes",
    type=SIZES,
    default=(),
    help="Without a job: rows, columns and inner sizes of products (default 64-1024, cuda 128-16384).",
)
@click.option("--seed", type=Count(0, 2**63 - 1), default=0, help="Of first values.")
def command(job: str | None, sizes: tuple[int, ...], **options: Any) -> None:
    """Time the layers of JOB.py here and the links between ranks; `foreshard calibrate` makes costs of it.

    Without JOB.py matrix products are timed, into a table that `foreshard predict --costs` takes.

    An interrupted profile goes on where it stopped. With --local N the machine is kept as busy as N ranks
    will keep it, and links are timed between as many. Under torchrun its ranks are measured; the first of
    each host writes a file.

    \b
    foreshard profile examples/jobs/gpt_job.py -o profile.json
    foreshard profile job.py --local 4 -o profile.json
    torchrun --nproc-per-node 8 --no-python foreshard profile job.py --device cuda -o profile.json
    foreshard profile --device cuda --dtype bf16 -o products.csv
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    needs_torch("profile", "Profiling")
    from foreshard import api
    from foreshard.report.measured_screen import profile_screen

    if job is None:
        _products(sizes, **options)
        return
    if sizes:
        rule = "Sizes are of products, which are timed without a job"
        raise SpecError("is not taken here", key="--sizes", rule=rule, fix="Leave out JOB.py or --sizes")
    meta = click.get_current_context().meta
    out = meta.pop("foreshard.output", None) or "profile.json"
    if 1 in options["tp"]:
        rule = "Whole layers are timed without --tp"
        raise SpecError("1 is not valid", key="--tp", value=1, rule=rule, fix="Name degrees from 2 on")
    made = api.profile(job, out, tell=say, **options)
    if made is not None:
        give(made, lambda: profile_screen(made, out))


_OF_PRODUCTS = ("device", "dtype", "repeats", "threads")


def _products(sizes: tuple[int, ...], **options: Any) -> None:
    """Time products into a table."""
    from foreshard import api

    context = click.get_current_context()
    for name in options:
        stated = context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
        if name not in _OF_PRODUCTS and stated:
            flag = f"--{name}"
            rule = "Without JOB.py products are timed, which have none of a job's options"
            raise SpecError("is not taken here", key=flag, rule=rule, fix=f"Leave out {flag}, or name JOB.py")
    out = context.meta.pop("foreshard.output", None) or "products.csv"
    asked = {name: options[name] for name in _OF_PRODUCTS}
    found = api.profile_products(out, sizes=sizes, tell=say, **asked)
    said = f"{found['timed']} products timed on {found['device']}, {found['rows']} asked for, in {out}"
    give(found, lambda: Screen(header=(said,)))
