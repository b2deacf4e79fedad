"""Decoders with RMS norms and gated MLPs: llama, mistral, qwen2, qwen3, gemma 1-3, phi3 (and nemotron)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreshard.catalog.hf.reader import Reader
from foreshard.spec.model import Block, Model, decoder


def attention_sizes(reader: Reader, head_dim: int | None = None) -> dict[str, Any]:
    """Return hidden, heads, key/value heads and head size; `head_dim` is the family's default."""
    hidden = reader.size("hidden_size")
    if head_dim is None and reader.config.get("head_dim") is None:
        heads = reader.heads(hidden, "num_attention_heads")
    else:
        heads = reader.size("num_attention_heads")
    width = reader.size("head_dim", default=head_dim or hidden // heads)
    return {
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": reader.kv_heads(heads, "num_key_value_heads"),
        "head_dim": width,
        "value_head_dim": width,
    }


def biases(reader: Reader, default: bool = False) -> dict[str, bool]:
    """Return whether attention has biases; `default` is the family's."""
    bias = reader.flag("attention_bias", default)
    return {"qkv_bias": bias, "proj_bias": bias}


def gated_block(reader: Reader, head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the sizes of a block with a gated MLP; `head_dim` is the family's default."""
    return attention_sizes(reader, head_dim) | {"ffn": reader.size("intermediate_size"), "gated": True} | more


def uniform(
    reader: Reader, block: Mapping[str, Any], *layers: str, tied: bool = False, **kwargs: Any
) -> Model:
    """Return a decoder of blocks that are all the same; `layers` are the keys of their number."""
    count = reader.layers(*layers or ("num_hidden_layers",))
    return finish(reader, (Block(**block),) * count, tied=tied, **kwargs)


def windowed(
    reader: Reader, block: Mapping[str, Any], windows: Sequence[int], *, tied: bool = False, **kwargs: Any
) -> Model:
    """Return a decoder of one block per window, equal ones shared."""
    kinds = {window: Block(window=window, **block) for window in set(windows)}
    return finish(reader, tuple(kinds[window] for window in windows), tied=tied, **kwargs)


def finish(reader: Reader, blocks: tuple[Block, ...], *, tied: bool, **kwargs: Any) -> Model:
    """Return the decoder; `tied` is the family's default of tie_word_embeddings."""
    if "max_seq_len" not in kwargs:
        kwargs["max_seq_len"] = reader.positions("max_position_embeddings", default=2048)
    return decoder(
        name=reader.name,
        blocks=blocks,
        vocab=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", tied),
        source=reader.file or "",
        assumptions=tuple(reader.assumptions),
        **kwargs,
    )


def _sliding_window(reader: Reader, unstated: int = 0) -> int:
    """Return the window: null means full attention, an absent key the default of transformers."""
    default = 0 if "sliding_window" in reader.config else unstated
    return reader.window(default)


def llama_block(reader: Reader) -> dict[str, Any]:
    """Return the sizes of a block of Llama, which may have biases."""
    return gated_block(reader, **biases(reader), mlp_bias=reader.flag("mlp_bias", False))


def llama(reader: Reader) -> Model:
    """Llama 1 to 3.x."""
    return uniform(reader, llama_block(reader))


def mistral(reader: Reader) -> Model:
    """Mistral: llama with a sliding window in every layer."""
    return uniform(reader, gated_block(reader, window=_sliding_window(reader, 4096)))


def qwen_windows(reader: Reader) -> Sequence[int]:
    """Return the windows of Qwen layers: those from max_window_layers on slide, if the switch is on."""
    layers = reader.layers("num_hidden_layers")
    window = _sliding_window(reader, 4096) if reader.flag("use_sliding_window", False) else 0
    first = reader.layers("max_window_layers", default=28, minimum=0)
    return reader.layer_windows(layers, window, [layer >= first for layer in range(layers)])


def qwen2(reader: Reader) -> Model:
    """Qwen2 and 2.5: biases on query, key and value only."""
    return windowed(reader, gated_block(reader, qkv_bias=True), qwen_windows(reader))


def qwen3(reader: Reader) -> Model:
    """Qwen3 dense: norms on queries and keys."""
    return windowed(reader, gated_block(reader, 128, qk_norm=True, **biases(reader)), qwen_windows(reader))


def _gemma(reader: Reader, *, norms: int, qk_norm: bool, pattern: int) -> Model:
    """Gemma; every `pattern`-th layer has full attention, the others slide (0: all full)."""
    layers = reader.layers("num_hidden_layers")
    block = gated_block(reader, 256, num_norms=norms, qk_norm=qk_norm, **biases(reader))
    sliding = [bool(pattern and (layer + 1) % pattern) for layer in range(layers)]
    windows = reader.layer_windows(layers, reader.window(4096) if pattern else 0, sliding)
    return windowed(reader, block, windows, tied=True)


def gemma(reader: Reader) -> Model:
    """Gemma 1."""
    return _gemma(reader, norms=2, qk_norm=False, pattern=0)


def gemma2(reader: Reader) -> Model:
    """Gemma 2: four norms, windows in every other layer."""
    return _gemma(reader, norms=4, qk_norm=False, pattern=2)


def gemma3(reader: Reader) -> Model:
    """Gemma 3 text: four norms, query/key norms, five windowed layers to one full.

    Published files leave out what equals the defaults of transformers' Gemma3TextConfig.
    """
    reader = reader.with_defaults(vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4)
    pattern = reader.layers("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _gemma(reader, norms=4, qk_norm=True, pattern=pattern)


def phi3(reader: Reader) -> Model:
    """Phi-3: fused projections, same counts as llama."""
    return uniform(reader, gated_block(reader, window=_sliding_window(reader)))


def nemotron(reader: Reader) -> Model:
    """Nemotron 3 and 4: squared ReLU (two matrices), layer norms, rotary positions."""
    return uniform(reader, llama_block(reader) | {"gated": False, "norm_params": 2})
