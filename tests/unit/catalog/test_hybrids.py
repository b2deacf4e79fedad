"""Hybrids of scans, attention and experts: counts their publishers state, and what follows from a pattern."""

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.hf.hybrids import hybrid_model
from foreshard.catalog.hf.load import model_from_config
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.predict import predict
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.model import lora
from foreshard.validation.row_model import resolve_row_model

SIZES = {
    "hidden": 256,
    "vocab": 1000,
    "seq_len": 512,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "scan_heads": 8,
    "scan_head_dim": 64,
    "scan_state": 32,
    "scan_groups": 2,
    "ffn": 1024,
}


# billions of parameters, all and active, as the model cards of nvidia/... state them
@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Nemotron-H-8B", 8.1, 8.1),
        ("Nemotron-H-56B (hybrid Mamba)", 56.3, 56.3),
        ("nemotron-nano2-9b", 8.89, 8.89),
        ("nemotron-nano2-12b", 12.31, 12.31),
        ("Nemotron_3_Nano", 31.6, 3.6),
        ("Nemotron_3_Super", 120.6, 12.7),
    ],
)
def test_size_is_the_published_one(name, billions, active):
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.active_params / 1e9 == pytest.approx(active, rel=0.01)
    assert any("scan" in line for line in model.assumptions)


NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "intermediate_size": 21504,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
}
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 64,
    "vocab_size": 5000,
}


def test_a_configuration_gives_the_model_that_the_catalog_has():
    read, known = model_from_config(NEMOTRON_H_8B, name="x"), load_model("nemotronh-8b")
    assert read.blocks == known.blocks and read.num_params == known.num_params
    named = {"M": "mamba", "*": "attention", "-": "mlp"}
    layers = [named[letter] for letter in NEMOTRON_H_8B["hybrid_override_pattern"]]
    assert model_from_config(NEMOTRON_H_8B | {"layers_block_type": layers}, name="x").blocks == known.blocks
    assert any("scan" in line for line in read.assumptions)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MAMBA2 | {"num_heads": 9}, "num_heads"),
        (MAMBA2 | {"use_bias": True}, "use_bias"),
        (MAMBA2 | {"conv_kernel": 5}, "conv_kernel"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": "MXM"}, "layers_block_type"),
        (NEMOTRON_H_8B | {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_configurations_that_are_not_modelled_name_their_key(config, key):
    with pytest.raises(SpecError) as caught:
        model_from_config(config, name="x")
    assert caught.value.key == key


def test_parameters_of_a_scan_by_hand():
    model = hybrid_model("tiny", pattern="M*-", **SIZES)
    scan, attention, mlp = model.blocks
    channels, mixed = 512, 512 + 2 * 2 * 32
    by_hand = 256 * (2 * channels + 2 * 2 * 32 + 8) + 5 * mixed + 3 * 8 + channels + channels * 256 + 256
    assert scan.num_params == by_hand
    assert attention.num_params == 256 * 64 * (4 + 2 * 2 + 4) + 256
    assert mlp.num_params == 2 * 256 * 1024 + 256
    assert model.flops_per_token(512, True) > 6 * (by_hand - 256)


def test_unknown_layers_and_what_is_not_modelled_are_refused():
    with pytest.raises(SpecError, match="layer 'X'"):
        hybrid_model("tiny", pattern="MX", **SIZES)
    with pytest.raises(SpecError, match="LoRA"):
        lora(hybrid_model("tiny", pattern="M*", **SIZES), 8)


def test_a_row_that_states_the_dimensions_is_the_catalogs_and_others_are_refused():
    row = {
        "model": "Nemotron-H-56B (hybrid Mamba)",
        "n_layers": "118",
        "hidden": "8192",
        "n_heads": "64",
        "n_kv_heads": "8",
        "ffn_hidden": "32768",
        "vocab": "131072",
        "seq_len": "8192",
    }
    assert resolve_row_model(row).num_params == load_model("nemotronh-56b").num_params
    with pytest.raises(SpecError, match="hybrid"):
        resolve_row_model(row | {"hidden": "4096"})


@pytest.mark.parametrize("engine", ["analytical", "graph"])
def test_a_hybrid_is_predicted_between_its_scans_and_its_attention(engine):
    cluster = load_cluster("1x8xh100-sxm")

    def step_s(pattern):
        wide = {"hidden": 4096, "scan_heads": 128, "heads": 32, "kv_heads": 8, "head_dim": 128}
        model = hybrid_model("some", pattern=pattern, **(SIZES | wide | {"ffn": 16384, "vocab": 32000}))
        plan = plan_from_degrees(
            len(pattern),
            8,
            tp=2,
            micro_batch=1,
            global_batch=8,
            seq_len=4096,
            precision="bf16",
            framework="megatron-core",
        )
        made = predict(model, cluster, plan, engine=engine)
        low, high = made.step_time_interval_s
        assert low < made.step_time_s < high
        assert made.memory.fits and 0 < made.mfu < 0.75
        return made.step_time_s

    scans, attention, both = step_s("MM" * 8), step_s("**" * 8), step_s("M*" * 8)
    assert both == pytest.approx((scans + attention) / 2, rel=0.05)
