"""What each rule of the search of mixed clusters is worth: the search with one rule off, on a few instances.

    python bench/bench_planner_rules.py [--budget-s 8] [--rules NAME ...] [--cases NAME ...]
    python bench/bench_planner_rules.py --random 40 [--budget-s 2] [--rules NAME ...]

Budgets are in seconds of the processor, so that a busy machine does not change them. Prints the step time of
the chosen plan with all rules, and for each rule off by how much it is longer, with the gap. With `--random`
the cases are those of scripts/soak_plans.py: for each rule off, in how many of them the step is longer or
shorter by more than a thousandth, by how much on average and at most, and the mean gap.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from math import inf
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed import best_so_far, search, subspaces
from foreshard.planner.result import PlanResult
from foreshard.planner.search import plan
from foreshard.planner.solver import bound_raising, integer_heuristic

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from soak_plans import drawn_case

CASES = {
    "256 devices": ("llama3-70b", "16x8xa100-sxm-80gb+16x8xh100-sxm@400Gb/s", 1024, 4096, "bf16"),
    "48 devices": ("llama3-70b", "4x8xa100-sxm-80gb+2x8xh100-sxm@400Gb/s", 32, 4096, "bf16"),
    "16 devices": ("gpt2-xl", "1x8xa100-sxm-40gb+1x8xv100-sxm-16gb@100Gb/s", 512, 1024, "fp16"),
    "16, experts": ("mixtral-8x7b", "1x8xa100-sxm-80gb+1x8xh100-sxm@400Gb/s", 64, 4096, "bf16"),
    "8 devices": ("gpt2-xl", "1x4xl4+1x4xt4@25Gb/s", 32, 1024, "fp16"),
    "32, slow links": ("llama3-8b", "2x8xa100-sxm-80gb+2x8xh100-sxm@25Gb/s", 128, 4096, "bf16"),
}
"""Model, cluster, global batch, tokens and precision."""


def _in_turn(some: list[subspaces.Subspace], best_s: float) -> tuple[subspaces.Subspace | None, float]:
    """Return the open subspaces in turn."""
    still = [one for one in some if one.promise_s(best_s)]
    return (still[next(TURN) % len(still)], 1.0 / len(still)) if still else (None, 0.0)


TURN = count()


def _off(owner: object, name: str, value: object) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(owner, name, value)


RULES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "all rules": nullcontext,
    "subspaces in turn": _off(search, "next_subspace", _in_turn),
    "no interleaved pipelines": _off(search, "chunk_counts", lambda request: ()),
    "no chunks laid out": _off(best_so_far, "laid_out", lambda request, plan, budget: plan),
    "no chunks on plans as they are": _off(search, "_NEAREST", 0),
    "no changes before proofs": _off(search.MixedSearch, "_change_early", lambda self: None),
    "all changes for plans in one chunk": _off(search, "_CHANGING_CHUNKS", 0.0),
    "no more room in memory": _off(search, "_ROOMIER", 0),
    "one round of duals": _off(bound_raising, "_DUAL_ROUNDS", 1),
    "no boxes refined": _off(bound_raising, "_REFINED", 1),
    "one length of step": _off(bound_raising, "_PART_OF_WAY", 0.0),
    "no times between": _off(integer_heuristic, "_CLOSER", 0),
    "no small sets": _off(integer_heuristic, "_FEW", 0),
}
SAME = 1e-3
"""Part of a step by which two plans differ at least to count."""


def planned(case: str, rule: str, budget_s: float) -> PlanResult:
    """Return the plans of a case with a rule off."""
    model, cluster, global_batch, seq_len, precision = CASES[case]
    with RULES[rule]():
        return plan(
            load_model(model),
            load_cluster(cluster),
            global_batch=global_batch,
            seq_len=seq_len,
            precision=precision,
            budget_s=budget_s,
        )


def random_row(rule: str, found: list[tuple[float, float]], whole: list[tuple[float, float]]) -> str:
    """Return the row of a rule: step times and gaps with it off, and with all rules, by case."""
    over = [mine / known - 1.0 for (mine, _), (known, _) in zip(found, whole, strict=True) if known < inf]
    worse, better = sum(one > SAME for one in over), sum(one < -SAME for one in over)
    gaps = [gap for step_s, gap in found if step_s < inf]
    return (
        f"{rule:32}{worse:8} longer, {better} shorter of {len(over)}; mean {fmean(over):+.2%}, "
        f"worst {max(over):+.1%}; gap {fmean(gaps):.2%}"
    )


def random_cases(number: int, rules: list[str], budget_s: float) -> None:
    """Print a row for each rule over so many random cases."""
    results: dict[str, list[tuple[float, float]]] = {rule: [] for rule in rules}
    for seed in range(number):
        case = drawn_case(seed)
        for rule in rules:
            with RULES[rule]():
                asked = {"global_batch": case.global_batch, "seq_len": case.seq_len, "precision": "fp16"}
                found = plan(case.model, case.cluster, budget_s=budget_s, **asked)
            step_s = found.plans[0].prediction.step_time_s if found.plans else inf
            results[rule].append((step_s, found.gap))
        print(f"seed {seed}: " + ", ".join(f"{results[rule][-1][0]:.4g} s" for rule in rules), flush=True)
    for rule in rules:
        print(random_row(rule, results[rule], results["all rules"]))


def main() -> None:
    """Print a row for each rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-s", type=float, default=8.0)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--random", type=int, default=0, help="random small cases instead")
    asked = parser.parse_args()
    time.perf_counter = time.process_time
    planned("8 devices", "all rules", 2.0)  # loads the compiled loops
    if asked.random:
        random_cases(asked.random, list(dict.fromkeys(["all rules", *asked.rules])), asked.budget_s)
        return
    best: dict[str, float] = {}
    print(f"{'':32}" + "".join(f"{case:>22}" for case in asked.cases))
    for rule in dict.fromkeys(["all rules", *asked.rules]):
        print(f"{rule:32}", end="", flush=True)
        for case in asked.cases:
            found = planned(case, rule, asked.budget_s)
            seconds = found.plans[0].prediction.step_time_s if found.plans else float("inf")
            best.setdefault(case, seconds)
            text = f"{seconds:.3f} s" if rule == "all rules" else f"{seconds / best[case] - 1.0:+.1%}"
            print(f"{text + f', gap {found.gap:.1%}':>22}", end="", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
