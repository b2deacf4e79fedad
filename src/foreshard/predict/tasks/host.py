"""Tasks of the host: launching layers or operations, holding offloaded tensors; and the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreshard.catalog.training import TrainingConstants
from foreshard.cost.elementwise import stream_s
from foreshard.cost.memory_activations import Recompute
from foreshard.graph.shapes import LayerShape
from foreshard.predict.machine import Machine, own_tokens
from foreshard.predict.tasks.collectives import expert_replicas, shards_of
from foreshard.predict.traits import has_arm_host, launches_kernels
from foreshard.spec.device import Device

HOST_MEMORY_BYTES_PER_S = 200e9
"""Memory bandwidth of a host that its cores reach in an optimizer step; assumed, eight channels of DDR4."""


def host_times(layer: LayerShape, machine: Machine, recompute: Recompute) -> tuple[Any, Any]:
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
    # A layer of a hybrid has attention or an MLP: about half the launches.
    base = base * np.where(layer.mixers == 1.0, 0.5, 1.0)
    moe = np.asarray(layer.num_experts) > 0
    base = base + moe * c.host_moe * (1.0 - traits.dropped)
    base = base * (1.0 - np.where(traits.graphs == 0.5, c.graph_share, traits.graphs))
    # Partial graphs end where tokens leave for their experts.
    local = np.maximum(1.0, layer.num_experts / rank.ep)
    base = base + moe * (1.0 - traits.grouped) * local * c.host_expert * (traits.graphs < 1.0)
    base = base * (1.0 + traits.arm_host * (c.host_arm - 1.0))
    return base, base * (c.host_backward + recompute.full)


LAYER_OPERATIONS = (16, 28)
"""Operations that a transformer layer of eager PyTorch runs forward and backward, views not counted: those of
``torch.nn.TransformerEncoderLayer`` as it is traced. `host_eager` is of such a layer; one of a Llama by
transformers has 38 and 71."""


def operation_launch_s(constants: TrainingConstants, device: Device) -> tuple[float, float]:
    """Return host seconds that one operation of eager PyTorch takes, in forward and in backward."""
    if not launches_kernels(device):
        return 0.0, 0.0
    layer_s = constants.host_eager * (constants.host_arm if has_arm_host(device) else 1.0)
    forward, backward = LAYER_OPERATIONS
    return layer_s / forward, layer_s * constants.host_backward / backward


def joined_s(device: Any, host: Any, sharpness: float) -> Any:
    """Return the longer of the seconds of device and host, rounded where they are close."""
    longer, shorter = np.maximum(device, host), np.minimum(device, host)
    ratio = shorter / np.maximum(longer, np.finfo(float).tiny)
    return longer * (1.0 + ratio**sharpness) ** (1.0 / sharpness)


def offload_s(layer: LayerShape, machine: Machine, *busy: Any) -> tuple[Any, ...]:
    """Return what compute does not hide of moving a layer's saved activations over the host link, one way.

    One answer for each of the `busy` seconds of compute.

    Source: tensors a fused layer saves, 12 h + 2 kv + 4 or 6 f bytes a token in 16 bit; inputs of matrix
    products at the width of the product, of attention's output both (docs/derivations/memory.md).
    """
    rank = machine.rank
    if not np.count_nonzero(rank.offload_activations):
        return (0.0,) * len(busy)
    tp = np.where(rank.sp > 0, rank.tp, 1.0)
    inner = layer.ffn + layer.shared_ffn + layer.top_k * layer.expert_ffn
    inner = inner * tp / rank.tp
    inputs = (2.0 + rank.low) * layer.hidden + inner
    others = 4.0 * layer.hidden + layer.kv_width + (1.0 + layer.gated) * inner
    saved = rank.matrix_bytes * inputs + rank.element_bytes * others
    moved = own_tokens(machine) * saved / machine.traits.host_link_bytes_per_s
    return tuple(rank.offload_activations * np.maximum(moved - beside, 0.0) for beside in busy)


def optimizer_s(params: Any, expert_params: Any, num_layers: Any, machine: Machine, num_devices: Any) -> Any:
    """Return seconds of the optimizer, and of what a step does once, on a rank; `num_devices` of the plan."""
    rank, c = machine.rank, machine.constants
    dense = params / np.where(rank.zero >= 1, rank.shard, 1.0)
    experts = expert_params / np.where(rank.zero >= 1, shards_of(expert_replicas(rank), rank), 1.0)
    traits, count = machine.traits, dense + experts
    update = stream_s(traits.optimizer_bytes * count, machine.kernels)
    if np.count_nonzero(rank.offload_optimizer):
        # Gradients go to the host, its cores update, weights come back; the ranks of a node share its memory.
        sharing = np.minimum(machine.fabric.per_node, num_devices)
        link = count * (traits.grad_reduce_bytes + traits.param_bytes) / traits.host_link_bytes_per_s
        on_host = link + traits.optimizer_bytes * count * sharing / HOST_MEMORY_BYTES_PER_S
        update = np.where(rank.offload_optimizer > 0, on_host, update)
    return update + traits.once_fitted * (c.step_fixed + c.step_per_layer * num_layers)
