"""Closed form beside flow simulation of every algorithm: python bench/bench_schedules.py [--draws 20000].

Draws collectives, algorithms, 2 to 9 ranks, channels, pieces, sizes of 1 KiB to 1 GiB and networks: one
switch, a ring, a full mesh, two hosts with a NIC each, rails, leaves and spines oversubscribed up to four
times. Where ranks proceed in lockstep and nothing contends both must take the same time, to 0.1 %; nowhere
may the closed form be below the bound of the simulation: the bytes of its busiest resource, and its longest
chain of sends.
Exit code 0 if that holds in every draw, else 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.schedule_run import Routing, ScheduleRun, run_schedule
from foreshard.comm.schedules.cost import RoundTraffic
from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.topology.fabrics import flat, leaf_spine, rail_optimised
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import switched
from foreshard.comm.topology.regular import full_mesh, ring, star
from foreshard.errors import SpecError

EXACT, BELOW = 1e-3, 1e-9
KINDS = ("switch", "ring", "mesh", "hosts", "rails", "leaves")
host = partial(switched, bytes_per_s=450e9, nic_bytes_per_s=50e9, can_reduce=True)


def network(kind: str, num_ranks: int, per_node: int, rng: random.Random) -> Topology:
    """Return a network of a kind, of `num_ranks` devices in nodes of `per_node`."""
    nodes = num_ranks // per_node
    regular: dict[str, Callable[..., Topology]] = {"switch": star, "ring": ring, "mesh": full_mesh}
    if kind in regular:
        return regular[kind](num_ranks, 50e9, rng.choice([0.0, 1e-6]))
    if kind == "hosts":
        return flat([host(per_node, num_nics=1)] * nodes, can_reduce=True)
    over = {"num_spines": rng.choice([1, 2]), "oversubscription": rng.choice([1.0, 2.0, 4.0]), "hop_s": 1e-6}
    if kind == "rails":
        return rail_optimised([host(per_node, num_nics=per_node)] * nodes, **over)
    machines = [host(per_node, num_nics=rng.choice([1, per_node]))] * nodes
    return leaf_spine(machines, nodes_per_leaf=rng.choice([1, 2]), **over)


def draws(count: int, seed: int) -> Iterator[tuple[str, Schedule, float, Topology, Routing]]:
    """Yield kind of network, schedule, size, network and routes; what an algorithm refuses is drawn anew."""
    rng = random.Random(seed)
    pairs = [(collective, name) for name, one in ALGORITHMS.items() for collective in one.collectives]
    while count:
        collective, name = rng.choice(pairs)
        kind, num_ranks = rng.choice(KINDS), rng.randint(2, 9)
        nodes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        per_node = num_ranks // 2 if kind == "hosts" else rng.choice(nodes)
        options = {"channels": rng.randint(1, 4), "parts": rng.choice([None, 1, 2, 3, 4])}
        try:
            topology = network(kind, per_node * (num_ranks // per_node), per_node, rng)
            schedule = schedule_of(collective, name, topology.num_ranks, per_node=per_node, **options)
            route = routing_of(schedule, topology, forwarding="any")
        except SpecError:
            continue
        yield kind, schedule, 2.0 ** rng.uniform(10, 30), topology, route
        count -= 1


def class_of(rounds: RoundTraffic, run: ScheduleRun) -> str:
    """Return why closed form and simulation may differ."""
    if rounds.is_lockstep():
        return "lockstep, nothing contends"
    if run.seconds <= run.longest_path_s * (1 + BELOW):
        return "nothing contends, ranks run ahead"
    return "sends share links"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    least, wrong = np.inf, 0
    for kind, schedule, size, topology, route in draws(options.draws, options.seed):
        run = run_schedule(schedule, size, topology, route)
        rounds = RoundTraffic(schedule, topology, route)
        closed_s, name = rounds.cost().time_s(size), class_of(rounds, run)
        off, over = closed_s / run.seconds - 1.0, closed_s / run.lower_bound_s
        found[name].append(off)
        least = min(least, over)
        is_wrong = over < 1 - BELOW or (name.startswith("lockstep") and abs(off) > EXACT)
        wrong += is_wrong
        if is_wrong:
            what = f"{schedule.collective} by {schedule.algorithm}, {schedule.num_ranks} ranks, {kind}"
            print(f"{what}: {off:+.1%}")
    print("| closed form over flow simulation | draws | within 0.1 % | least | median | most |")
    print("|---|---|---|---|---|---|")
    for name, errors in sorted(found.items()):
        exact = np.mean(np.abs(errors) <= EXACT)
        low, middle, high = np.round(100 * np.quantile(errors, [0.0, 0.5, 1.0]), 1) + 0.0  # no -0.0
        print(f"| {name} | {len(errors):,} | {exact:.0%} | {low:+.1f} % | {middle:+.1f} % | {high:+.1f} % |")
    print(f"\nleast over the bound of the simulation: {least:.9f}; wrong: {wrong}")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
