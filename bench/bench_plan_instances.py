"""Proven gap and seconds of the mixed planner on seeded instances: 256 and 512 devices of two or three kinds.

    python bench/bench_plan_instances.py [--devices 256] [--only 13] [--budget-s 10] [--processor] [--busy]
    python bench/bench_plan_instances.py --markdown

Every instance draws its node kinds, how many of each, a model of 80 blocks, batch and sequence from its seed.
The gap is that of the plan as the analytical engine times it, over a bound on all plans of the space. With
`--processor` budgets are seconds of the processor, which a busy machine does not shorten, with `--busy` half
of them, as a busy process on the same core leaves. `--markdown` prints the table of bench/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from clock import use_processor_clock

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.search import plan

SEED = 20261121
NODES = ("8xa100-sxm-40gb", "8xa100-sxm-80gb", "8xh100-sxm", "8xh200-sxm", "8xb200-sxm")
RATES = ("", "@400Gb/s", "@800Gb/s")  # of a node; none: the catalog
MODELS = ("llama3-70b", "llama2-70b", "qwen2.5-72b")
BATCHES, SEQUENCES = (512, 1024, 2048), (2048, 4096, 8192)


def instance(seed: int, devices: int) -> tuple[str, str, int, int]:
    """Return model, cluster, global batch and sequence of a seed."""
    rng = np.random.default_rng([SEED, seed, devices])
    kinds = rng.choice(NODES, size=int(rng.integers(2, 4)), replace=False)
    shares = rng.dirichlet(np.full(len(kinds), 3.0)) * (devices // 8 - len(kinds))
    counts = 1 + np.floor(shares).astype(int)
    counts[0] += devices // 8 - counts.sum()
    cluster = "+".join(f"{n}x{kind}" for n, kind in zip(counts, kinds, strict=True))
    cluster += str(rng.choice(RATES))
    return str(rng.choice(MODELS)), cluster, int(rng.choice(BATCHES)), int(rng.choice(SEQUENCES))


def gap_of(seed: int, devices: int, budget_s: float) -> float:
    """Return the gap of an instance, infinite where no plan is found."""
    model, cluster, batch, seq = instance(seed, devices)
    found = plan(load_model(model), load_cluster(cluster), global_batch=batch, seq_len=seq, budget_s=budget_s)
    return found.gap if found.plans else float("inf")


def markdown(instances: int) -> None:
    """Print gaps after the budgets of the goals, on an idle core and beside a busy process."""
    use_processor_clock()
    gap_of(0, 256, 2.0)  # loads the compiled loops
    print(f"| devices | seconds | core | gap: median of {instances} | worst | within the goal |")
    print("|---|---|---|---|---|---|")
    for devices, budget_s, goal in ((256, 10.0, 0.015), (512, 20.0, 0.02)):
        for busy in (False, True):
            use_processor_clock(int(busy))
            gaps = [gap_of(seed, devices, budget_s) for seed in range(instances)]
            cells = (
                str(devices),
                f"{budget_s:g}",
                "shared" if busy else "idle",
                f"{statistics.median(gaps) * 100:.1f} %",
                f"{max(gaps) * 100:.1f} %",
                f"{sum(gap <= goal for gap in gaps)} of {instances} at {goal * 100:g} %",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Plan every instance and print a row each, then medians and worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=0.0, help="default 10 s a 256 devices")
    parser.add_argument("--only", type=int, nargs="+", help="instances to plan instead")
    parser.add_argument("--processor", action="store_true", help="budgets in seconds of the processor")
    parser.add_argument("--busy", action="store_true", help="as on a core that a busy process shares")
    parser.add_argument("--markdown", action="store_true", help="a row for each size, idle and busy")
    asked = parser.parse_args()
    if asked.markdown:
        markdown(asked.instances)
        return
    if asked.processor or asked.busy:
        use_processor_clock(int(asked.busy))
    for devices in asked.devices:
        gaps, seconds = [], []
        for seed in asked.only or range(asked.instances):
            model, cluster, batch, seq = instance(seed, devices)
            budget = asked.budget_s or devices / 25.6
            started, worked = time.perf_counter(), time.process_time()
            result = plan(
                load_model(model), load_cluster(cluster), global_batch=batch, seq_len=seq, budget_s=budget
            )
            wall, cpu = time.perf_counter() - started, time.process_time() - worked
            gap = result.gap if result.plans else float("nan")
            times = f"{wall:5.1f} s ({cpu:4.1f} of processor)"
            asks = f"{model} {cluster} {batch} {seq}"
            print(f"{devices} #{seed:2d} {times}  gap {gap:7.2%}  {asks}", flush=True)
            gaps.append(gap)
            seconds.append(wall)
        solved = [gap for gap in gaps if gap == gap]
        middle, worst = (statistics.median(solved), max(solved)) if solved else (float("nan"), float("nan"))
        print(
            f"{devices} devices: gap median {middle:.2%} worst {worst:.2%}, "
            f"seconds median {statistics.median(seconds):.1f} worst {max(seconds):.1f}, "
            f"{len(solved)} of {len(gaps)} solved"
        )


if __name__ == "__main__":
    main()
