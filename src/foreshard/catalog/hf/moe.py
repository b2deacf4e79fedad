"""Decoders with experts: mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, gpt_oss, llama4_text."""

from __future__ import annotations

from typing import Any

from foreshard.catalog.hf.decoders import attention_sizes, biases, finish, qwen_windows, uniform, windowed
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.model import Block, Model


def _experts(
    reader: Reader, width: str, *count: str, used: tuple[str, ...] = ("num_experts_per_tok",)
) -> dict[str, Any]:
    num_experts = reader.size(*count)
    top_k = reader.size(*used)
    if top_k > num_experts:
        raise reader.error(used[0], top_k, f"{top_k} experts per token", f"There are {num_experts} experts")
    return {"ffn": 0, "num_experts": num_experts, "top_k": top_k, "expert_ffn": reader.size(width)}


def mixtral(reader: Reader) -> Model:
    """Mixtral: experts in every layer."""
    experts = _experts(reader, "intermediate_size", "num_local_experts")
    return uniform(reader, attention_sizes(reader) | experts | {"gated": True, "window": reader.window(0)})


def _qwen_moe(reader: Reader, attention: dict[str, Any], shared: dict[str, Any]) -> Model:
    dense = attention | {"ffn": reader.size("intermediate_size"), "gated": True}
    sparse = dense | _experts(reader, "moe_intermediate_size", "num_experts", "num_local_experts") | shared
    step = reader.layers("decoder_sparse_step", default=1)
    only = reader.list("mlp_only_layers") or []
    windows = qwen_windows(reader)
    kinds: dict[tuple[bool, int], Block] = {}
    blocks = []
    for layer, window in enumerate(windows):
        routed = layer not in only and (layer + 1) % step == 0
        chosen = sparse if routed else dense
        blocks.append(kinds.setdefault((routed, window), Block(window=window, **chosen)))
    return finish(reader, tuple(blocks), tied=False)


def qwen2_moe(reader: Reader) -> Model:
    """Qwen1.5/2 MoE: a gated shared expert beside the routed ones."""
    attention = dict(attention_sizes(reader), qkv_bias=reader.flag("qkv_bias", True))
    shared = {"shared_ffn": reader.size("shared_expert_intermediate_size"), "shared_gate": True}
    return _qwen_moe(reader, attention, shared)


def qwen3_moe(reader: Reader) -> Model:
    """Qwen3 MoE: query/key norms, no shared expert."""
    return _qwen_moe(reader, attention_sizes(reader) | biases(reader) | {"qk_norm": True}, {})


def _latent_attention(reader: Reader) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    heads = reader.size("num_attention_heads")
    rope = reader.size("qk_rope_head_dim")
    return biases(reader) | {
        "hidden": reader.size("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": reader.size("qk_nope_head_dim") + rope,
        "value_head_dim": reader.size("v_head_dim"),
        "q_lora": reader.size("q_lora_rank", default=0, minimum=0),
        "kv_lora": reader.size("kv_lora_rank"),
        "rope_head_dim": rope,
    }


def deepseek(reader: Reader) -> Model:
    """DeepSeek V2, V3 and models of their architecture (Moonlight, Kimi K2): leading dense layers."""
    layers = reader.layers("num_hidden_layers")
    dense_layers = reader.layers("first_k_dense_replace", default=0, minimum=0)
    if dense_layers > layers:
        rule = f"There are {layers} layers"
        raise reader.error("first_k_dense_replace", dense_layers, f"{dense_layers} dense layers", rule)
    attention = _latent_attention(reader)
    dense = Block(**attention, ffn=reader.size("intermediate_size"), gated=True)
    experts = _experts(reader, "moe_intermediate_size", "n_routed_experts")
    shared = reader.size("n_shared_experts", default=0, minimum=0) * experts["expert_ffn"]
    sparse = Block(**attention, **experts, gated=True, shared_ffn=shared)
    extra = reader.layers("num_nextn_predict_layers", default=0, minimum=0)
    if extra:
        reader.assumptions.append(
            f"{extra} next-token module(s) trained; not in num_params, as in transformers"
        )
    blocks = (dense,) * dense_layers + (sparse,) * (layers - dense_layers)
    return finish(reader, blocks, tied=False, num_next_token=extra)


def gpt_oss(reader: Reader) -> Model:
    """gpt-oss: biases everywhere, attention sinks, every other layer slides."""
    layers, used = reader.layers("num_hidden_layers"), ("num_experts_per_tok", "experts_per_token")
    block = attention_sizes(reader, head_dim=64) | biases(reader, True)
    block |= _experts(reader, "intermediate_size", "num_local_experts", used=used)
    block |= {"gated": True, "mlp_bias": True, "router_bias": True, "other_params": block["num_heads"]}
    sliding = [layer % 2 == 0 for layer in range(layers)]
    return windowed(reader, block, reader.layer_windows(layers, reader.window(128), sliding))


def llama4(reader: Reader) -> Model:
    """Llama 4 text: experts in every n-th layer, one shared expert as wide as a routed one."""
    layers = reader.layers("num_hidden_layers")
    attention = attention_sizes(reader, head_dim=128) | biases(reader) | {"gated": True}
    experts = _experts(reader, "intermediate_size", "num_local_experts")
    sparse = Block(**attention, **experts, shared_ffn=experts["expert_ffn"])
    dense = Block(**attention, ffn=reader.size("intermediate_size_mlp"))
    step = reader.layers("interleave_moe_layer_step", default=1)
    if reader.config.get("attention_chunk_size") is not None:
        chunk = reader.size("attention_chunk_size", maximum=2**31)
        reader.assumptions.append(f"attention chunks of {chunk} counted as full attention")
    routed = reader.list("moe_layers") or range(step - 1, layers, step)
    blocks = tuple(sparse if layer in routed else dense for layer in range(layers))
    return finish(reader, blocks, tied=False)
