"""Decoders with layer norms and plain MLPs: gpt2, gpt_neo, gpt_neox, opt, bloom, falcon, mpt."""

from __future__ import annotations

from typing import Any

from foreshard.catalog.hf.decoders import biases, uniform, windowed
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.model import Model

_HIDDEN, _HEADS = "hidden_size", "num_attention_heads"


def plain_block(
    reader: Reader, hidden: tuple[str, ...] = (_HIDDEN,), heads: tuple[str, ...] = (_HEADS,), **more: Any
) -> dict[str, Any]:
    """Return the sizes of a block with layer norms, a plain MLP and biases everywhere.

    `hidden` and `heads` are the keys of the widths; `bias` in `more` is of all matrices.
    """
    width = reader.size(*hidden)
    num_heads = reader.heads(width, *heads)
    bias = more.pop("bias", True)
    return {
        "hidden": width,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": width // num_heads,
        "value_head_dim": width // num_heads,
        "ffn": 4 * width,
        "gated": False,
        "norm_params": 2,
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": bias,
    } | more


def gpt2(reader: Reader) -> Model:
    """GPT-2."""
    positions = reader.positions("n_positions", "max_position_embeddings")
    block = plain_block(reader, ("n_embd", _HIDDEN), ("n_head", _HEADS))
    block["ffn"] = reader.size("n_inner", default=block["ffn"])
    block["dropout"] = reader.fraction("resid_pdrop", default=0.1)
    layers = ("n_layer", "num_hidden_layers")
    return uniform(reader, block, *layers, tied=True, max_seq_len=positions, learned_positions=positions)


def gpt_neo(reader: Reader) -> Model:
    """GPT-Neo: windows of 256 in every other layer, no biases on query, key and value."""
    layers = reader.layers("num_layers", "num_hidden_layers")
    positions = reader.positions("max_position_embeddings")
    block = plain_block(reader, heads=("num_heads", _HEADS), qkv_bias=False)
    block["ffn"] = reader.size("intermediate_size", default=block["ffn"])
    block["dropout"] = reader.fraction("resid_dropout", default=0.0)
    window = reader.size("window_size", default=256)
    windows = [window * (kind == "local") for kind in _attention_kinds(reader, layers)]
    return windowed(reader, block, windows, tied=True, max_seq_len=positions, learned_positions=positions)


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
    ffn, dropout = reader.size("intermediate_size"), reader.fraction("hidden_dropout")
    parallel = reader.flag("use_parallel_residual", True)
    block = plain_block(reader, ffn=ffn, parallel=parallel, dropout=dropout)
    return uniform(reader, block | biases(reader, True))


def opt(reader: Reader) -> Model:
    """OPT: two spare position rows; the 350M has a narrow token table and no final norm."""
    positions = reader.positions("max_position_embeddings")
    before = reader.flag("do_layer_norm_before", True)
    block = plain_block(
        reader,
        ffn=reader.size("ffn_dim"),
        bias=reader.flag("enable_bias", True),
        dropout=reader.fraction("dropout", default=0.1),
    )
    width = reader.size("word_embed_proj_dim", default=block["hidden"])
    return uniform(
        reader,
        block,
        tied=True,
        max_seq_len=positions,
        learned_positions=positions + 2,
        embedding_dim=0 if width == block["hidden"] else width,
        final_norm=before and not reader.flag("_remove_final_layer_norm", False),
    )


def bloom(reader: Reader) -> Model:
    """BLOOM: ALiBi, a norm after the embedding."""
    dropout, length = reader.fraction("hidden_dropout"), reader.positions("seq_length", default=2048)
    block = plain_block(reader, (_HIDDEN, "n_embed"), ("n_head", _HEADS), dropout=dropout)
    layers = ("n_layer", "num_hidden_layers")
    return uniform(reader, block, *layers, tied=True, max_seq_len=length, embedding_norm=True)


def falcon(reader: Reader) -> Model:
    """Falcon: multi-query (7B) or grouped (40B, 180B), attention and MLP in parallel."""
    grouped, parallel = reader.flag("new_decoder_architecture", False), reader.flag("parallel_attn", True)
    norms = reader.size("num_ln_in_parallel_attn", default=2, maximum=2) if grouped else 1
    block = plain_block(
        reader,
        heads=(_HEADS, "n_head"),
        bias=reader.flag("bias", False),
        parallel=parallel or grouped,
        num_norms=norms if parallel else 2,
        dropout=reader.fraction("hidden_dropout"),
    )
    block["ffn"] = reader.size("ffn_hidden_size", default=block["ffn"])
    if grouped:
        block["num_kv_heads"] = reader.kv_heads(block["num_heads"], "num_kv_heads", "n_head_kv")
    elif reader.flag("multi_query", True):
        block["num_kv_heads"] = 1
    return uniform(reader, block, "num_hidden_layers", "n_layer", tied=True)


def mpt(reader: Reader) -> Model:
    """MPT: ALiBi, no biases, not even in the norms."""
    if not reader.flag("no_bias", True):
        rule = "Published MPT models have none"
        raise reader.error("no_bias", False, "MPT with biases is not modelled", rule)
    dropout, length = reader.fraction("resid_pdrop"), reader.positions("max_seq_len")
    keys = ("d_model", _HIDDEN), ("n_heads", _HEADS)
    block = plain_block(reader, *keys, bias=False, norm_params=1, dropout=dropout)
    block["ffn"] = reader.size("expansion_ratio", default=4) * block["hidden"]
    return uniform(reader, block, "n_layers", "num_hidden_layers", tied=True, max_seq_len=length)
