"""Exports read by the frameworks themselves: what was planned arrives. Skipped where one is missing."""

from __future__ import annotations

import json
import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.interop.frameworks import (
    Megatron,
    need_release,
    read_accelerate,
    read_deepspeed,
    read_skypilot,
    read_torchrun,
    read_torchtitan_02,
    read_torchtitan_03,
)

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.interop.exporters import export
from foreshard.interop.exporters.uniform import uniform
from foreshard.predict.space import draw_plans
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.model import Model
from foreshard.spec.plan import COMM_OPTIONS, Plan

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own
CLUSTER = load_cluster("2x8xh100-sxm")


@pytest.fixture(autouse=True)
def quiet():
    """Frameworks log at import."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def planned(model: Model, **degrees) -> Plan:
    comm = degrees.pop("comm", {})
    sizes = {"global_batch": 64, "seq_len": 4096, **degrees}
    made = plan_from_degrees(model.num_layers, CLUSTER.num_devices, **sizes)
    return replace(made, comm=comm)


def written(target: str, made: Plan, folder: Path, model: Model | None = None) -> Path:
    file = export(made, target, model=model, cluster=CLUSTER)
    path = folder / file.name
    path.write_text(file.text, encoding="utf-8")
    return path


def words_of(text: str) -> list[str]:
    return shlex.split(text.split("MEGATRON_ARGS=(", 1)[1].rsplit(")", 1)[0], comments=True)


MEGATRON = (
    ("llama3-8b", {"tp": 2, "pp": 2, "zero": 1}),
    ("llama3-8b", {"tp": 2, "pp": 2, "vpp": 2, "zero": 1, "recompute": "full"}),
    ("llama3-8b", {"tp": 2, "pp": 2, "vpp": 3, "zero": 1}),  # cut unevenly: a layout
    ("llama3-8b", {"pp": 4, "tp": 2, "vpp": 5, "recompute": "selective:core_attn"}),
    ("llama3-8b", {"tp": 8, "zero": 0, "micro_batch": 4}),
    ("llama3-8b", {"tp": 2, "cp": 2, "pp": 2, "recompute": "full:block:4", "comm": {"context_gather": True}}),
    ("llama3-8b", {"zero": 2, "framework": "megatron-fsdp"}),
    ("llama3-8b", {"zero": 3, "shard_size": 8, "framework": "megatron-fsdp"}),
    ("llama3-8b", {"zero": 1, "shard_size": 4}),
    ("llama3-8b", {"zero": 1, "offload": "optimizer", "precision": "fp16"}),
    ("llama3-8b", {"tp": 4, "pp": 4, "precision": "fp8"}),
    ("llama3-8b", {"tp": 4, "precision": "mxfp8", "recompute": "selective:layernorm+mlp"}),
    ("llama3-8b", {"tp": 4, "precision": "nvfp4"}),
    ("llama3-8b", {"precision": "fp32", "optimizer": "sgd", "zero": 0}),
    ("llama3-8b", {"tp": 2, "sp": False}),
    (
        "llama3-8b",
        {
            "tp": 2,
            "pp": 4,
            "vpp": 2,
            "comm": {
                "tp_overlap": True,
                "grad_overlap": True,
                "param_gather_overlap": True,
                "p2p_overlap": False,
            },
        },
    ),
    ("mixtral-8x7b", {"tp": 2, "ep": 4, "etp": 2, "pp": 2}),
    ("mixtral-8x7b", {"ep": 8, "pp": 2, "vpp": 2, "comm": {"expert_overlap": True}}),
    ("deepseek-v2-lite", {"ep": 8, "pp": 2, "recompute": "selective:mla_up_proj+moe_act"}),
    ("deepseek-v2-lite", {"ep": 8, "comm": {"shared_overlap": True}}),
    ("deepseek-v3", {"ep": 16}),
    ("qwen3-30b-a3b", {"ep": 8, "tp": 2}),
    ("nemotron4-15b", {"tp": 8}),
    ("llama3-8b", {"tp": 2, "zero": 1, "optimizer": "muon"}),
    ("llama3-8b", {"tp": 2, "zero": 0, "optimizer": "lion"}),
)


@pytest.mark.parametrize(("name", "degrees"), MEGATRON)
def test_megatron_reads_the_plan(name, degrees, monkeypatch):
    megatron, model = Megatron(monkeypatch), load_model(name)
    made = planned(model, **degrees)
    file = export(made, "megatron", model=model)
    arguments, config = megatron.read(words_of(file.text), len(made.ranks), file.text)
    _megatron_has(made, model, arguments, config)


def _megatron_has(made: Plan, model: Model, arguments, config) -> None:
    degrees, _ = uniform(made)
    assert arguments.data_parallel_size == degrees.dp
    assert config.tensor_model_parallel_size == degrees.tp
    assert config.pipeline_model_parallel_size == degrees.pp
    assert config.context_parallel_size == degrees.cp
    assert config.expert_model_parallel_size == degrees.ep
    assert config.expert_tensor_parallel_size == degrees.etp
    assert (config.virtual_pipeline_model_parallel_size or 1) == degrees.vpp
    assert config.sequence_parallel == (degrees.sp and degrees.tp > 1)
    assert (arguments.micro_batch_size, arguments.global_batch_size) == (
        degrees.micro_batch,
        made.global_batch,
    )
    assert arguments.seq_length == made.seq_len
    assert config.num_layers == model.num_layers and config.hidden_size == model.hidden
    usual = "silu" if model.blocks[0].gated else "gelu"
    assert config.activation_func.__name__ == ("squared_relu" if model.activation == "relu2" else usual)
    kind, factor = model.router or ("softmax", 1.0)
    assert config.moe_router_score_function == kind.partition("_")[0]
    assert config.moe_router_pre_softmax == (kind == "softmax_all")
    assert (config.moe_router_topk_scaling_factor or 1.0) == factor
    assert config.qk_layernorm == (model.blocks[0].qk_norm or model.blocks[0].kv_lora > 0)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        blocks = [[sum(one.name == "decoder" for one in chunk) for chunk in rank] for rank in layout.layout]
        last = model.num_layers + 1
        assert blocks == [
            [min(stop, last) - max(start, 1) for start, stop in stage] for stage in degrees.spans
        ]
    else:
        assert degrees.even_blocks()
    kind, _, rest = degrees.recompute.partition(":")
    assert config.recompute_granularity == (None if kind == "none" else kind)
    if kind == "selective":
        assert config.recompute_modules == rest.split("+")
    if kind == "full":
        assert f"{config.recompute_method}:{config.recompute_num_layers}" == (rest or "uniform:1")
    assert arguments.optimizer == {"adamw": "adam"}.get(made.optimizer, made.optimizer)
    whole = made.optimizer in ("muon", "lion")  # their updates need whole matrices
    fsdp = made.framework == "megatron-fsdp"
    assert arguments.use_distributed_optimizer == ((degrees.zero > 0 or fsdp) and not whole)
    assert arguments.use_layer_wise_distributed_optimizer == (degrees.zero > 0 and whole)
    assert arguments.use_megatron_fsdp == fsdp and (fsdp or degrees.zero < 2)
    if fsdp:
        names = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        assert arguments.data_parallel_sharding_strategy == names[degrees.zero]
    copies = degrees.num_replicas // degrees.shard_size if degrees.zero else 1
    assert arguments.num_distributed_optimizer_instances == copies
    assert arguments.optimizer_cpu_offload == (degrees.offload == "optimizer")
    assert config.bf16 == (made.precision not in ("fp32", "tf32", "fp16"))
    assert config.fp16 == (made.precision == "fp16")
    assert bool(config.fp8) == (made.precision in ("fp8", "mxfp8"))
    for option, read in (
        ("grad_overlap", arguments.overlap_grad_reduce),
        ("param_gather_overlap", arguments.overlap_param_gather),
        ("expert_overlap", config.overlap_moe_expert_parallel_comm),
        ("shared_overlap", config.moe_shared_expert_overlap),
    ):
        if option in made.comm and (option not in ("expert_overlap", "shared_overlap") or degrees.ep > 1):
            assert read == made.comm[option], option
    if degrees.vpp > 1:
        assert config.overlap_p2p_comm == made.comm.get("p2p_overlap", True)


DRAWN = ("llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2-xl")
RULES = (
    "none",
    "selective:core_attn",
    "selective:layernorm+mlp",
    "selective:moe_act",
    "selective:moe",
    "selective:mla_up_proj",
    "full",
    "full:uniform:2",
    "full:block:1",
)


@pytest.mark.parametrize("name", DRAWN)
def test_megatron_reads_any_plan_or_the_export_names_why_not(name, monkeypatch):
    megatron, model, rng = Megatron(monkeypatch), load_model(name), np.random.default_rng(7)
    table = draw_plans(model, CLUSTER, 1200, rng, global_batch=64, seq_len=1024, rules=RULES)
    table = table.take(np.isin(table.schedule, (1, 2)) & (table.offload < 2))
    read = 0
    for i in range(min(60, len(table))):
        precision = str(rng.choice(["bf16", "fp16", "fp32", "fp8", "mxfp8"]))
        made = table.plan(i, model, seq_len=1024, precision=precision, framework="megatron-core")
        comm = {option: bool(rng.integers(2)) for option in COMM_OPTIONS if rng.random() < 0.3}
        made = replace(made, comm=comm)
        try:
            file = export(made, "megatron", model=model)
        except SpecError as refused:
            assert "cannot express" in refused.what
            continue
        _megatron_has(made, model, *megatron.read(words_of(file.text), len(made.ranks), file.text))
        read += 1
    assert read >= 10


TORCHTITAN = (
    ("llama3-8b", {"tp": 2, "pp": 2, "zero": 2, "recompute": "full"}),
    ("llama3-8b", {"tp": 2, "pp": 4, "vpp": 3, "zero": 3}),
    ("llama3-8b", {"zero": 3, "shard_size": 4, "recompute": "selective:op"}),
    ("llama3-8b", {"zero": 0, "micro_batch": 2}),
    ("llama3-8b", {"tp": 2, "cp": 2, "zero": 3, "precision": "fp8"}),
    ("llama3-8b", {"pp": 2, "zero": 2, "schedule": "gpipe", "precision": "fp32"}),
    ("qwen3-30b-a3b", {"ep": 8, "zero": 3}),
    ("deepseek-v2-lite", {"ep": 4, "pp": 2, "zero": 2}),
    ("gpt-oss-20b", {"ep": 8, "zero": 3}),
)
TORCHTITAN_03 = (
    ("deepseek-v3", {"ep": 8, "zero": 3}),
    ("qwen3-8b", {"pp": 2, "zero": 2}),
)


def _parts(model: Model, degrees) -> list[int]:
    """Return the blocks of each virtual stage in the order of the model."""
    last = model.num_layers + 1
    return [min(stop, last) - max(start, 1) for start, stop in degrees.chunks()]


def _torchtitan_parallelism(made: Plan, model: Model, parallel) -> None:
    degrees, _ = uniform(made)
    shard = 1 if degrees.zero == 0 else degrees.shard_size // degrees.cp
    assert parallel.data_parallel_shard_degree == shard
    assert parallel.data_parallel_replicate_degree == degrees.dp // shard
    assert parallel.tensor_parallel_degree == degrees.tp
    assert parallel.context_parallel_degree == degrees.cp
    assert parallel.pipeline_parallel_degree == degrees.pp
    assert parallel.expert_parallel_degree == degrees.ep
    if degrees.pp > 1:
        parts = parallel.module_fqns_per_model_part
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == _parts(model, degrees)


def _torchtitan_batches(made: Plan, config) -> None:
    degrees, _ = uniform(made)
    read, passes = config.training, degrees.num_micro_batches if degrees.pp > 1 else 1
    assert (read.global_batch_size, read.seq_len) == (made.global_batch, made.seq_len)
    assert read.local_batch_size == degrees.micro_batch * passes
    if degrees.pp > 1:
        assert config.parallelism.pipeline_parallel_microbatch_size == degrees.micro_batch
    assert read.mixed_precision_param == ("float32" if made.precision == "fp32" else "bfloat16")


@pytest.mark.parametrize(
    ("name", "degrees"),
    (
        *TORCHTITAN,
        ("llama3-8b", {"zero": 3, "recompute": "every-2"}),
        ("llama3-8b", {"zero": 3, "precision": "fp8", "comm": {"narrow_gather": True}}),
    ),
)
def test_torchtitan_02_reads_the_plan(name, degrees, tmp_path):
    model = load_model(name)
    made = planned(model, **degrees)
    config, dims = read_torchtitan_02(written("torchtitan@0.2", made, tmp_path, model), len(made.ranks))
    _torchtitan_parallelism(made, model, config.parallelism)
    _torchtitan_batches(made, config)
    stage = made.groups[0].stages[0]
    assert dims.dp_replicate * dims.dp_shard == stage.inner_dp
    narrow = config.quantize.linear.float8.enable_fsdp_float8_all_gather
    assert narrow == made.comm.get("narrow_gather", False)
    rule = config.activation_checkpoint
    said = {
        "none": ("none", None),
        "full": ("full", None),
        "selective:op": ("selective", "op"),
        "every-2": ("selective", "2"),
    }[stage.recompute]
    assert rule.mode == said[0] and said[1] in (None, rule.selective_ac_option)


@pytest.mark.parametrize(("name", "degrees"), (*TORCHTITAN, *TORCHTITAN_03))
def test_torchtitan_03_reads_the_plan(name, degrees, tmp_path, monkeypatch):
    model = load_model(name)
    made = planned(model, **degrees)
    if made.precision == "fp8":
        need_release("torchao")
    config = read_torchtitan_03(written("torchtitan@0.3", made, tmp_path, model), monkeypatch)
    _torchtitan_parallelism(made, model, config.parallelism)
    _torchtitan_batches(made, config)
    kinds = {"none": "NoneType", "full": "FullAC.Config", "selective:op": "SelectiveAC.Config"}
    assert type(config.activation_checkpoint).__qualname__ == kinds[made.groups[0].stages[0].recompute]
    theirs = config.model_spec.model
    assert len(theirs.layers) == model.num_layers
    assert (theirs.dim, theirs.vocab_size) == (model.hidden, model.vocab)
    assert len(getattr(theirs, "mtp_layers", [])) == model.num_next_token


@pytest.mark.parametrize(
    "degrees",
    [
        {"zero": 0},
        {"zero": 1, "precision": "fp16"},
        {"zero": 2, "micro_batch": 2, "comm": {"grad_overlap": False}},
        {"zero": 3},
        {"zero": 3, "offload": "all", "recompute": "full"},
        {"zero": 1, "offload": "optimizer"},
        {"zero": 2, "precision": "fp32"},
    ],
)
def test_deepspeed_reads_the_plan(degrees, tmp_path, monkeypatch):
    made = planned(load_model("llama3-8b"), **degrees)
    read = read_deepspeed(written("deepspeed", made, tmp_path), len(made.ranks), monkeypatch)
    said, _ = uniform(made)
    assert read.train_batch_size == made.global_batch
    assert read.train_micro_batch_size_per_gpu == said.micro_batch
    assert read.gradient_accumulation_steps == said.num_micro_batches
    assert read.zero_optimization_stage == said.zero
    assert read.bfloat16_config.enabled == (made.precision == "bf16")
    assert read.float16_config.enabled == (made.precision == "fp16")
    offloads = said.offload in ("optimizer", "all")
    assert (read.zero_config.offload_optimizer is not None) == offloads
    if "grad_overlap" in made.comm:
        assert read.zero_config.overlap_comm == made.comm["grad_overlap"]


@pytest.mark.parametrize(
    "degrees",
    [
        {"zero": 3},
        {"zero": 2, "recompute": "full"},
        {"zero": 3, "shard_size": 8, "precision": "fp16"},
        {"zero": 3, "cp": 2},
        {"zero": 3, "tp": 2, "sp": False},
        {"zero": 2, "precision": "fp32"},
    ],
)
def test_accelerate_reads_the_plan(degrees, tmp_path, monkeypatch):
    made = planned(load_model("llama3-8b"), **degrees)
    path = written("fsdp", made, tmp_path)
    arguments, environment, parallel = read_accelerate(path, monkeypatch)
    said, _ = uniform(made)
    assert arguments.use_fsdp and arguments.num_processes == len(made.ranks)
    assert arguments.num_machines == len(CLUSTER.nodes) * CLUSTER.nodes[0].count
    shard = said.shard_size // said.cp
    assert parallel.dp_replicate_size == said.dp // shard
    assert parallel.dp_shard_size == shard
    assert (parallel.tp_size, parallel.cp_size) == (said.tp, said.cp)
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"].lower() == str(said.zero == 3).lower()
    assert environment["FSDP_ACTIVATION_CHECKPOINTING"].lower() == str(said.recompute == "full").lower()
    words = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}
    assert environment["ACCELERATE_MIXED_PRECISION"] == words[made.precision]


def test_skypilot_reads_the_task(tmp_path):
    made = planned(load_model("llama3-8b"), tp=2)
    task = read_skypilot(written("skypilot", made, tmp_path))
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}
    assert task.envs == {"TRAIN": "train.py"}


@pytest.mark.parametrize("target", ["slurm", "skypilot"])
def test_torchrun_reads_its_line(target):
    file = export(planned(load_model("llama3-8b"), tp=2), target, cluster=CLUSTER)
    (line,) = re.findall(r"torchrun --(?:.*\\\n)*.*", file.text)
    line = re.sub(r"\$\(.*?\)|\"\$MASTER_ADDR\"", "host0", line).replace('"$MASTER_PORT"', "29500")
    for name, value in {
        "$SKYPILOT_NUM_NODES": "2",
        "$SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "$SKYPILOT_NODE_RANK": "1",
        "$SLURM_PROCID": "1",
    }.items():
        line = line.replace(name, value)
    line = line.replace("$TRAIN", "train.py --lr 1").replace('"$@"', "train.py --lr 1").replace("\\\n", " ")
    read = read_torchrun(line)
    assert (read.nnodes, read.node_rank, read.rdzv_backend) == ("2", 1, "static")
    assert read.nproc_per_node in ("8", "gpu")
    assert (read.master_addr, read.master_port) == ("host0", 29500)
    assert (read.training_script, read.training_script_args) == ("train.py", ["--lr", "1"])


def test_slurm_asks_for_what_sbatch_has():
    known = json.loads(Path(__file__).with_name("schema").joinpath("slurm.json").read_text())
    made = planned(load_model("llama3-8b"), tp=2)
    mixed = load_cluster("1x8xh100-sxm+1x8xa100-sxm-80gb")
    for cluster in (CLUSTER, mixed):
        file = export(made, "slurm", cluster=cluster)
        lines = re.findall(r"^#SBATCH (.*)$", file.text, re.MULTILINE)
        assert lines
        for line in lines:
            name, _, value = line.removeprefix("--").partition("=")
            assert name in known["options"], line
            assert re.fullmatch(known["options"][name], value), line
        flags = re.findall(r"^srun (.*) bash", file.text, re.MULTILINE)[0].split()
        assert {flag.removeprefix("--").partition("=")[0] for flag in flags} <= set(known["srun"])


def _drawn(model: Model, framework: str, rules: tuple[str, ...], zero: tuple[int, ...]):
    """Yield plans of the whole space with the levels of sharding and rules that a target may have."""
    rng = np.random.default_rng(11)
    table = draw_plans(model, CLUSTER, 1500, rng, global_batch=64, seq_len=1024, rules=rules)
    table = table.take(np.isin(table.zero, zero) & (table.offload < 2))
    for i in range(min(40, len(table))):
        precision = str(rng.choice(["bf16", "fp16", "fp32"]))
        made = table.plan(i, model, seq_len=1024, precision=precision, framework=framework)
        yield replace(made, comm={"grad_overlap": bool(rng.integers(2))} if rng.random() < 0.5 else {})


def _exported(target: str, made: Plan, folder: Path, model: Model) -> Path | None:
    try:
        return written(target, made, folder, model)
    except SpecError as refused:
        assert "cannot express" in refused.what
        return None


@pytest.mark.parametrize("target", ["torchtitan@0.2", "torchtitan@0.3"])
def test_torchtitan_reads_any_plan_or_the_export_names_why_not(target, tmp_path, monkeypatch):
    model, read = load_model("llama3-8b"), 0
    for made in _drawn(model, "torchtitan", ("none", "full", "selective:op", "every-2"), (0, 2, 3)):
        path = _exported(target, made, tmp_path, model)
        if path is None:
            continue
        if target.endswith("2"):
            config, _ = read_torchtitan_02(path, len(made.ranks))
        else:
            config = read_torchtitan_03(path, monkeypatch)
        _torchtitan_parallelism(made, model, config.parallelism)
        _torchtitan_batches(made, config)
        read += 1
    assert read >= 5


def test_deepspeed_reads_any_plan_or_the_export_names_why_not(tmp_path, monkeypatch):
    model, read = load_model("gpt2-xl"), 0
    for made in _drawn(model, "deepspeed", ("none", "full"), (0, 1, 2, 3)):
        path = _exported("deepspeed", made, tmp_path, model)
        if path is not None:
            config = read_deepspeed(path, len(made.ranks), monkeypatch)
            assert config.zero_optimization_stage == made.groups[0].stages[0].zero
            read += 1
    assert read >= 1


def test_accelerate_reads_any_plan_or_the_export_names_why_not(tmp_path, monkeypatch):
    model, read = load_model("llama3-8b"), 0
    for made in _drawn(model, "torchtitan", ("none", "full"), (2, 3)):
        path = _exported("fsdp", made, tmp_path, model)
        if path is not None:
            _, _, parallel = read_accelerate(path, monkeypatch)
            assert parallel.total_size == len(made.ranks)
            read += 1
    assert read >= 1
