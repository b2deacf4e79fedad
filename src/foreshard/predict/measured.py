"""The cost source `measured`: layers timed on the user's own machine, and a step predicted from them.

A layer's forward and backward take `fixed + per_sample * samples` seconds on a device that was measured, and
`slow` times that on one that is stated to be slower. The pipeline is played exactly as scheduled; messages travel
beside the work; gradients of parameters that the same ranks hold are summed in one ring, one after another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.errors import SpecError
from foreshard.graph.pipeline import pipeline_program
from foreshard.graph.program import Kind
from foreshard.graph.schedules import Op, stage_order
from foreshard.predict.measured_links import MeasuredLinks
from foreshard.sim import critical_path
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import MEMORY_PARTS, TIME_PARTS, Memory, Money, Prediction

Line = tuple[float, float]
"""(fixed seconds, seconds per sample)."""
_LINES = ("forward_s", "backward_s", "backward_input_s")
_NUMBERS = ("optimizer_s", "parameter_bytes", "state_bytes", "saved_bytes_per_sample", "boundary_bytes_per_sample")
COVERAGE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What a layer costs on the measured device.

    Attributes
    ----------
    forward_s, backward_s, backward_input_s : (fixed, per sample)
        `backward_input_s` is the part of the backward that the layer before waits for.
    optimizer_s : float
    parameter_bytes, state_bytes : float
        Trainable parameters (their gradients take as much), optimizer's states.
    saved_bytes_per_sample, boundary_bytes_per_sample : float
        Kept from forward to backward; handed to the next layer.
    frozen_bytes : float
    """

    forward_s: Line
    backward_s: Line
    backward_input_s: Line
    optimizer_s: float
    parameter_bytes: float
    state_bytes: float
    saved_bytes_per_sample: float
    boundary_bytes_per_sample: float
    frozen_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Calibrated costs of one model on the devices it was timed on.

    Attributes
    ----------
    layers : tuple of LayerCost
        On the device that was measured first.
    slow : mapping of device name to factor
        How many times as long the work takes there; 1 for a measured device.
    tables : mapping of device name to tuple of LayerCost
        Devices that were measured themselves; `slow` refers to `layers` for all others.
    spread : (float, float)
        5th and 95th percentile of whole passes over their median: the noise of the machine.
    clock : {'cpu', 'wall'}
        What the seconds are of.
    tokens_per_sample : float
    path : str
    links : MeasuredLinks
        What is not in them the cluster says.
    largest : int
        Samples of the largest micro-batch that was timed.
    """

    layers: tuple[LayerCost, ...]
    slow: Mapping[str, float]
    spread: tuple[float, float]
    clock: str
    tokens_per_sample: float
    path: str
    links: MeasuredLinks = MeasuredLinks()
    tables: Mapping[str, tuple[LayerCost, ...]] = field(default_factory=dict)
    model: str = ""
    machine: str = ""
    largest: int = 8

    def slow_of(self, device: str) -> float:
        """Return how slow a device is.

        Raises
        ------
        SpecError
            When it was not measured.
        """
        if device not in self.slow:
            raise SpecError(
                f"no measured costs of {device!r}", file=self.path, key="devices", value=device,
                rule=f"measured are {', '.join(sorted(self.slow))}", fix="Profile that device, or give the lab to calibrate",
            )  # fmt: skip
        return self.slow[device]

    def layers_on(self, device: str) -> tuple[LayerCost, ...]:
        """Return the layers as measured on a device, or on the one that `slow_of` it refers to."""
        return self.tables.get(device, self.layers)

    def work_s(self, device: str, span: tuple[int, int], name: str, samples: int) -> float:
        """Return the seconds that a device needs for samples on layers [start, stop)."""
        lines = [getattr(layer, name) for layer in self.layers_on(device)[slice(*span)]]
        return self.slow_of(device) * float(sum(fixed + each * samples for fixed, each in lines))

    def optimizer_s(self, device: str, layers: Iterable[int]) -> float:
        """Return the seconds that a device needs to update layers."""
        table = self.layers_on(device)
        return self.slow_of(device) * float(sum(table[layer].optimizer_s for layer in layers))

    def message_s(self, cluster: Cluster, source: int, target: int, num_bytes: float) -> float:
        """Return the seconds of a message between two ranks."""
        measured = self.links.between(apart=_apart(cluster, (source, target)))
        if measured is not None:
            return measured.message_s(num_bytes)
        rate, latency_s = _stated(cluster, source, target)
        return latency_s + num_bytes / rate

    def ring_s(self, cluster: Cluster, owners: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of an all-reduce: a ring over the slowest link (Thakur et al. 2005)."""
        m = len(owners)
        if m < 2:
            return 0.0
        measured = self.links.between(apart=_apart(cluster, owners))
        if measured is not None:
            return measured.ring_s(m, num_bytes)
        links = [_stated(cluster, a, b) for a, b in zip(owners, (*owners[1:], owners[0]), strict=True)]
        rate, latency_s = min(r for r, _ in links), max(wait for _, wait in links)
        return 2 * (m - 1) * latency_s + 2 * (m - 1) / m * num_bytes / rate


def _apart(cluster: Cluster, ranks: Sequence[int]) -> bool:
    return len({cluster.node_of(rank) for rank in ranks}) > 1


def _stated(cluster: Cluster, source: int, target: int) -> Line:
    """Return the cluster's own (bytes/s, latency in seconds) between two ranks."""
    a, b = cluster.node_group_of(source), cluster.node_group_of(target)
    return min(a.nic_bytes_per_s, b.nic_bytes_per_s), max(a.nic_latency_s, b.nic_latency_s)


def load_costs(path: str) -> MeasuredCosts:
    """Return measured costs from the file that `foreshard calibrate` writes.

    Raises
    ------
    SpecError
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise SpecError(f"cannot read: {error.strerror}", file=path, key="--costs",
                        fix="Make it with foreshard profile and foreshard calibrate") from None  # fmt: skip
    except ValueError as error:
        raise SpecError(f"not JSON: {error}", file=path, key="--costs") from None
    try:
        return _parsed(data, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"not measured costs: {type(error).__name__} {error}", file=path, key="--costs",
                        rule="the file is what foreshard calibrate writes",
                        fix="Run foreshard calibrate again") from None  # fmt: skip


def _parsed(data: Any, path: str) -> MeasuredCosts:
    if data["kind"] != "measured costs" or data["schema_version"] != 1:
        raise ValueError("kind and schema_version")
    tables = {str(name): _layers(rows) for name, rows in data.get("tables", {}).items()}
    layers = _layers(data["layers"])
    if any(len(table) != len(layers) for table in tables.values()):
        raise ValueError("tables of as many layers")
    slow = {str(name): float(factor) for name, factor in data["devices"].items()}
    if not all(np.isfinite(factor) and factor > 0 for factor in slow.values()):
        raise ValueError("devices with positive factors")
    return MeasuredCosts(
        layers=layers, tables=tables, slow=slow, spread=(float(data["spread"][0]), float(data["spread"][1])),
        clock=str(data["clock"]), tokens_per_sample=float(data["tokens_per_sample"]), path=path,
        links=MeasuredLinks.parsed(data.get("links")), model=str(data.get("model", "")),
        machine=str(data.get("machine", "")), largest=int(max(data["samples"])),
    )  # fmt: skip


def _layers(rows: Any) -> tuple[LayerCost, ...]:
    layers = []
    for told in rows:
        lines = {name: (float(told[name][0]), float(told[name][1])) for name in _LINES}
        numbers = {name: float(told[name]) for name in (*_NUMBERS, "frozen_bytes")}
        if not all(np.isfinite(v) and v >= 0 for v in (*numbers.values(), *(v for line in lines.values() for v in line))):
            raise ValueError("layers with finite seconds and bytes")
        layers.append(LayerCost(**lines, **numbers))
    if not layers:
        raise ValueError("layers")
    return tuple(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Where the step goes on one rank, in seconds; `end_s` is their sum."""

    rank: int
    compute_s: float
    recompute_s: float
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
        "compute": critical.compute_s, "recompute": critical.recompute_s, "bubble": critical.waiting_s,
        "data_comm": critical.sync_s, "optimizer": critical.optimizer_s, "host": vote_s,
    }  # fmt: skip
    samples_per_s = plan.global_batch / step_s
    tokens_per_s = samples_per_s * costs.tokens_per_sample
    total = tokens / tokens_per_s if tokens else None
    return Prediction(
        step_time_s=step_s, step_time_interval_s=(step_s * costs.spread[0], step_s * costs.spread[1]),
        interval=COVERAGE, tokens_per_s=tokens_per_s, samples_per_s=samples_per_s,
        tokens_per_s_per_device=tokens_per_s / len(plan.ranks), mfu=0.0, mfu_causal=0.0, mfu_bf16=None, hfu=0.0,
        time_breakdown_s=parts, memory=_memory(costs, cluster, plan),
        cost=_money(cluster, step_s, plan.global_batch * costs.tokens_per_sample, total), energy_j_per_step=None,
        goodput=None, run_time_s=total, bottleneck=_bottleneck(parts, critical), plan=plan, model=costs.model,
        cluster=cluster.name, framework="foreshard", engine="graph", costs=costs.path, fidelity="calibrated",
        evidence=f"layers timed on {costs.machine or 'this machine'}", assumptions=_assumptions(costs),
        predict_s=time.perf_counter() - started,
    )  # fmt: skip


def step_seconds(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> float:
    """Return the time of a step alone."""
    return max(r.end_s for r in rank_times(costs, cluster, plan)) + _vote_s(costs, cluster, plan)


def rank_times(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> list[RankTimes]:
    """Return where the step goes on every rank of the plan."""
    device = {rank: cluster.device_of(rank).name for rank in plan.ranks}
    done = {rank: told for group in plan.groups for rank, told in _group_done(costs, cluster, group, device).items()}
    synced = _synced(costs, cluster, plan, done)
    found = []
    for rank, told in sorted(done.items()):
        optimizer_s = costs.optimizer_s(device[rank], told["layers"]) / told["shards"]
        found.append(RankTimes(
            rank=rank, compute_s=told["work_s"], recompute_s=told["again_s"],
            waiting_s=_gap(told["end_s"], told["work_s"] + told["again_s"]), sync_s=synced[rank] - told["end_s"],
            optimizer_s=optimizer_s, end_s=synced[rank] + optimizer_s,
        ))  # fmt: skip
    return found


def _gap(end_s: float, busy_s: float) -> float:
    """Return the time not busy; rounding of sums is not time."""
    return 0.0 if abs(end_s - busy_s) < 1e-12 * end_s else end_s - busy_s


def _group_done(
    costs: MeasuredCosts, cluster: Cluster, group: Group, device: Mapping[int, str]
) -> dict[int, dict[str, Any]]:
    """Play the pipeline; return per rank its work and when each of its chunks has its gradients."""
    sizes = [min(group.micro_batch, group.share - lo) for lo in range(0, group.share, group.micro_batch)]
    shape = (len(group.stages), group.num_chunks, len(sizes))
    forward, backward, inputs = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    work = {rank: np.zeros(2) for stage in group.stages for rank in stage.ranks}
    for s, stage in enumerate(group.stages):
        again = _again(stage)
        for c, (lo, hi) in enumerate(stage.layers):
            for m, size in enumerate(sizes):
                for rank, count in zip(stage.ranks, _counts(stage, size), strict=True):
                    if count == 0:
                        continue
                    f = costs.work_s(device[rank], (lo, hi), "forward_s", count)
                    b = costs.work_s(device[rank], (lo, hi), "backward_s", count)
                    i = costs.work_s(device[rank], (lo, hi), "backward_input_s", count)
                    r = f * again
                    forward[s, c, m] = max(forward[s, c, m], f)
                    backward[s, c, m] = max(backward[s, c, m], b + r)
                    inputs[s, c, m] = max(inputs[s, c, m], min(i, b) + r)
                    work[rank] += (f + b, r)
    split = group.schedule == "zb-h1"
    program = pipeline_program(
        schedule=group.schedule, num_micro_batches=len(sizes), forward_s=forward, overlap_p2p=True, overlap_warm_up=True,
        backward_s=None if split else backward, backward_input_s=inputs if split else None,
        backward_weight_s=backward - inputs if split else None,
        send_forward_s=_sends(costs, cluster, group, sizes[0], forward=True),
        send_backward_s=_sends(costs, cluster, group, sizes[0], forward=False),
    )  # fmt: skip
    times = critical_path.run(program)
    found = {}
    for s, stage in enumerate(group.stages):
        mine = (program.stage == s) & (program.kind <= Kind.BACKWARD_WEIGHT)
        ends = [float(times.end_s[mine & (program.chunk == c)].max()) for c in range(group.num_chunks)]
        for rank in stage.ranks:
            found[rank] = {
                "end_s": max(ends), "work_s": float(work[rank][0]), "again_s": float(work[rank][1]),
                "layers": [layer for lo, hi in stage.layers for layer in range(lo, hi)],
                "shards": stage.inner_dp if stage.zero >= 1 else 1,
                "ready_s": {layer: ends[c] for c, (lo, hi) in enumerate(stage.layers) for layer in range(lo, hi)},
            }  # fmt: skip
    return found


def _counts(stage: Stage, size: int) -> list[int]:
    weights = stage.rank_shares or (1,) * stage.inner_dp
    bounds = [size * int(seen) // sum(weights) for seen in np.cumsum((0, *weights))]
    return [hi - lo for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)]


def _again(stage: Stage) -> float:
    """Return the part of the forward that runs again in the backward."""
    head, _, rest = stage.recompute.partition(":")
    layers = max(hi - lo for lo, hi in stage.layers)
    if head == "none":
        return 0.0
    if head.startswith("every-"):
        return (layers // int(head[6:])) / layers
    kind, _, count = rest.partition(":")
    return min(int(count), layers) / layers if kind == "block" else 1.0


def _sends(
    costs: MeasuredCosts, cluster: Cluster, group: Group, size: int, *, forward: bool
) -> list[float] | float:
    """Return the seconds of a message over each boundary of the pipeline, the one back to the first stage last."""
    stages = group.stages
    if len(stages) == 1 and group.num_chunks == 1:
        return 0.0
    found = []
    for s, stage in enumerate(stages if group.num_chunks > 1 else stages[:-1]):
        after = stages[(s + 1) % len(stages)]
        size_bytes = costs.layers[stage.layers[0][1] - 1].boundary_bytes_per_sample * size / min(
            stage.inner_dp, after.inner_dp
        )
        pairs = [(a, b) if forward else (b, a) for a in stage.ranks for b in after.ranks if a != b]
        found.append(max((costs.message_s(cluster, a, b, size_bytes) for a, b in pairs), default=0.0))
    return found


def _synced(
    costs: MeasuredCosts, cluster: Cluster, plan: Plan, done: Mapping[int, Mapping[str, Any]]
) -> dict[int, float]:
    """Return when each rank has the sum of all its gradients: segments in order, one ring each."""
    clock = {rank: float(told["end_s"]) for rank, told in done.items()}
    free = dict.fromkeys(done, 0.0)
    segments: dict[tuple[int, ...], list[int]] = {}
    for layer in range(len(costs.layers)):
        owners = tuple(sorted(rank for rank, told in done.items() if layer in told["ready_s"]))
        if costs.layers[layer].parameter_bytes > 0:
            segments.setdefault(owners, []).append(layer)
    for owners, layers in sorted(segments.items()):
        if len(owners) < 2:
            continue
        size = sum(costs.layers[layer].parameter_bytes for layer in layers)
        ready = max(max(free[rank], *(done[rank]["ready_s"][layer] for layer in layers)) for rank in owners)
        end = ready + costs.ring_s(cluster, owners, size)
        for rank in owners:
            free[rank] = end
            clock[rank] = max(clock[rank], end)
    return clock


def _vote_s(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds of the small all-reduce that ends a step."""
    return costs.ring_s(cluster, sorted(plan.ranks), 0.0)


def _memory(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> Memory:
    peaks, worst, where = [], None, 0
    for group in plan.groups:
        row = []
        for s, stage in enumerate(group.stages):
            parts = _stage_bytes(costs, group, stage, s)
            row.append(sum(parts.values()))
            for rank in stage.ranks:
                full = sum(parts.values()) / cluster.device_of(rank).capacity_bytes
                if worst is None or full > worst[0]:
                    worst, where = (full, parts), rank
        peaks.append(tuple(row))
    assert worst is not None
    peak, capacity = sum(worst[1].values()), cluster.device_of(where).capacity_bytes
    return Memory(
        peak_bytes=peak, peak_allocated_bytes=peak, peak_rank=where, capacity_bytes=capacity, fits=peak <= capacity,
        breakdown_bytes=dict.fromkeys(MEMORY_PARTS, 0.0) | worst[1], per_stage_peak_bytes=tuple(peaks),
    )  # fmt: skip


def _stage_bytes(costs: MeasuredCosts, group: Group, stage: Stage, place: int) -> dict[str, float]:
    layers = [costs.layers[layer] for lo, hi in stage.layers for layer in range(lo, hi)]
    samples = max(_counts(stage, group.micro_batch))
    kept, temporary = zip(*(_saved_bytes(costs, stage, span) for span in stage.layers), strict=True)
    shards = stage.inner_dp if stage.zero >= 1 else 1
    own = sum(layer.parameter_bytes for layer in layers)
    return {
        "parameters": own + sum(layer.frozen_bytes for layer in layers), "gradients": own,
        "optimizer": sum(layer.state_bytes for layer in layers) / shards,
        "activations": samples * _most_kept(group, place, kept), "temporary": samples * max(temporary),
    }  # fmt: skip


def _saved_bytes(costs: MeasuredCosts, stage: Stage, span: tuple[int, int]) -> tuple[float, float]:
    """Return the bytes of a sample kept from forward to backward, and those made again while one is under way."""
    layers = costs.layers[slice(*span)]
    saved = sum(layer.saved_bytes_per_sample for layer in layers)
    again = _again(stage)
    if not again:
        return saved, 0.0
    _, _, rest = stage.recompute.partition(":")
    kind, _, count = rest.partition(":")
    unit = int(count) if kind == "uniform" else 1
    most = max(sum(one.saved_bytes_per_sample for one in layers[i : i + unit]) for i in range(0, len(layers), unit))
    return saved * (1 - again) + again * sum(layer.boundary_bytes_per_sample for layer in layers) / unit, most


def _most_kept(group: Group, place: int, bytes_of_chunk: Sequence[float]) -> float:
    """Return the largest sum of what a stage keeps of a sample of each micro-batch under way."""
    order = stage_order(
        group.schedule, num_stages=len(group.stages), num_micro_batches=group.num_micro_batches,
        num_chunks=group.num_chunks,
    )[place]  # fmt: skip
    op, chunk = order[:, 0], order[:, 1]
    change = np.where(op == Op.FORWARD, 1.0, np.where(op == Op.BACKWARD_INPUT, 0.0, -1.0))
    return float(np.cumsum(change * np.array(bytes_of_chunk)[chunk]).max())


def _money(cluster: Cluster, step_s: float, tokens_a_step: float, total_s: float | None) -> Money:
    price = cluster.usd_per_h
    if price is None:
        return Money(usd_per_step=None, usd_per_1b_tokens=None, usd_total=None, price_date=None)
    step = price * step_s / 3600
    return Money(
        usd_per_step=step, usd_per_1b_tokens=step / tokens_a_step * 1e9 if tokens_a_step else None,
        usd_total=None if total_s is None else price * total_s / 3600, price_date=None,
    )  # fmt: skip


def _bottleneck(parts: Mapping[str, float], critical: RankTimes) -> str:
    name = max(parts, key=lambda part: parts[part])
    return f"{name} on rank {critical.rank}"


def _assumptions(costs: MeasuredCosts) -> tuple[str, ...]:
    slow = {name: factor for name, factor in costs.slow.items() if factor != 1.0}
    told = [
        f"seconds of the {costs.clock} clock, layers timed one after another",
        "MFU is not known: measured devices have no stated peak",
        f"interval: the spread of whole passes on the measured machine ({costs.spread[0]:.3f} to {costs.spread[1]:.3f})",
    ]
    if slow:
        told.append("devices stated as slower: " + ", ".join(f"{k} x{v:g}" for k, v in sorted(slow.items())))
    return tuple(told)


def _check(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> None:
    layers = max(hi for stage in plan.groups[0].stages for _, hi in stage.layers)
    if layers != len(costs.layers):
        raise SpecError(f"the plan splits {layers} layers, {len(costs.layers)} were measured", file=costs.path,
                        key="groups.stages.layers", value=layers, rule="a plan holds every layer of the model",
                        fix=f"Cut 0..{len(costs.layers)}")  # fmt: skip
    most = max(plan.ranks)
    if most >= cluster.num_devices:
        raise SpecError(f"the plan uses rank {most}, the cluster has {cluster.num_devices} devices", key="ranks",
                        value=most, rule="ranks are 0 to N - 1")  # fmt: skip
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            if stage.tp * stage.cp * stage.ep > 1:
                raise SpecError("tp, cp or ep above 1", key=f"groups[{g}].stages[{s}]",
                                rule="measured costs price stages of data-parallel ranks")  # fmt: skip
