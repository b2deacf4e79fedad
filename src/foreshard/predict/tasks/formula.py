"""Cost source `formula`: the time of every single task of a rank, from shapes and fitted curves.

A task is what one stream runs without waiting for another: a layer forward, its two halves backward,
one collective. How tasks line up into a step is the engines' part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.memory_activations import Recompute
from foreshard.graph.shapes import LayerShape
from foreshard.predict.machine import Machine, own_tokens, sustained, tokens_of
from foreshard.predict.tasks.collectives import (
    RegionTimes,
    Sharing,
    beside_shared,
    context_times,
    every_reduce_s,
    expert_exchange_s,
    paired_exchange,
    region_times,
    tensor_times,
)
from foreshard.predict.tasks.host import host_times, offload_s
from foreshard.predict.tasks.kernels import (
    adapter_times,
    attention_times,
    cast_s,
    elementwise_times,
    expert_times,
    linear_times,
    weight_cast_s,
)

# FLOPs in 16 bit a cycle of a multiprocessor, where columns do not begin at 16 bytes: elements come one by
# one, or by two. Products with heads of 50257 (124 TFLOP/s) and 30522 columns (262) on an H200 (132 at 1.98
# GHz), torch 2.11.
_UNALIGNED = (474.0, 1003.0)
_MOST_UNALIGNED = 0.6  # of the peak, where it is low


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
    offload_forward: Any  # saved activations to the host and back, where compute does not hide them
    offload_backward: Any
    reduce_backward: Any  # gradients reduced every micro-batch (ZeRO 2), where compute does not hide them
    # the whole forward where the host counts the tokens of every expert before it gets to the next layer
    counting: Any
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
            self.backward_input
            + self.backward_weight
            + self.recompute
            + self.tensor_backward
            + self.tensor_recompute
            + self.context_backward
            + self.expert_backward
            + self.expert_recompute
            + self.offload_backward
            + self.reduce_backward
        )


def layer_times(
    layer: LayerShape,
    machine: Machine,
    recompute: Recompute,
    *,
    region: RegionTimes | None = None,
    dense_sharing: Sharing | None = None,
    speeds: Mapping[str, float] | None = None,
) -> LayerTimes:
    """Return the seconds of every task of one layer.

    `region` is :func:`region_times` of the layer's width and `dense_sharing` :func:`sharing_of` dense
    weights, where the caller has them. `speeds` makes classes of kernels (`KERNELS`) so many times as fast, a
    question of what if.

    Source
    ------
    docs/derivations/step.md; kernels and collectives in their own derivations.
    """
    rank = machine.rank
    linear = linear_times(layer, machine)
    attention, attention_back = attention_times(layer, machine)
    stream, stream_back, norms, expert_act = elementwise_times(layer, machine)
    expert, expert_input, expert_weight = expert_times(layer, machine)
    adapter, adapter_back = adapter_times(layer, machine)
    memory_bound = 1.0
    if speeds:
        matmul, memory_bound = speeds.get("matmul", 1.0), speeds.get("memory_bound", 1.0)
        linear = linear.sped_up(matmul)
        of_attention, of_experts = speeds.get("attention", 1.0), speeds.get("experts", 1.0)
        adapter, adapter_back = adapter / matmul, adapter_back / matmul
        attention, attention_back = attention / of_attention, attention_back / of_attention
        streams = stream, stream_back, norms, expert_act
        stream, stream_back, norms, expert_act = (value / memory_bound for value in streams)
        products = expert, expert_input, expert_weight
        expert, expert_input, expert_weight = (value / of_experts for value in products)
    cast = cast_s(layer, machine) / memory_bound
    dense = layer.dense_params / rank.tp
    experts = layer.expert_params / np.maximum(1.0, rank.ep * rank.etp)
    accumulate = accumulate_bytes(machine, machine.traits.grads_fused)
    accumulate = stream_s(accumulate * (dense * layer.trainable + experts), machine.kernels)
    accumulate = accumulate * (1.0 - np.asarray(layer.frozen, dtype=float)) / memory_bound
    forward = linear.forward + attention + stream + expert + adapter + cast
    cast_weights = dense * layer.narrow_params + experts * (1.0 - layer.wide_experts)
    forward = forward + weight_cast_s(cast_weights, machine) / memory_bound
    # Experts have their own exchange; a dense or shared MLP is a second tensor-parallel region.
    regions = (np.asarray(layer.num_heads, dtype=float) > 0) * 1.0
    regions = regions + (np.asarray(layer.ffn + layer.shared_ffn, dtype=float) > 0)
    if region is None:
        region = region_times(layer.hidden, machine)
    tensor, tensor_back, tensor_gather = tensor_times(region, machine, linear.weight_gradient / 2.0)
    context, context_back = context_times(layer, machine, attention, attention_back)
    sent = expert_exchange_s(layer, machine)
    again = recompute
    redo = (
        again.core_attn * attention
        + again.mlp * linear.mlp
        + again.layernorm * norms
        + again.moe * expert
        + np.maximum(again.moe_act, again.moe) * expert_act
        + np.maximum(again.shared_experts, again.moe) * linear.shared
        + again.mla_up_proj * linear.latent
        + again.op * 0.5 * linear.forward  # every second product is kept
    )
    host_forward, host_backward = host_times(layer, machine, recompute)
    backward_input = linear.input_gradient + attention_back + stream_back + expert_input + adapter_back + cast
    offload_forward, offload_backward = offload_s(layer, machine, forward, backward_input)
    backward_weight = linear.weight_gradient + expert_weight + accumulate
    reduce = every_reduce_s(dense * layer.trainable, experts, machine, backward_input, dense=dense_sharing)
    # What one computation hides of others and of its pass's exchanges shows once, as the longest of them.
    waits = regions * (tensor + tensor_back) + context + context_back + offload_forward + offload_backward
    busy = forward + backward_input + backward_weight + waits + reduce
    sent_again = np.maximum(again.full, again.moe)
    computed_again = again.full * forward + (1.0 - again.full) * redo
    sent = sent * paired_exchange(sent, 2.0 + sent_again, busy + computed_again, machine)
    shown, shown_back = (beside_shared(sent, busy * linear.shared, machine) for busy in (1.0, 2.0))
    counts = (np.asarray(layer.num_experts) > 0) * (1.0 - machine.traits.prefetches)
    # One launch for all experts of a layer takes their tokens from the device; an exchange asks the host.
    counts = counts * (1.0 - machine.traits.grouped * (np.asarray(rank.ep) == 1))
    return LayerTimes(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        recompute=computed_again,
        tensor_forward=regions * tensor,
        tensor_backward=regions * tensor_back,
        # Selected operations keep what reduce-scatters bring, not what gathers do (torchtitan b5bcd76
        # distributed/activation_checkpoint.py _get_default_save_ops).
        tensor_recompute=regions * (again.full * tensor + (1.0 - again.full) * again.op * tensor_gather),
        context_forward=context,
        context_backward=context_back + np.maximum(again.full, again.core_attn) * context,
        expert_forward=shown,
        expert_backward=shown_back,
        expert_recompute=sent_again * shown,
        host_forward=host_forward,
        host_backward=host_backward,
        offload_forward=offload_forward,
        offload_backward=offload_backward,
        reduce_backward=reduce,
        counting=counts * (forward + regions * tensor + context + shown + offload_forward),
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


def head_sizes(vocab: Any, head_rows: Any, machine: Machine) -> tuple[Any, Any]:
    """Return rows and columns of the product with the head."""
    rows = np.asarray(head_rows, dtype=float)
    rows = np.where(rows > 0, machine.rank.micro_batch * rows, tokens_of(machine))
    multiple = machine.traits.vocab_multiple
    return rows, np.ceil(vocab / (multiple * machine.rank.tp)) * multiple


def accumulate_bytes(machine: Machine, fused: Any) -> Any:
    """Return the bytes that adding a weight's gradient to those of earlier micro-batches moves.

    `fused` into the product, it reads and writes the main gradient; else it reads the new one too.
    """
    traits, rank = machine.traits, machine.rank
    wide = np.where(traits.grad_bytes >= 4, machine.constants.grad_accumulate * 8.0, 4.0)
    # A copy in fp32 is written first and read again.
    moved = wide + (1.0 - fused) * 2.0 + (traits.grad_bytes >= 4) * traits.grads_widened * 8.0
    # Scattered gradients are added up in shards.
    return np.where(rank.zero >= 3, moved / rank.shard, moved)


def unaligned_s(rows: Any, columns: Any, inner: Any, machine: Machine) -> Any:
    """Return the least seconds of a product whose rows of `columns` do not begin at 16 bytes, else 0.

    Matrix units of Hopper and Blackwell load such rows by no kernel of their own: those of older devices run,
    which read one or two elements at a time and so take as many cycles on any matrix units; tf32 takes twice
    as many. Products in fp32 run on none; of other makers nothing is known.
    """
    elements = 16.0 / machine.rank.element_bytes
    columns = np.asarray(columns, dtype=float)
    narrow = (np.mod(columns, elements) > 0) * machine.traits.loads_aligned
    if not np.count_nonzero(narrow):
        return 0.0
    single = np.mod(columns, 2.0) > 0
    read = np.where(single, *_UNALIGNED) * machine.traits.sm_cycles_per_s * 2.0 / machine.rank.element_bytes
    rate = np.minimum(read, _MOST_UNALIGNED * machine.kernels.bf16_peak_flops_per_s)
    return narrow * 2.0 * rows * columns * inner / rate


def end_times(
    hidden: Any,
    vocab: Any,
    head_rows: Any,
    machine: Machine,
    *,
    frozen: Any = 0.0,
    heads: Any = 1.0,
    region: RegionTimes | None = None,
    speeds: Mapping[str, float] | None = None,
) -> EndTimes:
    """Return the seconds of the two ends of the model.

    `heads` counts outputs (1 + next-token modules); `region` is :func:`region_times` where the caller has it;
    `speeds` as of :func:`layer_times`.
    """
    rank, c = machine.rank, machine.constants
    own = own_tokens(machine)
    rows, padded = head_sizes(vocab, head_rows, machine)
    product = gemm_s(rows, padded, hidden, sustained(machine), sixteen_bit=True)
    product = np.maximum(product, unaligned_s(rows, padded, hidden, machine))
    per_logit = np.where(machine.traits.fused_loss > 0, 6.0, 14.0) * c.loss_traffic
    per_logit = np.where(machine.traits.loss_bytes > 0, machine.traits.loss_bytes, per_logit)
    loss = stream_s(rows * padded * per_logit, machine.kernels)
    lookup = stream_s(4.0 * own * hidden, machine.kernels)
    # The gradient of a table is dense: zeros are written, rows of the batch are added, all are accumulated.
    weights, fused = padded * hidden, machine.traits.grads_fused
    scattered = stream_s((2.0 + accumulate_bytes(machine, 0.0)) * weights, machine.kernels)
    summed = stream_s(accumulate_bytes(machine, fused) * weights, machine.kernels)
    if speeds:
        product = product / speeds.get("matmul", 1.0)
        memory_bound = speeds.get("memory_bound", 1.0)
        loss, lookup, scattered, summed = (one / memory_bound for one in (loss, lookup, scattered, summed))
    region = region_times(hidden, machine) if region is None else region
    gather = np.where(rank.sp > 0, region.scatter_s, region.whole_s) * c.tensor_comm
    trained = 2.0 - np.asarray(frozen, dtype=float)
    return EndTimes(
        embedding_forward=lookup,
        embedding_backward=(1.5 * lookup + scattered) * (trained - 1.0),
        head_forward=heads * (product + loss / 3.0),
        head_backward=heads * (trained * product + (trained - 1.0) * summed + loss * 2.0 / 3.0),
        embedding_tensor=2.0 * gather,
        head_tensor=2.0 * heads * gather,
    )
