"""Plans per second of the analytical engine, time and memory, on the committed 1,000 plans.

    python bench/bench_plans.py [--calculon DIR] [--json FILE]
    python bench/bench_plans.py --draw        writes plans_1000.json anew

One core. Every plan is priced from its degrees in every run; nothing is kept from run to run, and equal
plans are priced as often as they occur. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import TrainingConstants, training_constants
from foreshard.interop.peers.calculon import written
from foreshard.predict.analytical.table import TableResult, TableStages, evaluate
from foreshard.predict.plan_table import COLUMNS, PlanTable
from foreshard.predict.run_setup import RunSetup
from foreshard.predict.space import draw_plans
from foreshard.predict.stage_rows import stage_rows_of
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import TABLED

FILE = Path(__file__).with_name("plans_1000.json")
SEED = 20261121
RUNS = 5
SHARED_PLANS = 250  # of each model that Calculon knows, all of them plans that it can express
SETS = (
    {
        "model": "gpt3-175b",
        "cluster": "512x8xa100-sxm-80gb",
        "framework": "megatron-lm@2022",
        "precision": "bf16",
        "seq_len": 2048,
        "global_batch": 4096,
    },
    {
        "model": "gpt-22b",
        "cluster": "1x8xa100-sxm-80gb",
        "framework": "megatron-lm@2022",
        "precision": "bf16",
        "seq_len": 2048,
        "global_batch": 64,
    },
    {
        "model": "llama3-70b",
        "cluster": "8x8xh100-sxm",
        "framework": "megatron-core",
        "precision": "bf16",
        "seq_len": 8192,
        "global_batch": 512,
    },
    {
        "model": "mixtral-8x22b",
        "cluster": "16x8xh100-sxm",
        "framework": "megatron-bridge@26.06",
        "precision": "fp8",
        "seq_len": 4096,
        "global_batch": 1024,
    },
)
CALCULON_MODELS = {"gpt3-175b": "gpt3-175B", "gpt-22b": "megatron-22B"}
_CALCULON_RECOMPUTE = {"none": "none", "selective:core_attn": "attn_only", "full": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSet:
    """Plans of one model on one cluster, and how they are trained."""

    model: Model
    cluster: Cluster
    framework: Framework
    precision: str
    seq_len: int
    global_batch: int
    table: PlanTable
    constants: TrainingConstants

    def evaluate(self, table: PlanTable | None = None) -> TableResult:
        """Return time and memory of all plans, or of others on the same cluster."""
        return evaluate(
            self.model,
            self.cluster,
            table or self.table,
            framework=self.framework,
            constants=self.constants,
            seq_len=self.seq_len,
            precision=self.precision,
        )

    def memory(self) -> None:
        """Price memory only."""
        setup = RunSetup(
            model=self.model, framework=self.framework, precision=self.precision, seq_len=self.seq_len
        )
        rows = stage_rows_of(self.model, self.table.pp, self.table.vpp)
        TableStages(setup, self.cluster, self.table, rows).memory()


def load_sets(path: Path = FILE) -> list[PlanSet]:
    """Return the committed plans."""
    sets = json.loads(path.read_text(encoding="utf-8"))["sets"]
    return [
        _plan_set(entry, PlanTable.from_columns(entry["columns"], tuple(entry["rules"]))) for entry in sets
    ]


def _plan_set(entry: dict[str, Any], table: PlanTable) -> PlanSet:
    return PlanSet(
        model=load_model(entry["model"]),
        cluster=load_cluster(entry["cluster"]),
        framework=load_framework(entry["framework"]),
        precision=entry["precision"],
        seq_len=entry["seq_len"],
        global_batch=entry["global_batch"],
        table=table,
        constants=training_constants(),
    )


def draw(entry: dict[str, Any], num_plans: int, seed: int) -> PlanTable:
    """Return valid plans of one entry of SETS."""
    sizes = {"global_batch": entry["global_batch"], "seq_len": entry["seq_len"]}
    rng = np.random.default_rng(seed)
    return draw_plans(load_model(entry["model"]), load_cluster(entry["cluster"]), num_plans, rng, **sizes)


def write_sets(path: Path = FILE) -> None:
    """Draw 1,000 plans, equally many of each entry, and write them."""
    sets = []
    for entry in SETS:
        table = draw(entry, 1000 // len(SETS), SEED)
        columns = {name: getattr(table, name).tolist() for name in COLUMNS}
        sets.append(entry | {"rules": list(table.rules), "columns": columns})
    lines = ",\n".join(json.dumps(entry) for entry in sets)
    path.write_text(f'{{"seed": {SEED}, "sets": [\n{lines}\n]}}\n', encoding="utf-8")


def seconds(work: Callable[[], Any], runs: int = RUNS) -> dict[str, float]:
    """Return wall and processor seconds of a few runs after one that warms up imports."""
    work()
    wall, busy = [], []
    for _ in range(runs):
        begin, begin_busy = time.perf_counter(), time.process_time()
        work()
        busy.append(time.process_time() - begin_busy)
        wall.append(time.perf_counter() - begin)
    return {"wall_s": float(np.median(wall)), "wall_min_s": min(wall), "cpu_s": float(np.median(busy))}


def rate(work: Callable[[], Any], num_plans: int, runs: int = RUNS) -> dict[str, float]:
    """Return plans per second and milliseconds per 1,000 plans, median and best of the runs."""
    took = seconds(work, runs)
    return {
        "plans": num_plans,
        "plans_per_s": num_plans / took["wall_s"],
        "plans_per_s_best": num_plans / took["wall_min_s"],
        "plans_per_cpu_s": num_plans / took["cpu_s"],
        "ms_per_1000": 1e6 * took["wall_s"] / num_plans,
    }


def measure(sets: list[PlanSet]) -> dict[str, Any]:
    """Return rates on the committed plans, all together, by model, and of ten times as many in one batch."""
    everything = sum(len(s.table) for s in sets)
    rows = {"all": rate(lambda: [s.evaluate() for s in sets], everything)}
    for s in sets:
        rows[s.model.name] = rate(s.evaluate, len(s.table))
    for s, entry in zip(sets, SETS, strict=True):
        many = draw(entry, 10 * len(s.table), SEED + 1)
        rows[f"{s.model.name}, larger batch"] = rate(lambda s=s, t=many: s.evaluate(t), len(many))
    memory = seconds(lambda: [s.memory() for s in sets])["cpu_s"]
    total = seconds(lambda: [s.evaluate() for s in sets])["cpu_s"]
    fits = float(np.mean(np.concatenate([s.evaluate().fits for s in sets])))
    return {
        "rates": rows,
        "share_memory": memory / total,
        "share_time": 1.0 - memory / total,
        "share_fits": fits,
    }


def calculon_mask(table: PlanTable, num_blocks: int) -> np.ndarray:
    """Return which plans Calculon can express."""
    t = table
    rules = np.array([rule in _CALCULON_RECOMPUTE for rule in t.rules])
    schedules = np.array([name in ("1f1b", "interleaved") for name in TABLED])
    whole = (t.shard == 0) | (t.shard >= t.dp) | (t.zero == 0)
    plain = (t.cp == 1) & (t.ep == 1) & (t.etp == 1) & (t.zero <= 1) & (t.offload == 0)
    return plain & whole & rules[t.recompute] & schedules[t.schedule] & (num_blocks % (t.pp * t.vpp) == 0)


def calculon_execution(row: dict[str, int], rule: str) -> dict[str, Any]:
    """Return one plan on nodes of 8 as Calculon writes it."""
    return written(
        **{name: row[name] for name in ("tp", "pp", "dp", "vpp", "micro_batch")},
        batch=row["micro_batch"] * row["num_micro_batches"] * row["dp"],
        recompute=_CALCULON_RECOMPUTE[rule],
        sharded=row["zero"] == 1,
        sp=bool(row["sp"]),
        overlap=False,
        per_node=8,
    )


def calculon_run(path: Path, name: str, table: PlanTable) -> tuple[Callable[[], int], list[dict[str, Any]]]:
    """Return what prices every plan with Calculon and counts those it calls valid, and its executions."""
    sys.path.insert(0, str(path))
    import logging

    from calculon import System  # type: ignore[import-not-found]
    from calculon.llm import Llm  # type: ignore[import-not-found]

    def read(kind: str, file: str) -> Any:
        return json.loads((path / kind / f"{file}.json").read_text(encoding="utf-8"))

    system = System(read("systems", "a100_80g"))
    application = Llm.Application(read("models", CALCULON_MODELS[name]))
    executions = []
    for i in range(len(table)):
        row = {column: int(getattr(table, column)[i]) for column in COLUMNS}
        executions.append(calculon_execution(row, table.rules[row["recompute"]]))

    def run() -> int:
        valid = 0
        for execution in executions:
            try:
                model = Llm(application, logging.Logger("calculon"))
                model.compile(system, Llm.Execution.from_json(execution))
                model.run(system)
                model.get_stats_json(False)
                valid += 1
            except Llm.Error:
                pass
        return valid

    return run, executions


def beside_calculon(sets: list[PlanSet], path: Path) -> dict[str, Any]:
    """Return rates of both programs on the same plans: the committed ones Calculon can express, and more."""
    rows = {}
    for s, entry in zip(sets, SETS, strict=True):
        if s.model.name not in CALCULON_MODELS:
            continue
        committed = calculon_mask(s.table, s.model.num_layers)
        many = draw(entry, 100 * SHARED_PLANS, SEED + 2)
        many = many.take(np.flatnonzero(calculon_mask(many, s.model.num_layers))[:SHARED_PLANS])
        for label, table in (("committed", s.table.take(committed)), ("shared space", many)):
            run, _ = calculon_run(path, s.model.name, table)
            theirs = rate(run, len(table), runs=3)
            ours = rate(lambda s=s, t=table: s.evaluate(t), len(table))
            rows[f"{s.model.name}, {label}"] = {
                "plans": len(table),
                "calculon_valid": run(),
                "calculon_plans_per_s": theirs["plans_per_s"],
                "calculon_plans_per_cpu_s": theirs["plans_per_cpu_s"],
                "foreshard_plans_per_s": ours["plans_per_s"],
                "foreshard_plans_per_cpu_s": ours["plans_per_cpu_s"],
                "ratio": ours["plans_per_cpu_s"] / theirs["plans_per_cpu_s"],
            }
    return rows


def show(result: dict[str, Any]) -> None:
    """Print the result as tables."""
    print(f"{'plans of':>28} {'plans':>6} {'plans/s':>9} {'best':>9} {'per cpu s':>9} {'ms/1000':>8}")
    for name, row in result["rates"].items():
        numbers = (f"{row[key]:>9.0f}" for key in ("plans_per_s", "plans_per_s_best", "plans_per_cpu_s"))
        print(f"{name:>28} {row['plans']:>6}", *numbers, f"{row['ms_per_1000']:>8.2f}")
    print(f"memory takes {result['share_memory']:.0%}, time {result['share_time']:.0%}; ", end="")
    print(f"{result['share_fits']:.0%} of the plans fit")
    if isinstance(result["calculon"], str):
        print(f"Calculon: {result['calculon']}")
        return
    print("per cpu second")
    print(f"{'same plans':>28} {'plans':>6} {'valid':>6} {'calculon':>9} {'foreshard':>9} {'ratio':>6}")
    for name, row in result["calculon"].items():
        numbers = f"{row['calculon_plans_per_cpu_s']:>9.0f} {row['foreshard_plans_per_cpu_s']:>9.0f}"
        print(f"{name:>28} {row['plans']:>6} {row['calculon_valid']:>6} {numbers} {row['ratio']:>6.0f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calculon", type=Path, help="checkout of Calculon, imported from there")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--draw", action="store_true", help="draw the committed plans anew")
    arguments = parser.parse_args()
    if arguments.draw:
        write_sets()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sets = load_sets()
    result = measure(sets)
    skipped = "skipped, no --calculon DIR"
    result["calculon"] = beside_calculon(sets, arguments.calculon) if arguments.calculon else skipped
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
