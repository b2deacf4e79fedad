"""Exports against committed schemas of the frameworks' own parsers, and back to the plan they came from."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from foreshard.api import load_plan, make_plan
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.hf.load import model_from_config
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.interop.exporters import TARGETS, export
from foreshard.interop.exporters.torchtitan import flavor_of
from foreshard.planner.search import plan as search
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.plan import Plan

SCHEMA = Path(__file__).with_name("schema")
MODEL, CLUSTER = load_model("llama3-8b"), load_cluster("2x8xh100-sxm")


def schema(name: str) -> dict:
    return json.loads((SCHEMA / f"{name}.json").read_text(encoding="utf-8"))


def plan(*, comm=None, **degrees) -> Plan:
    sizes = {"global_batch": 64, "seq_len": 8192, **degrees}
    return replace(plan_from_degrees(MODEL.num_layers, 16, **sizes), comm=comm or {})


def files(target: str, made: Plan) -> dict[str, str]:
    file = export(made, target, model=MODEL, cluster=CLUSTER)
    return {file.name: file.text}


def megatron_flags(text: str) -> dict[str, list[str]]:
    words = shlex.split(text.split("MEGATRON_ARGS=(", 1)[1].rsplit(")", 1)[0], comments=True)
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flags[last := word] = []
        else:
            flags[last].append(word)
    return flags


MEGATRON = (
    {"tp": 2, "pp": 2, "vpp": 2, "zero": 1, "recompute": "full"},
    {"pp": 16, "zero": 1, "recompute": "selective:core_attn"},
    {"tp": 8, "zero": 0, "micro_batch": 4},
    {"tp": 2, "cp": 2, "pp": 2, "zero": 1, "recompute": "full:block:4"},
    {"tp": 4, "pp": 4, "zero": 1, "precision": "fp8"},
    {"zero": 1, "offload": "optimizer", "precision": "fp16"},
    {"zero": 1, "framework": "nemo"},
    {"tp": 2, "zero": 1, "framework": "megatron-bridge", "precision": "fp8"},
)


@pytest.mark.parametrize("degrees", MEGATRON)
def test_megatron_knows_every_flag_and_value(degrees):
    known = schema("megatron")["flags"]
    (text,) = files("megatron", plan(**degrees)).values()
    for flag, values in megatron_flags(text).items():
        entry = known[flag]
        count = {0: 0, None: 1}.get(entry["nargs"])
        assert count is None or len(values) == count, (flag, values)
        for value in values:
            assert value in entry.get("choices", [value]), (flag, value)
            if entry["type"] == "int":
                int(value)


@pytest.mark.parametrize("degrees", MEGATRON)
def test_megatron_flags_say_the_plan(degrees):
    made = plan(**degrees)
    (text,) = files("megatron", made).values()
    flags = {name: values[0] if values else True for name, values in megatron_flags(text).items()}
    stage = made.groups[0].stages[0]
    assert int(flags["--tensor-model-parallel-size"]) == stage.tp
    assert int(flags["--pipeline-model-parallel-size"]) == len(made.groups[0].stages)
    assert int(flags["--context-parallel-size"]) == stage.cp
    assert int(flags["--global-batch-size"]) == made.global_batch
    assert int(flags["--micro-batch-size"]) * stage.inner_dp == made.groups[0].micro_batch
    assert ("--use-distributed-optimizer" in flags) == (stage.zero == 1 and stage.inner_dp * stage.cp > 1)
    assert ("--sequence-parallel" in flags) == (stage.tp > 1)
    # NeMo's recipes reduce in 16 bit and keep 8-bit weights, Megatron's defaults are 32 and 16 bit
    recipe = made.framework in ("nemo", "megatron-bridge")
    assert ("--grad-reduce-in-bf16" in flags) == recipe
    assert ("--fp8-param-gather" in flags) == (recipe and made.precision == "fp8")


def test_megatron_states_uneven_cuts():
    made = plan(tp=2, pp=4, zero=1)
    group = made.groups[0]
    spans = ((0, 6), (6, 16), (16, 26), (26, 34))
    stages = tuple(replace(s, layers=(span,)) for s, span in zip(group.stages, spans, strict=True))
    (text,) = files("megatron", replace(made, groups=(replace(group, stages=stages),))).values()
    flags = megatron_flags(text)
    known = schema("megatron")["flags"]
    assert set(flags) <= set(known)
    layout = flags.get("--pipeline-model-parallel-layout")
    if layout is None:  # the two older flags say first and last stage
        assert flags["--decoder-first-pipeline-num-layers"] == ["5"]
        assert flags["--decoder-last-pipeline-num-layers"] == ["7"]
    else:
        repeated = re.sub(r"([a-zA-Z])\*(\d+)", lambda m: m[1] * int(m[2]), layout[0].strip("'"))
        assert [part.count("t") for part in repeated.split("|")] == [5, 10, 10, 7]


def test_torchtitan_toml_has_known_keys_and_the_plan():
    sections = schema("torchtitan-0.2")["sections"]
    (text,) = files("torchtitan@0.2", plan(tp=2, pp=2, zero=2, recompute="full")).values()
    read = tomllib.loads(text)
    for name, section in read.items():
        assert set(section) <= set(sections[name]), name
    assert read["parallelism"]["tensor_parallel_degree"] == 2
    assert read["parallelism"]["data_parallel_shard_degree"] == 4
    assert read["training"]["global_batch_size"] == 64
    parts = read["parallelism"]["module_fqns_per_model_part"]
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [16, 16]


def test_torchtitan_recipe_is_python_with_known_fields():
    classes = schema("torchtitan-0.3")["classes"]
    (text,) = files("torchtitan@0.3", plan(tp=2, zero=3)).values()
    seen = 0
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in classes:
            assert {keyword.arg for keyword in call.keywords} <= set(classes[name]), name
            seen += 1
    assert seen >= 3


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_json_has_known_keys_and_multiplies_to_the_batch(zero):
    known = schema("deepspeed")
    (text,) = files("deepspeed", plan(zero=zero, micro_batch=2)).values()
    read = json.loads(text)
    assert set(read) <= set(known["keys"])
    assert set(read.get("zero_optimization", {})) <= {*known["zero_optimization"], "stage"}
    assert read["zero_optimization"]["stage"] == zero
    assert read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"] * 16 == 64


def test_deepspeed_offloads_the_optimizer_of_one_rank():
    made = plan_from_degrees(MODEL.num_layers, 1, global_batch=8, seq_len=512, zero=2, offload="optimizer")
    read = json.loads(export(made, "deepspeed", model=MODEL, cluster=CLUSTER).text)
    assert read["zero_optimization"]["stage"] == 2
    assert read["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_accelerate_file_has_known_keys_and_all_ranks():
    known = schema("accelerate")
    (text,) = files("fsdp", plan(zero=3)).values()
    read = json.loads(text)
    assert set(read) <= set(known["keys"])
    assert set(read["fsdp_config"]) <= set(known["fsdp_config"])
    assert set(read["parallelism_config"]) <= set(known["parallelism_config"])
    sizes = [value for name, value in read["parallelism_config"].items() if name.endswith("_size")]
    product = 1
    for size in sizes:
        product *= size
    assert product == read["num_processes"] == 16


def test_slurm_script_is_a_script_that_asks_for_the_nodes(tmp_path):
    for name, text in files("slurm", plan(tp=2, zero=1)).items():
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        subprocess.run(["bash", "-n", path], check=True)
        assert "#SBATCH --nodes=2" in text and "--gpus-per-node=8" in text


def test_skypilot_task_has_known_keys():
    known = schema("skypilot")
    (text,) = files("skypilot", plan(tp=2, zero=1)).values()
    keys = re.findall(r"^(\w+):", text, re.MULTILINE)
    resources = re.findall(r"^  (\w+):", text.split("resources:\n", 1)[1].split("\nenvs", 1)[0], re.MULTILINE)
    assert set(keys) <= set(known["task"]) and set(resources) <= set(known["resources"])
    assert set(re.findall(r"SKYPILOT_\w+", text)) <= set(known["variables"])
    assert "num_nodes: 2" in text


def uneven() -> Plan:
    made = plan(tp=8, zero=1)
    stage = made.groups[0].stages[0]
    halves = [replace(stage, ranks=stage.ranks[:8]), replace(stage, ranks=stage.ranks[8:])]
    one = replace(made.groups[0], micro_batch=1)
    groups = tuple(
        replace(one, share=share, stages=(half,)) for share, half in zip((40, 24), halves, strict=True)
    )
    return replace(made, groups=groups)


@pytest.mark.parametrize("target", ["megatron", "torchtitan@0.2", "torchtitan@0.3", "deepspeed", "fsdp"])
def test_uneven_shares_are_refused_with_the_reason(target):
    with pytest.raises(SpecError, match="40, 24") as caught:
        export(uneven(), target, model=MODEL, cluster=CLUSTER)
    assert caught.value.exit_code == 2 and caught.value.fix


@pytest.mark.parametrize(
    ("target", "degrees", "reason"),
    [
        ("torchtitan@0.2", {"zero": 1}, "zero 1"),
        ("torchtitan@0.3", {"zero": 1}, "zero 1"),
        ("deepspeed", {"tp": 2}, "tp 2"),
        ("fsdp", {"pp": 2, "zero": 3}, "pp 2|pipeline"),
        ("deepspeed", {"zero": 3, "shard_size": 4}, "shards of 4 among 16"),
        ("deepspeed", {"zero": 1, "offload": "activations"}, "offload activations"),
        ("deepspeed", {"zero": 1, "comm": {"param_gather_overlap": True}}, "param_gather_overlap on"),
        ("fsdp", {"zero": 3, "comm": {"grad_overlap": False}}, "grad_overlap off"),
        ("torchtitan@0.2", {"zero": 3, "comm": {"grad_overlap": False}}, "grad_overlap off"),
        ("fsdp", {"zero": 3, "offload": "all"}, "offload all"),
        ("fsdp", {"zero": 3, "recompute": "full:block:1"}, "full:block:1"),
        ("torchtitan@0.3", {"zero": 3, "recompute": "every-2"}, "every-2"),
        ("torchtitan@0.2", {"zero": 3, "recompute": "selective:core_attn"}, "selective:core_attn"),
        ("torchtitan@0.2", {"zero": 0, "cp": 2}, "zero 0 with context"),
        ("megatron", {"zero": 1, "pp": 2, "schedule": "zb-h1"}, "zb-h1"),
        ("megatron", {"offload": "activations"}, "offload activations"),
        ("megatron", {"zero": 3, "offload": "optimizer"}, "offload of the optimizer with zero 3"),
        ("megatron", {"recompute": "every-2"}, "every-2"),
        ("megatron", {"recompute": "selective:moe"}, "recompute of moe, which llama3-8b has not"),
        ("megatron", {"recompute": "selective:layernorm", "precision": "fp8"}, "layernorm with fp8"),
        ("megatron", {"pp": 2, "vpp": 2, "comm": {"p2p_overlap": False}}, "no p2p_overlap"),
        ("megatron", {"tp": 2, "sp": False, "comm": {"tp_overlap": True}}, "tp_overlap without sp"),
        ("megatron", {"comm": {"param_gather_overlap": True}}, "param_gather_overlap without grad_overlap"),
    ],
)
def test_what_a_target_cannot_say_is_refused(target, degrees, reason):
    with pytest.raises(SpecError, match=reason):
        export(plan(**degrees), target, model=MODEL, cluster=CLUSTER)


@pytest.mark.parametrize(
    ("name", "target", "degrees", "reason"),
    [
        ("qwen3-8b", "torchtitan@0.2", {"pp": 2}, "pp 2 of qwen3"),
        ("gpt-oss-20b", "torchtitan@0.2", {"pp": 2}, "pp 2 of gpt_oss"),
        ("deepseek-v3", "torchtitan@0.2", {}, "next-token layers of deepseek-v3"),
        ("deepseek-v3", "torchtitan@0.3", {"pp": 2}, "next-token layers of deepseek-v3 under pp or cp"),
        ("mixtral-8x7b", "torchtitan@0.3", {}, "mixtral-8x7b .it ships"),
        ("qwen3-4b-2507", "torchtitan@0.3", {}, "base 5,000,000 .its 4B has 1,000,000"),
        ("qwen3-235b-a22b", "torchtitan@0.2", {}, "base 1,000,000 .its 235B-A22B has 5,000,000"),
    ],
)
def test_models_that_a_release_of_torchtitan_cannot_train_so_are_refused(name, target, degrees, reason):
    model = load_model(name)
    made = plan_from_degrees(model.num_layers, 16, global_batch=64, seq_len=4096, zero=2, **degrees)
    with pytest.raises(SpecError, match=reason):
        export(made, target, model=model, cluster=CLUSTER)


@pytest.mark.parametrize(
    ("target", "recipe", "reason"),
    [
        ("torchtitan@0.3", "tensorwise", "tensorwise scales .it has rowwise"),
        ("torchtitan@0.2", "delayed", "delayed scales .it has tensorwise, rowwise"),
        ("megatron", "rowwise", "rowwise scales .it has delayed, tensorwise, blockwise"),
    ],
)
def test_scales_that_a_target_has_not_are_refused(target, recipe, reason):
    made = replace(plan(zero=1 if target == "megatron" else 3, precision="fp8"), fp8_recipe=recipe)
    with pytest.raises(SpecError, match=reason):
        export(made, target, model=MODEL, cluster=CLUSTER)


def test_torchtitan_gathers_in_8_bit_without_the_name_of_a_recipe():
    """It refuses enable_fsdp_float8_all_gather together with recipe_name."""
    made = replace(plan(zero=3, precision="fp8"), fp8_recipe="tensorwise", comm={"narrow_gather": True})
    read = tomllib.loads(export(made, "torchtitan@0.2", model=MODEL, cluster=CLUSTER).text)
    assert read["quantize"]["linear"]["float8"] == {"enable_fsdp_float8_all_gather": True}


def test_units_of_fsdp_are_said_with_the_calls_that_set_them():
    notes = export(
        replace(plan(zero=3), prefetch=2, wrap=4), "torchtitan@0.3", model=MODEL, cluster=CLUSTER
    ).notes
    assert any("set_modules_to_forward_prefetch" in note for note in notes)
    assert any("fully_shard on lists" in note for note in notes)
    whole = export(replace(plan(zero=3), wrap="model"), "fsdp", model=MODEL, cluster=CLUSTER)
    assert json.loads(whole.text)["fsdp_config"]["fsdp_auto_wrap_policy"] == "NO_WRAP"
    assert any("whole model" in note for note in whole.notes)


def test_compile_reaches_torchtitan_and_others_are_told_how_to_set_it():
    """Alone it is not asynchronous tensor parallelism, which needs it."""
    compiled = replace(plan(zero=3), compile=True)
    read = tomllib.loads(export(compiled, "torchtitan@0.2", model=MODEL, cluster=CLUSTER).text)
    assert read["compile"] == {"enable": True}
    assert read["parallelism"]["enable_async_tensor_parallel"] is False
    text = export(compiled, "torchtitan@0.3", model=MODEL, cluster=CLUSTER).text
    assert "CompileConfig(enable=True, enable_async_tensor_parallel=False)" in text
    notes = export(compiled, "fsdp", model=MODEL, cluster=CLUSTER).notes
    assert any("torch.compile is on" in note for note in notes)


def test_a_model_of_the_sizes_of_a_flavor_with_other_experts_is_not_that_flavor():
    model = load_model("qwen3-30b-a3b")
    wider = replace(model, blocks=tuple(replace(block, expert_ffn=1024) for block in model.blocks))
    assert flavor_of(model) == ("qwen3", "30B-A3B") and flavor_of(wider) is None


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ({"ep": 8, "pp": 2}, "without virtual stages"),
        ({"ep": 8, "recompute": "full"}, "expert_overlap with recompute full"),
        ({"ep": 8, "recompute": "selective:moe"}, "expert_overlap with recompute selective:moe"),
        ({"ep": 8, "precision": "fp32"}, "expert_overlap in fp32"),
    ],
)
def test_megatron_names_what_forbids_to_overlap_experts(degrees, reason):
    model = load_model("mixtral-8x7b")
    made = plan_from_degrees(model.num_layers, 16, global_batch=64, seq_len=4096, **degrees)
    made = replace(made, comm={"expert_overlap": True})
    with pytest.raises(SpecError, match=reason):
        export(made, "megatron", model=model)
    assert export(replace(made, comm={}), "megatron", model=model).text


@pytest.mark.parametrize(("hidden", "connections"), [(False, 1), (True, 32)])
def test_megatron_gets_the_connections_that_hiding_the_exchange_of_tokens_needs(hidden, connections):
    model = load_model("mixtral-8x7b")
    made = plan_from_degrees(model.num_layers, 16, global_batch=64, seq_len=4096, ep=8)
    text = export(replace(made, comm={"expert_overlap": hidden}), "megatron", model=model).text
    assert f"export CUDA_DEVICE_MAX_CONNECTIONS={connections} " in text


@pytest.mark.parametrize(
    ("model_type", "reason"), [("olmo", "norms without parameters"), ("olmo2", "norms of each head")]
)
def test_megatron_names_norms_that_it_has_not(model_type, reason):
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
    model = model_from_config({"model_type": model_type, "vocab_size": 1000} | sizes, name=model_type)
    made = plan_from_degrees(4, 16, global_batch=64, seq_len=2048, tp=2)
    with pytest.raises(SpecError, match=reason):
        export(made, "megatron", model=model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "granite", "rope_theta": 1e4, "embedding_multiplier": 12.0}, "fixed factors"),
        ({"model_type": "phi", "rope_theta": 1e4}, "a bias of the head"),
        ({"model_type": "cohere", "rope_theta": 1e4}, "read the same input"),
        ({"model_type": "mamba2", "num_heads": 16, "head_dim": 64}, "state-space scans"),
        ({"model_type": "roberta", "max_position_embeddings": 130}, "no decoder"),
    ],
)
def test_megatron_names_what_else_no_flag_builds(config, reason):
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
    model = model_from_config(sizes | {"vocab_size": 1000} | config, name="x")
    made = plan_from_degrees(4, 16, global_batch=64, seq_len=128)
    with pytest.raises(SpecError, match=reason):
        export(made, "megatron", model=model)


def test_unknown_targets_list_the_known_ones():
    with pytest.raises(SpecError, match="unknown target") as caught:
        export(plan(), "nemo")
    assert all(target in caught.value.rule for target in TARGETS)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_names_what_it_was_checked_against(target):
    made = {"zero": 3} if target in ("fsdp", "torchtitan@0.2", "torchtitan@0.3", "deepspeed") else {"zero": 1}
    result = export(plan(**made), target, model=MODEL, cluster=CLUSTER)
    assert result.version and result.name and result.text.endswith("\n")
    assert json.dumps(result.to_dict())


@pytest.mark.parametrize(
    ("framework", "target"),
    [("megatron-core", "megatron"), ("torchtitan", "torchtitan@0.2"), ("torchtitan", "torchtitan@0.3")],
)
@pytest.mark.slow
def test_what_is_planned_for_a_framework_it_can_be_told(framework, target):
    asked = {"global_batch": 64, "seq_len": 8192, "framework": framework, "comm": "all", "budget_s": 6.0}
    made = search(MODEL, CLUSTER, **asked).plans[0].plan
    assert made.comm or framework == "torchtitan"
    assert export(made, target, model=MODEL, cluster=CLUSTER).text


def test_positions_and_norms_reach_megatron_or_the_missing_fact_is_named():
    def text(model):
        return export(make_plan(model, CLUSTER, tp=2, global_batch=16), "megatron", model=model).text

    assert "--rotary-base 500000" in text(MODEL) and "--norm-epsilon 1e-05" in text(MODEL)
    scaled = text(load_model("llama3.1-8b"))
    assert "--use-rope-scaling" in scaled and "--rope-scaling-factor 8" in scaled
    with pytest.raises(SpecError, match="base of rotary positions, not known of"):
        text(replace(MODEL, rope_base=None))
    for name in ("bloom-560m", "mpt-7b-hf"):
        with pytest.raises(SpecError, match="positions that are neither rotary nor learned"):
            text(load_model(name))
    for name, reason in (("smollm3-3b", "differ between layers"), ("gemma-2b", "factors on embeddings")):
        with pytest.raises(SpecError, match=reason):
            text(load_model(name))
    assert "--rotary-base 100000000" in text(load_model("mistral-small-24b"))
    partly = replace(MODEL, blocks=tuple(replace(block, rotary=0.5) for block in MODEL.blocks))
    assert "--rotary-percent 0.5" in text(partly) and "--rotary-percent" not in text(MODEL)
    with pytest.raises(SpecError, match="rotary positions scaled as linear"):
        text(replace(MODEL, rope_scaling=("linear", 2.0)))


def test_an_answer_is_read_as_the_plan_it_holds(tmp_path):
    plan = make_plan(MODEL, CLUSTER, tp=2, global_batch=16)
    for answer in ({"step_time_s": 1.0, "plan": plan.to_dict()}, {"plans": [{"plan": plan.to_dict()}]}):
        path = tmp_path / "answer.json"
        path.write_text(json.dumps(answer))
        assert load_plan(str(path)) == plan


def test_adapters_are_refused_by_name():
    with pytest.raises(SpecError, match="lora 16"):
        export(make_plan(MODEL, CLUSTER, tp=2, lora="16"), "megatron", model=MODEL)


@pytest.mark.parametrize("schedule, theirs", [("zbv", "ZBVZeroBubble"), ("dualpipev", "DualPipeV")])
def test_torchtitan_gets_the_parts_of_a_pipeline_that_turns_in_model_order(schedule, theirs):
    model, cluster = load_model("llama3-8b"), load_cluster("1x8xh100-sxm")
    plan = make_plan(
        model,
        cluster,
        framework="torchtitan",
        pp=4,
        zero=2,
        schedule=schedule,
        global_batch=32,
        recompute="full",
    )
    text = export(plan, "torchtitan@0.2", model=model, cluster=cluster).text
    stated = tomllib.loads(text)["parallelism"]
    parts = stated["module_fqns_per_model_part"]
    assert stated["pipeline_parallel_schedule"] == theirs and len(parts) == 8
    names = [name for part in parts for name in part if name.startswith("layers.")]
    assert names == [f"layers.{i}" for i in range(32)]


def test_experts_are_not_hidden_behind_a_pipeline_where_the_plan_hides_none():
    """torchtitan 0.2.2 does by default, and refuses it with any recomputing (dual_pipe_v.py)."""
    model = load_model("deepseek-v2-lite")
    cluster = load_cluster("2x8xh100-sxm")
    asked = {"framework": "torchtitan", "pp": 2, "ep": 2, "zero": 2, "global_batch": 32, "recompute": "full"}
    for schedule, is_stated in (("dualpipev", True), ("zbv", False)):
        made = make_plan(model, cluster, schedule=schedule, **asked)
        stated = tomllib.loads(export(made, "torchtitan@0.2", model=model, cluster=cluster).text)
        found = stated["parallelism"].get("pipeline_parallel_expert_parallel_overlap")
        assert found is (False if is_stated else None)


def test_facts_that_a_flavor_of_torchtitan_has_otherwise_are_noted_or_refused():
    """torchtitan 0.2.2 and 0.3.0 models/llama3/__init__.py: Llama 3.1's scaling, whatever the length."""
    for name, says in (("llama3-8b", True), ("llama3.1-8b", False)):
        model = load_model(name)
        made = make_plan(model, CLUSTER, framework="torchtitan", zero=3, recompute="full")
        for target in ("torchtitan@0.2", "torchtitan@0.3"):
            notes = export(made, target, model=model, cluster=CLUSTER).notes
            assert any("scales rotary positions by 8" in note for note in notes) == says
    with pytest.raises(SpecError, match="tied embeddings"):
        export(made, "torchtitan@0.3", model=replace(model, tied_embeddings=True), cluster=CLUSTER)


def flags_of_model(model):
    made = plan_from_degrees(model.num_layers, 16, global_batch=64, seq_len=2048, zero=1)
    return export(made, "megatron", model=model, cluster=CLUSTER).text


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("nemotron4-15b", ("--squared-relu",)),
        ("deepseek-v2-lite", ("--qk-layernorm", "--moe-router-pre-softmax")),
        ("qwen3-30b-a3b", ()),
        (
            "deepseek-v3",
            (
                "--qk-layernorm",
                "--moe-router-score-function sigmoid",
                "--moe-router-enable-expert-bias",
                "--moe-router-topk-scaling-factor 2.5",
                "--moe-router-num-groups 8",
                "--moe-router-group-topk 4",
            ),
        ),
    ],
)
def test_activation_norms_of_latents_and_router_reach_megatron(name, flags):
    """As transformers' modeling_nemotron.py, modeling_deepseek_v2.py and _v3.py compute them.

    Megatron's gpt_layer_specs.py norms the latents under --qk-layernorm only; its routers are those of
    moe_utils.py, topk_routing_with_score_function.
    """
    text = flags_of_model(load_model(name))
    assert all(f"  {flag}\n" in text for flag in flags)
    routed = [line for line in text.splitlines() if line.startswith("  --moe-router-")]
    stated = [flag for flag in flags if flag.startswith("--moe-router-")]
    assert len(routed) == len(stated) + ("--num-experts" in text), "--moe-router-topk besides"


def test_a_gate_on_shared_experts_reaches_megatron():
    model = replace(load_model("qwen1.5-moe-a2.7b"), rope_base=1e6)
    text = flags_of_model(model)
    assert "--moe-shared-expert-gate\n" in text and "--moe-router-pre-softmax\n" in text


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (load_model("opt-1.3b"), "the activation relu"),
        (replace(load_model("llama3-8b"), activation="gelu"), "the activation gelu"),
        (replace(load_model("mixtral-8x7b"), router=None), "what weighs the experts of mixtral-8x7b"),
        (replace(load_model("deepseek-v2"), rope_base=1e4), "groups of experts"),
    ],
    ids=lambda case: case if isinstance(case, str) else case.name,
)
def test_activations_and_routers_that_megatron_has_not_are_refused(model, reason):
    with pytest.raises(SpecError, match=reason):
        flags_of_model(model)


def test_the_dispatcher_reaches_megatron_and_torchtitan():
    experts = load_model("qwen3-30b-a3b")
    spread = replace(make_plan(experts, CLUSTER, tp=1, ep=8, dp=16, zero=1), dispatcher="hybridep")
    text = export(spread, "megatron", model=experts, cluster=CLUSTER).text
    assert "--moe-token-dispatcher-type flex" in text
    assert "--moe-flex-dispatcher-backend hybridep" in text
    own = export(replace(spread, dispatcher=None), "megatron", model=experts, cluster=CLUSTER).text
    assert "--moe-token-dispatcher-type alltoall" in own
    sharded = make_plan(experts, CLUSTER, ep=8, dp=16, zero=3, framework="torchtitan")
    recipe = export(
        replace(sharded, dispatcher="hybridep"), "torchtitan@0.3", model=experts, cluster=CLUSTER
    ).text
    assert "moe_comm_backend='hybridep'" in recipe
    table = export(
        replace(sharded, dispatcher="deepep"), "torchtitan@0.2", model=experts, cluster=CLUSTER
    ).text
    assert tomllib.loads(table)["parallelism"]["expert_parallel_comm_backend"] == "deepep"
    with pytest.raises(SpecError, match="dispatcher hybridep"):
        export(replace(sharded, dispatcher="hybridep"), "torchtitan@0.2", model=experts, cluster=CLUSTER)
