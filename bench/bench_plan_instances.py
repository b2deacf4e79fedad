"""Proven gap and seconds of the mixed planner on seeded instances: 256 and 512 devices of two or three kinds.

    python bench/bench_plan_instances.py [--devices 256] [--only 13] [--budget-s 10] [--processor]

Every instance draws its node kinds, how many of each, a model of 80 blocks, batch and sequence from its seed.
The gap is that of the plan as the analytical engine times it, over a bound on all plans of the space. With
`--processor` the budget is in seconds of the processor, which a busy machine does not shorten.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

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


def main() -> None:
    """Plan every instance and print a row each, then medians and worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=0.0, help="default 10 s a 256 devices")
    parser.add_argument("--only", type=int, nargs="+", help="instances to plan instead")
    parser.add_argument("--processor", action="store_true", help="budgets in seconds of the processor")
    asked = parser.parse_args()
    if asked.processor:
        time.perf_counter = time.process_time
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
