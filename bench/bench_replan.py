"""Seconds of planning anew after a change on 64 devices, cold and warm: python bench/bench_replan.py.

80 layers on 64 A100, one device slowed 2.6 times or lost. Cold prices the stages too; warm has them. The
baseline is pricing alone. See bench/README.md.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.replan import replan
from foreshard.planner.running import healthy_problem
from foreshard.spec.layout import layer_spans
from foreshard.spec.plan import Group, Plan, Stage

MODEL = load_model("llama3-70b")
CLUSTER = load_cluster("8x8xa100-sxm-80gb@400Gb/s")
CHANGES: dict[str, dict[str, Any]] = {
    "one device x2.6": {"slowdown": {5: 2.6}},
    "one device lost": {"lost": [5]},
}
RUNS = 7


def even_plan(tp: int, pp: int, groups: int) -> Plan:
    """Return equal pipelines of equal cuts on ranks in order, 256 samples of 4,096 tokens."""
    spans, ranks = layer_spans(MODEL.num_layers, pp, 1), itertools.count()
    made = []
    for _ in range(groups):
        stages = [
            Stage(ranks=tuple(next(ranks) for _ in range(tp)), layers=tuple(span), tp=tp) for span in spans
        ]
        made.append(Group(share=256 // groups, sp=tp > 1, stages=tuple(stages)))
    return Plan(global_batch=256, seq_len=4096, groups=tuple(made))


def seconds(work: Callable[[], object]) -> list[float]:
    """Return the seconds of some runs, after one that loads what it imports."""
    work()
    took = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return took


def main() -> None:
    names = ("cold s", "warm s", "worst", "pricing")
    print(f"{'plan':>16} {'change':>16}", *(f"{name:>8}" for name in names), f"{'warm/pricing':>13}")
    for degrees in ((8, 4, 2), (4, 8, 2), (4, 16, 1)):
        plan = even_plan(*degrees)
        healthy = healthy_problem(MODEL, CLUSTER, plan)
        priced = median(seconds(lambda plan=plan: healthy_problem(MODEL, CLUSTER, plan)))
        for name, change in CHANGES.items():
            cold = median(seconds(lambda plan=plan, change=change: replan(MODEL, CLUSTER, plan, **change)))
            warm = seconds(
                lambda plan=plan, change=change, healthy=healthy: replan(
                    MODEL, CLUSTER, plan, problem=healthy, **change
                )
            )
            label = "tp {} pp {} x {}".format(*degrees)
            print(
                f"{label:>16} {name:>16} {cold:>8.3f} {median(warm):>8.3f} {max(warm):>8.3f} {priced:>8.3f}"
                f" {median(warm) / priced:>13.2f}"
            )


if __name__ == "__main__":
    main()
