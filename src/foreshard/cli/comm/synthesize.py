"""`foreshard comm synthesize COLLECTIVE SIZE CLUSTER`: a schedule made for a topology, with its gap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.comm.inputs import RATES, topology_at
from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Word
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.errors import ForeshardError
from foreshard.report.screen import Box, Screen

if TYPE_CHECKING:
    from foreshard.comm.synthesis.synthesize import Synthesis


_MANY = 256
"""Ranks from which making and checking a schedule takes minutes: each piece reaches each rank by a send."""


@verb_command("synthesize", output="Write the schedule to a file, which comm simulate and comm export take.")
@click.argument("collective", type=Word(*COLLECTIVES), metavar="COLLECTIVE")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.argument("cluster", metavar="CLUSTER")
@click.option(
    "--rates", type=Word(*RATES), default="fitted", help="Rates that collectives reach, or raw ones."
)
@click.option("--budget-s", type=click.FloatRange(0.0, 1e6), default=10.0, help="Seconds to search.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of ties between equal choices.")
@click.pass_context
def command(
    ctx: click.Context, collective: str, size: float, cluster: str, rates: str, budget_s: float, seed: int
) -> None:
    """Make a schedule of one collective for the links of CLUSTER, and bound how far it is from the best.

    The time is that of a flow simulation, as comm simulate says it: flows share links fairly. Links that
    serve their sends in the order of the schedule can be faster.

    \b
    foreshard comm synthesize all-gather 256MiB 2x8xa100-sxm-80gb --budget-s 10 -o schedule.json
    foreshard comm simulate all-gather 256MiB 2x8xa100-sxm-80gb --algorithm schedule.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.comm.flow.places import routing_of
    from foreshard.comm.flow.schedule_run import run_schedule
    from foreshard.comm.schedules.schedule_file import save_schedule
    from foreshard.comm.schedules.verify import verify
    from foreshard.comm.synthesis.synthesize import synthesize

    topology, _ = topology_at(cluster, rates)
    _say_of_many(topology.num_ranks)
    found = synthesize(collective, size, topology, budget_s=budget_s, seed=seed)
    faults = verify(found.schedule).faults
    if faults:
        raise ForeshardError(f"the schedule that {found.method} made is wrong: {faults[0]}")
    output = ctx.meta.pop("foreshard.output", None)
    if output:
        save_schedule(found.schedule, output)
        say(f"schedule: {output}")
    route = routing_of(found.schedule, topology, forwarding="any")
    simulated_s = run_schedule(found.schedule, size, topology, route).seconds
    data = {
        "schema_version": 1,
        "collective": collective,
        "size_bytes": int(size),
        "num_ranks": found.schedule.num_ranks,
        "method": found.method,
        "time_s": simulated_s,
        "in_order_s": found.seconds,
        "lower_bound_s": found.lower_bound_s,
        "gap": simulated_s / found.lower_bound_s - 1.0,
        "sends": found.schedule.num_sends,
        "wall_s": found.wall_s,
    }
    give(data, lambda: _screen(data, found))


def _screen(data: dict[str, Any], found: Synthesis) -> Screen:
    header = f"{data['collective']} of {quantity.size(data['size_bytes'])} over {data['num_ranks']} ranks"
    bound = quantity.seconds(data["lower_bound_s"])
    boxes = (
        Box(title="time", value=quantity.seconds(data["time_s"]), note=f"{data['sends']:,} flows"),
        Box(title="with links in order", value=quantity.seconds(found.seconds)),
        Box(title="no schedule is faster than", value=bound, note=f"gap {100 * data['gap']:.1f} %"),
        Box(title="found by", value=found.method, note=f"in {quantity.seconds(found.wall_s)}"),
    )
    return Screen(header=(header,), boxes=boxes)


def _say_of_many(num_ranks: int) -> None:
    if num_ranks >= _MANY:
        sends = f"{num_ranks * (num_ranks - 1):,}"
        say(f"{num_ranks} ranks: at least {sends} sends are made, checked and simulated, whatever --budget-s")
