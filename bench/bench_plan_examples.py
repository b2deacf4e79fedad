"""The plans that the documentation names as examples: step time, gap, and the best plan of equal degrees.

    python bench/bench_plan_examples.py [--budget-s 20] [--markdown]

Budgets are in seconds of the processor, so that a busy machine does not change them. Plans of equal degrees
are those of the grid, on the nodes of the kind that is fastest alone.
"""

from __future__ import annotations

import argparse

from clock import use_processor_clock

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.grid.equal_nodes import search_homogeneous
from foreshard.planner.mixed.even_plans import even_plans_of
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.search import plan

CASES = (
    ("llama3-8b", "7x8xh100-sxm", 256, 4096, "bf16"),
    ("llama3-70b", "16x8xa100-sxm-80gb@100Gb/s", 256, 4096, "bf16"),
    ("llama3-70b", "16x8xa100-sxm-80gb+16x8xh100-sxm@400Gb/s", 1024, 4096, "bf16"),
    ("llama3-70b", "8x8xa100-sxm-80gb+4x8xh100-sxm@100Gb/s", 256, 4096, "bf16"),
    ("llama3-8b", "2x8xa100-sxm-80gb+2x8xh100-sxm@25Gb/s", 256, 4096, "bf16"),
    ("llama3-8b", "2x8xa100-sxm-80gb+2x8xh100-sxm@400Gb/s", 16, 131072, "bf16"),
    ("llama2-13b", "4x8xa100-sxm-40gb+2x8xh100-sxm@100Gb/s", 256, 4096, "bf16"),
    ("mixtral-8x7b", "1x8xa100-sxm-80gb+1x8xh100-sxm@400Gb/s", 64, 4096, "bf16"),
    ("mixtral-8x7b", "4x8xa100-sxm-80gb+4x8xh100-sxm@400Gb/s", 512, 4096, "bf16"),
    ("gpt2-xl", "1x8xa100-sxm-40gb+1x8xv100-sxm-16gb@100Gb/s", 512, 1024, "fp16"),
    ("llama3.2-1b", "1x4xl4+1x4xt4@25Gb/s", 32, 4096, "fp16"),
)


def equal_degrees_s(request: PlanRequest) -> float:
    """Return the step time of the best plan of the grids, infinite where none fits."""
    found = (search_homogeneous(one.request, explain=False) for one in even_plans_of(request))
    return min((one.plans[0].prediction.step_time_s for one in found if one.plans), default=float("inf"))


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=20.0)
    parser.add_argument(
        "--markdown", action="store_true", help="as the table of docs/planning.md, the default"
    )
    seconds = parser.parse_args().budget_s
    use_processor_clock()
    print("| model | cluster | batch | tokens | step | gap | schedule | equal degrees |")
    print("|---|---|---|---|---|---|---|---|")
    for model, cluster, batch, seq, precision in CASES:
        asked = {"global_batch": batch, "seq_len": seq, "precision": precision, "budget_s": seconds}
        found = plan(load_model(model), load_cluster(cluster), **asked)
        request = checked_request(load_model(model), load_cluster(cluster), **asked)
        best = found.plans[0]
        schedule = best.plan.groups[0].schedule if len(best.plan.groups[0].stages) > 1 else "one stage"
        print(
            f"| `{model}` | `{cluster}` | {batch:,} | {seq:,} | {best.prediction.step_time_s:.4g} s |"
            f" {found.gap:.1%} | {schedule} | {equal_degrees_s(request):.4g} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
