"""Rows as other sources write them: read the way they were most likely meant, or refused by name."""

import pytest

from foreshard.errors import SpecError
from foreshard.predict import predict
from foreshard.validation.cells import COLUMNS, cleaned, truth
from foreshard.validation.rows import read_row, table_rows
from foreshard.validation.tables import read_table

RUN = {
    "id": "elsewhere-1",
    "model": "meta-llama/Meta-Llama-3-8B",
    "gpu": "NVIDIA H100 80GB HBM3",
    "gpus": "64",
    "framework": "FSDP",
    "dtype": "BF16",
    "seq_len": "8k",
    "micro_batch": "1",
    "global_batch": "128",
    "metric_tokens_per_s_per_gpu": "7,500",
}


def read(**changes):
    return read_row(RUN | changes, "t")


def said(row):
    return " | ".join(row.assumptions)


def test_a_row_of_few_columns_is_predicted():
    row = read()
    stage = row.plan.groups[0].stages[0]
    assert (row.model.num_layers, row.plan.seq_len, row.framework.name) == (32, 8192, "composer")
    assert (stage.tp, len(row.plan.groups[0].stages), stage.inner_dp, stage.zero) == (1, 1, 64, 3)
    assert row.measured_s == pytest.approx(128 * 8192 / (7500 * 64))
    made = predict(row.model, row.cluster, row.plan, framework=row.framework)
    low, high = made.step_time_interval_s
    assert low < made.step_time_s < high
    for word in ("parallel degrees not stated", "devices per node not stated", "FSDP1 of PyTorch"):
        assert word in said(row)


def test_words_for_nothing_are_blank_and_numbers_are_digits():
    row = cleaned(
        {"tp": "n/a", "pp": "-", "n_experts": "0", "vocab": "128,256", "sp": "yes", "seq_len": "4K"}
    )
    assert set(row) == set(COLUMNS)
    assert (row["tp"], row["pp"], row["n_experts"], row["vocab"]) == ("", "", "", "128256")
    assert (row["sp"], row["seq_len"], row["act_recompute"]) == ("True", "4096", "")
    assert cleaned(row) == row
    assert cleaned({"act_recompute": "none"})["act_recompute"] == "none"
    assert (truth("on"), truth("0"), truth("perhaps")) == (True, False, None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.1 405B", "llama3.1-405b"),
        ("Meta Llama 3 8B Instruct", "llama3-8b"),
        ("GPT-3 (175B)", "gpt3-175b"),
        ("Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("DeepSeek V3", "deepseek-v3"),
        ("Gemma 2 27B", "gemma2-27b"),
        ("google/gemma-7b-it", "gemma-7b"),
        ("Nemotron-4 340B", "nemotron4-340b"),
        ("Falcon-180B", "falcon-180b"),
        ("PaLM 540B", "palm-540b"),
        ("Grok-1", "grok-1"),
        ("DBRX", "dbrx-132b"),
        ("LLaMA 65B", "llama-65b"),
    ],
)
def test_models_by_the_names_of_other_sources(text, name):
    assert read(model=text, gpus="1024", global_batch="2048").model.name == name


def test_a_model_nobody_knows_is_read_from_its_size():
    row = read(model="Aurora-13B")
    assert row.model.num_params == pytest.approx(13e9, rel=0.1)
    assert "usual proportions" in said(row)
    with pytest.raises(SpecError, match="not in the catalog"):
        read(model="Aurora")
    with pytest.raises(SpecError, match="not in the catalog"):
        read(model="Aurora-13B", n_experts="8")
    row = read(model="Aurora", n_layers="24", hidden="2048")
    assert row.model.blocks[0].ffn == 4 * 2048
    row = read(model="llama3-8b", vocab="32000")
    assert (row.model.vocab, row.model.blocks[0].ffn, row.model.blocks[0].gated) == (32000, 14336, True)


@pytest.mark.parametrize(
    ("text", "sharding", "label"),
    [
        ("Megatron-LM", "", "megatron-lm@2024"),
        ("PyTorch DDP", "", "ddp"),
        ("DeepSpeed ZeRO-3", "", "deepspeed@0.19"),
        ("torchtitan", "", "torchtitan@2024"),
        ("torchtitan 0.2", "", "torchtitan@0.2"),
        ("torchtune", "", "torchtitan@0.3"),
        ("litgpt", "", "composer@2023"),
        ("HF Accelerate", "DeepSpeed ZeRO 2", "deepspeed@0.19"),
        ("PyTorch 2.4", "none", "ddp"),
        ("Colossal-AI", "", "colossalai"),
        ("NeMo 24.07", "", "nemo@24.07"),
        ("Alpa", "", "maxtext"),
        ("something new", "", "megatron-core"),
        ("", "", "megatron-core"),
        ("", "FSDP2", "torchtitan@0.3"),
    ],
)
def test_frameworks_by_the_names_of_other_sources(text, sharding, label):
    row = read(framework=text, zero_stage_or_fsdp=sharding)
    assert row.framework.label == label
    if label.partition("@")[0] not in text.lower().replace("-ai", "ai"):
        assert "read as" in said(row)


def test_blank_degrees_are_the_fewest_cuts_that_fit():
    def cut(**changes):
        group = read(**changes).plan.groups[0]
        stage = group.stages[0]
        return stage.tp, len(group.stages), stage.cp, stage.inner_dp

    assert cut(framework="Megatron-Core", model="gpt2-xl", seq_len="1024") == (1, 1, 1, 64)
    assert cut(framework="Megatron-Core") == (2, 1, 1, 32)
    tp, pp, cp, dp = cut(framework="Megatron-Core", model="llama3-70b")
    assert tp * pp * cp * dp == 64 and tp <= 8 and tp * pp >= 8
    assert cut(model="llama2-70b LoRA", global_batch="8", framework="NeMo") == (4, 1, 2, 8)
    assert cut(framework="Megatron-Core", pp="4", dp="2") == (8, 4, 1, 2)


def test_a_pod_of_four_and_the_precision_a_device_has():
    assert read(gpu="GB200", dtype="").cluster.nodes[0].per_node == 4
    row = read(gpu="V100-32GB", dtype="", model="gpt2")
    assert row.plan.precision == "fp16"
    assert "no bf16" in said(row)


def test_int8_runs_at_the_rate_of_integers():
    row = read(gpu="TPU v5p", dtype="int8", framework="MaxText")
    assert row.plan.precision == "fp8"
    assert row.cluster.nodes[0].device.peak("fp8") == 918e12
    with pytest.raises(SpecError, match="int8"):
        read(gpu="Gaudi2", dtype="int8")


def test_activations_that_cannot_stay_are_recomputed_where_a_source_is_new():
    small = read(framework="Megatron-Core", model="llama3-8b", tp="2", pp="1", gpus="8", micro_batch="8")
    assert small.plan.groups[0].stages[0].recompute == "full"
    assert "would not fit" in said(small)


def test_more_cuts_than_devices_are_refused_by_name():
    with pytest.raises(SpecError, match="more than 4 devices"):
        read(gpus="4", tp="8", pp="1")


def test_tables_that_leave_columns_or_ids_out(tmp_path):
    path = tmp_path / "other.csv"
    columns = [name for name in RUN if name != "id"]
    line = ",".join(f'"{RUN[name]}"' for name in columns)
    path.write_text(",".join(columns) + f"\n{line}\n{line}\n", encoding="utf-8")
    rows, skipped = table_rows(read_table(path))
    assert [row.id for row in rows] == ["other-1", "other-2"]
    assert not skipped
    path.write_text("id," + ",".join(columns) + f"\na-1,{line}\na-1,{line}\n", encoding="utf-8")
    assert [row.id for row in table_rows(read_table(path))[0]] == ["a-1", "a-1#2"]


@pytest.mark.parametrize(
    ("changes", "micro_batch", "note"),
    [
        ({"micro_batch": "2"}, 16, "micro-batch 2 of a device: 16"),  # 2 x tp 8 = 256 over dp 16
        ({"micro_batch": ""}, 16, "micro-batch not stated: 16"),
        ({"micro_batch": "16"}, 16, ""),
        ({"micro_batch": "4"}, 4, ""),  # accumulates
    ],
)
def test_maxtext_counts_samples_by_device_and_cuts_what_layers_pass_on(changes, micro_batch, note):
    maxtext = {"framework": "MaxText", "gpu": "TPU v5p", "gpus": "128", "tp": "8", "pp": "1", "dp": "16"}
    row = read(**maxtext, global_batch="256", seq_len="2048", sp="False", **changes)
    group = row.plan.groups[0]
    assert (group.micro_batch // group.stages[0].inner_dp, group.sp) == (micro_batch, True)
    assert note in said(row) and "cut over tp" in said(row)
