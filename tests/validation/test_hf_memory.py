"""Bytes that a block keeps for the backward against what autograd keeps of transformers' own models."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from packaging.version import parse as version
from tests.unit.cost.test_memory import middle

from foreshard.catalog.hf.load import model_from_config
from foreshard.catalog.shipped import inherited, shipped
from foreshard.cost.memory import stage_memory
from foreshard.spec.framework import Framework

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

SAMPLES, SEQ = 2, 32
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 352,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gpt_neox": {"num_key_value_heads": None},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "olmo2": {},
    "arcee": {},
    "hyperclovax": {},
    "apertus": {"num_attention_heads": 8, "head_dim": 16},  # an activation by its formula
    # Tables of sines that each layer makes anew are as wide as a head.
    "helium": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8},
    "glm4": {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
    },  # gate and up in one product
    "hunyuan_v1_dense": {},
    "exaone4": {"layer_types": ["sliding_attention"], "sliding_window": 64},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "cohere": {"head_dim": None, "use_qk_norm": True},  # a layer norm operation by operation
    "olmo": {"head_dim": None},  # norms without weights, of a copy in 32 bit
    "opt": {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 512}
    | {"dropout": 0.0, "max_position_embeddings": 64, "word_embed_proj_dim": 128},  # ReLU keeps its output
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2}
    | {"head_dim": None, "shared_intermediate_size": 352},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64}
    | {"moe_layer_start_index": 0, "moe_num_shared_experts": 1}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"head_dim": None, "shared_expert_intermediate_size": 128},
    "gemma2": {"attn_implementation": "eager"},  # capped scores
    "vaultgemma": {"attn_implementation": "eager"},
    "falcon": {"head_dim": None, "intermediate_size": None, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    | {"num_key_value_heads": None},  # one head of keys: torch's fallback, in 32 bit
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"]},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 352}
    | {"interleave_moe_layer_step": 1, "attention_chunk_size": None, "no_rope_layers": [1]}
    | {"use_qk_norm": False},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"n_shared_experts": 1, "norm_topk_prob": True, "sliding_window": None},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "intermediate_size": 64},
    "deepseek_v3": {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 64}
    | {"num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1}
    | {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    | {"v_head_dim": 32, "head_dim": None, "num_key_value_heads": 4},
}
A_LAYER = ("layer_types", "no_rope_layers")
EAGER = ("bloom", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "mpt")
_OF_SIDE = {"attention_heads": 4, "ffn_dim": 352}
LEFT_OUT = {
    "phi": "autocast of the processor does not widen powers, that of CUDA does",
    "apertus": "autocast of the processor does not widen exponentials, that of CUDA does",
}


def kept_bytes(kind: str, layers: int, *, autocast: bool, compiled: bool = False) -> int:
    """Return what autograd keeps of a decoder of that kind, compiled by inductor or not."""
    sizes = {key: value for key, value in (SIZES | MODELS[kind]).items() if value is not None}
    sizes |= {key: sizes[key] * layers for key in A_LAYER if key in sizes}
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if compiled:
        torch.compiler.reset()
        model = torch.compile(model, backend="aot_eager_decomp_partition")
    return kept_of(model, autocast=autocast)


def counted_bytes(kind: str, *, autocast: bool, compiled: bool = False) -> float:
    """Return what is counted of a block of that decoder."""
    given = {key: value for key, value in (SIZES | MODELS[kind]).items() if value is not None}
    block = model_from_config({"model_type": kind, "num_hidden_layers": 1, **given}, name=kind).blocks[0]
    name = "ddp" if autocast else "hf"
    unfused = float(bool(block.attention_code))
    stage = middle(block, seq_len=SEQ, micro_batch=SAMPLES, has_embedding=1, has_head=1, unfused=unfused)
    elementwise = "compiled" if compiled else "eager"
    framework = Framework(name=name, memory=name, elementwise=elementwise, masked=True)
    return float(stage_memory(stage, framework).activations)


def kept_of(model, *, autocast: bool) -> int:
    """Return the bytes of all tensors that autograd keeps of a forward, without parameters."""
    model = model.train()
    if not autocast:
        model = model.bfloat16()
    tokens = torch.zeros(SAMPLES, SEQ, dtype=torch.long)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # alive, so that no address is used again
        return tensor

    casts = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), casts:
        model(input_ids=tokens, labels=tokens)
    # Copies of weights that autocast keeps are counted elsewhere.
    copied = [
        weight
        for weight in model.parameters()
        if weight.ndim == 2 or model.config.model_type == "llama4_text"
    ]
    copies = autocast * 2 * sum(weight.numel() for weight in copied)
    return sum(storage.nbytes() for storage in kept.values()) - copies


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_block_keeps_what_autograd_keeps_of_it(kind, autocast):
    if autocast and kind in LEFT_OUT:
        pytest.skip(LEFT_OUT[kind])
    has_experts = bool({"num_experts_per_tok", "moe_topk", "moe_k"} & MODELS[kind].keys())
    if has_experts and version(torch.__version__) < version("2.9"):
        pytest.skip("experts as CUDA runs them: one grouped product")
    expected = kept_bytes(kind, 2, autocast=autocast) - kept_bytes(kind, 1, autocast=autocast)
    counted = counted_bytes(kind, autocast=autocast)
    # Indices of routed tokens, and scores of a few experts, are not small beside a block of this width.
    assert counted == pytest.approx(expected, rel=0.015 if has_experts else 0.007)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_decoder_that_attends_to_an_encoder_keeps_both_attentions(autocast):
    sizes = {"d_model": 128, "vocab_size": 64, "max_position_embeddings": 64, "decoder_start_token_id": 1}
    sizes |= {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _OF_SIDE.items()}
    sizes |= {"dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

    def made(layers):
        config = transformers.BartConfig(**sizes, encoder_layers=1, decoder_layers=layers, use_cache=False)
        config.forced_eos_token_id = None
        return transformers.BartForConditionalGeneration(config)

    expected = kept_of(made(2), autocast=autocast) - kept_of(made(1), autocast=autocast)
    given = {"model_type": "bart", **sizes, "encoder_layers": 1, "decoder_layers": 2}
    block = model_from_config(given, name="bart").blocks[-1]
    name = "ddp" if autocast else "hf"
    stage = middle(block, seq_len=SEQ, micro_batch=SAMPLES, has_embedding=1, has_head=1)
    counted = float(stage_memory(stage, Framework(name=name, memory=name)).activations)
    assert counted == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("kind", EAGER)
def test_which_models_have_no_fused_attention(kind):
    """GPT-J has one since transformers 5.24, which most do not run yet."""
    made = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[kind]]
    table = shipped("architectures.toml")["decoders"]
    own = bool(inherited(kind, table).get("attention_code"))
    assert own == (not made._supports_sdpa or kind == "gptj")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["falcon", "gemma2", "gpt_oss"])
def test_a_single_sample_of_many_tokens_keeps_what_autograd_keeps(kind, autocast, monkeypatch):
    """One head of keys of one sample is broadcast, not copied; scores outweigh the rest."""
    monkeypatch.setitem(MODELS, kind, MODELS[kind] | {"num_key_value_heads": None if kind == "falcon" else 1})
    monkeypatch.setattr(f"{__name__}.SAMPLES", 1)
    monkeypatch.setattr(f"{__name__}.SEQ", 96)
    expected = kept_bytes(kind, 2, autocast=autocast) - kept_bytes(kind, 1, autocast=autocast)
    assert counted_bytes(kind, autocast=autocast) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3", "cohere2", "phi3"])
def test_a_window_is_a_mask_that_every_layer_keeps(kind, autocast, monkeypatch):
    own = {"sliding_window": 64} | ({} if kind == "phi3" else {"layer_types": ["sliding_attention"]})
    monkeypatch.setitem(MODELS, kind, own | {"head_dim": None if kind == "cohere2" else 32})
    monkeypatch.setattr(f"{__name__}.SEQ", 96)
    expected = kept_bytes(kind, 2, autocast=autocast) - kept_bytes(kind, 1, autocast=autocast)
    assert counted_bytes(kind, autocast=autocast) == pytest.approx(expected, rel=0.01)
