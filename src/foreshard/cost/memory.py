"""Peak bytes of one rank of a stage: weights, gradients, optimizer states, activations, temporaries.

Everything is arithmetic over rows (one row = one plan and stage), so a thousand plans cost what one does.
The terms are derived in docs/derivations/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard.catalog.memory_profiles import MemoryProfile, profile_of
from foreshard.cost.memory_activations import NO_RECOMPUTE, Activations, Recompute, stage_activations
from foreshard.cost.memory_states import States, stage_states
from foreshard.cost.memory_units import Moment, unit_moments

if TYPE_CHECKING:
    from foreshard.spec.framework import Framework
    from foreshard.spec.model import Block

MAX_ALL_TO_ALL_PEERS = 7
CHANNELS = 24
PAIR_FIFO_BYTES = 12 * 2**20
SHARED_POOL_BYTES = 16 * 512 * 2**10
"""Of one communicator: FIFO of a channel to and from one neighbour; pool of one send/receive channel.

NCCL 2.30 transport/p2p.cc; 24 channels on A100 give the 544 MiB of two ranks and 688 MiB of more measured in
nccl#964, a rank of more than two having a neighbour and a half.
"""
ALL_TO_ALL_PAIR_BYTES = 32 * 12 * 2**20
"""Send and receive FIFO of one peer: 32 channels of 12 MiB (NCCL 2.30 transport/p2p.cc; nccl#1685)."""

DEEPEP_NODE = 8
DEEPEP_TOKEN_BYTES = 128 * (8 + 4 + 4) + 8
DEEPEP_RDMA_TOKENS = 128
DEEPEP_TOKENS = ((8, 256), (64, 288), (128, 560))
"""Of DeepEP: ranks of a node, what it keeps of a token beside its elements, tokens of a channel and peer to
and from the network, and those inside a node by ranks up to which they hold, then 720.

deepseek-ai/DeepEP 030cdf0 csrc/config.hpp get_nvl_buffer_size_hint, get_rdma_buffer_size_hint; 04b06f7
deep_ep/buffer.py get_dispatch_config, half as many channels as processors.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """What one rank of a stage holds and does; every numeric field is a float or an array over rows.

    kinds : block kinds with the number of their layers on the rank, all chunks together
    vocab : rows of the embedding, padded as the framework pads them
    in_flight : micro-batches whose activations each layer holds at the peak (fractional when interleaved)
    micro_batch : samples per micro-batch on one data-parallel rank
    dp : ranks over which dense states are replicated or sharded (context-parallel ranks included)
    expert_dp : the same for experts
    shard_size : ranks that share one copy of the sharded states, at most dp
    num_stages : pipeline stages, where known
    channels : NCCL channels of a collective between the devices
    grad_overlap : gradients are reduced beside the backward
    tp_overlap : collectives of tensor parallelism run beside products, from buffers of their own
    bucket_bytes : stated size of a gradient bucket, 0 for the framework's
    prefetch, wrap : units of FSDP gathered ahead, and blocks of a unit, 0 for the whole model
    state_bytes : optimizer moments per parameter, see `optimizer_state_bytes`
    activation_bytes_per_element : 2 in 16 bit and below, 4 in fp32
    fp8, fp4 : matrix products run in 8 or 4 bit
    unfused : attention runs as separate kernels, whose scores are kept; None where the framework says so
    """

    kinds: tuple[tuple[Block, Any], ...]
    has_embedding: Any
    has_head: Any
    hidden: Any
    vocab: Any
    tied: Any = 0
    in_flight: Any = 1
    num_micro_batches: Any = 1
    num_stages: Any = 1
    channels: Any = CHANNELS
    micro_batch: Any = 1
    seq_len: Any
    tp: Any = 1
    cp: Any = 1
    ep: Any = 1
    etp: Any = 1
    dp: Any = 1
    expert_dp: Any = 1
    shard_size: Any = 1
    zero: Any = 1
    sp: Any = 0
    activation_bytes_per_element: Any = 2
    fp8: Any = 0
    fp4: Any = 0
    unfused: Any = None
    recompute: Recompute = field(default_factory=lambda: NO_RECOMPUTE)
    offload_optimizer: Any = 0
    offload_activations: Any = 0
    grad_overlap: Any = 0
    tp_overlap: Any = 0
    bucket_bytes: Any = 0
    prefetch: float = 1.0
    wrap: float = 1.0
    state_bytes: Any = 8
    table_state_bytes: Any = None
    """Of embedding and head where they have others, see `table_state_bytes`."""
    outer_params: Any = 0
    """Parameters of embedding and head beyond their matrices (positions, norms)."""
    embedding_trainable: Any = 1
    head_trainable: Any = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes at the peak of each row; the parts sum to `peak`, all but `reserved` to `allocated`."""

    parameters: Any
    gradients: Any
    optimizer: Any
    activations: Any
    temporary: Any
    comm_buffers: Any
    reserved: Any
    outside: Any
    """Part of `reserved` that the caching allocator does not hold: device context and NCCL buffers."""
    host: Any = 0.0
    """Bytes of the rank in the memory of its node, no part of `peak`."""

    @property
    def allocated(self) -> Any:
        """Bytes of live tensors, as torch.cuda.max_memory_allocated reports them."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.temporary + self.comm_buffers

    @property
    def peak(self) -> Any:
        """Bytes the device has given away, as nvidia-smi reports them."""
        return self.allocated + self.reserved

    @property
    def cached(self) -> Any:
        """Bytes the caching allocator holds, as torch.cuda.max_memory_reserved reports them."""
        return self.peak - self.outside


def optimizer_state_bytes(optimizer: str, moment_bytes: float = 4.0) -> float:
    """Return the bytes of optimizer moments per parameter; the master weight is not among them.

    Source
    ------
    AdamW keeps two moments, Muon (of matrices) and Lion one; bitsandbytes' 8-bit Adam keeps two bytes and
    two fp32 scales per block of 256 (bitsandbytes optim/optimizer.py); Adafactor without momentum keeps a row
    and a column per matrix, less than 1 % of a byte; SGD keeps one momentum.
    """
    return {
        "adamw": 2 * moment_bytes,
        "adamw-8bit": 2 + 2 * 4 / 256,
        "adafactor": 0.01,
        "muon": moment_bytes,
        "lion": moment_bytes,
        "sgd": moment_bytes,
    }[optimizer]


def table_state_bytes(optimizer: str, moment_bytes: float = 4.0) -> float:
    """Return the same of embedding and head, which Muon leaves to AdamW.

    Source
    ------
    Megatron-LM d98e8a6 core/optimizer/layer_wise_optimizer.py is_managed_by_layer_wise_optimizer,
    --muon-scalar-optimizer adam; norms and biases too, which are too few to count.
    """
    return optimizer_state_bytes("adamw" if optimizer == "muon" else optimizer, moment_bytes)


def stage_memory(load: StageLoad, framework: Framework, profile: MemoryProfile | None = None) -> MemoryParts:
    """Return the peak bytes of a rank, by part.

    The peak is the largest of three moments: the start of the first backward of the fullest pipeline (all
    activations, no lazy gradients), the end of a backward (one micro-batch less, all gradients), and the
    optimizer step.

    Source
    ------
    docs/derivations/memory.md; validated in tests/validation/test_memory.py.
    """
    profile = profile or profile_of(framework)
    states, acts = stage_states(load, framework, profile), stage_activations(load, framework, profile)
    moments, totals, fullest = _moments(load, framework, profile, states, acts)
    gradients, saved, temporary = (
        np.select([total >= fullest for total in totals], [part + 0.0 * fullest for part in parts])
        for parts in zip(*moments, strict=True)
    )
    buffers = states.buffers + acts.gathered
    allocated = states.parameters + states.optimizer + buffers + fullest
    outside = _outside_bytes(load, framework, profile)
    whole = np.zeros_like(fullest)
    return MemoryParts(
        parameters=states.parameters + whole,
        gradients=gradients,
        optimizer=states.optimizer + whole,
        activations=saved,
        temporary=temporary,
        comm_buffers=buffers + whole,
        reserved=profile.slack * allocated + outside,
        outside=outside + whole,
        host=states.host + acts.host + whole,
    )


def peaks_in_flight(load: StageLoad, framework: Framework, in_flight: Iterable[Any]) -> Iterator[Any]:
    """Yield the peak of :func:`stage_memory` with each number of micro-batches in flight."""
    profile = profile_of(framework)
    states, outside = stage_states(load, framework, profile), _outside_bytes(load, framework, profile)
    lasting = states.parameters + states.optimizer + states.buffers
    for flying in in_flight:
        held = replace(load, in_flight=flying)
        acts = stage_activations(held, framework, profile)
        _, _, fullest = _moments(held, framework, profile, states, acts)
        yield (1.0 + profile.slack) * (lasting + acts.gathered + fullest) + outside


def _moments(
    load: StageLoad, framework: Framework, profile: MemoryProfile, states: States, acts: Activations
) -> tuple[tuple[Moment, ...], list[Any], Any]:
    """Return gradients, activations and temporaries of each moment, their sums, the largest sum."""
    lazy = profile.lazy_gradients * (np.asarray(load.num_micro_batches) <= 1)
    working = states.working + acts.temporary
    first = states.gradients * (1 - lazy)
    every = states.gradients + states.backward_gradients
    others = np.minimum(acts.saved, acts.saved * (1 - 1 / np.maximum(load.in_flight, 1)) + acts.one_layer)
    moments: tuple[Moment, ...] = (
        (first, acts.saved, states.cached + np.maximum(working, states.live + acts.logits)),
        (every, others, working),
        (states.gradients, 0.0, states.step),
    )
    if profile.units:
        alone = states.units.sharded < 1
        plain = tuple(tuple(part * alone for part in moment) for moment in moments)
        moments = (*plain, *unit_moments(load, framework, profile, states, acts))
    totals = [gradients + saved + temporary for gradients, saved, temporary in moments]
    return moments, totals, reduce(np.maximum, totals)


def _outside_bytes(load: StageLoad, framework: Framework, profile: MemoryProfile) -> Any:
    """Return context, NCCL buffers and userbuffers."""
    peers = np.minimum(np.asarray(load.ep) - 1, MAX_ALL_TO_ALL_PEERS)
    if framework.dispatcher == "deepep":
        exchange = deepep_bytes(load, framework)
    elif framework.dispatcher == "hybridep":
        exchange = hybridep_bytes(load)
    elif framework.dispatcher == "allgather":
        exchange = communicators_bytes([(1.0, np.asarray(load.ep) * load.etp)], load.channels)
    else:
        exchange = ALL_TO_ALL_PAIR_BYTES * peers
    buffers = _communicators_bytes(load, profile) + exchange
    return profile.context_bytes + buffers + _userbuffer_bytes(load)


def deepep_bytes(load: StageLoad, framework: Framework) -> Any:
    """Return the buffers of DeepEP for tokens in 16 bit: from ranks of the node, and of other nodes."""
    ranks = np.asarray(load.ep, dtype=float)
    hidden = 2.0 * np.asarray(load.hidden) + DEEPEP_TOKEN_BYTES
    tokens = np.select(
        [ranks <= up_to for up_to, _ in DEEPEP_TOKENS], [held for _, held in DEEPEP_TOKENS], 720
    )
    near = np.minimum(ranks, DEEPEP_NODE) * tokens
    far = np.where(ranks > DEEPEP_NODE, 2.0 * ranks / DEEPEP_NODE * DEEPEP_RDMA_TOKENS, 0.0)
    return (ranks > 1) * framework.dispatch_sms / 2 * (near + far) * hidden


def hybridep_bytes(load: StageLoad) -> Any:
    """Return the buffer of HybridEP inside a link domain, which has room for all tokens of its group.

    A token comes with a probability for each expert of the domain and a scale of each 128 channels. Dispatch
    and combine share it. What waits for other domains is left out: a quarter of it for 8 domains of 8.

    Source
    ------
    deepseek-ai/DeepEP 2540b8a (branch hybrid-ep) csrc/hybrid_ep/buffer/intranode.cu; Megatron-LM d98e8a6
    core/transformer/moe/fused_a2a.py init_hybrid_ep_buffer (tokens of a rank, 16 bit).
    """
    ranks = np.asarray(load.ep, dtype=float) * load.etp
    tokens = np.asarray(load.micro_batch) * load.seq_len / load.cp / load.tp * ranks
    most = 0.0
    for block, count in load.kinds:
        experts = block.num_experts / np.asarray(load.ep, dtype=float) * np.minimum(ranks, DEEPEP_NODE)
        hidden = block.expert_hidden or block.hidden
        token = 2.0 * hidden + 4.0 * experts + 4.0 * hidden / 128
        most = np.maximum(most, token * (block.num_experts > 0) * (np.asarray(count) > 0))
    return (ranks > 1) * tokens * most


def communicators_bytes(sizes: Iterable[tuple[float, Any]], channels: Any = CHANNELS) -> Any:
    """Return the device bytes of `count` communicators of each number of ranks; nothing for a single rank.

    From three ranks on, a rank has half a neighbour more.

    Examples
    --------
    >>> [float(communicators_bytes([(1, ranks)])) / 2**20 for ranks in (1, 2, 4)]
    [0.0, 544.0, 688.0]
    """
    some: Any = 0.0
    wide: Any = 0.0
    for count, size in sizes:
        ranks = np.asarray(size)
        some = some + count * (ranks > 1)
        wide = wide + count * (ranks > 2)
    pool = 2.0 ** np.ceil(np.log2(channels)) * SHARED_POOL_BYTES
    fifos = channels * PAIR_FIFO_BYTES
    return some * (fifos + pool) + wide * (0.5 * fifos)


def _communicators_bytes(load: StageLoad, profile: MemoryProfile) -> Any:
    """Return the bytes of a rank's communicators: one per degree in use, and what the profile adds."""
    split = 1 - np.asarray(load.has_embedding) * load.has_head
    stages = np.maximum(load.num_stages, 1 + split)
    replica = load.tp * stages
    sizes: list[tuple[float, Any]] = [(1.0, load.tp), (1.0, load.dp), (1.0, load.cp), (1.0, stages)]
    if profile.world_communicator:
        sizes.append((1.0, replica * load.dp))
    if profile.pair_communicators:
        sizes += [(2.0, np.minimum(stages, 2.0)), (1.0, replica)]
    return communicators_bytes(sizes, load.channels)


def _userbuffer_bytes(load: StageLoad) -> Any:
    """Return the buffers of tensor-parallel overlap: 8 gathers in the product's dtype, 4 scatters in 16 bit.

    Source
    ------
    TransformerEngine d0067d0 module/base.py initialize_ub: 12 buffers of (sequence x micro-batch x hidden).
    """
    elements = np.asarray(load.micro_batch) * load.seq_len / load.cp * load.hidden
    used = (np.asarray(load.tp) > 1) * load.sp * load.tp_overlap
    return used * elements * (4 * 2 + 8 * (2 - np.maximum(load.fp8, load.fp4)))
