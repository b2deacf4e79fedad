"""The options of calibrate: names of devices come once, profiles and measured steps do not mix."""

import csv

import pytest

COLUMNS = [
    "id",
    "source",
    "url_or_repo_path",
    "model",
    "n_layers",
    "hidden",
    "ffn_hidden",
    "n_heads",
    "n_kv_heads",
    "vocab",
    "seq_len",
    "n_experts",
    "topk",
    "gated_mlp",
    "gpu",
    "gpus",
    "gpus_per_node",
    "intra_link",
    "inter_link",
    "framework",
    "dtype",
    "dp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "sp",
    "zero_stage_or_fsdp",
    "micro_batch",
    "global_batch",
    "act_recompute",
    "flash_attention",
    "metric_step_time_s",
    "metric_tokens_per_s_per_gpu",
    "metric_tflops_per_gpu",
    "metric_mfu",
    "metric_peak_memory_gb",
    "quality",
    "check",
    "notes",
]
RUN = {
    "model": "Llama-2-7B",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "11008",
    "n_heads": "32",
    "n_kv_heads": "32",
    "vocab": "32000",
    "gated_mlp": "True",
    "gpu": "A100-SXM-80GB",
    "gpus": "8",
    "gpus_per_node": "8",
    "intra_link": "NVLink",
    "framework": "Megatron-Core",
    "dtype": "BF16",
    "pp": "1",
    "vpp": "1",
    "cp": "1",
    "ep": "1",
    "sp": "True",
    "zero_stage_or_fsdp": "distributed optimizer (ZeRO-1)",
    "global_batch": "32",
    "act_recompute": "none",
    "flash_attention": "True",
    "quality": "A",
    "check": "ok",
}


@pytest.fixture
def table(tmp_path):
    """Twelve steps of one family, one of another."""
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="")
        writer.writeheader()
        for i in range(12):
            seq, tp, micro_batch = (2048, 4096)[i % 2], (1, 2, 4)[i % 3], (1, 2)[i // 6]
            parts = {"seq_len": seq, "tp": tp, "dp": 8 // tp, "micro_batch": micro_batch}
            time = {"metric_step_time_s": 0.7e-3 * seq * (1 + 0.05 * tp)}
            writer.writerow(RUN | parts | time | {"id": f"mine-{i}"})
        writer.writerow(RUN | parts | time | {"id": "theirs-0"})
    return path


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--profile", "a=x.json", "--profile", "a=y.json"), "--profile"),
        (("--profile", "x.json", "--profile", "y.json"), "--profile"),
        (("--profile", "x.json", "--device", "a", "--device", "a=2"), "--device"),
    ],
)
def test_a_device_that_is_given_twice_is_refused(words, key, shell):
    answer = shell("calibrate", *words, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key and "twice" in answer.json["error"]["what"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((), "--profile"),
        (("--steps", "a.csv", "--profile", "b.json"), "--profile"),
        (("--steps", "a.csv", "--clock", "cpu"), "--clock"),
        (("--profile", "b.json", "--family", "mine"), "--family"),
        (("--steps", "profile.json"), "--steps"),
    ],
)
def test_options_of_profiles_and_of_steps_do_not_mix(words, key, shell):
    answer = shell("calibrate", *words, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key


def test_steps_of_a_table_become_constants_that_predict_takes(table, tmp_path, shell):
    costs, page = tmp_path / "costs.json", tmp_path / "report.html"
    answer = shell(
        "calibrate",
        "--steps",
        str(table),
        "--family",
        "mine",
        "--report",
        str(page),
        "-o",
        str(costs),
        "--json",
    )
    assert answer.code == 0, answer.err
    assert answer.json["steps"] == 12 and answer.json["devices"] == ["a100-sxm-80gb"]
    assert [shot["steps"] for shot in answer.json["curve"]] == [0, 1, 2, 4]
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1 and "Error against measured steps" in text
    run = ("predict", "llama2-7b", "1x8xa100-sxm-80gb", "--tp", "2", "--costs", str(costs), "--json")
    made = shell(*run)
    assert made.code == 0 and made.json["fidelity"] == "calibrated"
    other = shell("predict", "llama2-7b", "1x8xh100", "--costs", str(costs), "--json")
    assert other.code == 2 and other.json["error"]["key"] == "devices"


def test_steps_of_several_families_need_a_name(table, shell):
    answer = shell("calibrate", "--steps", str(table), "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--family"
    assert "mine" in answer.json["error"]["what"] and "theirs" in answer.json["error"]["what"]
    odd = shell("calibrate", "--steps", str(table), "--family", "nobody", "--json")
    assert odd.code == 2 and "mine" in odd.json["error"]["rule"]
