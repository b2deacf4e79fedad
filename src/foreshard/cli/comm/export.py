"""`foreshard comm export SCHEDULE`: a schedule in the format of another tool, or a topology as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foreshard.cli.comm.inputs import RATES, schedule_file, topology_at
from foreshard.cli.options.answer import give, say, write_text
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Word
from foreshard.errors import SpecError
from foreshard.file_replacement import replace_file
from foreshard.report.screen import Screen

FORMATS = ("msccl", "goal", "chakra", "json", "svg", "graph", "nccl-tuner")
_OF_TOPOLOGY = ("svg", "graph")


@verb_command("export", output="Write the file here (default: standard output).")
@click.argument("what", metavar="SCHEDULE|CLUSTER")
@click.option("--to", "target", type=Word(*FORMATS), required=True, help="Format to write.")
@click.option("--size", type=ByteCount(), help="Bytes of the collective, which goal needs.")
@click.option("--rates", type=Word(*RATES), default="datasheet", help="Of links, for svg and graph.")
@click.pass_context
def command(ctx: click.Context, what: str, target: str, size: float | None, rates: str) -> None:
    """Write a schedule for another tool: msccl (XML), goal (LogGOPSim), chakra (one file a rank), json.

    Of a cluster: its topology as svg or graph, or nccl-tuner, the algorithm that NCCL's own model picks for
    every size, as the file that pins it (NCCL_TUNER_CONFIG_FILE).

    \b
    foreshard comm export schedule.json --to msccl -o schedule.xml
    foreshard comm export 2x8xh100-sxm --to svg -o network.svg
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    output = ctx.meta.pop("foreshard.output", None)
    if target == "chakra":
        _write_chakra(what, size, output)
        return
    if target == "nccl-tuner":
        text = _tuner_file(what)
    else:
        text = (
            _of_topology(what, target, rates) if target in _OF_TOPOLOGY else _of_schedule(what, target, size)
        )
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
    from foreshard.comm.schedules.schedule_file import schedule_object
    from foreshard.interop.collective_schedules.goal import goal_text
    from foreshard.interop.collective_schedules.msccl import msccl_xml

    schedule = schedule_file(what)
    if target == "goal":
        return goal_text(schedule, _sized(size))
    return msccl_xml(schedule) if target == "msccl" else dump(schedule_object(schedule)) + "\n"


def _sized(size: float | None) -> float:
    if size is None:
        rule, fix = "The format has bytes of every send", "Give --size, such as 1GiB"
        raise SpecError("no size", key="--size", rule=rule, fix=fix)
    return size


def _write_chakra(what: str, size: float | None, output: str | None) -> None:
    """Write NAME.RANK.et for every rank."""
    from foreshard.cli.options.answer import save
    from foreshard.interop.collective_schedules.chakra import chakra_traces

    if output is None:
        rule, fix = "Chakra has a file for each rank", "Give -o NAME; NAME.0.et and so on are written"
        raise SpecError("no output file", key="-o", rule=rule, fix=fix)
    traces = chakra_traces(schedule_file(what), _sized(size))
    for rank, trace in enumerate(traces):
        path = Path(f"{output}.{rank}.et")
        save(str(path), f"rank {rank}", lambda path=path, trace=trace: replace_file(path, trace))  # type: ignore[misc]
    data = {"schema_version": 1, "format": "chakra", "file": output, "ranks": len(traces)}
    give(data, lambda: Screen(header=(f"{Path(what).name} as {len(traces)} Chakra files",)))


def _tuner_file(cluster: str) -> str:
    """Return the picks of NCCL's model for a communicator of all devices of a cluster."""
    from foreshard import api
    from foreshard.comm.nccl.communicator import communicator_of
    from foreshard.interop.collective_schedules.nccl_tuner import nccl_tuner_csv, picked_choices

    loaded = api.load_cluster(cluster)
    return nccl_tuner_csv(picked_choices(communicator_of(loaded, loaded.num_devices)))
