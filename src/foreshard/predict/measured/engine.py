"""A step predicted from measured costs.

The pipeline is played exactly as scheduled; messages travel beside the work; gradients of parameters that the
same ranks hold are summed in one ring, one after another; then comes the optimizer, and a small sum that ends
the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreshard.errors import SpecError
from foreshard.graph.pipeline import pipeline_program
from foreshard.graph.program import Kind
from foreshard.predict.measured.costs import LayerCost, MeasuredCosts, load_costs
from foreshard.predict.measured.memory import measured_memory
from foreshard.predict.measured.work import PassSeconds
from foreshard.sim import critical_path
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan
from foreshard.spec.prediction import TIME_PARTS, Money, Prediction
from foreshard.units import number_of

__all__ = [
    "LayerCost",
    "MeasuredCosts",
    "RankTimes",
    "load_costs",
    "predict_measured",
    "rank_times",
    "step_seconds",
]

COVERAGE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Where the step goes on one rank, in seconds; `end_s` is their sum."""

    rank: int
    compute_s: float
    recompute_s: float
    tensor_s: float
    waiting_s: float
    sync_s: float
    optimizer_s: float
    end_s: float


def predict_measured(
    costs: MeasuredCosts, cluster: Cluster, plan: Plan, *, tokens: float | None = None
) -> Prediction:
    """Return the prediction of a step.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
        Whose devices were measured, or are stated to be slower by `costs.slow`.
    plan : Plan
        Over the layers 0 .. len(costs.layers), of data-parallel ranks only.
    tokens : float, optional
        Of the whole run.

    Raises
    ------
    SpecError
    """
    started = time.perf_counter()
    _check(costs, cluster, plan)
    ranks = rank_times(costs, cluster, plan)
    critical = max(ranks, key=lambda r: (r.end_s, -r.rank))
    vote_s = _vote_s(costs, cluster, plan)
    step_s = critical.end_s + vote_s
    parts = dict.fromkeys(TIME_PARTS, 0.0) | {
        "compute": critical.compute_s,
        "recompute": critical.recompute_s,
        "tensor_comm": critical.tensor_s,
        "bubble": critical.waiting_s,
        "data_comm": critical.sync_s,
        "optimizer": critical.optimizer_s,
        "host": vote_s,
    }
    samples_per_s = plan.global_batch / step_s
    tokens_per_s = samples_per_s * costs.tokens_per_sample
    total = tokens / tokens_per_s if tokens else None
    return Prediction(
        step_time_s=step_s,
        step_time_interval_s=(step_s * costs.spread[0], step_s * costs.spread[1]),
        interval=COVERAGE,
        tokens_per_s=tokens_per_s,
        samples_per_s=samples_per_s,
        tokens_per_s_per_device=tokens_per_s / len(plan.ranks),
        mfu=0.0,
        mfu_causal=0.0,
        mfu_bf16=None,
        hfu=0.0,
        time_breakdown_s=parts,
        memory=measured_memory(costs, cluster, plan),
        cost=_money(cluster, step_s, plan.global_batch * costs.tokens_per_sample, total),
        energy_j_per_step=None,
        goodput=None,
        run_time_s=total,
        bottleneck=_bottleneck(parts, critical),
        plan=plan,
        model=costs.model,
        cluster=cluster.name,
        framework="foreshard",
        engine="graph",
        costs=costs.path,
        fidelity="calibrated",
        assumptions=_assumptions(costs, cluster, plan),
        evidence=f"layers timed on {costs.machine or 'this machine'}",
        predict_s=time.perf_counter() - started,
    )


def step_seconds(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> float:
    """Return the time of a step alone."""
    return max(r.end_s for r in rank_times(costs, cluster, plan)) + _vote_s(costs, cluster, plan)


def rank_times(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> list[RankTimes]:
    """Return where the step goes on every rank of the plan."""
    device = {rank: cluster.device_of(rank).name for rank in plan.ranks}
    done: dict[int, dict[str, Any]] = {}
    for group in plan.groups:
        done |= _group_done(costs, cluster, group, device)
    synced = _synced(costs, cluster, done)
    found = []
    for rank, told in sorted(done.items()):
        optimizer_s = costs.optimizer_s(device[rank], told["layers"], told["tp"]) / told["shards"]
        busy_s = told["work_s"] + told["again_s"] + told["tensor_s"]
        found.append(
            RankTimes(
                rank=rank,
                compute_s=told["work_s"],
                recompute_s=told["again_s"],
                tensor_s=told["tensor_s"],
                waiting_s=_gap(told["end_s"], busy_s),
                sync_s=synced[rank] - told["end_s"],
                optimizer_s=optimizer_s,
                end_s=synced[rank] + optimizer_s,
            )
        )
    return found


def _gap(end_s: float, busy_s: float) -> float:
    """Return the time not busy; rounding of sums is not time."""
    return 0.0 if abs(end_s - busy_s) < 1e-12 * end_s else end_s - busy_s


def _group_done(
    costs: MeasuredCosts, cluster: Cluster, group: Group, device: Mapping[int, str]
) -> dict[int, dict[str, Any]]:
    """Play the pipeline; return per rank its work and when each of its chunks has its gradients."""
    sizes = [min(group.micro_batch, group.share - lo) for lo in range(0, group.share, group.micro_batch)]
    work = PassSeconds(costs, cluster, group, sizes, device)
    ends = _ends(costs, cluster, group, sizes, work)
    found = {}
    for s, stage in enumerate(group.stages):
        ready = {layer: ends[s][c] for c, (lo, hi) in enumerate(stage.layers) for layer in range(lo, hi)}
        for place, rank in enumerate(stage.ranks):
            done_s, again_s, tensor_s = work.of_rank[rank]
            found[rank] = {
                "end_s": max(ends[s]),
                "work_s": done_s,
                "again_s": again_s,
                "tensor_s": tensor_s,
                "ready_s": ready,
                "layers": tuple(ready),
                "tp": stage.tp,
                "part": place % stage.tp,
                "shards": stage.inner_dp if stage.zero >= 1 else 1,
            }
    return found


def _ends(
    costs: MeasuredCosts, cluster: Cluster, group: Group, sizes: Sequence[int], work: PassSeconds
) -> list[list[float]]:
    """Return when each chunk of each stage has its gradients."""
    if work.forward.shape[:2] == (1, 1):
        return [[float(work.forward.sum() + work.backward.sum())]]
    backward_s: dict[str, Any] = {"backward_s": work.backward}
    if group.schedule == "zb-h1":
        backward_s = {"backward_input_s": work.inputs, "backward_weight_s": work.backward - work.inputs}
    program = pipeline_program(
        schedule=group.schedule,
        num_micro_batches=len(sizes),
        forward_s=work.forward,
        overlap_p2p=True,
        overlap_warm_up=True,
        send_forward_s=_sends(costs, cluster, group, sizes[0], forward=True),
        send_backward_s=_sends(costs, cluster, group, sizes[0], forward=False),
        **backward_s,
    )
    times = critical_path.run(program)
    computes = program.kind <= Kind.BACKWARD_WEIGHT
    return [
        [
            float(times.end_s[computes & (program.stage == s) & (program.chunk == c)].max())
            for c in range(group.num_chunks)
        ]
        for s in range(len(group.stages))
    ]


def _sends(
    costs: MeasuredCosts, cluster: Cluster, group: Group, size: int, *, forward: bool
) -> list[float] | float:
    """Return the seconds of a message over each boundary, the one back to the first stage last."""
    stages = group.stages
    if len(stages) == 1 and group.num_chunks == 1:
        return 0.0
    found = []
    for s, stage in enumerate(stages if group.num_chunks > 1 else stages[:-1]):
        after = stages[(s + 1) % len(stages)]
        size_bytes = (
            costs.layers[stage.layers[0][1] - 1].boundary_bytes_per_sample
            * size
            / min(stage.inner_dp, after.inner_dp)
            / (stage.tp if group.sp and stage.tp == after.tp else 1)
        )
        pairs = [(a, b) if forward else (b, a) for a in stage.ranks for b in after.ranks if a != b]
        found.append(max((costs.message_s(cluster, a, b, size_bytes) for a, b in pairs), default=0.0))
    return found


def _synced(
    costs: MeasuredCosts, cluster: Cluster, done: Mapping[int, Mapping[str, Any]]
) -> dict[int, float]:
    """Return when each rank has the sum of all its gradients: segments in order, one ring each."""
    clock = {rank: float(told["end_s"]) for rank, told in done.items()}
    free = dict.fromkeys(done, 0.0)
    segments: dict[tuple[int, ...], list[tuple[tuple[int, ...], float]]] = {}
    for layers, size, part in _pieces(costs, done):
        owners = tuple(sorted(rank for rank, told in done.items() if _holds(told, layers, part)))
        if size > 0 and len(owners) > 1:
            segments.setdefault(owners, []).append((layers, size))
    for owners, parts in sorted(segments.items()):
        held = {layer for layers, _ in parts for layer in layers}
        ready = max(
            max(free[rank], *(t for layer, t in done[rank]["ready_s"].items() if layer in held))
            for rank in owners
        )
        end = ready + costs.ring_s(cluster, owners, sum(size for _, size in parts))
        for rank in owners:
            free[rank] = end
            clock[rank] = max(clock[rank], end)
    return clock


def _pieces(
    costs: MeasuredCosts, done: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[tuple[int, ...], float, int | None]]:
    """Yield layers, the bytes of their gradients, and which part it is of those that ranks share out."""
    for layers, size in costs.summed():
        tps = {told["tp"] for told in done.values() if not told["ready_s"].keys().isdisjoint(layers)} - {1}
        cut = 0.0
        if tps and len(layers) == 1:  # what layers share is whole on every rank
            (tp,) = tps
            cut = costs.cut_bytes(layers[0], tp)
            for part in range(tp):
                yield layers, cut / tp, part
        yield layers, size - cut, None


def _holds(told: Mapping[str, Any], layers: Sequence[int], part: int | None) -> bool:
    """Return whether a rank has the gradients of layers, or of a part of them."""
    whole = part is None or told["tp"] == 1 or told["part"] == part
    return whole and not told["ready_s"].keys().isdisjoint(layers)


def _vote_s(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds of the small all-reduce that ends a step."""
    return costs.ring_s(cluster, sorted(plan.ranks), 0.0)


def _money(cluster: Cluster, step_s: float, tokens_a_step: float, total_s: float | None) -> Money:
    price = cluster.usd_per_h
    if price is None:
        return Money(usd_per_step=None, usd_per_1b_tokens=None, usd_total=None, price_date=None)
    step = price * step_s / 3600
    return Money(
        usd_per_step=step,
        usd_per_1b_tokens=step / tokens_a_step * 1e9 if tokens_a_step else None,
        usd_total=None if total_s is None else price * total_s / 3600,
        price_date=None,
    )


def _bottleneck(parts: Mapping[str, float], critical: RankTimes) -> str:
    name = max(parts, key=lambda part: parts[part])
    return f"{name} on rank {critical.rank}"


def _assumptions(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    slow = {name: factor for name, factor in costs.slow.items() if factor != 1.0}
    low, high = costs.spread
    links = costs.links.between(apart=cluster.num_nodes > 1)
    told = [
        f"seconds of the {costs.clock} clock, layers timed one after another",
        "MFU is not known: measured devices have no stated peak",
        f"interval: how passes spread on the measured machine ({low:.3f} to {high:.3f} of their median)",
        "memory: of parameters, gradients, optimizer and activations; not what the process takes besides",
        "links as the cluster states them"
        if links is None
        else f"links as measured; sizes are {100 * links.relative_error:.0f} % off the fit (median)",
    ]
    if any(group.sp and stage.tp > 1 for group in plan.groups for stage in group.stages):
        told.append("sp: work and memory of layers as timed without it; messages between stages in parts")
    if slow:
        told.append("devices stated as slower: " + ", ".join(f"{k} x{v:g}" for k, v in sorted(slow.items())))
    return tuple(told)


def _check(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> None:
    layers = max(hi for stage in plan.groups[0].stages for _, hi in stage.layers)
    if layers != len(costs.layers):
        raise SpecError(
            f"the plan splits {layers} layers, {len(costs.layers)} were measured",
            file=costs.path,
            key="groups.stages.layers",
            value=layers,
            rule="A plan holds every layer of the model",
            fix=f"Cut 0..{len(costs.layers)}",
        )
    degrees = sorted({stage.tp for group in plan.groups for stage in group.stages} - {1})
    if len(degrees) > 1:
        raise SpecError(
            f"tp {' and '.join(map(str, degrees))} in one plan",
            key="groups.stages.tp",
            value=degrees[-1],
            rule="Measured costs price stages of one tp above 1, beside stages of tp 1",
        )
    most = max(plan.ranks)
    if most >= cluster.num_devices:
        raise SpecError(
            f"the plan uses rank {most}, the cluster has {number_of(cluster.num_devices, 'device')}",
            key="ranks",
            value=most,
            rule="Ranks are 0 to N - 1",
        )
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            if stage.cp * stage.ep > 1:
                raise SpecError(
                    "cp or ep above 1",
                    key=f"groups[{g}].stages[{s}]",
                    rule="Measured costs price stages of data- and tensor-parallel ranks",
                )
            if stage.zero >= 3 and stage.inner_dp > 1:
                raise SpecError(
                    "zero 3",
                    key=f"groups[{g}].stages[{s}].zero",
                    value=stage.zero,
                    rule="Measured costs do not price the gathering of values",
                    fix="Use zero 0, 1 or 2",
                )
