"""`foreshard profile JOB.py -o profile.json`: time a job's layers on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from foreshard.cli.answer import say
from foreshard.cli.settings import configurable
from foreshard.errors import ExtraMissingError, SpecError


class Sizes(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers joined by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers, rising."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = sorted({int(word) for word in str(value).split(",")})
        except ValueError:
            self.fail(f"{str(value)[:40]!r} is not whole numbers joined by commas", param, ctx)
        if numbers[0] < 1 or numbers[-1] > 65536:
            self.fail(f"{str(value)[:40]!r}: numbers are from 1 to 65536", param, ctx)
        return tuple(numbers)


@configurable
@click.command("profile")
@click.argument("job", metavar="JOB.py")
@click.option("-o", "--output", metavar="FILE", default="profile.json", show_default=True, help="The profile.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where.")
@click.option("--samples", type=Sizes(), default="1,2,4,8", show_default=True, help="Micro-batches to time.")
@click.option("--repeats", type=int, default=15, show_default=True, help="Passes of each.")
@click.option("--local", type=int, default=1, show_default=True, help="Ranks that will share this machine.")
@click.option("--threads", type=int, default=1, show_default=True, help="Threads of torch, as the run will have.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of first values.")
def command(
    job: str, output: str, device: str, samples: tuple[int, ...], repeats: int, local: int, threads: int, seed: int
) -> None:
    """Time the layers of JOB.py here; `foreshard calibrate` makes costs of it.

    An interrupted profile goes on where it stopped. With --local N the machine is kept as busy as N ranks will
    keep it.

    \b
    foreshard profile examples/jobs/gpt_job.py -o profile.json
    foreshard calibrate --profile profile.json --lab examples/labs/mixed4.toml -o costs.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    try:
        import torch
    except ImportError:
        raise ExtraMissingError("torch is not installed", key="profile", rule="Profiling needs the extra 'run'",
                                fix="pip install 'foreshard[run]'") from None  # fmt: skip
    from foreshard.profile.companion import companions
    from foreshard.profile.layer_times import profile_layers
    from foreshard.runtime.executor import through
    from foreshard.runtime.job import load_job

    if repeats < 3:
        raise SpecError(f"{repeats} is not valid", key="--repeats", value=repeats, rule="must be at least 3: a median")
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("no CUDA device here", key="--device", value=device, rule="the device is on this machine")
    torch.set_num_threads(threads)
    if not 1 <= local <= 1024:
        raise SpecError(f"{local} is not valid", key="--local", value=local, rule="must be from 1 to 1024 ranks")
    loaded = load_job(job, seed=seed)
    busy = min(local, os.cpu_count() or 1)
    with companions(job, busy - 1, samples=",".join(map(str, samples)), threads=threads):
        made = profile_layers(
            loaded, samples=samples, repeats=repeats, out=Path(output), device=torch.device(device), through=through,
            tell=lambda text: say(f"timing {text}"),
        )  # fmt: skip
    say(f"{len(made['bytes'])} layers, {len(made['passes'])} sizes written to {output}")
