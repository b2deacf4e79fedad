import dataclasses

import numpy as np
import pytest

from foreshard.errors import SpecError
from foreshard.spec.model import Block, Model, decoder, freeze, lora


def gpt_block(**changes):
    sizes = {
        "hidden": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "value_head_dim": 16,
        "ffn": 256,
    }
    return Block(**(sizes | {"gated": False} | changes))


def gpt(num_layers=3, **changes):
    return decoder(
        name="toy",
        blocks=(gpt_block(**changes),) * num_layers,
        vocab=100,
        tied_embeddings=False,
        max_seq_len=32,
    )


def test_textbook_gpt_has_twelve_h_squared_per_block_and_six_flops_per_weight():
    """A GPT block has 12 h^2 weights; arXiv 2104.04473 counts 6 FLOPs for each, and 12 L h s of attention."""
    model = gpt()
    matmul = 3 * 12 * 64**2 + 100 * 64
    assert sum(n * kind.matmul_params for kind, n in model.block_kinds()) + model.head_matmul_params == matmul
    assert model.flops_per_token(32, causal=False) == 6 * matmul + 12 * 3 * 64 * 32
    assert model.flops_per_token(32, causal=True) == 6 * matmul + 6 * 3 * 64 * 32


def test_grouped_heads_shrink_projections_and_not_attention():
    full, grouped = gpt_block(), gpt_block(num_kv_heads=1)
    assert full.attention_params - grouped.attention_params == 2 * 3 * 16 * 64
    assert full.attention_flops(32, True) == grouped.attention_flops(32, True)


@pytest.mark.parametrize(("window", "keys"), [(0, 16.0), (32, 16.0), (64, 16.0), (8, 8 - 64 / 64)])
def test_causal_window_counts_the_keys_it_reaches(window, keys):
    block = gpt_block(window=window)
    assert block.context(32, causal=True) == keys
    exact = sum(min(position + 1, window or 32) for position in range(32)) / 32
    assert (
        abs(block.context(32, causal=True) - exact) <= 0.5 + 1e-12
    )  # the convention drops half the diagonal


def test_encoder_block_sees_the_whole_sequence():
    assert gpt_block(causal=False).context(32, causal=True) == 32


def test_experts_all_count_and_only_top_k_are_active():
    block = gpt_block(ffn=0, num_experts=8, top_k=2, expert_ffn=128, shared_ffn=256, gated=True)
    expert = 3 * 64 * 128
    assert block.expert_params == expert
    assert block.num_params - block.active_params == 6 * expert
    assert block.matmul_params == 4 * 64 * 64 + 2 * expert + 3 * 64 * 256 + 8 * 64


def test_latent_attention_of_deepseek_v3():
    """Hand count of DeepSeek-V3 (arXiv 2412.19437, section 4.2): 187 M per layer of attention."""
    block = gpt_block(
        hidden=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        value_head_dim=128,
        q_lora=1536,
        kv_lora=512,
        rope_head_dim=64,
    )
    query = 7168 * 1536 + 1536 * 128 * 192
    latent = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert block.attention_matmul_params == query + latent + 128 * 128 * 7168
    assert block.attention_params - block.attention_matmul_params == 1536 + 512


def test_tied_matrix_counts_once_and_stays_in_both_ends():
    untied = gpt()
    tied = dataclasses.replace(untied, tied_embeddings=True)
    assert untied.num_params - tied.num_params == 100 * 64
    assert tied.embedding_params == tied.head_params == 6400
    assert tied.trainable_params == tied.num_params
    assert tied.flops_per_token(32, True) == untied.flops_per_token(32, True)


def test_lora_trains_rank_times_width_and_spares_a_third():
    model = gpt()
    adapted = lora(model, 4, ("q", "v", "down"))
    assert adapted.trainable_params == 3 * 4 * (128 + 128 + 64 + 256)
    assert adapted.num_params - model.num_params == adapted.trainable_params
    weights = 3 * 12 * 64**2 + 6400
    expected = 4 * weights + 6 * adapted.trainable_params + 12 * 3 * 64 * 32
    # the head keeps its input gradient, the first block receives one for its adapters
    assert adapted.flops_per_token(32, False) == expected


def test_lora_names_what_it_cannot_do():
    with pytest.raises(SpecError, match="unknown LoRA target 'query'"):
        lora(gpt(), 4, ("query",))
    with pytest.raises(SpecError, match="no LoRA target"):
        lora(gpt(), 4, ())
    with pytest.raises(SpecError, match="at least 1"):
        lora(gpt(), 0)
    with pytest.raises(SpecError, match="not modelled"):
        lora(gpt(ffn=0, num_experts=4, top_k=1, expert_ffn=8), 4, ("up",))


def test_freezing_the_first_layers_removes_their_backward():
    model = gpt()
    frozen = freeze(model, [0, 1])
    block = 2 * 12 * 64**2 + 4 * 64 * 32
    assert model.flops_per_token(32, False) - frozen.flops_per_token(32, False) == 2 * block
    assert frozen.trainable_params == model.num_params - 6400 - model.blocks[0].num_params


def test_freezing_a_layer_in_the_middle_keeps_the_gradient_passing():
    model = gpt()
    frozen = freeze(model, [2])
    assert model.flops_per_token(32, False) - frozen.flops_per_token(32, False) == 2 * 12 * 64**2


def test_everything_frozen_has_a_forward_only():
    model = gpt()
    frozen = freeze(model, range(5))
    assert frozen.trainable_params == 0
    assert frozen.flops_per_token(32, True) == frozen.forward_flops_per_token(32, True)


def test_freeze_refuses_layers_that_do_not_exist_and_half_a_tied_matrix():
    with pytest.raises(SpecError, match="Layers are 0 to 4"):
        freeze(gpt(), [5])
    with pytest.raises(SpecError, match="one matrix"):
        freeze(dataclasses.replace(gpt(), tied_embeddings=True), [0])


def test_next_token_module_costs_flops_and_no_counted_parameters():
    model = gpt()
    extended = dataclasses.replace(model, num_next_token=1)
    assert extended.num_params == model.num_params
    more = extended.flops_per_token(32, False) - model.flops_per_token(32, False)
    assert more == 6 * (12 * 64**2 + 2 * 64**2 + 6400) + 12 * 64 * 32


def test_head_of_a_classifier_runs_once_per_sequence():
    model = dataclasses.replace(gpt(), head_rows=1)
    assert gpt().flops_per_token(32, False) - model.flops_per_token(32, False) == 6 * 6400 * 31 / 32


def test_block_kinds_keep_order_and_count():
    wide, narrow = gpt_block(ffn=512), gpt_block()
    model = dataclasses.replace(gpt(), blocks=(wide, narrow, narrow, wide))
    assert model.block_kinds() == ((wide, 2), (narrow, 2))
    assert model.num_layers == 4


def test_arrays_in_the_fields_give_the_scalars_elementwise():
    """A batch engine puts arrays where a model has integers."""
    kinds = [
        gpt_block(),
        gpt_block(gated=True, num_kv_heads=2, window=8, qkv_bias=True, mlp_bias=True),
        gpt_block(kv_lora=8, q_lora=0, rope_head_dim=4),
        gpt_block(kv_lora=8, q_lora=4, rope_head_dim=4, cross_attention=True, causal=False),
        gpt_block(ffn=0, num_experts=4, top_k=2, expert_ffn=32, shared_ffn=16, router_bias=True, frozen=True),
    ]
    fields = [field.name for field in dataclasses.fields(Block) if field.name != "lora_targets"]
    batch = Block(**{name: np.array([getattr(kind, name) for kind in kinds]) for name in fields})
    names = (
        "attention_params",
        "mlp_params",
        "expert_params",
        "router_params",
        "num_params",
        "active_params",
    )
    for name in (*names, "trainable_params", "matmul_params"):
        assert getattr(batch, name).tolist() == [getattr(kind, name) for kind in kinds], name
    for causal in (True, False):
        flops = batch.forward_flops(32, causal)
        assert flops.tolist() == [kind.forward_flops(32, causal) for kind in kinds]


def test_models_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpt().vocab = 5
    assert isinstance(gpt(), Model)
