"""`validate` on a table made here: a run that never was, so that only the plumbing is tested."""

import pytest

HEADER = (
    "id,source,url_or_repo_path,quality,model,n_layers,hidden,ffn_hidden,n_heads,n_kv_heads,vocab,seq_len,n_experts,"
    "topk,gated_mlp,gpu,gpus,gpus_per_node,intra_link,inter_link,framework,dtype,dp,tp,pp,vpp,cp,ep,sp,"
    "zero_stage_or_fsdp,micro_batch,global_batch,act_recompute,flash_attention,metric_step_time_s,"
    "metric_tokens_per_s_per_gpu,metric_tflops_per_gpu,metric_mfu,metric_peak_memory_gb,notes"
)


@pytest.fixture
def table(tmp_path):
    names = HEADER.split(",")
    stated = {
        "source": "made up",
        "quality": "A",
        "n_layers": "24",
        "hidden": "2048",
        "ffn_hidden": "8192",
        "n_heads": "16",
        "n_kv_heads": "16",
        "vocab": "51200",
        "seq_len": "2048",
        "gated_mlp": "False",
        "gpu": "A100-SXM-80GB",
        "gpus": "8",
        "gpus_per_node": "8",
        "framework": "Megatron-LM",
        "dtype": "bf16",
        "dp": "8",
        "tp": "1",
        "pp": "1",
        "micro_batch": "4",
        "global_batch": "64",
        "act_recompute": "none",
    }
    rows = [
        stated | {"id": "made_up-1", "metric_step_time_s": "1.5"},
        stated | {"id": "made_up-2", "gpu": "unstated"},
    ]
    path = tmp_path / "llm_made_up.csv"
    path.write_text(
        "\n".join([HEADER, *(",".join(row.get(name, "") for name in names) for row in rows)]) + "\n"
    )
    return path


def test_rows_and_scores(shell, table):
    answer = shell("validate", table, "--engine", "analytical", "--json")
    assert answer.code == 0 and answer.json["schema_version"] == 1
    good, bad = answer.json["rows"]
    assert good["status"] == "ok" and good["measured_s"] == 1.5 and good["predicted_s"] > 0
    low, high = good["interval_s"]
    assert low <= good["predicted_s"] <= high
    assert bad["status"] == "skipped" and bad["reason"]
    error = abs(good["predicted_s"] - 1.5) / 1.5
    overall = answer.json["summary"]["overall"]
    assert overall["mape"] == pytest.approx(error)
    assert answer.json["summary"]["by_family"].keys() == {"made_up"}


def test_text_has_scores_and_reasons(shell, table):
    text = shell("validate", table, "--engine", "analytical").out
    assert "made_up" in text and "Skipped" in text


def test_worse_than_allowed_exits_5_and_prints_its_object(shell, table):
    assert shell("validate", table, "--engine", "analytical", "--max-mape", "50", "--json").code == 0
    answer = shell("validate", table, "--engine", "analytical", "--max-mape", "0.001", "--json")
    assert answer.code == 5 and answer.json["rows"] and "0.001" in answer.err


def test_a_bare_name_is_found_among_the_measurements(shell, table, monkeypatch):
    monkeypatch.setenv("FORESHARD_MEASURED", str(table.parent))
    assert shell("validate", table.name, "--engine", "analytical", "--json").code == 0


@pytest.mark.parametrize("args", [("no-such.csv",), (), ("{table}", "--exclude-calibration", "nobody")])
def test_bad_input_exits_2(shell, table, args):
    answer = shell("validate", *(str(arg).format(table=table) for arg in args), "--json")
    assert answer.code == 2 and "error" in answer.json


def test_a_table_of_something_else_exits_2(shell, tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("fruit,price\napple,1\n")
    assert shell("validate", path, "--json").code == 2


@pytest.mark.parametrize("name", ["/dev/full", "a" * 300 + ".csv"])
def test_a_file_without_an_end_and_a_name_too_long_are_bad_input(name, shell):
    """The first was read for ever, the second was a fault of the operating system."""
    answer = shell("validate", name)
    assert answer.code == 2 and "cannot read the table" in answer.err


def test_steps_of_ones_own_are_predicted_as_predict_does(shell, tmp_path):
    path = tmp_path / "own.csv"
    asked = {"micro_batch": "2", "tp": "2", "seq": "2048", "framework": "torchtitan"}
    path.write_text(
        f"model,cluster,step_time_s,{','.join(asked)}\n"
        f"gpt2,1x4xrtx-3090,0.5,{','.join(asked.values())}\n"
        "gpt2,1x4xrtx-3090,0.5,,3,,\n"
    )
    fits, skipped = shell("validate", str(path), "--json").json["rows"]
    flags = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    alone = shell("predict", "gpt2", "1x4xrtx-3090", *flags, "--costs", "formula", "--json").json
    assert fits["predicted_s"] == alone["step_time_s"] and fits["family"] == "own"
    assert skipped["status"] == "skipped" and "does not divide 4 devices" in skipped["reason"]
    assert (
        shell("validate", str(path), "--exclude-calibration", "mlperf", "--json").json["rows"][0]["status"]
        == "skipped"
    )


@pytest.mark.parametrize("verb", [("validate",), ("calibrate", "--steps")])
def test_an_unknown_table_says_where_columns_are_listed(shell, tmp_path, verb):
    path = tmp_path / "own.csv"
    path.write_text("model,gpus,seconds\nllama3-8b,8,1.2\n")
    error = shell(*verb, str(path), "--json").json["error"]
    assert "model, cluster and step_time_s" in error["rule"] and "schema measured" in error["fix"]
