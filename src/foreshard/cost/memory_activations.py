"""Bytes that the forward saves for the backward, what recompute keeps of them, and the peaks beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard.spec.block import WIDE_GROUPS
from foreshard.spec.plan import check_recompute

if TYPE_CHECKING:
    from foreshard.catalog.memory_profiles import MemoryProfile
    from foreshard.cost.memory import StageLoad
    from foreshard.spec.framework import Framework
    from foreshard.spec.model import Block

LOGIT_BYTES = {"te": 4.0, "native": 6.0, "unfused": 6.0, "eager": 14.0, "torch": 12.0, "chunked": 14.0 / 8}
"""Peak bytes per element of the logits, by cross-entropy path (docs/derivations/memory.md, logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """A recompute rule in numbers; every field is a float or an array over rows.

    full : share of the layers that keep only their input
    unit : layers per recomputed unit, which keeps one input
    the others : 0/1, that module is recomputed
    """

    full: Any = 0.0
    unit: Any = 1.0
    core_attn: Any = 0.0
    mlp: Any = 0.0
    layernorm: Any = 0.0
    moe: Any = 0.0
    moe_act: Any = 0.0
    shared_experts: Any = 0.0
    mla_up_proj: Any = 0.0
    op: Any = 0.0


NO_RECOMPUTE = Recompute()


@lru_cache(maxsize=1024)
def recompute_of(text: str, num_layers: int) -> Recompute:
    """Return the numbers of a recompute rule as a plan writes it.

    `num_layers` are the blocks of one chunk of the stage: `block:N` and `every-N` count in it.
    """
    text = check_recompute(text)
    head, _, rest = text.partition(":")
    layers = max(num_layers, 1)
    if head == "none":
        return NO_RECOMPUTE
    if head.startswith("every-"):
        return Recompute(full=(layers // int(head[6:])) / layers)
    if head == "selective":
        return Recompute(**{module: 1.0 for module in rest.split("+")})
    kind, _, count = rest.partition(":")
    if kind == "block":
        return Recompute(full=min(int(count), layers) / layers)
    return Recompute(full=1.0, unit=min(float(count or 1), layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes per rank: saved over all layers in flight, one layer's, and the peaks of backward and loss.

    host : saved bytes in the memory of the node instead
    gathered : tokens of all ranks that a gathering dispatcher brings into a buffer that stays
    boundary : a hidden state of a micro-batch, as layers and stages pass it on
    logit_gradient : gradient of the logits as the head's product takes it
    """

    saved: Any
    one_layer: Any
    temporary: Any
    logits: Any
    boundary: Any
    logit_gradient: Any
    host: Any
    gathered: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Tokens of a micro-batch on the rank: `norm` where sequence-parallel, `split` inside tensor-parallel."""

    norm: Any
    split: Any
    element: Any
    gemm_input: Any
    low: Any


def _tokens(load: StageLoad, wide: bool = False) -> _Tokens:
    """Return the tokens of a layer; `wide` where all of its products stay in 16 bit."""
    tokens = np.asarray(load.micro_batch) * load.seq_len / load.cp
    element = load.activation_bytes_per_element
    fp8, fp4 = load.fp8 * (not wide), load.fp4 * (not wide)
    return _Tokens(
        norm=tokens / (1 + load.sp * (np.asarray(load.tp) - 1)),
        split=tokens / load.tp,
        element=element,
        gemm_input=element - fp8 * (element - 1) - fp4 * (element - 0.5625),
        low=np.maximum(fp8, fp4),
    )


def _drops(block: Block, profile: MemoryProfile) -> bool:
    return block.dropout > 0 or profile.default_dropout


def _attention_saved(
    block: Block, n: _Tokens, load: StageLoad, unfused: Any, profile: MemoryProfile
) -> tuple[Any, Any]:
    """Return what attention saves beyond its norm, and what recomputing its core saves of it."""
    out = block.num_heads * block.value_head_dim
    output = n.element * out
    if not block.frozen:
        output = output + n.low * n.gemm_input * out
    if profile.attention_output_bytes:
        output = np.where(n.low > 0, profile.attention_output_bytes * out, output)
    keep = n.element * (block.query_width + block.kv_width) + output
    turned = block.query_width + block.num_kv_heads * block.head_dim
    if profile.eager_norm:
        keep = keep + unfused * _copied_heads(block, n, turned, load, profile)
    if block.qk_norm:  # their norms read queries and keys, under autocast in 32 bit where they were turned
        wide = block.norm_place == "turned" and block.rotary > 0
        keep = keep + _norm_input(block, n, profile, wide=wide) * turned
    fused = np.where(unfused, 0.0, 1.0)
    masked = fused * profile.masked * (block.window > 0) * (np.asarray(load.seq_len) >= block.window)
    if profile.eager_norm:  # beside a mask, and traced as with one, keys and values go to every head
        copied = fused if profile.compiled else masked
        keep = keep + n.element * copied * (_every_head(block) - block.kv_width)
        if block.rotary and block.attention_code != "math":
            # Values keep the product that they are cut from; heads that were joined anew are copied behind.
            viewed = block.fused_projections * (1.0 - copied * (block.num_kv_heads < block.num_heads))
            joined = block.rotary < 1 or (block.fused_projections and not profile.compiled)
            keep = keep + n.element * (viewed * turned + joined * out)
    if "o" in block.lora_targets and not profile.compiled:  # cast for the adapter, as in `_norms_saved`
        keep = keep + _adapts(block, n, profile) * n.element * out
    if profile.packed_queries and block.num_kv_heads == block.num_heads:
        keep = keep + n.element * block.kv_width
    score = _score_bytes(block, n, profile)
    core = np.where(unfused, block.num_heads * load.seq_len * score, 4 * block.num_heads)
    core = core * (1 + block.cross_attention)
    saved = n.split * (keep * (1 + block.cross_attention) + core)
    if not profile.compiled:  # what torch makes of a mask, to add it to scores
        saved = saved + masked * n.element * load.micro_batch * load.seq_len * load.seq_len
    if block.kv_lora:
        latent, turns = block.q_lora + block.kv_lora, n.element * block.rope_head_dim
        if profile.eager_norm:  # a turned key is joined to others; values are a view of what brought both up
            turns = 0.0
            saved = saved + n.split * n.element * block.num_heads * (block.head_dim - block.rope_head_dim)
        norm = _norm_input(block, n, profile, wide=False)
        saved = saved + n.norm * ((norm + n.element) * latent + turns)
    return saved, n.split * core


def _score_bytes(block: Block, n: _Tokens, profile: MemoryProfile) -> Any:
    """Return the bytes of a score that attention without a fused kernel keeps.

    Softmax is kept as products read it. Model code of transformers, and of Megatron-LM without its fused
    kernel, keeps one in 32 bit, too, and what else `ATTENTION_CODES` says: a tanh in 16 bit; or one softmax
    alone, in 16 bit of sinks, in 32 of torch's fallback.
    """
    drop = _drops(block, profile)
    wide = (profile.eager_norm or profile.wide_softmax) * (np.asarray(n.element) < 4)
    beside: Any = {"capped": 6.0, "sinks": 0.0, "math": 2.0}.get(block.attention_code, 4.0)
    if profile.compiled and block.attention_code != "math":
        beside = 4.0
    elif block.attention_code == "sinks":  # autocast runs any softmax in 32 bit
        beside = np.where(_autocasts(block, n, profile), 4.0, beside)
    return n.element + drop + beside * wide + n.element * drop * (1 - wide)


def _copied_heads(block: Block, n: _Tokens, turned: int, load: StageLoad, profile: MemoryProfile) -> Any:
    """Return the bytes per token of copies of queries, keys and values that separate kernels read.

    One head of one sample is broadcast without a copy.
    """
    copied = np.maximum(block.num_kv_heads > 1, np.asarray(load.micro_batch) > 1)
    every = n.element * copied * (_every_head(block) - block.kv_width)
    wide = np.maximum(4.0 - n.element, 0.0)
    if block.attention_code == "math":
        read = np.where(copied, _every_head(block), block.kv_width)
        return every + wide * (block.query_width + read)
    return every * (not profile.compiled) + wide * turned * (block.attention_code == "wide")


def _every_head(block: Block) -> int:
    """Return the channels of keys and values that every query head has its own copy of."""
    return block.num_heads * (block.head_dim + block.value_head_dim)


def _input_bytes(block: Block, n: _Tokens, *targets: str) -> Any:
    """Return the bytes per element of a saved matrix-product input.

    Only the gradient of a weight needs it: none where the weights are frozen, and 16 bit where an adapter
    reads it.
    """
    if not block.frozen:
        return n.gemm_input
    return n.element if set(targets) & set(block.lora_targets) else 0.0


def _mlp_saved(block: Block, n: _Tokens, width: Any, tokens: Any, profile: MemoryProfile) -> tuple[Any, Any]:
    """Return what one MLP of that width saves beyond its input, and its activation output alone."""
    element = n.gemm_input if profile.fp8_mlp_input else n.element
    inner = element * (1 + block.gated) + n.element * (profile.eager_mlp and block.gated)
    spelled = block.spelled_activation * (profile.eager_norm and not profile.compiled)
    if spelled == "gelu_new":
        # Saved by its formula: half of the input, the tanh, one more than it; of autocast a wide input.
        inner = inner + np.where(_autocasts(block, n, profile), 12.0, 3.0 * n.element)
    elif spelled == "gelu_fast":
        # both operands of each product, the tanh; Bloom's keeps its input alone
        inner = inner + 6.0 * n.element
    elif spelled == "xielu":
        # Where it is positive, a product of it, its exponential, that less it; of autocast all three wide.
        inner = inner + 1.0 + 3.0 * np.where(_autocasts(block, n, profile), 4.0, n.element)
    elif spelled == "gpt_oss":
        # gate and up as the product made them and as they were clamped, a sigmoid, one more than up, the gate
        inner = inner + 3.0 * n.element
    read = _input_bytes(block, n, "down")
    if block.relu:
        inner = n.element * (np.asarray(read) != n.element)
    act = read * width * tokens
    return inner * width * tokens + act, act


def _autocasts(block: Block, n: _Tokens, profile: MemoryProfile) -> Any:
    """Return whether weights and residual are in 32 bit and products cast; with adapters they are in 16."""
    return (profile.autocast_bytes > 0) * (not block.lora_targets) * (np.asarray(n.element) < 4)


def _adapts(block: Block, n: _Tokens, profile: MemoryProfile) -> Any:
    """Return whether every adapter keeps the input that autocast casts for it from 32 bit."""
    return (profile.autocast_bytes > 0) * bool(block.lora_targets) * (np.asarray(n.element) < 4)


def _norm_input(block: Block, n: _Tokens, profile: MemoryProfile, *, wide: bool) -> Any:
    """Return the bytes per element that a norm saves of what it reads: `wide` is in 32 bit under autocast.

    Model code of transformers widens a 16-bit input and saves that, and what it scaled in the width of the
    input, which only the gradient of a scale needs; layer norms are kernels, of a copy in 32 bit without
    weights (OLMo), but for those that it spells (Cohere). Under autocast the residual is in 32 bit, what
    products return is not.

    Source
    ------
    transformers 5.17 modeling_llama.py LlamaRMSNorm, modeling_cohere.py CohereLayerNorm, modeling_olmo.py
    OlmoLayerNorm; bytes per token traced of its models (`tests/validation/test_hf_memory.py`).
    """
    if not profile.eager_norm:
        return n.element
    read = np.where(_autocasts(block, n, profile) * wide, 4.0, n.element)
    if profile.compiled:
        return read
    if block.norm_code == "spelled":  # twice the distance from the mean, and that over the deviation
        return 8.0 + 4.0 * (not block.frozen)
    if not block.norm_params:
        return np.maximum(read, 4.0)
    if block.norm_params != 1 or block.norm_code == "kernel":
        return read
    scaled = np.maximum(read, 4.0) if block.wide_norms else read
    return 4.0 + scaled * (not block.frozen)


def _norms_saved(block: Block, n: _Tokens, load: StageLoad, profile: MemoryProfile) -> Any:
    """Return inputs and outputs of the norms, and dropout masks."""
    single = not block.num_heads or not (block.ffn or block.num_experts)  # one mixer, one norm
    norms = 1 if block.parallel or single else 2 + block.cross_attention
    qkv, up = _input_bytes(block, n, "q", "k", "v"), _input_bytes(block, n, "gate", "up")
    joint = single or (block.parallel and block.num_norms == 1)
    outputs = np.maximum(qkv, up) if joint else qkv * (1 + block.cross_attention) + up
    if profile.eager_norm and not profile.compiled:  # under autocast every product keeps its cast input
        apart, adapted = not block.fused_projections, set(block.lora_targets)
        attends, feeds = block.num_heads > 0, block.ffn > 0 or block.num_experts > 0
        reads = 1 + (block.q_lora > 0) if block.kv_lora else 1 + 2 * apart
        casts = attends * reads * (1 + block.cross_attention) * qkv
        # A router, which may read the residual's 32 bit, and what shares the experts' input; the experts
        # themselves read a copy in 32 bit.
        routes = 2 if block.router_code == "exact" else 1
        gates = 1 + block.gated * (not block.fused_gate)
        beside = (block.shared_ffn > 0) * gates + block.shared_gate
        inner = routes + beside if block.num_experts else gates
        casts = casts + feeds * inner * up
        outputs = np.where(_autocasts(block, n, profile), casts, outputs)
        own = n.element * len({"q", "k", "v", "gate", "up"} & adapted)
        outputs = np.where(_adapts(block, n, profile), own, outputs)
    outputs = outputs * (1 - load.recompute.layernorm)
    inputs = norms * _norm_input(block, n, profile, wide=block.norm_place != "behind")
    if profile.eager_norm:  # norms of what attention and MLP return
        more = _norm_input(block, n, profile, wide=False)
        inputs = inputs + max(block.num_norms - max(norms, 2), 0) * more
    return n.norm * block.hidden * (inputs + outputs + 2 * _drops(block, profile))


def _dense_mlp(block: Block, n: _Tokens, load: StageLoad, profile: MemoryProfile) -> tuple[Any, Any]:
    """Return what the dense MLP saves, and the temporaries of its backward."""
    inner, _ = _mlp_saved(block, n, block.ffn, n.split, profile)
    gradients = n.element * (2 + block.gated) * block.ffn * n.split
    if profile.units:  # autograd drops the activation's output as soon as its product has gone back
        gradients = n.element * (1 + block.gated) * block.ffn * n.split + _passed_on(block, n, load)
        gradients = gradients + n.element * (not block.frozen) * block.hidden * block.ffn / np.asarray(
            load.tp
        )
    return inner * (1 - load.recompute.mlp), gradients + load.recompute.mlp * inner


def _passed_on(block: Block, n: _Tokens, load: StageLoad) -> Any:
    """Return the gradient that a block gets, and its gathered copy where tensor parallelism cuts tokens."""
    cut = (np.asarray(load.tp) > 1) * load.sp
    return n.element * block.hidden * (n.norm + cut * n.split * load.tp)


def _combined(
    block: Block, n: _Tokens, load: StageLoad, profile: MemoryProfile, saved: tuple[Any, Any, Any]
) -> tuple[Any, Any]:
    """Return what experts save and the temporaries of their backward where scores scale their outputs.

    `saved` are routed tokens, elements of their outputs, and one activation of the experts.

    Source
    ------
    torchtitan b5bcd76 models/common/moe.py, token_dispatcher.py: the router reads its input in fp32, and the
    norm's output itself is read by index only; in backward the gradient of the scaled output, its product
    with the output and the gradient of the output are in fp32. transformers 5.17 integrations/moe.py: the
    outputs are kept in 16 bit; routers but DeepSeek's read 16 bit.
    """
    routed, outputs, inner = saved
    wide = 4.0 * outputs
    reads_wide = profile.combined_bytes >= 4.0 or (block.router_code != "" and np.asarray(n.element) < 4)
    router = reads_wide * (4.0 - n.element * (not block.shared_ffn)) * block.hidden * n.norm
    scaled = 3.0 * wide
    weights = n.element * (not block.frozen) * block.num_experts * block.expert_params / 3
    kept = np.maximum(profile.combined_bytes, profile.eager_norm * n.element) * outputs
    indices = 32.0 * routed
    through = (1 + block.gated) * inner - kept + weights / (np.asarray(load.ep) * load.etp)
    return router + kept + indices, np.maximum(scaled, through) + _passed_on(block, n, load)


def _expert_tokens(block: Block, n: _Tokens, profile: MemoryProfile) -> _Tokens:
    """Return tokens as experts read them: in 32 bit under autocast, which knows no grouped product.

    Source
    ------
    torch 2.13 autocast_mode.h (mm and bmm, no _grouped_mm); transformers 5.24 integrations/moe.py
    _grouped_mm: inputs take the dtype of the weights.
    """
    if not profile.eager_norm or block.every_expert:
        return n
    wide = _autocasts(block, n, profile)
    return replace(n, element=np.where(wide, 4.0, n.element), gemm_input=np.where(wide, 4.0, n.gemm_input))


def _experts(block: Block, n: _Tokens, load: StageLoad, profile: MemoryProfile) -> tuple[Any, Any]:
    """Return what router, experts and shared experts save, and the temporaries of their backward."""
    rule, width = load.recompute, block.expert_ffn / load.etp
    own, every = _expert_tokens(block, n, profile), block.every_expert and profile.eager_norm
    routed = (block.num_experts if every else block.top_k) * n.split * load.etp
    inner, act = _mlp_saved(block, own, width, routed, profile)
    hidden = block.expert_hidden or block.hidden
    inputs = routed * (_input_bytes(block, own, "gate", "up") * hidden + 4)
    kept = inputs + 8 * block.num_experts * n.norm + inner - rule.moe_act * act
    shared, _ = _mlp_saved(block, n, block.shared_ffn, n.split, profile)
    # A gate scales the output of the shared experts, which is kept for it.
    shared = shared + block.shared_gate * n.element * block.hidden * n.norm
    gradients = own.element * ((2 + block.gated) * width + hidden) * routed
    if every:  # scores scale the copies that experts read
        kept = kept + np.where(_autocasts(block, n, profile), 4.0, n.element) * hidden * routed
    elif profile.combined_bytes:
        parts = routed, hidden * routed, own.element * width * routed
        more, gradients = _combined(block, own, load, profile, parts)
        kept = kept + more
    saved = (kept + shared * (1 - rule.shared_experts)) * (1 - rule.moe)
    return saved, gradients + rule.moe_act * act + rule.moe * (kept + shared)


def _op_saved(block: Block, n: _Tokens, load: StageLoad) -> Any:
    """Return what torchtitan's selective checkpointing keeps: the input, attention, every second product.

    Grouped products of experts are not on its list; what collectives bring is.

    Source
    ------
    torchtitan b5bcd76 distributed/activation_checkpoint.py _get_default_save_ops, SelectiveAC; torch 2.13
    _functorch/partitioners.py compute_intensive_ops (mm, bmm, addmm, attention, no _grouped_mm).
    """
    tp = np.asarray(load.tp)
    out = block.num_heads * block.value_head_dim
    attention = n.element * (block.query_width + block.kv_width / 2 + out) + 4 * block.num_heads
    width, cut = block.ffn + block.shared_ffn, (tp > 1) * load.sp
    products = n.element * (
        width * n.split + (width > 0) * block.hidden * np.where(cut, n.split * tp, n.norm)
    )
    scattered = cut * 2 * n.element * block.hidden * n.norm
    routed = block.top_k * n.split * load.etp
    sent = (np.asarray(load.ep) > 1) * 2 * n.element * (block.expert_hidden or block.hidden)
    chosen = (block.num_experts > 0) * routed * (12 + sent)
    return n.element * n.norm * block.hidden + n.split * attention + products + scattered + chosen


def _layer(
    block: Block, n: _Tokens, load: StageLoad, unfused: Any, profile: MemoryProfile
) -> tuple[Any, Any]:
    """Return what one layer saves per micro-batch unless recomputed in full, and its temporaries."""
    rule = load.recompute
    attention, core = _attention_saved(block, n, load, unfused, profile)
    saved = _norms_saved(block, n, load, profile) + attention - core * rule.core_attn
    if block.kv_lora:  # the norms of the latents run again with the products behind them
        again = n.split * (block.query_width + block.kv_width) + n.norm * (block.q_lora + block.kv_lora)
        saved = saved - rule.mla_up_proj * n.element * again
    scores = np.where(unfused, n.element * n.split * block.num_heads * load.seq_len, 0.0)
    peak = scores + rule.core_attn * core
    if np.count_nonzero(np.asarray(load.cp) > 1):  # a ring keeps every received chunk of keys and values
        peak = np.maximum(peak, n.element * n.split * block.kv_width * load.cp)
    for there, half in ((block.ffn, _dense_mlp), (block.num_experts, _experts)):
        if there:
            more, working = half(block, n, load, profile)
            saved, peak = saved + more, np.maximum(peak, working)
    if np.count_nonzero(rule.op):
        kept = rule.op * _op_saved(block, n, load) + (1 - rule.op) * saved
        saved, peak = kept, peak + rule.op * (saved - kept)
    return saved, peak


def _gathered_tokens(block: Block, n: _Tokens, load: StageLoad) -> Any:
    """Return the bytes of the tokens of all ranks that share the experts, 0 on a rank that has all experts.

    Source
    ------
    Megatron-LM d98e8a6 core/transformer/moe/token_dispatcher.py MoEAllGatherTokenDispatcher.
    """
    ranks = np.asarray(load.ep) * load.etp
    hidden = block.expert_hidden or block.hidden
    return (block.num_experts > 0) * (ranks > 1) * n.element * n.split * ranks * hidden


def stage_activations(load: StageLoad, framework: Framework, profile: MemoryProfile) -> Activations:
    """Return saved activations and their temporaries on one rank."""
    n = _tokens(load)
    unfused = framework.attention == "unfused" if load.unfused is None else np.asarray(load.unfused) > 0
    rule = load.recompute
    kept_input = n.element * n.norm * np.asarray(load.hidden) / rule.unit
    saved = one_layer = temporary = gathered = 0.0
    for block, count in load.kinds:
        here_n = _tokens(load, wide=True) if block.wide == WIDE_GROUPS else n
        layer, peak = _layer(block, here_n, load, unfused, profile)
        here = np.asarray(count) > 0
        if framework.dispatcher == "allgather" and block.num_experts:
            everyone = _gathered_tokens(block, n, load)
            gathered = np.maximum(gathered, here * everyone)
            # Gradients of the gathered tokens beside those of the tokens of the own experts.
            routed = n.element * block.top_k * n.split * load.etp * (block.expert_hidden or block.hidden)
            peak = np.maximum(peak, (everyone + routed) * (everyone > 0))
        mixed = rule.full * kept_input + (1 - rule.full) * layer
        saved = saved + count * mixed
        one_layer = np.maximum(one_layer, here * mixed)
        again = (rule.full > 0) * (layer * rule.unit - profile.units * mixed)
        temporary = np.maximum(temporary, here * (peak + again))
    per_logit = (profile.logit_bytes or LOGIT_BYTES[framework.cross_entropy]) + profile.held_logit_bytes
    per_logit = per_logit / profile.loss_chunks
    logits = per_logit * n.split * load.vocab * load.has_head
    boundary = n.element * n.norm * load.hidden
    if profile.keeps_outputs:
        pipelined = 1 - np.asarray(load.has_embedding) * load.has_head
        output = boundary
        if profile.units:  # of the last stage the logits, unless the loss makes them in chunks
            whole = profile.loss_chunks == 1
            output = np.where(load.has_head, whole * n.element * n.split * load.vocab, boundary)
        saved = saved + pipelined * output
    held = saved * load.in_flight
    offloaded = np.minimum(held, 2 * one_layer)  # the layer that computes and the one on its way
    return Activations(
        saved=held + load.offload_activations * (offloaded - held),
        one_layer=one_layer,
        temporary=temporary,
        logits=logits,
        boundary=boundary,
        host=load.offload_activations * (held - offloaded),
        gathered=gathered,
        logit_gradient=n.element * n.split * load.vocab * load.has_head / profile.loss_chunks,
    )
