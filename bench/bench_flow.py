"""The flow simulation against a full re-solve at every event: python bench/bench_flow.py.

Irregular traffic: flows with random routes of four resources, sizes of 1 MB to 1 GB and starts in one second,
in one fabric or in separate pods. The baseline solves all rates at each start and each end, in
numpy. Regular traffic: ring all-reduces of 1 GiB, symmetric ranks simulated once or each.
Every row compares results too. Steps: whole training steps whose transfers share links and NICs, beside the
graph engine without sharing; processor time, compiled and in plain Python. One core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import training_constants
from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.schedule_run import run_schedule
from foreshard.comm.flow.simulation import simulate
from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.comm.topology.graph import Edge, SharedResource, Topology, Vertex
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.engine import graph_times, shared_times
from foreshard.predict.graph.lowering import lower
from foreshard.predict.graph.prices import group_prices
from foreshard.predict.graph.transfers import SharedPorts

GIB = 2.0**30
NODE = 8


def irregular(num_flows: int, num_resources: int, num_pods: int = 1) -> FlowProgram:
    rng = np.random.default_rng(0)
    builder = FlowProgramBuilder(rng.uniform(1e9, 50e9, num_resources))
    pod_size = num_resources // num_pods
    routes = [
        builder.route((i % num_pods * pod_size + rng.choice(pod_size, 4, replace=False)).tolist())
        for i in range(num_flows)
    ]
    sizes, starts = rng.uniform(1e6, 1e9, num_flows), rng.uniform(0.0, 1.0, num_flows)
    builder.add_many(num_bytes=sizes, release_s=starts, route=routes)
    return builder.build()


def ring(num_ranks: int, stride: int) -> Schedule:
    """All-reduce of rings that connect every `stride`-th rank; each reduces its part of the size."""
    rounds = 2 * (num_ranks // stride - 1)
    at, source = np.repeat(np.arange(rounds), num_ranks), np.tile(np.arange(num_ranks), rounds)
    waits = at > 0
    return Schedule(
        collective="all-reduce",
        algorithm="ring",
        num_ranks=num_ranks,
        chunks=tuple(chunks_of("all-reduce", num_ranks)),
        source=source,
        target=(source + stride) % num_ranks,
        chunk=(source - stride * at) % num_ranks,
        is_reduced=at < rounds // 2,
        channel=np.zeros(len(source), dtype=np.int64),
        indptr=np.concatenate([[0], np.cumsum(waits)]),
        indices=((at - 1) * num_ranks + (source - stride) % num_ranks)[waits],
    )


def fabric(num_ranks: int, stride: int) -> Topology:
    """Link r leaves rank r: to the next rank (NVLink in a node, else a NIC), or on its rail to the next node.

    Eight rails share the uplink of their node, oversubscribed by four.
    """
    vertices = tuple(Vertex(name=f"gpu{i}", kind="device", node=i // NODE) for i in range(num_ranks))
    uplink = NODE * 50e9 / 4.0
    shared = tuple(SharedResource(name=f"up{i}", bytes_per_s=uplink) for i in range(num_ranks // NODE))
    links = []
    for rank in range(num_ranks):
        is_inside = stride == 1 and rank % NODE < NODE - 1
        speed = (
            {"bytes_per_s": 450e9, "latency_s": 1e-6}
            if is_inside
            else {"bytes_per_s": 50e9, "latency_s": 5e-6}
        )
        ends = {"source": rank, "target": (rank + stride) % num_ranks}
        links.append(Edge(**ends, **speed, shared=() if stride == 1 else (rank // NODE,)))
    return Topology(vertices=vertices, links=tuple(links), shared=shared)


def max_min_rates(flow: np.ndarray, resource: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Return max-min rates by progressive filling; entry i says that flow[i] uses resource[i]."""
    rate, left = np.zeros(flow.max(initial=-1) + 1), capacity.copy()
    while len(flow):
        load = np.bincount(resource, minlength=len(left))
        used = load > 0
        level = np.full(len(left), np.inf)
        level[used] = left[used] / load[used]
        full = level <= level.min() * (1.0 + 1e-12)
        fixed = np.unique(flow[full[resource]])
        rate[fixed] = level.min()
        done = np.isin(flow, fixed)
        left -= np.bincount(resource[done], rate[flow[done]], minlength=len(left))
        flow, resource = flow[~done], resource[~done]
    return rate


def full_resolve(program: FlowProgram) -> np.ndarray:
    """Return the end of each flow, with all rates solved anew at each event."""
    left, end_s, now_s = program.num_bytes.copy(), np.full(program.num_tasks, np.inf), 0.0
    routes = program.route_resources.reshape(-1, 4)[program.route]
    while True:
        active = np.flatnonzero((program.release_s <= now_s) & np.isinf(end_s))
        later = program.release_s[program.release_s > now_s]
        if not len(active) and not len(later):
            return end_s
        flow = np.repeat(np.arange(len(active)), 4)
        rate = max_min_rates(flow, routes[active].ravel(), program.capacity_bytes_per_s)
        to_end_s = left[active] / rate
        step_s = min(to_end_s.min(initial=np.inf), later.min(initial=np.inf) - now_s)
        left[active] -= rate * step_s
        now_s += step_s
        end_s[active[to_end_s <= step_s * (1 + 1e-13)]] = now_s


def timed(work: Callable[[], object], repeats: int) -> tuple[float, object]:
    work()  # compiles, and warms caches
    best_s = np.inf
    for _ in range(repeats):
        begin_s = time.perf_counter()
        result = work()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s, result


def print_irregular(numpy_flows: int) -> None:
    print("| flows x resources | simulation s | full re-solve, numpy | difference |")
    print("|---|---|---|---|")
    for num_flows, num_resources, num_pods in ((100, 40, 1), (500, 200, 1), (2000, 500, 1), (2000, 500, 50)):
        program = irregular(num_flows, num_resources, num_pods)
        own_s, times = timed(partial(simulate, program, compiled=True), repeats=3)
        cells = "not run | -"
        if num_flows <= numpy_flows:
            begin_s = time.perf_counter()
            end_s = full_resolve(program)
            ratio = (time.perf_counter() - begin_s) / own_s
            cells = f"{ratio:.1f}x | {np.abs(end_s / times.end_s - 1.0).max():.0e}"
        name = f"{num_flows} x {num_resources}" + (f", {num_pods} pods" if num_pods > 1 else "")
        print(f"| {name} | {own_s:.3f} | {cells} |", flush=True)


def print_regular() -> None:
    print("| ring all-reduce | sends | simulated | folded s | each rank | result ms | difference |")
    print("|---|---|---|---|---|---|---|")
    cases = [(f"{n} ranks, one ring", n, 1) for n in (64, 256, 1024)]
    cases += [(f"{n} ranks, 8 rails, uplink over 4", n, NODE) for n in (64, 1024)]
    for name, num_ranks, stride in cases:
        topology = fabric(num_ranks, stride)
        arguments = (ring(num_ranks, stride), GIB, topology, lambda source, target, flow: (source,))
        folded_s, folded = timed(partial(run_schedule, *arguments, compiled=True), repeats=3)
        each_s, each = timed(partial(run_schedule, *arguments, folded=False, compiled=True), repeats=1)
        print(
            f"| {name} | {folded.num_sends:,} | {folded.num_simulated:,} | {folded_s:.4f} "
            f"| {each_s / folded_s:.1f}x | {folded.seconds * 1e3:.6f} "
            f"| {abs(each.seconds / folded.seconds - 1.0):.0e} |",
            flush=True,
        )


_PLAIN_PHASES = 50_000  # plain Python runs so many in about a second
STEPS = (
    ("llama3-8b", "8x8xh100-sxm", {"tp": 8, "pp": 4, "global_batch": 512}),
    ("mixtral-8x7b", "4x8xh100-sxm", {"tp": 2, "pp": 2, "ep": 4, "vpp": 2, "schedule": "interleaved"}),
    ("llama3-8b", "16x8xh100-sxm@400Gb/s", {"zero": 3, "tp": 2, "framework": "torchtitan"}),
    ("llama3-405b", "2048x8xh100-sxm", {"tp": 8, "pp": 16, "global_batch": 2048}),
    ("llama3-405b", "2048x8xh100-sxm", {"tp": 8, "pp": 16, "global_batch": 131072}),
)


def processor_s(work: Callable[[], object]) -> tuple[float, object]:
    """Return the median processor time of three calls, and what the last returned."""
    taken = []
    for _ in range(3):
        begin_s = time.process_time()
        result = work()
        taken.append(time.process_time() - begin_s)
    return sorted(taken)[1], result


def print_steps() -> None:
    print(
        "| step | tasks | phases | graph s | shared, compiled s | shared, Python s | step over closed form |"
    )
    print("|---|---|---|---|---|---|---|")
    for model_name, cluster_name, choices in STEPS:
        model, cluster = api.load_model(model_name), api.load_cluster(cluster_name)
        plan = replace(api.make_plan(model, cluster, **choices), comm={"grad_overlap": True})
        framework = load_framework(plan.framework)
        case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=framework)
        batch = build_batch([case], training_constants())
        step = lower(group_prices(case, batch), 0.0)
        ports = SharedPorts.of(case, batch)
        shared = ports.run(step, compiled=True)  # compiles
        closed_s, closed = processor_s(partial(graph_times, case, batch, timeline=False))
        compiled_s, flow = processor_s(partial(shared_times, case, batch, timeline=False, compiled=True))
        plain = partial(shared_times, case, batch, timeline=False, compiled=False)
        python_s = f"{processor_s(plain)[0]:.3f}" if len(shared.phases.task) < _PLAIN_PHASES else "not run"
        ratio = sum(flow[0].values()) / sum(closed[0].values())
        print(
            f"| {model_name}, {cluster.num_devices:,} devices, batch {plan.global_batch:,} "
            f"| {step.program.num_tasks:,} | {len(shared.phases.task):,} | {closed_s:.3f} | {compiled_s:.3f} "
            f"| {python_s} | {ratio:.6f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--numpy-flows",
        type=int,
        default=500,
        help="most flows that the numpy baseline runs (2,000: a minute)",
    )
    parser.add_argument("--steps", action="store_true", help="whole steps only")
    options = parser.parse_args()
    if not options.steps:
        print_irregular(options.numpy_flows)
        print()
        print_regular()
        print()
    print_steps()


if __name__ == "__main__":
    main()
