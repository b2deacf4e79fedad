"""Plans of a user's own model on own machines, by measured costs.

The measured layers become stage options of the abstract problem (one device a stage, any cut, several micro-batch
sizes); its solver finds groups, cuts and shares; the exact schedule judges them and shares are balanced once more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.problem import Arrangement, Problem
from foreshard.planner.result import PlanResult, Ranked
from foreshard.planner.solve import solve
from foreshard.predict.measured import MeasuredCosts, predict_measured, step_seconds
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage

_SIZES = (1, 2, 4, 8, 16, 32)
_REACH = 2
"""Micro-batches up to so many times the largest that was timed."""


def plan_measured(
    costs: MeasuredCosts, cluster: Cluster, *, global_batch: int, seq_len: int, precision: str = "fp32",
    optimizer: str = "adamw", top: int = 5, budget_s: float = 10.0, largest: int = 8, tokens: float | None = None,
) -> PlanResult:  # fmt: skip
    """Return the best plans found and a bound that no plan beats.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
    global_batch, seq_len : int
    precision, optimizer : str
        As the plan shall say; the costs are of what was measured.
    top : int
    budget_s : float
    largest : int
        Samples of the largest micro-batch that was timed.
    """
    started = time.perf_counter()
    kinds = _kinds(cluster)
    sizes = [m for m in _SIZES if m <= min(global_batch, largest * _REACH)]
    problem = priced(costs, cluster, list(kinds.values()), sizes, global_batch)
    solution = solve(problem, budget_s=budget_s, target_gap=0.005)
    if solution.arrangement is None:
        return _nothing(costs, started)
    blank = Plan(global_batch=global_batch, seq_len=seq_len, groups=(), precision=precision, optimizer=optimizer,
                 framework="foreshard")  # fmt: skip
    found: list[tuple[float, Plan]] = []
    for arrangement in (solution.arrangement, *solution.others[:20]):
        plan, seconds = _balanced(costs, cluster, _plan(blank, problem, arrangement, kinds))
        if all(plan != other for _, other in found):
            found.append((seconds, plan))
    found.sort(key=lambda pair: pair[0])
    bound = fluid_bound_s(costs, cluster, sizes, global_batch)
    ranked = []
    for seconds, plan in found:
        prediction = predict_measured(costs, cluster, plan, tokens=tokens)
        if prediction.memory.fits:
            ranked.append(Ranked(plan=plan, prediction=prediction, why=_why(seconds, found[0][0])))
    best_s = ranked[0].prediction.step_time_s if ranked else float("inf")
    return PlanResult(
        plans=tuple(ranked[:top]), lower_bound_step_time_s=bound, gap=best_s / bound - 1,
        binding=ranked[0].prediction.bottleneck if ranked else "memory", evaluated=solution.evaluated + len(found),
        pruned=solution.excluded, wall_s=time.perf_counter() - started,
        space="pipelines of one device a stage, any cuts and shares, 1f1b",
        ladder={"work": bound},
        notes=("bound: all work at the least measured seconds per sample, spread over all devices by their speed",),
    )  # fmt: skip


def _nothing(costs: MeasuredCosts, started: float) -> PlanResult:
    need = sum(layer.parameter_bytes * 2 + layer.state_bytes for layer in costs.layers)
    error = InfeasibleError(
        "no pipeline fits the memory", key="memory", value=need, rule="parameters, gradients, states and activations fit",
        fix=f"Add devices or memory: the model's states alone take {need / 2**30:.2f} GiB",
    )  # fmt: skip
    return PlanResult(plans=(), lower_bound_step_time_s=0.0, gap=0.0, binding="memory", evaluated=0, pruned=0,
                      wall_s=time.perf_counter() - started, infeasible=error)  # fmt: skip


def _kinds(cluster: Cluster) -> dict[str, list[int]]:
    """Return the ranks of each kind of device, by name."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for rank in range(cluster.num_devices):
        kinds[cluster.device_of(rank).name].append(rank)
    return dict(kinds)


def priced(
    costs: MeasuredCosts, cluster: Cluster, kinds: Sequence[Sequence[int]], sizes: Sequence[int], global_batch: int
) -> Problem:
    """Return the abstract problem: an option is a kind of device and a micro-batch size; every cut is a type."""
    count = len(costs.layers)
    spans = [(lo, hi) for lo in range(count) for hi in range(lo + 1, count + 1)]
    types = np.full((count + 1, count + 1), -1)
    for number, (lo, hi) in enumerate(spans):
        types[lo, hi] = number
    options = [(k, m) for k in range(len(kinds)) for m in sizes]
    table = {name: np.array([getattr(layer, name) for layer in costs.layers]) for name in ("forward_s", "backward_s")}
    work = table["forward_s"] + table["backward_s"]
    time_s = np.empty((len(options), len(spans)))
    tail_s = np.zeros((2, len(options), len(spans)))
    room = np.zeros((len(options), len(spans)), dtype=int)
    for o, (k, m) in enumerate(options):
        device = cluster.device_of(kinds[k][0])
        slow = costs.slow_of(device.name)
        for t, (lo, hi) in enumerate(spans):
            part = costs.layers[lo:hi]
            time_s[o, t] = slow * float(work[lo:hi, 0].sum() + work[lo:hi, 1].sum() * m)
            fixed = sum(2 * layer.parameter_bytes + layer.frozen_bytes + layer.state_bytes for layer in part)
            kept = max(sum(layer.saved_bytes_per_sample for layer in part) * m, 1.0)
            room[o, t] = max(0, int((device.capacity_bytes - fixed) // kept)) if fixed < device.capacity_bytes else 0
            if lo == 0:  # the first stage is the last to end; what follows on others may hide behind it
                update = slow * sum(layer.optimizer_s for layer in part)
                two = [kinds[k][0], next((r for r in range(cluster.num_devices) if r != kinds[k][0]), kinds[k][0])]
                size = sum(layer.parameter_bytes for layer in part)
                tail_s[0, o, t] = update
                tail_s[1, o, t] = update + (costs.ring_s(cluster, two, size) if two[0] != two[1] else 0.0)
    most = min(count, cluster.num_devices)
    micro_batch = np.array([m for _, m in options])
    takes = np.zeros((len(options), len(kinds)), dtype=int)
    takes[np.arange(len(options)), [k for k, _ in options]] = 1
    return Problem(
        counts=tuple(len(ranks) for ranks in kinds), global_batch=global_batch, max_stages=most, types=types, takes=takes,
        micro_batch=micro_batch, grain=np.ones(len(options), dtype=int), time_s=np.where(room > 0, time_s, np.inf),
        copies=(1, 2), tail_s=tail_s, max_in_flight=np.minimum(room, 10**6), hop_s=np.zeros((len(options),) * 2),
        names=tuple(options),
    )  # fmt: skip


def fluid_bound_s(costs: MeasuredCosts, cluster: Cluster, sizes: Sequence[int], global_batch: int) -> float:
    """Return seconds that no step can beat: all samples at the least cost, on all devices without a pause."""
    m = max(sizes)
    sample_s = sum(
        (layer.forward_s[0] + layer.backward_s[0]) / m + layer.forward_s[1] + layer.backward_s[1] for layer in costs.layers
    )
    speed = sum(1.0 / costs.slow_of(cluster.device_of(rank).name) for rank in range(cluster.num_devices))
    return float(global_batch * sample_s / speed)


def _plan(blank: Plan, problem: Problem, arrangement: Arrangement, kinds: dict[str, list[int]]) -> Plan:
    free: list[Iterator[int]] = [iter(ranks) for ranks in kinds.values()]
    groups = []
    for template, share in zip(arrangement.templates, arrangement.shares, strict=True):
        stages = tuple(
            Stage(ranks=(next(free[int(problem.takes[part.option].argmax())]),), layers=((part.start, part.stop),), zero=0)
            for part in template
        )
        size = int(problem.micro_batch[template[0].option])
        groups.append(Group(share=share, stages=stages, micro_batch=min(size, share), schedule="1f1b"))
    return replace(blank, groups=tuple(groups))


def _balanced(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> tuple[Plan, float]:
    """Move samples between groups while the exact step gets shorter; return the plan and its seconds."""
    best, best_s = plan, step_seconds(costs, cluster, plan)
    grain = max(1, plan.global_batch // 64)
    while grain >= 1:
        improved = False
        for source in range(len(best.groups)):
            for target in range(len(best.groups)):
                moved = _moved(best, source, target, grain) if source != target else None
                if moved is not None:
                    seconds = step_seconds(costs, cluster, moved)
                    if seconds < best_s * (1 - 1e-9):
                        best, best_s, improved = moved, seconds, True
        if not improved:
            grain = grain // 2
    return best, best_s


def _moved(plan: Plan, source: int, target: int, count: int) -> Plan | None:
    groups = list(plan.groups)
    if groups[source].share <= count:
        return None
    groups[source] = _with_share(groups[source], groups[source].share - count)
    groups[target] = _with_share(groups[target], groups[target].share + count)
    return replace(plan, groups=tuple(groups))


def _with_share(group: Group, share: int) -> Group:
    return replace(group, share=share, micro_batch=min(group.micro_batch, share))


def _why(seconds: float, best_s: float) -> str:
    return "the fastest found" if seconds == best_s else f"{100 * (seconds / best_s - 1):.1f} % slower than the first"
