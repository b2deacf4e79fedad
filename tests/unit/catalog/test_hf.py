import json
import math
from pathlib import Path

import pytest

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.hf.load import FAMILIES, model_from_config, read_config
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.interop.exporters.megatron_model import model_flags, model_gaps

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/model_params.json").read_text("utf-8"))
LLAMA = next(case["config"] for case in GOLDEN["cases"] if case["name"] == "llama3-8b")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_parameter_count_equals_that_of_transformers(case):
    assert model_from_config(case["config"], name=case["name"]).num_params == case["num_params"]


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN["cases"] if "forward_flops" in case], ids=lambda case: case["name"]
)
def test_forward_flops_equal_those_that_torch_counts(case):
    """All pairs of the attention: eager kernels compute what a mask then hides."""
    tokens = GOLDEN["tokens"]
    model = model_from_config(case["config"], name=case["name"])
    assert model.forward_flops_per_token(tokens, False) * tokens == case["forward_flops"]


def test_every_family_is_in_the_golden_table():
    assert {case["config"]["model_type"] for case in GOLDEN["cases"]} == set(FAMILIES)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "mpt"])
def test_a_length_stated_under_another_key_is_no_assumption(model_type):
    case = next(case for case in GOLDEN["cases"] if case["config"]["model_type"] == model_type)
    assert "max_position_embeddings" not in case["config"]
    assert not model_from_config(case["config"], name="x").assumptions


def without(key):
    return {name: value for name, value in LLAMA.items() if name != key}


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_missing_key_is_named_with_its_file(key):
    with pytest.raises(SpecError) as caught:
        model_from_config(without(key), name="x", file="dir/config.json")
    assert (caught.value.file, caught.value.key) == ("dir/config.json", key)
    assert caught.value.fix == f"Add {key}"


@pytest.mark.parametrize("value", [0, -5, 2.5, 4096.0, math.nan, math.inf, "4096", True, [4096], {}, 10**30])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "intermediate_size", "num_key_value_heads"]
)
def test_impossible_size_is_refused_with_its_value(key, value):
    with pytest.raises(SpecError) as caught:
        model_from_config(LLAMA | {key: value}, name="x")
    assert caught.value.key == key
    assert caught.value.rule
    assert str(value)[:20] in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 33}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"model_type": "gpt_neox", "hidden_dropout": 1.5}, "hidden_dropout"),
    ],
)
def test_contradictions_name_their_key(change, key):
    with pytest.raises(SpecError) as caught:
        model_from_config(LLAMA | change, name="x")
    assert caught.value.key == key


def test_unknown_family_lists_the_known_and_suggests():
    with pytest.raises(SpecError, match=r"Known: apertus.*Did you mean 'llama'") as caught:
        model_from_config(LLAMA | {"model_type": "lama"}, name="x")
    assert caught.value.exit_code == 2


def test_another_case_and_a_text_model_inside_are_pointed_at():
    with pytest.raises(SpecError, match="Did you mean 'llama'"):
        model_from_config(LLAMA | {"model_type": "LLaMA"}, name="x")
    with pytest.raises(SpecError, match="Its text_config is a llama: give that object"):
        model_from_config({"model_type": "llava", "text_config": LLAMA, "vision_config": {}}, name="x")


def test_quantized_weights_are_said_to_be_read_as_whole_ones():
    quantized = LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    model = model_from_config(quantized, name="x")
    assert any("quantization_config is not read" in line for line in model.assumptions)
    assert model.num_params == model_from_config(LLAMA, name="x").num_params


def test_a_published_gemma3_leaves_out_the_defaults_of_transformers():
    published = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    published |= {"num_hidden_layers": 34, "sliding_window": 1024, "rope_scaling": {"factor": 8.0}}
    model = model_from_config(published, name="x")
    assert model.num_params == 3_880_263_168  # of google/gemma-3-4b-pt, without its vision tower
    assert "num_attention_heads not stated: 8" in model.assumptions


def test_hybrids_and_towers_are_not_modelled():
    for model_type in ("jamba", "mamba", "qwen3_next", "gemma3", "llama4", "albert", "whisper"):
        with pytest.raises(SpecError, match="not modelled"):
            model_from_config(LLAMA | {"model_type": model_type}, name="x")


def test_null_counts_as_absent():
    explicit = model_from_config(LLAMA | {"head_dim": None, "attention_bias": None}, name="x")
    assert explicit.num_params == model_from_config(LLAMA, name="x").num_params


def test_windows_of_alternating_layers():
    by_name = {case["name"]: case["config"] for case in GOLDEN["cases"]}

    def windows(name):
        return [block.window for block in model_from_config(by_name[name], name=name).blocks]

    assert windows("gpt-oss-20b")[:4] == [128, 0, 128, 0]
    assert windows("gemma2-9b")[:4] == [4096, 0, 4096, 0]
    assert windows("gemma3-1b")[:7] == [512] * 5 + [0, 512]
    assert windows("gpt-neo-1.3b")[:4] == [0, 256, 0, 256]
    assert set(windows("mistral-7b")) == {4096}
    assert set(windows("qwen2.5-7b")) == {0}


def test_leading_dense_layers_of_deepseek_v3():
    config = next(case["config"] for case in GOLDEN["cases"] if case["name"] == "deepseek-v3")
    model = model_from_config(config, name="deepseek-v3")
    assert [block.num_experts for block in model.blocks[:4]] == [0, 0, 0, 256]
    assert model.num_next_token == 1
    # arXiv 2412.19437: 671 B parameters, 37 B active for each token
    assert round(model.num_params / 1e9) == 671
    assert 37e9 < model.active_params < 38e9
    assert any("next-token" in line for line in model.assumptions)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"model_type": "llama", "hidd', b"[1, 2]", b"null", b"\xff\xfe{}", b"[" * 100_000, b"nan"],
    ids=["empty", "truncated", "list", "null", "not utf-8", "deep", "nan"],
)
def test_broken_file_is_a_spec_error_that_names_it(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        model_from_config(read_config(path), name="x", file=str(path))
    assert caught.value.file == str(path)


def test_huge_missing_and_directory(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "' + b"x" * 10_000_000 + b'"}')
    for bad in (path, tmp_path, tmp_path / "absent.json", "a\0b.json", "x" * 5000 + ".json"):
        with pytest.raises(SpecError):
            read_config(bad)


@pytest.mark.parametrize(
    ("model_type", "change", "windows"),
    [
        ("olmo3", {}, [4096, 4096, 4096, 0, 4096]),
        ("olmo3", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, [0, 0, 0, 0, 4096]),
        ("ministral", {"sliding_window": 64}, [64] * 5),
        ("ministral", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, [0, 0, 0, 0, 4096]),
        ("cwm", {}, [0, 8192, 8192, 8192, 0]),
        ("smollm3", {"sliding_window": 64}, [0, 0, 0, 0, 0]),
        ("smollm3", {"sliding_window": 64, "use_sliding_window": True}, [0, 0, 0, 64, 0]),
        (
            "smollm3",
            {"sliding_window": 64, "use_sliding_window": True, "no_rope_layers": [0, 1, 1, 0, 1]},
            [64, 0, 0, 64, 0],
        ),
    ],
)
def test_the_layers_that_slide_are_those_of_transformers(model_type, change, windows):
    config = LLAMA | {"model_type": model_type, "num_hidden_layers": 5} | change
    assert [block.window for block in model_from_config(config, name="x").blocks] == windows


def exaone4(**change):
    config = LLAMA | {"model_type": "exaone4", "num_hidden_layers": 5, "sliding_window": 64} | change
    return model_from_config(config, name="x").blocks


def test_layers_of_exaone4_without_a_window_are_not_rotated_unless_none_has_one():
    """modeling_exaone4.py of transformers 5.24: ``sliding_window is None or self.is_sliding``."""
    types = ["full_attention", *["sliding_attention"] * 4]
    assert [block.rotary for block in exaone4()] == [1, 1, 1, 0, 1]
    lettered = exaone4(sliding_window_pattern="LLLG", layer_types=types)  # as LG writes it
    assert [(block.window, block.rotary) for block in lettered] == [(0, 0)] + [(64, 1)] * 4
    full = exaone4(sliding_window=None, layer_types=["full_attention"] * 5)
    assert [(block.window, block.rotary) for block in full] == [(0, 1)] * 5


@pytest.mark.parametrize("model_type", ["exaone4", "hunyuan_v1_dense"])
def test_norms_that_megatron_places_otherwise_are_not_exported(model_type):
    config = LLAMA | {"rope_theta": 1e6, "model_type": model_type, "sliding_window": None}
    config |= {"layer_types": ["full_attention"] * LLAMA["num_hidden_layers"]}
    assert [gap.partition(",")[0] for gap in model_gaps(model_from_config(config, name="x"))] == [
        "norms behind attention and MLP"
    ]


def test_a_number_that_a_file_lists_for_each_layer_is_the_same_for_all():
    """Hunyuan-A13B lists moe_topk."""
    hunyuan = LLAMA | {"model_type": "hunyuan_v1_moe", "num_experts": 8}
    listed, stated = (model_from_config(hunyuan | {"moe_topk": top_k}, name="x") for top_k in ([2] * 32, 2))
    assert listed == stated and listed.blocks[0].top_k == 2
    for top_k in ([2] * 31 + [1], [], ["2"], [0]):
        with pytest.raises(SpecError) as caught:
            model_from_config(hunyuan | {"moe_topk": top_k}, name="x")
        assert caught.value.key == "moe_topk"


def sparse(model_type, **change):
    config = LLAMA | {"model_type": model_type, "num_hidden_layers": 6, "moe_intermediate_size": 64}
    config |= {"num_experts": 8, "num_experts_per_tok": 2} | change
    return [block.num_experts > 0 for block in model_from_config(config, name="x").blocks]


def test_the_layers_with_experts_are_those_of_transformers():
    """modeling_ernie4_5_moe.py and configuration_exaone_moe.py of transformers 5.24."""
    assert sparse("ernie4_5_moe") == [False] + [True] * 5
    ranged = {"moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 4}
    assert sparse("ernie4_5_moe", **ranged) == [False, False, False, True, False, False]
    assert sparse("exaone_moe", first_k_dense_replace=2) == [False] * 2 + [True] * 4
    assert sparse("exaone_moe", mlp_layer_types=["sparse", "dense"] * 3) == [True, False] * 3
    with pytest.raises(SpecError, match="Each of the 6 layers is dense or sparse"):
        sparse("exaone_moe", mlp_layer_types=["sparse"] * 5)
    with pytest.raises(SpecError, match="MoE with biases is not modelled"):
        sparse("ernie4_5_moe", use_bias=True)


def test_weights_of_dots1_sum_to_1_only_where_the_file_says_so():
    """Dots1Config of transformers 5.24: norm_topk_prob is false by default."""
    config = LLAMA | {"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2}
    config |= {"n_shared_experts": 1, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5}
    assert model_from_config(config, name="x").router is None
    assert model_from_config(config | {"norm_topk_prob": True}, name="x").router == ("sigmoid", 2.5)


def test_layers_without_rotary_positions_are_all_named():
    config = LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 0]}
    with pytest.raises(SpecError, match="0 or 1 for each of the 32 layers") as caught:
        model_from_config(config, name="x")
    assert caught.value.key == "no_rope_layers"


@pytest.mark.parametrize(
    ("kind", "activation", "formula"),
    [
        ("gpt2", None, "gelu_new"),
        ("gpt2", "gelu", ""),
        ("gpt2", "gelu_pytorch_tanh", ""),
        ("gpt_bigcode", None, ""),
        ("gpt_bigcode", "gelu_fast", "gelu_fast"),
    ],
)
def test_gelu_is_spelled_where_transformers_has_no_kernel_for_it(kind, activation, formula):
    """GPT-2 does so unless told otherwise, StarCoder does not."""
    config = {
        "model_type": kind,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 8,
    }
    config |= {"n_positions": 8} | ({"activation_function": activation} if activation else {})
    assert model_from_config(config, name="x").blocks[0].spelled_activation == formula


def test_formulas_of_gelu_by_family():
    """T5 v1.1 takes gelu_new, GPT-NeoX-20B gelu_fast, BLOOM its own; Pythia a kernel."""
    names = {"t5-v1.1-base": "gelu_new", "t5-base": "", "gpt-neox-20b": "gelu_fast", "bloom-560m": "bloom"}
    for name, formula in (names | {"pythia-1b": ""}).items():
        assert {block.spelled_activation for block in load_model(name).blocks} == {formula}, name


def test_layers_without_rotary_positions_turn_nothing():
    """Every fourth of SmolLM3, those without a window of Command R7B, as transformers builds them."""
    for name in ("smollm3-3b", "command-r7b", "llama4-scout"):
        turned = [1.0, 1.0, 1.0, 0.0]
        model = load_model(name)
        assert [block.rotary for block in model.blocks] == turned * (model.num_layers // 4)
    assert {load_model(name).rope_base for name in ("llama-7b", "llama-65b", "gpt-j-6b")} == {1e4}
    minimax = load_model("minimax-m2")
    assert (minimax.rope_base, minimax.blocks[0].rotary) == (5e6, 0.5)


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (
            {
                "model_type": "bart",
                "d_model": 64,
                "max_position_embeddings": 128,
                **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
                **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
                **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
                "tie_word_embeddings": False,
            },
            440_320,
        ),
        (
            {
                "model_type": "nemotron_h",
                "hidden_size": 64,
                "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
                "num_attention_heads": 4,
                "head_dim": 16,
                "num_key_value_heads": 2,
                "intermediate_size": 128,
                "mamba_num_heads": 8,
                "mamba_head_dim": 16,
                "ssm_state_size": 16,
                "n_groups": 2,
                "tie_word_embeddings": True,
            },
            203_672,
        ),
    ],
    ids=lambda case: case["model_type"] if isinstance(case, dict) else "",
)
def test_tables_that_are_tied_otherwise_than_usual_are_those_of_transformers(config, num_params):
    """``num_parameters`` of transformers 5.24: BartForConditionalGeneration, NemotronHForCausalLM.

    BART has a table of its own on each side then, beside the common one; Nemotron-H ties nothing.
    """
    assert model_from_config({"vocab_size": 1000, **config}, name="x").num_params == num_params


def test_a_wider_mlp_of_mpt_is_refused_which_transformers_does_not_make():
    """modeling_mpt.py of transformers 5.24, MptMLP: 4 * hidden_size."""
    mpt = next(case["config"] for case in GOLDEN["cases"] if case["config"]["model_type"] == "mpt")
    with pytest.raises(SpecError, match="MLP 3 times as wide is not modelled"):
        model_from_config(mpt | {"expansion_ratio": 3}, name="x")


@pytest.mark.parametrize(
    ("name", "activation", "router"),
    [
        ("nemotron4-15b", "relu2", None),
        ("llama3-8b", "", None),
        ("gemma-2b", "gelu_pytorch_tanh", None),
        ("mixtral-8x7b", "", ("softmax", 1.0)),
        ("qwen3-30b-a3b", "", ("softmax", 1.0)),
        ("qwen2-57b-a14b", "", ("softmax_all", 1.0)),
        ("deepseek-v2-lite", "", ("softmax_all", 1.0)),
        ("deepseek-v3", "", ("sigmoid", 2.5)),
        ("kimi-k2", "", ("sigmoid", 2.827)),
        ("glm-4.5-355b-a32b", "", ("sigmoid", 2.5)),
    ],
)
def test_activations_and_routers_are_those_of_the_published_configurations(name, activation, router):
    """Defaults of transformers 5.24's classes; norm_topk_prob and routed_scaling_factor of config.json."""
    model = load_model(name)
    assert (model.activation, model.router) == (activation, router)


@pytest.mark.parametrize("name", ["command-r-plus-104b", "command-r7b"])
def test_logits_of_command_r_are_scaled_whether_or_not_the_file_says_so(name):
    """CohereConfig and Cohere2Config of transformers 5.24: logit_scale is 0.0625 by default."""
    assert load_model(name).scaled


def test_smollm3_has_the_rotary_base_of_the_published_file():
    """HuggingFaceTB/SmolLM3-3B config.json: 5,000,000, where transformers' class has 2,000,000."""
    assert load_model("smollm3-3b").rope_base == 5e6


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("stablelm2-12b", 1e4),
        ("stablelm2-1.6b", 1e4),
        ("olmo-7b", 1e4),
        ("olmo2-1b", 5e5),
        ("olmo3-32b", 5e5),
        ("phi3-medium", 1e4),
    ],
)
def test_rotary_bases_are_those_of_the_code_that_trains_or_loads_the_model(name, base):
    """StableLM 26cf639, OLMo-core, LitGPT 2685705 and transformers 5.24; each entry says which."""
    model = load_model(name)
    assert model.rope_base == base
    assert any("rope_theta" in line for line in model.assumptions)


STATED_BASES = ("rope_theta", "rope_parameters", "rotary_emb_base")
USUAL_BASES = {
    "apertus": 12e6,
    "cohere": 5e5,
    "cwm": 1e6,
    "ernie4_5": 5e5,
    "ernie4_5_moe": 5e5,
    "flex_olmo": 5e5,
}
USUAL_BASES |= {"gemma3_text": 1e6, "gpt_oss": 15e4, "helium": 1e5, "llama4_text": 5e5, "minimax_m2": 5e6}
USUAL_BASES |= {
    "ministral3": 1e6,
    "mixtral": 1e6,
    "olmo3": 5e5,
    "phimoe": 1e6,
    "smollm3": 2e6,
    "solar_open": 1e6,
}


def test_a_file_without_a_rotary_base_has_that_of_transformers():
    """`default_theta` of the configuration classes of transformers 5.24; 10,000 where they say nothing."""
    for case in GOLDEN["cases"]:
        bare = {key: value for key, value in case["config"].items() if key not in STATED_BASES}
        model = model_from_config(bare, name="x", file="config.json")
        turns = any(block.rotary and not block.scan_state for block in model.blocks)
        if turns and bare["model_type"] not in ("modernbert", "nemotron_h"):
            assert model.rope_base == USUAL_BASES.get(bare["model_type"], 1e4), bare["model_type"]
    assert model_from_config(LLAMA | {"rope_theta": 5.0}, name="x", file="config.json").rope_base == 5


@pytest.mark.parametrize(("model_type", "interleaved"), [("llama", False), ("glm", True), ("ernie4_5", True)])
def test_megatron_is_told_which_channels_turn_together(model_type, interleaved):
    """modeling_glm.py of transformers 5.24 turns neighbours; Megatron turns halves unless told."""
    model = model_from_config(LLAMA | {"model_type": model_type}, name="x", file="config.json")
    assert (("--rotary-interleaved",) in model_flags(model, load_framework("megatron-core"))) is interleaved


def test_a_product_behind_attention_that_is_not_square_is_refused_of_helium():
    with pytest.raises(SpecError, match="the product behind attention is square"):
        model_from_config(LLAMA | {"model_type": "helium", "head_dim": 96}, name="x")


def test_ministral_8b_has_its_published_size():
    sizes = {"intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 131072, "head_dim": 128}
    sizes |= {"model_type": "ministral", "sliding_window": 32768}
    assert model_from_config(LLAMA | sizes, name="x").num_params == 8_019_808_256
