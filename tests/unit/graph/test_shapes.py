"""Sizes of a layer against the parameters the model counts."""

from dataclasses import replace

import pytest

from foreshard.catalog.models import load_model
from foreshard.graph.shapes import NO_LAYER, layer_shape
from foreshard.spec.model import freeze, lora

NAMES = (
    "llama3-8b",
    "gpt2",
    "falcon-7b",
    "mixtral-8x7b",
    "deepseek-v3",
    "qwen3-30b-a3b",
    "bert-large",
    "t5-11b",
)


@pytest.mark.parametrize("name", NAMES)
def test_dense_and_expert_parameters_are_all_of_a_block(name):
    for block, _ in load_model(name).block_kinds():
        shape = layer_shape(block)
        assert shape.dense_params + shape.expert_params == block.num_params
        assert shape.expert_params == block.num_experts * block.expert_params
        assert shape.trainable == 1.0


def test_biases_of_experts_belong_to_experts():
    block = replace(load_model("mixtral-8x7b").blocks[0], mlp_bias=True)
    shape = layer_shape(block)
    assert shape.expert_params == 8 * (3 * 4096 * 14336 + 2 * 14336 + 4096)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_adapters_are_the_trained_part_of_the_dense_parameters(name):
    adapted = lora(load_model(name), rank=16, targets=("q", "v"))
    block = adapted.blocks[0]
    shape = layer_shape(block)
    assert shape.frozen and shape.dense_params * shape.trainable == pytest.approx(block.lora_params)
    assert shape.lora_attention == 2 and shape.lora_mlp == 0


def test_a_frozen_block_trains_nothing():
    block = freeze(load_model("mixtral-8x7b"), [1]).blocks[0]
    assert layer_shape(block).trainable == 0.0


def test_widths_of_grouped_and_latent_attention():
    grouped = layer_shape(load_model("llama3-8b").blocks[0])
    assert (grouped.query_width, grouped.key_width, grouped.kv_width) == (4096, 1024, 2048)
    latent_block = load_model("deepseek-v3").blocks[0]
    latent = layer_shape(latent_block)
    assert latent.num_kv_heads == latent.num_heads == 128, "keys and values are expanded for every head"
    assert latent.kv_width == 128 * (192 + 128)


def test_no_layer_is_all_zero():
    assert all(getattr(NO_LAYER, name) == 0.0 for name in NO_LAYER.__slots__)
