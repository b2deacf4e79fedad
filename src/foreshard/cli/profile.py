"""`foreshard profile`: time a job's layers on this machine, or without a job its kernels."""

from __future__ import annotations

from typing import Any

import click

from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.training import needs_torch
from foreshard.cli.options.values import Count, Counts
from foreshard.errors import SpecError
from foreshard.report.screen import Screen

SIZES = Counts(Count(1, 65536))


@verb_command("profile")
@click.argument("job", metavar="[JOB.py]", required=False)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16", "fp8"]),
    default="fp32",
    help="Precision of the run, by autocast; fp8 without a job, of products.",
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
    "--kernels",
    metavar="KIND,...",
    help="Without a job: kinds of kernels, of product, experts, attention and stream (default all).",
)
@click.option(
    "--sizes",
    type=SIZES,
    default=(),
    help="Without a job: rows, columns and inner sizes of products (default 64-1024, cuda 128-16384).",
)
@click.option("--seed", type=Count(0, 2**63 - 1), default=0, help="Of first values.")
def command(job: str | None, sizes: tuple[int, ...], kernels: str | None, **options: Any) -> None:
    """Time the layers of JOB.py here and the links between ranks; `foreshard calibrate` makes costs of it.

    Without JOB.py kernels are timed: products, alone and of experts, attention, streams; into a table that
    `foreshard predict --costs` takes.

    An interrupted profile goes on where it stopped. With --local N the machine is kept as busy as N ranks
    will keep it, and links are timed between as many. Under torchrun its ranks are measured; the first of
    each host writes a file.

    \b
    foreshard profile examples/jobs/gpt_job.py -o profile.json
    foreshard profile job.py --local 4 -o profile.json
    torchrun --nproc-per-node 8 --no-python foreshard profile job.py --device cuda -o profile.json
    foreshard profile --device cuda --dtype bf16 -o kernels.csv
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    needs_torch("profile", "Profiling")
    from foreshard import api
    from foreshard.report.measured_screen import profile_screen

    if job is None:
        _kernels(sizes, kernels, **options)
        return
    for flag, value in (("--sizes", sizes), ("--kernels", kernels)):
        if value:
            rule = "Kernels are timed without a job"
            raise SpecError("is not taken here", key=flag, rule=rule, fix=f"Leave out JOB.py or {flag}")
    if options["dtype"] == "fp8":
        rule, fix = "Layers are timed by autocast, which has no fp8", "Leave out JOB.py, or use --dtype bf16"
        raise SpecError("fp8 is not taken here", key="--dtype", value="fp8", rule=rule, fix=fix)
    meta = click.get_current_context().meta
    out = meta.pop("foreshard.output", None) or "profile.json"
    if 1 in options["tp"]:
        rule = "Whole layers are timed without --tp"
        raise SpecError("1 is not valid", key="--tp", value=1, rule=rule, fix="Name degrees from 2 on")
    made = api.profile(job, out, tell=say, **options)
    if made is not None:
        give(made, lambda: profile_screen(made, out))


_OF_KERNELS = ("device", "dtype", "repeats", "threads")


def _kernels(sizes: tuple[int, ...], kernels: str | None, **options: Any) -> None:
    """Time kernels into a table."""
    from foreshard import api

    context = click.get_current_context()
    for name in options:
        stated = context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
        if name not in _OF_KERNELS and stated:
            flag = f"--{name}"
            rule = "Without JOB.py kernels are timed, which have none of a job's options"
            raise SpecError("is not taken here", key=flag, rule=rule, fix=f"Leave out {flag}, or name JOB.py")
    out = context.meta.pop("foreshard.output", None) or "kernels.csv"
    kinds = tuple(word.strip() for word in kernels.split(",")) if kernels else ()
    if sizes and kinds and "product" not in kinds:
        rule, fix = "Sizes are those of products", "Leave out --sizes, or add product to --kernels"
        raise SpecError("sizes without products", key="--sizes", rule=rule, fix=fix)
    asked = {name: options[name] for name in _OF_KERNELS}
    found = api.profile_kernels(out, sizes=sizes, kernels=kinds, tell=say, **asked)
    said = f"{found['timed']} kernels timed on {found['device']}, {found['rows']} asked for, in {out}"
    give(found, lambda: Screen(header=(said,)))
