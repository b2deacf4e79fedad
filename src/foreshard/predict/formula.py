"""Cost source `formula`: the time of every single task of a rank, from shapes and fitted curves.

A task is what one stream runs without waiting for another: a layer forward, its two halves backward,
one collective. How tasks line up into a step is the engines' part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreshard.catalog.training import TrainingConstants
from foreshard.comm.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)
from foreshard.comm.fabric import Fabric
from foreshard.cost.attention import (
    backward_of_forward_s,
    flash_attention_forward_s,
    unfused_attention_s,
)
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.cost.kernels import KernelModel
from foreshard.cost.memory_activations import Recompute
from foreshard.graph.shapes import LayerShape, RankShape
from foreshard.predict.traits import Traits

# Bytes per element of hidden width that elementwise kernels move: a norm reads and writes 16 bit and
# its backward reads two and writes one; a residual reads two and writes one, backward joins gradients.
_NORM, _NORM_BACK, _RESIDUAL = 4.0, 6.0, 6.0
# A norm behind a cast: the cast reads 2 and writes 4, the norm reads 4 and writes 2; backward runs both
# again and its own kernels move fp32.
_CAST_NORM, _CAST_NORM_BACK = 12.0, 30.0
_DROPOUT = 5.0
# SiLU and product apart read and write five times per output, fused three times.
_SPLIT_GATE = 5.0 / 3.0 - 1.0
_ROPE = 4.0
HOST_MEMORY_BYTES_PER_S = 200e9
"""Memory bandwidth of a host that its cores reach in an optimizer step; assumed, eight channels of DDR4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything a task's time depends on apart from its shape; fields broadcast to the batch."""

    kernels: KernelModel
    fabric: Fabric  # what collectives inside a stage see
    sync: Fabric  # what gradient collectives over all groups see
    link: Fabric  # what messages to the neighbouring stages see
    traits: Traits
    rank: RankShape
    constants: TrainingConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer on one rank for one micro-batch, by task and part."""

    forward: Any
    backward_input: Any
    backward_weight: Any
    recompute: Any
    tensor_forward: Any  # collectives that nothing hides
    tensor_backward: Any
    tensor_recompute: Any
    context_forward: Any
    context_backward: Any
    expert_forward: Any
    expert_backward: Any
    expert_recompute: Any
    host_forward: Any
    host_backward: Any
    offload_forward: Any  # saved activations on their way to the host and back, where compute does not hide them
    offload_backward: Any
    reduce_backward: Any  # gradients reduced every micro-batch (ZeRO 2), where compute does not hide them
    dense_params: Any  # on this rank
    expert_params: Any

    @property
    def forward_s(self) -> Any:
        """Device seconds of a forward, collectives included."""
        moved = self.tensor_forward + self.context_forward + self.expert_forward
        return self.forward + moved + self.offload_forward

    @property
    def backward_s(self) -> Any:
        """Device seconds of a backward, recomputation included."""
        return (
            self.backward_input + self.backward_weight + self.recompute + self.tensor_backward
            + self.tensor_recompute + self.context_backward + self.expert_backward + self.expert_recompute
            + self.offload_backward + self.reduce_backward
        )  # fmt: skip


def _tokens(machine: Machine) -> Any:
    """Return tokens a rank computes on between collectives."""
    rank = machine.rank
    return rank.micro_batch * rank.seq_len / rank.cp


def _own_tokens(machine: Machine) -> Any:
    """Return tokens of a rank's sequence-parallel part."""
    return _tokens(machine) / np.where(machine.rank.sp > 0, machine.rank.tp, 1.0)


def _sustained(machine: Machine, slower: float = 1.0) -> KernelModel:
    """Return the kernels at the rates matrix products keep inside a training step.

    What falls is the arithmetic rate (clocks under load, processors lent to collectives); bandwidth stays.
    """
    c, t, rank, kernels = machine.constants, machine.traits, machine.rank, machine.kernels
    power = slower * (1.0 + c.gemm_power * t.power)
    sixteen = c.gemm_derate * (1.0 + t.hopper * (c.gemm_derate_hopper - 1.0)) * power
    sixteen = sixteen * (1.0 + t.blackwell * (c.gemm_derate_blackwell - 1.0))
    if not np.count_nonzero(rank.low):
        return replace(
            kernels, gemm_eff=kernels.gemm_eff / sixteen, gemm16_eff=kernels.gemm16_eff / sixteen
        )
    narrow = np.where(rank.four_bit > 0, c.gemm_derate_4bit, c.gemm_derate_8bit) * power
    own = np.where(rank.low > 0, narrow, sixteen)
    return replace(kernels, gemm_eff=kernels.gemm_eff / own, gemm16_eff=kernels.gemm16_eff / sixteen)


def _linear_sizes(layer: LayerShape, machine: Machine) -> list[tuple[Any, Any, Any, str]]:
    """Return (rows, outputs, inputs, group) of every matrix product a layer's forward runs per token."""
    tokens, own = _tokens(machine), _own_tokens(machine)
    tp = machine.rank.tp
    h = layer.hidden
    latent = np.asarray(layer.kv_lora) > 0
    low_q = np.asarray(layer.q_lora) > 0
    plain_out = np.where(latent, 0.0, layer.query_width + layer.kv_width) / tp
    sizes = [
        (tokens, plain_out, h, "attention"),
        (tokens, h, layer.value_width / tp, "attention"),
    ]
    if np.count_nonzero(latent):
        up = layer.num_heads * (layer.head_dim - layer.rope_head_dim + layer.value_head_dim) / tp
        sizes += [
            (tokens * latent, np.where(low_q, layer.q_lora, 0.0), h, "attention"),
            (tokens * latent, layer.query_width / tp, np.where(low_q, layer.q_lora, h), "latent"),
            (tokens * latent, layer.kv_lora + layer.rope_head_dim, h, "attention"),
            (tokens * latent, up, layer.kv_lora, "latent"),
        ]
    if np.count_nonzero(layer.cross_attention):
        cross = np.asarray(layer.cross_attention) * 1.0
        sizes += [
            (tokens * cross, (layer.query_width + layer.kv_width) / tp, h, "attention"),
            (tokens * cross, h, layer.value_width / tp, "attention"),
        ]
    if np.count_nonzero(layer.ffn):
        sizes += [
            (tokens, (1.0 + layer.gated) * layer.ffn / tp, h, "mlp"),
            (tokens, h, layer.ffn / tp, "mlp"),
        ]
    if np.count_nonzero(layer.shared_ffn):
        sizes += [
            (tokens, (1.0 + layer.gated) * layer.shared_ffn / tp, h, "shared"),
            (tokens, h, layer.shared_ffn / tp, "shared"),
        ]
    if np.count_nonzero(layer.num_experts):
        sizes.append((own, layer.num_experts, h, "router"))
    return sizes


def _matrix(sizes: list[tuple[Any, Any, Any, str]], machine: Machine) -> np.ndarray:
    """Return seconds of products, one row per (m, n, k, _), forward rate of the linear layers."""
    shape = np.broadcast_shapes(*{np.shape(x) for size in sizes for x in size[:3]})
    m, n, k = (np.empty((len(sizes), *shape)) for _ in range(3))
    for i, size in enumerate(sizes):
        m[i], n[i], k[i] = size[:3]
    return gemm_s(m, n, k, _sustained(machine), bytes_per_element=machine.rank.matrix_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """Matrix-product seconds of a layer, total and of the groups that recomputation names."""

    forward: Any
    input_gradient: Any
    weight_gradient: Any
    mlp: Any
    shared: Any
    latent: Any


def _linear(layer: LayerShape, machine: Machine) -> _Linear:
    """Price all per-token matrix products: forward, and the two products of backward."""
    sizes = _linear_sizes(layer, machine)
    swapped = [(m, k, n, g) for m, n, k, g in sizes]
    weights = [(n, k, m, g) for m, n, k, g in sizes]
    time = _matrix(sizes + swapped + weights, machine)
    count = len(sizes)
    trained = 1.0 - np.asarray(layer.frozen, dtype=float)

    def of(group: str) -> Any:
        return sum((time[i] for i in range(count) if sizes[i][3] == group), np.zeros(()))

    return _Linear(
        forward=time[:count].sum(0),
        input_gradient=time[count : 2 * count].sum(0),
        weight_gradient=time[2 * count :].sum(0) * trained * _wide_gradient(machine),
        mlp=of("mlp"),
        shared=of("shared"),
        latent=of("latent"),
    )


def _wide_gradient(machine: Machine) -> Any:
    """Return the slowdown of a weight-gradient product that adds into an fp32 gradient."""
    t = machine.traits
    fused = t.grads_fused * (t.grad_bytes >= 4) * (machine.rank.zero < 3)
    return 1.0 + fused * (machine.constants.grad_product - 1.0)


def _adapters(layer: LayerShape, machine: Machine) -> tuple[Any, Any]:
    """Return forward and backward seconds of low-rank adapters (two thin products each, and an add)."""
    if not np.count_nonzero(layer.lora_rank):
        return 0.0, 0.0
    tokens = _tokens(machine)
    r, h, tp = layer.lora_rank, layer.hidden, machine.rank.tp
    down = gemm_s(tokens, r, h, machine.kernels, sixteen_bit=True)
    up = gemm_s(tokens, h / tp, r, machine.kernels, sixteen_bit=True)
    add = stream_s(6.0 * tokens * h / tp, machine.kernels)
    count = layer.lora_attention + layer.lora_mlp
    one = down + up + add
    return count * one, 2.0 * count * one


def _experts(layer: LayerShape, machine: Machine) -> tuple[Any, Any, Any]:
    """Return forward, input-gradient and weight-gradient seconds of the routed experts."""
    if not np.count_nonzero(layer.num_experts):
        return 0.0, 0.0, 0.0
    rank, c = machine.rank, machine.constants
    tokens = _tokens(machine)
    # Each tensor-parallel rank routes its own part of the tokens; etp ranks then share an expert.
    routed = layer.top_k * tokens / rank.tp * rank.etp
    local = np.maximum(1.0, layer.num_experts / rank.ep)
    width = layer.expert_ffn / rank.etp
    wide = (1.0 + layer.gated) * width
    h = layer.hidden
    # A balanced router needs no correction when one rank holds every expert.
    imbalance = 1.0 + (c.expert_imbalance - 1.0) * (1.0 - 1.0 / rank.ep) * machine.traits.uneven_routing

    kernels = _sustained(machine, c.expert_products)

    def both(n: Any, k: Any) -> Any:
        options = {"bytes_per_element": rank.matrix_bytes, "imbalance": imbalance}
        grouped = grouped_gemm_s(routed, local, n, k, kernels, **options)
        if np.all(machine.traits.grouped):
            return grouped
        looped = grouped_gemm_s(routed, local, n, k, kernels, looped=True, **options)
        return np.where(machine.traits.grouped > 0, grouped, looped)

    forward = both(wide, h) + both(h, width)
    given = both(h, wide) + both(width, h)
    # The weight gradient has the same work; its rows are the weights and its inner size the tokens.
    trained = 1.0 - np.asarray(layer.frozen, dtype=float)
    return forward, given, _wide_gradient(machine) * forward * trained


def _attention(layer: LayerShape, machine: Machine) -> tuple[Any, Any]:
    """Return forward and backward seconds of attention itself.

    Over cp ranks it runs in cp rounds, each with as many pairs as a causal block of the rank's own tokens,
    and joins the rounds' outputs in fp32.
    """
    rank = machine.rank
    forward, backward = _attention_round(layer, machine, rank.seq_len)
    forward, backward = forward / rank.cp, backward / rank.cp
    if not np.count_nonzero(np.asarray(rank.cp) > 1):
        return forward, backward
    own = rank.seq_len / rank.cp
    # Half of the rounds' blocks have a diagonal and pay for it, the others run like one long sequence.
    short, short_back = _attention_round(layer, machine, own)
    joined = 6.0 * (rank.cp - 1.0) * rank.micro_batch * own / rank.tp
    join = stream_s(joined * layer.value_width, machine.kernels)
    join_back = stream_s(joined * (layer.query_width + layer.kv_width), machine.kernels)
    forward = 0.5 * (forward + rank.cp * short) + join
    return forward, 0.5 * (backward + rank.cp * short_back) + join_back


def _attention_round(layer: LayerShape, machine: Machine, length: Any) -> tuple[Any, Any]:
    """Return forward and backward seconds of attention over one sequence of `length` tokens."""
    rank, traits, c = machine.rank, machine.traits, machine.constants
    heads, kv_heads = layer.num_heads / rank.tp, np.maximum(1.0, layer.num_kv_heads / rank.tp)
    forward = backward = 0.0
    if np.count_nonzero(traits.flash):
        sizes = (rank.micro_batch, heads, kv_heads, length, length, layer.head_dim, layer.value_head_dim)
        mask = {"causal": np.asarray(layer.causal) > 0, "window": layer.window}
        new = 1.0 + traits.blackwell * (c.flash_blackwell - 1.0)
        alone = flash_attention_forward_s(*sizes, machine.kernels, **mask)
        forward = alone * (c.flash_forward * new)
        backward = backward_of_forward_s(alone, machine.kernels) * (c.flash_backward * new)
    if not np.all(traits.flash):
        sizes = (rank.micro_batch, heads, length, length, layer.head_dim, machine.kernels)
        drop = np.asarray(layer.dropout) > 0
        options = {"dropout": drop, "bytes_per_element": rank.element_bytes}
        plain = unfused_attention_s(*sizes, backward=False, **options) * c.unfused
        plain_back = unfused_attention_s(*sizes, backward=True, **options) * c.unfused
        forward = np.where(traits.flash > 0, forward, plain)
        backward = np.where(traits.flash > 0, backward, plain_back)
    return forward * (1.0 + layer.cross_attention), backward * (1.0 + layer.cross_attention)


def _elementwise(layer: LayerShape, machine: Machine) -> tuple[Any, Any, Any, Any]:
    """Return forward and backward seconds of memory-bound kernels; of norms and expert activations forward."""
    rank, traits, c = machine.rank, machine.traits, machine.constants
    tokens, own = _tokens(machine), _own_tokens(machine)
    gate = 1.0 + np.asarray(layer.gated, dtype=float)
    wide = own * layer.hidden
    norm = layer.num_norms * wide
    drop = 2.0 * np.asarray(layer.dropout, dtype=float) * wide * _DROPOUT
    rope = tokens * (layer.query_width + layer.key_width) / rank.tp * _ROPE
    routed = layer.top_k * tokens / rank.tp
    inner = tokens * (layer.ffn + layer.shared_ffn) / rank.tp + routed * layer.expert_ffn
    # Eager code runs the activation and the product of a gated MLP as kernels of their own.
    split = 1.0 + traits.eager * np.asarray(layer.gated, dtype=float) * _SPLIT_GATE
    # Routed tokens are permuted before and after the experts: read and write of 16 bit each.
    permute = 8.0 * routed * layer.hidden
    norm_forward = norm * (_NORM + traits.norm_cast * (_CAST_NORM - _NORM))
    norm_back = norm * (_NORM_BACK + traits.norm_cast * (_CAST_NORM_BACK - _NORM_BACK))
    forward = norm_forward + 2.0 * wide * _RESIDUAL + drop + rope + split * inner * 2.0 * (gate + 1.0) + permute
    back = norm_back + 2.0 * wide * _RESIDUAL + drop + rope + split * inner * 2.0 * (2.0 * gate + 1.0) + permute
    factor = c.fused_traffic + traits.eager * (c.eager_traffic - c.fused_traffic)
    # The byte counts are those of 16 bit.
    scale = factor * rank.element_bytes / (2.0 * machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
    expert = split * routed * layer.expert_ffn * 2.0 * (gate + 1.0)
    return forward * scale, back * scale, norm_forward * scale, expert * scale


def _casts(layer: LayerShape, machine: Machine) -> Any:
    """Return seconds of one pass of casts to 8 or 4 bit in front of the linear layers."""
    if not np.count_nonzero(machine.rank.low):
        return 0.0
    tokens = _tokens(machine)
    tp = machine.rank.tp
    inputs = 2.0 * layer.hidden + (layer.value_width + layer.ffn + layer.shared_ffn) / tp
    routed = layer.top_k * (layer.hidden + layer.expert_ffn) / tp
    moved = 3.0 * tokens * (inputs + routed) * _cast_factor(machine)
    return stream_s(moved, machine.kernels) * machine.rank.low


def _cast_factor(machine: Machine) -> Any:
    """Return cast traffic over one read and one write."""
    c = machine.constants
    return np.where(machine.traits.block_scaled > 0, c.cast_blocks, c.cast_traffic)


def _weight_casts(params: Any, machine: Machine) -> Any:
    """Return seconds of casting the weights once a micro-batch, where a framework does not keep them."""
    if not np.count_nonzero(machine.rank.low):
        return 0.0
    return stream_s(0.9 * params * _cast_factor(machine), machine.kernels) * machine.rank.low


def region_s(hidden: Any, machine: Machine) -> tuple[Any, Any]:
    """Return seconds of gathering the activations of a tensor-parallel region, and of summing them.

    Scattering the sum takes as long as gathering: the ring of both is the same.
    """
    rank = machine.rank
    if not np.count_nonzero(np.asarray(rank.tp) > 1):
        return 0.0, 0.0
    tokens = _tokens(machine)
    size = rank.element_bytes * tokens * hidden
    gather = all_gather_s(size, rank.tp, 1.0, machine.fabric)
    whole = 0.0 if np.all(rank.sp > 0) else all_reduce_s(size, rank.tp, 1.0, machine.fabric)
    return gather, whole


def _tensor_s(region: tuple[Any, Any], machine: Machine, beside: Any) -> tuple[Any, Any]:
    """Return exposed seconds of the collectives around one tensor-parallel region, forward and backward.

    Forward waits for all of them. Backward gathers the output gradient first; the collective of the
    input gradient can run beside the weight-gradient product (`beside` seconds of it per region).
    """
    rank, c, traits = machine.rank, machine.constants, machine.traits
    gather, whole = region
    if not np.count_nonzero(gather):
        return 0.0, 0.0
    split = rank.sp > 0
    last = np.where(split, gather, whole) * c.tensor_comm
    last = last - traits.tensor_async * np.minimum(last, beside)
    forward = np.where(split, 2.0 * gather, whole) * c.tensor_comm
    backward = np.where(split, gather, 0.0) * c.tensor_comm + last
    shown = 1.0 - traits.tp_overlap * np.where(split, c.tensor_hidden, 0.0)
    return forward * shown, backward * shown


def _expert_s(layer: LayerShape, machine: Machine) -> Any:
    """Return seconds of sending tokens to their experts and back, one direction of a layer."""
    rank, c = machine.rank, machine.constants
    if not np.count_nonzero(layer.num_experts) or not np.count_nonzero(np.asarray(rank.ep) > 1):
        return 0.0
    tokens, own = _tokens(machine), _own_tokens(machine)
    routed = rank.element_bytes * layer.top_k * tokens / rank.tp * layer.hidden * (np.asarray(layer.num_experts) > 0)
    sent = 2.0 * all_to_all_s(routed, rank.ep, rank.etp, machine.fabric)
    if np.count_nonzero(machine.traits.gather_tokens):
        everyone = rank.element_bytes * own * layer.hidden * rank.ep * (np.asarray(layer.num_experts) > 0)
        gathered = 2.0 * all_gather_s(everyone, rank.ep, rank.etp, machine.fabric)
        sent = np.where(machine.traits.gather_tokens > 0, gathered, sent)
    sent = sent * np.where(machine.traits.fast_dispatch > 0, c.expert_fast, 1.0)
    return sent * c.expert_comm * (1.0 - c.expert_hidden * machine.traits.expert_overlap)


def _context_s(layer: LayerShape, machine: Machine, attention: Any, backward: Any) -> tuple[Any, Any]:
    """Return what attention leaves exposed of moving keys and values over cp ranks, forward and backward.

    A ring passes them on behind the attention of the previous block; a gather brings all of them first.
    Backward moves their gradients as well.
    """
    rank = machine.rank
    if not np.count_nonzero(np.asarray(rank.cp) > 1):
        return 0.0, 0.0
    tokens = _tokens(machine)
    block = rank.element_bytes * tokens * layer.kv_width / rank.tp
    steps = rank.cp - 1.0
    crosses = rank.cp * rank.tp > machine.fabric.domain
    ring = steps * send_s(block, crosses, machine.fabric)
    hidden = steps / rank.cp
    forward = np.maximum(ring - attention * hidden, 0.0)
    back = np.maximum(2.0 * ring - backward * hidden, 0.0)
    if not np.count_nonzero(machine.traits.context_gather):
        return forward, back
    gather = all_gather_s(block * rank.cp, rank.cp, rank.tp, machine.fabric)
    scatter = reduce_scatter_s(block * rank.cp, rank.cp, rank.tp, machine.fabric)
    whole = machine.traits.context_gather > 0
    return np.where(whole, gather, forward), np.where(whole, gather + scatter, back)


def _hosts(layer: LayerShape, machine: Machine, recompute: Recompute) -> tuple[Any, Any]:
    """Return host seconds that launching a layer forward and backward takes."""
    c, traits, rank = machine.constants, machine.traits, machine.rank
    table = np.array(
        [c.host_megatron_2020, c.host_megatron_deepspeed, c.host_megatron_core, c.host_eager, c.host_compiled]
    )
    base = table[np.asarray(traits.host_class, dtype=int)]
    base = base * (1.0 + c.host_tensor * (np.asarray(rank.tp) > 1))
    heads = rank.micro_batch * layer.num_heads / rank.tp
    unfused = (1.0 - traits.flash) * (np.mod(heads, 4.0) > 0)
    base = base + unfused * c.host_softmax
    moe = np.asarray(layer.num_experts) > 0
    local = np.maximum(1.0, layer.num_experts / rank.ep)
    base = base + moe * (c.host_moe * (1.0 - traits.dropped) + (1.0 - traits.grouped) * local * c.host_expert)
    base = base * (1.0 + traits.arm_host * (c.host_arm - 1.0))
    base = base * (1.0 - np.where(traits.graphs == 0.5, c.graph_share, traits.graphs))
    return base, base * (c.host_backward + recompute.full)


def _offload_s(layer: LayerShape, machine: Machine, busy: Any) -> Any:
    """Return what compute does not hide of moving a layer's saved activations over the host link, one way.

    Source: tensors a fused layer saves, 12 h + 2 kv + 4 or 6 f bytes a token in 16 bit (docs/derivations/memory.md).
    """
    rank = machine.rank
    if not np.count_nonzero(rank.offload_activations):
        return 0.0
    tp = np.where(rank.sp > 0, rank.tp, 1.0)
    inner = layer.ffn + layer.shared_ffn + layer.top_k * layer.expert_ffn
    saved = 6.0 * layer.hidden + layer.kv_width + (2.0 + layer.gated) * inner * tp / rank.tp
    moved = rank.element_bytes * _own_tokens(machine) * saved / machine.traits.host_link_bytes_per_s
    return rank.offload_activations * np.maximum(moved - busy, 0.0)


def _every_reduce_s(params: Any, experts: Any, machine: Machine, busy: Any) -> Any:
    """Return what backward does not hide of reducing a layer's gradients after every micro-batch (ZeRO 2)."""
    rank, traits = machine.rank, machine.traits
    if not np.count_nonzero(rank.zero == 2):
        return 0.0
    reduce, _ = _sync(params, rank.dp * rank.cp, rank.sync_stride, machine)
    if np.count_nonzero(experts):
        reduce = reduce + _sync(experts, expert_replicas(rank), rank.ep * rank.etp, machine)[0]
    beside = np.maximum(machine.constants.fsdp_contention * np.minimum(busy, reduce), reduce - busy)
    return np.where(rank.zero == 2, np.where(traits.grad_overlap > 0, beside, reduce), 0.0)


def layer_times(
    layer: LayerShape, machine: Machine, recompute: Recompute, *, region: tuple[Any, Any] | None = None
) -> LayerTimes:
    """Return the seconds of every task of one layer.

    Parameters
    ----------
    layer : LayerShape
    machine : Machine
    recompute : Recompute
    region : tuple, optional
        :func:`region_s` of the layer's width, where the caller has it.

    Returns
    -------
    LayerTimes
        Fields broadcast to the batch.

    Source
    ------
    docs/derivations/step.md; kernels and collectives in their own derivations.
    """
    rank, c = machine.rank, machine.constants
    linear = _linear(layer, machine)
    attention, attention_back = _attention(layer, machine)
    stream, stream_back, norms, expert_act = _elementwise(layer, machine)
    expert, expert_input, expert_weight = _experts(layer, machine)
    adapter, adapter_back = _adapters(layer, machine)
    cast = _casts(layer, machine)
    dense = layer.dense_params / rank.tp
    experts = layer.expert_params / np.maximum(1.0, rank.ep * rank.etp)
    # Fused into the product, accumulation reads and writes the main gradient; else it reads the new one too.
    wide = np.where(machine.traits.grad_bytes >= 4, c.grad_accumulate * 8.0, 4.0)
    accumulate = wide + (1.0 - machine.traits.grads_fused) * 2.0
    # Scattered gradients are added up in shards.
    accumulate = np.where(rank.zero >= 3, accumulate / rank.shard, accumulate)
    accumulate = stream_s(accumulate * (dense * layer.trainable + experts), machine.kernels)
    accumulate = accumulate * (1.0 - np.asarray(layer.frozen, dtype=float))
    forward = linear.forward + attention + stream + expert + adapter + cast
    forward = forward + _weight_casts(dense + experts, machine)
    moe = np.asarray(layer.num_experts, dtype=float) > 0
    has_mlp = np.asarray(layer.ffn + layer.shared_ffn, dtype=float) > 0
    # An expert layer without a dense or shared part enters no tensor-parallel region after attention.
    regions = 1.0 + np.where(moe & (rank.etp <= 1), has_mlp * 1.0, 1.0)
    if region is None:
        region = region_s(layer.hidden, machine)
    tensor, tensor_back = _tensor_s(region, machine, linear.weight_gradient / 2.0)
    context, context_back = _context_s(layer, machine, attention, attention_back)
    sent = _expert_s(layer, machine)
    again = recompute
    redo = (
        again.core_attn * attention
        + again.mlp * linear.mlp
        + again.layernorm * norms
        + again.moe * expert
        + again.moe_act * expert_act
        + again.shared_experts * linear.shared
        + again.mla_up_proj * linear.latent
        + again.op * 0.5 * linear.forward  # every second product is kept
    )
    host_forward, host_backward = _hosts(layer, machine, recompute)
    backward_input = linear.input_gradient + attention_back + stream_back + expert_input + adapter_back + cast
    return LayerTimes(
        forward=forward,
        backward_input=backward_input,
        backward_weight=linear.weight_gradient + expert_weight + accumulate,
        recompute=again.full * forward + (1.0 - again.full) * redo,
        tensor_forward=regions * tensor,
        tensor_backward=regions * tensor_back,
        tensor_recompute=again.full * regions * tensor,
        context_forward=context,
        context_backward=context_back,
        expert_forward=sent,
        expert_backward=sent,
        expert_recompute=np.maximum(again.full, again.moe) * sent,
        host_forward=host_forward,
        host_backward=host_backward,
        offload_forward=_offload_s(layer, machine, forward),
        offload_backward=_offload_s(layer, machine, backward_input),
        reduce_backward=_every_reduce_s(dense * layer.trainable, experts, machine, backward_input),
        dense_params=dense,
        expert_params=experts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTimes:
    """Seconds of embedding and head for one micro-batch on the ranks that hold them."""

    embedding_forward: Any
    embedding_backward: Any
    head_forward: Any
    head_backward: Any
    embedding_tensor: Any
    head_tensor: Any


def end_times(
    hidden: Any, vocab: Any, head_rows: Any, machine: Machine, *, frozen: Any = 0.0, heads: Any = 1.0,
    region: tuple[Any, Any] | None = None,
) -> EndTimes:
    """Return the seconds of the two ends of the model.

    `heads` counts outputs (1 + next-token modules); `region` is :func:`region_s` where the caller has it.
    """
    rank, c = machine.rank, machine.constants
    tokens, own = _tokens(machine), _own_tokens(machine)
    rows = np.where(np.asarray(head_rows) > 0, rank.micro_batch * np.asarray(head_rows, dtype=float), tokens)
    padded = np.ceil(vocab / (machine.traits.vocab_multiple * rank.tp)) * machine.traits.vocab_multiple
    product = gemm_s(rows, padded, hidden, _sustained(machine), sixteen_bit=True)
    per_logit = np.where(machine.traits.fused_loss > 0, 6.0, 14.0) * c.loss_traffic
    loss = stream_s(rows * padded * per_logit, machine.kernels)
    lookup = stream_s(4.0 * own * hidden, machine.kernels)
    scatter, whole = region_s(hidden, machine) if region is None else region
    gather = np.where(rank.sp > 0, scatter, whole) * c.tensor_comm
    trained = 2.0 - np.asarray(frozen, dtype=float)
    return EndTimes(
        embedding_forward=lookup,
        embedding_backward=1.5 * lookup * (trained - 1.0),
        head_forward=heads * (product + loss / 3.0),
        head_backward=heads * (trained * product + loss * 2.0 / 3.0),
        embedding_tensor=2.0 * gather,
        head_tensor=2.0 * heads * gather,
    )


def message_s(hidden: Any, crosses_node: Any, machine: Machine) -> Any:
    """Return seconds of one stage's output, or its gradient, to the next stage, one micro-batch."""
    rank = machine.rank
    parts = np.where((rank.sp > 0) | (machine.traits.p2p_scatter > 0), rank.tp, 1.0)
    own = rank.micro_batch * rank.seq_len / rank.cp / parts
    return send_s(rank.element_bytes * own * hidden, crosses_node, machine.link) * machine.constants.pipeline_comm


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """Seconds of the fully sharded tasks of one layer: gather weights, scatter gradients, copy both."""

    gather: Any
    scatter: Any
    copy_weights: Any  # on the compute stream, once per gather
    copy_gradients: Any


def shard_times(params: Any, machine: Machine) -> ShardTimes:
    """Return the tasks of keeping `params` weights of this rank sharded (ZeRO 3, FSDP)."""
    rank, traits, fabric = machine.rank, machine.traits, machine.sync
    factor = machine.constants.data_comm
    weights, grads = traits.param_bytes * params, traits.grad_reduce_bytes * params
    replicas = np.maximum(1.0, rank.dp * rank.cp / rank.shard)
    across = all_reduce_s(grads / rank.shard, replicas, rank.sync_stride * rank.shard, fabric)
    gather, scatter = _gather_scatter_s(weights, grads, rank.shard, rank.sync_stride, fabric)
    return ShardTimes(
        gather=gather * factor,
        scatter=(scatter + across) * factor,
        copy_weights=stream_s(2.0 * weights, machine.kernels),
        copy_gradients=stream_s((2.0 + traits.grad_reduce_bytes) * params, machine.kernels),
    )


def sync_times(params: Any, ranks: Any, stride: Any, machine: Machine) -> tuple[Any, Any]:
    """Return seconds of reducing gradients over replicas, and of gathering updated weights after.

    Parameters
    ----------
    params : array_like
        Trained parameters of this rank.
    ranks, stride : array_like
        Replicas, and their distance in cluster order.
    machine : Machine

    Source
    ------
    ZeRO 1 scatters inside the shard group and reduces the shards across groups; ZeRO 0 all-reduces, as with
    shards of one rank; ZeRO 2 has reduced already, after every micro-batch.
    """
    reduce, gather = _sync(params, ranks, stride, machine)
    return np.where(machine.rank.zero == 2, 0.0, reduce), gather


def _sync(params: Any, ranks: Any, stride: Any, machine: Machine) -> tuple[Any, Any]:
    """Return seconds of reducing the gradients of `params` weights once, and of gathering the weights."""
    rank, traits, fabric = machine.rank, machine.traits, machine.sync
    factor = machine.constants.data_comm
    grads = traits.grad_reduce_bytes * params
    shard = np.where(rank.zero >= 1, np.minimum(ranks, rank.shard), 1.0)
    across = all_reduce_s(grads / shard, ranks / shard, stride * shard, fabric)
    gather, scatter = _gather_scatter_s(traits.param_bytes * params, grads, shard, stride, fabric)
    return (scatter + across) * factor, gather * factor


def _gather_scatter_s(weights: Any, grads: Any, ranks: Any, stride: Any, fabric: Fabric) -> tuple[Any, Any]:
    """Return seconds of gathering weights and of scattering gradients: one ring, two sizes."""
    both = all_gather_s(np.array((weights, grads)), ranks, stride, fabric)
    return both[0], both[1]


def expert_replicas(rank: RankShape) -> Any:
    """Return how many ranks hold the same experts."""
    return np.maximum(1.0, rank.tp * rank.dp * rank.cp / (rank.ep * rank.etp))


def tied_sync_s(hidden: Any, vocab: Any, crosses_node: Any, machine: Machine) -> Any:
    """Return seconds of summing a tied table's gradient over the first and the last stage."""
    table = machine.traits.grad_bytes * hidden * vocab / machine.rank.tp
    stride = machine.link.domain * crosses_node + machine.rank.tp
    return all_reduce_s(table, 2.0, stride, machine.link)


def optimizer_s(params: Any, expert_params: Any, num_layers: Any, machine: Machine) -> Any:
    """Return seconds of the optimizer, and of what a step does once, on a rank."""
    rank, c = machine.rank, machine.constants
    dense = params / np.where(rank.zero >= 1, rank.shard, 1.0)
    experts = expert_params / np.where(rank.zero >= 1, expert_replicas(rank), 1.0)
    traits, count = machine.traits, dense + experts
    update = stream_s(traits.optimizer_bytes * count, machine.kernels)
    if np.count_nonzero(rank.offload_optimizer):
        # Gradients go to the host, its cores update, weights come back; the devices of a node share its memory.
        link = count * (traits.grad_reduce_bytes + traits.param_bytes) / traits.host_link_bytes_per_s
        on_host = link + traits.optimizer_bytes * count * machine.fabric.per_node / HOST_MEMORY_BYTES_PER_S
        update = np.where(rank.offload_optimizer > 0, on_host, update)
    return update + c.step_fixed + c.step_per_layer * num_layers
