"""Tasks of the compute stream: matrix products, experts, attention, memory-bound kernels, casts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel
from foreshard.cost.attention import (
    flash_attention_backward_s,
    flash_attention_forward_s,
    unfused_attention_s,
)
from foreshard.cost.elementwise import stream_rate, stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.cost.state_space_scan import scan_s
from foreshard.graph.shapes import LayerShape
from foreshard.predict.machine import (
    Machine,
    in_sixteen_bit,
    kv_share,
    own_tokens,
    sustained,
    tokens_of,
)

# Bytes per element of hidden width that elementwise kernels move: a norm reads and writes 16 bit and
# its backward reads two and writes one; a residual reads two and writes one, backward joins gradients.
_NORM, _NORM_BACK, _RESIDUAL = 4.0, 6.0, 6.0
# A norm behind a cast: the cast reads 2 and writes 4, the norm reads 4 and writes 2; backward runs both
# again and its own kernels move fp32.
_CAST_NORM, _CAST_NORM_BACK = 12.0, 30.0
# RMSNorm of transformers, kernel by kernel, in bytes at the rate of a stream: what multiplies by a factor of
# a row or of a channel reaches half that rate, a sum over tokens a sixth (kernels of profiles on an H200,
# torch 2.11). Widen 6, square 8, mean 4, scale 16, narrow 6, weight 8; backward: weight 8, its gradient 6 and
# 12, widen 6, scale 16, its gradient 16, square 32, sum 12, narrow 6. Under autocast all is in 32 bit and
# nothing is widened.
_PLAIN_NORM, _AUTOCAST_NORM = (48.0, 114.0), (44.0, 128.0)
# Layer norms are a kernel, in 32 bit under autocast, whose gradients of scale and bias are another.
_KERNEL_NORM, _AUTOCAST_KERNEL_NORM = (4.0, 10.0), (8.0, 20.0)
# Its rotary embedding: two products 16, half negated 2, joined 4, sum 6; backward fills what was cut with
# zeros, 8. Under autocast sines and cosines are in 32 bit: products 24, negated 2, joined 4, sum 12, cast 6;
# backward 60.
_PLAIN_ROPE, _AUTOCAST_ROPE = (28.0, 36.0), (48.0, 60.0)
# Where a share of a head turns, both parts are joined, 4; backward fills what was cut with zeros, 4, copies 4
# and adds 6. Under autocast the joined head is in 32 bit, and the part that does not turn is cast besides.
_PARTLY, _AUTOCAST_PARTLY, _LESS_PARTLY = (4.0, 14.0), (12.0, 26.0), (4.0, 12.0)
# Under autocast a product of a residual in 32 bit casts it, 6, and its gradient back, 6; gradients of several
# products are added, 12. A residual of 32 bit takes 10 forward, and 18 backward with the cast of its
# gradient.
_OPERAND, _OPERAND_SUM = 6.0, 12.0
_PLAIN_RESIDUAL, _AUTOCAST_RESIDUAL = (6.0, 6.0), (10.0, 18.0)
# SiLU 4 and product 6; backward 12 and 6. GELU is a kernel. By `ACTIVATION_FORMULAS` it is nine in
# 16 bit; autocast takes the power of the first, and what follows, in 32 bit: a product with it moves 4 more.
# xIELU is twelve in 16 bit and 25 back, two sums over all elements among them; autocast takes its
# exponential, and what its learned numbers multiply, in 32 bit.
# gpt-oss clamps gate and up 8, scales 4, sigmoid 4, adds one 4, two products 12; backward: products 24,
# sigmoid 6, scale 4, sum 6, clamps 12, both put back at their places 28; less what a plain gate has beyond a
# GELU.
_PLAIN_GATE, _GELU = (10.0, 18.0), (4.0, 6.0)
_SPELLED = np.array([_GELU, (36.0, 60.0), (42.0, 72.0), (42.0, 88.0), (26.0, 68.0), (58.0, 120.0)])
_AUTOCAST_SPELLED = np.array([_GELU, (76.0, 118.0), *_SPELLED[2:5], (102.0, 216.0)])
_WIDE_GATE = np.array([0.0, 4.0, 0.0, 0.0, 0.0, 0.0])
# Heads are joined behind attention by a copy.
_JOIN_HEADS = 4.0
# The sum of an adapter reads two and writes one in 16 bit. peft widens the input, autocast narrows it again,
# 12, and the output is scaled apart, 4; backward does the same and adds two gradients.
_ADAPTER, _ADAPTER_BACK, _PLAIN_ADAPTER = 6.0, 12.0, 22.0
# Megatron adds the bias of an expert's output, times the weight of each token, by operations of torch over
# one expert after another: product 4 at half the rate, sum 10, joined 8, narrowed 6; backward widen 6,
# narrow 6, products 8 and 8 at half the rate, sums 4 and, over tokens, 4 at a sixth, joined 4. Weights of
# tokens are in 32 bit for DeepEP and HybridEP; else all is in 16: 2, 6 and 4; backward 4, 4, 2, 2 and 4.
_EXPERT_BIAS, _NARROW_EXPERT_BIAS = (32.0, 76.0), (14.0, 34.0)
# Its rotary embedding where sines and cosines have a factor: two products 4 each at half the rate, half
# negated 2, joined 4, sum 6, joined with channels that do not turn 4; backward 4 and 4 at half the rate, 2,
# 4, sums of gradients 6 and 6, zeros 2.
_SCALED_ROPE = (32.0, 36.0)
_DROPOUT = 5.0  # reads and writes 16 bit, writes a mask of one byte
# SiLU and product apart read and write five times per output, fused three times.
_SPLIT_GATE = 5.0 / 3.0 - 1.0
_ROPE = 4.0  # reads and writes 16 bit


KERNELS = {
    "matmul": "matrix products",
    "attention": "attention",
    "experts": "matrix products of experts",
    "memory_bound": "memory-bound kernels",
}
"""Classes of kernels that computation is made of, and their words."""


def linear_sizes(layer: LayerShape, machine: Machine) -> list[tuple[Any, Any, Any, str]]:
    """Return (rows, outputs, inputs, group) of every matrix product a layer's forward runs per token."""
    tokens, own = tokens_of(machine), own_tokens(machine)
    tp = machine.rank.tp
    h = layer.hidden
    latent = np.asarray(layer.kv_lora) > 0
    low_q = np.asarray(layer.q_lora) > 0
    keys_values = layer.kv_width * kv_share(layer, machine)
    plain_out = np.where(latent, 0.0, layer.query_width / tp + keys_values)
    sizes = [
        (tokens, plain_out, h, "attention"),
        (tokens, h, layer.value_width / tp, "attention"),
    ]
    if np.count_nonzero(latent):
        up = layer.num_heads * (layer.head_dim - layer.rope_head_dim + layer.value_head_dim) / tp
        sizes += [
            (own * latent, np.where(low_q, layer.q_lora, 0.0), h, "attention"),
            (tokens * latent, layer.query_width / tp, np.where(low_q, layer.q_lora, h), "latent"),
            (own * latent, layer.kv_lora + layer.rope_head_dim, h, "attention"),
            (tokens * latent, up, layer.kv_lora, "latent"),
        ]
    if np.count_nonzero(layer.cross_attention):
        cross = np.asarray(layer.cross_attention) * 1.0
        sizes += [
            (tokens * cross, layer.query_width / tp + keys_values, h, "attention"),
            (tokens * cross, h, layer.value_width / tp, "attention"),
        ]
    if np.count_nonzero(layer.ffn):
        sizes += [
            (tokens, (1.0 + layer.gated) * layer.ffn / tp, h, "mlp"),
            (tokens, h, layer.ffn / tp, "mlp_output"),
        ]
    if np.count_nonzero(layer.shared_ffn):
        sizes += [
            (tokens, (1.0 + layer.gated) * layer.shared_ffn / tp, h, "shared"),
            (tokens, h, layer.shared_ffn / tp, "shared_output"),
        ]
    if np.count_nonzero(layer.num_experts):
        rows = own * np.where(_routes_exactly(layer, machine), machine.traits.exact_rows, 1.0)
        sizes.append((rows, layer.num_experts, h, "router"))
    if np.count_nonzero(np.asarray(layer.expert_hidden) - np.asarray(h)):
        latent_own = own * (np.asarray(layer.num_experts) > 0) * (layer.expert_hidden != h)
        sizes += [
            (latent_own, layer.expert_hidden, h, "projection"),
            (latent_own, h, layer.expert_hidden, "projection"),
        ]
    if np.count_nonzero(layer.scan_state):
        beside = (2.0 * layer.scan_groups * layer.scan_state + layer.scan_heads) / tp
        sizes.append((tokens * (np.asarray(layer.scan_state) > 0), beside, h, "mlp"))
    return sizes


def _routes_exactly(layer: LayerShape, machine: Machine) -> Any:
    """Return whether a router multiplies in 32 bit: one of `ROUTER_CODES` may be narrowed by autocast.

    Source
    ------
    transformers 5.24 modeling_deepseek_v3.py DeepseekV3TopkRouter, modeling_ernie4_5_moe.py
    Ernie4_5_MoeTopKRouter.
    """
    return np.asarray(layer.router_code) > machine.traits.autocasts * (np.asarray(layer.lora_rank) == 0)


def wide_products(
    layer: LayerShape, sizes: list[tuple[Any, Any, Any, str]], machine: Machine
) -> dict[int, Any]:
    """Return which products of a layer stay in 16 bit beside narrower ones, by their places.

    Routers always do: no recipe of narrower products covers them.

    Source
    ------
    Megatron-LM d98e8a6 core/transformer/moe/moe_utils.py RouterGatingLinearFunction; torchtitan b5bcd76
    models/deepseek_v3 config_registry.py leaves router.gate out of its recipe.
    """
    if not np.count_nonzero(machine.rank.low):
        return {}
    flags = {
        "router": 1.0,
        "projection": layer.wide_latent,
        **dict.fromkeys(("attention", "latent"), layer.wide_attention),
        **dict.fromkeys(("mlp", "mlp_output", "shared", "shared_output"), layer.wide_mlp),
    }
    found = {place: flags[size[3]] * np.asarray(machine.rank.low) for place, size in enumerate(sizes)}
    return {place: flag for place, flag in found.items() if np.count_nonzero(flag)}


def product_times(layer: LayerShape, sizes: list[tuple[Any, Any, Any, str]], machine: Machine) -> np.ndarray:
    """Return seconds of the products of a layer, at the forward rate of the linear layers.

    Shape (3, len(sizes), ...): of (m, n, k, _) itself, of its input gradient and of its weight gradient.
    """
    m, n, k = all_products(sizes)
    kernels = sustained(machine)
    times = gemm_s(m, n, k, kernels, bytes_per_element=machine.rank.matrix_bytes)
    for i, flag in wide_products(layer, sizes, machine).items():
        wide = gemm_s(m[:, i], n[:, i], k[:, i], kernels, sixteen_bit=True)
        times[:, i] = np.where(flag > 0, wide, times[:, i])
    return times


def all_products(sizes: list[tuple[Any, Any, Any, str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and inner sizes of products, of their input gradients and weight gradients."""
    shape = np.broadcast_shapes(*{np.shape(x) for size in sizes for x in size[:3]})
    m, n, k = (np.empty((3, len(sizes), *shape)) for _ in range(3))
    for i, size in enumerate(sizes):
        m[0, i], n[0, i], k[0, i] = size[:3]
    m[1], n[1], k[1] = m[0], k[0], n[0]
    m[2], n[2], k[2] = n[0], k[0], m[0]
    return m, n, k


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Matrix-product seconds of a layer, total and of the groups that recomputation names.

    No gradient needs the output of an MLP: a compiler that sees the whole layer does not compute it again.
    """

    forward: Any
    input_gradient: Any
    weight_gradient: Any
    mlp: Any
    shared: Any
    latent: Any

    def sped_up(self, speed: float) -> Linear:
        """Return the products so many times as fast."""
        return Linear(**{name: getattr(self, name) / speed for name in self.__slots__})


def linear_times(layer: LayerShape, machine: Machine) -> Linear:
    """Price all per-token matrix products: forward, and the two products of backward."""
    sizes = linear_sizes(layer, machine)
    forward, input_gradient, weight_gradient = product_times(layer, sizes, machine)
    trained = 1.0 - np.asarray(layer.frozen, dtype=float)
    again = 1.0 - machine.traits.pruned

    def of(group: str) -> Any:
        return sum(
            (time for time, size in zip(forward, sizes, strict=True) if size[3] == group), np.zeros(())
        )

    return Linear(
        forward=forward.sum(0),
        input_gradient=input_gradient.sum(0),
        weight_gradient=weight_gradient.sum(0) * trained * wide_gradient(machine),
        mlp=of("mlp") + again * of("mlp_output"),
        shared=of("shared") + again * of("shared_output"),
        latent=of("latent"),
    )


def wide_gradient(machine: Machine) -> Any:
    """Return the slowdown of a weight-gradient product that adds into an fp32 gradient."""
    t = machine.traits
    fused = t.grads_fused * (t.grad_bytes >= 4) * (machine.rank.zero < 3)
    return 1.0 + fused * (machine.constants.grad_product - 1.0)


def adapter_times(layer: LayerShape, machine: Machine) -> tuple[Any, Any]:
    """Return forward and backward seconds of low-rank adapters (two thin products each, and an add).

    Source
    ------
    huggingface/peft 0033694 tuners/lora/layer.py Linear.forward; adapters are fp32 unless told otherwise
    (autocast_adapter_dtype).
    """
    if not np.count_nonzero(layer.lora_rank):
        return 0.0, 0.0
    tokens = tokens_of(machine)
    r, h, tp = layer.lora_rank, layer.hidden, machine.rank.tp
    kernels = replace(machine.kernels, gemm16_table=0.0)  # too thin for any
    down = gemm_s(tokens, r, h, kernels, sixteen_bit=True)
    up = gemm_s(tokens, h / tp, r, kernels, sixteen_bit=True)
    plain = machine.traits.plain_code > 0
    sizes = tokens * h / tp
    add = stream_s(np.where(plain, _PLAIN_ADAPTER, _ADAPTER) * sizes, machine.kernels)
    add_back = stream_s(np.where(plain, _PLAIN_ADAPTER, _ADAPTER_BACK) * sizes, machine.kernels)
    count = layer.lora_attention + layer.lora_mlp
    return count * (down + up + add), count * (2.0 * (down + up) + add_back)


def experts_of_token(layer: LayerShape, machine: Machine) -> Any:
    """Return experts that a token goes through; for Llama 4 transformers sends zeros to those not chosen.

    Source
    ------
    transformers 5.24 modeling_llama4.py Llama4TextMoe: hidden states are repeated for every expert.
    """
    others = layer.every_expert * (layer.num_experts - layer.top_k)
    return layer.top_k + machine.traits.plain_code * others


def expert_sizes(layer: LayerShape, machine: Machine) -> tuple[Any, Any, Any, Any]:
    """Return tokens routed to a rank, its experts, the width of their first product and of the second's."""
    rank = machine.rank
    # Each tensor-parallel rank routes its own part of the tokens; etp ranks then share an expert.
    routed = experts_of_token(layer, machine) * tokens_of(machine) / rank.tp * rank.etp
    local = np.maximum(1.0, layer.num_experts / rank.ep)
    width = layer.expert_ffn / rank.etp
    return routed, local, (1.0 + layer.gated) * width, width


def routing_imbalance(machine: Machine) -> Any:
    """Return tokens of the busiest rank over the mean; a rank that holds every expert has just the mean."""
    spread = (machine.constants.expert_imbalance - 1.0) * (1.0 - 1.0 / machine.rank.ep)
    return 1.0 + spread * machine.traits.uneven_routing


def expert_times(layer: LayerShape, machine: Machine) -> tuple[Any, Any, Any]:
    """Return forward, input-gradient and weight-gradient seconds of the routed experts."""
    if not np.count_nonzero(layer.num_experts):
        return 0.0, 0.0, 0.0
    routed, local, wide, width = expert_sizes(layer, machine)
    h, imbalance = layer.expert_hidden, routing_imbalance(machine)
    own = sustained(machine, machine.constants.expert_products)
    kept = np.asarray(layer.wide_experts) * machine.rank.low

    def products(n: Any, k: Any, kernels: KernelModel, size: Any) -> Any:
        options = {"bytes_per_element": size, "imbalance": imbalance}
        grouped = grouped_gemm_s(routed, local, n, k, kernels, **options)
        if np.all(machine.traits.grouped):
            return grouped
        looped = grouped_gemm_s(routed, local, n, k, kernels, looped=True, **options)
        return np.where(machine.traits.grouped > 0, grouped, looped)

    def both(n: Any, k: Any) -> Any:
        narrow = products(n, k, own, machine.rank.matrix_bytes)
        if not np.count_nonzero(kept):
            return narrow
        return np.where(kept > 0, products(n, k, in_sixteen_bit(own), machine.rank.element_bytes), narrow)

    forward = both(wide, h) + both(h, width)
    given = both(h, wide) + both(width, h)
    # The weight gradient has the same work; its rows are the weights and its inner size the tokens.
    trained = 1.0 - np.asarray(layer.frozen, dtype=float)
    return forward, given, wide_gradient(machine) * forward * trained


def attention_times(layer: LayerShape, machine: Machine) -> tuple[Any, Any]:
    """Return forward and backward seconds of attention itself.

    Over cp ranks it runs in cp rounds, each with as many pairs as a causal block of the rank's own tokens,
    and joins the rounds' outputs in fp32.
    """
    rank = machine.rank
    forward, backward = _attention_round(layer, machine, rank.seq_len)
    forward, backward = forward / rank.cp, backward / rank.cp
    scan, scan_back = scan_times(layer, machine)
    if not np.count_nonzero(np.asarray(rank.cp) > 1):
        return forward + scan, backward + scan_back
    own = rank.seq_len / rank.cp
    # Half of the rounds' blocks have a diagonal and pay for it, the others run like one long sequence.
    short, short_back = _attention_round(layer, machine, own)
    joined = 6.0 * (rank.cp - 1.0) * rank.micro_batch * own / rank.tp
    join = stream_s(joined * layer.value_width, machine.kernels)
    join_back = stream_s(joined * (layer.query_width + layer.kv_width), machine.kernels)
    forward = 0.5 * (forward + rank.cp * short) + join
    return forward + scan, 0.5 * (backward + rank.cp * short_back) + join_back + scan_back


def scan_times(layer: LayerShape, machine: Machine) -> tuple[Any, Any]:
    """Return forward and backward seconds of a state-space scan, 0 where a layer has none."""
    if not np.count_nonzero(layer.scan_state):
        return 0.0, 0.0
    channels = layer.ffn * (np.asarray(layer.scan_state) > 0) / machine.rank.tp
    groups = layer.scan_groups / machine.rank.tp
    return scan_s(tokens_of(machine), channels, layer.scan_state, groups, machine.kernels)


def _attention_round(layer: LayerShape, machine: Machine, length: Any) -> tuple[Any, Any]:
    """Return forward and backward seconds of attention over one sequence of `length` tokens."""
    rank, traits, c = machine.rank, machine.traits, machine.constants
    forward: Any = 0.0
    backward: Any = 0.0
    if np.count_nonzero(traits.flash):
        sizes, mask = attention_sizes(layer, machine, length)
        new = 1.0 + traits.blackwell * (c.flash_blackwell - 1.0)
        alone = flash_attention_forward_s(*sizes, machine.kernels, **mask)
        new = new * np.where(_under_mask(layer, machine, length), traits.masked, 1.0)
        forward = alone * (c.flash_forward * new)
        backward = flash_attention_backward_s(alone, sizes, machine.kernels, **mask)
        # What is fitted makes up for a backward that nobody timed; one that was slows as products do.
        timed = np.asarray(traits.timed_backward) > 0
        slower = sustained(machine).gemm16_slower if np.count_nonzero(timed) else 1.0
        backward = backward * np.where(timed, slower, c.flash_backward) * new
    if not np.all(traits.flash):
        plain, plain_back = unfused_attention_s(
            rank.micro_batch,
            layer.num_heads / rank.tp,
            length,
            length,
            layer.head_dim,
            machine.kernels,
            dropout=_drops(layer, machine),
            bytes_per_element=rank.element_bytes,
            plain_code=traits.plain_code * (np.asarray(rank.element_bytes) < 4.0),
            autocasts=traits.autocasts,
            wide_softmax=traits.wide_softmax,
        )
        forward = np.where(traits.flash > 0, forward, plain * c.unfused)
        backward = np.where(traits.flash > 0, backward, plain_back * c.unfused)
    return forward * (1.0 + layer.cross_attention), backward * (1.0 + layer.cross_attention)


def _drops(layer: LayerShape, machine: Machine) -> Any:
    """Return 1 where dropout runs, 0 elsewhere."""
    return np.maximum(np.asarray(layer.dropout, dtype=float), machine.traits.drops)


def attention_sizes(
    layer: LayerShape, machine: Machine, length: Any
) -> tuple[tuple[Any, Any, Any, Any, Any, Any, Any], dict[str, Any]]:
    """Return sizes and mask of a layer's attention over sequences of `length` tokens on a rank.

    A kernel that is given a mask takes all scores.

    Source
    ------
    torch 2.13 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash attention takes no mask; those that
    do read it as what is added to the scores.
    """
    rank = machine.rank
    heads, kv_heads = layer.num_heads / rank.tp, np.maximum(1.0, layer.num_kv_heads / rank.tp)
    sizes = (rank.micro_batch, heads, kv_heads, length, length, layer.head_dim, layer.value_head_dim)
    masked = _under_mask(layer, machine, length)
    causal = (np.asarray(layer.causal) > 0) & ~masked
    return sizes, {"causal": causal, "window": np.where(masked, 0, layer.window)}


def _under_mask(layer: LayerShape, machine: Machine, length: Any) -> np.ndarray:
    """Return whether the window of a layer's attention is a mask to its kernel."""
    window = np.asarray(layer.window)
    return (window > 0) & (window <= length) & (np.asarray(machine.traits.masked) > 0)


def norm_bytes(layer: LayerShape, machine: Machine) -> Any:
    """Return bytes of the forward of a norm on a rank, the typical memory-bound kernel of a layer."""
    return own_tokens(machine) * layer.hidden * _NORM * machine.rank.element_bytes / 2.0


def elementwise_times(layer: LayerShape, machine: Machine) -> tuple[Any, Any, Any, Any]:
    """Return seconds of memory-bound kernels, both ways; of norms and expert activations forward."""
    rank, traits, c = machine.rank, machine.traits, machine.constants
    tokens, own = tokens_of(machine), own_tokens(machine)
    gate = 1.0 + np.asarray(layer.gated, dtype=float)
    wide = own * layer.hidden
    joins = layer.mixers + np.asarray(layer.cross_attention, dtype=float)
    turned = tokens * (layer.query_width + layer.key_width) / rank.tp
    norm = layer.num_norms * wide + layer.qk_norm * turned
    drop = 2.0 * _drops(layer, machine) * wide * _DROPOUT
    rope = turned * _ROPE * (np.asarray(layer.rotary) > 0)
    routed = experts_of_token(layer, machine) * tokens / rank.tp
    # The kernel of a scan applies its gate.
    dense = layer.ffn * (np.asarray(layer.scan_state) == 0) + layer.shared_ffn
    inner = tokens * dense / rank.tp + routed * layer.expert_ffn
    # Eager code runs the activation and the product of a gated MLP as kernels of their own.
    split = 1.0 + traits.eager * np.asarray(layer.gated, dtype=float) * _SPLIT_GATE
    # Routed tokens are permuted before and after the experts: read and write of 16 bit each.
    permute = 8.0 * routed * layer.expert_hidden
    norm_forward = norm * (_NORM + traits.norm_cast * (_CAST_NORM - _NORM))
    norm_back = norm * (_NORM_BACK + traits.norm_cast * (_CAST_NORM_BACK - _NORM_BACK))
    forward = (
        norm_forward + joins * wide * _RESIDUAL + drop + rope + split * inner * 2.0 * (gate + 1.0) + permute
    )
    back = (
        norm_back
        + joins * wide * _RESIDUAL
        + drop
        + rope
        + split * inner * 2.0 * (2.0 * gate + 1.0)
        + permute
    )
    factor = c.fused_traffic + traits.eager * (c.eager_traffic - c.fused_traffic)
    wide_norms = layer.num_norms * wide / np.maximum(norm, 1.0)  # recomputation names no other
    expert = split * routed * layer.expert_ffn * 2.0 * (gate + 1.0)
    moved = [factor * count for count in (forward, back, wide_norms * norm_forward, expert)]
    turns = (np.asarray(layer.rotary) > 0) * (np.asarray(layer.num_heads) > 0)
    spelled = np.asarray(layer.spelled_activation) > 0
    own_kernels = np.maximum(np.maximum(layer.scale_norm, spelled), turns)  # others run torch's
    plain = traits.plain_code * np.maximum(np.asarray(own_kernels, dtype=float), traits.autocasts)
    if np.count_nonzero(plain):
        counted = _plain_bytes(layer, machine, permuted=factor * permute)
        moved = [count + plain * (own - count) for count, own in zip(moved, counted, strict=True)]
    if np.count_nonzero(layer.expert_bias) or np.count_nonzero(layer.rotary_scaled):
        by_torch = _bytes_by_torch(layer, machine, routed=routed, turned=turned)
        moved[:2] = [count + more for count, more in zip(moved[:2], by_torch, strict=True)]
    # The byte counts are those of 16 bit.
    scale = rank.element_bytes / (2.0 * stream_rate(norm_bytes(layer, machine), machine.kernels))
    forward, back, norms, expert = (count * scale for count in moved)
    return forward, back, norms, expert


def _bytes_by_torch(layer: LayerShape, machine: Machine, *, routed: Any, turned: Any) -> list[Any]:
    """Return bytes, both ways, of what Megatron leaves to operations of torch beside its fused kernels.

    Experts' biases, but for those of a graph, whose experts are fused; rotary embeddings with a factor.

    Source
    ------
    Megatron-LM core_v0.18.2 core/transformer/moe/experts.py TEGroupedMLP._apply_bias,
    _is_fused_impl_supported; token_dispatcher.py _DeepepManager, _HybridEPManager (float32 probabilities);
    rope_utils.py apply_rotary_pos_emb, _apply_rotary_pos_emb_bshd.
    """
    traits = machine.traits
    fuses = (1.0 - np.asarray(traits.eager)) * (1.0 - traits.pruned)
    biased = routed * layer.hidden * layer.expert_bias * (np.asarray(traits.graphs) < 1.0) * fuses
    scaled = turned * layer.rotary_scaled * fuses
    return [
        biased * (narrow + traits.fast_dispatch * (wide - narrow)) + scaled * (rope - _ROPE)
        for narrow, wide, rope in zip(_NARROW_EXPERT_BIAS, _EXPERT_BIAS, _SCALED_ROPE, strict=True)
    ]


def _plain_bytes(layer: LayerShape, machine: Machine, permuted: Any) -> tuple[Any, Any, Any, Any]:
    """Return the bytes that model code of transformers moves, kernel by kernel, as `elementwise_times`.

    `permuted` are those of tokens on their way to experts and back. Layer norms are kernels of torch.
    """
    # Under peft the frozen weights are in 16 bit, as they are read, and so is their residual.
    auto = machine.traits.autocasts * (np.asarray(layer.lora_rank) == 0)
    scaled = np.asarray(layer.scale_norm, dtype=float)
    full = np.asarray(machine.rank.element_bytes) >= 4.0  # nothing is widened; bytes count twice below
    tokens, tp = tokens_of(machine), machine.rank.tp
    wide, gated = own_tokens(machine) * layer.hidden, np.asarray(layer.gated, dtype=float)
    turned = tokens * (layer.query_width + layer.key_width) / tp
    routed = experts_of_token(layer, machine) * tokens / tp * layer.expert_ffn
    dense = layer.ffn * (np.asarray(layer.scan_state) == 0) + layer.shared_ffn
    inner = tokens * dense / tp + routed
    formula = np.asarray(layer.spelled_activation, dtype=int)
    attends, scans = np.asarray(layer.num_heads) > 0, np.asarray(layer.scan_state) > 0
    feeds = dense + layer.top_k * layer.expert_ffn > 0
    # What reads the residual: three products of attention or one, two of a gated MLP or one, one of a scan.
    share, apart = np.asarray(layer.rotary, dtype=float), 1.0 - np.asarray(layer.fused_projections)
    widens = (1.0 - auto) * (1.0 - full) * (np.asarray(layer.router_code) > 0)
    more = apart * attends * 2.0 + (1.0 - np.asarray(layer.fused_gate)) * feeds * gated
    operands = (more + attends + feeds + scans) * _OPERAND, more * _OPERAND_SUM
    # Cross attention is a mixer of its own: its query reads the residual, keys and values the output of the
    # encoder, whose gradient every layer adds to.
    cross = np.asarray(layer.cross_attention, dtype=float)
    operands = operands[0] + cross * 3.0 * _OPERAND, operands[1] + cross * 2.0 * _OPERAND_SUM
    mixers = layer.mixers + cross
    heads = tokens * layer.value_width / tp * _JOIN_HEADS * (1.0 + cross)
    same = heads + 2.0 * _drops(layer, machine) * wide * _DROPOUT

    def under(plain: tuple[float, float], autocast: tuple[float, float], way: int) -> Any:
        return plain[way] + auto * (autocast[way] - plain[way])

    def moved(way: int) -> tuple[Any, Any, Any]:
        rms, kernel = under(_PLAIN_NORM, _AUTOCAST_NORM, way), under(_KERNEL_NORM, _AUTOCAST_KERNEL_NORM, way)
        rms = np.where(full, _AUTOCAST_NORM[way] / 2.0, rms)
        norm = kernel + scaled * (rms - kernel)
        gelu = _SPELLED[formula, way] + auto * (_AUTOCAST_SPELLED - _SPELLED)[formula, way]
        gate = gelu + gated * (_PLAIN_GATE[way] - _GELU[way] + auto * _WIDE_GATE[formula])
        read = auto * wide * (operands[0] + way * operands[1]) + widens * wide * _OPERAND
        joins = mixers * wide * under(_PLAIN_RESIDUAL, _AUTOCAST_RESIDUAL, way)
        partly = under(_PARTLY, _AUTOCAST_PARTLY, way) - auto * share * _LESS_PARTLY[way]
        rope = turned * (share * under(_PLAIN_ROPE, _AUTOCAST_ROPE, way) + (share > 0) * (share < 1) * partly)
        norms = (layer.num_norms * wide + layer.qk_norm * turned) * norm
        return norms + joins + read + rope + inner * gate + same + permuted, norm, gate

    forward, norm, gate = moved(0)
    return forward, moved(1)[0], layer.num_norms * wide * norm, routed * gate


def cast_s(layer: LayerShape, machine: Machine) -> Any:
    """Return seconds of one pass of casts to 8 or 4 bit in front of the linear layers."""
    if not np.count_nonzero(machine.rank.low):
        return 0.0
    tokens = tokens_of(machine)
    tp = machine.rank.tp
    attention = (layer.hidden + layer.value_width / tp) * (1.0 - layer.wide_attention)
    mlp = (layer.hidden + (layer.ffn + layer.shared_ffn) / tp) * (1.0 - layer.wide_mlp)
    # Ranks that share an expert (etp) each cast all tokens that they gathered.
    routed = layer.top_k * (layer.expert_hidden * machine.rank.etp + layer.expert_ffn) / tp
    routed = routed * (1.0 - layer.wide_experts)
    moved = tokens * (attention + mlp + routed) * _cast_bytes(machine)
    return stream_s(moved, machine.kernels) * machine.rank.low


def _cast_bytes(machine: Machine) -> Any:
    """Return the bytes that casting one element moves.

    It is read in 16 bit and written in 8 along each of the two axes that products sum over; one copy serves
    both where products take any layout, unless every block has its own scale
    (TransformerEngine is_non_tn_fp8_gemm_supported). Kernels that do not fuse this say what they move.
    """
    c, traits = machine.constants, machine.traits
    fused = np.where(traits.block_scaled > 0, 4.0 * c.cast_blocks, (4.0 - traits.any_layout) * c.cast_traffic)
    return np.where(traits.own_casts > 0, traits.own_casts, fused)


def weight_cast_s(params: Any, machine: Machine) -> Any:
    """Return seconds of casting the weights for a micro-batch, where a framework does not keep them."""
    if not np.count_nonzero(machine.rank.low):
        return 0.0
    own = machine.traits.own_weight_casts
    moved = np.where(own > 0, own, 0.3 * _cast_bytes(machine))
    return stream_s(params * moved, machine.kernels) * machine.rank.low
