"""Real steps on hosts with slow links: how gradients are summed, predicted beside measured.

Two hosts of three ranks each are network namespaces; all that leaves a host passes one link of 50 to 400 Mb/s
(`foreshard lab`, root on Linux). Six replicas train layers of 512 KiB of parameters that stand for those of
an accelerator: they sleep for what they would compute, so that the cores are left to the messages. Gradients,
their sums and the steps are real. Each case is one run of the command; its links change every few steps.

Predicted: gradients become ready as the layers sleep, buckets follow each other, and each takes what the flow
simulation of its schedule takes on this topology. Links pass their rate times 1448/1514, the payload of full
Ethernet frames. What a message takes by itself is measured before, on one host (`foreshard comm measure` of
4 KiB in a ring of the same ranks: its time over its rounds). gloo's own all-reduce is taken for a ring. The
rest of a step (vote, update, host) is that of the first case on links of 10 Gb/s.
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

from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.schedule_run import run_schedule
from foreshard.comm.fusion.timeline import Gradients, bucket_times
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.schedule_file import load_schedule, save_schedule
from foreshard.comm.synthesis.synthesize import synthesize
from foreshard.comm.topology.graph import Edge, Topology, Vertex

HOSTS, PER_HOST = 2, 3
RANKS = HOSTS * PER_HOST
LAYERS, LAYER_BYTES, FORWARD_S, BACKWARD_S = 6, 512 * 1024, 0.02, 0.04
FREE_MBIT, RATES_MBIT = 10_000, (400, 200, 100, 50)
WARM, COUNTED = 2, 6
"""Steps at each rate that are not counted, while the links are being changed, and that are."""
PAYLOAD = 1448 / 1514
HOST_BYTES_PER_S = 2e9
"""Between ranks of a host: so fast that it hardly counts beside the links between hosts."""
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
        self.weight = nn.Parameter(torch.randn({LAYER_BYTES} // 4) / {LAYER_BYTES})

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
    """How a run sums: the value of `--collectives`, and layers in a bucket."""

    name: str
    collectives: str
    layers: int


@cache
def message_s() -> float:
    """Seconds that a small message takes between ranks of a host, by `foreshard comm measure`."""
    words = f"comm measure all-reduce 4KiB --local {RANKS} --algorithm ring --repeats 20 --json"
    command = [sys.executable, "-m", "foreshard", *words.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["time_s"]) / (2 * (RANKS - 1))


def topology(mbit: float) -> Topology:
    """Hosts with one link each to a switch."""
    devices = [Vertex(name=f"rank{rank}", kind="device", node=rank // PER_HOST) for rank in range(RANKS)]
    hosts = [Vertex(name=f"host{host}", kind="switch", node=host) for host in range(HOSTS)]
    links = []
    for rank in range(RANKS):
        links += _both(rank, RANKS + rank // PER_HOST, HOST_BYTES_PER_S, message_s() / 2)
    for host in range(HOSTS):
        links += _both(RANKS + host, RANKS + HOSTS, mbit * 125e3 * PAYLOAD, 0.0)
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
def sum_s(collectives: str, num_bytes: float, mbit: float) -> float:
    """Seconds of a sum by flow simulation."""
    schedule, network = schedule_named(collectives), topology(mbit)
    return run_schedule(schedule, num_bytes, network, routing_of(schedule, network, forwarding="any")).seconds


def predicted_s(case: Case, mbit: float, rest_s: float) -> float:
    """Seconds of a step."""
    ready = BACKWARD_S * np.arange(1, LAYERS + 1)
    sizes = np.full(LAYERS, float(LAYER_BYTES))
    names = tuple(f"layer{i}" for i in reversed(range(LAYERS)))
    made = Gradients(names=names, num_bytes=sizes, ready_s=ready, backward_s=float(ready[-1]))
    bounds = tuple((at, min(at + case.layers, LAYERS)) for at in range(0, LAYERS, case.layers))
    times = bucket_times(made, bounds, lambda size: sum_s(case.collectives, float(size), mbit))
    return LAYERS * FORWARD_S + max(times[-1].end_s, made.backward_s) + rest_s


def measured_s(folder: Path, case: Case) -> dict[int, float]:
    """Median seconds of a step at each rate, by the command."""
    command = [sys.executable, "-m", "foreshard", "lab", "lab.toml", "job.py", "--plan", "plan.json"]
    sums = ["--collectives", case.collectives, "--buckets", str(case.layers * LAYER_BYTES)]
    steps = (1 + len(RATES_MBIT)) * (WARM + COUNTED)
    out = f"run-{case.name.replace(' ', '-')}-{case.layers}"
    subprocess.run(
        [*command, *sums, "--steps", str(steps), "--out", out, "--json", "--no-save-last"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time_metrics/end_to_end(s)"] for line in lines]
    each = WARM + COUNTED
    return {
        rate: median(times[at * each + WARM : (at + 1) * each])
        for at, rate in enumerate((FREE_MBIT, *RATES_MBIT))
    }


def write_inputs(folder: Path) -> None:
    """Write the job, the lab and the plan."""
    (folder / "job.py").write_text(JOB)
    changes = "".join(
        f'[[change]]\nat_step = {(at + 1) * (WARM + COUNTED)}\nbandwidth = "{rate} Mb/s"\n'
        for at, rate in enumerate(RATES_MBIT)
    )
    ranks = f"[[ranks]]\ncount = {RANKS}\nper_host = {PER_HOST}\n"
    network = f'[network]\nbandwidth = "{FREE_MBIT} Mb/s"\n'
    (folder / "lab.toml").write_text(f'clock = "wall"\n{ranks}{network}{changes}')
    groups = [{"share": 1, "stages": [{"ranks": [rank], "layers": [[0, LAYERS]]}]} for rank in range(RANKS)]
    plan = {"global_batch": RANKS, "seq_len": 1, "precision": "fp32", "groups": groups}
    (folder / "plan.json").write_text(json.dumps(plan))


def cases(folder: Path) -> list[Case]:
    """What is compared: first the library's own sum of all gradients at once."""
    made = synthesize("all-reduce", LAYERS * LAYER_BYTES, topology(100), budget_s=10.0)
    file = str(folder / "synthesized.json")
    save_schedule(made.schedule, file)
    print(f"a message takes {1e3 * message_s():.2f} ms")
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
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        rest_s, first, errors = 0.0, dict[int, float](), []
        print("| sum | bucket, KiB | link, Mb/s | step, ms | predicted | error | faster by | predicted |")
        print("|---|---|---|---|---|---|---|---|")
        for case in cases(folder):
            found = measured_s(folder, case)
            if not first:
                first = found
                reference, rest_s = case, found[FREE_MBIT] - predicted_s(case, FREE_MBIT, 0.0)
            for rate in RATES_MBIT:
                told_s = predicted_s(case, rate, rest_s)
                errors.append(told_s / found[rate] - 1.0)
                gain, told_gain = first[rate] / found[rate], predicted_s(reference, rate, rest_s) / told_s
                print(
                    f"| {case.name} | {case.layers * LAYER_BYTES // 1024} | {rate} | {1e3 * found[rate]:.0f} "
                    f"| {1e3 * told_s:.0f} | {errors[-1]:+.1%} | {gain:.2f} | {told_gain:.2f} |",
                    flush=True,
                )
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes)
    print(
        f"errors: median {median(sizes):.1%}, largest {max(sizes):.1%}, {within} of {len(sizes)} within 15 %"
    )


if __name__ == "__main__":
    main()
