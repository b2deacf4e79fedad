"""Bytes of a rank against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.memory_profiles import MemoryProfile, memory_profile, profile_of
from foreshard.catalog.shipped import shipped
from foreshard.cost.memory import (
    StageLoad,
    communicators_bytes,
    deepep_bytes,
    hybridep_bytes,
    optimizer_state_bytes,
    stage_memory,
)
from foreshard.cost.memory_activations import NO_RECOMPUTE, Recompute, recompute_of, stage_activations
from foreshard.cost.memory_states import stage_states
from foreshard.errors import SpecError
from foreshard.spec.framework import Framework
from foreshard.spec.model import Block

LLAMA_70B = Block(
    hidden=8192, num_heads=64, num_kv_heads=8, head_dim=128, value_head_dim=128, ffn=28672, gated=True
)
GPT = Block(
    hidden=1024,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    value_head_dim=64,
    ffn=4096,
    gated=False,
    dropout=0.1,
)
EXPERTS = replace(GPT, gated=True, ffn=0, num_experts=8, top_k=2, expert_ffn=512, dropout=0.0)
MCORE = Framework(name="megatron-core")


def load_of(**changes):
    values = {
        "kinds": ((LLAMA_70B, 12),),
        "has_embedding": 1,
        "has_head": 1,
        "hidden": 8192,
        "vocab": 128256,
        "seq_len": 4096,
        "num_micro_batches": 4,
    }
    return StageLoad(**(values | changes))


def middle(block: Block, layers: float = 1, **changes):
    """A stage without embedding and head, so that only the block's own bytes remain."""
    defaults = {"has_embedding": 0, "has_head": 0, "hidden": block.hidden, "vocab": 0, "seq_len": 1024}
    return load_of(kinds=((block, layers),), **(defaults | changes))


def test_megatron_llama_is_the_closed_form():
    """12 layers of LLaMA-3 70B, tp 4, dp 2, sequence parallel: every term of the derivation, by hand."""
    h, kv, f, v, t, tokens = 8192, 2 * 8 * 128, 28672, 128256, 4, 4096
    layer = 2 * h * h + h * kv + 3 * h * f
    params = 12 * (layer / t + 2 * h) + 2 * v * h / t
    states = params * (2 + 4 + 12 / 2)
    saved = 12 * (tokens / t * (12 * h + 2 * kv + 6 * f) + 4 * 64 * tokens / t)
    dummies = 2 * (layer + v * h) / t
    temporary = max(6 * tokens / t * f, 4 * tokens * v / t)
    parts = stage_memory(load_of(tp=4, dp=2, shard_size=2, expert_dp=1, sp=1), MCORE)
    assert parts.allocated == pytest.approx(states + saved + dummies + temporary, rel=1e-12)
    assert parts.activations == pytest.approx(saved)
    assert parts.comm_buffers == pytest.approx(dummies)


@pytest.mark.parametrize(("name", "residual"), [("hf", 2), ("ddp", 4)])
def test_compiled_code_keeps_what_products_and_attention_read(name, residual):
    """What norms read and give, queries and outputs, keys and values of every head, 6 per MLP channel."""
    h, f, heads, tokens = 8192, 28672, 64, 1024
    block = LLAMA_70B
    compiled = Framework(name=name, memory=name, elementwise="compiled")
    kept = (2 * residual + 4 + 4 + 4) * h + 6 * f + 4 * heads  # the last of the softmax
    whole = middle(block, has_head=1, has_embedding=1, vocab=128)
    assert float(stage_memory(whole, compiled).activations) == pytest.approx(tokens * kept, rel=1e-12)
    logits = stage_activations(whole, compiled, profile_of(compiled)).logits / (tokens * 128)
    assert logits == 6.0  # in 16 bit they, their gradient, and the zeros of those that the model returns


def test_gpt_without_flash_saves_34_and_5():
    """Korthikanti et al. 2022, eq. 2: s*b*h*(10 + 24/t) + 5*a*s*s*b/t without sequence parallelism."""
    unfused = Framework(name="megatron-lm", attention="unfused", memory="megatron-lm")
    s, h, a, t = 1024, 1024, 16, 2
    parts = stage_memory(middle(GPT, tp=t), unfused)
    assert parts.activations == pytest.approx(s * h * (10 + 24 / t) + 5 * a * s * s / t)
    with_sp = stage_memory(middle(GPT, tp=t, sp=1), unfused)
    assert with_sp.activations == pytest.approx(s * h * 34 / t + 5 * a * s * s / t)


def test_softmax_in_32_bit_keeps_what_torch_keeps_of_its_operations():
    torch = pytest.importorskip("torch")
    heads, length, kept = 4, 64, []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    scores = torch.ones(heads, length, length).half().requires_grad_()
    values = torch.ones(heads, length, 16).half().requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.softmax((scores.float() * 0.5).masked_fill_(mask, -10000.0), -1).half() @ values
    each = [tensor.nbytes for tensor in kept if tensor.numel() == scores.numel()]
    fused = Framework(name="megatron-core", attention="unfused", memory="megatron-core")
    block = middle(replace(GPT, dropout=0.0))
    held = [stage_memory(block, replace(fused, softmax=how)).activations for how in ("fused", "wide")]
    more = sum(each) / scores.numel() - 2
    assert held[1] - held[0] == pytest.approx(GPT.num_heads * 1024**2 * more)


def test_norms_of_queries_and_keys_save_their_inputs():
    """FRAMEWORKS section 4.2: 2T'(h + gd) more; norms kernel by kernel keep a wide copy and a scaled one."""
    normed = replace(LLAMA_70B, qk_norm=True)
    channels = normed.query_width + normed.num_kv_heads * normed.head_dim
    for memory, each in (("megatron-core", 2), ("hf", 6)):
        framework = Framework(name=memory, memory=memory)
        with_norm, without = (
            stage_memory(middle(block, tp=2), framework).activations for block in (normed, LLAMA_70B)
        )
        assert with_norm - without == pytest.approx(each * 1024 / 2 * channels)


def test_fsdp1_at_level_two_keeps_16_bit_weights_whole_beside_its_shards():
    """FRAMEWORKS section 3: fp32 shards are the masters; SHARD_GRAD_OP gathers them in 16 bit until freed."""
    framework, profile = load_framework("composer"), memory_profile("composer")
    load = middle(GPT, 4, dp=8, shard_size=8, expert_dp=8)
    two, three = (stage_memory(replace(load, zero=zero), framework, profile) for zero in (2, 3))
    params = 4 * GPT.num_params
    assert three.parameters == pytest.approx(4 / 8 * params)
    assert two.parameters == pytest.approx((4 / 8 + 2) * params)
    assert two.gradients == three.gradients and two.optimizer == three.optimizer


def test_zero_3_of_deepspeed_steps_in_parts():
    """FRAMEWORKS section 3: fp32 gradients of one sub-group of 1e9 elements at a time."""
    framework, profile = load_framework("deepspeed"), memory_profile("deepspeed")
    load = middle(LLAMA_70B, 80, dp=8, shard_size=8, expert_dp=8)
    own = 80 * LLAMA_70B.num_params / 8
    parts, whole = (stage_states(replace(load, zero=zero), framework, profile).step for zero in (3, 1))
    assert own > 1e9 and parts == 4e9
    assert whole == pytest.approx(4 * own)


@pytest.mark.parametrize(("name", "bytes_each"), [("ddp", 4.0), ("fms-fsdp", 4.0), ("composer", 0.0)])
def test_adamw_over_lists_of_tensors_holds_square_roots_of_all(name, bytes_each):
    """FRAMEWORKS section 7: torch's foreach AdamW, the default on CUDA unless fused is asked for."""
    framework = load_framework(name)
    states = stage_states(middle(GPT, zero=0), framework, memory_profile(framework.memory))
    assert states.step == pytest.approx(bytes_each * GPT.num_params)
    one_moment = {"state_bytes": optimizer_state_bytes("sgd")}
    for changed in (one_moment, {"offload_optimizer": 1}):
        load = replace(middle(GPT, zero=0), **changed)
        assert stage_states(load, framework, memory_profile(framework.memory)).step == 0.0


@pytest.mark.parametrize(
    ("memory", "grad_bytes", "zero", "expected"),
    [
        ("megatron-core", 4, 0, 2 + 4 + 12),
        ("megatron-core", 4, 1, 2 + 4 + 12 / 8),
        ("megatron-core", 2, 1, 2 + 2 + 12 / 8),
        ("megatron-deepspeed", 4, 1, 2 + 4 + 12 / 8),
        ("deepspeed", 2, 2, 2 + 2 / 8 + 12 / 8),
        ("deepspeed", 2, 3, 2 / 8 + 2 / 8 + 12 / 8),
        ("fsdp2", 4, 3, 16 / 8),
        ("composer", 4, 3, 16 / 8),
        ("internevo", 2, 1, 2 + 2 + 12 / 8),
        ("nanotron", 6, 0, 2 + 6 + 12),
        ("ddp", 4, 0, 4 + 8 + 8),
    ],
)
def test_bytes_per_parameter(memory, grad_bytes, zero, expected):
    framework = Framework(name=memory, grad_bytes=grad_bytes, memory=memory)
    profile = replace(memory_profile(memory), backward_gradient_bytes=0.0)
    parts = stage_memory(middle(GPT, dp=8, shard_size=8, expert_dp=8, zero=zero), framework, profile)
    kept = parts.parameters + parts.gradients + parts.optimizer
    assert kept / GPT.num_params == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("num_stages", "expected"), [(1, 16 / 8), (2, 12 / 8 + 2 + 4)])
def test_torchtitan_holds_weights_and_gradients_through_a_pipeline(num_stages, expected):
    load = middle(LLAMA_70B, 10, zero=3, dp=8, shard_size=8, num_stages=num_stages)
    parts = stage_memory(load, load_framework("torchtitan"))
    states = parts.parameters + parts.gradients + parts.optimizer
    assert float(states) == pytest.approx(10 * LLAMA_70B.num_params * expected)


@pytest.mark.parametrize("dp", [2, 8, 64])
def test_torchtitan_shards_no_less_by_the_next_level_of_a_pipeline(dp):
    """In 16 bit; in fp32 the gathered weight stands beside its shard, which ZeRO 1 does not have."""
    states = []
    for zero in range(4):
        load = middle(LLAMA_70B, 10, zero=zero, dp=dp, shard_size=dp, num_stages=4)
        parts = stage_memory(load, load_framework("torchtitan"))
        states.append(float(parts.parameters + parts.gradients + parts.optimizer))
    assert states == sorted(states, reverse=True)


def test_hybrid_sharding_divides_by_the_shard():
    wide = stage_memory(middle(GPT, dp=8, shard_size=8, expert_dp=8, zero=1), MCORE)
    narrow = stage_memory(middle(GPT, dp=8, shard_size=2, expert_dp=8, zero=1), MCORE)
    assert narrow.optimizer == pytest.approx(4 * wide.optimizer)


def test_experts_shard_over_expert_ranks():
    params = EXPERTS.num_params - 8 * EXPERTS.expert_params
    parts = stage_memory(middle(EXPERTS, ep=4, dp=8, shard_size=8, expert_dp=2, zero=1), MCORE)
    local = 2 * EXPERTS.expert_params
    assert parts.parameters == pytest.approx(2 * (params + local))
    assert parts.optimizer == pytest.approx(12 * (params / 8 + local / 2))


def test_tied_head_on_the_embedding_stage_is_no_second_matrix():
    tied = stage_memory(load_of(tied=1), MCORE)
    untied = stage_memory(load_of(tied=0), MCORE)
    assert untied.parameters - tied.parameters == pytest.approx(2 * 128256 * 8192)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", NO_RECOMPUTE),
        ("full", Recompute(full=1.0)),
        ("full:uniform:4", Recompute(full=1.0, unit=4.0)),
        ("full:block:3", Recompute(full=0.25)),
        ("full:block:99", Recompute(full=1.0)),
        ("every-5", Recompute(full=2 / 12)),
        ("selective", Recompute(core_attn=1.0)),
        ("selective:mlp+moe_act", Recompute(mlp=1.0, moe_act=1.0)),
    ],
)
def test_recompute_rules_in_numbers(text, expected):
    assert recompute_of(text, 12) == expected


def test_an_unknown_recompute_rule_is_an_error():
    with pytest.raises(SpecError):
        recompute_of("selective:everything", 12)


def test_full_recompute_keeps_the_inputs_and_one_working_layer():
    none = stage_memory(middle(GPT, 12), MCORE)
    full = stage_memory(middle(GPT, 12, recompute=Recompute(full=1.0)), MCORE)
    assert full.activations == pytest.approx(12 * 2 * 1024 * 1024)
    assert full.temporary == pytest.approx(none.temporary + none.activations / 12)


def test_uniform_units_keep_one_input_each():
    one = stage_memory(middle(GPT, 12, recompute=recompute_of("full:uniform:1", 12)), MCORE)
    four = stage_memory(middle(GPT, 12, recompute=recompute_of("full:uniform:4", 12)), MCORE)
    assert four.activations == pytest.approx(one.activations / 4)


def test_selective_modules_drop_what_they_recompute():
    tokens, h, f = 1024, 8192, 28672

    def saved(text):
        return stage_memory(middle(LLAMA_70B, 1, recompute=recompute_of(text, 1)), MCORE).activations

    assert saved("none") - saved("selective:mlp") == pytest.approx(tokens * 6 * f)
    assert saved("none") - saved("selective:layernorm") == pytest.approx(tokens * 4 * h)
    assert saved("none") - saved("selective:core_attn") == pytest.approx(tokens * 4 * 64)


def test_selective_op_is_torchtitans_count():
    """Split QKV: input, wq, wv, w1, w2 and the attention output, T(8h + 2gd + 2f + 4a)."""
    h, kv, f, a = 8192, 8 * 128, 28672, 64
    parts = stage_memory(middle(LLAMA_70B, 1, recompute=recompute_of("selective:op", 1)), MCORE)
    assert parts.activations == pytest.approx(1024 * (8 * h + 2 * kv + 2 * f + 4 * a))


def test_eight_bit_inputs_and_weight_copies():
    tokens, h, f = 1024, 8192, 28672
    sixteen = stage_memory(middle(LLAMA_70B), MCORE)
    eight = stage_memory(middle(LLAMA_70B, fp8=1), MCORE)
    # norm outputs and the activation output halve; the attention output gains an 8-bit copy
    assert sixteen.activations - eight.activations == pytest.approx(tokens * (2 * h - h + f))
    assert eight.parameters == pytest.approx(2 * sixteen.parameters)
    stored = stage_memory(middle(LLAMA_70B, fp8=1), replace(MCORE, fp8_params=True))
    assert stored.parameters == pytest.approx(sixteen.parameters)


def test_adapters_train_only_themselves():
    lora = replace(LLAMA_70B, frozen=True, lora_rank=16, lora_targets=("q", "k", "v", "o"))
    parts = stage_memory(middle(lora, dp=1), MCORE)
    assert parts.gradients == pytest.approx(4 * lora.lora_params)
    assert parts.optimizer == pytest.approx(12 * lora.lora_params)
    assert parts.activations < stage_memory(middle(LLAMA_70B), MCORE).activations


def test_optimizer_states():
    assert optimizer_state_bytes("adamw") == 8
    assert optimizer_state_bytes("adamw", 2) == 4
    assert optimizer_state_bytes("sgd") == 4
    assert 2 < optimizer_state_bytes("adamw-8bit") < 2.1
    assert optimizer_state_bytes("adafactor") < 0.1


def test_offload_moves_states_and_activations():
    here = stage_memory(middle(GPT, 12, in_flight=4), MCORE)
    away = stage_memory(middle(GPT, 12, in_flight=4, offload_optimizer=1, offload_activations=1), MCORE)
    assert away.optimizer == 0
    assert away.activations == pytest.approx(here.activations / 24)


def test_sixteen_bit_moments_are_cast_for_the_step():
    """TransformerEngine's FusedAdam holds fp32 copies of both moments of all parameters of one optimizer."""
    framework = replace(MCORE, grad_bytes=2, moment_bytes=2)
    parts = stage_memory(middle(GPT, 12, micro_batch=0.001, state_bytes=4, zero=0), framework)
    assert parts.temporary == pytest.approx(8 * 12 * GPT.num_params)
    assert parts.activations == 0


def test_backward_gradients_stand_beside_fp32_ones():
    framework = Framework(name="megatron-deepspeed", memory="megatron-deepspeed", attention="fa2")
    parts = stage_memory(middle(GPT, 12, micro_batch=0.001, in_flight=4), framework)
    assert parts.gradients == pytest.approx(6 * 12 * GPT.num_params)


def test_fsdp_gradients_of_a_single_micro_batch_come_after_the_activations():
    fsdp = Framework(name="fsdp2", memory="fsdp2", cross_entropy="eager")
    one = stage_memory(load_of(zero=3, dp=64, shard_size=64, num_micro_batches=1), fsdp)
    more = stage_memory(load_of(zero=3, dp=64, shard_size=64, num_micro_batches=2), fsdp)
    assert one.gradients < more.gradients / 10  # what a backward has reduced by its fullest moment


def test_a_ring_holds_the_keys_and_values_of_the_whole_sequence():
    wide = replace(LLAMA_70B, num_kv_heads=64, ffn=1024)
    parts = stage_memory(middle(wide, cp=8, seq_len=8192), MCORE)
    assert parts.temporary == pytest.approx(2 * 8192 * 2 * 64 * 128)


def test_experts_hold_their_gradients_and_the_permuted_one():
    routed = 2 * 1024
    parts = stage_memory(middle(EXPERTS), MCORE)
    assert parts.temporary == pytest.approx(2 * routed * (3 * 512 + 1024))


def test_gathered_tokens_of_all_ranks_stay_in_a_buffer():
    """No all-to-all connects the ranks; many ranks with few experts a token hold more gradients of tokens."""
    gathering, few = replace(MCORE, dispatcher="allgather"), {"ep": 2, "expert_dp": 1}
    sent, gathered = (stage_memory(middle(EXPERTS, **few), one) for one in (MCORE, gathering))
    everyone = 2 * 2 * 1024 * 1024
    assert gathered.comm_buffers - sent.comm_buffers == pytest.approx(everyone)
    assert gathered.temporary == sent.temporary
    assert sent.outside - gathered.outside == pytest.approx(384 * 2**20 - 544 * 2**20)
    many = replace(EXPERTS, num_experts=64, expert_ffn=8)
    wide = stage_memory(middle(many, ep=64, expert_dp=1), gathering)
    assert wide.temporary == pytest.approx((64 + 2) * 2 * 1024 * 1024)
    alone = [stage_memory(middle(EXPERTS), one).peak for one in (MCORE, gathering)]
    assert alone[0] == alone[1]


def test_tensor_overlap_keeps_twelve_buffers():
    without = stage_memory(middle(GPT, tp=2, sp=1), MCORE)
    overlap = stage_memory(middle(GPT, tp=2, sp=1, tp_overlap=1), MCORE)
    eight = stage_memory(middle(GPT, tp=2, sp=1, fp8=1, tp_overlap=1), MCORE)
    assert overlap.outside - without.outside == pytest.approx(24 * 1024 * 1024)
    assert eight.outside - without.outside == pytest.approx(16 * 1024 * 1024)


def test_arrays_price_like_numbers():
    tps = np.array([1.0, 2.0, 4.0, 8.0])
    zeros = np.array([0.0, 1.0, 2.0, 3.0])
    together = stage_memory(load_of(tp=tps, zero=zeros, dp=8, shard_size=8, expert_dp=8, sp=1), MCORE)
    for i, (tp, zero) in enumerate(zip(tps, zeros, strict=True)):
        alone = stage_memory(load_of(tp=tp, zero=zero, dp=8, shard_size=8, expert_dp=8, sp=1), MCORE)
        assert together.peak[i] == pytest.approx(float(alone.peak), rel=1e-12)


def test_nothing_is_lost_between_parts_and_peak():
    parts = stage_memory(load_of(tp=2), MCORE)
    assert parts.peak == pytest.approx(parts.allocated + parts.reserved)
    assert parts.cached == pytest.approx(parts.allocated * (1 + memory_profile("megatron-core").slack))


def test_every_profile_loads_with_a_source():
    for name in shipped("memory_profiles.toml"):
        profile = memory_profile(name)
        assert isinstance(profile, MemoryProfile)
        assert profile.name == name and profile.source


def test_every_framework_names_a_profile():
    frameworks = pytest.importorskip("foreshard.catalog.frameworks")
    for framework in frameworks.frameworks():
        assert framework.memory in shipped("memory_profiles.toml")


def test_an_unknown_profile_is_an_error_with_a_suggestion():
    with pytest.raises(SpecError, match="megatron-core"):
        memory_profile("megatron-cor")


def test_communicators_are_what_was_measured():
    """nccl#964, four A100: 544 MiB for two ranks, 688 for more; half the channels on six links."""
    found = communicators_bytes([(1, np.array([1, 2, 3, 8]))]) / 2**20
    assert found.tolist() == [0.0, 544.0, 688.0, 688.0]
    assert communicators_bytes([(1, 2)], 12) / 2**20 == 12 * 12 + 16 * 8


def test_communicators_by_degree():
    """tp 4, dp 2, 3 stages: 688 + 544 + 688, all ranks 688; DeepSpeed two pairs and the replica beside."""
    load = middle(LLAMA_70B, tp=4, dp=2, num_stages=3)
    for name, expected in (
        ("ddp", 1920),
        ("megatron-lm", 2608),
        ("megatron-deepspeed", 2608 + 2 * 544 + 688),
    ):
        profile = memory_profile(name)
        outside = stage_memory(load, MCORE, profile).outside
        assert float(outside - profile.context_bytes) / 2**20 == expected


def test_dropped_transposes_leave_one_copy_of_an_eight_bit_weight():
    load = middle(LLAMA_70B, fp8=1)
    full = stage_memory(load, replace(MCORE, fp8_params=True), memory_profile("megatron-bridge"))
    lean = stage_memory(load, replace(MCORE, fp8_params=True), memory_profile("megatron-bridge-no-transpose"))
    assert float(lean.parameters) == pytest.approx(float(full.parameters) / 2)
    plain = stage_memory(load, MCORE, memory_profile("megatron-bridge-no-transpose"))
    assert float(plain.parameters) == pytest.approx(float(full.parameters))  # 2 bytes in 16 bit


def test_dropout_of_the_arguments_keeps_masks():
    """Without flash: two masks of T*h, the mask and the dropped scores of every head."""
    still = replace(GPT, dropout=0.0)
    load, unfused = middle(still), replace(MCORE, attention="unfused")
    profile = memory_profile("megatron-lm")
    on = stage_memory(load, unfused, profile).activations
    off = stage_memory(load, unfused, replace(profile, default_dropout=False)).activations
    assert float(on - off) == 2 * 1024 * 1024 + 3 * 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("module", "block"), [("core_attn", GPT), ("mlp", GPT), ("moe_act", EXPERTS), ("moe", EXPERTS)]
)
def test_what_is_recomputed_is_back_while_its_layer_goes_back(module, block):
    """Of a single layer nothing is won but time between forward and backward."""
    load, unfused = middle(block, seq_len=8192), replace(MCORE, attention="unfused")
    framework = unfused if module == "core_attn" else MCORE
    kept, again = (
        stage_activations(replace(load, recompute=rule), framework, profile_of(framework))
        for rule in (NO_RECOMPUTE, Recompute(**{module: 1.0}))
    )
    assert kept.saved > again.saved
    assert again.temporary - kept.temporary == pytest.approx(kept.saved - again.saved, rel=1e-12)


def test_a_lone_replica_gathers_the_experts_that_its_tensor_ranks_share():
    """Twice the replicas keep half of each shard, and as much of what is gathered."""
    trainer = Framework(name="hf", memory="hf", accumulates_whole=True)
    one, two = (
        stage_memory(
            middle(EXPERTS, tp=8, dp=dp, shard_size=dp, expert_dp=8 * dp, zero=3, num_micro_batches=8),
            trainer,
        )
        for dp in (1, 2)
    )
    assert float(one.parameters) == 2 * float(two.parameters)
    assert float(one.gradients) == float(two.gradients)


def test_nanotron_keeps_attention_once_and_eight_bytes_of_a_logit_while_the_loss_is_made():
    """Its row products save a view of what attention returned; fp32 logits live beside their softmax."""
    nanotron = Framework(name="nanotron", memory="nanotron")
    loads = [middle(GPT, has_head=1, vocab=128, micro_batch=samples) for samples in (1, 4)]
    one, four = (stage_activations(load, nanotron, profile_of(nanotron)) for load in loads)
    assert float(four.saved) == 4 * float(one.saved)
    assert float(one.logits) == 8 * 1024 * 128


def test_packed_queries_keep_keys_and_values_twice_unless_heads_share_them():
    profile, plain = MemoryProfile(name="t", packed_queries=True), MemoryProfile(name="p")
    for heads, more in ((16, 2 * 1024 * 1024 * 2), (4, 0)):
        load = middle(replace(GPT, num_kv_heads=heads))
        kept = [float(stage_memory(load, MCORE, which).activations) for which in (profile, plain)]
        assert kept[0] - kept[1] == more


def test_expandable_segments_have_no_slack():
    parts = stage_memory(load_of(), MCORE, memory_profile("megatron-bridge-expandable"))
    assert float(parts.cached) == pytest.approx(float(parts.allocated))


LATENT = Block(
    hidden=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    value_head_dim=128,
    q_lora=1536,
    kv_lora=512,
    rope_head_dim=64,
    ffn=0,
    gated=True,
    num_experts=256,
    top_k=8,
    expert_ffn=2048,
    shared_ffn=2048,
)


def test_deepseeks_trainer_saves_what_its_report_lists():
    """Sections 3.2.3 and 3.3.3 of the report, summed by hand for one layer of DeepSeek-V3."""
    trainer = load_framework("hai-llm")
    rule = recompute_of(trainer.recompute("selective"), 1)
    h, inner, latent = 7168, 2048, 1536 + 512 + 64
    norms = 2 * 2 * h
    attention = 2 * latent + 1.5 * 128 * 128 + 4 * 128
    experts = 8 * (h + 4 + 2 * inner) + 2 * inner + inner + 8 * 256
    load = middle(LATENT, fp8=1, recompute=rule, in_flight=1, num_micro_batches=1)
    assert stage_memory(load, trainer).activations == pytest.approx(1024 * (norms + attention + experts))


def test_deepep_keeps_buffers_of_its_group():
    """The hints of Buffer for 16-bit tokens: 10 channels, 256 or 288 tokens of a peer, 128 from outside."""
    trainer, token = load_framework("hai-llm"), 2 * 7168 + 128 * 16 + 8
    load = middle(LATENT, ep=np.array([1, 8, 64]))
    near, far = 10 * 8 * 288 * token, 10 * 8 * 128 * token * 2
    assert deepep_bytes(load, trainer) == pytest.approx([0, 10 * 8 * 256 * token, near + far])


def test_hybridep_has_room_for_all_tokens_of_its_group():
    """Buffers of intranode.cu by hand: every rank's tokens, 8 ranks of a domain, of 256 experts in all."""
    load = middle(LATENT, ep=np.array([1, 8, 64]), micro_batch=2)
    token = np.array([0, 2 * 7168 + 4 * 256 + 4 * 56, 2 * 7168 + 4 * 32 + 4 * 56])
    assert hybridep_bytes(load) == pytest.approx(2 * 1024 * np.array([1, 8, 64]) * token)
    sent = [replace(load_framework("megatron-core"), dispatcher=name) for name in ("alltoall", "hybridep")]
    plain, hybrid = (stage_memory(load, framework).outside for framework in sent)
    assert plain[0] == hybrid[0] and all(plain[1:] != hybrid[1:])


def test_deepspeed_gathers_ahead_up_to_its_limit_and_copies_its_bucket():
    """ZeRO 3: 1e9 elements and one matrix more beside loss and backward; a bucket, and its copy."""
    framework = load_framework("deepspeed")
    profile = memory_profile("deepspeed")
    sizes = {"dp": 8, "shard_size": 8, "zero": 3}
    states = stage_states(middle(LLAMA_70B, 80, **sizes), framework, profile)
    matrix = 8192 * 28672
    assert states.live == pytest.approx(2 * (1e9 + matrix))
    assert states.buffers == 1e9 and states.working == pytest.approx(states.live + 1e9)
    small = stage_states(middle(GPT, 4, **sizes), framework, profile)
    assert small.live == pytest.approx(2 * 4 * GPT.num_params), "a small model stays whole"


@pytest.mark.parametrize(("overlap", "stated", "filled"), [(0, 0, 1e9), (1, 0, 2e9), (1, 25e6, 50e6)])
def test_deepspeed_holds_buckets_in_a_backward_only(overlap, stated, filled):
    load = middle(LLAMA_70B, 80, dp=8, shard_size=8, zero=2, grad_overlap=overlap, bucket_bytes=stated)
    states = stage_states(load, load_framework("deepspeed"), memory_profile("deepspeed"))
    assert states.buffers == 0 and states.working == filled


def test_megatron_fsdp_gathers_blocks_ahead_and_keeps_gradients_waiting():
    """Blocks of 70B exceed 5e8 elements: one at work, one ahead; two wait and two more; tables stay."""
    framework, profile = load_framework("megatron-fsdp"), memory_profile("megatron-fsdp")
    sizes = {"dp": 8, "shard_size": 8, "zero": 3}
    states = stage_states(load_of(kinds=((LLAMA_70B, 80),), **sizes), framework, profile)
    block, tables = LLAMA_70B.num_params, 2 * 128256 * 8192
    assert states.live == pytest.approx(2 * (2 * block + tables))
    assert states.working == pytest.approx(states.live + 2 * 4 * block)
    assert states.parameters + states.gradients + states.optimizer == pytest.approx(
        16 / 8 * (80 * block + tables)
    )
    small = stage_states(middle(GPT, 4, **sizes), framework, profile)
    assert small.live == pytest.approx(2 * 4 * GPT.num_params)


@pytest.mark.parametrize("name", ["ddp", "hf"])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("tp", "ep"), [(8, 1), (1, 8), (2, 4)])
def test_weights_that_adapters_freeze_take_two_bytes_wherever_they_are(name, zero, tp, ep):
    """peft on weights read in 16 bit: dense ones and experts are sharded each by their own ranks."""
    block = replace(EXPERTS, frozen=True, lora_rank=16, lora_targets=("q", "v"))
    dp, framework = 8, Framework(name=name, memory=name)
    stage = middle(block, tp=tp, ep=ep, dp=dp, expert_dp=dp / ep, shard_size=dp, zero=zero)
    experts = block.num_experts * block.expert_params
    whole = block.norm_total_params + block.router_params
    dense = block.num_params - block.lora_params - experts - whole
    shards, expert_shards = (dp, dp / ep) if zero else (1, 1)
    frozen = (dense / tp + whole) / shards + experts / ep / expert_shards
    adapters = block.lora_params / tp / shards
    found = stage_memory(stage, framework).parameters
    assert found == pytest.approx(2 * frozen + 4 * adapters, rel=1e-3)
