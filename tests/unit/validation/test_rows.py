import csv
from itertools import pairwise

import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.model_dims import model_from_dims
from foreshard.errors import SpecError
from foreshard.validation.facts import precision_of, recompute_of, sharding_of, stated
from foreshard.validation.families import Family, family_of, framework_of
from foreshard.validation.row_cluster import nic_rate
from foreshard.validation.row_cuts import cost_cuts
from foreshard.validation.rows import measured_memory, measured_step_s, read_row, table_rows
from foreshard.validation.tables import read_table


@pytest.fixture
def row(cells):
    return lambda **changes: read_row(cells | changes, "t")


def test_a_whole_row(row):
    case = row()
    group, stage = case.plan.groups[0], case.plan.groups[0].stages[0]
    assert (stage.tp, stage.cp, stage.inner_dp, len(group.stages), group.num_chunks) == (4, 2, 2, 4, 5)
    assert (group.micro_batch, group.num_micro_batches, group.schedule, group.sp) == (
        2,
        64,
        "interleaved",
        True,
    )
    assert (stage.zero, stage.recompute, case.plan.precision) == (1, "none", "bf16")
    assert case.cluster.num_devices == 64
    assert case.model.num_layers == 80
    assert case.framework.label == "megatron-bridge@26.06"
    assert case.measured_s == 10.5
    assert case.assumptions[-1].startswith("NIC not stated")


def test_layers_are_covered_once_in_order(row):
    case = row(vpp="4", in_other="")
    spans = sorted(span for stage in case.plan.groups[0].stages for span in stage.layers)
    assert spans[0][0] == 0 and spans[-1][1] == 82
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_row_overrides_the_release(row):
    facts = row().framework
    assert (facts.tp_overlap, facts.param_gather_overlap, facts.grad_overlap) == (True, False, True)
    assert (facts.moment_bytes, facts.master_bytes, facts.grad_bytes, facts.grad_reduce_bytes) == (2, 4, 2, 2)
    assert not facts.fp8_params
    assert row(in_tp_overlap="none").framework.tp_overlap is False
    assert row(in_cuda_graph="transformer_engine:attn+moe_router").framework.cuda_graphs == "partial"
    assert row(in_cuda_graph="full_iteration:default scope").framework.cuda_graphs == "full"


def test_expert_facts():
    text = "flex:hybridep;ep_a2a_overlap=True;shared_expert_overlap=False;dropless forced balance"
    facts = stated(load_framework("megatron-bridge@25.09"), {"in_moe_dispatcher": text})
    assert (facts.dispatcher, facts.expert_overlap) == ("hybridep", True)
    facts = stated(load_framework("megatron-core"), {"in_moe_dispatcher": "alltoall;grouped_gemm=False"})
    assert (facts.dispatcher, facts.grouped_gemm) == ("alltoall", False)


def test_blank_cells_are_filled_and_listed(row):
    case = row(dtype="", sp="", zero_stage_or_fsdp="", act_recompute="", micro_batch="2")
    text = " | ".join(case.assumptions)
    for word in (
        "dtype not stated",
        "sequence parallelism not stated",
        "sharding not stated",
        "recompute not stated",
    ):
        assert word in text
    assert case.plan.groups[0].sp


def test_a_step_time_without_its_batch_says_nothing(row):
    with pytest.raises(SpecError, match="global batch"):
        row(global_batch="", metric_step_time_s="10.5")
    case = row(global_batch="", metric_step_time_s="", metric_tokens_per_s_per_gpu="1000")
    assert case.plan.global_batch == 1 * 2 * 4 * 4  # micro-batch, dp, four micro-batches for each stage
    assert case.measured_s == pytest.approx(case.plan.global_batch * case.plan.seq_len / (1000 * 64))


@pytest.mark.parametrize(
    ("text", "device", "want"),
    [
        ("FP8 (per-tensor current scaling)", "h100-sxm", "fp8"),
        ("MXFP8", "b200-sxm", "mxfp8"),
        ("FP8-MX", "gb200-nvl72", "mxfp8"),
        ("FP8 (MXFP8 / sub-channel, the parenthesised variant)", "h100-sxm", "fp8"),
        ("NVFP4", "b200-sxm", "nvfp4"),
        ("amp_bf16", "a100-sxm-80gb", "bf16"),
        ("fp16", "v100-sxm-16gb", "fp16"),
        ("bfloat16", "h100-sxm", "bf16"),
        ("FP8 hybrid", "h100-sxm", "fp8"),
        ("bf16-mixed", "a100-sxm-80gb", "bf16"),
        ("fp16 mixed", "a100-sxm-80gb", "fp16"),
        ("mixed", "v100-sxm-16gb", "fp16"),
        ("AMP", "a100-sxm-80gb", "bf16"),
        ("float16", "h100-sxm", "fp16"),
        ("Float 32", "h100-sxm", "fp32"),
        ("MX FP8", "b200-sxm", "mxfp8"),
        ("int8", "tpu-v5p", "fp8"),
    ],
)
def test_precisions(text, device, want):
    assert precision_of(text, resolve_device(device))[0] == want


@pytest.mark.parametrize(("text", "device"), [("int8", "gaudi-2"), ("whatever", "h100-sxm")])
def test_precisions_that_are_not_modelled(text, device):
    with pytest.raises(SpecError):
        precision_of(text, resolve_device(device))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("none", ("none", "none")),
        ("full", ("full", "none")),
        ("full:block:21", ("full:block:21", "none")),
        ("selective", ("selective:core_attn", "none")),
        ("selective:mlp,core_attn", ("selective:mlp+core_attn", "none")),
        ("selective:layernorm+moe_act", ("selective:layernorm+moe_act", "none")),
        ("none; activation cpu offload 40 layers", ("none", "activations")),
        ("selective: SAVE_DOT_ONLY", ("selective:core_attn+layernorm", "none")),
        ("selective 2", ("every-2", "none")),
        ("yes", ("full", "none")),
        ("No", ("none", "none")),
        ("gradient checkpointing", ("full", "none")),
        ("selective (core_attn)", ("selective:core_attn", "none")),
        ("full (uniform, 1)", ("full", "none")),
        ("every 2nd layer", ("every-2", "none")),
        ("partial", ("selective:core_attn", "none")),
    ],
)
def test_recompute_takes_the_normal_form(text, want):
    assert recompute_of(text)[:2] == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("distributed optimizer (ZeRO-1)", (1, None, "")),
        ("ZeRO-1 over 8 in-node ranks (hybrid)", (1, 8, "")),
        ("none (DDP, replicated optimizer)", (0, None, "")),
        ("", (7, None, "")),
        ("FSDP FULL_SHARD", (3, None, "fsdp")),
        ("FSDP SHARD_GRAD_OP", (2, None, "fsdp")),
        ("ZeRO stage 2", (2, None, "")),
        ("3", (3, None, "")),
        ("hybrid_shard", (3, None, "fsdp")),
        ("no", (0, None, "")),
        ("Megatron-FSDP", (3, None, "megatron-fsdp")),
        ("ZeRO-3 + CPU-offloaded AdamW", (3, None, "")),
        ("FSDP 128 x DP 4", (3, 128, "fsdp")),
        ("FSDP in slice (ICI) 256 + DP over DCN", (3, 256, "fsdp")),
        ("distributed optimizer (overlap-param-gather)", (1, None, "")),
    ],
)
def test_sharding(text, want):
    assert sharding_of(text, 7) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("8x HDR IB per DGX A100", "1600 Gb/s"),
        ("4x 100 Gb RoCE per node", "400 Gb/s"),
        ("800 Gbps/node (HDR IB)", "800 Gb/s"),
        ("Infiniband, Ethernet", None),
        ("", None),
        (
            "Storage: 2x CX-7 IB NDR 400Gb/s, Compute: 8x CX-7 IB NDR 400Gb/s, Management: 100Gb/s",
            "3200 Gb/s",
        ),
        ("BF3 200Gbps for NS and 2xBF3 400Gbps for EW", "800 Gb/s"),
        ("PCIe-NIC: 500 GB/s", None),
    ],
)
def test_nic_rates(text, want):
    assert nic_rate(text) == want


def test_measured_time_prefers_steps_then_tokens_then_flops(row, cells):
    model = row().model
    cells |= {"metric_tokens_per_s_per_gpu": "1000", "metric_tflops_per_gpu": "500"}
    assert measured_step_s(cells, "full", model, 8192) == 10.5
    cells["metric_step_time_s"] = ""
    assert measured_step_s(cells, "full", model, 8192) == pytest.approx(128 * 8192 / (1000 * 64))
    cells["metric_tokens_per_s_per_gpu"] = ""
    work = 3 * model.forward_flops_per_token(8192, False) * 128 * 8192
    assert measured_step_s(cells, "full", model, 8192) == pytest.approx(work / (500e12 * 64))
    assert measured_step_s(cells, "causal", model, 8192) < measured_step_s(cells, "full", model, 8192)
    cells["metric_tflops_per_gpu"] = ""
    assert measured_step_s(cells, "full", model, 8192) is None


def test_memory_units_and_kinds(row):
    case = row(metric_peak_memory_gb="60", notes="")
    assert (case.measured_peak_bytes, case.memory_kind) == (60 * 2**30, "unknown")
    case = row(
        id="simumax_b200-1", metric_peak_memory_gb="60", notes="max allocated, GiB*1.0737; reserved 70 GiB"
    )
    assert (case.measured_peak_bytes, case.memory_kind) == (60e9, "allocated")
    case = row(id="stas_h200_b200-1", metric_peak_memory_gb="60", notes="peak GiB 55.9 = max_memory_reserved")
    assert (case.measured_peak_bytes, case.memory_kind) == (60e9, "reserved")


def test_an_oom_row_is_a_label(row):
    case = row(notes="OOM: does not fit 80 GB", metric_step_time_s="", metric_peak_memory_gb="80")
    assert (case.oom, case.measured_s, case.measured_peak_bytes) == (True, None, None)


def test_families_and_releases(cells):
    assert family_of("megatronbridge_memory-0007", "") == "megatronbridge_memory"
    assert family_of("megatron_papers-0001", "README weak scaling = SC21 Table 1") == "sc21"
    assert family_of("megatron_papers-0011", "README weak scaling H100") == "megatron_h100"
    made, notes = framework_of(
        "megatronbridge", cells | {"framework": "Megatron-Bridge 26.05 NeMo Container"}, "bf16"
    )
    assert made.label == "megatron-bridge@26.04.01"
    assert "26.05" in notes[0]
    dgxc = cells | {
        "framework": "NeMo/Megatron-Core",
        "source": "NVIDIA DGX Cloud v24.11.1 nemotron/README.md",
    }
    assert framework_of("dgxc", dgxc, "bf16")[0].label == "nemo@24.11"
    mlperf = cells | {"framework": "PyTorch NVIDIA Release 24.09", "source": "MLPerf Training v4.1 closed/X"}
    assert framework_of("mlperf", mlperf, "fp8")[0].label == "mlperf-nemo@4.1"


def test_repeats_share_a_key_and_releases_do_not(row):
    again = row(id="megatronbridge-0099", metric_step_time_s="11")
    assert again.config_key == row().config_key
    assert again.rank_key == row(tp="8", dp="1").rank_key
    other = row(framework="Megatron-Bridge/Megatron-Core 26.04 NeMo Container")
    assert other.config_key != row().config_key


def test_printed_pipeline_layouts_win(row):
    deepseek = {
        "model": "DeepSeekV3",
        "n_layers": "61",
        "hidden": "7168",
        "ffn_hidden": "2048",
        "n_heads": "128",
        "n_kv_heads": "128",
        "vocab": "129280",
        "n_experts": "256",
        "topk": "8",
        "seq_len": "4096",
        "gpus": "256",
        "dp": "128",
        "tp": "1",
        "pp": "2",
        "cp": "1",
        "ep": "64",
        "vpp": "8",
        "global_batch": "4096",
        "in_other": "pp_layout set: Et*4|(t*4|)*14tmL; mtp_num_layers=1",
    }
    stages = row(**deepseek).plan.groups[0].stages
    assert stages[0].layers[0] == (0, 5)
    assert stages[1].layers[-1] == (61, 63)


def test_files_are_read_and_skips_explained(tmp_path, cells):
    path = tmp_path / "x.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(cells))
        writer.writeheader()
        writer.writerows([cells, cells | {"id": "megatronbridge-2", "gpu": "abacus"}])
    rows, skipped = table_rows(read_table(path))
    assert [case.id for case in rows] == ["megatronbridge-0001"]
    assert skipped[0].measured_s == 10.5
    assert "abacus" in skipped[0].reason


def test_memory_is_none_when_blank(cells):
    assert measured_memory(cells, Family()) == (None, "")


def test_nanotron_cuts_layers_by_cost(row):
    """Worked by hand: 16 layers of 4, a head of 16: half of 80 is passed by layer 11."""
    model = model_from_dims(
        "small", n_layers=16, hidden=64, ffn=128, n_heads=4, n_kv_heads=4, vocab=2560, gated=True
    )
    layer, head = 4 * 64 * 64 + 3 * 64 * 128, 2560 * 64
    assert head == 4 * layer
    assert cost_cuts(model, 1) == [16]
    assert cost_cuts(model, 2) == [11, 5]
    assert cost_cuts(model, 4) == [6, 5, 5, 0]


def test_memory_is_what_the_source_says(cells):
    cells["metric_peak_memory_gb"] = "10"
    silent = Family(memory="reserved", gigabyte=1e9)
    assert measured_memory(cells, silent) == (1e10, "reserved")
    assert measured_memory(cells, Family()) == (10 * 2.0**30, "unknown")
    said = cells | {"notes": "peak allocated after iteration 2"}
    assert measured_memory(said, silent) == (1e10, "allocated")


def test_recipes_set_what_the_code_of_a_source_sets(row):
    plain = row(id="megatronbridge_memory-0099", framework="Megatron-Bridge")
    assert (plain.framework.memory, plain.framework.moment_bytes) == ("megatron-bridge-no-transpose", 2)
    assert any("transposes" in line for line in plain.assumptions)
    other = row(id="nemo_docs-0099", framework="Megatron-Bridge")
    assert other.framework.memory != "megatron-bridge-no-transpose"


def test_bigscience_before_the_bf16_optimizer(row):
    def gradient_bytes(line):
        source = f"BigScience tr11-176B chronicles-prequel (line {line})"
        changes = {"framework": "Megatron-DeepSpeed", "in_optimizer_dtypes": ""}
        return row(id="bigscience-0099", source=source, **changes).framework.grad_bytes

    assert [gradient_bytes(line) for line in (77, 583, 898, 917)] == [2, 2, 2, 4]


def test_megatron_reduces_in_the_dtype_of_its_buffer():
    facts = stated(load_framework("megatron-core"), {"in_optimizer_dtypes": "--grad-reduce-in-bf16"})
    assert (facts.grad_bytes, facts.grad_reduce_bytes) == (2, 2)


def test_selective_recompute_of_fms_fsdp_is_every_block(row):
    case = row(framework="PyTorch FSDP + torch.compile (fms-fsdp)", act_recompute="selective")
    assert case.plan.groups[0].stages[0].recompute == "full"
    assert any("fms-fsdp" in line for line in case.assumptions)


def test_model_code_without_liger_has_its_own_profile(row):
    stas = row(id="stas_h200_b200-0099", framework="DeepSpeed", notes="base (no Liger); peak 99 GiB")
    assert stas.framework.memory == "deepspeed-eager"
    assert row(id="stas_h200_b200-0099", framework="DeepSpeed", notes="").framework.memory == "deepspeed"
