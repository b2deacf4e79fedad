"""Tasks that move data between devices: of tensor, expert, context, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.comm.collectives import (
    AllReduce,
    Pipelined,
    all_gather,
    all_gather_s,
    all_reduce,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
    token_exchange_s,
)
from foreshard.cost.elementwise import stream_s
from foreshard.graph.shapes import LayerShape, RankShape
from foreshard.predict.machine import Machine, kv_share, own_tokens, tokens_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTimes:
    """Seconds of the collectives around one tensor-parallel region."""

    # gathering the operand of a matrix product, cast to the width of the product before it is sent
    operands_s: Any
    scatter_s: Any  # scattering the sum of the outputs, or gathering them: the ring of both is the same
    whole_s: Any  # summing the outputs on every rank, without sequence parallelism


def region_times(hidden: Any, machine: Machine) -> RegionTimes:
    """Return seconds of the collectives around one tensor-parallel region.

    Source: Transformer Engine 0004dbd layernorm_linear.py and base.py: inputs in forward and output gradients
    in backward are cast to 8 bit first and gathered then; sums are scattered in 16 bit. torchtitan b5bcd76
    components/quantization/float8.md: with scales per row, all communication is in 16 bit.
    """
    rank = machine.rank
    if not np.count_nonzero(np.asarray(rank.tp) > 1):
        return RegionTimes(operands_s=0.0, scatter_s=0.0, whole_s=0.0)
    elements = tokens_of(machine) * hidden
    size = rank.element_bytes * elements
    gather = all_gather(rank.tp, rank.tp_stride, machine.fabric)
    scatter = gather.time_s(size)
    operands = scatter
    if np.count_nonzero(rank.low):
        narrow = gather.time_s(rank.matrix_bytes * elements)
        operands = np.where(machine.traits.wide_operands > 0, scatter, narrow)
    whole = 0.0 if np.all(rank.sp > 0) else all_reduce_s(size, rank.tp, rank.tp_stride, machine.fabric)
    return RegionTimes(operands_s=operands, scatter_s=scatter, whole_s=whole)


def tensor_times(region: RegionTimes, machine: Machine, beside: Any) -> tuple[Any, Any, Any]:
    """Return exposed seconds of the collectives around one tensor-parallel region, forward and backward.

    Third are those of the gather in front of it alone. Forward waits for all of them. Backward gathers the
    output gradient first; the collective of the input gradient can run beside the weight-gradient product
    (`beside` seconds of it per region).

    Overlap hides collectives of sequence parallelism whose ranks reach each other's memory: those of one link
    domain.

    Source
    ------
    torch 2.13 _inductor/fx_passes/micro_pipeline_tp.py (all-gathers in front of products and reduce-scatters
    behind them, in groups with symmetric memory); torchtitan distributed/tensor_parallel.py
    maybe_enable_async_tp (compile); Transformer Engine 0004dbd userbuffers.
    """
    rank, c, traits = machine.rank, machine.constants, machine.traits
    if not np.count_nonzero(region.scatter_s):
        return 0.0, 0.0, 0.0
    split = rank.sp > 0
    gather = np.where(split, region.operands_s, 0.0) * c.tensor_comm
    last = np.where(split, region.scatter_s, region.whole_s) * c.tensor_comm
    forward = gather + last
    last = last - traits.tensor_async * np.minimum(last, beside)
    backward = gather + last
    near = rank.tp * rank.tp_stride <= machine.fabric.domain
    shown = 1.0 - traits.tp_overlap * np.where(split & near, c.tensor_hidden, 0.0)
    return forward * shown, backward * shown, gather * shown


def expert_exchange_s(layer: LayerShape, machine: Machine) -> Any:
    """Return seconds of sending tokens to their experts and back, one direction of a layer.

    Ranks that share an expert (etp) gather the tokens sent to any of them and scatter the sums.
    """
    rank, c, traits = machine.rank, machine.constants, machine.traits
    if not np.count_nonzero(layer.num_experts):
        return 0.0
    has_experts = np.asarray(layer.num_experts) > 0
    routed = (
        rank.element_bytes * layer.top_k * tokens_of(machine) / rank.tp * layer.expert_hidden * has_experts
    )
    shared: Any = 0.0
    if np.count_nonzero(np.asarray(rank.etp) > 1):
        shared = (
            2.0 * all_gather_s(routed * rank.etp, rank.etp, rank.etp_stride, machine.fabric) * c.tensor_comm
        )
    if not np.count_nonzero(np.asarray(rank.ep) > 1):
        return shared
    narrow = np.where(traits.dispatch_bytes > 0, traits.dispatch_bytes / rank.element_bytes, 1.0)
    sent = _there_and_back_s(layer, machine, routed, narrow)
    if np.count_nonzero(traits.gather_tokens):
        everyone = rank.element_bytes * own_tokens(machine) * layer.expert_hidden * rank.ep * has_experts
        gathered = 2.0 * all_gather_s(everyone, rank.ep, rank.ep_stride, machine.fabric)
        sent = np.where(traits.gather_tokens > 0, gathered, sent)
    hidden = c.expert_hidden * traits.expert_overlap * (1.0 - np.asarray(rank.paired))
    return shared + sent * c.expert_comm * (1.0 - hidden)


def _there_and_back_s(layer: LayerShape, machine: Machine, routed: Any, narrow: Any) -> Any:
    """Return seconds of sending `routed` bytes to the experts, `narrow` of them there, and all of them back.

    A deduplicating dispatcher sends each token once to a rank and a link domain, not once to an expert.
    Groups of experts, to which routing may be limited, lie in link domains of their own.
    """
    rank, fast = machine.rank, np.asarray(machine.traits.fast_dispatch) > 0
    places, both = (rank.ep, rank.ep_stride, machine.fabric), bool(np.any(narrow != 1.0))
    sent: Any = 0.0
    if not np.all(fast):
        back = all_to_all_s(routed, *places)
        sent = back + (all_to_all_s(routed * narrow, *places) if both else back)
    if not np.any(fast):
        return sent
    tokens = routed / np.maximum(layer.top_k, 1.0)
    reached = np.asarray(layer.top_groups) / np.maximum(layer.expert_groups, 1.0)
    back = token_exchange_s(tokens, layer.top_k, *places, reached=reached)
    there = token_exchange_s(tokens * narrow, layer.top_k, *places, reached=reached) if both else back
    return np.where(fast, (there + back) * machine.constants.expert_fast, sent)


def paired_exchange(sent: Any, times: Any, work: Any, machine: Machine) -> Any:
    """Return the part of a layer's exchanges that stays exposed where a forward runs beside a backward.

    Exchanges take `sent` seconds each, so many `times` in the pair: forward, backward, recomputed.
    They run beside the work of the other pass, which together with its own takes `work` seconds, waits for
    other collectives included; meanwhile they keep `dispatch_sms` processors. A pair then takes the longer of
    its exchanges, and of its work with what those processors would have done.

    Source
    ------
    DeepSeek-V3 report (arXiv 2412.19437) sections 3.2.1 and 3.2.2; DeepEP buffer.py num_sms = 20.
    """
    rank, traits = machine.rank, machine.traits
    if not np.count_nonzero(rank.paired):
        return 1.0
    share = np.minimum(traits.dispatch_sms / np.maximum(machine.kernels.num_sms, 1.0), 1.0)
    all_s = times * sent
    exposed = np.maximum(share * all_s, all_s - work)
    return np.where(rank.paired > 0, exposed / np.maximum(all_s, 1e-12), 1.0)


def beside_shared(sent: Any, busy: Any, machine: Machine) -> Any:
    """Return what `busy` seconds of shared experts leave exposed of the exchanges they run beside.

    Source
    ------
    Megatron-LM d98e8a6 core/transformer/moe/shared_experts.py: the first product runs beside dispatch, the
    second beside the combine, backward alike; it excludes overlap with other micro-batches.
    """
    traits = machine.traits
    on = traits.shared_overlap * (1.0 - traits.expert_overlap) * (1.0 - np.asarray(machine.rank.paired))
    if not np.count_nonzero(on):
        return sent
    exposed = np.maximum(contention(machine) * np.minimum(busy, sent), sent - busy)
    return np.where(on > 0, exposed, sent)


def context_times(layer: LayerShape, machine: Machine, attention: Any, backward: Any) -> tuple[Any, Any]:
    """Return what attention leaves exposed of moving keys and values over cp ranks, forward and backward.

    A ring passes them on behind the attention of the previous block; a gather brings all of them first.
    Backward moves their gradients as well.
    """
    rank = machine.rank
    if not np.count_nonzero(np.asarray(rank.cp) > 1):
        return 0.0, 0.0
    tokens = tokens_of(machine)
    block = rank.element_bytes * tokens * layer.kv_width * kv_share(layer, machine)
    steps = rank.cp - 1.0
    crosses = rank.cp * rank.cp_stride > machine.fabric.domain
    ring = steps * send_s(block, crosses, machine.fabric)
    hidden = steps / rank.cp
    forward = np.maximum(ring - attention * hidden, 0.0)
    back = np.maximum(2.0 * ring - backward * hidden, 0.0)
    if not np.count_nonzero(machine.traits.context_gather):
        return forward, back
    gather = all_gather_s(block * rank.cp, rank.cp, rank.cp_stride, machine.fabric)
    scatter = reduce_scatter_s(block * rank.cp, rank.cp, rank.cp_stride, machine.fabric)
    whole = machine.traits.context_gather > 0
    return np.where(whole, gather, forward), np.where(whole, gather + scatter, back)


def message_s(hidden: Any, crosses_node: Any, machine: Machine) -> Any:
    """Return seconds of one stage's output, or its gradient, to the next stage, one micro-batch.

    Without sequence parallelism, ranks that each send their part gather the whole on arrival. DeepSpeed also
    gathers a stage's own output again before its backward: three gathers for two messages.

    Source
    ------
    Narayanan et al. SC21, section 4.1; deepspeed/runtime/pipe/engine.py 5fe9d61, _exec_forward_pass and
    _exec_backward_pass (PartitionedTensor.full).
    """
    rank, traits = machine.rank, machine.traits
    scattered = (traits.p2p_scatter > 0) & (rank.sp <= 0)
    parts = np.where((rank.sp > 0) | scattered, rank.tp, 1.0)
    whole = rank.element_bytes * rank.micro_batch * rank.seq_len / rank.cp * hidden
    sent = send_s(whole / parts, crosses_node, machine.link) * machine.constants.pipeline_comm
    if not np.count_nonzero(scattered):
        return sent
    gather = all_gather_s(whole, rank.tp, 1.0, machine.fabric) * machine.constants.tensor_comm
    return sent + np.where(scattered, (1.0 + 0.5 * traits.p2p_in_turn) * gather, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """Seconds of the fully sharded tasks of one layer: gather weights, scatter gradients, copy both."""

    gather: Any
    scatter: Any
    copy_weights: Any  # on the compute stream, once per gather
    copy_gradients: Any
    add_gradients: Any  # to whole ones of other micro-batches, on the compute stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The collectives over the ranks that share one kind of weights, dense or experts."""

    shard: Any  # ranks over which the weights are cut
    cut: Pipelined  # gathers weights, or scatters gradients, over them
    # reduces a shard over its copies inside the group of the plan, None where there are none
    replicas: AllReduce | None

    def gather_s(self, params: Any, machine: Machine) -> Any:
        """Return seconds of gathering weights."""
        return self.cut.time_s(machine.traits.param_bytes * params) * machine.constants.data_comm

    def scatter_s(self, params: Any, machine: Machine) -> Any:
        """Return seconds of scattering gradients, and of reducing the shards over their copies."""
        grads = machine.traits.grad_reduce_bytes * params
        moved = self.cut.time_s(grads)
        if self.replicas is not None:
            moved = moved + self.replicas.time_s(grads / self.shard)
        return moved * machine.constants.data_comm


def sharing_of(machine: Machine, *, experts: bool = False) -> Sharing:
    """Return how the dense weights, or the experts, of a rank are shared."""
    rank = machine.rank
    alike = expert_replicas(rank) if experts else rank.dp * rank.cp
    shard = shards_of(alike, rank) if experts else rank.shard
    stride = rank.own_expert_stride if experts else rank.own_stride
    copies = np.maximum(1.0, alike / rank.copies / shard)
    replicas = None
    if np.count_nonzero(copies > 1.0):
        replicas = all_reduce(copies, stride * shard, machine.fabric)
    return Sharing(shard=shard, cut=all_gather(shard, stride, machine.fabric), replicas=replicas)


def shard_times(
    params: Any,
    experts: Any,
    machine: Machine,
    *,
    dense: Sharing | None = None,
    trained: tuple[Any, Any] | None = None,
) -> ShardTimes:
    """Return the tasks of keeping the weights of this rank sharded (ZeRO 3, FSDP).

    Experts are cut over the ranks that hold the same ones. Replicas of a shard inside the group of the plan
    are reduced with it; other groups once a step (:func:`across_groups_s`). `dense` is :func:`sharing_of`
    where the caller has it, `trained` the parameters of both kinds that are trained, where not all are.
    """
    of_dense, of_experts = trained or (params, experts)
    times = _shard_times(params, of_dense, dense or sharing_of(machine), machine)
    if not np.count_nonzero(experts):
        return times
    more = _shard_times(experts, of_experts, sharing_of(machine, experts=True), machine)
    names = ShardTimes.__slots__
    return ShardTimes(**{name: getattr(times, name) + getattr(more, name) for name in names})


def _shard_times(params: Any, trained: Any, sharing: Sharing, machine: Machine) -> ShardTimes:
    """Return the sharded tasks of one kind of weights.

    FSDP2 casts a shard into one flat buffer and copies that into the gathered one, beside the computation;
    what has arrived is copied out into the weights, and gradients into a flat buffer that is scattered. On
    one rank weights are cast and copied in line, and gradients copied once more beside the computation.
    Frozen weights are in the width of the products already. Others hold the weights of one rank whole and in
    place.

    Source
    ------
    torch 2.13 distributed/fsdp/_fully_shard: _fsdp_collectives.py (_get_param_all_gather_inputs,
    all_gather_copy_in, split_with_sizes_copy, chunk_cat, foreach_reduce), _fsdp_param_group.py
    wait_for_unshard.
    """
    traits, kernels = machine.traits, machine.kernels
    is_cut = np.asarray(sharing.shard) > 1
    flat = np.asarray(traits.flat_copies) > 0
    gather, scatter = sharing.gather_s(params, machine), sharing.scatter_s(params, machine)
    moved = 2.0 * traits.param_bytes * params
    weights = moved * is_cut
    if np.count_nonzero(flat):
        cast = moved + np.where(traits.param_bytes < 4.0, 4.0 + traits.param_bytes, 0.0) * trained
        weights = np.where(is_cut | ~flat, weights, cast)
        gather = gather + stream_s(cast / sharing.shard, kernels) * (is_cut & flat)
        scatter = scatter + stream_s(2.0 * traits.grad_reduce_bytes * params, kernels) * (~is_cut & flat)
    return ShardTimes(
        gather=gather,
        scatter=scatter,
        copy_weights=stream_s(weights, kernels),
        copy_gradients=stream_s((2.0 + traits.grad_reduce_bytes) * params, kernels) * (is_cut | flat),
        add_gradients=stream_s(3.0 * traits.grad_reduce_bytes * params, kernels),
    )


def has_replicas(rank: RankShape) -> Any:
    """Return whether another rank holds the same weights: what copies of sharded ones are there for."""
    return (np.asarray(rank.dp) * rank.cp > 1) | (expert_replicas(rank) > 1)


def accumulates_whole(machine: Machine) -> Any:
    """Return whether micro-batches add to whole gradients of sharded weights, which the last one reduces.

    One rank has none to reduce them with.

    Source
    ------
    transformers 5.24 trainer.py (no_sync but for the last micro-batch); accelerate 1.11 accelerator.py
    no_sync (set_requires_gradient_sync; 1.10 reduced every micro-batch); torch 2.13 distributed/fsdp/
    _fully_shard/_fsdp_param_group.py post_backward.
    """
    rank = machine.rank
    return (np.asarray(machine.traits.accumulates_whole) > 0) & (rank.zero >= 3) & has_replicas(rank)


def held_copies_s(params: Any, experts: Any, machine: Machine) -> Any:
    """Return seconds of copying units that a pipeline holds out of flat buffers and in, once a step.

    Gradients have accumulated in the format of their reduction by then.
    """
    traits = machine.traits
    if not np.count_nonzero(traits.holds_units):
        return 0.0
    held = np.asarray(traits.holds_units * traits.flat_copies)
    num_bytes = 2.0 * traits.param_bytes + 2.0 * traits.grad_reduce_bytes
    return stream_s(held * num_bytes * (params + experts), machine.kernels)


def contention(machine: Machine) -> Any:
    """Return how much a second of collectives slows the compute it runs beside."""
    return machine.constants.fsdp_contention * (1.0 - machine.traits.static)


def slowed_s(moved: Any, busy: Any, machine: Machine) -> Any:
    """Return what `moved` seconds of collectives add to `busy` seconds of compute that runs beside them."""
    return contention(machine) * np.minimum(busy, moved) * (machine.traits.grad_overlap > 0)


def beside_s(moved: Any, busy: Any, machine: Machine) -> Any:
    """Return what `moved` seconds of collectives add to a step: waiting, or compute that they slow."""
    overlapped = np.maximum(slowed_s(moved, busy, machine), moved - busy)
    return np.where(machine.traits.grad_overlap > 0, overlapped, moved)


def across_groups_s(params: Any, experts: Any, machine: Machine) -> Any:
    """Return seconds of summing sharded gradients over the groups of a plan, once a step (ZeRO 2 and 3)."""
    rank = machine.rank
    once = (rank.zero >= 2) & (np.asarray(rank.copies) > 1)
    if not np.count_nonzero(once):
        return 0.0
    total: Any = 0.0
    alike = expert_replicas(rank)
    for held, ranks, stride in (
        (params, rank.dp * rank.cp, rank.sync_stride),
        (experts, alike, rank.expert_stride),
    ):
        if np.count_nonzero(held):
            grads = machine.traits.grad_reduce_bytes * held / shards_of(ranks, rank)
            own = np.maximum(1.0, ranks / rank.copies)
            total = total + all_reduce_s(grads, rank.copies, stride * own, machine.sync)
    return np.where(once, total, 0.0) * machine.constants.data_comm


def sync_times(params: Any, ranks: Any, stride: Any, own_stride: Any, machine: Machine) -> tuple[Any, Any]:
    """Return seconds of reducing gradients over replicas, and of gathering updated weights after.

    `params` are the trained parameters of this rank; `ranks` and `stride` its replicas and their distance in
    cluster order, `own_stride` that inside the own group of the plan.

    Source
    ------
    ZeRO 1 scatters inside the shard group and reduces the shards across groups; ZeRO 0 all-reduces, as with
    shards of one rank; ZeRO 2 has reduced already, after every micro-batch. DeepSpeed all-reduces buckets,
    twice the bytes (use_multi_rank_bucket_allreduce, runtime/zero/config.py edaa722).
    """
    rank, traits = machine.rank, machine.traits
    factor = machine.constants.data_comm
    grads = traits.grad_reduce_bytes * params
    shard = np.where(rank.zero >= 1, shards_of(ranks, rank), 1.0)
    across = all_reduce_s(grads / shard, ranks / shard, stride * shard, machine.sync)
    cut = all_gather(shard, own_stride, machine.fabric)
    reduce = (cut.time_s(grads) * (1.0 + traits.reduce_whole) + across) * factor
    return np.where(rank.zero == 2, 0.0, reduce), cut.time_s(traits.param_bytes * params) * factor


def gradient_sync_s(params: Any, expert_params: Any, machine: Machine) -> tuple[Any, Any]:
    """Return seconds of reducing a rank's gradients, dense and expert, and of gathering its updated weights.

    `params` and `expert_params` are trained parameters of a rank: of a stage, or of each of its buckets.
    """
    rank = machine.rank
    reduce, gather = np.zeros((2, *np.shape(params)))
    for held, ranks, stride, own in (
        (params, rank.dp * rank.cp, rank.sync_stride, rank.own_stride),
        (expert_params, expert_replicas(rank), rank.expert_stride, rank.own_expert_stride),
    ):
        if np.count_nonzero(held):
            more = sync_times(held, ranks, stride, own, machine)
            reduce, gather = reduce + more[0], gather + more[1]
    return reduce, gather


def bucket_elements(own: Any, replicas: Any, first: Any) -> Any:
    """Return the elements after which a bucket leaves.

    Megatron has small ones only on the first stage's first chunk and with overlap_grad_reduce
    (megatron/training/training.py, ddp_config).
    """
    small = np.where(first, np.maximum(40e6, 1e6 * replicas), np.inf)
    return np.where(np.asarray(own) > 0.0, own, small)


def expert_replicas(rank: RankShape) -> Any:
    """Return how many ranks hold the same experts."""
    return np.maximum(1.0, rank.tp * rank.dp * rank.cp / (rank.ep * rank.etp))


def shards_of(replicas: Any, rank: RankShape) -> Any:
    """Return over how many of its replicas a state is cut: those that share one shard group of the plan."""
    return np.maximum(1.0, replicas * rank.shard / (rank.dp * rank.cp))


def tied_sync_s(hidden: Any, vocab: Any, crosses_node: Any, machine: Machine) -> Any:
    """Return seconds of summing a tied table's gradient over the first and the last stage."""
    table = machine.traits.grad_bytes * hidden * vocab / machine.rank.tp
    stride = machine.link.domain * crosses_node + machine.rank.tp
    return all_reduce_s(table, 2.0, stride, machine.link)


def every_reduce_s(
    params: Any, experts: Any, machine: Machine, busy: Any, *, dense: Sharing | None = None
) -> Any:
    """Return what backward does not hide of reducing gradients after every micro-batch (ZeRO 2).

    `busy` seconds of backward run beside the reduction of a layer, or of a table.
    """
    rank = machine.rank
    each = rank.zero == 2
    if not np.count_nonzero(each):
        return 0.0
    moved = (dense or sharing_of(machine)).scatter_s(params, machine)
    if np.count_nonzero(experts):
        moved = moved + sharing_of(machine, experts=True).scatter_s(experts, machine)
    moved = moved * (1.0 + machine.traits.reduce_whole)
    return np.where(each, beside_s(moved, busy, machine), 0.0)
