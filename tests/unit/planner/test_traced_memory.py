"""The memory of traced modules as the planner counts it, against every cut and against the prediction."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foreshard.api import load_cluster
from foreshard.planner.measured.plans import plan_measured
from foreshard.predict.measured.memory import measured_memory, rooms
from foreshard.predict.measured.traced import traced_costs
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.plan import Group, Plan, Stage

pytestmark = pytest.mark.filterwarnings("ignore")

DEVICES = 3


def random_costs(monkeypatch, seed, batch, optimizer="adamw"):
    """Return costs of a small module: some share parameters, some make much on their backward's way."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "profile"))
    from random_modules import random_module

    module, inputs, _ = random_module(seed)
    traced = trace_module(module, inputs, precision="fp32")
    sizes = (1, max(2, batch))
    device = load_cluster("1x1xa100-sxm-40gb").nodes[0].device
    return traced_costs(traced, [device], micro_batches=sizes, optimizer=optimizer)


def cluster_of(capacities):
    """Return as many nodes of one A100, each with its own memory."""
    (node,) = load_cluster("1x1xa100-sxm-40gb").nodes
    nodes = [replace(node, device=replace(node.device, capacity_bytes=float(size))) for size in capacities]
    return replace(load_cluster("1x1xa100-sxm-40gb"), nodes=tuple(nodes))


def pipeline(ranks, cuts, batch, size, rules=("none",) * DEVICES):
    stages = tuple(
        Stage(ranks=(rank,), layers=(span,), zero=0, recompute=rule)
        for rank, span, rule in zip(ranks, pairwise(cuts), rules[: len(ranks)], strict=True)
    )
    group = Group(share=batch, micro_batch=size, stages=stages, schedule="1f1b")
    return Plan(global_batch=batch, seq_len=1, groups=(group,))


def peaks_of(costs, plan, cluster=cluster_of([1.0] * DEVICES)):  # noqa: B008
    return measured_memory(costs, cluster, plan).per_stage_peak_bytes[0]


def least_memory(costs, batch, parts):
    """Return the memory of which a plan fits: where no layer runs again, and where those of a stage may.

    Each device has its part of it. Two pipelines beside each other fit only where one does.
    """
    layers, kept, again = len(costs.layers), math.inf, math.inf
    for count in range(1, DEVICES + 1):
        for inner in combinations(range(1, layers), count - 1):
            for size in (m for m in (1, 2, 4) if m <= batch):
                none, full = (
                    peaks_of(costs, pipeline(range(count), (0, *inner, layers), batch, size, (rule,) * count))
                    for rule in ("none", "full")
                )
                for given in permutations(parts, count):
                    kept = min(kept, max(np.divide(none, given)))
                    again = min(again, max(np.divide(np.minimum(none, full), given)))
    return kept, again


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_found_where_one_fits_and_refused_where_none_does(seed, monkeypatch):
    """Memories are a little above and below those of which a plan fits; layers run again if they must."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 6))
    costs = random_costs(monkeypatch, seed, batch)
    parts = np.array([1.0, *rng.choice([1.0, 0.6, 1.7], DEVICES - 1)])
    asked = {"global_batch": batch, "seq_len": 1, "budget_s": 600.0}
    kept, again = least_memory(costs, batch, parts)
    for need, rules in ((kept, {"none"}), (again, {"none", "full"})):
        found = plan_measured(costs, cluster_of(parts * need * 1.001), **asked)
        assert found.plans and all(one.prediction.memory.fits for one in found.plans)
        stages = [stage for one in found.plans for group in one.plan.groups for stage in group.stages]
        assert {stage.recompute for stage in stages} <= rules
    refused = plan_measured(costs, cluster_of(parts * again * 0.999), **asked)
    assert not refused.plans and "memory" in str(refused.infeasible)


@pytest.mark.parametrize("seed", range(10))
def test_rooms_of_stages_are_those_of_the_prediction(seed, monkeypatch):
    """Of every stage of random pipelines: as many micro-batches as it keeps fit its peak, and no less."""
    rng = np.random.default_rng(seed)
    costs = random_costs(monkeypatch, seed, 8, optimizer=("adamw", "sgd")[seed % 2])
    layers = len(costs.layers)
    for size in (1, 3, 8):
        inner = np.sort(rng.choice(np.arange(1, layers), min(DEVICES, layers) - 1, replace=False))
        rules = tuple(rng.choice(["none", "full"], DEVICES).tolist())
        plan = pipeline(range(DEVICES), (0, *map(int, inner), layers), 8, size, rules)
        peaks, count = peaks_of(costs, plan), plan.groups[0].num_micro_batches
        for place, stage in enumerate(plan.groups[0].stages):
            start, stop = np.array(stage.layers).T
            kept = min(DEVICES - place, count)
            asked = {"tp": 1, "samples": size, "recompute": rules[place]}
            above, below = (
                rooms(costs, start, stop, capacity_bytes=peaks[place] * part, **asked).item()
                for part in (1 + 1e-9, 1 - 1e-9)
            )
            assert above >= kept > below or (above == below == kept == 0)


def test_no_random_module_leaves_the_terms_out(monkeypatch):
    """The modules above share parameters and hold more at the step or in the backward."""
    tied, steps, ways = 0, 0, 0
    for seed in range(5):
        costs = random_costs(monkeypatch, seed, 2)
        tied += bool(costs.tied)
        whole = pipeline((0,), (0, len(costs.layers)), 1, 1)
        parts = measured_memory(costs, cluster_of([1.0]), whole).breakdown_bytes
        steps += parts["activations"] == 0.0
        ways += parts["activations"] > 0.0 and parts["temporary"] > 0.0
    assert min(tied, steps, ways) >= 1
