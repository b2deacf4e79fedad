"""One experiment for each co-design of communication: bench/bench_codesign.py NAME [--picture FILE.svg].

    vertical     gradient buckets x algorithm of the all-reduce x order of sending
    horizontal   jobs on one fabric: rotations, priorities, paths and weights against fair share
    intra-inter  NVLink, PCIe and NICs used together: pieces, rails, shared and unequal NICs
    host-net     reduction in a switch against reduction by hosts, alone and beside other tenants

Every time is one of the flow simulation (``comm/flow``) on a topology of a generator or a cluster. A table is
printed, and what follows from it; the picture has the same figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from charts import gain_bars

from foreshard import api, quantity
from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.program import FlowProgramBuilder
from foreshard.comm.flow.schedule_run import Routing, add_schedule, run_schedule
from foreshard.comm.flow.simulation import simulate
from foreshard.comm.fusion.advice import bucket_advice
from foreshard.comm.fusion.priority import best_partition
from foreshard.comm.jobs.comparison import compared
from foreshard.comm.jobs.demand import demands_of
from foreshard.comm.jobs.draw import drawn_jobs
from foreshard.comm.jobs.policies import POLICIES
from foreshard.comm.jobs.trace import load_jobs_file
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.budget import SynthesisBudget
from foreshard.comm.synthesis.synthesize import synthesize
from foreshard.comm.topology.draft import Draft, Port
from foreshard.comm.topology.fabrics import flat, rail_optimised
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import machine, switched
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.comm.topology.routing import Routing as Routes
from foreshard.predict.gradients import backward_pass

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
Gain = tuple[float, float | None]
"""Part by which a time is shorter than the baseline's, and half the width of its interval if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Rows of a table, bars of a picture, and what follows."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    bars: list[tuple[str, list[tuple[str, Gain]]]]
    legend: str
    pays: str


def seconds_of(schedule: Schedule, size: float, topology: Topology, route: Routing | None = None) -> float:
    route = route or routing_of(schedule, topology, forwarding="any")
    return run_schedule(schedule, size, topology, route).seconds


def gain(own_s: float, base_s: float) -> Gain:
    return 1.0 - own_s / base_s, None


def signed(part: float) -> str:
    return f"{100 * part:+.1f} %"


# Vertical: the library sees which gradients come when, and the strategy what each algorithm costs.

VERTICAL_MODEL, NODES, DEVICES = "bert-large", 4, 8
VERTICAL_RATES = (25, 100, 400)  # Gb/s, the one NIC of a node
ALGORITHMS = ("ring", "double-tree", "halving-doubling", "hierarchical")


def all_reduce_cost(algorithm: str, topology: Topology, per_node: int) -> Callable[[object], object]:
    """Return seconds as a function of bytes: simulated at powers of 8, straight lines between."""
    schedule = schedule_of("all-reduce", algorithm, topology.num_ranks, per_node=per_node)
    sizes = 2.0 ** np.arange(6, 34, 3)
    seconds = [seconds_of(schedule, size, topology) for size in sizes]
    return lambda num_bytes: np.interp(num_bytes, sizes, seconds)


def vertical(rates: Sequence[int] = VERTICAL_RATES, algorithms: Sequence[str] = ALGORITHMS) -> Experiment:
    rows, bars = [], []
    for rate in rates:
        cluster = api.load_cluster(f"{NODES}x{DEVICES}xa100-sxm-40gb@{rate}Gb/s")
        topology = topology_of(cluster, rates="fitted", nics_per_node=1)
        request = api.request(api.load_model(VERTICAL_MODEL), cluster, zero=0, micro_batch=8)
        made = backward_pass(request.model, cluster, request.to_plan(), 4.0)
        found: dict[tuple[str, str], float] = {}
        for algorithm in algorithms:
            cost = all_reduce_cost(algorithm, topology, DEVICES)
            advice = bucket_advice(made.gradients, cost)
            _, period_s = best_partition(made.layers, cost)
            busy_s = sum(layer.forward_s + layer.backward_s for layer in made.layers)
            found[algorithm, "ddp 25 MiB"] = advice.default.exposed_s
            found[algorithm, "best cap"] = advice.best_cap.exposed_s
            found[algorithm, "best buckets"] = advice.optimum.exposed_s
            found[algorithm, "priority"] = max(0.0, period_s - busy_s)
            names = [name for one, name in found if one == algorithm]
            cells = [quantity.seconds(found[algorithm, name]) for name in names]
            rows.append((f"{rate} Gb/s", algorithm, *cells))
        base = found[algorithms[0], "ddp 25 MiB"]
        choices = {
            "algorithm alone": min(found[one, "ddp 25 MiB"] for one in algorithms),
            "buckets alone": min(found[algorithms[0], "best cap"], found[algorithms[0], "best buckets"]),
            "order alone": found[algorithms[0], "priority"],
            "algorithm and buckets": min(found[one, "best buckets"] for one in algorithms),
            "all three": min(found.values()),
        }
        work_s = made.gradients.backward_s
        bars.append(
            (f"{rate} Gb/s", [(name, gain(work_s + value, work_s + base)) for name, value in choices.items()])
        )
    return Experiment(
        columns=("NIC", "algorithm", "DDP 25 MiB", "best cap", "best buckets", "priority"),
        rows=rows,
        bars=bars,
        legend=f"{VERTICAL_MODEL} on {NODES} x {DEVICES} A100: backward with exposed reduction, against "
        f"{ALGORITHMS[0]} and 25 MiB buckets.",
        pays="Cells are exposed seconds. It pays where reduction and backward take about as long.",
    )


# Horizontal: jobs know each other's phases.

SEEDS = 10
TRACES = (("shared-fabric", 1), ("shared-fabric", 2), ("shared-fabric", 4), ("two-spines", 1))
"""Jobs files and kinds of job in each: jobs of one kind have equal periods."""


def horizontal(
    seeds: int = SEEDS, traces: Sequence[tuple[str, int]] = TRACES, num_jobs: int | None = None
) -> Experiment:
    rows, bars = [], []
    for trace, kinds in traces:
        stated = load_jobs_file(trace)
        assert stated.draw is not None
        topology = topology_of(api.load_cluster(stated.path_of(stated.cluster)))
        draw = replace(stated.draw, kinds=kinds, jobs=num_jobs or stated.draw.jobs)
        cuts: dict[str, list[float]] = {}
        for seed in range(seeds):
            jobs = drawn_jobs(replace(draw, seed=draw.seed + seed), topology)
            found = compared(demands_of(topology, jobs), list(POLICIES))
            base = found["fair-share"].mean_iteration_s
            for name, own in found.items():
                cuts.setdefault(name, []).append(1.0 - own.mean_iteration_s / base)
        label = f"{stated.name}, {kinds} kind{'s' if kinds > 1 else ''}"
        drawn = []
        for name, values in cuts.items():
            if name == "fair-share":
                continue
            low, middle, high = (float(np.percentile(values, at)) for at in (10, 50, 90))
            rows.append((label, name, signed(middle), signed(low), signed(high), signed(min(values))))
            half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
            drawn.append((name, (float(np.mean(values)), half)))
        bars.append((label, drawn))
    return Experiment(
        columns=("jobs", "policy", "median", "10 %", "90 %", "least"),
        rows=rows,
        bars=bars,
        legend=f"Mean iteration against fair share, {seeds} draws of the shipped rule; bars are means with "
        "their 95 % interval.",
        pays="Cuts of the mean iteration over draws; the bound is that of jobs without contention.",
    )


# Intra-inter: links inside nodes and NICs in one graph.


def permuted(route: Routing, place_of: Sequence[int]) -> Routing:
    """Return the routes of a schedule whose rank r is at another device."""
    return lambda source, target, flow: route(place_of[source], place_of[target], flow)


def nodes_with_nics(num_nodes: int, rates: Sequence[float], *, device: float = 450e9) -> Topology:
    """Return nodes of a device for each NIC, on rails without spines; NICs have rates of their own."""
    draft = Draft()
    rails = [draft.switch(f"rail{i}") for i in range(len(rates))]
    for node in range(num_nodes):
        devices = [draft.vertex("device", f"node{node}.gpu{i}", node=node) for i in range(len(rates))]
        inner = draft.switch(f"node{node}.nvswitch", node=node)
        for i, (one, rate) in enumerate(zip(devices, rates, strict=True)):
            draft.join(one, inner, device, 0.35e-6)
            nic = draft.vertex("nic", f"node{node}.nic{i}", node=node)
            draft.join(one, nic, rate, 1.3e-6)
            draft.plug(Port(vertex=nic, bytes_per_s=rate), rails[i])
    return draft.topology(f"{num_nodes} nodes of {len(rates)}")


def pieces(size: float) -> list[tuple[str, str, float]]:
    """Return an all-reduce over NVLink and NICs, whole and in pieces that are served alike or in order.

    Pieces that share links fairly stay in step: all use NVLink first, then all the NICs. By priority the
    first piece is on the NICs while the second one is on NVLink.
    """
    topology, found = rail_optimised([machine("hgx-a100")] * 4, num_spines=4), []
    schedule = schedule_of("all-reduce", "hierarchical", 32, per_node=8)
    route = routing_of(schedule, topology)
    for parts, in_order in ((1, False), (8, False), (2, True), (4, True), (8, True)):
        builder = FlowProgramBuilder(topology.capacity_bytes_per_s)
        for part in range(parts):
            priority = parts - part if in_order else 0
            add_schedule(builder, schedule, size / parts, topology, route, priority=priority)
        label = "whole" if parts == 1 else f"{parts} pieces, {'in order' if in_order else 'alike'}"
        found.append(("NVLink beside NIC", label, simulate(builder.build()).makespan_s))
    return found


def rails(size: float) -> list[tuple[str, str, float]]:
    """Return an all-reduce along rails, and with places of nodes turned so that rings leave their rail."""
    topology = rail_optimised([machine("hgx-h100")] * 4, num_spines=4, oversubscription=4.0)
    schedule = schedule_of("all-reduce", "hierarchical", 32, per_node=8)
    route = routing_of(schedule, topology)
    turned = [node * 8 + (place + node) % 8 for node in range(4) for place in range(8)]
    return [
        ("rails, spines 4:1", "across rails", seconds_of(schedule, size, topology, permuted(route, turned))),
        ("rails, spines 4:1", "along rails", seconds_of(schedule, size, topology)),
    ]


def shared_nics(size: float) -> list[tuple[str, str, float]]:
    """Return an all-reduce over nodes whose devices share NICs of 50 GB/s, and as many GB/s in one NIC."""
    found = []
    for count in (1, 2, 4, 8):
        server = switched(8, 450e9, num_nics=count, nic_bytes_per_s=50e9)
        topology = flat([server] * 4)
        schedule = schedule_of("all-reduce", "hierarchical", 32, per_node=8)
        label = "1 NIC for 8 devices" if count == 1 else f"{count} NICs"
        found.append(("NICs of 50 GB/s", label, seconds_of(schedule, size, topology)))
    return found


def unequal_nics(size: float) -> list[tuple[str, str, float]]:
    """Return reduce-scatter and all-gather with equal shares, and with shares as the NIC of each rank."""
    rates = (50e9, 50e9, 25e9, 25e9)
    topology, num_nodes = nodes_with_nics(4, rates), 4
    parts = np.tile(np.array(rates) / sum(rates), num_nodes) / num_nodes
    found = []
    for label, weights in (("equal shares", None), ("shares as the NICs", parts.tolist())):
        options = {"per_node": len(rates), "weights": weights}
        both = [
            schedule_of(name, "hierarchical", topology.num_ranks, **options)
            for name in ("reduce-scatter", "all-gather")
        ]
        seconds = sum(seconds_of(schedule, size, topology) for schedule in both)
        found.append(("two NICs half as fast", label, seconds))
    return found


def all_links(size: float, budget_s: float = 20.0) -> list[tuple[str, str, float]]:
    """Return an all-gather on two NDv2: NVLink, PCIe and one NIC, by levels and by trees over all links."""
    topology = flat([machine("ndv2")] * 2)
    what, found = "NDv2 x 2, one graph", []
    for name in ("ring", "hierarchical"):
        schedule = schedule_of("all-gather", name, 16, per_node=8)
        found.append((what, name, seconds_of(schedule, size, topology)))
    made = synthesize("all-gather", size, topology, budget=SynthesisBudget(budget_s))
    return [*found, (what, "synthesised", made.seconds)]


def intra_inter(size: float = GIB, budget_s: float = 20.0) -> Experiment:
    rows, bars = [], []
    for found in (
        pieces(size),
        rails(size),
        shared_nics(size),
        unequal_nics(size),
        all_links(size / 4, budget_s),
    ):
        base_s = found[0][2]
        for what, how, own_s in found:
            rows.append((what, how, quantity.seconds(own_s), signed(1.0 - own_s / base_s)))
        bars.append((found[0][0], [(how, gain(own_s, base_s)) for _, how, own_s in found[1:]]))
    return Experiment(
        columns=("what", "how", "time", "shorter"),
        rows=rows,
        bars=bars,
        legend="1 GiB (NDv2: 256 MiB), time against the first way of each: whole, across rails, one NIC, "
        "equal shares, ring.",
        pays="It pays where NICs, not links inside nodes, are the bottleneck.",
    )


# Host-net: the network adds up.

HOSTS, PORT, HOP_S = 8, 50e9, 1e-6
HOST_ALGORITHMS = ("ring", "double-tree", "halving-doubling")
SIZES = (4 * KIB, 256 * KIB, 16 * MIB, GIB)
TENANTS = (1, 2, 4)


def with_aggregator(num_hosts: int, adding: float) -> Topology:
    """Return hosts on a switch that passes all they send, and an adder behind it with a rate of its own."""
    draft = Draft()
    switch = draft.switch("fabric")
    adder = draft.switch("adder", can_reduce=True)
    draft.join(switch, adder, adding)
    for i in range(num_hosts):
        device = draft.vertex("device", f"host{i}", node=i)
        draft.join(device, switch, PORT, HOP_S)
    return draft.topology(f"{num_hosts} hosts")


def tenants_s(algorithm: str, num_tenants: int, size: float, topology: Topology, parts: int) -> float:
    """Return an all-reduce of tenants of `HOSTS` hosts each that run at once."""
    builder = FlowProgramBuilder(topology.capacity_bytes_per_s)
    schedule = schedule_of("all-reduce", algorithm, HOSTS, parts=parts if algorithm == "sharp" else None)
    routes = Routes(topology)
    adder = next(i for i, one in enumerate(topology.vertices) if one.can_reduce)
    for first in range(0, num_tenants * HOSTS, HOSTS):
        places = [*topology.devices[first : first + HOSTS].tolist(), adder]
        add_schedule(builder, schedule, size, topology, between(routes, places))
    return simulate(builder.build()).makespan_s


def between(routes: Routes, vertices: Sequence[int]) -> Routing:
    """Return the routes of a schedule whose places are these vertices."""
    return lambda source, target, flow: routes.ecmp(vertices[source], vertices[target], flow=flow)


def host_net(sizes: Sequence[float] = SIZES, tenants: Sequence[int] = TENANTS, parts: int = 32) -> Experiment:
    rows, bars = [], []
    for size in sizes:
        for count in tenants if size == sizes[-1] else tenants[:1]:
            topology = with_aggregator(HOSTS * max(tenants), HOSTS * PORT)
            by_host = {name: tenants_s(name, count, size, topology, parts) for name in HOST_ALGORITHMS}
            best = min(by_host, key=by_host.__getitem__)
            own_s = tenants_s("sharp", count, size, topology, parts if size > MIB else 1)
            label = f"{quantity.size(size)}, {count} tenant{'s' if count > 1 else ''}"
            cells = (quantity.seconds(by_host[best]), quantity.seconds(own_s))
            rows.append((label, f"host: {best}", *cells, signed(1.0 - own_s / by_host[best])))
            bars.append((label, [("switch", gain(own_s, by_host[best]))]))
    inside = flat([machine("hgx-h100")])
    for size in sizes:
        ring_s = seconds_of(schedule_of("all-reduce", "ring", 8), size, inside)
        own_s = seconds_of(
            schedule_of("all-reduce", "nvls", 8, parts=parts if size > MIB else 1), size, inside
        )
        label = f"{quantity.size(size)}, NVSwitch"
        cells = (quantity.seconds(ring_s), quantity.seconds(own_s))
        rows.append((label, "host: ring", *cells, signed(1.0 - own_s / ring_s)))
        bars.append((label, [("switch", gain(own_s, ring_s))]))
    return Experiment(
        columns=("what", "best by hosts", "time", "in the switch", "shorter"),
        rows=rows,
        bars=bars,
        legend=f"All-reduce of {HOSTS} hosts; the adder of the switch takes what {HOSTS} ports send. Against "
        "the best by hosts.",
        pays="It pays alone, at every size; not where tenants share the adder.",
    )


EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "vertical": vertical,
    "horizontal": horizontal,
    "intra-inter": intra_inter,
    "host-net": host_net,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--picture", help="also draw the table, as an SVG")
    asked = parser.parse_args()
    found = EXPERIMENTS[asked.name]()
    print(f"| {' | '.join(found.columns)} |")
    print("|---" * len(found.columns) + "|")
    for row in found.rows:
        print(f"| {' | '.join(row)} |")
    print(found.pays)
    if asked.picture:
        parts = [value[0] for _, gains in found.bars for _, value in gains]
        scale = 380.0 / (max([0.0, *parts]) + max([0.0, *(-part for part in parts)]))
        Path(asked.picture).write_text(gain_bars(found.bars, found.legend, scale=scale), encoding="utf-8")


if __name__ == "__main__":
    main()
