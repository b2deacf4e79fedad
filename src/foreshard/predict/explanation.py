"""Where each number of a prediction comes from: formula, the figures of this run, and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.cost.energy import WAITING_POWER
from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.tasks.collectives import expert_replicas
from foreshard.quantity import seconds as lasting
from foreshard.quantity import size
from foreshard.spec.plan import COMM_OPTIONS, Group, Stage
from foreshard.units import number_of

PART_WORDS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor_comm": "tensor-parallel collectives",
    "context_comm": "passing keys and values between context-parallel ranks",
    "expert_comm": "sending tokens to experts",
    "pipeline_comm": "messages between stages",
    "bubble": "waiting while the pipeline fills and drains",
    "data_comm": "gradient and weight collectives",
    "optimizer": "the optimizer and what a step does once",
    "host": "launches by the host",
    "straggler": "waiting for the slowest rank",
}
"""Parts of a step in words."""
_STEP = "docs/derivations/step.md"
_KERNELS = "docs/derivations/kernels.md"
_COLLECTIVES = "docs/derivations/collectives.md"
_CONSTANTS = "docs/derivations/training.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the texts quote, of the stage with most layers of the group with most micro-batches.

    `params` are the trained ones of the rank's layers but the experts'. Bytes are those of one rank:
    `region` of one tensor-parallel collective, `ring` of the keys and values one context-parallel rank
    holds, `routed` of the tokens one rank sends to experts, `message` of one stage's output.
    """

    group: Group
    stage: Stage
    crosses: bool
    num_layers: float
    tokens: float
    params: float
    expert_params: float
    replicas: float
    expert_replicas: float
    shard: float
    region_bytes: float
    operand_bytes: float
    ring_bytes: float
    routed_bytes: float
    message_bytes: float
    grad_bytes: float
    optimizer_bytes: float
    options: Mapping[str, bool]


def figures_of(case: PlannedRun, batch: Batch) -> Figures:
    """Return the figures of the rank that most others resemble."""
    groups = case.plan.groups
    g = max(range(len(groups)), key=lambda i: groups[i].num_micro_batches)
    shape = batch.multiplicity.shape
    layers = sum(batch.counts) * (batch.multiplicity > 0)
    row = int(np.argmax(np.broadcast_to(layers, shape)[:, g]))

    def at(value: Any) -> float:
        return float(np.broadcast_to(value, shape)[row, g])

    rank, traits = batch.machine.rank, batch.machine.traits
    tp, cp, element = at(rank.tp), at(rank.cp), at(rank.element_bytes)
    tokens = at(rank.micro_batch) * at(rank.seq_len) / cp
    parts = tp if at(rank.sp) or at(traits.p2p_scatter) else 1.0
    held = list(zip(batch.kinds, batch.counts, strict=True))
    routed = max(at(k.top_k * k.hidden * (np.asarray(k.num_experts) > 0)) for k in batch.kinds)
    width = max(at(k.kv_width) for k in batch.kinds)
    blocks = [sum(stop - start for start, stop in stage.layers) for stage in groups[g].stages]
    return Figures(
        group=groups[g],
        stage=groups[g].stages[int(np.argmin([abs(count - at(layers)) for count in blocks]))],
        crosses=at(batch.boundaries.far_each) > 0,
        num_layers=at(layers),
        tokens=tokens,
        params=sum(at(count * kind.dense_params * kind.trainable / tp) for kind, count in held),
        expert_params=sum(
            at(count * kind.expert_params * (1.0 - np.asarray(kind.frozen)) / (rank.ep * rank.etp))
            for kind, count in held
        ),
        replicas=at(rank.dp) * cp,
        expert_replicas=at(expert_replicas(rank)),
        shard=at(rank.shard),
        region_bytes=element * tokens * case.model.hidden,
        operand_bytes=at(rank.matrix_bytes) * tokens * case.model.hidden,
        ring_bytes=element * tokens * width / tp,
        routed_bytes=element * tokens / tp * routed,
        message_bytes=element * tokens / parts * case.model.hidden,
        grad_bytes=at(traits.grad_reduce_bytes),
        optimizer_bytes=at(traits.optimizer_bytes),
        options={name: at(getattr(traits, name)) > 0 for name in COMM_OPTIONS},
    )


def explanations(
    case: PlannedRun, batch: Batch, parts: Mapping[str, float], *, engine: str, measured: bool = False
) -> dict[str, str]:
    """Return a text for the step time and for every part that takes time.

    Parts that are `measured` were scaled to an observed step.
    """
    found = figures_of(case, batch)
    texts = {
        "step_time_s": _step(found, parts, engine, measured),
        **_computing(found, case, parts),
        **_communicating(found, parts),
        **_once(found, case, batch, parts),
    }
    return {name: text for name, text in texts.items() if parts.get(name, 1.0) > 0.0}


def _step(found: Figures, parts: Mapping[str, float], engine: str, measured: bool) -> str:
    count = found.group.num_micro_batches
    once = ("bubble", "optimizer", "straggler")
    steady = sum(value for name, value in parts.items() if name not in (*once, "data_comm"))
    how = (
        "tasks of one rank per distinct stage lined up by the schedule; exposed times on the rank that "
        "computes longest"
        if engine != "analytical"
        else "the slowest stage times its micro-batches, plus one passage of the others"
    )
    return (
        f"{number_of(count, 'micro-batch')} x {lasting(steady / count)} on the critical rank"
        f" + bubble {lasting(parts['bubble'])} + data-parallel traffic {lasting(parts['data_comm'])}"
        f" + optimizer {lasting(parts['optimizer'])} + stragglers {lasting(parts['straggler'])}: {how}"
        + (", scaled to the measured step" if measured else "")
        + f" ({_STEP})"
    )


def _computing(found: Figures, case: PlannedRun, parts: Mapping[str, float]) -> dict[str, str]:
    count, stage = found.group.num_micro_batches, found.stage
    each = {name: lasting(parts[name] / count) for name in ("compute", "recompute", "host")}
    return {
        "compute": f"{number_of(count, 'micro-batch')} x {each['compute']}: matrix products, attention and "
        "memory-bound kernels of forward and backward, "
        f"{found.num_layers:g} layers on {found.tokens:g} tokens a rank and tp {stage.tp}, in "
        f"{case.plan.precision} ({_KERNELS}; factors of a step over kernels alone: {_CONSTANTS})",
        "recompute": f"{count} x {each['recompute']}: kernels and collectives' inputs that rule "
        f"{stage.recompute} runs again in the backward",
        "host": f"{count} x {each['host']}: how much longer host and device take together than the device "
        f"alone, launches of class {case.framework.host}, graphs {case.framework.cuda_graphs} ({_CONSTANTS})",
    }


def _communicating(found: Figures, parts: Mapping[str, float]) -> dict[str, str]:
    group, stage = found.group, found.stage
    count = group.num_micro_batches
    kind = "all-reduce"
    if group.sp:
        apart = f" of {size(found.operand_bytes)}" * (found.operand_bytes != found.region_bytes)
        kind = f"all-gather{apart} and reduce-scatter"
    each = {name: lasting(parts[name] / count) for name in ("tensor_comm", "context_comm", "expert_comm")}
    hops = 2 * group.num_chunks
    passed = (
        "are gathered from" if found.options["context_gather"] else "pass, where attention hides it not, to"
    )
    where = "between nodes" if found.crosses else "inside a node"
    return {
        "tensor_comm": f"{count} x {each['tensor_comm']} exposed: {kind} of {size(found.region_bytes)} over "
        f"{stage.tp} ranks around attention and MLP of each layer, forward and backward; overlap "
        f"with products {_on(found, 'tp_overlap')} ({_COLLECTIVES})",
        "context_comm": f"{count} x {each['context_comm']} exposed: {size(found.ring_bytes)} of keys "
        f"and values a layer {passed} each of {stage.cp} ranks, their gradients back",
        "expert_comm": f"{count} x {each['expert_comm']} exposed: {size(found.routed_bytes)} of routed "
        f"tokens a rank and layer, there and back over {stage.ep} ranks, forward and backward; overlap "
        f"{_on(found, 'expert_overlap')}"
        f"{', shared experts beside it' * found.options['shared_overlap']}",
        "pipeline_comm": f"{number_of(count, 'micro-batch')} x {hops} messages of "
        f"{size(found.message_bytes)} {where}: {lasting(parts['pipeline_comm'] / count)} of each "
        f"micro-batch waits for them; overlap {_on(found, 'p2p_overlap')}",
    }


def _once(found: Figures, case: PlannedRun, batch: Batch, parts: Mapping[str, float]) -> dict[str, str]:
    group, stage = found.group, found.stage
    p, v, m = len(group.stages), group.num_chunks, group.num_micro_batches
    step = sum(parts.values())
    devices = len(case.plan.ranks)
    constants = batch.machine.constants
    fixed, layer = lasting(float(constants.step_fixed)), lasting(float(constants.step_per_layer))
    once = f", + {fixed} once + {layer} a layer" if case.framework.update == "multi-tensor" else ""
    reduced = f"{size(found.params * found.grad_bytes)} of gradients over {found.replicas:g} ranks"
    if found.expert_params:
        experts = size(found.expert_params * found.grad_bytes)
        reduced += f", {experts} of experts' over {found.expert_replicas:g}"
    return {
        "bubble": f"{parts['bubble'] / step:.1%} of the step: {group.schedule}, {p} stages, {v} virtual, {m} "
        f"micro-batches; equal stages without messages would wait (p-1)/(v m) = {(p - 1) / (v * m):.1%} of "
        f"their busy time under 1F1B ({_STEP})",
        "data_comm": f"exposed part of reducing {reduced} and gathering updated weights; zero {stage.zero}, "
        f"shards over {found.shard:g}; gradient overlap {_on(found, 'grad_overlap')}, gather "
        f"overlap {_on(found, 'param_gather_overlap')} ({_COLLECTIVES})",
        "optimizer": f"{found.optimizer_bytes:g} bytes moved per parameter of the rank's shard over "
        f"the memory bandwidth{once} ({_CONSTANTS})",
        "straggler": f"{float(constants.jitter):.4g} of the step for each doubling of {devices} devices "
        f"beyond 8 ({_CONSTANTS})",
    }


def rate_explanations(
    case: PlannedRun,
    *,
    flops: float,
    again: float,
    peak: float,
    step_s: float,
    watts: float | None,
    busy_s: float,
) -> dict[str, str]:
    """Return texts of utilisation and energy, of FLOPs once and again, and peak and watts of all devices."""
    many = number_of(len(case.plan.ranks), "device")
    power = "null: no power limit is known for every device"
    if watts is not None:
        power = (
            f"{watts:.4g} W of {many} x ({lasting(busy_s)} computing + {WAITING_POWER:g} x "
            f"{lasting(step_s - busy_s)} waiting); hosts, switches and cooling are not counted"
        )
    return {
        "mfu": f"{flops:.4g} model FLOPs of a step (full attention) / ({lasting(step_s)} x {peak:.4g} "
        f"FLOP/s, the dense {case.plan.precision} peak of {many})",
        "hfu": f"as mfu, with {again:.4g} FLOPs that recomputation runs again",
        "energy_j_per_step": power,
    }


def _on(found: Figures, name: str) -> str:
    return "on" if found.options[name] else "off"
