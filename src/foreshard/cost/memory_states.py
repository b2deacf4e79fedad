"""Bytes that stay through the step: weights, gradients, optimizer states, and what handles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from foreshard.catalog.memory_profiles import MemoryProfile
    from foreshard.cost.memory import StageLoad
    from foreshard.spec.framework import Framework
    from foreshard.spec.model import Block

FP8_WORKSPACE_BYTES = 2.0
"""Row-wise and column-wise 8-bit copy of a weight, cached over the step (TE module/linear.py)."""
FP8_FROZEN_BYTES = 1.0
"""A frozen 8-bit weight keeps its row-wise copy: adapter recipes disable the transpose cache."""
FP4_WORKSPACE_BYTES = 2 * (0.5 + 1 / 16)
"""The same in NVFP4: half a byte, and one 8-bit scale per 16 elements."""
_FOREACH_BYTES = 4.0  # square roots of all second moments at once (torch optim/adamw.py _multi_tensor_adamw)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes per rank.

    `backward_gradients` fill up over one backward and go with it. `cached` are copies of weights that a
    backward frees as it goes, `live` gathered weights beside the loss; `working` is alive in a backward only,
    these gathered weights included, `step` in the optimizer step only, `host` in the memory of the node.
    `units` are what FSDP2 gathers and reduces at a time.
    """

    parameters: Any
    gradients: Any
    backward_gradients: Any
    optimizer: Any
    buffers: Any
    cached: Any
    live: Any
    working: Any
    step: Any
    host: Any
    units: Units


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Elements of the units of a rank before sharding, and how long they stay whole.

    embedding, block, head : of the units of one embedding, of blocks, of one head; the last two are 0 where
        one unit holds the whole model
    layers, blocks, count : blocks of the rank, of a unit of them, and units of blocks
    ahead : units gathered ahead of the one at work
    sharded : 1 where weights are
    gathered : 1 where weights stay whole from their first forward on
    held : 1 where gradients stay whole until the last micro-batch of a pipeline
    whole : 1 where they do without one, in the format of their reduction, and there are several micro-batches
    matrix : elements of the largest matrix of a block
    trained : share of the elements that have a gradient
    """

    embedding: Any
    block: Any
    head: Any
    everything: Any
    layers: Any
    blocks: Any
    count: Any
    ahead: Any
    sharded: Any
    gathered: Any
    held: Any
    whole: Any
    matrix: Any
    trained: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """Parameters on the rank before data-parallel sharding."""

    dense: Any
    expert: Any
    outer: Any
    dense_trained: Any
    tables_trained: Any
    expert_trained: Any
    frozen: Any
    largest_block: Any
    largest_matrix: Any
    embedding: Any
    head: Any


def _replicated(block: Block) -> float:
    """Return what every tensor-parallel rank holds whole.

    These are norms, router, the gate of shared experts, biases of products that are split by rows, and
    projections to latents. Biases of queries, keys and values, and sinks, go with their heads.

    Source
    ------
    Megatron-LM d98e8a6 core/tensor_parallel/layers.py RowParallelLinear, core/transformer/moe/
    shared_experts.py, moe_layer.py (latent projections are duplicated), core/transformer/
    dot_product_attention.py softmax_offset; torch 2.13 distributed/tensor/parallel/style.py RowwiseParallel.
    """
    down = (block.kv_lora > 0) * block.hidden * (block.q_lora + block.kv_lora + block.rope_head_dim)
    heads = (block.kv_lora == 0) * block.qkv_bias * (block.query_width + block.kv_width)
    heads = heads * (1 + block.cross_attention)
    sinks = (block.attention_code == "sinks") * block.other_params
    other = block.attention_params - block.attention_matmul_params - heads - sinks
    rows = block.mlp_bias * block.hidden * ((block.ffn > 0) * 1 + (block.shared_ffn > 0))
    shared = block.shared_gate * block.hidden + block.latent_params
    return block.norm_total_params + block.router_params + other + down + rows + shared


def _elements(load: StageLoad) -> _Elements:
    tp = np.asarray(load.tp)
    experts_over = np.asarray(load.ep) * load.etp
    dense = expert = dense_trained = expert_trained = frozen = largest = 0.0
    matrix: Any = 0.0
    for block, count in load.kinds:
        whole = _replicated(block)
        experts = block.num_experts * block.expert_params
        split = block.num_params - block.lora_params - experts - whole
        one_dense = whole + split / tp
        one_expert = experts / experts_over if experts else 0.0
        adapters = block.lora_params / tp
        held, held_expert = count * (one_dense + adapters), count * one_expert
        dense, expert = dense + held, expert + held_expert
        if block.frozen:
            dense_trained = dense_trained + count * adapters
            frozen = frozen + count * (one_dense + one_expert)
        else:
            dense_trained, expert_trained = dense_trained + held, expert_trained + held_expert
        here = np.asarray(count) > 0
        largest = np.maximum(largest, (one_dense + one_expert) * here)
        widest = max(block.query_width, block.ffn, block.shared_ffn)
        matrix = np.maximum(matrix, widest * block.hidden / tp * here)
    table = np.asarray(load.vocab) * load.hidden / tp
    head = load.has_head * (1 - load.tied * load.has_embedding)
    outer = table * (load.has_embedding + head) + load.outer_params
    trained = table * (load.has_embedding * load.embedding_trainable + head * load.head_trainable)
    return _Elements(
        dense=dense,
        expert=expert,
        outer=outer,
        dense_trained=dense_trained + trained + load.outer_params * load.embedding_trainable,
        tables_trained=trained,
        expert_trained=expert_trained,
        frozen=frozen,
        largest_block=largest,
        largest_matrix=matrix,
        embedding=table * load.has_embedding,
        head=table * load.has_head,
    )


def _dummy_wgrad_elements(load: StageLoad) -> Any:
    """Elements of one gradient per distinct weight shape; kinds with equal shapes share them."""
    tp = np.asarray(load.tp)
    attention = mlp = shared = expert = 0.0
    for block, count in load.kinds:
        here = (np.asarray(count) > 0) * (not block.frozen)
        attention = np.maximum(attention, here * block.attention_matmul_params)
        mlp = np.maximum(mlp, here * block.mlp_params)
        shared = np.maximum(shared, here * block.shared_params)
        expert = np.maximum(expert, here * (block.num_experts > 0) * block.expert_params)
    head = load.has_head * np.asarray(load.vocab) * load.hidden * load.head_trainable
    return (attention + mlp + shared + head) / tp + expert / load.etp


def stage_states(load: StageLoad, framework: Framework, profile: MemoryProfile) -> States:
    """Return weights, gradients, optimizer states and their buffers on one rank."""
    have = _elements(load)
    zero = np.asarray(load.zero)
    shard = np.asarray(load.shard_size)
    expert_shard = np.maximum(np.asarray(load.expert_dp) * shard / load.dp, 1)

    def over(level: int) -> tuple[Any, Any]:
        split = zero >= level
        if not np.count_nonzero(split):
            return 1.0, 1.0
        return 1 / np.where(split, shard, 1), 1 / np.where(split, expert_shard, 1)

    element = load.activation_bytes_per_element
    weight = 4.0 if profile.weights_are_master else element
    block_weight = _block_weight_bytes(load, weight, framework, profile)
    spared = framework.fp8_params * load.fp8 * (FP8_WORKSPACE_BYTES - FP8_FROZEN_BYTES)
    spared = spared * (not profile.drops_transposes)
    dense3, expert3 = over(3)
    dense2, expert2 = over(2)
    dense1, expert1 = over(1)
    dense_bytes = have.dense * block_weight + have.outer * weight - have.frozen * spared
    everything = have.dense + have.outer + have.expert
    trained = have.dense_trained + have.expert_trained
    as_read = profile.eager_norm and any(block.lora_targets for block, _ in load.kinds)
    # Under peft the frozen weights have no master copy: they stay in 16 bit, as they are read.
    less = as_read * (weight - np.minimum(weight, element))
    dense_bytes = dense_bytes - less * (have.dense + have.outer - have.dense_trained)
    expert_bytes = have.expert * block_weight - less * (have.expert - have.expert_trained)
    # Weights that stay gathered and gradients that stay whole make ZeRO 2 and 3 the same.
    apart = np.maximum(shard, np.where(have.expert > 0, expert_shard, 1)) > 1
    sharded = (zero >= 2) * apart
    holds = framework.pipeline_holds_units * (zero >= 2) * (np.asarray(load.num_stages) > 1)
    kept = sharded * (zero == 2) * (profile.units or framework.fsdp == "fsdp1")
    gathers = np.maximum(holds, kept)
    dense3, expert3 = np.where(gathers, dense2, dense3), np.where(gathers, expert2, expert3)
    parameters = dense_bytes * dense3 + expert_bytes * expert3 + gathers * element * everything

    gradient = framework.grad_bytes + profile.extra_gradient_bytes * (np.asarray(load.dp) > 1)
    own = have.dense_trained * dense2 + have.expert_trained * expert2
    gradients = gradient * np.where(holds, trained, own)

    updated = have.dense_trained * dense1 + have.expert_trained * expert1
    master = framework.master_bytes * (np.asarray(element) < 4) * (not profile.weights_are_master)
    lasting = (master + load.state_bytes) * updated
    if load.table_state_bytes is not None:
        lasting = lasting + (load.table_state_bytes - load.state_bytes) * have.tables_trained * dense1
    optimizer = lasting * (1 - load.offload_optimizer)

    copied = trained if as_read else everything
    if not any(block.every_expert for block, _ in load.kinds):  # autocast knows no grouped product
        copied = copied - (have.expert_trained if as_read else have.expert)
    cached = profile.autocast_bytes * copied * (np.asarray(element) < 4)
    half = profile.backward_gradient_bytes * (framework.grad_bytes >= 4) * (zero < 3)
    num_layers = sum(np.asarray(count) for _, count in load.kinds)
    blocks = np.minimum(load.wrap, np.maximum(num_layers, 1)) if load.wrap else num_layers
    largest = everything  # of the units of embedding, blocks and head
    if load.wrap:
        largest = np.maximum(blocks * have.largest_block, np.maximum(have.embedding, have.head))
    unit = profile.unit_bytes * largest
    live = _live_bytes(have, element, profile)
    gathered = (zero >= 3) * apart * (1 - holds) * (not profile.units)
    unit_gradient = kept * (not profile.units) * max(profile.unit_bytes - 2.0, 0.0) * largest
    stated = np.asarray(load.bucket_bytes) * (profile.bucket_bytes > 0)
    bucket = np.where(stated > 0, stated, profile.bucket_bytes) * (np.asarray(load.dp) > 1)
    kept_bucket, filled = bucket, 0.0
    if profile.bucket_of_backward:
        kept_bucket = bucket * (zero >= 3)
        copied = np.minimum(bucket, element * trained)
        filled = np.where(zero >= 3, copied, bucket * (1.0 + load.grad_overlap))
    block = have.largest_block
    waiting = np.maximum(profile.queued_elements, 2 * block) + 2 * block
    queued = (profile.queued_elements > 0) * sharded * framework.grad_reduce_bytes
    queued = queued * np.minimum(trained, waiting)
    dummy = 2 * _dummy_wgrad_elements(load) if profile.dummy_wgrads else 0.0
    return States(
        parameters=parameters,
        gradients=gradients,
        backward_gradients=half * trained,
        optimizer=optimizer,
        buffers=kept_bucket + dummy,
        cached=cached,
        live=gathered * live,
        working=gathered * np.maximum(unit, live) + unit_gradient + filled + queued,
        step=_step_bytes(load, have, dense1, expert1, framework, profile),
        host=lasting * load.offload_optimizer,
        units=Units(
            # Tied matrices are one unit, which is used first and last.
            embedding=have.embedding * (1 - load.tied * load.has_head),
            block=blocks * have.largest_block,
            head=have.head,
            everything=everything,
            layers=num_layers,
            blocks=blocks,
            count=np.ceil(num_layers / np.maximum(blocks, 1)),
            ahead=load.prefetch,
            sharded=profile.units * np.maximum(sharded, holds),
            gathered=gathers,
            held=holds,
            whole=framework.accumulates_whole * (np.asarray(load.num_micro_batches) > 1) * (1 - holds),
            matrix=have.largest_matrix,
            trained=trained / np.maximum(everything, 1),
        ),
    )


def _live_bytes(have: _Elements, element: Any, profile: MemoryProfile) -> Any:
    """Return the bytes of sharded weights that are gathered at a time.

    Megatron-FSDP gathers blocks whole until enough elements are ahead of the one at work, and lets go of
    blocks only: embedding and head stay.
    """
    if not profile.prefetched_elements:
        ahead = profile.gathered_elements + have.largest_matrix * (profile.gathered_elements > 0)
        return element * np.minimum(have.dense + have.outer, ahead)
    block = np.maximum(have.largest_block, 1)
    ahead = np.ceil(np.maximum(profile.prefetched_elements, block) / block) * block
    return element * (np.minimum(have.dense + have.expert, block + ahead) + have.outer)


def _block_weight_bytes(load: StageLoad, weight: Any, framework: Framework, profile: MemoryProfile) -> Any:
    """Return the bytes of one weight of a block, with the low-precision copies that stay over the step."""
    low = load.fp8 * FP8_WORKSPACE_BYTES + load.fp4 * FP4_WORKSPACE_BYTES
    keep = 0.5 if profile.drops_transposes else 1.0
    return np.where(
        framework.fp8_params & (low > 0), keep * low, weight + low * (not profile.drops_transposes)
    )


def _step_bytes(
    load: StageLoad,
    have: _Elements,
    dense_share: Any,
    expert_share: Any,
    framework: Framework,
    profile: MemoryProfile,
) -> Any:
    """Return the temporaries of the optimizer step.

    Moments in 16 bit are cast to fp32 for all parameters of one optimizer at once, and experts have their
    own; 16-bit gradients are otherwise copied to fp32, by ZeRO 3 in parts.
    """
    dense, expert = have.dense_trained * dense_share, have.expert_trained * expert_share
    if profile.casts_moments and framework.moment_bytes < 4:
        return 8.0 * np.maximum(dense, expert)
    updated = dense + expert
    copied = updated
    if profile.step_elements:
        copied = np.where(np.asarray(load.zero) >= 3, np.minimum(updated, profile.step_elements), updated)
    two_moments = np.asarray(load.state_bytes) >= 2.0 * framework.moment_bytes
    on_device = two_moments * (1 - np.asarray(load.offload_optimizer))
    roots = _FOREACH_BYTES * (framework.update == "foreach") * updated * on_device
    return profile.step_bytes * (framework.grad_bytes < 4) * copied + roots
