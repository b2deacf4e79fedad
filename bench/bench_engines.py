"""Both engines on the committed plans: plans and tasks per second, as ratios: python bench/bench_engines.py.

Every plan goes from a Plan object to its breakdown; the analytical engine is timed plan by plan, as
`predict` uses it, and in batch, as a search does. One core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_plans import PlanSet, load_sets

from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.engine import graph_times
from foreshard.predict.graph.lowering import lower
from foreshard.predict.graph.prices import group_prices
from foreshard.sim import critical_path


def cases_of(plans: PlanSet, every: int) -> list[PlannedRun]:
    """Return every so-many-th plan of a set."""
    options = {"seq_len": plans.seq_len, "precision": plans.precision, "framework": plans.framework.label}
    return [
        PlannedRun(
            model=plans.model,
            cluster=plans.cluster,
            framework=plans.framework,
            plan=plans.table.plan(i, plans.model, **options),
        )
        for i in range(0, len(plans.table), every)
    ]


def cpu_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def programs_of(plans: PlanSet, cases: list[PlannedRun]) -> list:
    contention = plans.constants.fsdp_contention
    return [
        lower(group_prices(case, build_batch([case], plans.constants)), case.framework, contention).program
        for case in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=5, help="take every so-many-th of the 1,000 plans")
    every = parser.parse_args().every
    columns = (
        "plans tasks graph/s alone/s batch/s python-tasks/s compiled-tasks/s compiled/python graph/alone"
    )
    print(f"{'plans of':<16}", *(f"{name:>15}" for name in columns.split()))
    for plans in load_sets():
        cases = cases_of(plans, every)
        programs = programs_of(plans, cases)
        num_tasks = sum(program.num_tasks for program in programs)
        critical_path.run(programs[0], compiled=True)
        python_s = cpu_s(lambda p=programs: [critical_path.run(program) for program in p])
        compiled_s = cpu_s(lambda p=programs: [critical_path.run(program, compiled=True) for program in p])
        graph_s = cpu_s(
            lambda c=cases, s=plans: [
                graph_times(case, build_batch([case], s.constants), timeline=False, compiled=True)
                for case in c
            ]
        )
        alone_s = cpu_s(lambda c=cases, s=plans: [step_times(build_batch([x], s.constants)) for x in c])
        batch_s = cpu_s(lambda s=plans: s.evaluate())
        rates = (len(cases) / graph_s, len(cases) / alone_s, len(plans.table) / batch_s)
        speeds = (num_tasks / python_s, num_tasks / compiled_s, python_s / compiled_s, graph_s / alone_s)
        row = (len(cases), num_tasks // len(cases), *rates, *speeds)
        print(f"{plans.model.name:<16}", *(f"{value:>15.4g}" for value in row))
        sizes = np.array([program.num_tasks for program in programs])
        print(f"{'':<16}tasks of a plan: median {np.median(sizes):.0f}, largest {sizes.max()}")


if __name__ == "__main__":
    main()
