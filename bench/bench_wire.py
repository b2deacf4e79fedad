"""Real steps on hosts with slow links: how gradients are summed, predicted beside measured.

Two hosts of three ranks each are network namespaces; all that leaves a host passes one link of 50 to 400 Mb/s
(`foreshard lab`, root on Linux). Six replicas train layers of 512 KiB of parameters that stand for those of
an accelerator: they sleep for what they would compute, so that the cores are left to the messages. Gradients,
their sums and the steps are real. Each case is one run of the command; its links change every few steps.

Then gradients are compressed, in one bucket.

Predicted: gradients become ready as the layers sleep, buckets follow each other, and each takes what the flow
simulation of its schedule takes on this topology. Links pass their rate times 1448/1514, the payload of full
Ethernet frames. The library's all-reduce and all-gather are taken for rings. What the hosts add (messages,
compression, vote, update) is taken from the steps of the same case on links of 10 Gb/s, before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from foreshard.comm.compression.methods import compression_method, wire_bytes
from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.schedule_run import run_schedule
from foreshard.comm.fusion.timeline import Gradients, bucket_times
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.schedule_file import load_schedule, save_schedule
from foreshard.comm.synthesis.budget import SynthesisBudget
from foreshard.comm.synthesis.synthesize import synthesize
from foreshard.comm.topology.graph import Edge, Topology, Vertex
from foreshard.lab.network import missing

HOSTS, PER_HOST = 2, 3
RANKS = HOSTS * PER_HOST
ROWS, COLUMNS = 256, 512
LAYERS, LAYER_BYTES, FORWARD_S, BACKWARD_S = 6, 512 * 1024, 0.02, 0.04
FREE_MBIT, RATES_MBIT = 10_000, (400, 200, 100, 50)
PHASES_MBIT = (FREE_MBIT, *RATES_MBIT, FREE_MBIT)
COMPRESSED = ("powersgd:4", "topk:0.01", "onebit", "int8", "fp8")
WARM, COUNTED = 2, 6
"""Steps at each rate that are not counted, while the links are being changed, and that are."""
PAYLOAD = 1448 / 1514
HOST_BYTES_PER_S, HOP_S = 2e9, 2.5e-5
"""Between ranks of a host; and the latency of a link, four of which have 0.1 ms (docs/lab.md)."""
MESSAGE_S = 1e-3
"""Latency of a link for which a schedule is synthesized: messages cost hosts time, and should be few."""
JOB = f'''
"""Layers that sleep for what an accelerator would compute."""
import time
import torch
from torch import nn

class Busy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        time.sleep({FORWARD_S})
        return x.clone()

    @staticmethod
    def backward(context, grad):
        time.sleep({BACKWARD_S})
        return grad

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn({ROWS}, {COLUMNS}) / {LAYER_BYTES})

    def forward(self, x):
        return Busy.apply(x) * (1.0 + self.weight.mean())

def model(): return [Layer] * {LAYERS}
def dataset(): return torch.arange(64.0).view(64, 1) / 64
def inputs(batch): return batch
def loss(output, batch): return (output - batch).square().sum(), len(output)
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
'''


@dataclass(frozen=True)
class Case:
    """How a run sums: the values of `--collectives` and `--compress`, and layers in a bucket."""

    name: str
    collectives: str
    layers: int
    compress: str = ""


def topology(mbit: float, hop_s: float = HOP_S) -> Topology:
    """Hosts with one link each to a switch."""
    devices = [Vertex(name=f"rank{rank}", kind="device", node=rank // PER_HOST) for rank in range(RANKS)]
    hosts = [Vertex(name=f"host{host}", kind="switch", node=host) for host in range(HOSTS)]
    links = []
    for rank in range(RANKS):
        links += _both(rank, RANKS + rank // PER_HOST, HOST_BYTES_PER_S, hop_s)
    for host in range(HOSTS):
        links += _both(RANKS + host, RANKS + HOSTS, mbit * 125e3 * PAYLOAD, hop_s)
    middle = Vertex(name="bridge", kind="switch")
    return Topology(vertices=(*devices, *hosts, middle), links=tuple(links))


def _both(a: int, b: int, rate: float, latency_s: float) -> list[Edge]:
    return [Edge(source=x, target=y, bytes_per_s=rate, latency_s=latency_s) for x, y in ((a, b), (b, a))]


def schedule_named(collectives: str) -> Schedule:
    """The schedule of a case; the library's own is a ring in two segments."""
    if collectives.endswith(".json"):
        return load_schedule(collectives)
    if collectives == "backend":
        return schedule_of("all-reduce", "ring", RANKS)
    name, _, rest = collectives.partition(":")
    options = {key: int(value) for key, value in (part.split("=") for part in rest.split(",") if part)}
    return schedule_of("all-reduce", name, RANKS, **options)


@cache
def sum_s(case: Case, num_bytes: float, mbit: float) -> float:
    """Seconds of a sum by flow simulation."""
    if not case.compress:
        return flow_s(schedule_named(case.collectives), num_bytes, mbit)
    wire = wire_bytes(compression_method(case.compress), ((ROWS, COLUMNS),) * case.layers, RANKS)
    found = 0.0
    if wire.summed:
        found += wire.steps * flow_s(schedule_of("all-reduce", "ring", RANKS), wire.summed / wire.steps, mbit)
    if wire.gathered:
        found += flow_s(schedule_of("all-gather", "ring", RANKS), RANKS * wire.gathered, mbit)
    if wire.exchanged:
        found += flow_s(schedule_of("all-to-all", "direct", RANKS), wire.exchanged, mbit)
    return found


def flow_s(schedule: Schedule, num_bytes: float, mbit: float) -> float:
    """Seconds of a schedule by flow simulation."""
    network = topology(mbit)
    return run_schedule(schedule, num_bytes, network, routing_of(schedule, network, forwarding="any")).seconds


def network_s(case: Case, mbit: float) -> float:
    """Seconds of a step: layers, and what of the sums is exposed."""
    ready = BACKWARD_S * np.arange(1, LAYERS + 1)
    sizes = np.full(LAYERS, float(LAYER_BYTES))
    names = tuple(f"layer{i}" for i in reversed(range(LAYERS)))
    made = Gradients(names=names, num_bytes=sizes, ready_s=ready, backward_s=float(ready[-1]))
    bounds = tuple((at, min(at + case.layers, LAYERS)) for at in range(0, LAYERS, case.layers))
    times = bucket_times(made, bounds, lambda size: sum_s(case, float(size), mbit))
    return LAYERS * FORWARD_S + max(times[-1].end_s, made.backward_s)


def measured_s(folder: Path, case: Case) -> dict[int, float]:
    """Median seconds of a step at each rate, by the command."""
    command = [sys.executable, "-m", "foreshard", "lab", "lab.toml", "job.py", "--plan", "plan.json"]
    sums = ["--collectives", case.collectives, "--buckets", str(case.layers * LAYER_BYTES)]
    sums += ["--compress", case.compress] if case.compress else []
    steps = len(PHASES_MBIT) * (WARM + COUNTED)
    out = f"run-{case.name}-{case.layers}"
    subprocess.run(
        [*command, *sums, "--steps", str(steps), "--out", out, "--json", "--no-save-last"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time_metrics/end_to_end(s)"] for line in lines]
    each = WARM + COUNTED
    found: dict[int, list[float]] = {}
    for at, rate in enumerate(PHASES_MBIT):
        found.setdefault(rate, []).extend(times[at * each + WARM : (at + 1) * each])
    return {rate: median(some) for rate, some in found.items()}


def write_inputs(folder: Path) -> None:
    """Write the job, the lab and the plan."""
    (folder / "job.py").write_text(JOB)
    changes = "".join(
        f'[[change]]\nat_step = {(at + 1) * (WARM + COUNTED)}\nbandwidth = "{rate} Mb/s"\n'
        for at, rate in enumerate(PHASES_MBIT[1:])
    )
    ranks = f"[[ranks]]\ncount = {RANKS}\nper_host = {PER_HOST}\n"
    network = f'[network]\nbandwidth = "{FREE_MBIT} Mb/s"\n'
    (folder / "lab.toml").write_text(f'clock = "wall"\n{ranks}{network}{changes}')
    groups = [{"share": 1, "stages": [{"ranks": [rank], "layers": [[0, LAYERS]]}]} for rank in range(RANKS)]
    plan = {"global_batch": RANKS, "seq_len": 1, "precision": "fp32", "groups": groups}
    (folder / "plan.json").write_text(json.dumps(plan))


def cases(folder: Path) -> list[Case]:
    """What is compared: first the library's own sum of all gradients at once."""
    budget = SynthesisBudget(10.0)
    made = synthesize("all-reduce", LAYERS * LAYER_BYTES, topology(100, MESSAGE_S), budget=budget)
    file = str(folder / "synthesized.json")
    save_schedule(made.schedule, file)
    print(f"synthesized: {made.method}, {made.schedule.num_sends} sends, gap to the bound {made.gap:.1%}")
    nested = f"hierarchical:per_node={PER_HOST}"
    return [
        Case("backend", "backend", LAYERS),
        Case("ring", "ring", LAYERS),
        Case("hierarchical", nested, LAYERS),
        Case("synthesized", file, LAYERS),
        Case("backend", "backend", 1),
        Case("hierarchical", nested, 2),
        Case("hierarchical", nested, 1),
        *(Case(method, "backend", LAYERS, method) for method in COMPRESSED),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", metavar="SUM", help="the first case and those of these names")
    only = parser.parse_args().only
    lacks = missing()
    if lacks is not None:
        print(f"not run: {lacks}")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        first: list[float] = []
        first_told: list[float] = []
        errors = []
        print("| sum | bucket, KiB | link, Mb/s | step, ms | predicted | error | faster by | predicted |")
        print("|---|---|---|---|---|---|---|---|")
        for at, case in enumerate(cases(folder)):
            if at and only and case.name not in only:
                continue
            found = measured_s(folder, case)
            host_s = found[FREE_MBIT] - network_s(case, FREE_MBIT)
            steps = [found[rate] for rate in RATES_MBIT]
            told = [host_s + network_s(case, rate) for rate in RATES_MBIT]
            first, first_told = first or steps, first_told or told
            for place, rate in enumerate(RATES_MBIT):
                errors.append(told[place] / steps[place] - 1.0)
                bucket = case.layers * LAYER_BYTES // 1024
                print(
                    f"| {case.name} | {bucket} | {rate} | {1e3 * steps[place]:.0f} "
                    f"| {1e3 * told[place]:.0f} | {errors[-1]:+.1%} "
                    f"| {first[place] / steps[place]:.2f} | {first_told[place] / told[place]:.2f} |",
                    flush=True,
                )
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes)
    print(
        f"errors: median {median(sizes):.1%}, largest {max(sizes):.1%}, {within} of {len(sizes)} within 15 %"
    )


if __name__ == "__main__":
    main()
