"""How fast the search covers a space, and that it finds what pricing every plan finds.

    python bench/bench_search.py [--json FILE] [--exhaustive]

One core. *Considered* plans are those timed and those that a bound on memory or time excludes: the whole
space. *Timed* plans per second are those that pass through the analytical engine, memory included, with
nothing excluded. *Widened* searches choose among two precisions and all communication options too.
--exhaustive also times every plan of the small spaces and compares. Processor seconds are beside those of the
wall, which other work on the machine lengthens.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import training_constants
from foreshard.planner.grid.search import search_rows
from foreshard.planner.grid.space import GridRequest, cells_of, chunks_of, passes_of, rows_of
from foreshard.planner.search import plan
from foreshard.predict.analytical.engine import step_times

CASES = (
    ("gpt3-175b", "512x8xa100-sxm-80gb", 4096, 2048),
    ("llama3-70b", "64x8xh100-sxm", 1024, 8192),
    ("llama3-70b", "1250x8xh100-sxm", 2000, 8192),
    ("mixtral-8x22b", "64x8xh100-sxm", 1024, 4096),
    ("deepseek-v3", "256x8xh800-sxm", 15360, 4096),
    ("llama3-8b", "31x1xh100-sxm", 64, 8192),
    ("llama3-8b", "1x1xh100-sxm", 64, 8192),
)
WIDENED = (
    ("gpt3-175b", "512x8xh100-sxm", 4096, 2048),
    ("llama3-70b", "64x8xh100-sxm", 1024, 8192),
    ("mixtral-8x22b", "64x8xh100-sxm", 1024, 4096),
)
SMALL = (
    ("llama3-8b", "2x8xh100-sxm", 64, 8192),
    ("gpt-22b", "2x8xa100-sxm-80gb", 32, 2048),
    ("mixtral-8x7b", "1x8xh200-sxm", 8, 4096),
    ("llama3-70b", "64x8xh100-sxm", 1024, 8192),
    ("gpt3-175b", "512x8xa100-sxm-80gb", 4096, 2048),
)


def grid_request(model: str, cluster: str, global_batch: int, seq_len: int) -> GridRequest:
    """Return the search on all devices by megatron-core in bf16."""
    return GridRequest(
        model=load_model(model),
        cluster=load_cluster(cluster),
        framework=load_framework("megatron-core"),
        constants=training_constants(),
        global_batch=global_batch,
        seq_len=seq_len,
    )


def search(case: tuple[str, str, int, int], **asked: Any) -> dict[str, Any]:
    """Return what `foreshard plan` does, on every number of devices it considers."""
    model, cluster, global_batch, seq_len = case
    started = time.process_time()
    result = plan(
        load_model(model), load_cluster(cluster), global_batch=global_batch, seq_len=seq_len, **asked
    )
    cpu_s = time.process_time() - started
    considered = result.evaluated + result.pruned
    return {
        "model": model,
        "cluster": cluster,
        "global_batch": global_batch,
        "seq_len": seq_len,
        "considered": considered,
        "timed": result.evaluated,
        "wall_s": result.wall_s,
        "cpu_s": cpu_s,
        "considered_per_s": considered / result.wall_s,
        "gap": result.gap,
        "step_time_s": result.plans[0].prediction.step_time_s,
        "devices": len(result.plans[0].plan.ranks),
    }


def timed(case: tuple[str, str, int, int], num_plans: int) -> dict[str, Any]:
    """Return plans per second through memory and time, the plans spread over the space of a case."""
    request = grid_request(*case)
    cells = cells_of(request)
    some = cells.take(slice(None, None, max(1, len(cells) // 64)))
    rows = rows_of(request, passes_of(request, some))
    rows = rows.take(slice(None, None, max(1, len(rows) // num_plans)))
    for warm in (True, False):
        started = time.process_time()
        for part in chunks_of(rows.take(slice(0, 4096)) if warm else rows):
            request.memory(part)
            step_times(request.batch(part))
    seconds = time.process_time() - started
    return {"model": case[0], "plans": len(rows), "cpu_s": seconds, "timed_per_s": len(rows) / seconds}


def exhaustive(case: tuple[str, str, int, int]) -> dict[str, Any]:
    """Return the search beside pricing every plan of the same space."""
    request = grid_request(*case)
    started = time.perf_counter()
    found = search_rows(request)
    searched_s = time.perf_counter() - started
    count, best = 0, np.inf
    for cell in chunks_of(passes_of(request, cells_of(request))):
        for part in chunks_of(rows_of(request, cell)):
            fits = request.memory(part).fits
            step_s = step_times(request.batch(part)).total
            best = min(best, float(np.where(fits, step_s, np.inf).min()))
            count += len(part)
    every_s = time.perf_counter() - started - searched_s
    return {
        "model": case[0],
        "cluster": case[1],
        "plans": count,
        "counted": found.evaluated + found.pruned,
        "best_s": best,
        "found_s": float(found.score[0]),
        "search_s": searched_s,
        "exhaustive_s": every_s,
    }


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:>14} {row['cluster']:>20} {row['considered']:>13,} {row['timed']:>8,} "
        f"{row['wall_s']:>7.2f} {row['cpu_s']:>7.2f} {row['considered_per_s']:>11,.0f} {row['gap']:>5.1%}"
    )


def markdown() -> None:
    """Print the searches as a table, in seconds of the processor."""
    time.perf_counter = time.process_time
    search(CASES[-1])  # loads the compiled loops
    print("| model | cluster | global batch | considered | timed | s | considered/s | gap |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES[:-1]:
        row = search(case)
        cells = (
            row["model"],
            row["cluster"],
            f"{row['global_batch']:,}",
            f"{row['considered']:,}",
            f"{row['timed']:,}",
            f"{row['cpu_s']:.1f}",
            f"{row['considered_per_s']:,.0f}",
            f"{row['gap'] * 100:.1f} %",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--exhaustive", action="store_true", help="time every plan of small spaces too")
    parser.add_argument("--markdown", action="store_true", help="the table of bench/README.md alone")
    arguments = parser.parse_args()
    if arguments.markdown:
        markdown()
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result: dict[str, Any] = {"search": [], "widened": [], "timed": [], "exhaustive": []}
    print(
        f"{'model':>14} {'cluster':>20} {'considered':>13} {'timed':>8} {'wall s':>7} {'cpu s':>7} "
        f"{'per s':>11}  gap"
    )
    for case in CASES:
        result["search"].append(search(case))
        _print(result["search"][-1])
    print("the same with two precisions and every communication option")
    for case in WIDENED:
        result["widened"].append(search(case, precision=("bf16", "fp8"), comm="all"))
        _print(result["widened"][-1])
    for case in CASES[:4]:
        row = timed(case, 40_000)
        result["timed"].append(row)
        print(f"{row['model']:>14} {row['plans']:>8,} plans timed, {row['timed_per_s']:>9,.0f} per s")
    for case in SMALL if arguments.exhaustive else ():
        row = exhaustive(case)
        result["exhaustive"].append(row)
        print(
            f"{row['model']:>14} {row['plans']:>10,} plans in {row['exhaustive_s']:.1f} s, searched in "
            f"{row['search_s']:.2f} s; counted {row['counted']:,}; best {row['best_s']:.9g} s, "
            f"found {row['found_s']:.9g} s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
