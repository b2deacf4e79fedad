"""Decoders with layer norms and plain MLPs: gpt2, gpt_neo, gpt_neox, opt, bloom, falcon, mpt."""

from __future__ import annotations

from typing import Any

from foreshard.catalog.hf.decoders import finish, windowed_blocks
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.model import Block, Model


def _sizes(reader: Reader, hidden: tuple[str, ...], heads: tuple[str, ...]) -> dict[str, Any]:
    width = reader.size(*hidden)
    num_heads = reader.heads(width, *heads)
    return {
        "hidden": width,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": width // num_heads,
        "value_head_dim": width // num_heads,
        "gated": False,
        "norm_params": 2,
    }


def gpt2(reader: Reader) -> Model:
    """GPT-2."""
    sizes = _sizes(reader, ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"))
    positions = reader.positions("n_positions", "max_position_embeddings")
    block = Block(
        **sizes,
        ffn=reader.size("n_inner", default=4 * sizes["hidden"]),
        qkv_bias=True,
        proj_bias=True,
        mlp_bias=True,
        dropout=reader.fraction("resid_pdrop", default=0.1),
    )
    blocks = (block,) * reader.layers("n_layer", "num_hidden_layers")
    return finish(reader, blocks, tied=True, max_seq_len=positions, learned_positions=positions)


def gpt_neo(reader: Reader) -> Model:
    """GPT-Neo: windows of 256 in every other layer, no biases on query, key and value."""
    sizes = _sizes(reader, ("hidden_size",), ("num_heads", "num_attention_heads"))
    layers = reader.layers("num_layers", "num_hidden_layers")
    positions = reader.positions("max_position_embeddings")
    block = dict(
        sizes,
        ffn=reader.size("intermediate_size", default=4 * sizes["hidden"]),
        proj_bias=True,
        mlp_bias=True,
        dropout=reader.fraction("resid_dropout", default=0.0),
    )
    window = reader.size("window_size", default=256)
    windows = [window * (kind == "local") for kind in _attention_kinds(reader, layers)]
    blocks = windowed_blocks(block, windows)
    return finish(reader, blocks, tied=True, max_seq_len=positions, learned_positions=positions)


def _attention_kinds(reader: Reader, layers: int) -> list[str]:
    """Return global or local per layer from ``[[["global", "local"], 12]]``."""
    groups = reader.list("attention_types") or [[["global", "local"], (layers + 1) // 2]]
    kinds: list[str] = []
    for group in groups:
        names, repeats = group if isinstance(group, list) and len(group) == 2 else ([], 0)
        if not isinstance(names, list) or not isinstance(repeats, int):
            break
        for _ in range(min(repeats, layers)):
            kinds.extend(names[:layers])
            if len(kinds) >= layers:
                break
    if len(kinds) < layers or any(kind not in ("global", "local") for kind in kinds):
        rule = f"attention_types lists global or local for {layers} layers"
        raise reader.error("attention_types", str(groups)[:60], f"{len(kinds)} layers listed", rule)
    return kinds[:layers]


def gpt_neox(reader: Reader) -> Model:
    """GPT-NeoX and Pythia: rotary positions, parallel attention and MLP."""
    bias = reader.flag("attention_bias", True)
    block = Block(
        **_sizes(reader, ("hidden_size",), ("num_attention_heads",)),
        ffn=reader.size("intermediate_size"),
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=True,
        parallel=reader.flag("use_parallel_residual", True),
        dropout=reader.fraction("hidden_dropout"),
    )
    return finish(reader, (block,) * reader.layers("num_hidden_layers"), tied=False)


def opt(reader: Reader) -> Model:
    """OPT: two spare position rows; the 350M has a narrow token table and no final norm."""
    sizes = _sizes(reader, ("hidden_size",), ("num_attention_heads",))
    bias = reader.flag("enable_bias", True)
    positions = reader.positions("max_position_embeddings")
    width = reader.size("word_embed_proj_dim", default=sizes["hidden"])
    before = reader.flag("do_layer_norm_before", True)
    block = Block(
        **sizes,
        ffn=reader.size("ffn_dim"),
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=bias,
        dropout=reader.fraction("dropout", default=0.1),
    )
    return finish(
        reader,
        (block,) * reader.layers("num_hidden_layers"),
        tied=True,
        max_seq_len=positions,
        learned_positions=positions + 2,
        embedding_dim=0 if width == sizes["hidden"] else width,
        final_norm=before and not reader.flag("_remove_final_layer_norm", False),
    )


def bloom(reader: Reader) -> Model:
    """BLOOM: ALiBi, a norm after the embedding."""
    sizes = _sizes(reader, ("hidden_size", "n_embed"), ("n_head", "num_attention_heads"))
    block = Block(
        **sizes,
        ffn=4 * sizes["hidden"],
        qkv_bias=True,
        proj_bias=True,
        mlp_bias=True,
        dropout=reader.fraction("hidden_dropout"),
    )
    blocks = (block,) * reader.layers("n_layer", "num_hidden_layers")
    length = reader.positions("seq_length", default=2048)
    return finish(reader, blocks, tied=True, max_seq_len=length, embedding_norm=True)


def falcon(reader: Reader) -> Model:
    """Falcon: multi-query (7B) or grouped (40B, 180B), attention and MLP in parallel."""
    sizes = _sizes(reader, ("hidden_size",), ("num_attention_heads", "n_head"))
    grouped = reader.flag("new_decoder_architecture", False)
    bias = reader.flag("bias", False)
    parallel = reader.flag("parallel_attn", True) or grouped
    if grouped:
        sizes["num_kv_heads"] = reader.kv_heads(sizes["num_heads"], "num_kv_heads", "n_head_kv")
    elif reader.flag("multi_query", True):
        sizes["num_kv_heads"] = 1
    norms = reader.size("num_ln_in_parallel_attn", default=2, maximum=2) if grouped else 1
    if not reader.flag("parallel_attn", True):
        norms = 2
    block = Block(
        **sizes,
        ffn=reader.size("ffn_hidden_size", default=4 * sizes["hidden"]),
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        num_norms=norms,
        dropout=reader.fraction("hidden_dropout"),
    )
    return finish(reader, (block,) * reader.layers("num_hidden_layers", "n_layer"), tied=True)


def mpt(reader: Reader) -> Model:
    """MPT: ALiBi, no biases, not even in the norms."""
    sizes = _sizes(reader, ("d_model", "hidden_size"), ("n_heads", "num_attention_heads"))
    sizes["norm_params"] = 1
    if not reader.flag("no_bias", True):
        raise reader.error(
            "no_bias", False, "MPT with biases is not modelled", "Published MPT models have none"
        )
    ratio = reader.size("expansion_ratio", default=4)
    block = Block(**sizes, ffn=ratio * sizes["hidden"], dropout=reader.fraction("resid_pdrop"))
    blocks = (block,) * reader.layers("n_layers", "num_hidden_layers")
    return finish(reader, blocks, tied=True, max_seq_len=reader.positions("max_seq_len"))
