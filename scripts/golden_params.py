"""Count the parameters of public configurations with transformers, and the FLOPs of small ones with torch.

Parameters are counted on the meta device, FLOPs of a forward on the processor.
Writes tests/golden/model_params.json: what the catalog is tested against. Needs torch and transformers; run
again when a family is added: ``python scripts/golden_params.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

ROOT = Path(__file__).resolve().parent.parent
CATALOG = ROOT / "src/foreshard/catalog/data/models.json"
GOLDEN = ROOT / "tests/golden/model_params.json"
_MASKED = ("bert", "camembert", "distilbert", "modernbert", "roberta", "xlm-roberta")
HEADS = {
    **dict.fromkeys(_MASKED, transformers.AutoModelForMaskedLM),
    "bart": transformers.AutoModelForSeq2SeqLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "vit": transformers.AutoModelForImageClassification,
}
ALIKE = {"kimi_k2": "deepseek_v3"}  # same architecture, no class of its own in transformers

_LLAMA = dict(
    model_type="llama",
    hidden_size=1024,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=4,
    intermediate_size=2816,
    vocab_size=5000,
    max_position_embeddings=512,
)
_FALCON = dict(
    model_type="falcon",
    hidden_size=1024,
    num_hidden_layers=3,
    num_attention_heads=16,
    vocab_size=5000,
    max_position_embeddings=512,
)
_MOE = dict(_LLAMA, num_hidden_layers=6, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512)
_OPT = dict(
    model_type="opt",
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=1024,
    vocab_size=5000,
    max_position_embeddings=128,
)
_BERT = dict(
    model_type="bert",
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=1000,
    vocab_size=5000,
    max_position_embeddings=128,
)
_VIT = dict(
    model_type="vit",
    hidden_size=192,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=768,
    image_size=30,
    patch_size=7,
)
_STABLELM = dict(_LLAMA, model_type="stablelm")
_SMOLLM3 = dict(_LLAMA, model_type="smollm3", pad_token_id=0)
_GLM = dict(_LLAMA, model_type="glm", pad_token_id=0)
_T5 = dict(model_type="t5", d_model=256, d_kv=32, d_ff=512, num_layers=2, num_heads=4, vocab_size=5000)
_DEEPSEEK = dict(
    model_type="deepseek_v3",
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=1024,
    moe_intermediate_size=256,
    n_routed_experts=8,
    n_shared_experts=2,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=2,
    vocab_size=5000,
    max_position_embeddings=512,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=24,
)
_GPTJ = dict(n_embd=256, n_layer=2, n_head=4, n_positions=64, vocab_size=500)
_SPARSE = dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2)
_HUNYUAN = dict(_LLAMA, model_type="hunyuan_v1_dense", head_dim=64)
_ERNIE_MOE = dict(
    _LLAMA,
    model_type="ernie4_5_moe",
    num_hidden_layers=6,
    moe_num_experts=8,
    moe_k=2,
    moe_intermediate_size=512,
)
_DISTILBERT = dict(
    model_type="distilbert",
    dim=256,
    n_layers=2,
    n_heads=4,
    hidden_dim=1000,
    vocab_size=5000,
    max_position_embeddings=128,
)
_MODERNBERT = dict(
    model_type="modernbert",
    hidden_size=256,
    num_hidden_layers=5,
    num_attention_heads=4,
    intermediate_size=300,
    vocab_size=5000,
    max_position_embeddings=128,
    pad_token_id=0,
)
_MAMBA2 = dict(
    model_type="mamba2",
    hidden_size=256,
    num_hidden_layers=3,
    num_heads=8,
    head_dim=64,
    state_size=32,
    n_groups=2,
    vocab_size=5000,
)
_NEMOTRON_H = dict(
    model_type="nemotron_h",
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    mamba_num_heads=8,
    mamba_head_dim=32,
    ssm_state_size=16,
    n_groups=2,
    intermediate_size=600,
    vocab_size=5000,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    moe_shared_expert_intermediate_size=192,
)
VARIANTS = {
    "llama with biases": dict(_LLAMA, attention_bias=True, mlp_bias=True),
    "llama with wide heads, tied": dict(_LLAMA, head_dim=96, tie_word_embeddings=True),
    "llama without grouped heads": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "mistral with wide heads": dict(_LLAMA, model_type="mistral", head_dim=128),
    "qwen2 with windows": dict(
        _LLAMA, model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1
    ),
    "qwen3 with default heads and biases": dict(_LLAMA, model_type="qwen3", attention_bias=True),
    "qwen2_moe with dense layers": dict(
        _MOE,
        model_type="qwen2_moe",
        shared_expert_intermediate_size=900,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3_moe with dense layers": dict(
        _MOE, model_type="qwen3_moe", head_dim=80, attention_bias=True, mlp_only_layers=[0, 5]
    ),
    "gemma untied": dict(_LLAMA, model_type="gemma", head_dim=64, tie_word_embeddings=False),
    "gemma2 with biases": dict(_LLAMA, model_type="gemma2", attention_bias=True),
    "gemma3 with biases": dict(_LLAMA, model_type="gemma3_text", attention_bias=True),
    "phi3": dict(_LLAMA, model_type="phi3", pad_token_id=0),
    "nemotron with biases": dict(_LLAMA, model_type="nemotron", attention_bias=True, mlp_bias=True),
    "glm": _GLM,
    "glm without biases, default heads": dict(
        {k: v for k, v in _GLM.items() if k != "num_key_value_heads"}, attention_bias=False
    ),
    "olmo": dict(_LLAMA, model_type="olmo"),
    "olmo with biases, tied": dict(_LLAMA, model_type="olmo", attention_bias=True, tie_word_embeddings=True),
    "olmo2": dict(_LLAMA, model_type="olmo2"),
    "olmo2 with biases": dict(_LLAMA, model_type="olmo2", attention_bias=True),
    "olmo3": dict(_LLAMA, model_type="olmo3", num_hidden_layers=5),
    "smollm3": _SMOLLM3,
    "smollm3 with biases and windows, untied": dict(
        {k: v for k, v in _SMOLLM3.items() if k != "num_key_value_heads"},
        num_hidden_layers=5,
        attention_bias=True,
        mlp_bias=True,
        use_sliding_window=True,
        sliding_window=64,
        tie_word_embeddings=False,
    ),
    "stablelm": _STABLELM,
    "stablelm parallel, norms of heads, biases": dict(
        _STABLELM, use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True
    ),
    "falcon sequential with biases": dict(
        _FALCON, parallel_attn=False, multi_query=False, bias=True, alibi=True
    ),
    "falcon grouped with one norm": dict(
        _FALCON, new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1
    ),
    "falcon parallel, all heads": dict(_FALCON, multi_query=False, ffn_hidden_size=3000),
    "gpt2 with its own inner size": dict(
        model_type="gpt2", n_embd=256, n_layer=2, n_head=4, n_inner=700, n_positions=64, vocab_size=500
    ),
    "bloom small": dict(
        model_type="bloom", hidden_size=256, n_layer=2, n_head=4, vocab_size=5000, seq_length=128
    ),
    "mpt small": dict(model_type="mpt", d_model=256, n_layers=2, n_heads=4, vocab_size=5000, max_seq_len=128),
    "gpt_neox without biases": dict(_LLAMA, model_type="gpt_neox", attention_bias=False),
    "opt without biases": dict(_OPT, enable_bias=False),
    "opt with projections and final norm": dict(_OPT, word_embed_proj_dim=128),
    "bert one type, untied": dict(_BERT, type_vocab_size=1, tie_word_embeddings=False),
    "vit rectangular remainder": dict(_VIT, num_labels=10, qkv_bias=False, num_channels=1),
    "vit default labels": _VIT,
    "t5 uneven stacks, gated": dict(_T5, num_decoder_layers=3, feed_forward_proj="gated-gelu"),
    "deepseek_v3 with biases": dict(_DEEPSEEK, q_lora_rank=96, attention_bias=True),
    "deepseek_v3 without query rank": dict(_DEEPSEEK, q_lora_rank=None),
    "deepseek_v2 small": dict(_DEEPSEEK, model_type="deepseek_v2", q_lora_rank=96),
    "gpt_oss without biases": dict(
        _LLAMA,
        model_type="gpt_oss",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=False,
    ),
    "llama4_text with chosen layers": dict(
        _LLAMA,
        model_type="llama4_text",
        head_dim=64,
        intermediate_size_mlp=1500,
        num_local_experts=4,
        num_experts_per_tok=1,
        moe_layers=[1],
    ),
    "cohere": dict(_LLAMA, model_type="cohere"),
    "cohere with norms of heads and biases, untied": dict(
        _LLAMA, model_type="cohere", use_qk_norm=True, attention_bias=True, tie_word_embeddings=False
    ),
    "cohere2": dict(_LLAMA, model_type="cohere2", num_hidden_layers=5),
    "starcoder2": dict(_LLAMA, model_type="starcoder2"),
    "starcoder2 without biases, untied": dict(
        _LLAMA, model_type="starcoder2", use_bias=False, tie_word_embeddings=False
    ),
    "phi with norms of heads": dict(_LLAMA, model_type="phi", qk_layernorm=True),
    "gptj": dict(_GPTJ, model_type="gptj", rotary_dim=16),
    "gpt_bigcode": dict(_GPTJ, model_type="gpt_bigcode"),
    "gpt_bigcode with all heads": dict(_GPTJ, model_type="gpt_bigcode", multi_query=False, n_inner=700),
    "granite with biases": dict(_LLAMA, model_type="granite", attention_bias=True, mlp_bias=True),
    "granitemoe": dict(_SPARSE, model_type="granitemoe"),
    "olmoe with biases": dict(_MOE, model_type="olmoe", attention_bias=True),
    "phimoe with biases": dict(_SPARSE, model_type="phimoe", lm_head_bias=True, attention_bias=True),
    "iquestcoder": dict(_LLAMA, model_type="iquestcoder"),
    "seed_oss": dict(_LLAMA, model_type="seed_oss"),
    "seed_oss with other biases": dict(
        _LLAMA, model_type="seed_oss", attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "arcee with biases": dict(_LLAMA, model_type="arcee", attention_bias=True, mlp_bias=True),
    "jais2": dict(_LLAMA, model_type="jais2"),
    "ernie4_5": dict(_LLAMA, model_type="ernie4_5"),
    "ernie4_5 with biases, untied": dict(
        _LLAMA, model_type="ernie4_5", head_dim=32, use_bias=True, tie_word_embeddings=False
    ),
    "ernie4_5_moe in every other layer": dict(
        _ERNIE_MOE, moe_layer_interval=2, moe_layer_start_index=2, moe_num_shared_experts=0
    ),
    "ernie4_5_moe up to a layer": dict(_ERNIE_MOE, moe_layer_end_index=4, tie_word_embeddings=False),
    "hunyuan_v1_dense with biases": dict(_HUNYUAN, attention_bias=True),
    "hunyuan_v1_moe": dict(_HUNYUAN, model_type="hunyuan_v1_moe", num_experts=4, moe_topk=[2, 2, 2]),
    "hyperclovax": dict(_LLAMA, model_type="hyperclovax"),
    "hyperclovax without norms behind": dict(_LLAMA, model_type="hyperclovax", use_post_norm=False),
    "ministral3": dict(_LLAMA, model_type="ministral3"),
    "ministral": dict(_LLAMA, model_type="ministral", head_dim=96),
    "apertus": dict(_LLAMA, model_type="apertus"),
    "apertus with biases, another activation": dict(
        _LLAMA, model_type="apertus", attention_bias=True, hidden_act="relu2"
    ),
    "helium": dict(_LLAMA, model_type="helium", head_dim=64),
    "helium with biases": dict(_LLAMA, model_type="helium", head_dim=64, attention_bias=True, mlp_bias=True),
    "cwm": dict(_LLAMA, model_type="cwm", num_hidden_layers=5),
    "cwm with biases": dict(_LLAMA, model_type="cwm", head_dim=96, mlp_bias=True),
    "vaultgemma": dict(_LLAMA, model_type="vaultgemma", head_dim=64),
    "exaone4": dict(_LLAMA, model_type="exaone4", num_hidden_layers=5),
    "exaone_moe": dict(
        _MOE, model_type="exaone_moe", num_shared_experts=2, mlp_layer_types=["sparse", "dense"] * 3
    ),
    "dots1 with biases": dict(
        _MOE,
        model_type="dots1",
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=2,
        attention_bias=True,
    ),
    "solar_open with biases": dict(_MOE, model_type="solar_open", n_routed_experts=8, attention_bias=True),
    "glm4_moe_lite": dict(
        {key: size for key, size in _DEEPSEEK.items() if key != "first_k_dense_replace"},
        model_type="glm4_moe_lite",
        q_lora_rank=96,
    ),
    "youtu with biases": dict(_DEEPSEEK, model_type="youtu", q_lora_rank=96, attention_bias=True),
    "granitemoeshared": dict(_SPARSE, model_type="granitemoeshared", shared_intermediate_size=300),
    "flex_olmo": dict(_SPARSE, model_type="flex_olmo", num_experts=4, pad_token_id=0),
    "minimax_m2": dict(_SPARSE, model_type="minimax_m2", head_dim=96),
    "glm4": dict(_GLM, model_type="glm4"),
    "glm4_moe with norms and biases": dict(
        _LLAMA,
        model_type="glm4_moe",
        head_dim=96,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        n_shared_experts=2,
        first_k_dense_replace=2,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "roberta one type": dict(_BERT, model_type="roberta", type_vocab_size=1),
    "roberta untied": dict(_BERT, model_type="roberta", tie_word_embeddings=False),
    "xlm-roberta": dict(_BERT, model_type="xlm-roberta", type_vocab_size=1),
    "camembert": dict(_BERT, model_type="camembert", type_vocab_size=1),
    "distilbert": _DISTILBERT,
    "distilbert untied": dict(_DISTILBERT, tie_word_embeddings=False),
    "modernbert": _MODERNBERT,
    "modernbert with biases": dict(
        _MODERNBERT,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        classifier_bias=True,
        decoder_bias=False,
    ),
    "bart uneven stacks": dict(
        model_type="bart",
        d_model=256,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=8,
        encoder_ffn_dim=500,
        decoder_ffn_dim=600,
        vocab_size=5000,
        max_position_embeddings=128,
    ),
    "mamba2": _MAMBA2,
    "mamba2 one group, tied": dict(_MAMBA2, n_groups=1, tie_word_embeddings=True),
    "nemotron_h by letters": dict(_NEMOTRON_H, hybrid_override_pattern="M*-ME"),
    "nemotron_h by names, latent experts": dict(
        _NEMOTRON_H, layers_block_type=["mamba", "attention", "moe"], moe_latent_size=64
    ),
}


TOKENS = 32  # of the forward whose FLOPs are counted
UNLIKE = ("llama4_text", "mamba2", "nemotron_h", "vit")
"""Not counted alike: all experts run densely there, a scan is written as products of chunks, a class token
passes no patch embedding."""


def made(config: dict, device: str) -> torch.nn.Module:
    """Return the model with its usual head, attention and experts as plain products."""
    kind = ALIKE.get(config["model_type"], config["model_type"])
    # positions have no parameters, and the catalog keeps only kind and factor of their scaling
    sizes = {key: value for key, value in config.items() if key not in ("model_type", "rope_scaling")}
    loaded = AutoConfig.for_model(kind, **sizes)
    loaded._attn_implementation = loaded._experts_implementation = "eager"
    head = HEADS.get(kind, transformers.AutoModelForCausalLM)
    with torch.device(device):
        model: torch.nn.Module = head.from_config(loaded)
    return model.eval()


def forward_flops(config: dict) -> int:
    """Return the FLOPs of products in a forward of one sequence."""
    tokens = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}
    if config["model_type"] in ("bart", "t5"):
        tokens["decoder_input_ids"] = tokens["input_ids"]
    counted = FlopCounterMode(display=False)
    model = made(config, "cpu")
    with counted, torch.no_grad():
        model(**tokens)
    return counted.get_total_flops()


def count(config: dict) -> int:
    """Return what transformers counts for the model with its usual head."""
    model = made(config, "meta")
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Count every catalog entry that has a configuration, and the variants."""
    entries = json.loads(CATALOG.read_text("utf-8"))["models"]
    cases = {name: entry["config"] for name, entry in entries.items() if "config" in entry} | VARIANTS
    rows, seen = [], {}
    for name, config in cases.items():
        key = json.dumps(config, sort_keys=True)
        if key in seen:
            continue
        seen[key] = name
        rows.append({"name": name, "num_params": count(config), "config": config})
        if name in VARIANTS and config["model_type"] not in UNLIKE:
            rows[-1]["forward_flops"] = forward_flops(config)
        print(name, rows[-1]["num_params"], file=sys.stderr)
    head = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    head["tokens"] = TOKENS
    body = ",\n".join(json.dumps(row) for row in rows)
    GOLDEN.write_text(f'{json.dumps(head)[:-1]}, "cases": [\n{body}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
