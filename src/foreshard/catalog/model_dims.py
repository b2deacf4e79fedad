"""A decoder from the dimensions that tables print, and what they leave open."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.block import heads_of
from foreshard.spec.model import Block, Model, decoder

MAX_LAYERS = 4096  # the deepest models of the catalog have some hundred
DEFAULT_SEQ_LEN = 2048  # tokens; of GPT-3 and of Llama 1, where nothing is stated


@functools.cache
def _style(name: str) -> Mapping[str, Any]:
    """Return what dimensions leave open: norms, biases, positions, tying."""
    gpt = {"rotary": 0.0, "norm_params": 2, "qkv_bias": True, "proj_bias": True, "mlp_bias": True}
    styles = {
        "gpt": {"block": gpt, "learned": True, "tied": True},  # Megatron-LM GPT
        "llama": {"block": {"norm_params": 1}, "learned": False, "tied": False},
        "nemotron": {"block": {"norm_params": 2}, "learned": False, "tied": False},
    }
    return styles[name]


def model_from_dims(
    name: str,
    n_layers: int,
    hidden: int,
    ffn: int,
    n_heads: int,
    n_kv_heads: int,
    vocab: int,
    gated: bool,
    n_experts: int = 0,
    topk: int = 0,
    seq_len: int = DEFAULT_SEQ_LEN,
    *,
    head_dim: int | None = None,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    dense_ffn: int = 0,
    style: str | None = None,
    tied: bool | None = None,
    num_norms: int = 2,
    relative_positions: bool = False,
    source: str = "",
    assumptions: tuple[str, ...] = (),
) -> Model:
    """Return a decoder from the dimensions a table prints.

    What dimensions do not say follows from the style: a gated MLP makes it llama-like (RMS norms, no biases,
    untied), a plain one GPT-like as in Megatron-LM (layer norms, biases, learned positions, tied). With
    experts, `ffn` is the width of one expert and `dense_ffn` that of the leading `dense_layers`. With
    `relative_positions` every layer has a square matrix for positions, as in Transformer-XL.
    """
    sizes = {"n_layers": n_layers, "hidden": hidden, "ffn": ffn, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    for key, value in (sizes | {"vocab": vocab, "seq_len": seq_len}).items():
        if value < 1:
            raise SpecError(f"{name}: {key} {value}", key=key, value=value, rule="Dimensions are positive")
    if n_layers > MAX_LAYERS or dense_layers > n_layers:
        what = f"{name}: {n_layers} layers, {dense_layers} of them dense"
        rule = f"A model has at most {MAX_LAYERS} layers, and as many dense ones at most"
        raise SpecError(what, key="n_layers", value=n_layers, rule=rule)
    if n_heads % n_kv_heads or (head_dim is None and hidden % n_heads) or topk > n_experts:
        what = f"{name}: {n_heads} heads, {n_kv_heads} key/value heads, {topk} of {n_experts} experts"
        rule = "Key/value heads divide heads, heads divide hidden, top-k is at most the experts"
        raise SpecError(what, key="n_heads", value=n_heads, rule=rule)
    chosen = _style(style or ("llama" if gated else "gpt"))
    attention = {
        "hidden": hidden,
        **heads_of(n_heads, head_dim or hidden // n_heads, n_kv_heads),
        "gated": gated,
        "num_norms": num_norms,
        "other_params": relative_positions * hidden**2,
        **chosen["block"],
    }
    if relative_positions:
        attention["rotary"] = 0.0
    if n_experts:
        block = Block(
            **attention, ffn=0, num_experts=n_experts, top_k=topk, expert_ffn=ffn, shared_ffn=shared_ffn
        )
    else:
        block = Block(**attention, ffn=ffn)
    dense = Block(**attention, ffn=dense_ffn or ffn)
    return decoder(
        name=name,
        blocks=(dense,) * dense_layers + (block,) * (n_layers - dense_layers),
        vocab=vocab,
        tied_embeddings=chosen["tied"] if tied is None else tied,
        max_seq_len=seq_len,
        learned_positions=seq_len if chosen["learned"] else 0,
        source=source,
        assumptions=assumptions,
    )
