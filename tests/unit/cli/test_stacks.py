"""Which attention kernel and which framework run on a device; a chosen kernel that cannot run is refused."""

import json

import pytest

from foreshard.api import load_cluster, load_model, make_plan, plan, predict
from foreshard.catalog.devices import devices, resolve_device
from foreshard.catalog.frameworks import frameworks, load_framework
from foreshard.catalog.stacks import attention_on, kernels_on, stack_warnings
from foreshard.errors import SpecError
from foreshard.spec.plan_file import parse_plan

MODEL = load_model("llama3.2-1b")
FLASH = {"fa1", "fa2", "fa3", "cudnn"}


@pytest.mark.parametrize("name", ["v100-sxm-16gb", "t4", "p100-pcie", "rtx-2080"])
def test_no_device_before_ampere_runs_a_kernel_of_later_ones(name):
    device = resolve_device(name)
    assert not {"fa2", "fa3", "cudnn"} & set(kernels_on(device))
    for framework in frameworks():
        assert attention_on(framework, device) not in {"fa2", "fa3", "cudnn"}


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("a100-sxm-80gb", "fa2"),
        ("h100-sxm", "cudnn"),
        ("gb200-nvl72", "cudnn"),
        ("rtx-5090", "fa2"),
        ("l40s", "fa2"),
        ("mi300x", "fa2"),
        ("v100-sxm-16gb", "efficient"),
    ],
)
def test_torch_chooses_by_the_device(device, kernel):
    """Recent torch tries cuDNN first on 9.0 and 10.x, elsewhere flash attention 2; in 2024 it did not."""
    for name in ("torchtitan@0.3", "hf", "ddp"):
        assert attention_on(load_framework(name), resolve_device(device)) == kernel
    if kernel == "cudnn":
        assert attention_on(load_framework("torchtitan@2024"), resolve_device(device)) == "fa2"


def test_fa3_is_for_hopper_alone():
    assert {device.arch for device in devices().values() if "fa3" in kernels_on(device)} == {"hopper"}


def test_every_framework_has_a_kernel_on_every_device():
    """What runs may also be chosen, or is the vendor's own; on NVIDIA it is one that the device has."""
    for framework in frameworks():
        for device in devices().values():
            if device.vendor == "nvidia":
                assert attention_on(framework, device) in kernels_on(device)


@pytest.mark.parametrize(
    ("device", "framework", "kernel"),
    [
        ("v100-sxm-16gb", "megatron-core", "unfused"),
        ("t4", "torchtitan", "efficient"),
        ("a100-sxm-80gb", "deepspeed", "fa2"),
        ("h100-sxm", "deepspeed", "fa3"),
        ("b200-sxm", "deepspeed", "cudnn"),
        ("a100-sxm-80gb", "megatron-core", "cudnn"),
        ("v100-sxm-16gb", "megatron-lm@2022", "unfused"),
    ],
)
def test_what_runs(device, framework, kernel):
    assert attention_on(load_framework(framework), resolve_device(device)) == kernel


def test_scores_take_memory_where_attention_is_not_fused():
    whole = predict(MODEL, "1x8xv100-sxm-32gb", seq=2048, dtype="fp16")
    flash = predict(MODEL, "1x8xv100-sxm-32gb", seq=2048, dtype="fp16", framework="torchtitan")
    chosen = predict(MODEL, "1x8xv100-sxm-32gb", seq=2048, dtype="fp16", attention="efficient")
    scores = 2 * 32 * 2048**2 * MODEL.num_layers  # softmax output, 16 bit, of every head and layer
    peaks = [one.memory.breakdown_bytes["activations"] for one in (whole, chosen, flash)]
    sums = 4 * 32 * 2048 * MODEL.num_layers  # that a fused kernel keeps, fp32, of every row
    assert peaks[0] - peaks[1] == scores - sums
    assert any("unfused, as it has no cudnn" in said for said in whole.assumptions)
    assert any("memory-efficient kernel" in said for said in flash.assumptions)


def test_a_mixed_cluster_prices_each_device_with_its_kernel():
    cluster = load_cluster("1x8xv100-sxm-32gb+1x8xa100-sxm-80gb@100Gb/s")
    said = predict(MODEL, cluster, seq=1024, dtype="fp16").assumptions
    assert any("attention on v100-sxm-32gb: unfused" in one for one in said)
    assert not any("attention on a100" in one for one in said)


@pytest.mark.parametrize(
    ("kernel", "cluster", "there"),
    [
        ("fa3", "8xa100", "unfused, efficient, fa1, fa2, cudnn"),
        ("cudnn", "8xv100", "unfused, efficient"),
        ("fa2", "1x4xtpu-v5p", "splash attention"),
        ("cudnn", "8xmi300x", "AOTriton"),
    ],
)
def test_a_kernel_that_was_chosen_and_cannot_run_is_refused(kernel, cluster, there):
    asked = {"dtype": "fp16"} if "v100" in cluster else {}
    with pytest.raises(SpecError, match=there) as caught:
        predict(MODEL, cluster, attention=kernel, **asked)
    assert caught.value.key == "--attention" and caught.value.value == kernel and caught.value.fix
    with pytest.raises(SpecError, match=there):
        plan(MODEL, cluster, global_batch=8, attention=kernel, **asked)


def test_a_chosen_kernel_is_stated_and_predicts_the_same_from_the_plan_file(shell, tmp_path):
    words = ("predict", "llama3.2-1b", "8xh100", "--attention", "flash_attention_2", "--json")
    by_flag = shell(*words).json
    assert by_flag["plan"]["attention"] == "fa2"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(by_flag["plan"]))
    assert (
        shell("predict", "llama3.2-1b", "8xh100", "--plan", file, "--json").json["step_time_s"]
        == (by_flag["step_time_s"])
    )
    assert by_flag["step_time_s"] > predict(MODEL, "8xh100").step_time_s, "Hopper's kernel is faster"
    refused = shell("predict", "llama3.2-1b", "8xv100", "--plan", file)
    assert refused.code == 2 and "plan.json" in refused.err


@pytest.mark.parametrize("framework", ["hf", "ddp"])
def test_a_window_saves_nothing_where_torch_is_told_of_it_by_a_mask(framework):
    """Shorter sequences than the window have no mask; flash attention itself knows windows."""
    options = {"framework": framework, "micro_batch": 1, "global_batch": 1}

    def found(seq, **more):
        return predict("gemma-3-1b", "1xh100-sxm", seq=seq, **options, **more)

    longer = [(found(seq).step_time_s, found(seq, attention="fa2").step_time_s) for seq in (4096, 8192)]
    assert all(masked > 1.005 * known for masked, known in longer)
    assert longer[1][0] - longer[1][1] > 3 * (longer[0][0] - longer[0][1])  # scores grow by the square
    assert found(4096).memory.peak_bytes > found(4096, attention="fa2").memory.peak_bytes
    assert found(256).memory.peak_bytes == found(256, attention="fa2").memory.peak_bytes
    assert any("as a mask" in line for line in found(4096).assumptions)


def test_under_a_mask_ampere_runs_the_memory_efficient_kernel():
    """Flash attention 2 takes no mask, cuDNN does; layers without a window keep theirs."""
    options = {"framework": "hf", "zero": 3, "seq": 8192}

    def taken(device, **more):
        return predict("mistral-7b", f"1x8x{device}", **options, **more).step_time_s

    assert taken("a100-sxm-80gb") == pytest.approx(taken("a100-sxm-80gb", attention="efficient"), rel=1e-3)
    assert taken("h100-sxm") < 0.6 * taken("a100-sxm-80gb")
    gemma = [
        predict("gemma-3-1b", "1x8xa100-sxm-80gb", **options, **more).step_time_s
        for more in ({}, {"attention": "efficient"})
    ]
    assert gemma[0] < gemma[1]


def test_a_search_takes_the_kernel_that_was_chosen():
    found = plan(MODEL, "8xh100", global_batch=8, seq=2048, attention="fa2", budget_s=2, pp=1)
    best = found.plans[0]
    assert best.plan.attention == "fa2"
    assert predict(MODEL, "8xh100", best.plan).step_time_s == pytest.approx(best.prediction.step_time_s)


@pytest.mark.parametrize(
    ("framework", "cluster", "stack"),
    [
        ("megatron-core", "1x4xtpu-v5p", "MaxText"),
        ("torchtitan", "1x16xtrainium-2", "NeuronX Distributed"),
        ("megatron-core", "8xgaudi-2", "Intel's fork of DeepSpeed"),
        ("nemo", "8xmi300x", "AMD's Primus on Megatron-LM"),
    ],
)
def test_a_pair_that_does_not_exist_is_warned_of_with_what_runs(shell, framework, cluster, stack):
    answer = shell("predict", "llama3.2-1b", cluster, "--framework", framework, "--json")
    assert answer.code == 0 and f"warning: {load_framework(framework).label} does not run on" in answer.err
    assert stack in answer.err
    assert any(stack in said for said in answer.json["assumptions"])


def test_pairs_that_exist_are_not_warned_of():
    for framework, device in (
        ("megatron-core", "h100-sxm"),
        ("megatron-core", "mi300x"),
        ("maxtext", "tpu-v5p"),
        ("deepspeed", "gaudi-2"),
    ):
        assert not stack_warnings(load_framework(framework), [resolve_device(device)])
    assert make_plan(MODEL, "8xh100").attention is None


def in_8_bit(**choices):
    return predict("gpt2", "1x2xh100-sxm", dtype="fp8", global_batch=8, **choices)


def test_an_8_bit_recipe_means_the_same_on_the_command_line_in_python_and_in_a_file(shell):
    words = ("--dtype", "fp8", "--global-batch", 8, "--fp8-recipe", "current", "--json")
    answer = shell("predict", "gpt2", "1x2xh100-sxm", *words)
    assert answer.code == 0, answer.err
    made = in_8_bit(fp8_recipe="tensorwise")
    assert answer.json["plan"]["fp8_recipe"] == "tensorwise"
    assert answer.json["step_time_s"] == pytest.approx(made.step_time_s)
    assert parse_plan(json.loads(json.dumps(made.plan.to_dict()))) == made.plan
    assert in_8_bit(fp8_recipe="delayed").step_time_s == in_8_bit().step_time_s


def test_weights_with_a_scale_a_row_are_not_gathered_in_8_bit():
    options = {"framework": "torchtitan@0.2", "zero": 3, "narrow_gather": True, "dtype": "fp8"}
    rows, tensors = (
        predict("llama3-8b", "2x8xh100-sxm", fp8_recipe=recipe, **options).time_breakdown_s["data_comm"]
        for recipe in ("rowwise", "tensorwise")
    )
    assert rows > tensors


@pytest.mark.parametrize(
    ("device", "options", "match"),
    [
        ("h100-sxm", {"fp8_recipe": "blockwise"}, "scales in bf16"),
        ("h100-sxm", {"fp8_recipe": "rowwise", "dtype": "fp8"}, "ships no rowwise"),
        ("h100-sxm", {"fp8_recipe": "delayed", "dtype": "fp8", "framework": "torchtitan"}, "ships no"),
        ("l40s", {"fp8_recipe": "blockwise", "dtype": "fp8"}, "blockwise scales on l40s"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_with_a_way_out(device, options, match):
    with pytest.raises(SpecError, match=match) as caught:
        predict("gpt2", f"1x2x{device}", **options)
    assert caught.value.key == "--fp8-recipe" and caught.value.fix


def test_a_search_keeps_the_recipe_that_was_asked_for():
    asked = {"precision": "fp8", "fp8_recipe": "blockwise", "engine": "analytical", "budget_s": 1}
    best = plan("gpt2", "1x2xh100-sxm", global_batch=8, **asked).plans[0]
    assert best.plan.fp8_recipe == "blockwise"
    again = predict("gpt2", "1x2xh100-sxm", best.plan, engine="analytical")
    assert again.step_time_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(("model", "cluster"), [("llama3-8b", "8xh100"), ("llama3-70b", "8x8xh100")])
def test_scales_per_row_make_a_large_step_clearly_longer(model, cluster):
    """Public logs of torchtitan: 20 to 40 % slower than with one scale of a tensor at large batches."""
    asked = {"framework": "torchtitan@0.2", "precision": "fp8", "micro_batch": 4, "seq_len": 8192}
    row, tensor = (
        predict(model, cluster, fp8_recipe=recipe, **asked).step_time_s
        for recipe in ("rowwise", "tensorwise")
    )
    assert 1.2 < row / tensor < 1.4
    later = predict(model, cluster, **asked | {"framework": "torchtitan@0.3"}).step_time_s
    assert 1.02 < later / tensor < row / tensor, "cuBLAS runs the products: what is left are casts"


def test_compiling_fuses_what_torch_runs_one_by_one_and_says_so():
    """Of code of transformers more than of torchtitan, whose norms are kernels; in plan files as in flags."""
    asked = {"zero": 3, "micro_batch": 1, "seq_len": 4096}
    gains = {}
    for framework in ("hf", "torchtitan"):
        plain, compiled, off = (
            predict("llama3-8b", "8xh100-sxm", framework=framework, compile=on, **asked)
            for on in (None, True, False)
        )
        assert off.step_time_s == plain.step_time_s
        gains[framework] = plain.step_time_s / compiled.step_time_s
        assert any(text.startswith("compiled (torch.compile)") for text in compiled.assumptions)
        again = parse_plan(compiled.plan.to_dict())
        assert again.compile is True
        assert predict("llama3-8b", "8xh100-sxm", again).step_time_s == compiled.step_time_s
    assert gains["hf"] > gains["torchtitan"] > 1.0
    by_default = predict("llama3-8b", "8xh100-sxm", framework="fms-fsdp", **asked)
    without = predict("llama3-8b", "8xh100-sxm", framework="fms-fsdp", compile=False, **asked)
    assert without.step_time_s > by_default.step_time_s


@pytest.mark.parametrize("cluster", ["1x2xh100-sxm", "1x1xh100-sxm+1x1xa100-sxm-80gb"])
def test_a_search_plans_what_is_compiled(cluster):
    asked = {"global_batch": 8, "framework": "hf", "compile": True, "budget_s": 1}
    best = plan("gpt2", cluster, **asked).plans[0]
    assert best.plan.compile is True
    assert predict("gpt2", cluster, best.plan).step_time_s == pytest.approx(
        best.prediction.step_time_s, rel=1e-9
    )


@pytest.mark.parametrize("framework", ["megatron-core", "maxtext"])
def test_frameworks_with_kernels_of_their_own_do_not_compile(framework):
    with pytest.raises(SpecError, match=r"torch\.compile under") as caught:
        predict("llama3-8b", "8xh100-sxm", framework=framework, compile=True)
    assert caught.value.key == "--compile"


def test_a_dispatcher_that_sends_tokens_once_a_node_is_faster_over_slow_links_and_kept_in_the_plan():
    asked = {"ep": 16, "micro_batch": 1, "global_batch": 64, "seq": 4096}
    steps = {
        name: predict("deepseek-v3", "8x8xh800-sxm", dispatcher=name, **asked)
        for name in ("allgather", "alltoall", "deepep", "hybridep")
    }
    seconds = {name: step.time_breakdown_s["expert_comm"] for name, step in steps.items()}
    assert seconds["deepep"] == seconds["hybridep"] < 0.6 * min(seconds["alltoall"], seconds["allgather"])
    assert predict("deepseek-v3", "8x8xh800-sxm", **asked).step_time_s == steps["alltoall"].step_time_s
    again = parse_plan(steps["deepep"].plan.to_dict())
    assert again.dispatcher == "deepep"
    assert predict("deepseek-v3", "8x8xh800-sxm", again).step_time_s == steps["deepep"].step_time_s


def test_a_search_plans_with_the_dispatcher_that_is_stated():
    asked = {"global_batch": 16, "seq": 2048, "ep": 8, "budget_s": 1}
    best = plan("qwen3-30b-a3b", "2x8xh100-sxm", dispatcher="deepep", **asked).plans[0]
    assert best.plan.dispatcher == "deepep"
    step_s = predict("qwen3-30b-a3b", "2x8xh100-sxm", best.plan).step_time_s
    assert step_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("cluster", "framework", "dispatcher", "words"),
    [
        ("2x8xmi300x", "megatron-core", "deepep", "deepep on mi300x"),
        ("2x8xa100-sxm-80gb", "megatron-core", "hybridep", "hybridep on a100"),
        ("2x8xh100-sxm", "hf", "deepep", "ships no deepep"),
        ("2x8xh100-sxm", "torchtitan", "allgather", "ships no allgather"),
        ("2x8xh100-sxm", "megatron-core", "flex", "Write deepep or hybridep"),
    ],
)
def test_a_dispatcher_that_does_not_run_is_refused(cluster, framework, dispatcher, words):
    for verb, more in ((predict, {}), (plan, {"budget_s": 1, "global_batch": 16})):
        with pytest.raises(SpecError, match=words) as caught:
            verb("mixtral-8x7b", cluster, framework=framework, dispatcher=dispatcher, **more)
        assert caught.value.key == "--dispatcher"
