"""Utilisation and energy of a step: FLOPs over the peaks of the devices, power over its time.

FLOPs are those that the model needs, and those that recomputation runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreshard.cost.energy import BUSY_PARTS, energy_j
from foreshard.cost.memory_activations import Recompute
from foreshard.errors import SpecError
from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.explanation import rate_explanations
from foreshard.spec.block import Block
from foreshard.spec.device import Device


def devices_of(case: PlannedRun) -> list[tuple[Device, int]]:
    """Return the devices that the plan uses and how many of each."""
    return case.cluster.devices_on(case.plan.ranks)


def peak_of(case: PlannedRun, precision: str) -> float | None:
    """Return the dense peak of all devices of the plan in a precision; None where one lacks it."""
    devices = devices_of(case)
    if not all(device.supports(precision) for device, _ in devices):
        return None
    return sum(n * device.peak(precision) for device, n in devices)


def watts_of(case: PlannedRun) -> float | None:
    """Return the power limits of all devices of the plan; None where one is not published."""
    devices = devices_of(case)
    return sum(n * device.tdp_w for device, n in devices) if all(d.tdp_w for d, _ in devices) else None


def rates_of(
    case: PlannedRun, batch: Batch, parts: Mapping[str, float], step_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return utilisation and energy, and what explains them."""
    peak, peak16, watts = peak_of(case, case.plan.precision), peak_of(case, "bf16"), watts_of(case)
    if peak is None:  # unreachable after the rules of a plan; measured runs skip them
        raise SpecError(
            f"a device of the plan has no {case.plan.precision}", key="--dtype", value=case.plan.precision
        )
    flops, again = model_flops(case, causal=False), recomputed_flops(case, batch)
    rates = {
        "mfu": flops / (step_s * peak),
        "mfu_causal": model_flops(case, causal=True) / (step_s * peak),
        "mfu_bf16": None if peak16 is None else flops / (step_s * peak16),
        "hfu": (flops + again) / (step_s * peak),
        "energy_j_per_step": None if watts is None else energy_j(watts, parts),
    }
    busy_s = sum(parts[name] for name in BUSY_PARTS)
    texts = rate_explanations(
        case, flops=flops, again=again, peak=peak, step_s=step_s, watts=watts, busy_s=busy_s
    )
    return rates, texts


def model_flops(case: PlannedRun, *, causal: bool) -> float:
    """Return the FLOPs of forward and backward of one step, without recomputation."""
    return case.model.flops_per_token(case.plan.seq_len, causal) * case.plan.tokens


def recomputed_flops(case: PlannedRun, batch: Batch) -> float:
    """Return the FLOPs of a step that backward runs again, full attention counted; the batch is of this case.

    Source
    ------
    Korthikanti et al. 2022, section 5: full recomputation repeats the forward of every layer, selective one
    the attention products. Norms and activations count no FLOPs. A compiler drops the last product of a
    recomputed MLP, which no gradient reads.
    """
    shape = batch.multiplicity.shape
    shares = np.array([float(group.share) for group in case.plan.groups])
    total, pruned = 0.0, batch.machine.traits.pruned
    for (block, _), count in zip(case.model.block_kinds(), batch.counts, strict=True):
        again = _again_flops(block, batch.recompute, case.plan.seq_len, pruned)
        per_group = (np.broadcast_to(again * count, shape) * batch.multiplicity).sum(0)
        total += float((per_group * shares).sum()) * case.plan.seq_len
    return total


def _again_flops(block: Block, rule: Recompute, seq_len: int, pruned: float) -> Any:
    """Return the FLOPs per token that a rule repeats in one layer."""
    wide = 2 * (2 + block.gated) * block.hidden
    mlp = wide - pruned * 2 * block.hidden
    routed = wide * block.top_k * block.expert_ffn
    nope_and_value = block.num_heads * (block.head_dim - block.rope_head_dim + block.value_head_dim)
    latent = block.kv_lora * nope_and_value + (block.q_lora or block.hidden) * block.query_width
    selected = (
        rule.core_attn * block.attention_flops(seq_len, False)
        + rule.mlp * mlp * block.ffn
        + rule.shared_experts * mlp * block.shared_ffn
        + rule.moe * routed
        + rule.mla_up_proj * 2 * latent * (block.kv_lora > 0)
        + rule.op * 0.5 * (2 * block.matmul_params - routed)  # every second product
    )
    return rule.full * block.forward_flops(seq_len, False) + (1.0 - rule.full) * selected
