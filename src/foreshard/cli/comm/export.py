"""`foreshard comm export SCHEDULE`: a schedule in the format of another tool, or a topology as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foreshard.cli.comm.simulate import RATES, schedule_file, topology_at
from foreshard.cli.options.answer import give, say, write_text
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Word
from foreshard.errors import SpecError
from foreshard.report.screen import Screen

FORMATS = ("msccl", "goal", "json", "svg", "graph")
_OF_TOPOLOGY = ("svg", "graph")


@verb_command("export", output="Write the file here (default: standard output).")
@click.argument("what", metavar="SCHEDULE|CLUSTER")
@click.option("--to", "target", type=Word(*FORMATS), required=True, help="Format to write.")
@click.option("--size", type=ByteCount(), help="Bytes of the collective, which goal needs.")
@click.option("--rates", type=Word(*RATES), default="datasheet", help="Of links, for svg and graph.")
@click.pass_context
def command(ctx: click.Context, what: str, target: str, size: float | None, rates: str) -> None:
    """Write a schedule for another tool: msccl (XML), goal (LogGOPSim), json; or a topology as svg or graph.

    \b
    foreshard comm export schedule.json --to msccl -o schedule.xml
    foreshard comm export 2x8xh100-sxm --to svg -o network.svg
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    text = _of_topology(what, target, rates) if target in _OF_TOPOLOGY else _of_schedule(what, target, size)
    output = ctx.meta.pop("foreshard.output", None)
    if output:
        write_text(output, text)
        say(f"{target}: {output}")
    data: dict[str, Any] = {
        "schema_version": 1,
        "format": target,
        "file": output,
        "text": None if output else text,
    }
    if output or ctx.meta.get("foreshard.as_json"):
        give(data, lambda: Screen(header=(f"{Path(what).name} as {target}",)))
    else:
        click.echo(text)


def _of_topology(what: str, target: str, rates: str) -> str:
    from foreshard.cli.options.answer import dump
    from foreshard.comm.topology.drawing import drawing
    from foreshard.comm.topology.importers.plain_graph import plain_graph

    topology, _ = topology_at(what, rates)
    return drawing(topology) if target == "svg" else dump(plain_graph(topology)) + "\n"


def _of_schedule(what: str, target: str, size: float | None) -> str:
    from foreshard.cli.options.answer import dump
    from foreshard.interop.schedules.goal import goal_text
    from foreshard.interop.schedules.msccl import msccl_xml
    from foreshard.interop.schedules.schedule_file import schedule_object

    schedule = schedule_file(what)
    if target == "goal":
        if size is None:
            raise SpecError(
                "no size", key="--size", rule="GOAL has bytes of every send", fix="Give --size, such as 1GiB"
            )
        return goal_text(schedule, size)
    return msccl_xml(schedule) if target == "msccl" else dump(schedule_object(schedule)) + "\n"
