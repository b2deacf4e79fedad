"""Event engine beside graph engine on random plans: python bench/bench_engine_plans.py [--plans 400].

Draws models, clusters, degrees, schedules, ZeRO levels, frameworks, recomputation, precision, adapters and
offload through the product's functions, one plan in ten with two groups that differ; what is refused is drawn
anew. Without contention the longest path and the queue of events must find the same step and the same parts,
to 0.1 %; with transfers on shared ports (--network flow) too. Exit code 0 if that holds in each, else 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from foreshard import api
from foreshard.errors import ForeshardError
from foreshard.predict.step import predict
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import SCHEDULES, Group, Plan

EXACT = 1e-3
MODELS = ("llama3-8b", "llama2-70b", "gpt3-13b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gemma2-9b")
CLUSTERS = (
    *("1x8xh100-sxm", "2x8xh100-sxm", "4x8xa100-sxm-80gb@25Gb/s", "8x8xh100-sxm@400Gb/s", "1x4xrtx-3090"),
    *("2x4xa10g@25Gb/s", "16x8xh200-sxm"),
)
PAIR = ("1x8xh100-sxm", "1x8xa100-sxm-80gb")
FRAMEWORKS = (
    "megatron-core",
    "torchtitan",
    "deepspeed",
    "hf",
    "ddp",
    "megatron-deepspeed",
    "megatron-bridge",
)


def degrees(rng: random.Random, num_devices: int) -> dict[str, Any]:
    """Return what the groups of a plan may differ in."""
    tp, pp, cp = rng.choice([1, 2, 4, 8]), rng.choice([1, 1, 2, 3, 4, 8]), rng.choice([1, 1, 1, 2])
    dp, micro_batch, schedule = (
        max(1, num_devices // (tp * pp * cp)),
        rng.choice([1, 2]),
        rng.choice(SCHEDULES),
    )
    return {
        **{"tp": tp, "pp": pp, "cp": cp, "dp": dp, "micro_batch": micro_batch, "schedule": schedule},
        "vpp": rng.choice([2, 3]) if schedule == "interleaved" else 1,
        "ep": rng.choice([1, 1, 2, 4, 8]),
        "zero": rng.randrange(4),
        "recompute": rng.choice(["none", "selective", "full"]),
        "global_batch": micro_batch * dp * rng.choice([1, 2, 3, 5, 8, 16, 24, 24, 640]),
    }


def drawn(rng: random.Random) -> tuple[Model, Cluster, Plan]:
    """Return a plan; raises a ForeshardError where the choices make none."""
    model, mixed = api.load_model(rng.choice(MODELS)), rng.random() < 0.1
    parts = PAIR if mixed else (rng.choice(CLUSTERS),)
    choices: dict[str, Any] = {
        "seq_len": rng.choice([1024, 4096]),
        "framework": rng.choice(FRAMEWORKS),
        "precision": "bf16" if mixed else rng.choice(["bf16", "bf16", "fp8"]),
        "offload": rng.choice(["none", "none", "none", "optimizer"]),
    }
    for name in ("grad_overlap", "p2p_overlap", "tp_overlap"):
        if rng.random() < 0.3:
            choices[name] = rng.random() < 0.5
    if rng.random() < 0.1:
        choices["lora"] = 16
    groups: list[Group] = []
    for part in parts:
        plan = api.make_plan(model, part, **choices, **degrees(rng, api.load_cluster(part).num_devices))
        begin = sum(len(stage.ranks) for group in groups for stage in group.stages)
        groups += [moved(group, begin) for group in plan.groups]
    plan = replace(plan, groups=tuple(groups), global_batch=sum(group.share for group in groups))
    return model, api.load_cluster("+".join(parts)), plan


def moved(group: Group, begin: int) -> Group:
    """Return a group on ranks from `begin`."""
    stages = (replace(each, ranks=tuple(begin + rank for rank in each.ranks)) for each in group.stages)
    return replace(group, stages=tuple(stages))


def plans(count: int, rng: random.Random) -> Iterator[tuple[Model, Cluster, Plan]]:
    """Yield plans that are valid."""
    while count:
        try:
            found = drawn(rng)
            predict(*found, engine="graph")
        except ForeshardError:
            continue
        yield found
        count -= 1


def difference(model: Model, cluster: Cluster, plan: Plan, network: str) -> float:
    """Return by how much the engines differ, in the step or in a part of it, as a share of the step."""
    one, other = (
        predict(model, cluster, plan, engine=engine, network=network) for engine in ("graph", "event")
    )
    apart = [one.step_time_s - other.step_time_s]
    apart += [seconds - other.time_breakdown_s[name] for name, seconds in one.time_breakdown_s.items()]
    return max(map(abs, apart)) / one.step_time_s


def described(cluster: Cluster, plan: Plan) -> str:
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    return (
        f"{cluster.name} {plan.framework} {group.schedule} tp {stage.tp} pp {len(group.stages)} "
        f"cp {stage.cp} ep {stage.ep} zero {stage.zero} micro-batches {group.num_micro_batches}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=float, default=EXACT, help="share of a step that is printed")
    parser.add_argument("--network", default="closed-form", choices=("closed-form", "flow"))
    asked = parser.parse_args()
    worst, over, schedules = 0.0, 0, Counter[str]()
    for model, cluster, plan in plans(asked.plans, random.Random(asked.seed)):
        apart = difference(model, cluster, plan, asked.network)
        worst, over = max(worst, apart), over + (apart > EXACT)
        schedules[plan.groups[0].schedule if len(plan.groups) == 1 else "two groups"] += 1
        if apart > asked.show:
            print(f"{100 * apart:.2g} %  {model.name} {described(cluster, plan)}")
    print(f"{asked.plans} plans, {over} more than {100 * EXACT:g} % apart, the worst {100 * worst:.2g} %")
    print(", ".join(f"{name} {count}" for name, count in sorted(schedules.items())))
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
