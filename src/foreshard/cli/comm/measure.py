"""`foreshard comm measure COLLECTIVE SIZE`: a schedule executed between real ranks, exact and timed."""

from __future__ import annotations

from typing import Any

import click

from foreshard import quantity
from foreshard.cli.comm.inputs import schedule_named
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Count, Word
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.errors import ForeshardError
from foreshard.report.screen import Box, Screen

_MAX_LOCAL = 64


@verb_command("measure")
@click.argument("collective", type=Word(*COLLECTIVES), metavar="COLLECTIVE")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.option(
    "--algorithm",
    default="ring",
    metavar="NAME|FILE",
    help="An algorithm by name, or a schedule's JSON or MSCCL file.",
)
@click.option(
    "--local", type=Count(2, _MAX_LOCAL), help="Start N ranks on this machine (else: those of torchrun)."
)
@click.option("--channels", type=Count(), default=1, help="Channels, each with its part of the data.")
@click.option("--parts", type=Count(), help="Pieces that follow each other (default: one a channel).")
@click.option("--per-node", type=Count(), help="Ranks of a node, for algorithms that know nodes.")
@click.option("--repeats", type=Count(1, 10_000), default=5, help="Turns that count.")
def command(
    collective: str,
    size: float,
    algorithm: str,
    local: int | None,
    channels: int,
    parts: int | None,
    per_node: int | None,
    repeats: int,
) -> None:
    """Execute a schedule of SIZE bytes between ranks over gloo: whole numbers to the last bit, then its time.

    The time is that of the slowest rank, the median over turns, beside the library's own collective where it
    has one.

    \b
    foreshard comm measure all-reduce 16MiB --local 4 --algorithm halving-doubling
    torchrun --nproc-per-node 4 -m foreshard comm measure all-gather 1MiB --algorithm bruck
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.profile.collective_times import local_times, time_schedule
    from foreshard.profile.link_times import torchrun_ranks

    ranks = None if local else torchrun_ranks("cpu")
    number = local or (ranks.size if ranks else 2)
    schedule = schedule_named(collective, algorithm, number, per_node, channels, parts)
    if ranks is not None:
        found = time_schedule(ranks, schedule, int(size), repeats=repeats)
    else:
        found = local_times(schedule, int(size), repeats=repeats)
    if not found["is_exact"]:
        raise ForeshardError(f"{schedule.algorithm} did not end with what {collective} promises. Report it.")
    if ranks is not None and ranks.rank:
        return
    data = {
        "schema_version": 1,
        "collective": collective,
        "algorithm": schedule.algorithm,
        "size_bytes": int(size),
        "num_ranks": schedule.num_ranks,
        "backend": "gloo",
        "sends": schedule.num_sends,
        **found,
    }
    give(data, lambda: _screen(data))


def _screen(data: dict[str, Any]) -> Screen:
    header = (
        f"{data['collective']} of {quantity.size(data['size_bytes'])} over {data['num_ranks']} ranks, gloo"
    )
    boxes = [
        Box(
            title="time",
            value=quantity.seconds(data["time_s"]),
            note=f"{data['algorithm']}, {data['sends']:,} sends",
        ),
        Box(title="result", value="exact", note="whole numbers, every rank"),
    ]
    if data["library_s"] is not None:
        ratio = data["time_s"] / data["library_s"]
        boxes.append(
            Box(title="gloo's own", value=quantity.seconds(data["library_s"]), note=f"ratio {ratio:.2f}")
        )
    return Screen(header=(header,), boxes=tuple(boxes))
