"""Configurations of other tools as plans: back from every export, and what people write by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from foreshard.api import import_plan, make_plan, predict
from foreshard.api import plan as search
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.interop.exporters import export
from foreshard.interop.exporters.megatron import overlaps
from foreshard.interop.importers import SOURCES, tool_of
from foreshard.interop.importers.launch_script import read_flags
from foreshard.spec.checks import check_plan
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.framework import Overrides
from foreshard.spec.plan import Plan, Stage

MODEL, CLUSTER = load_model("llama3-8b"), load_cluster("2x8xh100-sxm")
TOOLS = {
    "megatron": ("megatron-core", "megatron-fsdp"),
    "torchtitan@0.2": ("torchtitan@0.2",),
    "deepspeed": ("deepspeed",),
    "fsdp": ("torchtitan",),
}
RECOMPUTE = {
    "megatron": ("none", "full", "full:block:3", "selective:core_attn", "selective:core_attn+mlp"),
    "torchtitan@0.2": ("none", "full", "selective:op", "every-2"),
    "deepspeed": ("none",),
    "fsdp": ("none", "full"),
}


def drawn(target: str, rng: random.Random) -> Plan:
    """A plan of degrees that often divide; those that do not raise SpecError."""
    tp, pp, cp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
    vpp = rng.choice([1, 2]) if pp > 1 else 1
    made = plan_from_degrees(
        MODEL.num_layers,
        CLUSTER.num_devices,
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        micro_batch=rng.choice([1, 2]),
        global_batch=rng.choice([32, 64]),
        seq_len=rng.choice([2048, 8192]),
        sp=rng.choice([None, False]),
        zero=rng.randrange(4),
        shard_size=rng.choice([None, None, 2, 4]),
        recompute=rng.choice(RECOMPUTE[target]),
        offload=rng.choice(["none", "none", "optimizer", "activations", "all"]),
        precision=rng.choice(["bf16", "fp16", "fp32", "fp8", "mxfp8"]),
        optimizer=rng.choice(["adamw", "adamw", "sgd"]),
        framework=rng.choice(TOOLS[target]),
    )
    if made.framework == "megatron-fsdp" and rng.random() < 0.5:
        made = replace(made, overrides=Overrides(grad_bytes=rng.choice((2, 4)), grad_reduce_bytes=4))
    switches = ("tp_overlap", "grad_overlap", "param_gather_overlap", "p2p_overlap", "context_gather")
    return replace(made, comm={name: rng.random() < 0.5 for name in switches if rng.random() < 0.4})


def sharding(stage: Stage) -> tuple[int, int]:
    size = stage.shard_size or stage.inner_dp * stage.cp
    return (stage.zero, size) if stage.zero and size > 1 else (0, 1)


def meaning(plan: Plan, target: str) -> tuple[object, ...]:
    """What the files of a target state of a plan."""
    (group,) = plan.groups
    stages = tuple(
        (
            stage.ranks,
            stage.layers,
            stage.tp,
            stage.cp,
            *sharding(stage),
            stage.recompute,
            stage.offload,
        )
        for stage in group.stages
    )
    hidden = overlaps(plan) if target == "megatron" else {}
    if group.num_chunks == 1:
        hidden.pop("p2p_overlap", None)
    if group.stages[0].cp == 1:
        hidden.pop("context_gather", None)
    if group.stages[0].tp == 1:
        hidden.pop("tp_overlap", None)
    hidden.pop("expert_overlap", None)
    size = (plan.global_batch, plan.seq_len) if target in ("megatron", "torchtitan@0.2") else ()
    return (
        stages,
        group.schedule,
        group.sp and group.stages[0].tp > 1,
        plan.precision,
        plan.optimizer,
        size,
        hidden,
        (plan.framework, plan.overrides.grad_bytes) if target == "megatron" else (),
    )


@pytest.mark.parametrize("target", TOOLS)
def test_an_export_is_read_back_as_the_plan_it_came_from(target, tmp_path):
    rng = random.Random(target)
    read = 0
    for _ in range(2000):
        try:
            plan = drawn(target, rng)
            check_plan(plan, MODEL, CLUSTER)
            made = export(plan, target, model=MODEL, cluster=CLUSTER)
        except SpecError:
            continue
        (tmp_path / made.name).write_text(made.text, encoding="utf-8")
        stated = {}
        if target in ("deepspeed", "fsdp"):
            stated = {"seq_len": plan.seq_len}
        if target == "fsdp":
            stage = plan.groups[0].stages[0]
            stated |= {
                "micro_batch": plan.groups[0].micro_batch // stage.inner_dp,
                "global_batch": plan.global_batch,
            }
            stated["optimizer"] = plan.optimizer
            if plan.precision == "tf32":
                continue
        assert SOURCES[tool_of(made.text)] == SOURCES[target]
        back, notes = import_plan(
            str(tmp_path / made.name), target.partition("@")[0], MODEL, CLUSTER, **stated
        )
        assert meaning(back, target) == meaning(plan, target), made.text
        assert "Not predicted" not in " ".join(notes), made.text
        read += 1
        if read == 20:
            break
    assert read >= 10


@pytest.mark.parametrize("target", ["megatron", "torchtitan@0.2", "deepspeed", "fsdp"])
def test_a_plan_for_a_tool_is_read_back_with_its_time_and_memory(target, tmp_path):
    """What `plan --to` promises is what `predict` says of the exported file."""
    found = search(MODEL, CLUSTER, global_batch=64, seq=4096, to=target, budget_s=10.0, max_tp=2)
    chosen = found.plans[0]
    made = export(chosen.plan, target, model=MODEL, cluster=CLUSTER)
    assert not any("differ" in note or "predicted" in note for note in made.notes), made.notes
    (tmp_path / made.name).write_text(made.text, encoding="utf-8")
    (group,) = chosen.plan.groups
    stated = {"seq_len": 4096} if target in ("deepspeed", "fsdp") else {}
    if target == "deepspeed":
        stated |= {"recompute": group.stages[0].recompute}
    if target == "fsdp":
        rows = group.micro_batch // group.stages[0].inner_dp
        stated |= {"micro_batch": rows, "global_batch": 64, "optimizer": chosen.plan.optimizer}
    back, _ = import_plan(str(tmp_path / made.name), target.partition("@")[0], MODEL, CLUSTER, **stated)
    again = predict(MODEL, CLUSTER, back)
    assert again.step_time_s == pytest.approx(chosen.prediction.step_time_s, rel=1e-9)
    assert again.memory.peak_bytes == pytest.approx(chosen.prediction.memory.peak_bytes, rel=1e-9)


def test_a_plan_of_another_release_or_framework_is_noted_by_its_release():
    """The note of a plan of torchtitan 0.2 said that it differs under torchtitan."""
    for label, target, said in (
        ("torchtitan@0.2", "torchtitan@0.3", "under torchtitan 0.3.0 its time and memory differ"),
        ("torchtitan", "fsdp", "under accelerate 1.15.0.dev0 its time and memory differ"),
        ("nemo", "megatron", "under Megatron-LM core_v0.19.0 its time and memory differ"),
    ):
        made = export(
            make_plan(MODEL, CLUSTER, framework=label, recompute="none", sp=False),
            target,
            model=MODEL,
            cluster=CLUSTER,
        )
        assert any(f"made for {label}: {said}" in note for note in made.notes)


SCRIPT = """#!/bin/bash
# --tensor-model-parallel-size 64 is a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=4
PP=2
MBS=${MBS:-1}
GBS=128
SEQ_LEN="4096"
GPT_ARGS="
    --num-layers 32
    --hidden-size 4096
    --seq-length ${SEQ_LEN} \\
    --bf16
"
PARALLEL=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size ${PP:-8}
    --sequence-parallel
    --use-distributed-optimizer   # shards the states
    --overlap-grad-reduce --overlap-param-gather
)
BATCH="--micro-batch-size ${MBS:-1} --global_batch_size=$GBS"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS "${PARALLEL[@]}" $BATCH | tee log
"""


def imported(tmp_path, text: str, source: str, **stated) -> Plan:
    file = tmp_path / "config"
    file.write_text(text, encoding="utf-8")
    return import_plan(str(file), source, MODEL, CLUSTER, **stated)[0]


def test_a_launch_script_as_people_write_it(tmp_path):
    plan = imported(tmp_path, SCRIPT, "megatron")
    (group,) = plan.groups
    assert (group.stages[0].tp, len(group.stages), group.stages[0].inner_dp) == (4, 2, 2)
    assert (plan.global_batch, plan.seq_len, group.micro_batch, group.sp) == (128, 4096, 2, True)
    assert group.stages[0].zero == 1 and plan.comm["grad_overlap"] and not plan.comm["tp_overlap"]
    assert group.stages[0].recompute == "none" and plan.precision == "bf16"


def test_uneven_stages_of_a_launch_script(tmp_path):
    base = "--num-layers 32 --pipeline-model-parallel-size 4 --seq-length 2048 --micro-batch-size 1 "
    plan = imported(tmp_path, base + "--decoder-first-pipeline-num-layers 5", "megatron")
    assert [stage.layers for stage in plan.groups[0].stages] == [
        ((0, 6),),
        ((6, 15),),
        ((15, 24),),
        ((24, 34),),
    ]
    plan = imported(tmp_path, base + "--pipeline-model-parallel-layout 'Ett|t*20|ttttt|t*5L'", "megatron")
    assert [stage.layers for stage in plan.groups[0].stages] == [
        ((0, 3),),
        ((3, 23),),
        ((23, 28),),
        ((28, 34),),
    ]


def test_defaults_of_the_tools(tmp_path):
    plan = imported(tmp_path, "[training]\nlocal_batch_size = 2\n", "torchtitan")
    stage = plan.groups[0].stages[0]
    assert (stage.zero, stage.recompute, plan.seq_len, plan.global_batch) == (3, "every-2", 2048, 32)
    assert plan.compile is None
    text = "[training]\nlocal_batch_size = 2\n[compile]\nenable = true\n"
    assert imported(tmp_path, text, "torchtitan").compile is True
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": "auto"},
    }
    plan = imported(tmp_path, json.dumps(config), "deepspeed", seq_len=2048)
    assert (plan.global_batch, plan.precision, plan.groups[0].stages[0].zero) == (128, "bf16", 0)
    assert plan.framework == "deepspeed@0.19"
    passes = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n"
    assert imported(tmp_path, passes, "accelerate", seq_len=2048).global_batch == 4 * CLUSTER.num_devices
    slip = tmp_path / "slip.json"
    slip.write_text('{"zero_optimisation": {"stage": 3}}')
    assert "did you mean zero_optimization?" in str(import_plan(str(slip), "deepspeed", MODEL, CLUSTER)[1])
    text = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
    assert imported(tmp_path, text, "accelerate", seq_len=2048).groups[0].stages[0].zero == 3
    for policy, wrap in (("NO_WRAP", "model"), ("TRANSFORMER_BASED_WRAP", None)):
        more = f"{text}  fsdp_auto_wrap_policy: {policy}\n"
        assert imported(tmp_path, more, "accelerate", seq_len=2048).wrap == wrap
    assert imported(tmp_path, "distributed_type: MULTI_GPU\n", "accelerate", seq_len=2048).framework == "ddp"


BAD = (
    ("megatron", "", "empty"),
    ("megatron", "print('hello')", "no flags of Megatron"),
    ("megatron", "--tensor-model-parallel-size $TP", "not set to a plain word"),
    ("megatron", "--tensor-model-parallel-size two", "whole number"),
    ("megatron", "--tensor-model-parallel-size", "Takes a value"),
    ("megatron", "--tensor-model-parallel-size 3", "devices"),
    ("megatron", "--num-layers 40 --micro-batch-size 1", "the file trains 40 blocks"),
    ("megatron", "--num-layers 32 --use-torch-fsdp2", "no plan expresses"),
    ("megatron", "--num-layers 32 --pipeline-model-parallel-layout 'Et*5|x'", "Has E, t, m and L"),
    ("torchtitan", "import torchtitan\n", "Python code"),
    ("torchtitan", "[training\n", "not valid TOML"),
    (
        "torchtitan",
        "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'X'\n",
        "Must be one of",
    ),
    ("deepspeed", "{", "not valid JSON"),
    ("deepspeed", "[1]", "holds a list"),
    ("deepspeed", '{"zero_optimization": {"stage": 4}}', "stages 0 to 3"),
    ("deepspeed", '{"zero_optimization": 3}', "table"),
    ("deepspeed", '{"zero_optimization": {"offload_param": {"device": "cpu"}}}', "offload of weights"),
    (
        "deepspeed",
        '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}',
        "are not a batch of 7",
    ),
    ("accelerate", "distributed_type: TPU\n", "Must be FSDP"),
    ("accelerate", "a: [\n", "not valid YAML"),
    ("accelerate", "num_processes: 3\n", "3 devices"),
    (
        "fsdp",
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
        "inside a node",
    ),
)


@pytest.mark.parametrize(("source", "text", "said"), BAD)
def test_what_is_wrong_is_said(tmp_path, source, text, said):
    with pytest.raises(SpecError, match=said) as caught:
        imported(tmp_path, text, source)
    assert caught.value.fix or caught.value.rule


def test_random_bytes_are_an_answer_or_a_kind_error(tmp_path):
    rng = random.Random(1)
    words = [
        *SCRIPT.split(),
        "{",
        "}",
        "[a]",
        "=",
        ":",
        '"',
        "zero_optimization",
        "stage",
        "3",
        "null",
        "\x00",
        "é",
    ]
    for _ in range(300):
        text = "".join(rng.choice(words) + rng.choice([" ", "\n", ""]) for _ in range(rng.randrange(1, 12)))
        for source in SOURCES:
            try:
                imported(tmp_path, text, source)
            except SpecError:
                continue


def test_variables_and_quotes():
    flags = read_flags('A=1\nB=$A\n--x "$B" --y=\'c d\' --z ${C:-3} --w "${D}" --x=2', "f")
    assert flags.word("--x") == "2" and flags.whole("--z") == 3
    with pytest.raises(SpecError, match="not set"):
        flags.word("--w")


@pytest.mark.parametrize(
    ("flags", "dispatcher"),
    [
        ("", "allgather"),  # Megatron's default
        ("--moe-token-dispatcher-type alltoall", "alltoall"),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "deepep"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "hybridep"),
    ],
)
def test_the_dispatcher_of_a_launch_script(tmp_path, flags, dispatcher):
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --expert-model-parallel-size 8 --num-experts 128 --num-layers 48 "
        f"--micro-batch-size 1 --global-batch-size 32 --seq-length 4096 --bf16 {flags}\n"
    )
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("2x8xh100-sxm")
    made, _ = import_plan(str(script), "megatron", model, cluster)
    assert made.dispatcher == dispatcher


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [("fused", "cudnn"), ("unfused", "unfused"), ("local", "unfused"), ("auto", None), ("flash", None)],
)
def test_the_kernel_of_attention_of_a_launch_script(tmp_path, backend, kernel):
    """AttnBackend of Megatron-LM d98e8a6 core/transformer/enums.py; local is its own unfused attention."""
    made, _ = noted(tmp_path, f"--micro-batch-size 1 --bf16 --attention-backend {backend}", "megatron")
    assert made.attention == kernel


def noted(tmp_path, text: str, source: str, **stated) -> tuple[Plan, str]:
    file = tmp_path / "config"
    file.write_text(text, encoding="utf-8")
    plan, notes = import_plan(str(file), source, MODEL, CLUSTER, **stated)
    return plan, " ".join(notes)


@pytest.mark.parametrize(
    "flag",
    [
        "--no-gradient-accumulation-fusion",
        "--moe-expert-capacity-factor 1.25",
        "--ddp-bucket-size 1000000",
        "--fine-grained-activation-offloading",
        "--attention-backend flash",
        "--disable-tp-comm-bulk-wgrad",
        "--no-tp-comm-bulk-wgrad",
    ],
)
def test_flags_of_megatron_that_change_time_or_memory_are_named(tmp_path, flag):
    base = "--tensor-model-parallel-size 2 --micro-batch-size 1 --bf16 "
    _, plain = noted(tmp_path, base, "megatron")
    _, said = noted(tmp_path, base + flag, "megatron")
    assert flag.split()[0] in said and "Not predicted" not in plain


@pytest.mark.parametrize("flag", ["--attention-backend auto", "--transformer-impl transformer_engine"])
def test_flags_of_megatron_that_state_its_defaults_are_not_named(tmp_path, flag):
    _, said = noted(
        tmp_path, f"--tensor-model-parallel-size 2 --micro-batch-size 1 --bf16 {flag}", "megatron"
    )
    assert "Not predicted" not in said


EXPERTS = "--num-experts 8 --expert-model-parallel-size 8 --micro-batch-size 1 --bf16"
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 1\n"


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("  fsdp_backward_prefetch: NO_PREFETCH", "prefetch", 0),
        ("  fsdp_backward_prefetch: BACKWARD_PRE", "prefetch", None),
        ("  fsdp_backward_prefetch: 1", "prefetch", None),
        ("  fsdp_backward_prefetch: null", "prefetch", 0),
        ("  fsdp_auto_wrap_policy: null", "wrap", "model"),
        ("dynamo_config:\n  dynamo_backend: NO", "compile", None),
        ("dynamo_config:\n  dynamo_backend: AOT_EAGER", "compile", None),
        ("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "wrap", None),
        ("  fsdp_auto_wrap_policy: NO_WRAP", "wrap", "model"),
        ("dynamo_config:\n  dynamo_backend: INDUCTOR", "compile", True),
    ],
)
def test_units_of_fsdp_are_those_of_accelerate(tmp_path, line, field, value):
    plan, said = noted(tmp_path, FSDP + line + "\n", "accelerate", micro_batch=1)
    assert getattr(plan, field) == value and "Not predicted" not in said


def test_other_compilers_of_accelerate_are_named(tmp_path):
    _, said = noted(
        tmp_path, FSDP + "dynamo_config:\n  dynamo_backend: TENSORRT\n", "accelerate", micro_batch=1
    )
    assert "Not predicted: dynamo_config.dynamo_backend." in said


def test_units_by_size_are_said_to_be_blocks(tmp_path):
    text = FSDP + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 2000\n"
    plan, said = noted(tmp_path, text, "accelerate", micro_batch=1)
    assert plan.wrap is None and "2,000 parameters (SIZE_BASED_WRAP)" in said


def test_keys_of_deepspeed_and_torchtitan_that_are_not_predicted_are_named(tmp_path):
    zero = {"stage": 3, "reduce_bucket_size": 2e8, "sub_group_size": 1e9, "round_robin_gradients": True}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    _, said = noted(tmp_path, json.dumps(config), "deepspeed")
    assert "zero_optimization.reduce_bucket_size" in said and "sub_group_size" not in said
    off = {"amp": {"enabled": False}, "compile": {"deepcompile": False}, "torch_autocast": {"enabled": False}}
    off |= {"curriculum_learning": {"enabled": False}, "pipeline": False}
    config["zero_optimization"] = {"stage": 3, "reduce_bucket_size": "auto"}
    _, said = noted(tmp_path, json.dumps(config | off), "deepspeed")
    assert "Not" not in said
    _, said = noted(tmp_path, json.dumps(config | off | {"amp": {"enabled": True}}), "deepspeed")
    assert "Not predicted: amp." in said
    toml = "[parallelism]\ndisable_loss_parallel = true\ntensor_parallel_degree = 2\n"
    toml += "[optimizer]\nimplementation = 'fused'\n"
    _, said = noted(tmp_path, toml, "torchtitan")
    assert "parallelism.disable_loss_parallel" in said and "implementation" not in said


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("bf16", "bf16_optimizer_states"),
        ("fp16", "fp16_master_weights_and_grads"),
        ("zero_optimization", "zenflow"),
    ],
)
def test_states_of_deepspeed_in_16_bit_and_zenflow_are_named(tmp_path, table, key):
    """DeepSpeed 0.19.8 runtime/precision_config.py and runtime/zero/config.py."""
    kind = table if table != "zero_optimization" else "bf16"
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, kind: {"enabled": True}}
    config[table] = config[table] | {key: {"topk_ratio": 0.1} if key == "zenflow" else True}
    _, said = noted(tmp_path, json.dumps(config), "deepspeed")
    assert f"Not predicted: {table}.{key}." in said


@pytest.mark.parametrize("name", ["Lion", "Muon"])
def test_optimizers_of_deepspeed(tmp_path, name):
    """DEEPSPEED_OPTIMIZERS of DeepSpeed 0.19.8 runtime/config.py."""
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": name}}
    assert imported(tmp_path, json.dumps(config), "deepspeed").optimizer == name.lower()


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_pipelines_of_torchtitan_that_turn_are_read_as_they_are_written(tmp_path, schedule):
    made = make_plan(
        MODEL, CLUSTER, framework="torchtitan@0.2", pp=4, zero=2, schedule=schedule, global_batch=32
    )
    written = export(made, "torchtitan@0.2", model=MODEL, cluster=CLUSTER).text
    read = imported(tmp_path, written, "torchtitan")
    assert [stage.layers for stage in read.groups[0].stages] == [
        stage.layers for stage in made.groups[0].stages
    ]
    assert read.groups[0].schedule == schedule


@pytest.mark.parametrize(
    ("schedule", "ep", "line", "is_named"),
    [
        ("DualPipeV", 2, "", True),
        ("DualPipeV", 2, "pipeline_parallel_expert_parallel_overlap = false", False),
        ("DualPipeV", 1, "", False),
        ("ZBVZeroBubble", 2, "", False),
    ],
)
def test_experts_that_dualpipev_hides_are_named(tmp_path, schedule, ep, line, is_named):
    """get_dual_pipe_v_flag of torchtitan 0.2.2: with experts over ranks and this schedule, on by default."""
    path = tmp_path / "train.toml"
    path.write_text(
        f"[parallelism]\npipeline_parallel_degree = 2\nexpert_parallel_degree = {ep}\n"
        f"pipeline_parallel_schedule = '{schedule}'\n{line}\n[training]\nlocal_batch_size = 4\n"
    )
    _, notes = import_plan(str(path), "torchtitan", load_model("qwen3-30b-a3b"), CLUSTER)
    key = "parallelism.pipeline_parallel_expert_parallel_overlap"
    assert (key in " ".join(notes)) == is_named


def test_a_gather_in_8_bit_of_torchtitan_is_read(tmp_path):
    toml = "[model]\nconverters = ['quantize.linear.float8']\n[quantize.linear.float8]\n"
    on = toml + "enable_fsdp_float8_all_gather = true\n"
    assert imported(tmp_path, on, "torchtitan").comm["narrow_gather"]
    assert not imported(tmp_path, toml, "torchtitan").comm.get("narrow_gather")
    wide = imported(tmp_path, on, "torchtitan", precision="bf16")
    assert wide.precision == "bf16" and not wide.comm.get("narrow_gather")


def test_a_script_may_overlap_shared_experts_that_the_model_has_not(tmp_path):
    """Megatron asks for no shared experts with the flag, and starts."""
    script = tmp_path / "script"
    script.write_text(f"{EXPERTS} --moe-shared-expert-overlap", encoding="utf-8")
    cluster = load_cluster("2x8xh100-sxm")
    made, _ = import_plan(str(script), "megatron", load_model("mixtral-8x7b"), cluster)
    assert not made.comm.get("shared_overlap")
    made, _ = import_plan(str(script), "megatron", load_model("qwen2-57b-a14b"), cluster)
    assert made.comm["shared_overlap"]


_FLAGS = "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 2 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("source", "text", "key"),
    [
        (
            "megatron",
            f"python pretrain_gpt.py {_FLAGS}",
            "--tensor-model-parallel-size/--pipeline-model-parallel-size/--context-parallel-size",
        ),
        (
            "torchtitan",
            "[training]\nglobal_batch_size = 7\n[parallelism]\ntensor_parallel_degree = 2\n",
            "training.global_batch_size",
        ),
        ("deepspeed", '{"tensor_parallel": {"autotp_size": 3}, "sequence_parallel_size": 2}', "autotp_size"),
        (
            "accelerate",
            "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 3\n",
            "parallelism_config.parallelism_config_tp_size",
        ),
    ],
)
def test_an_error_about_what_the_file_states_names_its_key(tmp_path, source, text, key):
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        import_plan(file, source, MODEL, CLUSTER, micro_batch=1)
    assert caught.value.file == str(file) and key in caught.value.key and "--tp" not in caught.value.key


def test_an_error_about_an_option_beside_the_file_names_the_option(tmp_path):
    file = tmp_path / "script.sh"
    file.write_text("python pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1")
    with pytest.raises(SpecError) as caught:
        import_plan(file, "megatron", MODEL, CLUSTER, global_batch=7)
    assert caught.value.key == "--global-batch" and caught.value.file is None


@pytest.mark.parametrize(
    ("source", "text", "fix"),
    [
        ("deepspeed", '{"train_micro_batch_size_per_gpu": 0}', "Correct it in the file"),
        ("deepspeed", '{"optimizer": {"type": "AdamX"}}', "Did you mean 'adam'?"),
        ("megatron", "pretrain_gpt.py --num-layers two --micro-batch-size 1", "Correct it in the file"),
        ("megatron", "pretrain_gpt.py --num-layers 32 --optimizer adm", "Did you mean 'adam'?"),
    ],
)
def test_an_error_about_a_value_of_the_file_has_a_fix(tmp_path, source, text, fix):
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        import_plan(file, source, MODEL, CLUSTER)
    assert caught.value.fix == fix and caught.value.rule
