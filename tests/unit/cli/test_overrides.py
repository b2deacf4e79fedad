"""What is set in a framework beyond the options that have a name: flag, plan file, launch script, what-if."""

import pytest

from foreshard.advise import change
from foreshard.advise.request import Request
from foreshard.api import import_plan, load_cluster, load_model, plan, predict
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import as_chosen
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.interop.exporters import export
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.framework import OVERRIDES, Overrides, checked_overrides
from foreshard.spec.plan_file import parse_plan

MODEL, CLUSTER = load_model("qwen3-30b-a3b"), load_cluster("2x8xh100-sxm")
ASKED = {"ep": 8, "micro_batch": 1, "global_batch": 32, "seq": 2048}


def run(**overrides):
    return predict(MODEL, CLUSTER, overrides=overrides, **ASKED)


def test_dtypes_of_states_take_their_bytes_and_no_more():
    own, grads = run(), run(grad_bytes="bf16", grad_reduce_bytes=2)
    parts = {name: getattr(own.memory, name) for name in ("peak_bytes",)}
    assert grads.memory.peak_bytes < parts["peak_bytes"]
    assert run(moment_bytes="bf16").memory.peak_bytes < parts["peak_bytes"]
    assert run(master_bytes=2).memory.peak_bytes < parts["peak_bytes"]
    assert run(grad_bytes=4, moment_bytes="fp32").memory == own.memory


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_gradients_of_wide_weights_are_wide(precision):
    """Frameworks whose gradients have 16 bit in runs of 16 bit halved those of fp32 too."""
    narrow = [load_framework(table["name"]) for table in shipped("frameworks.toml")["framework"]]
    narrow = [own for own in narrow if own.grad_bytes < 4]
    plan = plan_from_degrees(MODEL.num_layers, 8, seq_len=64, precision=precision)
    made = [as_chosen(own, plan, model=MODEL, devices=CLUSTER.devices) for own in narrow]
    assert narrow and all(min(own.grad_bytes, own.grad_reduce_bytes) >= 4 for own in made)


def test_narrow_moments_leave_half_of_the_master_weight():
    """Megatron's store_param_remainders, which is on: the bf16 weight is the other half."""
    asked = {"framework": "megatron-core", "seq": 2048, "recompute": "full"}

    def states(dtype="bf16", **overrides):
        made = predict(load_model("llama3.2-1b"), CLUSTER, dtype=dtype, overrides=overrides, **asked)
        return made.memory.breakdown_bytes["optimizer"] / load_model("llama3.2-1b").num_params * 16

    assert states() == pytest.approx(12.0, rel=0.01)
    assert states(moment_bytes=2) == pytest.approx(6.0, rel=0.01)
    assert states(moment_bytes=2, master_bytes=4) == pytest.approx(8.0, rel=0.01)
    assert states("fp16", moment_bytes=2) == pytest.approx(8.0, rel=0.01)
    assert states("fp8", moment_bytes=2, fp8_params=True) == pytest.approx(8.0, rel=0.01)


def test_what_a_framework_does_by_itself_changes_nothing():
    own = run()
    stated = run(grad_bytes=4, cuda_graphs="none", grouped_gemm=True, routing="learned", cross_entropy="te")
    assert stated.step_time_s == own.step_time_s
    assert run(cuda_graphs="full").step_time_s < own.step_time_s < run(grouped_gemm="off").step_time_s
    assert run(routing="balanced").step_time_s < own.step_time_s < run(cross_entropy="unfused").step_time_s


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_layers_kept_in_16_bit_cost_what_they_do_in_16_bit(precision):
    """Experts, dense products and casts; what stays narrow is the step with no such layer."""

    def compute_s(dtype, **overrides):
        made = predict(MODEL, load_cluster("8xb200-sxm"), dtype=dtype, overrides=overrides, **ASKED)
        return made.time_breakdown_s["compute"], made.memory.breakdown_bytes["activations"]

    narrow, some, whole = (compute_s(precision, wide_last=count) for count in (0, 12, MODEL.num_layers))
    assert whole == pytest.approx(compute_s("bf16"), rel=0.02)
    share = 12 / MODEL.num_layers
    for value, low, high in zip(some, narrow, whole, strict=True):
        assert value == pytest.approx(low + share * (high - low), rel=1e-6)


def test_a_plan_keeps_its_settings():
    made = run(cuda_graphs="full", grad_bytes=2)
    again = parse_plan(made.plan.to_dict())
    assert again.overrides == Overrides(cuda_graphs="full", grad_bytes=2)
    assert predict(MODEL, CLUSTER, again).step_time_s == made.step_time_s
    best = plan(MODEL, CLUSTER, global_batch=32, seq=2048, overrides=["cuda_graphs=full"], budget_s=1).plans[
        0
    ]
    assert best.plan.overrides == Overrides(cuda_graphs="full")
    step_s = predict(MODEL, CLUSTER, best.plan).step_time_s
    assert step_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)


def test_what_if_changes_one_setting_and_keeps_the_others():
    request = Request(model=MODEL, cluster=CLUSTER, choices={"ep": 8, "overrides": ["grad_bytes=2"]})
    changed = change.apply(request, "cuda-graphs=full").to_plan()
    assert changed.overrides == Overrides(grad_bytes=2, cuda_graphs="full")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grad_bytes=3", "grad_bytes is one of 2, 4, 6. Leave it out"),
        ("cuda_graphs=ful", "one of none, partial, full. Did you mean 'full'"),
        ("fp8_params=2", "one of on, off"),
        ("wide_last=-1", "a number of layers from 0"),
        ("grads=2", "unknown override"),
        ("clips", "KEY=VALUE"),
    ],
)
def test_a_setting_that_is_wrong_says_what_it_may_be(text, words):
    with pytest.raises(SpecError, match=words):
        checked_overrides([text])
    with pytest.raises(SpecError, match=words):
        checked_overrides(text)


def test_a_setting_that_is_wrong_is_named_where_it_was_written():
    with pytest.raises(SpecError, match="overrides 3"):
        checked_overrides(3)
    request = Request(model=MODEL, cluster=CLUSTER, choices={"ep": 8})
    with pytest.raises(SpecError, match=r"^--change grad-bytes: grad_bytes '3'"):
        change.apply(request, "grad-bytes=3")
    data = run().plan.to_dict() | {"overrides": {"grad_bytes": "bf16"}}
    with pytest.raises(SpecError, match=r"plan\.json: overrides\.grad_bytes: 'bf16' is not valid"):
        parse_plan(data, file="plan.json")


def test_every_setting_is_a_field_of_a_framework_with_the_same_values():
    from foreshard.catalog.frameworks import CHOICES, frameworks

    for framework in frameworks():
        for name in OVERRIDES:
            own = getattr(framework, name)
            assert checked_overrides({name: own}).stated() == {name: own}, (framework.label, name)
    for name in set(OVERRIDES) & set(CHOICES):
        for word in CHOICES[name]:
            assert checked_overrides({name: word}).stated() == {name: word}


SCRIPT = """torchrun pretrain_gpt.py --num-layers 48 --num-experts 128 --expert-model-parallel-size 8 \\
  --micro-batch-size 1 --global-batch-size 32 --seq-length 2048 --use-distributed-optimizer """


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        ("--bf16", {"cross_entropy": "unfused", "grouped_gemm": False}),
        (
            "--fp16",
            {"cross_entropy": "unfused", "grouped_gemm": False, "grad_bytes": 2, "grad_reduce_bytes": 2},
        ),
        (
            "--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --moe-grouped-gemm "
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
            "--cuda-graph-impl full_iteration",
            {"moment_bytes": 2, "cuda_graphs": "full"},
        ),
        (
            "--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --moe-grouped-gemm "
            "--use-precision-aware-optimizer --main-grads-dtype bf16 --fp8-param-gather",
            {"grad_bytes": 2, "grad_reduce_bytes": 2},
        ),
        (
            "--bf16 --cross-entropy-loss-fusion --moe-grouped-gemm --grad-reduce-in-bf16 --enable-cuda-graph "
            "--cuda-graph-scope attn",
            {"cross_entropy": "native", "grad_bytes": 2, "grad_reduce_bytes": 2, "cuda_graphs": "partial"},
        ),
    ],
)
def test_settings_of_a_launch_script(tmp_path, flags, overrides):
    script = tmp_path / "pretrain.sh"
    script.write_text(SCRIPT + flags + "\n")
    made, _ = import_plan(str(script), "megatron", MODEL, CLUSTER)
    assert made.overrides.stated() == overrides


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--main-params-dtype fp8", "--main-params-dtype: 'fp8' is not valid"),
        ("--exp-avg-dtype bf16", "--exp-avg-sq-dtype: no plan expresses moments of two widths"),
    ],
)
def test_states_of_a_launch_script_that_no_plan_has_are_refused(tmp_path, flags, words):
    script = tmp_path / "pretrain.sh"
    script.write_text(f"{SCRIPT} --bf16 --use-precision-aware-optimizer {flags}\n")
    with pytest.raises(SpecError, match=words):
        import_plan(str(script), "megatron", MODEL, CLUSTER)


@pytest.mark.parametrize(
    ("precision", "overrides"),
    [
        ("bf16", {}),
        ("bf16", {"grad_bytes": 2, "grad_reduce_bytes": 2}),
        ("fp16", {"grad_bytes": 2, "grad_reduce_bytes": 2}),
        (
            "bf16",
            {"moment_bytes": 2, "cuda_graphs": "full", "cross_entropy": "native", "routing": "balanced"},
        ),
        ("bf16", {"moment_bytes": 1, "master_bytes": 2}),
        ("fp8", {"cross_entropy": "unfused", "fp8_params": True, "wide_first": 0, "wide_last": 4}),
    ],
)
def test_settings_are_written_for_megatron_and_read_back(tmp_path, precision, overrides):
    made = predict(MODEL, CLUSTER, overrides=overrides, precision=precision, **ASKED).plan
    script = tmp_path / "megatron_args.sh"
    script.write_text(export(made, "megatron", model=MODEL, cluster=CLUSTER).text)
    again, _ = import_plan(str(script), "megatron", MODEL, CLUSTER)
    assert again.overrides.stated() == {"cross_entropy": "native"} | overrides


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"grad_bytes": 2}, "grad_bytes 2 and grad_reduce_bytes 4"),
        ({"grad_bytes": 6}, "grad_bytes 6"),
        ({"cuda_graphs": "partial"}, "cuda_graphs partial"),
        ({"routing": "dropped"}, "routing dropped"),
        ({"cross_entropy": "chunked"}, "cross_entropy chunked"),
        ({"cross_entropy": "te"}, "no more te"),
        ({"clips": True}, "clips on"),
    ],
)
def test_settings_that_no_flag_of_megatron_makes_are_refused(overrides, words):
    with pytest.raises(SpecError, match=words):
        export(run(**overrides).plan, "megatron", model=MODEL, cluster=CLUSTER)


def test_settings_are_written_for_torchtitan_or_refused():
    model = load_model("llama3-8b")

    def written(**overrides):
        made = predict(model, CLUSTER, framework="torchtitan", overrides=overrides).plan
        return export(made, "torchtitan", model=model, cluster=CLUSTER).text

    assert "disable_cuda_graphs=True" in written(cuda_graphs="none")
    assert "disable_cuda_graphs=False" in written(cuda_graphs="full")
    for overrides in ({"moment_bytes": 2}, {"cuda_graphs": "partial"}):
        with pytest.raises(SpecError, match=next(iter(overrides))):
            written(**overrides)


DENSE = load_model("llama3-8b")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dispatcher": "deepep"}, "--dispatcher: dispatcher deepep for llama3-8b, which has no experts"),
        ({"overrides": {"grouped_gemm": False}}, "--set: grouped_gemm False for llama3-8b"),
        ({"overrides": {"routing": "balanced"}}, "--set: routing balanced for llama3-8b"),
        ({"overrides": {"fp8_params": True}}, "--set: fp8_params in bf16"),
    ],
)
def test_what_would_change_nothing_is_refused(choices, words):
    with pytest.raises(SpecError, match=words):
        predict(DENSE, CLUSTER, **choices)
    with pytest.raises(SpecError, match=words):
        plan(DENSE, CLUSTER, global_batch=32, **choices)
