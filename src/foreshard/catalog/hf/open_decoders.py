"""Decoders that differ from llama in norms, biases or windows: glm, olmo 1-3, smollm3, stablelm."""

from __future__ import annotations

from typing import Any

from foreshard.catalog.hf.decoders import attention_sizes, finish, llama_block, windowed_blocks
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.model import Block, Model


def _alike(reader: Reader, sizes: dict[str, Any], **more: Any) -> Model:
    """Return a decoder of blocks that are all the same."""
    block = Block(**sizes, ffn=reader.size("intermediate_size"), gated=True, **more)
    return finish(reader, (block,) * reader.layers("num_hidden_layers"), tied=False)


def glm(reader: Reader) -> Model:
    """GLM-4: biases on query, key and value; the rotary part of a head has no parameters of its own."""
    reader = reader.with_defaults(num_key_value_heads=2)
    bias = reader.flag("attention_bias", True)
    return _alike(reader, attention_sizes(reader, head_dim=128), qkv_bias=bias)


def olmo(reader: Reader) -> Model:
    """OLMo 1: norms without parameters."""
    bias = reader.flag("attention_bias", False)
    return _alike(reader, attention_sizes(reader), norm_params=0, qkv_bias=bias, proj_bias=bias)


def _whole_norms(reader: Reader, *, windows: bool) -> Model:
    """Return OLMo 2 or 3: norms behind attention and MLP, and of all channels of queries and of keys."""
    layers = reader.layers("num_hidden_layers")
    bias = reader.flag("attention_bias", False)
    sizes = attention_sizes(reader)
    block = dict(
        sizes,
        ffn=reader.size("intermediate_size"),
        gated=True,
        qk_norm=True,
        other_params=(sizes["num_heads"] + sizes["num_kv_heads"] - 2) * sizes["head_dim"],
        qkv_bias=bias,
        proj_bias=bias,
    )
    window = reader.size("sliding_window", default=4096, minimum=0, maximum=2**31) if windows else 0
    sliding = [bool((layer + 1) % 4) for layer in range(layers)]
    shown = reader.layer_windows(layers, window, sliding) if windows else [0] * layers
    return finish(reader, windowed_blocks(block, shown), tied=False)


def olmo2(reader: Reader) -> Model:
    """OLMo 2."""
    return _whole_norms(reader, windows=False)


def olmo3(reader: Reader) -> Model:
    """OLMo 3: windows in three of four layers."""
    return _whole_norms(reader, windows=True)


def smollm3(reader: Reader) -> Model:
    """SmolLM3: layers without rotary positions slide, where windows are switched on."""
    reader = reader.with_defaults(num_key_value_heads=4)
    layers = reader.layers("num_hidden_layers")
    block = llama_block(reader)
    switched = reader.flag("use_sliding_window", False)
    window = reader.size("sliding_window", default=0, minimum=0, maximum=2**31) if switched else 0
    sliding = [not rotary for rotary in _rotary_layers(reader, layers)]
    return finish(reader, windowed_blocks(block, reader.layer_windows(layers, window, sliding)), tied=True)


def _rotary_layers(reader: Reader, layers: int) -> list[int]:
    """Return whether each layer turns queries and keys: all but every fourth, if the file does not say."""
    every = reader.layers("no_rope_layer_interval", default=4)
    stated = reader.list("no_rope_layers")
    if stated is None:
        return [(layer + 1) % every for layer in range(layers)]
    if len(stated) != layers or any(entry not in (0, 1) for entry in stated):
        rule = f"no_rope_layers has 0 or 1 for each of the {layers} layers"
        raise reader.error("no_rope_layers", str(stated)[:60], f"{len(stated)} entries", rule)
    return stated


def stablelm(reader: Reader) -> Model:
    """StableLM: layer norms; of queries and keys a norm of each head; one norm where both parts read it."""
    reader = reader.with_defaults(num_key_value_heads=32)
    sizes = attention_sizes(reader)
    per_head, parallel = reader.flag("qk_layernorm", False), reader.flag("use_parallel_residual", False)
    scales = sizes["num_heads"] + sizes["num_kv_heads"]  # without biases; a block counts two with them
    return _alike(
        reader,
        sizes,
        norm_params=2,
        num_norms=1 if parallel else 2,
        parallel=parallel,
        qk_norm=per_head,
        other_params=per_head * (scales - 4) * sizes["head_dim"],
        qkv_bias=reader.flag("use_qkv_bias", False),
        dropout=reader.fraction("hidden_dropout", default=0.0),
    )
