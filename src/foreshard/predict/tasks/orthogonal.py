"""The optimizer Muon: Newton-Schulz iterations that make the update of every matrix orthogonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.graph.shapes import LayerShape
from foreshard.predict.machine import Machine, sustained
from foreshard.predict.tasks.collectives import expert_replicas, shards_of

STEPS = 5
"""Iterations of an update (Megatron-LM --muon-num-ns-steps, torch.optim.Muon ns_steps)."""


def matrices(layer: LayerShape) -> tuple[list[tuple[Any, Any, Any]], tuple[Any, Any, Any]]:
    """Return (rows, columns, how many) of the dense matrices of a layer, and of one expert's."""
    h, ffn = layer.hidden, layer.ffn
    latent = np.asarray(layer.kv_lora) > 0
    low, plain = latent & (np.asarray(layer.q_lora) > 0), ~latent
    given = np.where(low, layer.q_lora, h)
    up = layer.num_heads * (layer.head_dim - layer.rope_head_dim + layer.value_head_dim)
    per_mlp = 2.0 + np.asarray(layer.gated, dtype=float)
    crossed = 1.0 + np.asarray(layer.cross_attention, dtype=float)
    attends = crossed * (np.asarray(layer.num_heads) > 0)
    dense = [
        (given, layer.query_width, attends),
        (h, layer.key_width, attends * plain),
        (h, layer.kv_width - layer.key_width, attends * plain),
        (layer.value_width, h, attends),
        (h, layer.q_lora, 1.0 * low),
        (h, layer.kv_lora + layer.rope_head_dim, 1.0 * latent),
        (layer.kv_lora, up, 1.0 * latent),
        (h, ffn, per_mlp),
        (h, layer.shared_ffn, per_mlp),
        (h, layer.num_experts, 1.0),
    ]
    return dense, (layer.expert_hidden, layer.expert_ffn, per_mlp)


def iterations_s(rows: Any, columns: Any, machine: Machine) -> Any:
    """Return seconds of the iterations on one whole matrix, 0 for an empty one.

    With m the shorter and n the longer side, an iteration is X X' (m m n), its square (m m m) and their sum
    times X (m n m), in 16 bit, and reads and writes X and two squares beside.

    Source
    ------
    Jordan 2024, kellerjordan.github.io/posts/muon; torch 2.13 optim/_muon.py _zeropower_via_newtonschulz.
    """
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    kernels = sustained(machine)
    products = (
        gemm_s(short, short, long, kernels, sixteen_bit=True)
        + gemm_s(short, short, short, kernels, sixteen_bit=True)
        + gemm_s(short, long, short, kernels, sixteen_bit=True)
    )
    beside = stream_s(6.0 * short * (short + long), machine.kernels)
    return STEPS * np.where(short > 0, products + beside, 0.0)


def orthogonal_s(kinds: Sequence[LayerShape], counts: Sequence[Any], machine: Machine) -> Any:
    """Return seconds of Muon's iterations on the layers of a stage, 0 with other optimizers.

    Every tensor rank works on whole matrices. From ZeRO 1 on, ranks share the matrices of their replicas but
    none is cut: the slowest rank has the largest matrix, or an equal share of all.

    Source
    ------
    Megatron-LM d98e8a6 core/optimizer/emerging_optimizers.py (tp_mode duplicated), layer_wise_optimizer.py.
    """
    if not np.count_nonzero(machine.traits.orthogonal):
        return 0.0
    rank = machine.rank
    total = experts = largest = largest_expert = np.zeros(())
    for layer, count in zip(kinds, counts, strict=True):
        trained = np.asarray(count) * (1.0 - np.asarray(layer.frozen, dtype=float))
        dense, (rows, columns, each) = matrices(layer)
        for one_rows, one_columns, many in dense:
            one = iterations_s(one_rows, one_columns, machine)
            total = total + trained * many * one
            largest = np.maximum(largest, one * (trained * many > 0))
        local = np.asarray(layer.num_experts) / np.maximum(rank.ep, 1.0)
        one = iterations_s(rows, columns, machine) * (np.asarray(layer.num_experts) > 0)
        experts = experts + trained * each * local * one
        largest_expert = np.maximum(largest_expert, one * (trained > 0))
    shared = np.asarray(rank.zero) >= 1
    over = np.where(shared, rank.shard, 1.0)
    over_experts = np.where(shared, shards_of(expert_replicas(rank), rank), 1.0)
    work = np.maximum(total / over, largest) + np.maximum(experts / over_experts, largest_expert)
    return np.where(np.asarray(machine.traits.orthogonal) > 0, work, 0.0)
