"""Decoders that differ from llama in norms, biases or windows: glm, olmo 1-3, smollm3, stablelm."""

from __future__ import annotations

from typing import Any

from foreshard.catalog.hf.decoders import biases, gated_block, llama_block, uniform, windowed
from foreshard.catalog.hf.reader import Reader
from foreshard.spec.model import Model


def glm(reader: Reader) -> Model:
    """GLM-4: biases on query, key and value; the rotary part of a head has no parameters of its own."""
    reader = reader.with_defaults(num_key_value_heads=2)
    return uniform(reader, gated_block(reader, 128, qkv_bias=reader.flag("attention_bias", True)))


def olmo(reader: Reader) -> Model:
    """OLMo 1: norms without parameters."""
    return uniform(reader, gated_block(reader, norm_params=0, **biases(reader)))


def _whole_norms(reader: Reader) -> dict[str, Any]:
    """Return a block of OLMo 2 or 3: norms behind attention and MLP, of all channels of queries and keys."""
    block = gated_block(reader, qk_norm=True, **biases(reader))
    block["other_params"] = (block["num_heads"] + block["num_kv_heads"] - 2) * block["head_dim"]
    return block


def olmo2(reader: Reader) -> Model:
    """OLMo 2."""
    return uniform(reader, _whole_norms(reader))


def olmo3(reader: Reader) -> Model:
    """OLMo 3: windows in three of four layers."""
    layers = reader.layers("num_hidden_layers")
    sliding = [bool((layer + 1) % 4) for layer in range(layers)]
    return windowed(reader, _whole_norms(reader), reader.layer_windows(layers, reader.window(4096), sliding))


def smollm3(reader: Reader) -> Model:
    """SmolLM3: layers without rotary positions slide, where windows are switched on."""
    reader = reader.with_defaults(num_key_value_heads=4)
    layers = reader.layers("num_hidden_layers")
    window = reader.window(0) if reader.flag("use_sliding_window", False) else 0
    sliding = [not rotary for rotary in _rotary_layers(reader, layers)]
    return windowed(reader, llama_block(reader), reader.layer_windows(layers, window, sliding), tied=True)


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
    per_head, parallel = reader.flag("qk_layernorm", False), reader.flag("use_parallel_residual", False)
    block = gated_block(
        reader,
        norm_params=2,
        num_norms=1 if parallel else 2,
        parallel=parallel,
        qk_norm=per_head,
        qkv_bias=reader.flag("use_qkv_bias", False),
        dropout=reader.fraction("hidden_dropout", default=0.0),
    )
    scales = block["num_heads"] + block["num_kv_heads"]  # without biases; a block counts two with them
    block["other_params"] = per_head * (scales - 4) * block["head_dim"]
    return uniform(reader, block)
