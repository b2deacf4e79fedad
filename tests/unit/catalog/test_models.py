import csv
import json
import os
import statistics
from pathlib import Path

import pytest

from foreshard.catalog.hf.load import FAMILIES
from foreshard.catalog.model_dims import model_from_dims
from foreshard.catalog.models import _key, load_model, models
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.validation.row_model import resolve_row_model

MEASURED = Path(os.environ.get("FORESHARD_MEASURED", Path(__file__).parents[4] / "shared/measured/dev"))
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def test_every_entry_loads_has_a_source_and_no_two_share_a_name():
    seen = {}
    for name, entry in shipped("models.json")["models"].items():
        model = load_model(name)
        assert model.name == name
        assert model.source.startswith(("https://", "arXiv", "NVIDIA"))
        for spelling in (name, *entry["aliases"]):
            assert seen.setdefault(_key(spelling), name) == name
            assert load_model(spelling) is model
    assert set(models()) == set(shipped("models.json")["models"])


# sizes their publishers state, in billions
@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama3-8b", 8.03, 8.03),
        ("llama3.1-405b", 405.9, 405.9),
        ("gpt3-175b", 174.6, 174.6),
        ("gpt-22b", 22.1, 22.1),
        ("gpt-1008b", 1008.0, 1008.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("gpt-oss-120b", 116.8, 5.7),
        ("kimi-k2", 1026.4, 32.9),
        ("deepseek-v2", 235.7, 21.4),
        ("llama4-maverick", 400.7, 17.2),
        ("nemotron4-340b", 341.0, 341.0),
        ("mpt-7b", 6.659, 6.659),
        ("grok-1", 315.7, 83.8),
        ("maxtext-52b", 52.3, 52.3),
        ("mpt-70b", 64.862437376, 64.862437376),  # NumParams of llm-foundry's benchmarking table
        ("nanotron-llama-3.57b", 3.57, 3.57),
        ("nanotron-llama-8.86b", 8.86, 8.86),
        # sums of params_floats in sailor/Planner/llm_info.json: embedding, blocks, head
        ("OPT-350", (53608448 + 24 * 12596224 + 51513344) / 1e9, (53608448 + 24 * 12596224 + 51513344) / 1e9),
        ("GPT-Neo-2.7", (134021120 + 32 * 78676480 + 5120) / 1e9, (134021120 + 32 * 78676480 + 5120) / 1e9),
    ],
)
def test_size_is_the_published_one(name, billions, active):
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.004)
    assert model.active_params / 1e9 == pytest.approx(active, rel=0.01)


def test_spelling_does_not_matter_and_unknown_names_get_a_suggestion():
    assert load_model("Llama-3/3.1-8B") is load_model("llama3 8b") is load_model("LLAMA3-8B")
    with pytest.raises(SpecError, match="Did you mean 'llama3-8b'"):
        load_model("llama3-8bb")
    with pytest.raises(SpecError, match="without published dimensions"):
        load_model("DeepSeekV4 Flash")


def test_config_file_takes_the_name_of_its_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "small.json").write_text(json.dumps(TINY))
    assert load_model(folder / "config.json").name == "my-model"
    assert load_model(str(folder / "small.json")).name == "small"
    assert load_model(folder / "config.json").num_params == load_model(folder / "small.json").num_params > 0


@pytest.mark.parametrize(
    "text", ["", "nowhere/config.json", "absent.json", "a\0b", "x" * 4000, "/", "no.py:f"]
)
def test_what_is_no_model_is_a_spec_error(text):
    with pytest.raises(SpecError):
        load_model(text)


def test_factory_returns_a_model_or_a_config(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"from foreshard.catalog.models import load_model\nTINY = {TINY!r}\n"
        "def config():\n    return TINY\n"
        "def model():\n    return load_model('gpt2')\n"
        "def broken():\n    return 1 / 0\n"
    )
    assert load_model(f"{path}:model") is load_model("gpt2")
    assert load_model(f"{path}:config").num_layers == 2
    with pytest.raises(SpecError, match="ZeroDivisionError"):
        load_model(f"{path}:broken")
    with pytest.raises(SpecError, match="It has config, model, broken"):
        load_model(f"{path}:absent")


def test_factory_that_needs_a_missing_library_names_the_extra(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import a_library_nobody_has\n")
    with pytest.raises(SpecError, match=r"a_library_nobody_has.*foreshard\[run\]"):
        load_model(f"{path}:model")


def test_dimensions_make_gpt_and_llama_as_the_mlp_says():
    gpt = model_from_dims("g", 2, 64, 256, 4, 4, 100, False, seq_len=32)
    assert gpt.num_params == 2 * (12 * 64**2 + 13 * 64) + (100 + 32) * 64 + 2 * 64
    llama = model_from_dims("l", 2, 64, 128, 4, 2, 100, True)
    assert llama.num_params == 2 * (3 * 64**2 + 3 * 64 * 128 + 2 * 64) + 2 * 100 * 64 + 64
    moe = model_from_dims("m", 3, 64, 32, 4, 4, 100, True, 8, 2, dense_layers=1, dense_ffn=128, shared_ffn=32)
    assert [block.num_experts for block in moe.blocks] == [0, 8, 8]
    with pytest.raises(SpecError, match="heads divide hidden"):
        model_from_dims("x", 2, 65, 256, 4, 4, 100, False)
    with pytest.raises(SpecError, match="positive"):
        model_from_dims("x", 0, 64, 256, 4, 4, 100, False)
    for layers, dense in ((10**9, 0), (4, 9)):
        with pytest.raises(SpecError, match="layers"):
            model_from_dims("x", layers, 64, 256, 4, 4, 100, False, dense_layers=dense)


def row(model, *sizes, **more):
    columns = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab")
    return {"model": model} | dict(zip(columns, map(str, sizes), strict=False)) | more


LLAMA_70B = (8192, 28672, 64, 8)


def test_row_agreeing_with_the_catalog_takes_its_model_and_its_own_sequence():
    model = resolve_row_model(row("Llama-3/3.1-70B", 80, *LLAMA_70B, 128256, seq_len="4096"))
    assert (model.name, model.max_seq_len) == ("llama3-70b", 4096)


def test_row_with_other_dimensions_is_built_from_them():
    model = resolve_row_model(row("Llama-3/3.1-70B", 80, *LLAMA_70B, 32000, gated_mlp="True"))
    assert model.vocab == 32000
    assert model.source == "dimensions in the row"


def test_lora_row_trains_the_adapters_of_attention():
    model = resolve_row_model(row("Llama-2-70B LoRA r16", 80, *LLAMA_70B, 32000))
    assert model.trainable_params == 80 * 16 * (16384 + 9216 + 9216 + 16384)
    noted = row("Llama-3/3.1-70B", 80, *LLAMA_70B, 128256, notes="x; LoRA: metric counts")
    assert resolve_row_model(noted).trainable_params == model.trainable_params
    bridge = resolve_row_model(noted | {"framework": "Megatron-Bridge/Megatron-Core 26.06"})
    assert bridge.trainable_params == 80 * 16 * (16384 + 9216 + 9216)


def test_cut_and_proxy_rows_keep_the_layers_of_the_column():
    cut = resolve_row_model(row("Llama-3-70B (layers cut)", 12, *LLAMA_70B, 128256))
    assert cut.num_layers == 12
    deepseek = row("DeepSeekV3 (layers cut)", 4, 7168, 2048, 128, 128, 129280, n_experts="256", topk="8")
    model = resolve_row_model(deepseek | {"notes": "DeepSeek rows: 1 dense layer in V3 rows"})
    assert [block.num_experts for block in model.blocks] == [0, 256, 256, 256]
    assert model.num_next_token == 0
    assert [block.num_experts for block in resolve_row_model(deepseek).blocks] == [0, 0, 0, 256]


def test_next_token_modules_follow_the_row():
    deepseek = row("DeepSeekV3", 61, 7168, 2048, 128, 128, 129280, n_experts="256", topk="8")
    assert resolve_row_model(deepseek).num_next_token == 1
    assert resolve_row_model(deepseek | {"in_other": "mtp_num_layers=2; x"}).num_next_token == 2
    without = deepseek | {"model": "DeepSeekV3 (w/o MTP)", "in_other": "mtp_num_layers=1"}
    assert resolve_row_model(without).num_next_token == 0


def test_long_sequences_extend_learned_positions():
    sizes = (32, 4096, 16384, 32, 32, 50368)
    short, long = (resolve_row_model(row("MPT-7b", *sizes, seq_len=s)) for s in ("512", "65536"))
    assert short.learned_positions == 2048
    assert long.num_params - short.num_params == (65536 - 2048) * 4096


def test_row_without_dimensions_says_which_are_blank():
    with pytest.raises(SpecError, match="Blank: hidden"):
        resolve_row_model(row("something new", 12))
    with pytest.raises(SpecError, match="A whole number"):
        resolve_row_model(row("something new", -12))


@pytest.mark.parametrize(
    ("table", "causal"), [("llm_megatronbridge.csv", True), ("llm_llmfoundry.csv", False)]
)
def test_model_flops_equal_those_the_source_prints(table, causal):
    """Both sources print tokens/s and model TFLOP/s of one run; their ratio is FLOPs per token.

    Left out are rows known to count otherwise: adapters, and gpt-oss up to release 26.02.
    """
    path = MEASURED / table
    if not path.is_file():
        pytest.skip("no measured tables here")
    ratios = {}
    with path.open(newline="", encoding="utf-8") as lines:
        for record in csv.DictReader(lines):
            if not record["hidden"] or "LoRA" in record["notes"] or "GPT OSS" in record["model"]:
                continue
            flops = resolve_row_model(record).flops_per_token(int(record["seq_len"]), causal)
            printed = (
                float(record["metric_tflops_per_gpu"]) / float(record["metric_tokens_per_s_per_gpu"]) * 1e12
            )
            ratios.setdefault(record["model"], []).append(flops / printed)
    for name, values in ratios.items():
        assert statistics.median(values) == pytest.approx(1.0, abs=0.01), name


def test_every_training_row_resolves_or_says_not_modelled():
    """All rows whose source gives dimensions must be usable; the sealed family is left alone."""
    tables = [path for path in sorted(MEASURED.glob("llm_*.csv")) if "torchtitan" not in path.name]
    if not tables:
        pytest.skip("no measured tables here")
    resolved = 0
    for path in tables:
        with path.open(newline="", encoding="utf-8") as lines:
            for record in csv.DictReader(lines):
                try:
                    model = resolve_row_model(record)
                except SpecError as error:
                    assert "not modelled" in str(error), (record["id"], str(error))
                else:
                    resolved += 1
                    assert not record["n_layers"] or model.num_layers == int(record["n_layers"])
                    assert not record["hidden"] or model.hidden == int(record["hidden"])
                    assert not record["vocab"] or model.vocab == int(record["vocab"])
    assert resolved > 0


def test_families_of_the_catalog_are_modelled():
    used = {
        entry["config"]["model_type"]
        for entry in shipped("models.json")["models"].values()
        if "config" in entry
    }
    assert len(used) > 40 and used <= set(FAMILIES)


@pytest.mark.parametrize(
    ("text", "after", "said"),
    [
        ("def f(): return 1\n", "", "without the name of a factory"),
        ("def f(): return 1\n", ":g", "no function 'g'.*It has f"),
        ("f = 3\n", ":f", "no function 'f'.*Define one"),
        ("import sys\nsys.exit(0)\n", ":f", "failed: SystemExit"),
        ("def f(): return 1\n", ":f", "returned a int"),
    ],
)
def test_a_module_that_gives_no_model_is_bad_input(tmp_path, text, after, said):
    path = tmp_path / "mod.py"
    path.write_text(text)
    with pytest.raises(SpecError, match=f"mod.py.*{said}"):
        load_model(f"{path}{after}")
