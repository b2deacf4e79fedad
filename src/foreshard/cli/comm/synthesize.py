"""`foreshard comm synthesize COLLECTIVE SIZE CLUSTER`: a schedule made for a topology, with its gap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.comm.inputs import RATES, check_ranks, load_loops, topology_at
from foreshard.cli.options.answer import give, save
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import ByteCount, Word
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.report.screen import Box, Screen

if TYPE_CHECKING:
    from foreshard.comm.synthesis.synthesize import Synthesis


_SEVERAL = 8  # ranks from which what is found has so many sends that the simulation is compiled


@verb_command("synthesize", output="Write the schedule to a file, which comm simulate and comm export take.")
@click.argument("collective", type=Word(*COLLECTIVES), metavar="COLLECTIVE")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.argument("cluster", metavar="CLUSTER")
@click.option(
    "--rates", type=Word(*RATES), default="fitted", help="Rates that collectives reach, or raw ones."
)
@click.option(
    "--budget-s",
    type=click.FloatRange(0.0, 1e6),
    default=10.0,
    help="Seconds to take (default 10): first an algorithm of the library, then better schedules.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of ties between equal choices.")
@click.pass_context
def command(
    ctx: click.Context, collective: str, size: float, cluster: str, rates: str, budget_s: float, seed: int
) -> None:
    """Make a schedule of one collective for the links of CLUSTER, and bound how far it is from the best.

    The time is that of a flow simulation, as comm simulate says it: flows share links fairly. Links that
    serve their sends in the order of the schedule can be faster. Ctrl-C ends the search with the best so far.

    \b
    foreshard comm synthesize all-gather 256MiB 2x8xa100-sxm-80gb --budget-s 10 -o schedule.json
    foreshard comm simulate all-gather 256MiB 2x8xa100-sxm-80gb --algorithm schedule.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.comm.flow.places import routing_of
    from foreshard.comm.flow.schedule_run import run_schedule
    from foreshard.comm.schedules.schedule_file import save_schedule
    from foreshard.comm.synthesis.budget import SynthesisBudget
    from foreshard.comm.synthesis.synthesize import synthesize

    budget = SynthesisBudget(budget_s)
    topology, _ = topology_at(cluster, rates)
    check_ranks("CLUSTER", collective, topology.num_ranks)
    if topology.num_ranks >= _SEVERAL:
        load_loops(topology)
    found = synthesize(collective, size, topology, budget=budget, seed=seed)
    output = ctx.meta.pop("foreshard.output", None)
    if output:
        save(output, "schedule", lambda: save_schedule(found.schedule, output))
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
        "wall_s": budget.spent_s,
        "interrupted": found.is_interrupted,
    }
    give(data, lambda: _screen(data, found))


def _screen(data: dict[str, Any], found: Synthesis) -> Screen:
    header = f"{data['collective']} of {quantity.size(data['size_bytes'])} over {data['num_ranks']} ranks"
    bound = quantity.seconds(data["lower_bound_s"])
    boxes = (
        Box(title="time", value=quantity.seconds(data["time_s"]), note=f"{data['sends']:,} flows"),
        Box(title="with links in order", value=quantity.seconds(found.seconds)),
        Box(title="no schedule is faster than", value=bound, note=f"gap {100 * data['gap']:.1f} %"),
        Box(title="found by", value=found.method, note=f"in {quantity.seconds(data['wall_s'])}"),
    )
    notes = ("Ctrl-C ended the search: this is the best so far.",) if data["interrupted"] else ()
    return Screen(header=(header,), boxes=boxes, notes=notes)
