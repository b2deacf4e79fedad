import json
import os

import pytest

from foreshard import api
from foreshard.errors import Terminated

pytestmark = pytest.mark.usefixtures("stand_in")

RUN = ("predict", "llama3-8b", "2x8xh100-sxm", "--tp", "2", "--pp", "2")


def test_json_is_the_whole_answer_and_nothing_else_is_on_stdout(shell, tmp_path):
    answer = shell(
        *RUN,
        "--json",
        "-o",
        tmp_path / "out.json",
        "--report",
        tmp_path / "r.html",
        "--trace",
        tmp_path / "t.json.gz",
    )
    assert answer.code == 0
    assert answer.json["schema_version"] == 1
    assert json.loads((tmp_path / "out.json").read_text()) == answer.json
    assert str(tmp_path / "r.html") in answer.err and str(tmp_path / "t.json.gz") in answer.err


def test_piped_text_has_headline_parts_and_footer(shell):
    text = shell(*RUN).out
    for words in (
        "llama3-8b on 2x8xh100-sxm",
        "Step  ",
        "Where the time goes",
        "What would help",
        "assumptions",
    ):
        assert words in text
    assert "\x1b[" not in text


def test_explain_lists_formulas_and_assumptions(shell):
    text = shell(*RUN, "--explain").out
    assert "sum of its parts" in text and "every rank alike" in text


def test_defaults_are_those_of_the_contract(shell):
    plan = shell("predict", "llama3-8b", "2x8xh100-sxm", "--tp", "2", "--pp", "2", "--json").json["plan"]
    group, stage = plan["groups"][0], plan["groups"][0]["stages"][0]
    assert plan["global_batch"] == 4 * 2 and plan["seq_len"] == 8192 and plan["framework"] == "megatron-core"
    assert stage["zero"] == 1 and stage["recompute"] == "none" and group["sp"] is True
    assert group["micro_batch"] == 4, "micro-batch 1 on each of 4 data-parallel ranks"


def test_sequence_parallel_is_off_without_tensor_parallel(shell):
    assert shell("predict", "llama3-8b", "2x8xh100-sxm", "--json").json["plan"]["groups"][0]["sp"] is False


def test_plan_file_and_flags_say_the_same(shell, tmp_path):
    by_flags = shell(*RUN, "--json").json
    (tmp_path / "plan.json").write_text(json.dumps(by_flags["plan"]))
    by_file = shell("predict", "llama3-8b", "2x8xh100-sxm", "--plan", tmp_path / "plan.json", "--json").json
    said = by_flags.pop("assumptions"), by_file.pop("assumptions")
    assert by_file == by_flags
    assert any("--seq" in text for text in said[0]) and not any("not stated" in text for text in said[1])


def test_a_plan_together_with_degrees_is_refused(shell, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(shell(*RUN, "--json").json["plan"]))
    answer = shell(*RUN, "--plan", tmp_path / "plan.json", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] in ("--tp", "--pp")


def test_what_does_not_fit_prints_its_object_and_exits_3(shell):
    answer = shell("predict", "llama3-70b", "1x1xh100-sxm", "--json")
    assert answer.code == 3
    assert answer.json["memory"]["fits"] is False
    infeasible = answer.json["infeasible"]
    assert (
        infeasible["over_bytes"]
        == answer.json["memory"]["peak_bytes"] - answer.json["memory"]["capacity_bytes"]
    )
    assert infeasible["nearest_peak_bytes"] <= answer.json["memory"]["capacity_bytes"]
    for words in ("rank 0", "GiB more than", infeasible["nearest_change"]):
        assert words in answer.err


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (("predict", "llama3-8b", "2x8xh100-sxn"), "device"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--tp", "three"), "--tp"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--tp", "9" * 5000), "--tp"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--tokens", "nan"), "--tokens"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--tokens", "inf"), "--tokens"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--seq", "-5"), "--seq"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--tp", "3"), "--tp/--pp/--cp"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--tpp", "3"), "--tpp"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--recompute", "some"), "--recompute"),
        (("predict", "llama3-8b", "2x8xh100-sxm", "--schedule", "2f2b"), "--schedule"),
        (("predict", "llama3-8b"), "cluster"),
        (("predict", "no-such-model", "2x8xh100-sxm"), "model"),
        (("predicted",), "verb"),
    ],
)
def test_bad_input_exits_2_and_names_the_key(shell, args, key):
    answer = shell(*args, "--json")
    assert answer.code == 2
    assert set(answer.json) == {"schema_version", "error"}
    error = answer.json["error"]
    assert error["code"] == 2 and (error["key"] or "").lower() == key
    assert {"file", "value", "rule", "fix"} <= set(error)
    assert "Traceback" not in answer.err and answer.err.startswith("foreshard: ")


def test_a_fault_of_ours_is_short_and_exits_1(shell, monkeypatch):
    import foreshard.predict as place

    def broken(*args, **asked):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(place, "predict", broken)
    answer = shell(*RUN, "--json")
    assert answer.code == 1 and answer.json["error"]["code"] == 1
    assert "Traceback" not in answer.err and "FORESHARD_DEBUG" in answer.err
    monkeypatch.setenv("FORESHARD_DEBUG", "1")
    assert "Traceback" in shell(*RUN).err


@pytest.mark.parametrize(("signal", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_signals_exit_with_their_code(shell, monkeypatch, signal, code):
    import foreshard.predict as place

    def interrupted(*args, **asked):
        raise signal

    monkeypatch.setattr(place, "predict", interrupted)
    assert shell(*RUN).code == code


def test_unwritable_output_is_the_users_error(shell):
    answer = shell(*RUN, "--json", "--report", "/no/such/folder/r.html")
    assert answer.code == 2 and answer.json["error"]["file"] == "/no/such/folder/r.html"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_the_systems_fault(shell):
    answer = shell(*RUN, "--json", "-o", "/dev/full")
    assert answer.code == 1 and answer.json["error"]["file"] == "/dev/full" and "Make room" in answer.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", "1 fT"), "Write it like 2e9 or 2B"),
        (("--dtype", "e4m3"), "Did you mean 'fp8'?"),
        (("--vpp", "4"), "without a pipeline"),
        (("--schedule", "interleaved", "--pp", "2"), "Give --vpp 2 or more"),
        (("--framework", "lightning"), "torchtitan (FSDP2), deepspeed or ddp"),
        (("--schedule", "chimera"), "Must be one of gpipe, 1f1b, interleaved, zb-h1"),
        (("--lora", "16:x"), "q, k, v, o"),
        (("--ep", "3"), "1, 2, 4, 8"),
    ],
)
def test_mistakes_lead_somewhere(shell, args, words):
    answer = shell("predict", "llama3-8b", "1x8xh100-sxm", *args, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == args[0]
    assert words in answer.err and "?." not in answer.err


@pytest.mark.parametrize(
    ("written", "meant"), [("BF16", "bf16"), ("bfloat16", "bf16"), ("half", "fp16"), ("NVFP4", "nvfp4")]
)
def test_a_precision_in_another_spelling_is_the_same_run(shell, written, meant):
    by_flag = shell("predict", "llama3-8b", "1x8xb200-sxm", "--json", "--dtype", written).json
    assert by_flag["plan"]["precision"] == meant
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("1x8xb200-sxm")
    for name in (written, meant):
        assert api.predict(model, cluster, precision=name).step_time_s == by_flag["step_time_s"]


def test_words_of_elsewhere_are_the_same_run(shell):
    ours = shell(
        *("predict", "llama3.1-8b", "2x8xh100-sxm@3200Gb/s", "--tp", "2", "--micro-batch", "2"),
        *("--global-batch", "64", "--seq", "8192", "--tokens", "2e9", "--json"),
    )
    theirs = shell(
        *(
            "predict",
            "meta-llama/Llama-3.1-8B",
            "2x8xH100@400Gb/s/gpu",
            "--tensor-parallel",
            "2",
            "--mbs",
            "2",
        ),
        *("--gbs", "64", "--seqlen", "8k", "--tokens", "2B", "--json"),
    )
    assert ours.code == theirs.code == 0
    for key in ("step_time_s", "plan", "cost", "run_time_s", "model"):
        assert ours.json[key] == theirs.json[key]


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--activation-checkpointing", "--recompute full"),
        ("--batch_size", "--global-batch"),
        ("--num-gpus", "CLUSTER"),
        ("--fsdp", "--framework torchtitan"),
        ("--recomputation", "--recompute"),
        ("--global-batch-tokens", "--global-batch, in samples"),
        ("--no-pp", "--pp 1"),
        ("--memory-margin", "an option of 'foreshard plan'"),
        ("--wibble", "foreshard predict --help"),
    ],
)
def test_a_flag_of_elsewhere_leads_to_ours(shell, flag, ours):
    answer = shell("predict", "llama3-8b", "8xh100", flag, "8")
    assert answer.code == 2 and ours in answer.err


def test_an_option_is_near_by_its_letters_not_by_its_dashes(shell):
    assert "'--optimizer'" in shell("predict", "gpt2", "8xh100", "--optimiser", "adam").err
    assert "Did you mean" not in shell("predict", "gpt2", "8xh100", "--quilt", "2").err


def test_help_and_version_are_words_too(shell):
    assert shell("help", "predict").out == shell("predict", "--help").out
    assert shell("version").out == shell("--version").out


def test_cpu_offload_is_what_the_framework_calls_so(shell):
    run = ("predict", "llama3-8b", "8xh100", "--tp", "2", "--json", "--offload")
    assert (
        shell(*run, "cpu", "--framework", "deepspeed").json["plan"]
        == (shell(*run, "optimizer", "--framework", "deepspeed").json["plan"])
    )
    refused = shell(*run, "cpu", "--framework", "ddp")
    assert refused.code == 2 and "has no switch of that name" in refused.err


def test_a_rate_far_from_every_instance_is_warned_of(shell):
    doubted = shell("predict", "llama3-8b", "2x8xh100@400Gb/s", "--tp", "8", "--json")
    assert "50 Gb/s per device, where instances have 75 to 400" in doubted.err
    assert any("400Gb/s/gpu" in line for line in api.load_cluster("2x8xh100@400Gb/s").assumptions)
    assert not shell("predict", "llama3-8b", "2x8xh100@400Gb/s/gpu", "--tp", "8", "--json").err


def test_what_breaks_a_rule_in_a_plan_file_names_the_file(shell, tmp_path):
    plan = shell(*RUN, "--json").json["plan"]
    plan["groups"][0]["share"] += 1
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    error = shell("predict", "llama3-8b", "2x8xh100-sxm", "--plan", path, "--json").json["error"]
    assert error["file"] == str(path) and error["key"].startswith("groups")
    path.write_text(json.dumps(plan | {"framework": "megatrn"}))
    error = shell("predict", "llama3-8b", "2x8xh100-sxm", "--plan", path, "--json").json["error"]
    assert error["file"] == str(path) and error["key"] == "framework"


def test_switches_and_adapters_from_flags_variables_and_files(shell, tmp_path, monkeypatch):
    assert shell(*RUN, "--tp-overlap", "--no-grad-overlap", "--json").json["plan"]["comm"] == {
        "tp_overlap": True,
        "grad_overlap": False,
    }
    path = tmp_path / "c.toml"
    path.write_text('tp-overlap = true\nlora = "8"\n')
    answer = shell(*RUN, "--config", path, "--json").json
    assert answer["plan"]["comm"] == {"tp_overlap": True} and "LoRA r8" in answer["model"]
    monkeypatch.setenv("FORESHARD_TP_OVERLAP", "false")
    assert shell(*RUN, "--config", path, "--json").json["plan"]["comm"] == {"tp_overlap": False}


def test_help_lists_the_examples_and_what_is_modelled(shell):
    text = shell("predict", "--help").out
    assert "\\b" not in text and "\n  foreshard predict llama3-8b" in text
    assert "dualpipe" in text and "--tp-overlap / --no-tp-overlap" in text


@pytest.mark.parametrize(
    ("framework", "rule"), [("torchtitan", "selective:op"), ("megatron-core", "selective:core_attn")]
)
def test_selective_in_a_plan_file_is_what_the_framework_means_by_it(tmp_path, framework, rule):
    plan = api.make_plan("llama3-8b", "1x8xh100-sxm", framework=framework, zero=1).to_dict()
    for group in plan["groups"]:
        group["recompute"] = "selective"
        for stage in group["stages"]:
            stage.pop("recompute", None)
    plan.setdefault("defaults", {}).pop("recompute", None)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert {stage.recompute for stage in api.load_plan(str(path)).groups[0].stages} == {rule}
