"""FLOPs of a step: what the model needs, and what recomputation runs again."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.cost.memory_activations import Recompute
from foreshard.predict.batch import Batch, Case
from foreshard.spec.block import Block


def model_flops(case: Case, *, causal: bool) -> float:
    """Return the FLOPs of forward and backward of one step, without recomputation."""
    return case.model.flops_per_token(case.plan.seq_len, causal) * case.plan.tokens


def recomputed_flops(case: Case, batch: Batch) -> float:
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
