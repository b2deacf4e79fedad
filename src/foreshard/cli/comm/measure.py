"""`foreshard comm measure COLLECTIVE SIZE`: a schedule executed between real ranks, exact and timed."""

from __future__ import annotations

import os
from typing import Any

import click

from foreshard import quantity
from foreshard.cli.comm.inputs import schedule_named
from foreshard.cli.options.answer import give, write_text
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Count, Word
from foreshard.comm.prediction import bus_factor
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.errors import ForeshardError, SpecError
from foreshard.report.screen import Box, Screen, table

_MAX_LOCAL = 64
_LIBRARY = "library"


@verb_command("measure")
@click.argument("collective", type=Word(*COLLECTIVES), metavar="COLLECTIVE")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.option(
    "--algorithm",
    default="ring",
    metavar="NAME|FILE",
    help="An algorithm by name, a schedule's JSON or MSCCL file, or library.",
)
@click.option(
    "--local", type=Count(2, _MAX_LOCAL), help="Start N ranks on this machine (else: those of torchrun)."
)
@click.option("--channels", type=Count(), default=1, help="Channels, each with its part of the data.")
@click.option("--parts", type=Count(), help="Pieces that follow each other (default: one a channel).")
@click.option("--per-node", type=Count(), help="Ranks of a node, for algorithms that know nodes.")
@click.option("--repeats", type=Count(1, 10_000), default=5, help="Turns that count.")
@click.option(
    "--device",
    type=Word("cpu", "cuda"),
    default="cpu",
    help="cuda: NVIDIA devices, a rank on each (library).",
)
@click.option("--to", "largest", type=ByteCount(), help="Sweep from SIZE to here by factors of 2 (library).")
@click.option(
    "--log", metavar="OUT.log", help="Write the sweep as nccl-tests print it, for comm import and --costs."
)
def command(
    collective: str,
    size: float,
    algorithm: str,
    local: int | None,
    channels: int,
    parts: int | None,
    per_node: int | None,
    repeats: int,
    device: str,
    largest: float | None,
    log: str | None,
) -> None:
    """Execute a schedule of SIZE bytes between ranks over gloo: whole numbers to the last bit, then its time.

    The time is that of the slowest rank, the median over turns, beside the library's own collective where it
    has one.

    --algorithm library times the library's own collective instead, many calls in a row as nccl-tests do:
    gloo's on processors, NCCL's on NVIDIA devices with --device cuda.

    \b
    foreshard comm measure all-reduce 16MiB --local 4 --algorithm halving-doubling
    torchrun --nproc-per-node 4 -m foreshard comm measure all-gather 1MiB --algorithm bruck
    foreshard comm measure all-reduce 1KiB --to 1GiB --algorithm library --local 8 --device cuda --log all.log
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    if algorithm == _LIBRARY:
        _sweep(collective, (int(size), int(largest or size)), local, repeats, device, log)
        return
    if device != "cpu" or largest is not None or log is not None:
        rule = "--device, --to and --log go with the library's own collective"
        fix = "Give --algorithm library"
        raise SpecError(f"{algorithm} is a schedule", key="--algorithm", value=algorithm, rule=rule, fix=fix)
    number = local or max(2, int(os.environ.get("WORLD_SIZE", "2")))
    schedule = schedule_named(collective, algorithm, number, per_node, channels, parts)
    schedule.check_hosts_execute()  # before torch is loaded and ranks meet
    from foreshard.profile.collective_times import local_times, time_schedule
    from foreshard.profile.link_times import torchrun_ranks

    ranks = None if local else torchrun_ranks("cpu")
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


def _sweep(
    collective: str, span: tuple[int, int], local: int | None, repeats: int, device: str, log: str | None
) -> None:
    """Time the library's own collective over sizes, and say what was found on the first rank."""
    from foreshard.profile.collective_sweep import as_nccl_tests, local_sweep, sweep
    from foreshard.profile.link_times import torchrun_ranks

    sizes = [span[0] << power for power in range(64) if span[0] << power <= max(span)]
    ranks = None if local else torchrun_ranks(device)
    number = local or (ranks.size if ranks else 2)
    if ranks is not None:
        swept = sweep(ranks, collective, sizes, repeats=repeats)
        if ranks.rank:
            return
    else:
        swept = local_sweep(collective, number, sizes, repeats=repeats, device=device)
    if log is not None:
        write_text(log, as_nccl_tests(swept))
    backend = "nccl" if device == "cuda" else "gloo"
    data = {
        "schema_version": 1,
        "collective": collective,
        "algorithm": _LIBRARY,
        "num_ranks": number,
        "backend": backend,
        "rows": list(swept.rows),
    }
    give(data, lambda: _swept(data))


def _swept(data: dict[str, Any]) -> Screen:
    factor = bus_factor(data["collective"], data["num_ranks"])
    rows = []
    for row in data["rows"]:
        rate = row["size_bytes"] / row["time_s"] / 1e9
        cells = (rate, rate * factor)
        rows.append(
            (quantity.size(row["size_bytes"]), quantity.seconds(row["time_s"]), *map(quantity.digits, cells))
        )
    header = f"{data['collective']} over {data['num_ranks']} ranks, {data['backend']}"
    return Screen(
        header=(header,), tables=(table("", (">size", ">time", ">algbw GB/s", ">busbw GB/s"), rows),)
    )


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
