"""Sizes of one layer and of the rank that runs it, as numbers or as arrays over many plans.

A `LayerShape` holds what a block's operations need; a `RankShape` how a rank executes it. Every field is
a float or an ndarray, so that the same formulas price one stage or a batch of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from foreshard.spec.block import ACTIVATION_FORMULAS, ROUTER_CODES, WIDE_GROUPS, Block


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What the operations of one transformer block need: widths, counts and flags (0 or 1)."""

    hidden: Any
    query_width: Any
    key_width: Any
    value_width: Any  # channels of the attention output
    kv_width: Any  # channels of all keys plus all values
    num_heads: Any
    num_kv_heads: Any
    head_dim: Any
    value_head_dim: Any
    q_lora: Any
    kv_lora: Any
    rope_head_dim: Any
    rotary: Any  # share of the channels of a head that turn
    rotary_scaled: Any
    window: Any
    causal: Any
    cross_attention: Any
    dropout: Any
    num_norms: Any
    qk_norm: Any  # queries and keys are normed, head by head
    scale_norm: Any  # norms have a scale and no bias: RMSNorm
    ffn: Any
    gated: Any
    spelled_activation: Any  # place in `ACTIVATION_FORMULAS`
    fused_projections: Any
    fused_gate: Any
    router_code: Any  # place in `ROUTER_CODES`
    num_experts: Any
    top_k: Any
    every_expert: Any  # transformers: all tokens go through all experts
    expert_groups: Any
    top_groups: Any
    expert_ffn: Any
    shared_ffn: Any
    expert_bias: Any
    lora_rank: Any
    lora_attention: Any  # how many of q, k, v, o carry an adapter, in units of one hidden-to-width matrix
    lora_mlp: Any
    frozen: Any
    dense_params: Any  # all parameters but the experts'
    expert_params: Any  # of all routed experts
    trainable: Any  # share of the dense parameters that get a gradient
    expert_hidden: Any  # width of the tokens that experts see
    scan_heads: Any
    scan_state: Any
    scan_groups: Any
    narrow_params: Any  # share of the dense parameters whose products may be narrower than 16 bit
    # products that stay in 16 bit all the same
    wide_attention: Any
    wide_latent: Any
    wide_mlp: Any
    wide_experts: Any

    @property
    def mixers(self) -> Any:
        """How many of attention and MLP (or experts) the layer has: 2, or 1 in a hybrid model."""
        inner = np.asarray(self.ffn + self.shared_ffn + self.num_experts, dtype=float)
        return (np.asarray(self.num_heads, dtype=float) > 0) * 1.0 + (inner > 0)


@lru_cache(maxsize=1024)
def layer_shape(block: Block) -> LayerShape:
    """Return the numbers that pricing needs of a block: those computed here, and fields of its own."""
    expert = block.num_experts * block.expert_params
    dense = block.num_params - expert
    trained = block.trainable_params - (1 - block.frozen) * expert
    mla = block.kv_lora > 0
    attention = {"q", "k", "v", "o"} & set(block.lora_targets)
    computed = {
        "key_width": block.num_kv_heads * block.head_dim,
        "value_width": block.num_heads * block.value_head_dim,
        "kv_width": (block.num_heads if mla else block.num_kv_heads)
        * (block.head_dim + block.value_head_dim),
        "num_kv_heads": block.num_heads if mla else block.num_kv_heads,
        "rotary_scaled": block.rotary_scaled and block.rotary > 0,
        "dropout": block.dropout > 0,
        "scale_norm": block.norm_params == 1 and block.norm_code != "kernel",
        "spelled_activation": ACTIVATION_FORMULAS.index(block.spelled_activation),
        "router_code": ROUTER_CODES.index(block.router_code),
        "expert_bias": block.mlp_bias and block.num_experts > 0,
        "lora_attention": len(attention),
        "lora_mlp": len(block.lora_targets) - len(attention),
        "dense_params": dense,
        "expert_params": expert,
        "trainable": trained / max(1, dense),
        "expert_hidden": block.expert_hidden or block.hidden,
        "narrow_params": 1.0 - block.wide_params / max(1, dense),
        **{f"wide_{group}": group in block.wide for group in WIDE_GROUPS},
    }
    own = {name: getattr(block, name) for name in _NAMES if name not in computed}
    return LayerShape(**{name: float(value) for name, value in (own | computed).items()})


_NAMES = tuple(field.name for field in fields(LayerShape))
NO_LAYER = LayerShape(**dict.fromkeys(_NAMES, 0.0))


Neighbours = tuple[int, int, int]
"""Kinds of three layers that follow each other."""


class LayerOrder(NamedTuple):
    """Which kinds of layers lie before and behind each other; the last layer is before the first.

    Values are numbers, or arrays over pipelines.
    """

    # shares of the layers of the kind in the middle
    shares: Mapping[Neighbours, Any]
    # 1 where the model's first layer, and its last, lies so
    first: Mapping[Neighbours, Any]
    last: Mapping[Neighbours, Any]


@lru_cache(maxsize=256)
def layer_order(kinds: tuple[int, ...]) -> LayerOrder:
    """Return the order of layers of these kinds.

    Examples
    --------
    >>> layer_order((0, 1, 1, 1)).shares[1, 1, 1], layer_order((0, 1, 1, 1)).last
    (0.3333333333333333, {(1, 1, 0): 1.0})
    """
    before, behind = (kinds[-1], *kinds[:-1]), (*kinds[1:], kinds[0])
    places = list(zip(before, kinds, behind, strict=True))
    counts = Counter(kinds)
    return LayerOrder(
        shares={place: number / counts[place[1]] for place, number in Counter(places).items()},
        first={places[0]: 1.0},
        last={places[-1]: 1.0},
    )


def stacked_orders(orders: Sequence[LayerOrder]) -> LayerOrder:
    """Return the orders of several pipelines as one, shape (1, pipelines)."""

    def over(values: Sequence[Mapping[Neighbours, Any]]) -> dict[Neighbours, Any]:
        places = dict.fromkeys(place for value in values for place in value)
        return {place: np.array([[value.get(place, 0.0) for value in values]]) for place in places}

    if all(order is orders[0] for order in orders):
        return orders[0]
    return LayerOrder(*(over(values) for values in zip(*orders, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """How a rank executes layers: degrees, tokens, precision; dp counts every data-parallel rank."""

    tp: Any
    cp: Any
    ep: Any
    etp: Any
    dp: Any  # ranks that hold the same dense weights apart from cp
    copies: Any  # of them, over those of the own group of the plan: 1 where there is one group
    sp: Any
    zero: Any
    shard: Any  # ranks a ZeRO/FSDP state is cut over
    micro_batch: Any  # samples per rank and micro-batch
    seq_len: Any
    low: Any  # 1 when the linear layers run in 8 or 4 bit
    four_bit: Any
    matrix_bytes: Any  # bytes of an operand of the linear layers
    element_bytes: Any  # bytes of an activation between layers
    offload_optimizer: Any  # 1 when optimizer states live in host memory
    offload_activations: Any  # 1 when saved activations do
    paired: Any  # 1 where a forward and a backward run at once, each behind the transfers of the other
    # Distances between the ranks of a communicator in cluster order, from their places on link domains.
    tp_stride: Any
    cp_stride: Any
    ep_stride: Any
    etp_stride: Any
    sync_stride: Any  # data-parallel ranks of the dense weights
    expert_stride: Any  # ranks that hold the same experts
    own_stride: Any  # both inside the own group of the plan
    own_expert_stride: Any
