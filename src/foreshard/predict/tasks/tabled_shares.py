"""Which part of the seconds of a layer's kernels comes from measured tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.cost.attention import whole_causal
from foreshard.cost.tables import tabled
from foreshard.graph.shapes import LayerShape
from foreshard.predict.machine import Machine
from foreshard.predict.tasks.kernels import (
    all_products,
    attention_sizes,
    expert_sizes,
    linear_sizes,
    norm_bytes,
    product_times,
    routing_imbalance,
    wide_products,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TabledShares:
    """Parts from 0 to 1 of each kind of kernels of a layer, all passes."""

    products: Any
    attention: Any
    experts: Any
    streams: Any


def tabled_shares(layer: LayerShape, machine: Machine) -> TabledShares:
    """Return the shares of a layer."""
    return TabledShares(
        products=_of_products(layer, machine),
        attention=_of_attention(layer, machine),
        experts=_of_experts(layer, machine),
        streams=1.0 * tabled(machine.kernels.stream_table, (norm_bytes(layer, machine),)),
    )


def _of_products(layer: LayerShape, machine: Machine) -> Any:
    sizes = linear_sizes(layer, machine)
    products = all_products(sizes)
    seconds = product_times(layer, sizes, machine)
    covered = np.broadcast_to(tabled(machine.kernels.gemm_table, products), seconds.shape).copy()
    for i, flag in wide_products(layer, sizes, machine).items():
        wide = tabled(machine.kernels.gemm16_table, tuple(size[:, i] for size in products))
        covered[:, i] = np.where(flag > 0, wide, covered[:, i])
    whole = seconds.sum((0, 1))
    return np.where(whole > 0, (seconds * covered).sum((0, 1)) / np.where(whole > 0, whole, 1.0), 0.0)


def _of_attention(layer: LayerShape, machine: Machine) -> Any:
    """Return the share of a fused attention; its backward counts as long as its work is, 2.5 forwards."""
    kernels, rank = machine.kernels, machine.rank
    covered: Any = 0.0
    # Over cp ranks half of the rounds run like the whole sequence, half like a rank's own tokens.
    for length in (rank.seq_len, rank.seq_len / rank.cp):
        (batch, heads, kv_heads, q_len, kv_len, dim, value_dim), mask = attention_sizes(
            layer, machine, length
        )
        form = whole_causal(q_len, kv_len, dim, value_dim, **mask)
        asked = (batch, heads, kv_heads, np.where(form, q_len, 0.0), dim)
        for table, weight in ((kernels.attn_table, 1.0), (kernels.attn_back_table, 2.5)):
            covered = covered + 0.5 * weight / 3.5 * tabled(table, asked)
    return covered * (np.asarray(machine.traits.flash) > 0)


def _of_experts(layer: LayerShape, machine: Machine) -> Any:
    """Return the share of the products of experts, each of the four counted alike."""
    table = machine.kernels.grouped_table
    if not np.count_nonzero(layer.num_experts) or not np.count_nonzero(table):
        return 0.0
    routed, local, wide, width = expert_sizes(layer, machine)
    tokens = routed * routing_imbalance(machine)
    active = np.minimum(local, np.ceil(tokens))
    rows, h = tokens / np.maximum(active, 1.0), layer.expert_hidden
    # The weight gradient counts as the forward.
    sizes = ((wide, h, 2.0), (h, width, 2.0), (h, wide, 1.0), (width, h, 1.0))
    covered = sum(weight / 6.0 * tabled(table, (active, rows, n, k)) for n, k, weight in sizes)
    return covered * (np.asarray(machine.traits.grouped) > 0)
