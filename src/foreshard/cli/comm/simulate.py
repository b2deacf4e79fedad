"""`foreshard comm simulate COLLECTIVE SIZE CLUSTER`: one flow simulation of a schedule on a topology."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.comm.inputs import RATES, load_loops, schedule_named, topology_at
from foreshard.cli.options.answer import dump, give, say, write_text
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Count, Word
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.errors import SpecError
from foreshard.report.screen import Box, Screen, table

if TYPE_CHECKING:
    from foreshard.comm.flow.schedule_run import ScheduleRun
    from foreshard.comm.topology.graph import Topology

_MAX_ROUNDED = 200_000
"""Sends up to which rounds cost no more than the simulation, which folds symmetric ranks."""
_LARGE = 64  # ranks from which a simulation takes about as long as loading the loops


@verb_command("simulate")
@click.argument("collective", type=Word(*COLLECTIVES), metavar="COLLECTIVE")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.argument("cluster", metavar="CLUSTER")
@click.option(
    "--algorithm",
    metavar="NAME|FILE",
    help="An algorithm by name, or a schedule's JSON or MSCCL file (default ring, else direct).",
)
@click.option("--ranks", type=Count(2), help="Take the first N devices (default: all).")
@click.option(
    "--rates", type=Word(*RATES), default="fitted", help="Rates that collectives reach, or raw ones."
)
@click.option("--channels", type=Count(), default=1, help="Channels, each with its part of the data.")
@click.option("--parts", type=Count(), help="Pieces that follow each other (default: one a channel).")
@click.option("--trace", metavar="FILE", help="Write every send as a trace that ui.perfetto.dev opens.")
def command(
    collective: str,
    size: float,
    cluster: str,
    algorithm: str | None,
    ranks: int | None,
    rates: str,
    channels: int,
    parts: int | None,
    trace: str | None,
) -> None:
    """Simulate one collective of SIZE bytes, flow by flow, on the links of CLUSTER.

    CLUSTER is as everywhere, or a topology file: NCCL's XML, an ASTRA-sim yml, a graph as JSON. Flows share
    links fairly (max-min). The lower bound is that of the same sends over the same routes.

    \b
    foreshard comm simulate all-reduce 1GiB 8x8xh100-sxm --algorithm ring
    foreshard comm simulate all-to-all 64MiB 2x8xa100-sxm-80gb --algorithm direct --rates datasheet --json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.comm.flow.places import check_devices, routing_of
    from foreshard.comm.flow.schedule_run import run_schedule, send_times
    from foreshard.comm.schedules.cost import RoundTraffic
    from foreshard.comm.schedules.registry import usual_algorithm
    from foreshard.interop.collective_schedules.send_trace import send_trace

    algorithm = algorithm or usual_algorithm(collective)
    topology, per_node = topology_at(cluster, rates)
    if not size > 0:
        rule, fix = "A collective moves at least one byte", "Give 64KiB"
        raise SpecError("no bytes to move", key="SIZE", value=size, rule=rule, fix=fix)
    check_devices(ranks or topology.num_ranks, topology)
    if topology.num_ranks >= _LARGE:
        load_loops(topology)
    started = time.perf_counter()
    schedule = schedule_named(collective, algorithm, ranks or topology.num_ranks, per_node, channels, parts)
    route = routing_of(schedule, topology, forwarding="any")
    run = run_schedule(schedule, size, topology, route)
    wall_s = time.perf_counter() - started
    rounds = RoundTraffic(schedule, topology, route) if schedule.num_sends <= _MAX_ROUNDED else None
    if trace:
        times = send_times(schedule, size, topology, route)
        write_text(trace, dump(send_trace(schedule, *times, num_bytes=size)) + "\n")
        say(f"trace: {trace}")
    data = {
        "schema_version": 1,
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "size_bytes": int(size),
        "num_ranks": schedule.num_ranks,
        "time_s": run.seconds,
        "lower_bound_s": run.lower_bound_s,
        "gap": max(run.seconds / run.lower_bound_s - 1.0, 0.0),
        "closed_form_s": rounds.cost().time_s(size) if rounds else None,
        "in_lockstep": rounds.is_lockstep() if rounds else None,
        "flows": run.num_sends,
        "busiest": [{"resource": _name(topology, one), "utilisation": part} for one, part in run.busiest],
        "wall_s": wall_s,
    }
    give(data, lambda: _screen(data, run))


def _name(topology: Topology, resource: int) -> str:
    """Return the ends of a link, or the name of a shared resource."""
    if resource >= len(topology.links):
        return topology.shared[resource - len(topology.links)].name
    link = topology.links[resource]
    return f"{topology.vertices[link.source].name} -> {topology.vertices[link.target].name}"


def _in_rounds(data: dict[str, Any]) -> Box:
    """Return the time if all sends of a round waited for those of the round before."""
    note = "closed form: nothing contends" if data["in_lockstep"] else "closed form"
    return Box(title="in rounds", value=quantity.seconds(data["closed_form_s"]), note=note)


def _screen(data: dict[str, Any], run: ScheduleRun) -> Screen:
    header = f"{data['collective']} of {quantity.size(data['size_bytes'])} over {data['num_ranks']} ranks"
    boxes = (
        Box(title="time", value=quantity.seconds(data["time_s"])),
        Box(
            title="no faster than",
            value=quantity.seconds(data["lower_bound_s"]),
            note=f"{100 * data['gap']:.1f} % gap, the same sends over the same routes",
        ),
        *([_in_rounds(data)] if data["closed_form_s"] is not None else []),
        Box(title="flows", value=f"{data['flows']:,}", note=f"{run.num_simulated:,} simulated after folding"),
    )
    rows = [(one["resource"], f"{100 * one['utilisation']:.1f} %") for one in data["busiest"]]
    return Screen(
        header=(header, f"algorithm {data['algorithm']}"),
        boxes=boxes,
        tables=(table("Busiest resources", ("resource", ">busy"), rows),),
    )
