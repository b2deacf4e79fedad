"""Step times of published planners as ratios to ours, on seeded mixed instances, by one engine.

    python bench/bench_baselines.py [--devices 64] [--instances 5] [--budget-s 10]

The instances are those of bench_plan_instances.py; a ratio of 1.20 is a step 20 % longer than ours.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

from bench_plan_instances import instance

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.baselines import BASELINES, judge
from foreshard.planner.search import plan


def main() -> None:
    """Print a row for each instance, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--instances", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=10.0)
    asked = parser.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in BASELINES}
    walls: dict[str, list[float]] = {name: [] for name in BASELINES}
    print(f"{'':24}{'ours s':>9}{'gap':>8}" + "".join(f"{name:>11}" for name in BASELINES))
    for seed in range(asked.instances):
        name, nodes, batch, seq_len = instance(seed, asked.devices)
        model, cluster = load_model(name), load_cluster(nodes)
        started = time.perf_counter()
        ours = plan(model, cluster, global_batch=batch, seq_len=seq_len, budget_s=asked.budget_s)
        wall_s = time.perf_counter() - started
        if not ours.plans:
            print(f"#{seed} {name} {nodes}: no plan fits")
            continue
        best_s = ours.plans[0].prediction.step_time_s
        rows = judge(
            model, cluster, global_batch=batch, seq_len=seq_len, bound_s=ours.lower_bound_step_time_s
        )
        for row in rows:
            ratios[row.name].append(row.step_time_s / best_s if row.step_time_s else math.nan)
            walls[row.name].append(row.wall_s)
        cells = "".join(f"{ratios[row.name][-1]:>11.3f}" for row in rows)
        print(
            f"#{seed} {wall_s:5.1f} s{'':13}{best_s:>9.2f}{ours.gap:>8.2%}{cells}  {name} {nodes}", flush=True
        )
    for title, values in (("median ratio", ratios), ("median search s", walls)):
        known = [[one for one in values[name] if not math.isnan(one)] for name in BASELINES]
        print(f"{title:41}" + "".join(f"{statistics.median(v) if v else math.nan:>11.3f}" for v in known))


if __name__ == "__main__":
    main()
